"""Classes are abstract or final: none of the parts of a run inherits from one that can be made."""

import abc
import importlib
import inspect
import pkgutil

PARTS = ("mechanisms", "sampling", "noise", "clipping", "accounting", "federation")


def is_abstract(cls):
    """It says so, or leaves methods open, its own or its parents'."""
    return (
        inspect.isabstract(cls) or abc.ABC in cls.__bases__ or getattr(cls, "_is_protocol", False)
    )


def inherited(module):
    """(class, base) of every class that a module defines, but of exceptions."""
    for cls in vars(module).values():
        if inspect.isclass(cls) and cls.__module__ == module.__name__:
            yield from ((cls, base) for base in cls.__bases__ if not issubclass(cls, Exception))


def test_no_class_inherits_from_a_concrete_one():
    found = []
    for part in PARTS:
        package = importlib.import_module(f"dpfl_jax.{part}")
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            found += inherited(importlib.import_module(info.name))
    ours = [(cls, base) for cls, base in found if base.__module__.startswith("dpfl_jax.")]
    assert len(ours) > 40
    assert [f"{cls} inherits from {base}" for cls, base in ours if not is_abstract(base)] == []
