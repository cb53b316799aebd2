"""Advisories: which versions stated a wrong guarantee, of which runs, and what is true.

``dpfl_jax/advisories.json`` holds them as data, which ``met`` compares with a guarantee.json. It
never names code: a condition is a place in that file, and the values that may stand there.
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
    """A hole in a guarantee that was mended."""

    id: str = Field(pattern=r"^[A-Z0-9][A-Z0-9-]{2,30}$")
    """``DPFL-YEAR-NUMBER``; numbers are not used twice."""
    date: datetime.date
    """When it was published."""
    concerns: Literal["run", "ledger", "tool"]
    """``run``: what a run stated, in guarantee.json. Others are not looked for in such a file."""
    condition: str
    """When a guarantee was wrong."""
    stated: str
    """What was stated."""
    true: str
    """What is true."""
    what_to_do: str
    """How to see whether a run is affected, and what then."""
    introduced: datetime.date
    """Since when it was wrong."""
    fixed: datetime.date | None
    """Until when; None as long as it is."""
    since: _Version | None
    """The first version that is affected; None: from the beginning."""
    before: _Version | None
    """The first version that is not affected any more; None: there is none yet."""
    commits: list[Annotated[str, Field(pattern="^[0-9a-f]{40}$")]] = Field([], max_length=100_000)
    """Of checkouts, which are affected; none: those of the versions above."""
    where: dict[str, Literal["differ"] | _Values] = Field({}, max_length=20)
    """Places of guarantee.json (``basis.cells.*.steps``; ``*`` is every entry of a list), and the
    values one of which must be there, or ``differ``: several that are not equal. A file that does
    not fit all of them is not affected; no value fits none, of holes older than such files."""
    certain: bool
    """Whether a file that fits is affected; else it may be, and ``condition`` says when."""

    def applies(self, values: Any, versions: Iterable[Version | None]) -> bool:
        """Whether a guarantee.json with these values, made by these versions, fits."""
        return (
            self.concerns == "run"
            and any(map(self._made_by, versions))
            and all(_holds(_found(values, place), wanted) for place, wanted in self.where.items())
        )

    def _made_by(self, version: Version | None) -> bool:
        """A version that cannot be read may be any."""
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
    """Of this schema."""
    advisories: list[Advisory] = Field(max_length=10_000)
    """The newest may stand anywhere."""


class Met(NamedTuple):
    """An advisory that a guarantee meets.

    Attributes:
      advisory: the advisory.
      certain: whether the guarantee is affected; else it may be.
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
        """For programs: the advisory, and ``applies``, which is "certain" or "possible"."""
        applies = "certain" if self.certain else "possible"
        return {"applies": applies, **self.advisory.model_dump(mode="json")}


def known(path: str | os.PathLike[str] = FILE) -> list[Advisory]:
    """The advisories of a file; default those that this version knows.

    Raises:
      BadInputError: it is no file of advisories.
    """
    values = read_values(path, "file of advisories")
    return parsed(_File, values, path).advisories


def met(stated: Statement, advisories: Sequence[Advisory]) -> list[Met]:
    """The advisories that a guarantee meets, those that are certain first."""
    values, versions = stated.to_json(), versions_of(stated.library)
    found = [
        Met(one, one.certain and None not in versions)
        for one in advisories
        if one.applies(values, versions)
    ]
    return sorted(found, key=lambda one: not one.certain)


def caveat(found: Sequence[Met]) -> str:
    """A sentence for the guarantee of a run that goes on with steps of an affected version."""
    names = ", ".join(one.advisory.id for one in found)
    return (
        f"earlier steps of this run were taken by a version of dpfl_jax that has advisories of its "
        f"guarantee, which are or may be about this run: {names}"
    )


def _found(values: Any, place: str) -> list[Any]:
    """All that stands at a place; ``*`` is every entry of a list."""
    found = [values]
    for name in place.split("."):
        inner: list[Any] = []
        for value in found:
            if isinstance(value, dict) and name in value:
                inner.append(value[name])
            elif isinstance(value, list | tuple) and name == "*":
                inner += value
        found = inner
    return found


def _holds(found: Sequence[Any], wanted: Any) -> bool:
    if wanted == "differ":
        return any(value != found[0] for value in found)
    return any(
        value == one and isinstance(value, bool) == isinstance(one, bool)  # True == 1
        for value in found
        for one in wanted
    )
