"""Silo participations: which records of a silo a local step draws, and how much of each.

A participation resolves to a sampling scheme once it knows the silo's public sizes (``SiloFacts``),
and to what a record, or a subject, has in a draw (``contribution``). With the clip rule and the
noise it makes a silo's mechanism. A new one is a frozen dataclass that extends
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
    """What is public about a silo.

    Attributes:
      num_records: records it holds.
      num_subjects: subjects it holds.

    Examples:
      >>> from dpfl_jax.federation import SiloFacts
      >>> SiloFacts(num_records=500, num_subjects=200).num_subjects
      200
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
        """Units that count in full."""
        return cls(positions, np.ones(len(positions), np.float32))

    @property
    def size(self) -> int:
        """Number of units that were drawn."""
        return len(self.positions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiloParticipation(Named, abc.ABC, kinds=SILO_PARTICIPATIONS):
    """Which records of a silo take part in which local step.

    Attributes:
      drawn: what coins are tossed for, in words.
      personal: whether records have rates of their own, which the silo holds (``Silo.rates``).
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
        """Whom the mechanism protects."""

    @property
    @abc.abstractmethod
    def max_records_per_subject(self) -> int:
        """L, most records of a subject in the silo; enforced on the data before the run; public."""

    @property
    def layout(self) -> tuple[Any, ...]:
        """What must be equal in all silos: one program and one kind of event serves them."""
        return (type(self),)

    @property
    @abc.abstractmethod
    def has_fixed_sampling_prob(self) -> bool:
        """Whether the sampling probability is a constant, whatever the silo holds."""

    @abc.abstractmethod
    def sampling_prob_of(self, facts: SiloFacts) -> float:
        """The largest probability with which a unit is drawn in a step."""

    @abc.abstractmethod
    def at_sampling_prob(self: Self, sampling_prob: float, cap: int | None = None) -> Self:
        """A copy that draws each unit with this probability, and takes ``cap`` for L."""

    @abc.abstractmethod
    def scheme_of(self, facts: SiloFacts, protected: str) -> Any:
        """How units are drawn, as it is accounted (``accounting.cells``) for whom."""

    @abc.abstractmethod
    def contribution(self, protected: str) -> Contribution | None:
        """What one record, or one subject, has in a draw; None: it is what is drawn."""

    def check_run(
        self, local_steps: int, participation_prob: float, noise_multiplier: float
    ) -> None:
        """Raises BadInputError unless this is what is accounted.

        Args:
          local_steps: of a round.
          participation_prob: with which the silo takes part in a round.
          noise_multiplier: of every local step.
        """

    # ---- what runs -------------------------------------------------------------------------

    @abc.abstractmethod
    def divisor(self, facts: SiloFacts) -> float:
        """What the noised sum is divided by: an expected number, never the realised one.

        The noise shows it: a number counted in the data would be released with it.
        """

    def check(self, silo: Silo) -> None:
        """Raises BadInputError unless the silo can be drawn from."""

    def draw(self, silo: Silo, key: RootKey, step: int) -> SiloDraw:
        """Draws the units of a local step.

        Args:
          silo: whose records.
          key: root key of this silo in this round; used for nothing else.
          step: local step.
        """
        return self.assemble(silo, self.select(silo, key, step), key, step)

    @abc.abstractmethod
    def select(self, silo: Silo, key: RootKey, step: int) -> np.ndarray:
        """Local records (or subjects) of a step, int64 [m], sorted."""

    def assemble(self, silo: Silo, chosen: np.ndarray, key: RootKey, step: int) -> SiloDraw:
        """Makes units of the local records ``chosen``; here each is its own."""
        del key, step
        return SiloDraw.of(silo.first + chosen)

    def unit_loss(self, loss_fn: LossFn) -> LossFn:
        """Turns the loss of one record into the loss of one unit.

        Of a unit of several records: one that also takes pieces of it (``mean_of_examples``).
        """
        return loss_fn

    def unit_records(self, facts: SiloFacts) -> int | None:
        """Records a unit may hold, or None if a unit is one record."""
        del facts
        return None

    def num_units(self, facts: SiloFacts) -> int:
        """Units of a silo that may be drawn: its records."""
        return facts.num_records

    def expected_records(self, facts: SiloFacts) -> float:
        """Expected records of a local step, for estimates of cost."""
        return self.sampling_prob_of(facts) * facts.num_records

    def public_size_guess(self, facts: SiloFacts, tail: float = 1e-15) -> int:
        """A number of units, public, that draws of a silo with these facts seldom exceed."""
        return binomial_bound(self.num_units(facts), self.sampling_prob_of(facts), tail)

    def public_size_bound(self, facts: SiloFacts) -> int:
        """A public number, no smaller than ``size_bound`` of any silo with these facts."""
        return self.public_size_guess(facts)

    def size_bound(self, silo: Silo, tail: float = 1e-15) -> int:
        """A number of units that a draw exceeds with probability at most ``tail``."""
        return self.public_size_guess(SiloFacts.of(silo), tail)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AtOneRate(SiloParticipation, abc.ABC, kinds=SILO_PARTICIPATIONS):
    """All units are drawn at one rate.

    Attributes:
      batch_size: expected records per local step; give this or ``sampling_prob``.
      sampling_prob: q, probability of each unit in each local step.
      max_records_per_subject: L, most records of a subject in this silo. Enforced on the data
        before the run; public.
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
        """Of each record; a silo smaller than its batch takes all its records at every step."""
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
    """Records, each by a coin of its own.

    Attributes:
      protected: whom the mechanism protects, ``"subject"`` or ``"record"``.
      batch_cap: most records of one subject in a batch; others are dropped from it at random.
      average: of the records that a subject has in a batch: None (each counts in full),
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
                "mechanism: protected=record, batch_cap and average are given together, of which "
                "nothing is proven: keep one of them"
            )

    @property
    def layout(self) -> tuple[Any, ...]:
        return (*super().layout, self.protected, self.batch_cap, self.average)

    def assemble(self, silo: Silo, chosen: np.ndarray, key: RootKey, step: int) -> SiloDraw:
        """Looks at each subject's records of the whole batch, before anything is split."""
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
        """A subject has L records, at most ``batch_cap`` of them in a batch, or their average."""
        if protected == self.protected == "record":
            # proof: local-item-event-1
            return None
        if self.average is not None:
            return AveragedUnits(self.max_records_per_subject)
        return SeveralUnits(self.max_records_per_subject, self.batch_cap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subjects(_AtOneRate):
    """Subjects, each by a coin of its own, with some of their records.

    ``batch_size`` is of records, so that the same number means the same compute as elsewhere: a
    subject is drawn with probability batch_size / (group_size * number of subjects), or
    ``sampling_prob``.

    Attributes:
      group_size: G, most records of a subject in a step; privacy does not depend on it.

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
        """The probability with which each subject is drawn in a step."""
        if self.sampling_prob is not None:
            return self.sampling_prob
        assert self.batch_size is not None
        return min(1.0, self.batch_size / (self.group_size * max(facts.num_subjects, 1)))

    def num_units(self, facts: SiloFacts) -> int:
        """The silo's subjects: they are the units."""
        # proof: subject-uls-sampling-1
        return facts.num_subjects

    def assemble(self, silo: Silo, chosen: np.ndarray, key: RootKey, step: int) -> SiloDraw:
        """Chooses up to G records of each subject, afresh at each step."""
        # proof: subject-uls-sampling-2
        rng = key.numpy("within-subject", step)
        local = choose_within_users(rng, silo.subject_offsets, chosen, self.group_size)
        return SiloDraw.of(np.where(local >= 0, local + silo.first, -1))

    def unit_loss(self, loss_fn: LossFn) -> LossFn:
        """The mean over the subject's records."""
        # proof: subject-uls-sensitivity-1
        return mean_of_examples(loss_fn)

    def unit_records(self, facts: SiloFacts) -> int | None:
        return self.group_size

    def contribution(self, protected: str) -> None:
        """None: subjects are drawn themselves, so that nothing adds up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeBatch(_AtOneRate):
    """All records of a step together, drawn by coins, as one unit: their mean loss.

    Examples:
      >>> from dpfl_jax.federation import SiloFacts, WholeBatch
      >>> facts = SiloFacts(num_records=500, num_subjects=200)
      >>> WholeBatch(batch_size=50).sampling_prob_of(facts)
      0.1
    """

    kind: ClassVar[str] = "whole_batch"
    one_unit: ClassVar[bool] = True

    def divisor(self, facts: SiloFacts) -> float:
        """1: what is noised is a mean already."""
        # proof: user-ldp-divisor-1
        return 1.0

    def assemble(self, silo: Silo, chosen: np.ndarray, key: RootKey, step: int) -> SiloDraw:
        # proof: user-ldp-sensitivity-1
        return SiloDraw.of((silo.first + chosen)[None, :])

    def unit_loss(self, loss_fn: LossFn) -> LossFn:
        """The mean over the records of the batch."""
        return mean_of_examples(loss_fn)

    def unit_records(self, facts: SiloFacts) -> int | None:
        """The largest batch."""
        return max(1, super().public_size_guess(facts))

    def public_size_guess(self, facts: SiloFacts, tail: float = 1e-15) -> int:
        """One unit."""
        return 1

    def scheme_of(self, facts: SiloFacts, protected: str) -> Any:
        """The unit is there at every step, whichever records are drawn for it."""
        return Everyone()

    def contribution(self, protected: str) -> Contribution:
        """A subject turns the unit into another: as if one went and one came, 2C."""
        return Sensitivity(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersonalRecords(SiloParticipation):
    """Records, each by a coin with a rate of its own, which is the silo's secret.

    Attributes:
      expected_batch: b, public; never computed from the records or their budgets. None until
        personalised: then by default from the public distribution of budgets.
      setting: what is accounted, the same for all silos.

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
        """1: of a subject of several nothing here says what it costs."""
        return 1

    @property
    def has_fixed_sampling_prob(self) -> bool:
        return True

    def sampling_prob_of(self, facts: SiloFacts) -> float:
        """1, the public bound of the rates."""
        return 1.0

    def at_sampling_prob(self: Self, sampling_prob: float, cap: int | None = None) -> Self:
        """Itself: rates are the silo's."""
        return self

    def scheme_of(self, facts: SiloFacts, protected: str) -> Any:
        """Of a record at the bound of the rates; others spend less.

        Silos of a subject that has records in several may take part together: that they are drawn
        amplifies nothing for it.
        """
        if protected == "subject":
            return Poisson(1.0)
        if self.setting is None:
            raise BadInputError("this rpdp mechanism has no accounting setting: personalise it")
        return self.setting.scheme(1.0)

    def contribution(self, protected: str) -> None:
        """Records are drawn, and a subject has one in a silo."""

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
                f"its records' rates are accounted with {said}: make them for what runs "
                "(personalise)"
            )

    def divisor(self, facts: SiloFacts) -> float:
        """``expected_batch``, a public constant: the real expectation follows from secret rates."""
        if self.expected_batch is None:
            raise BadInputError("this rpdp mechanism has no expected batch: personalise it")
        # proof: rpdp-divisor-1
        return self.expected_batch

    def check(self, silo: Silo) -> None:
        self._rates(silo)

    def select(self, silo: Silo, key: RootKey, step: int) -> np.ndarray:
        if silo.num_records == 0:
            return np.zeros(0, np.int64)
        return PersonalizedPoisson(self._rates(silo)).indices(key, step, silo.num_records)

    def expected_records(self, facts: SiloFacts) -> float:
        """``expected_batch``, as declared; the real number is secret."""
        return min(self.divisor(facts), facts.num_records)

    def public_size_guess(self, facts: SiloFacts, tail: float = 1e-15) -> int:
        """By the public expected batch; the rates are the silo's own."""
        share = min(1.0, self.divisor(facts) / max(facts.num_records, 1))
        return binomial_bound(facts.num_records, share, tail)

    def public_size_bound(self, facts: SiloFacts) -> int:
        """All records: what the silo's own rates allow is nobody else's to know."""
        return facts.num_records

    def size_bound(self, silo: Silo, tail: float = 1e-15) -> int:
        if silo.num_records == 0:
            return 0
        return PersonalizedPoisson(self._rates(silo)).size_bound(silo.num_records, tail)

    def _rates(self, silo: Silo) -> np.ndarray:
        rates = np.zeros(0) if silo.rates is None else silo.rates
        if len(rates) != silo.num_records:
            raise BadInputError(
                f"silo {silo.index} has {silo.num_records} records but {len(rates)} sampling rates"
            )
        return rates
