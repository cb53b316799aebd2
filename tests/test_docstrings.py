"""Overrides inherit their docstrings; everything else that is public has one of its own."""

import importlib
import inspect
import pkgutil

import dpfl_jax


def test_public_methods_have_docstrings_or_inherit_them():
    missing = []
    for module in pkgutil.walk_packages(dpfl_jax.__path__, "dpfl_jax."):
        if module.name.startswith(("dpfl_jax.flower", "dpfl_jax.__main__")):
            continue  # needs an extra
        found = importlib.import_module(module.name)
        for cls in vars(found).values():
            if not inspect.isclass(cls) or cls.__module__ != module.name:
                continue
            for name, member in vars(cls).items():
                inner = getattr(member, "func", getattr(member, "fget", member))
                inner = getattr(inner, "__func__", inner)
                if "_" in (name[0], cls.__name__[0]) or not inspect.isfunction(inner):
                    continue
                if not inspect.getdoc(getattr(cls, name)):
                    missing.append(f"{module.name}.{cls.__qualname__}.{name}")
    assert not missing
