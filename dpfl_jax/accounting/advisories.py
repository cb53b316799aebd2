"""Advisories: which versions stated a wrong guarantee for which runs, and what is true.

``dpfl_jax/advisories.json`` holds them as data, which ``met`` compares with a guarantee.json. It
never names code: a condition is a path in guarantee.json with the values that are affected.
"""

from __future__ import annotations

import datetime
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from dpfl_jax.accounting.statement import Part, Statement, parsed, read_values
from dpfl_jax.accounting.versions import Version, version_of, versions_of

FILE = pathlib.Path(__file__).parents[1] / "advisories.json"
_VERSION = r"^\d{1,9}\.\d{1,9}\.\d{1,9}((a|b|rc)\d{1,9}|\.dev\d{1,9})?$"
_Version = Annotated[str, Field(pattern=_VERSION)]
_Values = Annotated[list[str | bool | int | float | None], Field(max_length=100)]


class Advisory(Part):
    """An error in a guarantee, and the versions that had it."""

    id: str = Field(pattern=r"^[A-Z0-9][A-Z0-9-]{2,30}$")
    """``DPFL-YEAR-NUMBER``; a number is never reused."""
    date: datetime.date
    """Date of publication."""
    concerns: Literal["run", "ledger", "tool"]
    """``run``: what a run stated in guarantee.json. Only these are looked for in such a file."""
    condition: str
    """When a guarantee was wrong."""
    stated: str
    """What was stated."""
    true: str
    """What is true."""
    what_to_do: str
    """How to see whether a run is affected, and what to do then."""
    introduced: datetime.date
    """Date from which guarantees were wrong."""
    fixed: datetime.date | None
    """Date of the fix; None: not fixed yet."""
    since: _Version | None
    """The first affected version; None: all versions from the first one on."""
    before: _Version | None
    """The first version that is no longer affected; None: not fixed yet."""
    commits: list[Annotated[str, Field(pattern="^[0-9a-f]{40}$")]] = Field([], max_length=100_000)
    """The affected commits, for git checkouts; empty: as the versions above say."""
    where: dict[str, Literal["differ"] | _Values] = Field({}, max_length=20)
    """Paths in guarantee.json (``basis.cells.*.steps``; ``*`` is every entry of a list), each with
    values of which one must be there, or ``differ``: there are unequal values. Only a file that
    fits all paths is affected. An empty list fits no file: for errors older than those."""
    certain: bool
    """Whether every file that fits is affected; otherwise ``condition`` says which files are."""

    def applies(self, values: Any, versions: Iterable[Version | None]) -> bool:
        """Returns whether a guarantee.json with these values, made by these versions, fits."""
        return (
            self.concerns == "run"
            and any(map(self._made_by, versions))
            and all(
                _holds(_values_at(values, place), wanted) for place, wanted in self.where.items()
            )
        )

    def _made_by(self, version: Version | None) -> bool:
        """Whether the advisory affects a version; one that cannot be read counts as affected."""
        if version is None:
            return True
        if version.commit and self.commits:
            return any(commit.startswith(version.commit) for commit in self.commits)
        first, last = (one and version_of(one) for one in (self.since, self.before))
        return not (first and version.order < first.order) and not (
            last and version.order >= last.order
        )


class _File(Part):
    """The content of advisories.json."""

    version: Literal[1]
    """Version of this schema."""
    advisories: list[Advisory] = Field(max_length=10_000)
    """All advisories, in any order."""


class Met(NamedTuple):
    """An advisory that concerns a guarantee.

    Attributes:
      advisory: the advisory.
      certain: whether the guarantee is certainly affected; otherwise it may be.
    """

    advisory: Advisory
    certain: bool

    def __str__(self) -> str:
        one = self.advisory
        whether = "is about this guarantee" if self.certain else "may be about this guarantee"
        return (
            f"{one.id} {whether}. {one.condition}. Stated: {one.stated}. True: {one.true}. What to "
            f"do: {one.what_to_do}."
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the advisory as JSON values, with ``applies``: "certain" or "possible"."""
        applies = "certain" if self.certain else "possible"
        return {"applies": applies, **self.advisory.model_dump(mode="json")}


def known(*more: str | os.PathLike[str]) -> list[Advisory]:
    """Returns the advisories that this version knows, and those of further files.

    A file cannot take an advisory back: under a known identifier, both count.

    Raises:
      BadInputError: it is not a file of advisories.
    """
    files = [parsed(_File, read_values(path, "file of advisories"), path) for path in (FILE, *more)]
    return list({one.model_dump_json(): one for file in files for one in file.advisories}.values())


def met(stated: Statement, advisories: Sequence[Advisory]) -> list[Met]:
    """Returns the advisories that concern a guarantee, certain ones first."""
    values, versions = stated.to_json(), versions_of(stated.library)
    affecting = [
        Met(one, one.certain and None not in versions)
        for one in advisories
        if one.applies(values, versions)
    ]
    return sorted(affecting, key=lambda one: not one.certain)


def caveat(found: Sequence[Met]) -> str:
    """Returns the caveat of a run that is resumed after steps of an affected version."""
    names = ", ".join(one.advisory.id for one in found)
    return (
        f"earlier steps of this run were taken by a version of dpfl_jax that has advisories of its "
        f"guarantee, which are or may be about this run: {names}"
    )


def _values_at(values: Any, path: str) -> list[Any]:
    """All values at a path, in which ``*`` is every entry of a list."""
    nodes = [values]
    for name in path.split("."):
        inner: list[Any] = []
        for value in nodes:
            if isinstance(value, dict) and name in value:
                inner.append(value[name])
            elif isinstance(value, list | tuple) and name == "*":
                inner += value
        nodes = inner
    return nodes


def _holds(found: Sequence[Any], wanted: Any) -> bool:
    if wanted == "differ":
        return any(value != found[0] for value in found)
    return any(
        value == one and isinstance(value, bool) == isinstance(one, bool)  # True == 1
        for value in found
        for one in wanted
    )
