"""Private selection: the best of a random number of runs, by a noisy score of held-out people.

Source: Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy" (2022, arXiv
2110.03620), Definition 1 and Theorem 2.

    K ~ truncated negative binomial of a public mean             # secret
    for i in 1 .. K:
      c_i = a cell of the grid, uniformly
      w_i = training as c_i says, with independent sampling and noise
      s_i = sum over held-out u of min(mean loss of u at w_i, B) - B / 2, plus N(0, (B sigma / 2)^2)
    release c_i, w_i and s_i of the least s_i, and nothing else

People who are trained on affect only w_i, and held-out people only s_i. So the training of each
cell and the score are each calibrated to the epsilon of the whole sweep. Subtracting B / 2 does not
change the order of scores, and lets a person move the sum by only half the bound. The random K
keeps the cost low: the best of a fixed number of runs reveals more.

Departures: the noise of the score is drawn in integers, and each person's loss is rounded to an
integer.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import dp_event

from dpfl_jax import accounting
from dpfl_jax.accounting.event_types import OneOfDpEvent
from dpfl_jax.accounting.leaves import AllocatedLeaf, flatten
from dpfl_jax.accounting.renyi import renyi_divergences
from dpfl_jax.accounting.statement import Statement, whole_number
from dpfl_jax.errors import BadInputError, positive, require
from dpfl_jax.mechanisms.calibrated import COMMON_ASSUMPTIONS, Calibrated
from dpfl_jax.noise.exact import STDDEV, draw_integer
from dpfl_jax.planning.candidates import RENYI_KINDS
from dpfl_jax.randomness import RootKey
from dpfl_jax.training.central_statement import is_earlier, parse_calibrated

SELECTION_ASSUMPTIONS = (
    "the cells of the grid, the expected number of runs, the bound of a person's loss, and the "
    "number of held-out people are public constants, fixed before looking at one person's data",
    "nobody who is held out is trained on, and who is on which side depends on nobody else; the "
    "loss of a held-out person is that of their own examples alone, up to rounding that is not "
    "accounted for",
    "how many runs there were stays secret, and so does all of those that were not chosen: nobody "
    "looks at their files, their metrics or what they computed",
)
TIME_CAVEAT = (
    "how long the sweep ran, and when its files were written, tells of the number of runs, which "
    "must stay secret: whoever sees that is outside the guarantee"
)
OUTSIDE_CAVEAT = (
    "what was tried on these people outside the sweep, to choose its grid or what its cells share, "
    "is not in this epsilon"
)
_DIGITS = 100
_MOST_RUNS = 10_000


@dataclasses.dataclass(frozen=True)
class RunCount:
    """The random number of runs: a truncated negative binomial distribution on 1, 2, ...

    Attributes:
      mean: expected number of runs.
      shape: eta of Definition 1; 0 is the logarithmic distribution, which costs least, and 1 the
        geometric distribution.
    """

    mean: float
    shape: float = 0.0

    def __post_init__(self) -> None:
        if not 1.001 <= self.mean <= _MOST_RUNS:  # nearer to 1, gamma would lose precision
            raise BadInputError(
                f"the expected number of runs is {self.mean:g}: give 1.001 or more, at most "
                f"{_MOST_RUNS:,} (--expected-runs 10)"
            )
        good = 0 <= self.shape < math.inf
        require(good, "the shape of a number of runs", self.shape, "finite and 0 or more")

    @functools.cached_property
    def gamma(self) -> float:
        """Gamma of Definition 1, rounded up so that mean and cost are at most as stated."""
        low, high = 0.0, 1.0
        while high - low > 1e-12 * high:
            middle = 0.5 * (low + high)
            if self._mean(middle) > self.mean:
                low = middle
            else:
                high = middle
        return high

    def _mean(self, gamma: float) -> float:
        if self.shape == 0:
            return (1.0 / gamma - 1.0) / -math.log(gamma)
        return self.shape * (1.0 / gamma - 1.0) / -math.expm1(self.shape * math.log(gamma))

    def probabilities(self) -> Iterator[decimal.Decimal]:
        """Yields the probabilities of 1, 2, 3, ... runs, in the caller's decimal precision."""
        gamma, shape = decimal.Decimal(self.gamma), decimal.Decimal(self.shape)
        first = -gamma.ln() if self.shape == 0 else (gamma**-shape - 1) / shape
        probability = (1 - gamma) / first
        for runs in itertools.count(1):
            yield probability
            probability *= (1 - gamma) * (runs + shape) / (runs + 1)

    def draw(self, key: RootKey) -> int:
        """Draws the number of runs from a sweep's root key, by inversion with 256 random bits."""
        with decimal.localcontext(prec=_DIGITS):
            bits = decimal.Decimal(int.from_bytes(key.derive("selection:runs"), "big"))
            left, least = bits / 2**256, decimal.Decimal(2) ** -300
            # proof: selection-runs-1
            for runs, probability in enumerate(self.probabilities(), 1):
                left -= probability
                if left < 0 or probability < least:  # beyond what 256 bits resolve
                    return runs
        raise AssertionError


def _event_at(cell: Calibrated, sigma: float) -> Any:
    return dataclasses.replace(cell, noise_multiplier=sigma).event()


def _check_cell(cell: Calibrated) -> None:
    """Raises BadInputError unless Renyi divergences of its event are known."""
    try:
        event = cell.event()
        leaves = flatten(event, accounting.ADD_OR_REMOVE).leaves
        has_renyi = not any(isinstance(leaf, AllocatedLeaf) for leaf, _ in leaves)
        has_renyi &= bool(np.isfinite(renyi_divergences(event, np.array([2.0]))).all())
    except BadInputError:
        has_renyi = False
    if not has_renyi:
        raise BadInputError(
            "a private sweep is accounted with Renyi divergences, and none that count its sampling "
            f"are known for mechanism.kind={cell.mechanism.kind}: use mechanism.kind={RENYI_KINDS}"
        )


@dataclasses.dataclass(frozen=True)
class Selection:
    """A private selection among runs: its scores, event and guarantee.

    Attributes:
      cells: the distinct trainings of the grid.
      runs: distribution of the number of runs.
      bound: B, the largest mean loss that counts for a person.
      held_out: number of held-out people, whose losses make the scores.
      delta: delta of the guarantee.
      score_noise: sigma of the scores: standard deviation of the noise over half the bound.
    """

    cells: tuple[Calibrated, ...]
    runs: RunCount
    bound: float
    held_out: int
    delta: float
    score_noise: float

    def __post_init__(self) -> None:
        positive("the bound of a person's loss (--loss-bound)", self.bound)
        if self.held_out < 1:
            raise BadInputError("no one is held out: raise data.validation_fraction")
        if not self.score_noise > 1e-3:
            raise BadInputError(
                f"the noise of scores is {self.score_noise:g} of the bound, but it must be above "
                "0.001: ask for a smaller privacy.epsilon"
            )

    @classmethod
    def calibrated(
        cls,
        cells: Sequence[Calibrated],
        runs: RunCount,
        bound: float,
        held_out: int,
        *,
        epsilon: float,
        delta: float,
    ) -> Selection:
        """Returns a selection with the least noise for a target, in every cell and in the score.

        Args:
          cells: trainings, whose noise multipliers are replaced.
          runs: distribution of the number of runs.
          bound: the largest mean loss that counts for a person.
          held_out: number of held-out people.
          epsilon: target of the whole sweep.
          delta: delta of the whole sweep.

        Raises:
          BadInputError: the target is out of reach, or a mechanism has no Renyi divergences.
        """
        made = cls((), runs, bound, held_out, delta, math.inf)

        def least(event: Any, whole: Any) -> float:
            """The least noise of a part that meets the target alone, and with the parts before."""
            noise = accounting.calibrate_noise_multiplier(
                lambda sigma: made.best(event(sigma)),
                epsilon,
                delta,
                relative_tolerance=1e-4,
                accountant="rdp",
            )
            low = high = noise
            while whole(high).epsilon > epsilon:
                low, high = high, 1.1 * high
            while high > 1.001 * low:
                middle = 0.5 * (low + high)
                low, high = (low, middle) if whole(middle).epsilon <= epsilon else (middle, high)
            return high

        for cell in cells:
            cell = dataclasses.replace(cell, noise_multiplier=1.0, delta=delta)
            _check_cell(cell)
            whole = functools.partial(made._with_cell, cell)
            made = whole(least(functools.partial(_event_at, cell), whole))
        score = least(dp_accounting.GaussianDpEvent, made._with_score)
        return made._with_score(score)

    def _with_cell(self, cell: Calibrated, sigma: float) -> Selection:
        more = dataclasses.replace(cell, noise_multiplier=sigma)
        return dataclasses.replace(self, cells=(*self.cells, more))

    def _with_score(self, sigma: float) -> Selection:
        return dataclasses.replace(self, score_noise=sigma)

    # ---- what runs -------------------------------------------------------------------------

    def noised(self, run: Calibrated) -> Calibrated:
        """Returns a cell's run with the noise that was chosen for it.

        Cells with one mechanism may differ in their population, because another tokenizer cuts the
        same texts into another number of examples.

        Raises:
          BadInputError: the sweep has no such cell.
        """
        for cell in self.cells:
            if cell == dataclasses.replace(
                run, noise_multiplier=cell.noise_multiplier, delta=cell.delta
            ):
                return cell
        raise BadInputError(
            "the data, mechanism or steps of a cell have changed since the noise of this sweep "
            "was chosen: start another sweep"
        )

    def score(self, losses: np.ndarray, user_offsets: np.ndarray, key: RootKey) -> float:
        """Returns the noisy mean over held-out people of their bounded mean losses.

        Args:
          losses: float [n], losses of the examples, ordered by person.
          user_offsets: int64 [people + 1], where each person's examples begin.
          key: root key of the run.
        """
        # proof: selection-score-2
        total = sum(self.shares(losses, user_offsets)) + draw_integer(key.words("selection:score"))
        return (0.5 + 0.5 * total / self._steps / self.held_out) * self.bound

    @property
    def score_stddev(self) -> float:
        """Standard deviation of the noise in a score."""
        return 0.5 * STDDEV / self._steps / self.held_out * self.bound

    def shares(self, losses: np.ndarray, user_offsets: np.ndarray) -> list[int]:
        """Returns each person's part of the sum in grid steps, at most half the bound in size.

        The arguments are those of ``score``.
        """
        offsets = np.asarray(user_offsets) - user_offsets[0]
        shares = []
        for first, last in itertools.pairwise(offsets):
            if first == last:  # a person without examples
                shares.append(0)
                continue
            mean = float(np.mean(losses[first:last], dtype=np.float64))
            part = 1.0 if math.isnan(mean) else min(max(2.0 * mean / self.bound - 1.0, -1.0), 1.0)
            # proof: selection-score-1
            shares.append(math.floor(part * self._steps))
        return shares

    @property
    def _steps(self) -> int:
        """Half the bound in grid steps of the noise, rounded down so that sigma is not less."""
        return math.floor(STDDEV / self.score_noise)

    # ---- what is accounted -----------------------------------------------------------------

    @property
    def event(self) -> Any:
        """The event of the sweep for any person, trained on or held out."""
        # proof: selection-event-1
        trained = self.best(OneOfDpEvent(tuple(cell.event() for cell in self.cells)))
        if self.score_noise == math.inf:  # not chosen yet
            return trained
        return OneOfDpEvent((trained, self.best(dp_accounting.GaussianDpEvent(self.score_noise))))

    def best(self, event: Any) -> Any:
        """Returns the event of releasing the best of this random number of runs of ``event``."""
        return dp_event.RepeatAndSelectDpEvent(event, self.runs.mean, self.runs.shape)

    @functools.cached_property
    def epsilon(self) -> float:
        """Epsilon of the whole sweep, at ``delta``."""
        return accounting.epsilon(self.event, self.delta, accountant="rdp")

    def guarantee(self, caveats: tuple[str, ...] = ()) -> accounting.Guarantee:
        """Returns the guarantee of the whole sweep for all people, trained on or held out."""
        assumed, cell_caveats = self._of_cells
        law = "logarithmic" if self.runs.shape == 0 else f"of shape {self.runs.shape:g}"
        sampling = [cell.sampling_description() for cell in self.cells]
        exact = all(cell.mechanism.noise.arithmetic == "exact" for cell in self.cells)
        steps = max(cell.steps for cell in self.cells)
        noise = accounting.noise_assumptions(
            "exact" if exact else "float",
            self.epsilon,
            self.delta,
            math.ceil(1000 * self.runs.mean) * (steps + 1),  # far more runs than will be drawn
        )
        return accounting.Guarantee(
            unit="user",
            adjacency="add-or-remove one user",
            trust="central",
            epsilon=self.epsilon,
            delta=self.delta,
            noise_multiplier=min(cell.noise_multiplier for cell in self.cells),
            accountant="Renyi divergences of a run, best of a random number of runs (Papernot and "
            "Steinke 2022, Theorem 2)",
            sampling=f"a random number of runs ({law}, mean {self.runs.mean:g}), each of a cell of "
            f"the grid drawn uniformly; in a run: {', or '.join(dict.fromkeys(sampling))}",
            assumptions=(*COMMON_ASSUMPTIONS, *assumed, *SELECTION_ASSUMPTIONS, *noise),
            caveats=(*cell_caveats, TIME_CAVEAT, OUTSIDE_CAVEAT, *caveats),
            released="every intermediate model of the best run, its cell and its noisy score",
        )

    @functools.cached_property
    def _of_cells(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The assumptions that only the cells' mechanisms make, and the cells' caveats."""
        assumed: list[str] = []
        caveats: list[str] = []
        for cell in self.cells:
            made = cell.guarantee()
            protects = (made.unit, made.adjacency, made.trust)
            if protects != ("user", "add-or-remove one user", "central"):
                raise BadInputError(
                    f"mechanism.kind={cell.mechanism.kind} has another adjacency "
                    f"({made.adjacency}) than a private sweep: use mechanism.kind={RENYI_KINDS}"
                )
            noise = accounting.noise_assumptions(
                cell.mechanism.noise.arithmetic, made.epsilon, made.delta, cell.steps
            )
            assumed += [a for a in made.assumptions if a not in (*COMMON_ASSUMPTIONS, *noise)]
            caveats += made.caveats
        return tuple(dict.fromkeys(assumed)), tuple(dict.fromkeys(caveats))

    def to_json(self) -> dict[str, Any]:
        """Returns the selection as JSON, with all that its event depends on."""

        def row(cell: Calibrated) -> dict[str, Any]:
            population = cell.population.to_json()
            return {"mechanism": cell.to_section(), "population": population, "steps": cell.steps}

        return {
            "cells": [row(cell) for cell in self.cells],
            "expected_runs": self.runs.mean,
            "shape": self.runs.shape,
            "bound": self.bound,
            "held_out": self.held_out,
            "delta": self.delta,
            "score_noise": self.score_noise,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Selection:
        """Returns the selection that ``to_json`` wrote.

        Raises:
          BadInputError: the values do not describe a selection.
        """
        cells = []
        for cell in values["cells"]:
            made = parse_calibrated(cell, values["delta"])
            if made.population.shared:
                raise BadInputError("a private sweep cannot have records with several owners")
            whole_number(cell, "steps", 1)
            cells.append(made)
        return cls(
            tuple(cells),
            RunCount(values["expected_runs"], values["shape"]),
            values["bound"],
            whole_number(values, "held_out", 1),
            values["delta"],
            values["score_noise"],
        )

    def statement(self, caveats: tuple[str, ...] = ()) -> Statement:
        """Returns the contents of the sweep's guarantee.json."""
        basis = {"system": "selection", **self.to_json()}
        return Statement.of(self.guarantee(caveats), basis, [[self.event]])


def restate(basis: dict[str, Any]) -> Statement:
    """Returns the statement of a sweep with this basis, for ``dpfl verify``.

    Raises:
      BadInputError: the basis does not describe a sweep.
    """
    made, given = Selection.from_json(basis).statement(), basis["cells"]
    if not any(is_earlier(cell["mechanism"]) for cell in given):
        return made
    cells = [
        {**now, "mechanism": cell["mechanism"]}
        for now, cell in zip(made.basis["cells"], given, strict=True)
    ]
    return made.model_copy(update={"basis": {**made.basis, "cells": cells}})
