"""Reads configurations: YAML files and overrides; errors are one sentence."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ValidationError

from dpfl_jax.buckets import address
from dpfl_jax.config.schema import RunConfig
from dpfl_jax.config.variants import Variant, takes, variant_of
from dpfl_jax.data.keys import names_function
from dpfl_jax.errors import BadInputError, imported, one_line, repeated
from dpfl_jax.files import on_disk

_VARIABLE = re.compile(r"\$\{(\w+)\}")

# Keys in which `${NAME}` is replaced: the values of other keys are published with the run.
_PATHS = (
    "data.path",
    "data.chat_template",
    "data.tokenizer",
    "data.public",
    "model.checkpoint",
    "pretrain.cache_dir",
    "privacy.ledger",
    "privacy.budgets.path",
)

_IN_BUCKETS = ("data.path", "privacy.ledger")  # may be addresses (``buckets``)

_MOST_VALUES, _MOST_DEPTH = 100_000, 50


def load_config(
    path: str | os.PathLike[str], overrides: Iterable[str] = (), allow_code: bool = False
) -> RunConfig:
    """Reads, overrides and validates a configuration.

    Args:
      path: YAML file; if there is no ``configs/...`` here, the package's is read.
      overrides: ``"section.key=value"`` strings; values are YAML. ``${NAME}`` in a path
        (``_PATHS``) is replaced by the environment variable NAME, and refused anywhere else.
      allow_code: whether it may name code (``package.module:NAME``), which is imported and called:
        whoever wrote the file then decides what runs.

    Returns:
      The configuration; ``privacy.ledger``, also from an override, is relative to the folder of the
      file (not to where the command was started), and absolute here.

    Raises:
      BadInputError: for anything wrong in the file or the overrides.

    Examples:
      >>> from dpfl_jax.config import load_config
      >>> config = load_config("configs/quickstart.yaml", ["train.steps=10"])
      >>> config.train.steps
      10
    """
    file = on_disk(path)
    raw = read_sections(shipped(file))
    # The ledger of a configuration that comes with the package goes into the current folder.
    return make_config(raw, overrides, file if file.exists() else file.name, allow_code)


def shipped(file: pathlib.Path) -> pathlib.Path:
    """``configs/...`` of the package if there is no such file here (outside of a checkout)."""
    package = pathlib.Path(__file__).parents[1]
    places = [folder / file for folder in (package, package.parent)]
    if file.exists() or file.parts[:1] != ("configs",) or ".." in file.parts:
        return file
    return next((place for place in places if place.exists()), file)


def read_sections(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the sections of a file, as they are written.

    Raises:
      BadInputError: there is no such file, or it holds something else.
    """
    file = pathlib.Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInputError(f"there is no config file {file}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"the config file {file} cannot be read: {error}") from None
    raw = read_yaml(text, str(file))
    if not isinstance(raw, dict):
        raise BadInputError(f"{file} must hold a YAML mapping of sections, such as `train:`")
    _check_size(raw, str(file))
    return raw


def _check_size(raw: Mapping[str, Any], where: str) -> None:
    """Raises BadInputError for too many values: a few aliases of YAML can make terabytes."""
    left: list[tuple[Any, int]] = [(raw, 0)]
    for _ in range(_MOST_VALUES):
        if not left:
            return
        value, depth = left.pop()
        if isinstance(value, Mapping | list | tuple):
            if depth == _MOST_DEPTH or len(value) > _MOST_VALUES:
                break
            inner = value.values() if isinstance(value, Mapping) else value
            left += [(part, depth + 1) for part in inner]
    raise BadInputError(
        f"{where} holds more than {_MOST_VALUES:,} values, or more than {_MOST_DEPTH} levels: it "
        "is too large for a configuration"
    )


def make_config(
    raw: dict[str, Any],
    overrides: Iterable[str],
    file: str | os.PathLike[str],
    allow_code: bool = False,
) -> RunConfig:
    """Validates the sections of a file that exists or is going to be written.

    Args:
      raw: the sections; overrides are written into it.
      overrides: as in ``load_config``.
      file: path of the file.
      allow_code: as in ``load_config``.

    Raises:
      BadInputError: for anything wrong in the sections or the overrides.
    """
    file = pathlib.Path(file)
    for override in overrides:
        _apply_override(raw, override)
    whole = _with_full_ledger(_expand(raw, str(file)), file)
    if not allow_code:
        refuse_code(whole, str(file))
    for key, name in _code_in(whole):
        if key.startswith("mechanism."):
            imported(name, key)  # importing it registers it
    return validate_config(whole, str(file))


_ALLOW = (
    "if whoever wrote the configuration and that module may decide what runs here, add "
    "--allow-code (load_config: allow_code=True)"
)


def refuse_code(raw: Mapping[str, Any], where: str, advice: str = _ALLOW) -> None:
    """Raises BadInputError if a configuration names code, which would be run for it."""
    for key, name in _code_in(raw):
        raise BadInputError(f"{where}: {key} is {name!r}, code that would be run: {advice}")


def refuse_code_of_data(config: RunConfig, where: str) -> None:
    """Raises BadInputError if reading a run's data would run code that its configuration names."""
    refuse_code({"data": config_to_dict(config)["data"]}, where)


def _code_in(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The settings that name code, which is imported when they are used."""
    yield from _kinds_in(raw.get("mechanism"), "mechanism")
    for key in ("model.module", "data.source", "data.user_column"):
        section, name = key.split(".")
        values = raw.get(section)
        value = values.get(name) if isinstance(values, Mapping) else None
        # The name of a column may contain a colon.
        names = names_function if name == "user_column" else lambda text: ":" in text
        if isinstance(value, str) and names(value):
            yield key, value


def _kinds_in(section: Any, where: str) -> Iterator[tuple[str, str]]:
    """Kinds of a mechanism and of its parts that name code."""
    for key, value in section.items() if isinstance(section, Mapping) else ():
        if key == "kind" and isinstance(value, str) and ":" in value:
            yield f"{where}.{key}", value
        yield from _kinds_in(value, f"{where}.{key}")


def validate_config(raw: Mapping[str, Any], where: str = "the config") -> RunConfig:
    """Validates a mapping; the error names the key, and the nearest known one.

    Examples:
      >>> from dpfl_jax.config import config_to_dict, load_config, validate_config
      >>> sections = config_to_dict(load_config("configs/quickstart.yaml"))
      >>> validate_config(sections | {"name": "other"}).name
      'other'
    """
    _check_size(raw, where)
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        raise BadInputError(_one_sentence(error, raw, where)) from None
    if (key := _taken_for_number(raw, config_to_dict(config))) is not None:
        raise BadInputError(f"{where}: {key} is true or false, but it must be a number")
    return config


def _taken_for_number(raw: Any, read: Any) -> str | None:
    """The first key whose true or false became 1 or 0."""
    if isinstance(raw, bool):
        return "" if type(read) in (int, float) else None
    pairs: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(raw, Mapping) and isinstance(read, dict):
        pairs = ((key, value, read.get(key)) for key, value in raw.items())
    elif isinstance(raw, list | tuple) and isinstance(read, list):
        pairs = zip(range(len(raw)), raw, read)
    for key, value, became in pairs:
        if (inner := _taken_for_number(value, became)) is not None:
            return f"{key}.{inner}" if inner else str(key)
    return None


def config_to_dict(config: BaseModel) -> dict[str, Any]:
    """The resolved config as plain JSON/YAML types.

    Examples:
      >>> from dpfl_jax.config import config_to_dict, load_config
      >>> config_to_dict(load_config("configs/quickstart.yaml"))["mechanism"]["kind"]
      'uls'
    """
    return config.model_dump(mode="json")


def write_config(path: pathlib.Path, config: BaseModel, reason: str) -> None:
    """Writes a configuration as YAML, with ``reason`` as a comment at the top.

    Raises:
      BadInputError: it cannot be written there.
    """
    try:
        path.write_text(f"# {reason}.\n{write_yaml(config_to_dict(config))}")
    except OSError as error:
        raise BadInputError(f"cannot write {path}: {error.strerror}") from error


# `privacy.budget` is among them, so that a refused run resumes once its budget is raised.
_NOT_COMPUTED = ("name", "execution", "processes", "metrics", "sweep", "privacy.budget")
# Files that are identified by their content may move.
_MOVABLE = ("data.path", "data.public", "model.checkpoint", "pretrain.cache_dir")
# The others only set when something is written.
_OF_ONE_START = (
    *_MOVABLE,
    *(f"train.{n}" for n in ("log_every", "checkpoint_every", "keep_checkpoints")),
)


def config_fingerprint(config: RunConfig) -> str:
    """Returns 16 hex digits that identify what a run computes, whatever its name and devices.

    Examples:
      >>> from dpfl_jax.config import config_fingerprint, load_config
      >>> first = load_config("configs/quickstart.yaml")
      >>> other = load_config("configs/quickstart.yaml", ["train.steps=10"])
      >>> config_fingerprint(first) == config_fingerprint(other)
      False
    """
    text = json.dumps(_without(config_to_dict(config), _NOT_COMPUTED), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def other_run(began: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first key, in two configurations as plain JSON, that keeps a run from resuming."""
    left_out = {*_NOT_COMPUTED, *_OF_ONE_START} - {"sweep"}  # it changes what a private sweep does
    return differing_key(_without(began, left_out), _without(now, left_out))


def differing_key(mine: Any, theirs: Any, key: str = "") -> str | None:
    """The first key whose values differ; None if none does."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        names = sorted({*mine, *theirs})
        inner = (
            differing_key(mine.get(name), theirs.get(name), f"{key}.{name}".lstrip("."))
            for name in names
        )
        return next(filter(None, inner), None)
    return None if mine == theirs else key


def with_moved(began: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that a run began with, with the current paths of moved files."""
    result = dict(began)
    for key in _MOVABLE:
        section, _, name = key.partition(".")
        here, there = result.get(section), now.get(section)
        if isinstance(here, Mapping) and isinstance(there, Mapping) and name in there:
            result[section] = {**here, name: there[name]}
    return result


def _without(content: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Removes whole sections; keys in a section become null."""
    result = dict(content)
    for key in keys:
        section, _, name = key.partition(".")
        if not name:
            result.pop(section, None)
        elif isinstance(result.get(section), Mapping) and name in result[section]:
            result[section] = {**result[section], name: None}
    return result


def _with_full_ledger(raw: dict[str, Any], file: pathlib.Path) -> dict[str, Any]:
    """``raw`` with an absolute ``privacy.ledger``: one file, wherever the command is started."""
    privacy = raw.get("privacy")
    if not (isinstance(privacy, dict) and isinstance(privacy.get("ledger"), str)):
        return raw
    if address(privacy["ledger"]) is not None:
        return raw
    # Links are followed: a configuration with two names has one ledger.
    full = file.resolve().parent / os.path.expanduser(privacy["ledger"])
    return {**raw, "privacy": {**privacy, "ledger": str(full.resolve())}}


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise BadInputError(f"the override {override!r} must look like section.key=value")
    value = read_yaml(text, f"the override {override!r}", one_value=True)
    node = raw
    for part in parts[:-1]:
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise BadInputError(f"the override {override!r} goes below {part!r}, which is a value")
        node = child
    node[parts[-1]] = value


def _expand(value: Any, where: str, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: _expand(v, where, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [_expand(v, where, key) for v in value]
    if not isinstance(value, str):
        return value

    def substitute(match: re.Match[str]) -> str:
        name = match.group(1)
        if key not in _PATHS:
            raise BadInputError(
                f"{where}: {key} uses ${{{name}}}, but variables are only replaced in paths "
                f"({', '.join(_PATHS)}), as other values are published with the run: write it out"
            )
        if name not in os.environ:
            raise BadInputError(f"{where} uses ${{{name}}}, but the variable {name} is not set")
        if not os.environ[name]:
            raise BadInputError(f"{where} uses ${{{name}}}, but the variable {name} is empty")
        return os.environ[name]

    value = _VARIABLE.sub(substitute, value)
    if key in _PATHS and not (key in _IN_BUCKETS and address(value)):
        on_disk(value)
    return value


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def _one_sentence(error: ValidationError, raw: Mapping[str, Any], where: str) -> str:
    """A sentence on the first error; unknown keys come before the keys that then are missing."""
    errors = sorted(error.errors(), key=lambda one: one["type"] not in _UNKNOWN)
    first, location = errors[0], [str(part) for part in errors[0]["loc"]]
    key = ".".join(location)
    more = f" ({len(errors) - 1} more after this one)" if len(errors) > 1 else ""
    if first["type"] in _UNKNOWN:
        near, known = near_keys(location, _variant_in(raw))
        hint = f"did you mean {' or '.join(map(repr, near))}?"
        if not near:
            hint = f"known here: {', '.join(sorted(known))}"
        return f"unknown key {key!r} in {where}: {hint}{more}"
    if first["type"] == "missing":
        return f"the key {key!r} is missing from {where}{more}"
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not location or f"{key}." in message:
        return f"{where}: {message}{more}"
    given = first.get("input")
    shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool | None) else ""
    if first["type"] == "string_type":
        shown += ", which YAML does not read as text: put it in quotes"
    return f"{where}: {key}: {message}{shown}{more}"


def _variant_in(raw: Mapping[str, Any]) -> Variant | None:
    try:
        return variant_of(raw.get("mechanism"))
    except BadInputError:
        return None


def near_keys(location: list[str], variant: Variant | None) -> tuple[list[str], list[str]]:
    """Keys that an unknown key may have meant, and all keys of its section."""
    *section, name = location
    known = _keys_at(section, variant)
    places: dict[str, list[str]] = {key: [key] for key in known}
    if not section:  # it may have been given without one
        for within in known:
            for key in _keys_at([within], variant):
                if key not in known:
                    places.setdefault(key, []).append(f"{within}.{key}")
    close = difflib.get_close_matches(name, places, n=1, cutoff=0.7)
    return [place for key in close for place in places[key]], known


def _keys_at(location: list[str], variant: Variant | None) -> list[str]:
    """The keys that a variant takes in the section at ``location``; None: any variant."""
    section: Any = RunConfig
    for part in location:
        fields = getattr(section, "model_fields", {})
        if part in fields:
            section = section_type(fields[part].annotation)
    names = section_fields(section)
    return [n for n in names if variant is None or takes(variant, ".".join([*location, n][:2]))]


def section_type(annotation: Any) -> Any:
    """The class of a section, from the type of its key, which may allow None."""
    inner = [a for a in get_args(annotation) if a is not type(None)]
    return inner[0] if inner else annotation


def section_fields(section: Any) -> dict[str, tuple[Any, Any]]:
    """Type and default of each key of a section; {} for other types."""
    if dataclasses.is_dataclass(section):
        hints: dict[str, Any] = get_type_hints(section, include_extras=True)
        return {f.name: (hints[f.name], f.default) for f in dataclasses.fields(section)}
    fields = getattr(section, "model_fields", {})
    return {
        name: (Annotated[(f.annotation, *f.metadata)] if f.metadata else f.annotation, f.default)
        for name, f in fields.items()
    }


# ---- YAML as people write it ---------------------------------------------------------------------
# Values that silently mean something else are refused: YAML reads a key without a value as null,
# takes the second of two equal keys, and reads `010` as 8 and `1:30` as 90. An unset variable of
# the shell would turn a protection off.


# As in YAML 1.2; PyYAML would read 1e-8 as text.
_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+")
_CUT = re.compile(r" #\S")  # without a blank after the #, it may be part of a name
_NUMBERS = ("int", "float")
_QUOTES = "put a value that holds one of : # & * ! @ % ` [ ] { } \\ in single quotes"


class _Loader(yaml.SafeLoader):
    """``yaml.SafeLoader`` that reads 1e-8 as a number."""


class _Dumper(yaml.SafeDumper):
    """``yaml.SafeDumper`` that puts the text 1e-8 in quotes, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def write_yaml(content: Any) -> str:
    """Returns YAML that ``read_yaml`` reads back as ``content``."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False)


def read_yaml(text: str, where: str, one_value: bool = False) -> Any:
    """Reads a YAML text.

    Args:
      text: the YAML.
      where: name of the text, for errors.
      one_value: whether it is the value of one key, without comments.

    Raises:
      BadInputError: it is not YAML, or YAML would read it as something else than it seems.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        _check(node, text, where, one_value)
        return loader.construct_document(node)
    except BadInputError:
        raise
    except yaml.MarkedYAMLError as error:
        at = "" if error.problem_mark is None or one_value else _line(error.problem_mark)
        why = f"{error.problem or error.context}"
        raise BadInputError(f"{where}{at} is not valid YAML ({one_line(why)}): {_QUOTES}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise BadInputError(f"{where} is not valid YAML: {why}") from None
    finally:
        loader.dispose()


def _line(mark: Any) -> str:
    return f", line {mark.line + 1},"


def _check(root: yaml.Node | None, text: str, where: str, one_value: bool) -> None:
    """Raises BadInputError for what YAML would read as something else than it seems."""
    if root is None or (one_value and text[root.end_mark.index :].strip()):
        if "#" in text:
            raise BadInputError(f"{where}: YAML cuts a value off at the #: put it in quotes")
        if one_value:
            raise _empty(where)
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        key, node = left.pop()
        if node is None or id(node) in seen:  # aliases
            continue
        seen.add(id(node))
        at = where if one_value else f"{where}{_line(node.start_mark)} {key}".rstrip(", ")
        if isinstance(node, yaml.MappingNode):
            names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
            if (twice := repeated(names)) is not None:
                raise BadInputError(f"{at}: the key {twice!r} occurs twice: keep one")
            for name, value in node.value:
                shown = name.value if isinstance(name, yaml.ScalarNode) else "?"
                inner = f"{key}.{shown}" if key else shown
                left += [(inner, name), (inner, value)]
        elif isinstance(node, yaml.SequenceNode):
            left += [(key, entry) for entry in node.value]
        elif node.style is None:  # plain, without quotes
            _check_plain(node, text, at)


def _check_plain(node: yaml.ScalarNode, text: str, at: str) -> None:
    kind, value = node.tag.rpartition(":")[2], node.value
    if kind == "null" and not value:
        raise _empty(at)
    if (kind == "int" and re.match(r"[-+]?0[\d_]", value)) or (kind in _NUMBERS and ":" in value):
        raise BadInputError(
            f"{at} is {value}, which YAML reads as another number: write a decimal number, or put "
            "it in quotes if it is text"
        )
    if kind == "str" and _CUT.match(text, node.end_mark.index):
        raise BadInputError(
            f"{at} is cut off at the #, where YAML begins a comment: put the value in quotes, or a "
            "blank after the #"
        )


def _empty(at: str) -> BadInputError:
    return BadInputError(
        f"{at} is empty, which YAML reads as null: write null if that is meant; a variable of the "
        "shell may be unset, and a value that begins with # or & needs quotes"
    )
