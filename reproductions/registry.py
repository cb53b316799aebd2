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
from reproductions.quotes import quoted

Source = Literal["paper", "authors' code", "arithmetic", "ours"]
UNDECIDED = "undecided at this size"
VERDICTS = {True: "holds", False: "does not hold", None: UNDECIDED}
MOST_SEEDS = 10_000  # that are ever said to be needed
ERROR_RATE = 0.05  # of a figure: chance that a difference over seeds is called one and is none
LEAST_POWER = 0.8  # below it, a failure to see an effect says nothing about the paper


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the hyperparameters of one arm of a comparison were chosen.

    Attributes:
      grid: hyperparameter -> values tried.
      chosen: hyperparameter -> the best of them.
      seeds: seeds of the runs that chose.
    """

    grid: Mapping[str, Sequence[float]]
    chosen: Mapping[str, float]
    seeds: Sequence[int]

    @property
    def counts(self) -> dict[str, int]:
        """Number of values of each hyperparameter that had a choice."""
        return {name: len(values) for name, values in self.grid.items() if len(values) > 1}

    @property
    def effort(self) -> str:
        """What was tuned, and over how many values."""
        listed = (f"{name} ({count} values)" for name, count in self.counts.items())
        return ", ".join(listed) or "nothing"

    @property
    def is_at_edge(self) -> bool:
        """Whether a better value may lie outside the grid."""
        return any(
            self.chosen.get(k) in (min(self.grid[k]), max(self.grid[k])) for k in self.counts
        )


@dataclasses.dataclass(frozen=True)
class Tried:
    """At which size the claims of a figure were tried, and what was tuned.

    Attributes:
      size: model, data and steps, in a dozen words.
      is_papers_size: whether the paper's own experiment has this size. Only then can a comparison
        of trained models speak against a claim.
      tuning: arm -> how it was tuned.
      fixed: what all arms share without tuning.
      reported: seeds of the runs that the claims are about.
      doubts: reasons not to trust the comparisons, such as less noise that loses.
      data: name -> fingerprint of the records.
    """

    size: str
    is_papers_size: bool = False
    tuning: Mapping[str, Tuning] = dataclasses.field(default_factory=dict)
    fixed: str = ""
    reported: Sequence[int] = ()
    doubts: Sequence[str] = ()
    data: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def unfair(self) -> str:
        """Why the arms cannot be compared; empty if they can."""
        found = list(self.doubts)
        arms = sorted(self.tuning, key=lambda arm: math.prod(self.tuning[arm].counts.values()))
        if arms:
            few, many = (self.tuning[arm].counts for arm in (arms[0], arms[-1]))
            # Grids need not be equally fine, if they have the same hyperparameters.
            if any(few.keys() != self.tuning[arm].counts.keys() for arm in arms) or (
                math.prod(many.values()) > 2 * math.prod(few.values())
            ):
                efforts = "; ".join(f"{self.tuning[a].effort} of {a}" for a in (arms[0], arms[-1]))
                found.append(f"the arms are not tuned alike: {efforts}")
        for arm, tuning in self.tuning.items():
            if set(tuning.seeds) & set(self.reported):
                found.append(f"{arm} is tuned on seeds that are reported")
                break
        return "; ".join(found)

    @property
    def tuned(self) -> str:
        """What was tuned, in words."""
        if not self.tuning:
            return self.fixed
        first = next(iter(self.tuning.values()))
        edge = sum(tuning.is_at_edge for tuning in self.tuning.values())
        arms: dict[str, list[str]] = {}
        for arm, tuning in self.tuning.items():
            arms.setdefault(tuning.effort, []).append(arm)
        text = first.effort
        if len(arms) > 1:
            text = "; ".join(f"{effort} for {', '.join(names)}" for effort, names in arms.items())
        elif first.counts:
            text += f" for each of {len(self.tuning)} arms"
        text += f", on {len(set(first.seeds))} seed(s) of their own" if first.seeds else ""
        if edge:
            text += f"; {edge} arm(s) have the best value at the edge of the grid"
        return text + (f"; {self.fixed}" if self.fixed else "")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "size": self.size,
            "is_papers_size": self.is_papers_size,
            "tuned": self.tuned,
            "unfair": self.unfair,
            "tuning": {arm: _plain(dataclasses.asdict(of)) for arm, of in self.tuning.items()},
            "data": dict(self.data),
        }


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
      seeds: number of trainings of an arm that it rests on; 0: it was computed.
      power: chance of finding, at so many seeds, an effect of the size claimed (of the size found,
        if the source gives none).
    """

    claim: str
    measured: Any
    expected: Any
    holds: bool | None
    note: str = ""
    source: Source = dataclasses.field(kw_only=True)
    p_value: float | None = dataclasses.field(default=None, kw_only=True)
    seeds: int = dataclasses.field(default=0, kw_only=True)
    power: float | None = dataclasses.field(default=None, kw_only=True)

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
    effect: float | None = None,
) -> Claim:
    """That one mean lies below another: a paired t-test over seeds.

    Args:
      claim: the statement.
      smaller: of each seed, what is said to be smaller.
      larger: of the same seeds, what it is smaller than.
      note: added to the number of seeds.
      source: who says so.
      room: how far ``smaller`` may lie above and the claim still hold ("no worse than").
      effect: the difference that the source states, for the power; None: ``room``, or what is
        found.
    """
    gap = np.asarray(smaller, float) - np.asarray(larger, float)
    seeds, mean, error, reach = _estimate(gap)
    expected = "below 0" if room == 0 else f"below {room:g}"
    if not 0 < error < math.inf:
        said = f"{mean:.4g}, {seeds} seed{'s' * (seeds > 1)}"
        holds = mean < room if error == 0 and mean != room else None
        return Claim(claim, said, expected, holds, note, source=source, seeds=seeds)
    power = _power(effect or room or abs(mean), error, seeds)
    p_value = 2 * float(stats.t.sf(abs(mean - room) / error, seeds - 1))
    found = f"{mean:.4g} [{mean - reach:.4g}, {mean + reach:.4g}], {seeds} seeds"
    if p_value > ERROR_RATE:
        needed = _deciding(abs(mean - room) / (error * math.sqrt(seeds)), seeds)
        note = f"{note}; {needed} seeds would decide".removeprefix("; ")
    return Claim(
        claim,
        found,
        expected,
        mean < room,
        note,
        source=source,
        p_value=p_value,
        seeds=seeds,
        power=power,
    )


def _power(effect: float, error: float, seeds: int) -> float:
    """Chance that a two-sided t-test over so many seeds finds an effect, given its error."""
    limit = float(stats.t.ppf(1 - ERROR_RATE / 2, seeds - 1))
    return float(stats.nct.sf(limit, seeds - 1, effect / error))


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
    seeds, mean, error, reach = _estimate(np.asarray(values, float))
    inside = low <= mean - reach and mean + reach <= high
    outside = mean + reach < low or mean - reach > high
    said = f"{mean:.4g} [{mean - reach:.4g}, {mean + reach:.4g}], {seeds} seeds"
    holds = True if inside else (False if outside else None)
    power = _power((high - low) / 2, error, seeds) if 0 < error < math.inf else None
    return Claim(
        claim,
        said,
        f"{low:g} to {high:g}",
        holds,
        note,
        source=source,
        seeds=seeds,
        power=power,
    )


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
            why = f"{made[k].note}; not after Holm's correction".removeprefix("; ")
            note = why if p_value <= ERROR_RATE else made[k].note
            made[k] = dataclasses.replace(made[k], holds=None, note=note)
    return made


def at_this_size(claims: Sequence[Claim], tried: Tried | None) -> list[Claim]:
    """Leaves undecided what these trainings cannot decide.

    That is any comparison of arms that are not tuned alike; and a failure of somebody else's claim
    below the size or the power that it takes to see what is claimed.
    """
    return [_fair(claim, tried) for claim in claims]


def _fair(claim: Claim, tried: Tried | None) -> Claim:
    if not claim.seeds or claim.source == "arithmetic":
        return claim
    why = "" if tried is None else tried.unfair
    if not why and claim.holds is False and claim.source != "ours":
        if tried is None or not tried.is_papers_size:
            found = "another value" if claim.p_value is None else "the opposite"
            why = f"{found} is found at this size, which is not the paper's"
        elif claim.power is not None and claim.power < LEAST_POWER:
            why = f"power {claim.power:.0%}"
    if not why:
        return claim
    return dataclasses.replace(claim, holds=None, note=f"{claim.note}; {why}".removeprefix("; "))


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
      notes: what a reader must know (other data, what is accounted how, ...).
      tried: at which size, and what was tuned; None: everything is computed.
    """

    claims: list[Claim]
    files: list[pathlib.Path]
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    tried: Tried | None = None

    def __post_init__(self) -> None:
        """Judges differences over seeds together, and no claim beyond what was tried."""
        object.__setattr__(self, "claims", at_this_size(judged(self.claims), self.tried))

    def to_json(self, figure: str) -> dict[str, Any]:
        """The JSON object of ``dpfl reproduce``."""
        return {
            "figure": figure,
            "claims": [claim.to_json() | quoted(figure, claim.claim) for claim in self.claims],
            "tried": None if self.tried is None else self.tried.to_json(),
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
