"""What a reproduction is, and where they are found."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import pathlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from scipy import stats

import reproductions
from dpfl_jax.errors import BadInputError

Source = Literal["paper", "authors' code", "arithmetic", "ours"]
VERDICTS = {True: "holds", False: "does not hold", None: "undecided"}
MOST_SEEDS = 10_000  # that are ever said to be needed
ERROR_RATE = 0.05  # of a figure: chance that a difference over seeds is called one and is none


@dataclasses.dataclass(frozen=True)
class Claim:
    """One statement and what was found.

    Attributes:
      claim: the statement.
      measured: what was found.
      expected: what the statement says; never an earlier number of this project (those are tests).
      holds: whether they agree within the tolerance that ``claim`` or ``note`` states; None: the
        seeds do not decide.
      note: how it was measured, or why it does not hold.
      source: who says so: the paper (text, table or figure), its authors' code or result files,
        arithmetic (a proof, a formula, the accountant), or this project of its own mechanisms.
      p_value: of a difference over seeds, which the figure's ``Outcome`` then judges.
    """

    claim: str
    measured: Any
    expected: Any
    holds: bool | None
    note: str = ""
    source: Source = dataclasses.field(kw_only=True)
    p_value: float | None = dataclasses.field(default=None, kw_only=True)

    @property
    def verdict(self) -> str:
        """In words."""
        return VERDICTS[self.holds]

    def to_json(self) -> dict[str, Any]:
        """Plain values; infinities become strings."""
        plain = {k: _plain(v) for k, v in dataclasses.asdict(self).items()}
        return plain | {"verdict": self.verdict}


def near(
    claim: str, measured: float, expected: float, rel: float, note: str = "", *, source: Source
) -> Claim:
    """A claim about a number, within a relative tolerance."""
    holds = math.isfinite(measured) and abs(measured - expected) <= rel * abs(expected)
    return Claim(claim, measured, expected, holds, note or f"within {rel:.0%}", source=source)


def within(
    claim: str, measured: float, expected: float, room: float, note: str = "", *, source: Source
) -> Claim:
    """A claim about a number, within an absolute tolerance."""
    holds = abs(measured - expected) <= room
    note = note or f"within {room:.3g}"
    return Claim(claim, round(measured, 4), expected, holds, note, source=source)


def less(
    claim: str,
    smaller: ArrayLike,
    larger: ArrayLike,
    note: str = "",
    *,
    source: Source,
    room: float = 0.0,
) -> Claim:
    """That one mean lies below another: a paired t-test over seeds.

    Args:
      claim: the statement.
      smaller: of each seed, what is said to be smaller.
      larger: of the same seeds, what it is smaller than.
      note: added to the number of seeds.
      source: who says so.
      room: how far ``smaller`` may lie above and the claim still hold ("no worse than").
    """
    gap = np.asarray(smaller, float) - np.asarray(larger, float)
    seeds, mean, error, reach = _estimate(gap)
    expected = "below 0" if room == 0 else f"below {room:g}"
    if not 0 < error < math.inf:
        said = f"{mean:.4g}, {seeds} seed{'s' * (seeds > 1)}"
        holds = mean < room if error == 0 else None
        return Claim(claim, said, expected, holds, note, source=source)
    p_value = 2 * float(stats.t.sf(abs(mean - room) / error, seeds - 1))
    found = f"{mean:.4g} [{mean - reach:.4g}, {mean + reach:.4g}], {seeds} seeds"
    if p_value > ERROR_RATE:
        needed = _deciding(abs(mean - room) / (error * math.sqrt(seeds)), seeds)
        note = f"{note}; {needed} seeds would decide".removeprefix("; ")
    return Claim(claim, found, expected, mean < room, note, source=source, p_value=p_value)


def _deciding(apart: float, seeds: int) -> str:
    """How many would, one time in two, of a difference of so many standard deviations."""
    more, least = _numbers_of_seeds(seeds)
    enough = more[apart >= least]
    return f"about {enough[0]}" if enough.size else f"more than {MOST_SEEDS:,}"


@functools.cache
def _numbers_of_seeds(seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Larger numbers of seeds, and the standard deviations that each tells apart."""
    more = [seeds + 1]
    while (next_one := more[-1] + max(1, more[-1] // 20)) < MOST_SEEDS:
        more.append(next_one)
    numbers = np.array(more)
    return numbers, stats.t.isf(ERROR_RATE / 2, numbers - 1) / np.sqrt(numbers)


def between(
    claim: str, values: ArrayLike, low: float, high: float, note: str = "", *, source: Source
) -> Claim:
    """That a mean lies in a range: it holds if its interval does, not if that lies outside.

    Args:
      claim: the statement.
      values: of each seed.
      low: end of the range, as its source has it.
      high: the other end.
      note: added to it.
      source: who says so.
    """
    seeds, mean, _, reach = _estimate(np.asarray(values, float))
    inside = low <= mean - reach and mean + reach <= high
    outside = mean + reach < low or mean - reach > high
    said = f"{mean:.4g} [{mean - reach:.4g}, {mean + reach:.4g}], {seeds} seeds"
    holds = True if inside else (False if outside else None)
    return Claim(claim, said, f"{low:g} to {high:g}", holds, note, source=source)


def _estimate(values: np.ndarray) -> tuple[int, float, float, float]:
    """Seeds, their mean, its standard error, and half its interval (Student's t); inf for one."""
    seeds, mean = len(values), float(values.mean())
    if seeds < 2:
        return seeds, mean, math.inf, math.inf
    error = float(values.std(ddof=1)) / math.sqrt(seeds)
    return seeds, mean, error, float(stats.t.ppf(1 - ERROR_RATE / 2, seeds - 1)) * error


def judged(claims: Sequence[Claim]) -> list[Claim]:
    """Differences over seeds that are too small to be told apart (Holm 1979) are undecided."""
    tested = sorted((c.p_value, k) for k, c in enumerate(claims) if c.p_value is not None)
    made = list(claims)
    decided = True
    for rank, (p_value, k) in enumerate(tested):
        decided = decided and p_value <= ERROR_RATE / (len(tested) - rank)
        if not decided:
            made[k] = dataclasses.replace(made[k], holds=None)
    return made


def broken(claim: Mapping[str, Any]) -> bool:
    """Whether a claim as in ``Outcome.to_json`` fails that must hold: of arithmetic, or ours."""
    return claim["source"] in ("arithmetic", "ours") and claim["holds"] is False


def tally(claims: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Number of claims by source and verdict, of claims as in ``Outcome.to_json``."""
    found: dict[str, dict[str, int]] = {}
    for claim in claims:
        of = found.setdefault(claim["source"], dict.fromkeys(VERDICTS.values(), 0))
        of[claim["verdict"]] += 1
    return found


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

    def __post_init__(self) -> None:
        """Judges differences over seeds together."""
        object.__setattr__(self, "claims", judged(self.claims))

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
