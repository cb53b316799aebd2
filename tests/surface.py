"""The public surface as text, one line for each name, key and option.

    python -m tests.surface      writes public_surface.txt anew: on purpose, in the same commit

``docs/stability.md`` says what may change, and when.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import inspect
import pathlib
import re
import sys
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

FILE = pathlib.Path(__file__).with_name("public_surface.txt")
ROOT = FILE.parents[1]
# Where methods and properties are promised, too, and not only how an object is made.
WITH_MEMBERS = ("dpfl_jax", "dpfl_jax.accounting", "dpfl_jax.experimental")


def packages() -> Iterator[tuple[str, Any]]:
    """Packages that say in ``__all__`` what is public, each with its module."""
    for path in sorted((ROOT / "dpfl_jax").rglob("__init__.py")):
        if "__all__ = " in path.read_text():
            name = ".".join(path.parent.relative_to(ROOT).parts)
            yield name, importlib.import_module(name)


def surface() -> str:
    """The content of public_surface.txt."""
    lines = ["# Written by `python -m tests.surface`. docs/stability.md says what may change."]
    seen: list[Any] = []
    for package, module in packages():
        lines += ["", f"# {package}"]
        for name in module.__all__:
            value = getattr(module, name)
            if any(value is other for other in seen):
                lines.append(f"{name}: see above")
                continue
            seen.append(value)
            lines += _of(name, value, package in WITH_MEMBERS)
    lines += ["", "# keys of a configuration", *_keys(), "", "# command line", *_options()]
    return "\n".join(lines) + "\n"


# ---- names ---------------------------------------------------------------------------------------


def _of(name: str, value: Any, members: bool) -> Iterator[str]:
    if inspect.ismodule(value):
        yield f"{name}: module"
    elif inspect.isclass(value):
        yield f"class {name}{_signature(value)}"
        for inner, member in _members(value) if members else ():
            yield f"  {inner}{member}"
    elif callable(value):
        alias = typing.get_origin(value) is not None
        yield f"{name} = {value}" if alias else f"{name}{_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _members(kind: type) -> Iterator[tuple[str, str]]:
    """Public members that the package defines, those of bases included; fields are in __init__."""
    if issubclass(kind, enum.Enum):
        yield from ((name, "") for name in kind.__members__)
    for name in sorted(dir(kind)):
        owner = next((base for base in kind.__mro__ if name in vars(base)), object)
        if name.startswith("_") or not owner.__module__.startswith("dpfl_jax"):
            continue
        member = inspect.getattr_static(kind, name)
        if isinstance(member, classmethod | staticmethod):
            yield name, _signature(member.__func__)
        elif inspect.isfunction(member):
            yield name, _signature(member)
        elif isinstance(member, property) or hasattr(member, "func"):
            yield name, ": property"


def _signature(value: Any) -> str:
    if getattr(getattr(value, "__init__", None), "__name__", "") == "_no_init_or_replace_init":
        return "()"  # of a typing.Protocol: the first object replaces it
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    bare = inspect.Parameter.empty
    parameters = [p.replace(annotation=bare) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


# ---- keys ----------------------------------------------------------------------------------------


def _keys() -> Iterator[str]:
    from dpfl_jax.config import RunConfig, kinds

    yield from _fields("", RunConfig)
    for known in (one for one in vars(kinds).values() if isinstance(one, kinds.Kinds)):
        for name in known.names():
            maker = known[name]
            if maker.__module__.startswith("dpfl_jax."):  # a test may have brought its own
                yield f"{known.section}.kind={name}: {', '.join(kinds.options(maker))}"


def _fields(prefix: str, section: type) -> Iterator[str]:
    for name, annotation, default in _entries(section):
        inner = _section_of(annotation)
        if inner is not None:
            yield from _fields(f"{prefix}{name}.", inner)
        else:
            shown = "" if default in (PydanticUndefined, dataclasses.MISSING) else f" = {default!r}"
            yield f"{prefix}{name}: {_type(annotation)}{shown}"


def _entries(section: type) -> Iterator[tuple[str, Any, Any]]:
    """(name, type, default) of each field of a model or a dataclass."""
    if issubclass(section, BaseModel):
        for name, field in section.model_fields.items():
            made: Any = field.default_factory
            yield name, field.annotation, field.default if made is None else made()
        return
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        made = field.default_factory is not dataclasses.MISSING
        yield field.name, hints[field.name], field.default_factory() if made else field.default


def _section_of(annotation: Any) -> type | None:
    options = typing.get_args(annotation) or (annotation,)
    found = [
        one
        for one in options
        if inspect.isclass(one) and (issubclass(one, BaseModel) or dataclasses.is_dataclass(one))
    ]
    return found[0] if len(found) == 1 and set(options) <= {found[0], type(None)} else None


def _type(annotation: Any) -> str:
    text = annotation.__name__ if inspect.isclass(annotation) else str(annotation)
    return re.sub(r"(?:typing|dpfl_jax(?:\.\w+)*|collections\.abc)\.", "", text)


# ---- options -------------------------------------------------------------------------------------


def _options() -> Iterator[str]:
    from dpfl_jax.cli.main import COMMANDS, build_parser

    commands = build_parser(*COMMANDS)._subparsers._group_actions[0].choices
    for name, parser in commands.items():
        yield from _of_parser(f"dpfl {name}", parser)


def _of_parser(prefix: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _of_parser(f"{prefix} {name}", inner)
        elif not isinstance(action, argparse._HelpAction):
            called = ", ".join(action.option_strings) or action.dest
            choices = f" {{{','.join(map(str, action.choices))}}}" if action.choices else ""
            default = "" if action.default in (None, False, []) else f" = {action.default!r}"
            yield f"{prefix} {called}{choices}{default}"


if __name__ == "__main__":
    FILE.write_text(surface())
    sys.stdout.write(f"written: {FILE}\n")
