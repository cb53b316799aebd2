"""Options of commands, declared by a class and by keys of the configuration.

A command declares its options as annotated names of a class, which extends ``Configured`` if it
reads a configuration. Name, type, default and choices come from the annotation, help from the
section ``Attributes``. ``keys`` are keys of the configuration that are options, too: type,
choices and help then come from the schema.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import pathlib
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from dpfl_jax.buckets import address
from dpfl_jax.errors import BadInputError
from dpfl_jax.files import on_disk

SCHEMA = object()  # marks a key whose default is the schema's


@dataclasses.dataclass(frozen=True)
class Flag:
    """Properties of an option that its type does not give.

    Attributes:
      metavar: name of its value in help.
      name: name of the option, if it differs from the attribute's.
      is_positional: whether it has no ``--``; it may be left out if it has a default.
      several: whether it may be repeated.
      group: name of a group of options that exclude each other.
      parse: converts text to the value.
      choices: all allowed values.
      is_prose: whether it is text, which may begin like an address, and no path.
      in_buckets: whether it may be an address of a bucket (``buckets``).
    """

    metavar: str | None = None
    name: str | None = None
    is_positional: bool = False
    several: bool = False
    group: str | None = None
    parse: Callable[[str], Any] | None = None
    choices: Any = None
    is_prose: bool = False
    in_buckets: bool = False


class Options:
    """The options of all commands.

    Attributes:
      json: print one JSON object as the last line of stdout; everything else goes to stderr.
    """

    keys: ClassVar[Mapping[str, Any]] = {}
    lists_keys: ClassVar[bool] = False

    json: bool = False


class MayRunCode(Options):
    """The options of all commands that read a configuration.

    Attributes:
      allow_code: the configuration may name code (package.module:NAME), which is run: use it only
        for a configuration that you have read, or wrote.
    """

    allow_code: bool = False


class Configured(MayRunCode):
    """The options of commands that read one configuration file with overrides.

    Attributes:
      config: YAML configuration file.
      overrides: override any key of the configuration, e.g. train.steps=50.
    """

    config: Annotated[str, Flag("CONFIG", is_positional=True)]
    overrides: Annotated[tuple[str, ...], Flag("key=value", is_positional=True)] = ()


def add_options(parser: Any, options: type[Options]) -> None:
    """Adds the options of a class and of its base classes to a parser."""
    hints = typing.get_type_hints(options, include_extras=True)
    for owner in reversed(options.__mro__):
        words, excluding = attributes(owner), dict[str, Any]()
        for name in inspect.get_annotations(owner):
            hint = hints[name]
            if get_origin(hint) is ClassVar:
                continue
            target = parser
            if (group := _flag(hint).group) is not None:
                if group not in excluding:
                    excluding[group] = parser.add_mutually_exclusive_group()
                target = excluding[group]
            _add(target, name, hint, getattr(options, name, inspect.Parameter.empty), words[name])
    for key, default in options.keys.items():
        _add_key(parser, key, default)
    parser.lists_keys = options.lists_keys


def overrides(options: type[Options], args: argparse.Namespace) -> list[str]:
    """The options that are keys, as overrides of a configuration."""
    given = {key: getattr(args, key.rpartition(".")[2]) for key in options.keys}
    return [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]


def attributes(owner: type) -> dict[str, str]:
    """The section ``Attributes`` of a class's docstring, by name."""
    text = inspect.cleandoc(owner.__doc__ or "").partition("Attributes:\n")[2]
    result: dict[str, str] = {}
    for names, words in re.findall(r"^  (\w[\w, ]*): (.*(?:\n {4,}.*)*)", text, re.M):
        result |= dict.fromkeys(names.split(", "), " ".join(words.replace("``", "").split()))
    return result


def _flag(hint: Any) -> Flag:
    result = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Flag)]
    return result[0] if result else Flag()


def _add(parser: Any, name: str, hint: Any, default: Any, words: str) -> None:
    flag, is_required = _flag(hint), default is inspect.Parameter.empty
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = [one for one in get_args(kind) if one is not type(None)]
    given: dict[str, Any] = {"help": _with_default(words, None if is_required else default)}
    if not is_required:
        given["default"] = list(default) if isinstance(default, tuple) else default
    if kind is bool:
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=given["help"])
        return
    if get_origin(kind) is tuple and flag.parse is None:
        kind = get_args(kind)[0]
        many = {"nargs": "*" if flag.is_positional else "+"}
        given |= {"action": "append"} if flag.several else many
    if get_origin(kind) is Literal:
        given["choices"] = get_args(kind)
    else:
        if kind in (str, pathlib.Path) and not flag.is_prose:
            kind = functools.partial(_given, kind=kind, in_buckets=flag.in_buckets)
        given |= {"choices": flag.choices, "metavar": flag.metavar, "type": flag.parse or kind}
    if flag.is_positional:
        if not is_required and "nargs" not in given:
            given["nargs"] = "?"
        parser.add_argument(name, **given)
        return
    option = f"--{flag.name or name.replace('_', '-')}"
    parser.add_argument(option, dest=name, required=is_required, **given)


def _given(text: str, kind: Callable[[str], Any], in_buckets: bool) -> Any:
    """A value of the command line, if it is no address: it may be a path."""
    try:
        if not (in_buckets and address(text)):
            on_disk(text)
        return kind(text)
    except BadInputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# ---- keys of a configuration ------------------------------------------------------------------


def _sections() -> dict[str, Any]:
    """The top-level keys and their types; a section's type is its class."""
    from dpfl_jax.config import RunConfig
    from dpfl_jax.config.load import section_type

    return {name: section_type(f.annotation) for name, f in RunConfig.model_fields.items()}


def _add_key(parser: Any, key: str, default: Any) -> None:
    from pydantic import TypeAdapter, ValidationError

    from dpfl_jax.config.kinds import why
    from dpfl_jax.config.load import read_yaml, section_fields

    section, _, name = key.partition(".")
    owner = _sections()[section]
    hint, usual = section_fields(owner)[name]
    words = {k: v for one in reversed(owner.__mro__) for k, v in attributes(one).items()}[name]

    is_choice = get_origin(hint) is Literal
    is_text = is_choice or str in _alternatives(hint)

    def parse(text: str) -> Any:
        try:
            value = text if is_text else read_yaml(text, f"--{name}", one_value=True)
            return TypeAdapter(hint).validate_python(value)
        except ValidationError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {why(error)}") from None

    default = usual if default is SCHEMA else default
    words = f"{key}: {words.split('. ')[0]}"
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        type=parse,
        default=default,
        choices=get_args(hint) if is_choice else None,
        help=_with_default(words, default),
    )


def _alternatives(hint: Any) -> Iterator[Any]:
    """The types of a union, without annotations."""
    if get_origin(hint) is Annotated:
        yield from _alternatives(get_args(hint)[0])
    elif get_origin(hint) in (Union, types.UnionType):
        for one in get_args(hint):
            yield from _alternatives(one)
    else:
        yield hint


def _with_default(words: str, default: Any) -> str:
    """Help with the default appended; argparse needs percent signs doubled."""
    words = words.rstrip(".").replace("%", "%%")
    if default in (None, False, (), []) or default == "" or "default" in words:
        return words
    shown = " ".join(map(str, default)) if isinstance(default, tuple | list) else default
    return f"{words} (default {shown})"


def keys_in_words() -> str:
    """Lists all keys of a configuration by section, for help."""
    from dpfl_jax.config.load import section_fields
    from dpfl_jax.config.variants import VARIANTS, takes

    lines = ["keys of a configuration, given as section.key=value (docs/guides says what they do):"]
    sections = {name: [*section_fields(section)] for name, section in _sections().items()}
    top = [name for name, keys in sections.items() if not keys]
    lines += _wrapped("", [name for name in top if name != "mechanism"])
    lines += _wrapped("mechanism", ["kind, and its fields, or participation, clip, noise"])
    for section, keys in sections.items():
        by_variants: dict[tuple[str, ...], list[str]] = {}
        for name in keys:
            of = tuple(str(v) for v in VARIANTS if takes(v, f"{section}.{name}"))
            by_variants.setdefault(of, []).append(name)
        for of, names in by_variants.items():
            only = "" if of == VARIANTS else f" ({', '.join(of)})"
            lines += _wrapped(f"{section}{only}", names)
    return "\n".join(lines)


def _wrapped(title: str, names: list[str]) -> list[str]:
    return textwrap.wrap(
        f"{title + ':' if title else ''} {', '.join(names)}",
        width=98,
        initial_indent="  ",
        subsequent_indent="      ",
    )
