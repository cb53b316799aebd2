"""Sections that are objects: ``kind`` names what makes it, the other keys are its arguments.

What makes an object is a frozen dataclass, which registers itself where it is defined, or a
function (``register``). Whoever asks for a kind (a configuration, a sweep, the planner) finds it
here.
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
    """Classes and functions by name; a section that one describes is ``Annotated[Any, kinds]``.

    Attributes:
      home: module that defines the library's own; imported when a kind is asked for.
      section: where in a configuration such a section stands.
      without_kind: the class that a section without ``kind`` describes; None: it needs one.
    """

    def __init__(self, home: str, section: str = "mechanism") -> None:
        self.home, self.section = home, section
        self.without_kind: type | None = None
        self._known: dict[str, Callable[..., Any]] = {}

    def register(self, maker: Callable[..., Any], kind: str | None = None) -> None:
        """Takes a class with an attribute ``kind``, by which runs tell it from others; a function.

        Args:
          maker: class or function; its parameters are the keys of a section.
          kind: of a function.

        Raises:
          BadInputError: there is no kind, or another has it.
        """
        kind = maker.__dict__.get("kind") if kind is None else kind
        if kind is None:
            raise BadInputError(
                f"{_place(maker, '.')} has no `kind` of its own: what it does could not be told "
                "from what its parent does"
            )
        before = self._known.get(kind, maker)
        if _place(before) != _place(maker):
            raise BadInputError(
                f"{_place(maker, '.')} has the kind {kind!r} of {_place(before, '.')}: give it "
                "another"
            )
        self._known[kind] = maker

    def names(self) -> list[str]:
        """All kinds that are known by now."""
        importlib.import_module(self.home)
        return sorted(self._known)

    def __contains__(self, kind: Any) -> bool:
        """Whether ``self[kind]`` would be found."""
        places = map(_place, self._known.values()) if ":" in str(kind) else self.names()
        return kind in [*places]

    def __getitem__(self, kind: Any) -> Callable[..., Any]:
        """The class or function of a kind, or at ``"package.module:name"`` if that was imported.

        Raises:
          BadInputError: there is none.
        """
        names = self.names()
        if isinstance(kind, str) and ":" in kind:
            for maker in self._known.values():
                if _place(maker) == kind:
                    return maker
            raise BadInputError(
                f"{self.section}.kind is {kind!r}, which is no {self.section} of this kind, or was "
                "not imported"
            )
        if not isinstance(kind, str) or kind not in self._known:
            raise BadInputError(f"{self.section}.kind is {kind!r}: {nearest(str(kind), names)}")
        return self._known[kind]

    def has_made(self, value: Any) -> bool:
        """Whether a value is what a section describes."""
        # A class that extends one of these has a kind of its own, or would go by its parent's name.
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
            # Numbers written as text are numbers, yes and no are none.
            strict = True if isinstance(value, bool) else None
            return TypeAdapter(option.hint).validate_python(value, strict=strict)
        except ValidationError as error:
            raise BadInputError(f"{self.section}.{name} is {value!r}: {why(error)}") from error

    def parse_known(self, given: Mapping[str, Any]) -> Any:
        """``parse`` of what somebody else wrote: nothing is imported for it.

        Raises:
          BadInputError: as of ``parse``, or the kind names a module.
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
        """The kind that makes an object of some of these values, and these; None if none does."""
        for kind in self.names():
            maker, known = self._known[kind], options(self._known[kind])
            if not maker.__module__.startswith("dpfl_jax."):
                continue  # what a value is called does not follow from what else was imported
            given = {name: values[name] for name in known if name in values}
            if any(option.is_required and name not in given for name, option in known.items()):
                continue
            try:
                if maker(**given) == made:
                    return kind, given
            except BadInputError:  # other parts take other values
                continue
        return None

    def __get_pydantic_core_schema__(self, source: Any, schema_of: Callable[[Any], Any]) -> Any:
        """What pydantic asks of an annotation."""
        del source
        return schema_of(Annotated[Any, PlainValidator(self.parse), PlainSerializer(self.dump)])


@dataclasses.dataclass(frozen=True)
class Option:
    """What a section may set.

    Attributes:
      hint: its type.
      default: ``inspect.Parameter.empty`` if there is none.
      kinds: of a section within the section; None of a plain value.
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
    """What a class or function takes of a section, by name."""
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
    """What a type, or one of a union's, is annotated with."""
    result = [*getattr(hint, "__metadata__", ())]
    for one in typing.get_args(hint) if not result else ():
        result += getattr(one, "__metadata__", ())
    return next((kinds for kinds in result if isinstance(kinds, Kinds)), None)


def _place(maker: Any, separator: str = ":") -> str:
    return f"{maker.__module__}{separator}{maker.__qualname__}"


@dataclasses.dataclass(frozen=True)
class Named(abc.ABC):
    """What a section describes, by its ``kind``; a base names the table: ``kinds=CENTRAL``."""

    kind: ClassVar[str]
    _kinds: ClassVar[Kinds]

    def __init_subclass__(cls, kinds: Kinds | None = None, **rest: Any) -> None:
        """A class with a ``kind`` of its own can be named in configurations."""
        super().__init_subclass__(**rest)
        if kinds is None:
            cls._kinds.register(cls)
        else:
            cls._kinds = kinds

    def __post_init__(self) -> None:
        """Checks the types of what a user sets: a group size of 2.5 is none.

        Raises:
          BadInputError: naming the field.
        """
        check_types(self)

    def to_json(self) -> dict[str, Any]:
        """What a report says of it: its public options."""
        return {"kind": self.kind, **dataclasses.asdict(self)}


class Composed(abc.ABC):
    """A frozen dataclass of parts: a section names a preset with its options, or the parts."""

    kinds: ClassVar[Kinds]

    @abc.abstractmethod
    def preset_options(self) -> dict[str, Any]:
        """What its parts hold, under the names by which presets take it."""

    def without_derived(self) -> Any:
        """The same without what no section sets."""
        return self

    @functools.cached_property
    def _section(self) -> dict[str, Any]:
        # It is looked for, and not remembered: what is spelled out is the preset that it equals,
        # and keys of runs follow from that.
        preset = self.kinds.section_of(self.without_derived(), self.preset_options())
        if preset is None:
            given = {name: getattr(self, name) for name in options(type(self))}
            return {name: Kinds.dump(value) for name, value in given.items()}
        kind, given = preset
        return {"kind": kind} | {name: Kinds.dump(value) for name, value in given.items()}

    def to_section(self) -> dict[str, Any]:
        """What describes it in a configuration: a preset with its options, or the parts."""
        return dict(self._section)

    to_json = to_section

    @property
    def kind(self) -> str:
        """The name of the preset that it is; "custom" of other combinations."""
        return str(self._section.get("kind", "custom"))


def fields_of(*parts: Any) -> dict[str, Any]:
    """The fields of dataclasses, by name; None and other values have none."""
    result: dict[str, Any] = {}
    for part in parts:
        if dataclasses.is_dataclass(part):
            result |= {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return result


def code_outside(composed: Composed, *more: Any) -> list[str]:
    """Digests of the code of parts that are not this package's; [] if there are none.

    A section names such parts. If they are written anew, under the same names, they are another
    mechanism, which must not draw the noise of the one before.

    Args:
      composed: whose parts.
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
    """Checks what a user sets of a frozen dataclass; whole numbers become floats where a field is.

    So values that are equal have one section, to the last sign: what a run draws follows from it.

    Raises:
      BadInputError: a field has another type; the field is named.
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
