"""Silo participations: which records of a silo a local step draws, and how many of a subject's.

A participation resolves to a sampling scheme once it knows the silo's public sizes (``SiloFacts``),
and bounds what a record, or a subject, contributes to a draw (``contribution``). A participation, a
clip rule and noise make a silo's mechanism. A new participation is a frozen dataclass that extends
``SiloParticipation``.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from dpfl_jax.accounting.cells import (
    AveragedUnits,
    Contribution,
    Everyone,
    Sensitivity,
    SeveralUnits,
)
from dpfl_jax.accounting.rates import TwoStage
from dpfl_jax.config.kinds import DERIVED, SILO_PARTICIPATIONS, Named
from dpfl_jax.errors import BadInputError, at_least, probability
from dpfl_jax.federation.data import Silo
from dpfl_jax.mechanisms.participation import LossFn, mean_of_examples, require_positive
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import PersonalizedPoisson, Poisson, choose_within_users
from dpfl_jax.sampling.samplers import places_in_runs
from dpfl_jax.sampling.schemes import binomial_bound

Self = TypeVar("Self", bound="SiloParticipation")
Protected = Literal["subject", "record"]


@dataclasses.dataclass(frozen=True)
class SiloFacts:
    """The public sizes of a silo.

    Attributes:
      num_records: number of records in the silo.
      num_subjects: number of subjects with a record in the silo.

    Examples:
      >>> from dpfl_jax.federation import SiloFacts
      >>> SiloFacts(num_records=500, num_subjects=200).num_subjects
      200
    """

    num_records: int
    num_subjects: int

    @classmethod
    def of(cls, silo: Silo) -> SiloFacts:
        """Returns the sizes of a silo whose records are here."""
        return cls(silo.num_records, silo.num_subjects)


@dataclasses.dataclass(frozen=True, eq=False)
class SiloDraw:
    """The units of one local step.

    Attributes:
      positions: int64 [n], or [n, g] for units with several records (-1 for padding).
      weight: float32 [n], from 0 to 1, the factor on each unit's clipped gradient.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.federation.participation import SiloDraw
      >>> SiloDraw.of(np.array([3, 8])).weight.tolist()
      [1.0, 1.0]
    """

    positions: np.ndarray
    weight: np.ndarray

    @classmethod
    def of(cls, positions: np.ndarray) -> SiloDraw:
        """Returns a draw of units with weight 1."""
        return cls(positions, np.ones(len(positions), np.float32))

    @property
    def size(self) -> int:
        """The number of units that were drawn."""
        return len(self.positions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiloParticipation(Named, abc.ABC, kinds=SILO_PARTICIPATIONS):
    """Which records of a silo take part in which local step.

    Attributes:
      drawn: what is drawn, in words.
      personal: whether each record has its own sampling rate, which the silo keeps
        (``Silo.rates``).
      one_unit: whether all records of a step are one unit.

    Examples:
      >>> from dpfl_jax.federation import Subjects
      >>> from dpfl_jax.federation.participation import SiloParticipation
      >>> isinstance(Subjects(sampling_prob=0.1), SiloParticipation)
      True
    """

    drawn: ClassVar[str] = "records"
    personal: ClassVar[bool] = False
    one_unit: ClassVar[bool] = False

    # ---- what is accounted -----------------------------------------------------------------

    @property
    @abc.abstractmethod
    def protected(self) -> Protected:
        """What the mechanism protects, ``"subject"`` or ``"record"``."""

    @property
    @abc.abstractmethod
    def max_records_per_subject(self) -> int:
        """The most records of a subject in the silo, L: public, and enforced before the run."""

    @property
    def layout(self) -> tuple[Any, ...]:
        """What must be equal in all silos, so that one program and one kind of event serve them."""
        return (type(self),)

    @property
    @abc.abstractmethod
    def has_fixed_sampling_prob(self) -> bool:
        """Whether the sampling probability is a constant, whatever records the silo has."""

    @abc.abstractmethod
    def sampling_prob_of(self, facts: SiloFacts) -> float:
        """Returns the largest probability with which a unit is drawn in a step."""

    @abc.abstractmethod
    def at_sampling_prob(self: Self, sampling_prob: float, cap: int | None = None) -> Self:
        """Returns a copy with this sampling probability, and with ``cap`` for L if it is given."""

    @abc.abstractmethod
    def scheme_of(self, facts: SiloFacts, protected: str) -> Any:
        """Returns the sampling scheme that is accounted for a ``"subject"`` or a ``"record"``."""

    @abc.abstractmethod
    def contribution(self, protected: str) -> Contribution | None:
        """Returns what a ``"subject"`` or ``"record"`` has in a draw; None: it is what is drawn."""

    def check_run(
        self, local_steps: int, participation_prob: float, noise_multiplier: float
    ) -> None:
        """Raises BadInputError if personal rates were made for another run than this one.

        Args:
          local_steps: local steps in a round.
          participation_prob: probability with which the silo takes part in a round.
          noise_multiplier: noise multiplier of every local step.
        """

    # ---- what runs -------------------------------------------------------------------------

    @abc.abstractmethod
    def divisor(self, facts: SiloFacts) -> float:
        """Returns what the noised sum is divided by: an expected number, never the actual one.

        The size of the noise reveals the divisor, so that it must not be counted in private data.
        """

    def check(self, silo: Silo) -> None:
        """Raises BadInputError unless units can be drawn from the silo."""

    def draw(self, silo: Silo, key: RootKey, step: int) -> SiloDraw:
        """Draws the units of a local step.

        Args:
          silo: the silo to draw from.
          key: key of this silo in this round, used for nothing else.
          step: number of the local step.
        """
        return self.assemble(silo, self.select(silo, key, step), key, step)

    @abc.abstractmethod
    def select(self, silo: Silo, key: RootKey, step: int) -> np.ndarray:
        """Draws the local records (or subjects) of a step, int64 [m], sorted."""

    def assemble(self, silo: Silo, chosen: np.ndarray, key: RootKey, step: int) -> SiloDraw:
        """Returns the units made of the local records ``chosen``; here each record is one."""
        del key, step
        return SiloDraw.of(silo.first + chosen)

    def unit_loss(self, loss_fn: LossFn) -> LossFn:
        """Returns the loss of one unit, made from the loss of one record.

        If a unit has several records, the loss also takes pieces of it (``mean_of_examples``).
        """
        return loss_fn

    def unit_records(self, facts: SiloFacts) -> int | None:
        """Returns the largest number of records in a unit, or None if a unit is one record."""
        del facts
        return None

    def num_units(self, facts: SiloFacts) -> int:
        """Returns the number of units that may be drawn; here the number of records."""
        return facts.num_records

    def expected_records(self, facts: SiloFacts) -> float:
        """Returns the expected number of records in a local step, for estimates of cost."""
        return self.sampling_prob_of(facts) * facts.num_records

    def public_size_guess(self, facts: SiloFacts, tail: float = 1e-15) -> int:
        """Returns a public number of units that a draw exceeds with about probability ``tail``."""
        return binomial_bound(self.num_units(facts), self.sampling_prob_of(facts), tail)

    def public_size_bound(self, facts: SiloFacts) -> int:
        """Returns a public number, at least ``size_bound`` of any silo with these sizes."""
        return self.public_size_guess(facts)

    def size_bound(self, silo: Silo, tail: float = 1e-15) -> int:
        """Returns a number of units that a draw exceeds with probability at most ``tail``."""
        return self.public_size_guess(SiloFacts.of(silo), tail)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AtOneRate(SiloParticipation, abc.ABC, kinds=SILO_PARTICIPATIONS):
    """Participations that draw all units with one probability.

    Attributes:
      batch_size: expected records per local step; give this or ``sampling_prob``.
      sampling_prob: probability q of each unit in each local step.
      max_records_per_subject: most records of a subject in the silo, L: public, and enforced on the
        data before the run.
    """

    batch_size: float | None = None
    sampling_prob: float | None = None
    max_records_per_subject: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.batch_size is None) == (self.sampling_prob is None):
            raise BadInputError(
                "mechanism: give either batch_size or sampling_prob, and only one of them"
            )
        if self.batch_size is not None:
            require_positive("batch_size", self.batch_size)
        probability("sampling_prob", self.sampling_prob, zero=False)
        at_least("max_records_per_subject", self.max_records_per_subject, 1)

    @property
    def protected(self) -> Protected:
        return "subject"

    @property
    def has_fixed_sampling_prob(self) -> bool:
        return self.sampling_prob is not None

    def sampling_prob_of(self, facts: SiloFacts) -> float:
        # A silo with fewer records than a batch takes all of them at every step.
        if self.sampling_prob is not None:
            return self.sampling_prob
        assert self.batch_size is not None
        return min(1.0, self.batch_size / max(facts.num_records, 1))

    def at_sampling_prob(self: Self, sampling_prob: float, cap: int | None = None) -> Self:
        changes: dict[str, Any] = {"batch_size": None, "sampling_prob": sampling_prob}
        changes |= {} if cap is None else {"max_records_per_subject": cap}
        return dataclasses.replace(self, **changes)

    def scheme_of(self, facts: SiloFacts, protected: str) -> Any:
        return Poisson(self.sampling_prob_of(facts))

    def divisor(self, facts: SiloFacts) -> float:
        # proof: divisor-1
        return max(self.sampling_prob_of(facts) * self.num_units(facts), 1.0)

    def select(self, silo: Silo, key: RootKey, step: int) -> np.ndarray:
        facts = SiloFacts.of(silo)
        sampling_prob, units = self.sampling_prob_of(facts), self.num_units(facts)
        if units == 0:
            return np.zeros(0, np.int64)
        # proof: records-1
        return Poisson(sampling_prob).indices(key, step, units)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records(_AtOneRate):
    """Records, each drawn independently.

    Attributes:
      protected: what the mechanism protects, ``"subject"`` or ``"record"``.
      batch_cap: most records of one subject in a batch; further ones are dropped at random.
      average: how a subject's records in a batch are combined: None (each counts in full),
        ``"clip_then_average"`` (the mean of their clipped gradients) or ``"average_then_clip"``
        (the gradient of their mean loss, clipped once).

    Examples:
      >>> from dpfl_jax.federation import SiloFacts
      >>> from dpfl_jax.federation.participation import Records
      >>> facts = SiloFacts(num_records=500, num_subjects=200)
      >>> Records(batch_size=50).sampling_prob_of(facts)
      0.1
    """

    protected: Protected = "subject"
    batch_cap: int | None = None
    average: Literal["clip_then_average", "average_then_clip"] | None = None

    kind: ClassVar[str] = "records"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("batch_cap", self.batch_cap, 1)
        if (self.protected == "record") + (self.batch_cap is not None) + (
            self.average is not None
        ) > 1:
            raise BadInputError(
                "mechanism: nothing is proven for protected=record, batch_cap and average "
                "together: keep one of them"
            )

    @property
    def layout(self) -> tuple[Any, ...]:
        return (*super().layout, self.protected, self.batch_cap, self.average)

    def assemble(self, silo: Silo, chosen: np.ndarray, key: RootKey, step: int) -> SiloDraw:
        """Returns the units; caps and averages count a subject's records in the whole batch."""
        subjects = silo.subject_of_record[chosen]
        _, row, count = np.unique(subjects, return_inverse=True, return_counts=True)
        places = places_in_runs(subjects)
        if self.average == "average_then_clip":
            # proof: hi-grad-avg-sensitivity-2
            positions = np.full((len(count), self.max_records_per_subject), -1, np.int64)
            positions[row, places] = silo.first + chosen
            return SiloDraw.of(positions)
        if self.average == "clip_then_average":
            # proof: hi-grad-avg-sensitivity-1
            return SiloDraw(silo.first + chosen, (1.0 / count)[row].astype(np.float32))
        if self.batch_cap is not None and len(chosen):
            ticket = key.numpy("batch-cap", step).random(len(chosen))
            order = np.lexsort((ticket, subjects))  # places in runs are those of ``subjects``
            # proof: local-group-sampling-1
            chosen = np.sort(chosen[order[places < self.batch_cap]])
        return SiloDraw.of(silo.first + chosen)

    def unit_loss(self, loss_fn: LossFn) -> LossFn:
        return mean_of_examples(loss_fn) if self.average == "average_then_clip" else loss_fn

    def unit_records(self, facts: SiloFacts) -> int | None:
        return self.max_records_per_subject if self.average == "average_then_clip" else None

    def contribution(self, protected: str) -> Contribution | None:
        if protected == self.protected == "record":
            # proof: local-item-event-1
            return None
        if self.average is not None:
            return AveragedUnits(self.max_records_per_subject)
        return SeveralUnits(self.max_records_per_subject, self.batch_cap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subjects(_AtOneRate):
    """Subjects, each drawn independently, with some of their records.

    ``batch_size`` counts records, so that it means the same compute as for other participations: a
    subject is drawn with probability batch_size / (group_size * number of subjects), or
    ``sampling_prob``.

    Attributes:
      group_size: most records of a subject in a step, G; privacy does not depend on it.

    Examples:
      >>> from dpfl_jax.federation import SiloFacts, Subjects
      >>> facts = SiloFacts(num_records=500, num_subjects=200)
      >>> Subjects(batch_size=50).sampling_prob_of(facts)
      0.25
    """

    group_size: int = 1

    kind: ClassVar[str] = "subjects"
    drawn: ClassVar[str] = "subjects"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("group_size", self.group_size, 1)

    def sampling_prob_of(self, facts: SiloFacts) -> float:
        """Returns the probability with which each subject is drawn in a step."""
        if self.sampling_prob is not None:
            return self.sampling_prob
        assert self.batch_size is not None
        return min(1.0, self.batch_size / (self.group_size * max(facts.num_subjects, 1)))

    def num_units(self, facts: SiloFacts) -> int:
        """Returns the number of the silo's subjects, who are the units."""
        # proof: subject-uls-sampling-1
        return facts.num_subjects

    def assemble(self, silo: Silo, chosen: np.ndarray, key: RootKey, step: int) -> SiloDraw:
        """Returns up to G records of each subject, chosen afresh at each step."""
        # proof: subject-uls-sampling-2
        rng = key.numpy("within-subject", step)
        local = choose_within_users(rng, silo.subject_offsets, chosen, self.group_size)
        return SiloDraw.of(np.where(local >= 0, local + silo.first, -1))

    def unit_loss(self, loss_fn: LossFn) -> LossFn:
        """Returns the mean loss of the subject's records."""
        # proof: subject-uls-sensitivity-1
        return mean_of_examples(loss_fn)

    def unit_records(self, facts: SiloFacts) -> int | None:
        return self.group_size

    def contribution(self, protected: str) -> None:
        """Returns None, because subjects themselves are drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeBatch(_AtOneRate):
    """All records of a step as one unit, with their mean loss; each record is drawn independently.

    Examples:
      >>> from dpfl_jax.federation import SiloFacts, WholeBatch
      >>> facts = SiloFacts(num_records=500, num_subjects=200)
      >>> WholeBatch(batch_size=50).sampling_prob_of(facts)
      0.1
    """

    kind: ClassVar[str] = "whole_batch"
    one_unit: ClassVar[bool] = True

    def divisor(self, facts: SiloFacts) -> float:
        """Returns 1, because what is noised is already a mean."""
        # proof: user-ldp-divisor-1
        return 1.0

    def assemble(self, silo: Silo, chosen: np.ndarray, key: RootKey, step: int) -> SiloDraw:
        # proof: user-ldp-sensitivity-1
        return SiloDraw.of((silo.first + chosen)[None, :])

    def unit_loss(self, loss_fn: LossFn) -> LossFn:
        """Returns the mean loss of the records of the batch."""
        return mean_of_examples(loss_fn)

    def unit_records(self, facts: SiloFacts) -> int | None:
        """Returns a number of records that a batch seldom exceeds."""
        return max(1, super().public_size_guess(facts))

    def public_size_guess(self, facts: SiloFacts, tail: float = 1e-15) -> int:
        return 1

    def scheme_of(self, facts: SiloFacts, protected: str) -> Any:
        """Returns ``Everyone()``: the one unit is there at every step, whatever its records."""
        return Everyone()

    def contribution(self, protected: str) -> Contribution:
        """Returns a sensitivity of 2C: a subject can turn the unit's gradient to its opposite."""
        return Sensitivity(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersonalRecords(SiloParticipation):
    """Records, each drawn independently with its own rate, which is the silo's secret.

    Attributes:
      expected_batch: public divisor b, never computed from the records or their budgets. None: it
        follows from the public distribution of budgets (``personalise``).
      setting: what is accounted, the same for all silos; set by ``personalise``.

    Examples:
      >>> from dpfl_jax.federation import PersonalRecords
      >>> PersonalRecords(expected_batch=32.0).personal
      True
    """

    expected_batch: float | None = None
    setting: TwoStage | None = dataclasses.field(default=None, metadata=DERIVED)

    kind: ClassVar[str] = "personal_records"
    personal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expected_batch is not None:
            require_positive("expected_batch", self.expected_batch)

    @property
    def protected(self) -> Protected:
        return "record"

    @property
    def max_records_per_subject(self) -> int:
        """1, because nothing here accounts for a subject with several records."""
        return 1

    @property
    def has_fixed_sampling_prob(self) -> bool:
        return True

    def sampling_prob_of(self, facts: SiloFacts) -> float:
        """Returns 1, the public bound on the rates."""
        return 1.0

    def at_sampling_prob(self: Self, sampling_prob: float, cap: int | None = None) -> Self:
        """Returns itself, because the silo has the rates."""
        return self

    def scheme_of(self, facts: SiloFacts, protected: str) -> Any:
        """Returns the scheme of a record with rate 1; records with lower rates spend less.

        For a subject it has no amplification by the draw of silos, because all of its silos may
        take part together.
        """
        if protected == "subject":
            return Poisson(1.0)
        if self.setting is None:
            raise BadInputError(
                "this rpdp mechanism has no accounting setting yet: call personal.personalise, "
                "which makes one"
            )
        return self.setting.scheme(1.0)

    def contribution(self, protected: str) -> None:
        """Returns None, because records are drawn, and a subject has only one in a silo."""

    def check_run(
        self, local_steps: int, participation_prob: float, noise_multiplier: float
    ) -> None:
        run = (local_steps, participation_prob, noise_multiplier)
        setting = self.setting
        if setting is None:
            return
        said = (setting.local_steps, setting.participation_prob, setting.noise_multiplier)
        if run != said:
            raise BadInputError(
                f"a silo runs with (local steps, participation, noise multiplier) = {run}, but "
                f"its records' rates were made for {said}: make the rates for this run "
                "(personalise)"
            )

    def divisor(self, facts: SiloFacts) -> float:
        """Returns ``expected_batch``: the true expectation would reveal secret rates."""
        if self.expected_batch is None:
            raise BadInputError(
                "this rpdp mechanism has no expected batch yet: set mechanism.expected_batch, or "
                "call personal.personalise"
            )
        # proof: rpdp-divisor-1
        return self.expected_batch

    def check(self, silo: Silo) -> None:
        self._rates(silo)

    def select(self, silo: Silo, key: RootKey, step: int) -> np.ndarray:
        if silo.num_records == 0:
            return np.zeros(0, np.int64)
        return PersonalizedPoisson(self._rates(silo)).indices(key, step, silo.num_records)

    def expected_records(self, facts: SiloFacts) -> float:
        """Returns the public ``expected_batch``; the true expectation is secret."""
        return min(self.divisor(facts), facts.num_records)

    def public_size_guess(self, facts: SiloFacts, tail: float = 1e-15) -> int:
        """Returns a guess from the public ``expected_batch``, because the rates are secret."""
        share = min(1.0, self.divisor(facts) / max(facts.num_records, 1))
        return binomial_bound(facts.num_records, share, tail)

    def public_size_bound(self, facts: SiloFacts) -> int:
        """Returns the number of all records, because the rates are secret."""
        return facts.num_records

    def size_bound(self, silo: Silo, tail: float = 1e-15) -> int:
        if silo.num_records == 0:
            return 0
        return PersonalizedPoisson(self._rates(silo)).size_bound(silo.num_records, tail)

    def _rates(self, silo: Silo) -> np.ndarray:
        rates = np.zeros(0) if silo.rates is None else silo.rates
        if len(rates) != silo.num_records:
            raise BadInputError(
                f"silo {silo.index} has {silo.num_records} records but {len(rates)} sampling "
                "rates: give one for each record (personalise)"
            )
        return rates
