"""Sections that are objects: ``kind`` names a class, the other keys are its fields.

A class registers itself where it is defined; whoever asks for a kind (a configuration, a sweep, the
planner) finds it here.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from dpfl_jax.errors import BadInputError

# Metadata of a dataclass field that no configuration sets.
DERIVED = {"derived": True}


class Kinds:
    """Frozen dataclasses by name; a section that is one has the type ``Annotated[Any, kinds]``.

    Attributes:
      home: module that defines the library's own; imported when a kind is asked for.
    """

    def __init__(self, home: str) -> None:
        self.home = home
        self._known: dict[str, type] = {}

    def register(self, cls: type) -> None:
        """Takes a class with an attribute ``kind``, by which runs tell it from others.

        Raises:
          BadInputError: it has none of its own, or another class has that kind.
        """
        kind: str | None = cls.__dict__.get("kind")
        if kind is None:
            raise BadInputError(
                f"{cls.__module__}.{cls.__qualname__} has no `kind` of its own: what it does could "
                "not be told from what its parent does"
            )
        before = self._known.get(kind, cls)
        if (before.__module__, before.__qualname__) != (cls.__module__, cls.__qualname__):
            raise BadInputError(
                f"{cls.__module__}.{cls.__qualname__} has the kind {kind!r} of "
                f"{before.__module__}.{before.__qualname__}: give it another"
            )
        self._known[kind] = cls

    def names(self) -> list[str]:
        """All kinds that are known by now."""
        importlib.import_module(self.home)
        return sorted(self._known)

    def __getitem__(self, kind: Any) -> Any:
        """The class of a kind, or of ``"package.module:Class"``, whose module was imported before.

        Raises:
          BadInputError: there is none.
        """
        names = self.names()
        if isinstance(kind, str) and ":" in kind:
            for cls in self._known.values():
                if f"{cls.__module__}:{cls.__qualname__}" == kind:
                    return cls
            raise BadInputError(
                f"mechanism.kind is {kind!r}, which is no mechanism of this kind, or was not "
                "imported"
            )
        if not isinstance(kind, str) or kind not in self._known:
            raise BadInputError(
                f"mechanism.kind is {kind!r}: {_or(names, kind, 'it must be one of ')}"
            )
        return self._known[kind]

    def parse(self, given: Any) -> Any:
        """The object that a section describes; an object is returned as it is.

        Raises:
          BadInputError: a key that the kind does not have, or a value that does not fit.
        """
        if isinstance(given, tuple(self._known.values())):
            return given
        if not isinstance(given, Mapping):
            raise BadInputError(f"mechanism is {given!r}, but it must hold kind and its fields")
        if "kind" not in given:
            raise BadInputError(f"mechanism.kind is missing: give one of {', '.join(self.names())}")
        cls = self[given["kind"]]
        known, hints = configured(cls), typing.get_type_hints(cls)
        values = {}
        for name, value in given.items():
            if name == "kind":
                continue
            if name not in known:
                owners = [kind for kind in self.names() if name in configured(self._known[kind])]
                what = f"an option of {' and '.join(owners)}; " if owners else ""
                raise BadInputError(
                    f"unknown key 'mechanism.{name}' of kind={cls.kind}: {what}"
                    f"{_or(known, name, 'known here: ')}"
                )
            try:
                # Numbers written as text are numbers, yes and no are none.
                strict = True if isinstance(value, bool) else None
                values[name] = TypeAdapter(hints[name]).validate_python(value, strict=strict)
            except ValidationError as error:
                what = error.errors()[0]["msg"]
                raise BadInputError(
                    f"mechanism.{name} is {value!r}: {what[:1].lower()}{what[1:]}"
                ) from error
        missing = [
            name
            for name, field in known.items()
            if field.default is dataclasses.MISSING and name not in values
        ]
        if missing:
            raise BadInputError(
                f"mechanism.kind={cls.kind} needs mechanism.{' and mechanism.'.join(missing)}"
            )
        return cls(**values)

    def parse_known(self, given: Mapping[str, Any]) -> Any:
        """``parse`` of what somebody else wrote: nothing is imported for it.

        Raises:
          BadInputError: as of ``parse``, or the kind names a module.
        """
        if ":" in str(given.get("kind")):
            raise BadInputError(f"mechanism.kind is {given['kind']!r}, and should be a plain name")
        return self.parse(given)

    @staticmethod
    def dump(made: Any) -> dict[str, Any]:
        """The section that describes an object."""
        return {"kind": made.kind} | {name: getattr(made, name) for name in configured(type(made))}

    def __get_pydantic_core_schema__(self, source: Any, schema_of: Callable[[Any], Any]) -> Any:
        """What pydantic asks of an annotation."""
        return schema_of(Annotated[source, PlainValidator(self.parse), PlainSerializer(self.dump)])


@dataclasses.dataclass(frozen=True)
class Named:
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
        for name, adapter in _adapters(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            try:
                adapter.validate_python(
                    value.item() if isinstance(value, np.generic) else value, strict=True
                )
            except ValidationError as error:
                what = error.errors()[0]["msg"]
                raise BadInputError(f"{name} is {value!r}: {what[:1].lower()}{what[1:]}") from error

    def to_json(self) -> dict[str, Any]:
        """What a report says of it: its public options."""
        return {"kind": self.kind, **dataclasses.asdict(self)}


@functools.cache
def _adapters(cls: type) -> dict[str, TypeAdapter[Any]]:
    hints = typing.get_type_hints(cls)
    return {name: TypeAdapter(hints[name]) for name in configured(cls)}


def configured(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a class that a configuration sets."""
    fields = dataclasses.fields(cls)
    return {f.name: f for f in fields if f.init and not f.metadata.get("derived")}


def _or(names: Iterable[str], near: Any, otherwise: str = "one of ") -> str:
    close = difflib.get_close_matches(str(near), list(names), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else otherwise + ", ".join(sorted(names))


CENTRAL = Kinds("dpfl_jax.mechanisms")
SILOS = Kinds("dpfl_jax.federation.mechanisms")
