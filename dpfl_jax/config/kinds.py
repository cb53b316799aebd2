"""Sections that describe objects: ``kind`` names a class or function, the other keys its arguments.

A class is a frozen dataclass, which registers itself where it is defined; functions are registered
by ``register``. Configurations, sweeps and the planner look kinds up here.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from dpfl_jax.errors import BadInputError, nearest

# Metadata of a dataclass field that no configuration sets.
DERIVED = {"derived": True}
_REQUIRED = inspect.Parameter.empty
# Keys that people may look for in a mechanism, and where they are.
_MOVED = {"noise_multiplier": "privacy.noise_multiplier"}


class Kinds:
    """A table of classes and functions by kind; such a section has type ``Annotated[Any, kinds]``.

    Attributes:
      home: module that defines the library's kinds; imported when a kind is looked up.
      section: key of such a section in a configuration.
      without_kind: the class that a section without ``kind`` describes; None: it needs a kind.
    """

    def __init__(self, home: str, section: str = "mechanism") -> None:
        self.home, self.section = home, section
        self.without_kind: type | None = None
        self._known: dict[str, Callable[..., Any]] = {}

    def register(self, maker: Callable[..., Any], kind: str | None = None) -> None:
        """Adds a class or function to the table.

        Args:
          maker: class or function; its parameters are the keys of a section.
          kind: its kind; default the class's attribute ``kind``.

        Raises:
          BadInputError: it has no kind, or another class or function has it.
        """
        kind = maker.__dict__.get("kind") if kind is None else kind
        if kind is None:
            raise BadInputError(
                f"{_place(maker, '.')} does not define `kind`, so that it could not be told from "
                "its parent: add one"
            )
        before = self._known.get(kind, maker)
        if _place(before) != _place(maker):
            raise BadInputError(
                f"{_place(maker, '.')} has the kind {kind!r} of {_place(before, '.')}: give it "
                "another"
            )
        self._known[kind] = maker

    def names(self) -> list[str]:
        """The registered kinds."""
        importlib.import_module(self.home)
        return sorted(self._known)

    def __contains__(self, kind: Any) -> bool:
        """Whether ``self[kind]`` exists."""
        places = map(_place, self._known.values()) if ":" in str(kind) else self.names()
        return kind in [*places]

    def __getitem__(self, kind: Any) -> Callable[..., Any]:
        """The class or function of a kind, or at ``"package.module:name"`` if that was imported.

        Raises:
          BadInputError: no such kind is registered.
        """
        names = self.names()
        if isinstance(kind, str) and ":" in kind:
            for maker in self._known.values():
                if _place(maker) == kind:
                    return maker
            raise BadInputError(
                f"{self.section}.kind is {kind!r}, which is not a {self.section}, or was not "
                "imported"
            )
        if not isinstance(kind, str) or kind not in self._known:
            raise BadInputError(f"{self.section}.kind is {kind!r}: {nearest(str(kind), names)}")
        return self._known[kind]

    def has_made(self, value: Any) -> bool:
        """Whether a value is an object that a section describes."""
        # By exact type: a subclass must have another kind than its parent.
        return type(value) in (*self._known.values(), self.without_kind)

    def parse(self, given: Any) -> Any:
        """The object that a section describes; an object is returned as it is.

        Raises:
          BadInputError: a key that the kind does not have, or a value that does not fit.
        """
        if self.has_made(given):
            return given
        if not isinstance(given, Mapping):
            raise BadInputError(
                f"{self.section} is {given!r}, but it must hold kind and its fields"
            )
        named = f"kind={given.get('kind')}"
        if "kind" in given:
            maker = self[given["kind"]]
        elif self.without_kind is not None and {*given} & {*options(self.without_kind)}:
            maker, named = self.without_kind, "parts"
        else:
            raise BadInputError(
                f"{self.section}.kind is missing: give one of {', '.join(self.names())}"
            )
        known, values = options(maker), {}
        for name, value in given.items():
            if name == "kind":
                continue
            if name not in known:
                if name in _MOVED:
                    raise BadInputError(
                        f"'{self.section}.{name}' is '{_MOVED[name]}': write it there"
                    )
                owners = [kind for kind in self.names() if name in options(self._known[kind])]
                what = f"an option of {' and '.join(owners)}; " if owners else ""
                raise BadInputError(
                    f"unknown key '{self.section}.{name}' of {named}: {what}"
                    f"{nearest(str(name), known)}"
                )
            values[name] = self._value(name, value, known[name])
        missing = [n for n, option in known.items() if option.is_required and n not in values]
        if missing:
            keys = " and ".join(f"{self.section}.{name}" for name in missing)
            raise BadInputError(f"{self.section}.{named} needs {keys}")
        return maker(**values)

    def _value(self, name: str, value: Any, option: Option) -> Any:
        if option.kinds is not None:
            return None if value is None and option.default is None else option.kinds.parse(value)
        try:
            # Numbers written as text are accepted as numbers, booleans are not.
            strict = True if isinstance(value, bool) else None
            return TypeAdapter(option.hint).validate_python(value, strict=strict)
        except ValidationError as error:
            raise BadInputError(f"{self.section}.{name} is {value!r}: {why(error)}") from error

    def parse_known(self, given: Mapping[str, Any]) -> Any:
        """Parses a section that somebody else wrote; nothing is imported for it.

        Raises:
          BadInputError: ``parse`` refuses it, or the kind names a module.
        """
        if ":" in str(given.get("kind")):
            raise BadInputError(
                f"{self.section}.kind is {given['kind']!r}, and should be a plain name"
            )
        return self.parse(given)

    @staticmethod
    def dump(made: Any) -> Any:
        """The section that describes an object; other values are returned as they are."""
        if hasattr(made, "to_section"):
            return made.to_section()
        if not hasattr(made, "kind"):
            return made
        cls: Any = type(made)
        named = {name: getattr(made, name) for name in options(cls)}
        return {"kind": made.kind} | {name: Kinds.dump(value) for name, value in named.items()}

    def section_of(self, made: Any, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """The kind and the arguments, out of ``values``, that make an equal object, or None."""
        for kind in self.names():
            maker, known = self._known[kind], options(self._known[kind])
            if not maker.__module__.startswith("dpfl_jax."):
                continue  # the name of a value must not depend on what was imported
            given = {name: values[name] for name in known if name in values}
            if any(option.is_required and name not in given for name, option in known.items()):
                continue
            try:
                if maker(**given) == made:
                    return kind, given
            except BadInputError:  # the values are of another kind
                continue
        return None

    def __get_pydantic_core_schema__(self, source: Any, schema_of: Callable[[Any], Any]) -> Any:
        """Tells pydantic how to validate and serialise a value of this annotation."""
        del source
        return schema_of(Annotated[Any, PlainValidator(self.parse), PlainSerializer(self.dump)])


@dataclasses.dataclass(frozen=True)
class Option:
    """A key of a section.

    Attributes:
      hint: its type.
      default: its default; ``inspect.Parameter.empty`` if it is required.
      kinds: the table of kinds, if it is itself such a section; None for a plain value.
    """

    hint: Any
    default: Any
    kinds: Kinds | None

    @property
    def is_required(self) -> bool:
        """Whether a section must set it."""
        return self.default is _REQUIRED


@functools.cache
def options(maker: Callable[..., Any]) -> dict[str, Option]:
    """The keys of the section that a class or function takes, by name."""
    hints = typing.get_type_hints(maker, include_extras=True)
    if isinstance(maker, type):
        derived = {f.name for f in dataclasses.fields(maker) if f.metadata.get("derived")}
    else:
        derived = set()
    result: dict[str, Option] = {}
    for name, parameter in inspect.signature(maker).parameters.items():
        if name in derived:
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:  # Unpack[a TypedDict without defaults]
            (more,) = typing.get_args(hints[name])
            for one, hint in typing.get_type_hints(more, include_extras=True).items():
                result[one] = Option(hint, None, _kinds_of(hint))
            continue
        result[name] = Option(hints[name], parameter.default, _kinds_of(hints[name]))
    return result


def _kinds_of(hint: Any) -> Kinds | None:
    """The ``Kinds`` that annotate a type, or a member of a union."""
    result = [*getattr(hint, "__metadata__", ())]
    for one in typing.get_args(hint) if not result else ():
        result += getattr(one, "__metadata__", ())
    return next((kinds for kinds in result if isinstance(kinds, Kinds)), None)


def _place(maker: Any, separator: str = ":") -> str:
    return f"{maker.__module__}{separator}{maker.__qualname__}"


@dataclasses.dataclass(frozen=True)
class Named(abc.ABC):
    """A base of classes with a ``kind``; a direct subclass names its table: ``kinds=CENTRAL``."""

    kind: ClassVar[str]
    _kinds: ClassVar[Kinds]

    def __init_subclass__(cls, kinds: Kinds | None = None, **rest: Any) -> None:
        """Registers the class, so that configurations can name its ``kind``."""
        super().__init_subclass__(**rest)
        if kinds is None:
            cls._kinds.register(cls)
        else:
            cls._kinds = kinds

    def __post_init__(self) -> None:
        """Checks the types of fields, such as a whole number for the group size.

        Raises:
          BadInputError: a field has another type; the message names it.
        """
        check_types(self)

    def to_json(self) -> dict[str, Any]:
        """Its kind and public options, for reports."""
        return {"kind": self.kind, **dataclasses.asdict(self)}


class Composed(abc.ABC):
    """A mechanism, as a frozen dataclass of parts; a section names a preset, or the parts."""

    kinds: ClassVar[Kinds]
    participation: Any
    clip: Any
    noise: Any

    @abc.abstractmethod
    def preset_options(self) -> dict[str, Any]:
        """The values of its parts, by the names of the presets' options."""

    def without_derived(self) -> Any:
        """A copy without fields that no section sets."""
        return self

    @functools.cached_property
    def _section(self) -> dict[str, Any]:
        # Searched for instead of stored, so that parts that are spelled out get the section (and
        # the keys of a run) of the preset that they equal.
        preset = self.kinds.section_of(self.without_derived(), self.preset_options())
        if preset is None:
            given = {name: getattr(self, name) for name in options(type(self))}
            return {name: Kinds.dump(value) for name, value in given.items()}
        kind, given = preset
        return {"kind": kind} | {name: Kinds.dump(value) for name, value in given.items()}

    def to_section(self) -> dict[str, Any]:
        """Its section in a configuration: a preset with its options, or the parts."""
        return dict(self._section)

    to_json = to_section

    @property
    def kind(self) -> str:
        """The name of the preset that it equals; "custom" for other combinations."""
        return str(self._section.get("kind", "custom"))

    @property
    def private(self) -> bool:
        """Whether the mechanism has a privacy guarantee."""
        return bool(self.noise.is_private)

    @property
    def bounds(self) -> dict[str, Any]:
        """The public constants that bound a unit's contribution, by name; None where not used."""
        counts = ("group_size", "sets_per_user", "max_records_per_subject")
        constants = {name: getattr(self.participation, name, None) for name in counts}
        return {"clip_norm": self.clip.threshold, **constants}


def fields_of(*parts: Any) -> dict[str, Any]:
    """The fields of dataclasses, by name; other values are ignored."""
    result: dict[str, Any] = {}
    for part in parts:
        if dataclasses.is_dataclass(part):
            result |= {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return result


def code_outside(composed: Composed, *more: Any) -> list[str]:
    """Digests of the code of parts from outside this package; [] if all are the package's.

    A section only names such parts. If their code changes under the same names, they are another
    mechanism, which must not draw the noise of the one before.

    Args:
      composed: the object with the parts.
      *more: parts of its parts.
    """
    result = []
    for part in (*fields_of(composed).values(), *more):
        for cls in type(part).__mro__:
            if cls.__module__.split(".")[0] in ("dpfl_jax", "builtins", "abc", "typing"):
                continue
            members = sorted(vars(cls).items())
            codes = [_code(getattr(m, "fget", getattr(m, "func", m))) for _, m in members]
            result.append(hashlib.sha256(repr(codes).encode()).hexdigest())
    return result


def _code(function: Any) -> Any:
    code = getattr(function, "__code__", function)
    if not isinstance(code, types.CodeType):
        return None
    within = [_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, within, code.co_names


def why(error: ValidationError) -> str:
    """The first reason that pydantic gives, as the end of a sentence."""
    reason = error.errors()[0]["msg"]
    return f"{reason[:1].lower()}{reason[1:]}"


def check_types(made: Any) -> None:
    """Checks the fields of a frozen dataclass; whole numbers become floats if the field is one.

    Equal values then have the same section to the last character, from which a run's draws follow.

    Raises:
      BadInputError: a field has another type; the message names it.
    """
    cls: Any = type(made)
    for name, option in options(cls).items():
        value = getattr(made, name)
        if option.kinds is not None:
            if not (option.kinds.has_made(value) or (value is None and option.default is None)):
                raise BadInputError(
                    f"{name} is {value!r}, but it must be one of {', '.join(option.kinds.names())}"
                )
            continue
        try:
            given = value.item() if isinstance(value, np.generic) else value
            object.__setattr__(made, name, _adapter(cls, name).validate_python(given, strict=True))
        except ValidationError as error:
            raise BadInputError(f"{name} is {value!r}: {why(error)}") from error


@functools.cache
def _adapter(cls: Any, name: str) -> TypeAdapter[Any]:
    return TypeAdapter(options(cls)[name].hint)


CENTRAL = Kinds("dpfl_jax.mechanisms")
PARTICIPATIONS = Kinds("dpfl_jax.mechanisms", "mechanism.participation")
SCHEMES = Kinds("dpfl_jax.mechanisms", "mechanism.participation.scheme")
CLIPS = Kinds("dpfl_jax.mechanisms", "mechanism.clip")
NOISES = Kinds("dpfl_jax.mechanisms", "mechanism.noise")
UPDATES = Kinds("dpfl_jax.mechanisms", "mechanism.update")
BUDGETS = Kinds("dpfl_jax.mechanisms", "mechanism.budget")
SILOS = Kinds("dpfl_jax.federation.mechanisms")
SILO_PARTICIPATIONS = Kinds("dpfl_jax.federation.mechanisms", "mechanism.participation")
ISRL = Kinds("dpfl_jax.federation.isrl.algorithms")
