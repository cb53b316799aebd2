"""What every silo mechanism is: it draws, bounds, scales its noise, and says what that costs.

One object per silo, so that silos may differ in everything that is a number. All silos of a
federation have the same kind and options: one compiled program serves them all.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np

from dpfl_jax.accounting import NoiseLaw
from dpfl_jax.accounting.cells import Contribution, NoisedSums
from dpfl_jax.clipping import ClippedGradResult, Flat, Rule, clipped_grad
from dpfl_jax.config.kinds import SILOS, Named
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.data import Silo
from dpfl_jax.mechanisms.mechanism import check_noise_law, check_noise_multiplier
from dpfl_jax.mechanisms.participation import require_positive
from dpfl_jax.mechanisms.unit_losses import mean_of_examples, pieces_of_user
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Poisson
from dpfl_jax.sampling.base import binomial_bound

PyTree = Any
LossFn = Callable[..., jax.Array]
SumFn = Callable[..., ClippedGradResult]


@dataclasses.dataclass(frozen=True)
class SiloFacts:
    """What is public about a silo.

    Attributes:
      num_records: records it holds.
      num_subjects: subjects it holds.
    """

    num_records: int
    num_subjects: int

    @classmethod
    def of(cls, silo: Silo) -> SiloFacts:
        """The facts of a silo that is here."""
        return cls(silo.num_records, silo.num_subjects)


@dataclasses.dataclass(frozen=True, eq=False)
class SiloDraw:
    """The units of one local step.

    Attributes:
      positions: int64 [n], or [n, g] for units of several records (-1: none).
      weight: float32 [n], from 0 to 1: what each unit's clipped gradient is multiplied by.
    """

    positions: np.ndarray
    weight: np.ndarray

    @property
    def size(self) -> int:
        """Number of units."""
        return len(self.positions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiloMechanism(Named, abc.ABC, kinds=SILOS):
    """A silo's local step.

    Attributes:
      batch_size: expected records per local step; give this or ``sampling_prob``.
      sampling_prob: q, probability of each record in each local step.
      max_items_per_subject: K, most records of a subject in this silo. Enforced on the data
        before the run; public.
      clip_norm: C.
      noise_multiplier: sigma; the noise on the sum has stddev sigma * C. None until calibrated.
      noise: ``"exact"`` or ``"float"``, as of central mechanisms.
    """

    batch_size: float | None = None
    sampling_prob: float | None = None
    max_items_per_subject: int = 1
    clip_norm: float = 1.0
    noise_multiplier: float | None = None
    noise: NoiseLaw = "exact"

    unit: ClassVar[str] = "subject"
    private: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Validates."""
        super().__post_init__()
        require_positive("clip_norm", self.clip_norm)
        if (self.batch_size is None) == (self.sampling_prob is None):
            raise BadInputError(
                f"{self.kind}: give either batch_size or sampling_prob, and only one of them"
            )
        if self.batch_size is not None:
            require_positive("batch_size", self.batch_size)
        if self.sampling_prob is not None and not 0.0 < self.sampling_prob <= 1.0:
            raise BadInputError(
                f"sampling_prob is {self.sampling_prob}, but it must be above 0 and at most 1"
            )
        if self.max_items_per_subject < 1:
            raise BadInputError(
                f"max_items_per_subject is {self.max_items_per_subject}, but it must be at least 1"
            )
        check_noise_multiplier(self.noise_multiplier)
        check_noise_law(self.noise)

    # ---- what runs -------------------------------------------------------------------------

    @property
    def layout(self) -> tuple[Any, ...]:
        """What must be equal in all silos: one program and one kind of event serves them."""
        return (type(self), self.noise)

    def num_units(self, facts: SiloFacts) -> int:
        """Units of a silo that may be drawn: its records."""
        return facts.num_records

    def probability(self, facts: SiloFacts) -> float:
        """Of each record; a silo smaller than its batch takes all its records at every step."""
        if self.sampling_prob is not None:
            return self.sampling_prob
        assert self.batch_size is not None
        return min(1.0, self.batch_size / max(facts.num_records, 1))

    def expected_records(self, facts: SiloFacts) -> float:
        """Expected records of a local step, for estimates of cost."""
        return self.probability(facts) * facts.num_records

    def divisor(self, facts: SiloFacts) -> float:
        """What the noised sum is divided by: the expected number of units, never the realised one.

        The noise shows it: a number counted in the data would be released with it.
        """
        # proof: divisor-1
        return max(self.probability(facts) * self.num_units(facts), 1.0)

    def at_round(self, round_index: int) -> SiloMechanism:
        """The mechanism in a round; only mechanisms whose units may leave differ by round."""
        del round_index
        return self

    def draw(self, silo: Silo, key: RootKey, step: int) -> SiloDraw:
        """Draws the units of a local step.

        Args:
          silo: whose records.
          key: root key of this silo in this round; used for nothing else.
          step: local step.
        """
        return self.assemble(silo, self.select(silo, key, step), key, step)

    def select(self, silo: Silo, key: RootKey, step: int) -> np.ndarray:
        """Local records (or subjects) of a step, int64 [m], sorted."""
        facts = SiloFacts.of(silo)
        prob, units = self.probability(facts), self.num_units(facts)
        if units == 0:
            return np.zeros(0, np.int64)
        # proof: records-1
        return Poisson(prob).indices(key, step, units)

    def assemble(self, silo: Silo, chosen: np.ndarray, key: RootKey, step: int) -> SiloDraw:
        """Makes units of the local records ``chosen``; here each is its own."""
        del key, step
        return SiloDraw(silo.first + chosen, np.ones(len(chosen), np.float32))

    def unit_size(self, facts: SiloFacts) -> int | None:
        """Records a unit may hold, or None if a unit is one record."""
        del facts
        return None

    def usual_size(self, facts: SiloFacts, tail: float = 1e-15) -> int:
        """A number of units, public, that draws of a silo with these facts seldom exceed."""
        return binomial_bound(self.num_units(facts), self.probability(facts), tail)

    def most_units(self, facts: SiloFacts) -> int:
        """A public number, no smaller than ``size_bound`` of any silo with these facts."""
        return self.usual_size(facts)

    def size_bound(self, silo: Silo, tail: float = 1e-15) -> int:
        """A number of units that a draw exceeds with probability at most ``tail``."""
        return self.usual_size(SiloFacts.of(silo), tail)

    def rule(self, clip_norm: Any) -> Rule:
        """The clip rule at a clip norm (a float, or an array on the device)."""
        return Flat(clip_norm)

    def unit_loss(self, loss_fn: LossFn) -> LossFn:
        """Turns the loss of one record into the loss of one unit.

        Of a unit of several records: one that also takes pieces of it (``mean_of_examples``).
        """
        return loss_fn

    def clipped_grad(
        self, loss_fn: LossFn, *, examples_at_once: int | None = None, **options: Any
    ) -> SumFn:
        """Returns ``(params, units, mask, weight, clip_norm) -> ClippedGradResult``.

        Args:
          loss_fn: ``(params, record) -> scalar``.
          examples_at_once: of a unit that holds more records, so many are processed at once, and
            gradients are added up before the norm is taken: padding takes no time. None: all.
          **options: passed to ``clipping.clipped_grad``; strategies other than ``"auto"`` and
            ``"scan"`` process a unit at once.
        """
        unit_loss = self.unit_loss(loss_fn)
        formed = options.get("strategy", "auto") in ("auto", "scan")
        at_once = examples_at_once if formed and unit_loss is not loss_fn else None

        def cut(unit: PyTree) -> PyTree:
            assert at_once is not None
            pieces = pieces_of_user(unit, at_once)
            return {**pieces, "there": pieces["mask"].any(axis=1)}

        def summed(
            params: PyTree, units: PyTree, mask: jax.Array, weight: jax.Array, clip_norm: jax.Array
        ) -> ClippedGradResult:
            large = at_once is not None and units["mask"].shape[-1] > at_once
            how = {**options, "pieces": cut} if large else options
            bounded = clipped_grad(unit_loss, rule=self.rule(clip_norm), **how)
            return bounded(params, units, mask=mask, weight=weight)

        return summed

    @property
    def sigma(self) -> float:
        """The noise multiplier; raises BadInputError before calibration."""
        if self.noise_multiplier is None:
            raise BadInputError(
                f"this {self.kind} mechanism has no noise multiplier: set noise_multiplier, or "
                "calibrate the federation"
            )
        return self.noise_multiplier

    # ---- what is accounted -----------------------------------------------------------------

    @abc.abstractmethod
    def contribution(self, unit: str) -> Contribution | None:
        """What one record, or one subject, has in a draw; None: it is what is drawn."""

    def scheme(self, facts: SiloFacts) -> Any:
        """How units are drawn, as it is accounted (``accounting.cells``)."""
        return Poisson(self.probability(facts))

    def noised_sums(self, facts: SiloFacts, steps: int, unit: str) -> NoisedSums:
        """What is accounted of ``steps`` local steps for one record, or one subject."""
        scheme, units = self.scheme(facts), self.num_units(facts)
        of = self.contribution(unit)
        return NoisedSums(scheme, self.sigma, steps, units, contribution=of)

    def event(self, facts: SiloFacts, steps: int) -> Any:
        """The event of ``steps`` local steps for one unit (``unit``) of this silo."""
        return self.noised_sums(facts, steps, self.unit).event()

    def subject_event(self, facts: SiloFacts, steps: int) -> Any:
        """The same for one subject, whatever the mechanism's own unit."""
        return self.noised_sums(facts, steps, "subject").event()


def runs_of(subjects: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of the runs of equal values in a sorted array."""
    starts = np.flatnonzero(np.diff(subjects, prepend=-1))
    return starts, np.diff(np.concatenate([starts, [len(subjects)]]))


def grouped_positions(first: int, chosen: np.ndarray, subjects: np.ndarray, size: int) -> Any:
    """Puts each subject's records in a row: int64 [subjects, size], -1 where there is none."""
    starts, lengths = runs_of(subjects)
    rows = np.repeat(np.arange(len(starts)), lengths)
    columns = np.arange(len(chosen)) - np.repeat(starts, lengths)
    out = np.full((len(starts), size), -1, np.int64)
    out[rows, columns] = first + chosen
    return out


__all__ = [
    "LossFn",
    "PyTree",
    "SiloDraw",
    "SiloFacts",
    "SiloMechanism",
    "SumFn",
    "grouped_positions",
    "mean_of_examples",
    "runs_of",
]
