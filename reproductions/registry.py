"""What a reproduction is, and where they are found."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pathlib
import pkgutil
from typing import Any

from rich.console import Console

import reproductions
from dpfl_jax.errors import BadInputError


@dataclasses.dataclass(frozen=True)
class Claim:
    """One statement and what was found.

    Attributes:
      claim: the statement, with its source.
      measured: what was found.
      expected: what the statement says.
      holds: whether they agree within the tolerance that ``claim`` or ``note`` states.
      note: how it was measured, or why it does not hold.
    """

    claim: str
    measured: Any
    expected: Any
    holds: bool
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values; infinities become strings."""
        return {k: _plain(v) for k, v in dataclasses.asdict(self).items()}


def near(claim: str, measured: float, expected: float, rel: float, note: str = "") -> Claim:
    """A claim about a number, within a relative tolerance."""
    holds = math.isfinite(measured) and abs(measured - expected) <= rel * abs(expected)
    return Claim(claim, measured, expected, holds, note or f"within {rel:.0%}")


def within(claim: str, measured: float, expected: float, room: float, note: str = "") -> Claim:
    """A claim about a number, within an absolute tolerance."""
    holds = abs(measured - expected) <= room
    return Claim(claim, round(measured, 4), expected, holds, note or f"within {room:.3g}")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a reproduction is run.

    Attributes:
      quick: reduced size, for a laptop.
      out: folder for figures; it exists.
      console: for people.
      data_dir: real data (``DPFL_DATA_DIR``), or None.
      seeds: seeds per training; None: the paper's number, or fewer if quick.
      minutes: after which no training is started any more; None: no limit.
    """

    quick: bool
    out: pathlib.Path
    console: Console
    data_dir: pathlib.Path | None = None
    seeds: int | None = None
    minutes: float | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a reproduction returns.

    Attributes:
      claims: each with its verdict.
      files: figures and tables written.
      rows: the numbers behind them.
      notes: what a reader must know (reduced sizes, other data, ...).
    """

    claims: list[Claim]
    files: list[pathlib.Path]
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def to_json(self, figure: str) -> dict[str, Any]:
        """The JSON object of ``dpfl reproduce``."""
        return {
            "figure": figure,
            "claims": [claim.to_json() for claim in self.claims],
            "files": [str(file) for file in self.files],
            "rows": _plain(self.rows),
            "notes": self.notes,
        }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else ("nan" if math.isnan(value) else "-inf")
    return value


def figures() -> dict[str, str]:
    """Name -> module of every reproduction."""
    found = {}
    for paper in pkgutil.iter_modules(reproductions.__path__):
        if not paper.ispkg or paper.name.startswith("_"):
            continue
        package = importlib.import_module(f"reproductions.{paper.name}")
        for module in pkgutil.iter_modules(package.__path__):
            if not module.name.startswith("_"):
                name = f"{paper.name}/{module.name}".replace("_", "-")
                found[name] = f"reproductions.{paper.name}.{module.name}"
    return found


def load(name: str) -> Any:
    """The module of a reproduction: ``TITLE``, ``SOURCE`` and ``run(settings) -> Outcome``.

    Its ``OPTIONS``, if there are any, name the settings among ``seeds`` and ``minutes`` that it
    heeds.

    Raises:
      BadInputError: no such reproduction.
    """
    known = figures()
    if name not in known:
        import difflib

        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        raise BadInputError(f"there is no reproduction {name!r}: {hint}")
    return importlib.import_module(known[name])
