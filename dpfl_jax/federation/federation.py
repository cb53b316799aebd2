"""A federation: which silos take part, with which mechanism, for how many rounds and steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
import numpy as np

from dpfl_jax.accounting.cells import NoisedSums
from dpfl_jax.errors import BadInputError, at_least, positive
from dpfl_jax.federation.data import FederatedData
from dpfl_jax.federation.mechanisms import SiloMechanism
from dpfl_jax.federation.participation import SiloFacts
from dpfl_jax.mechanisms.calibrated import check_noise_multiplier
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.pipeline import Balance
from dpfl_jax.sampling import FixedSize, Poisson

Cohort = FixedSize | Poisson


@dataclasses.dataclass(frozen=True)
class SiloPlan:
    """The public plan of what one silo does in a federation.

    Attributes:
      mechanism: mechanism of the silo's local steps.
      facts: public sizes of the silo.
      local_steps: local steps in a round, T_i.
      weight: weight in the server's average; never computed from private data.
      noise_multiplier: sigma; the noise on the sum of a local step has standard deviation sigma
        times the clip rule's sensitivity. None until calibrated.

    Examples:
      >>> from dpfl_jax.federation import SiloFacts, SiloPlan, local_item
      >>> facts = SiloFacts(num_records=500, num_subjects=200)
      >>> mechanism = local_item(sampling_prob=0.1, clip_norm=0.5)
      >>> plan = SiloPlan(mechanism, facts, local_steps=2, noise_multiplier=1.2)
      >>> plan.noise_stddev
      0.6
    """

    mechanism: SiloMechanism
    facts: SiloFacts
    local_steps: int
    weight: float = 1.0
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        at_least("local_steps", self.local_steps, 1)
        positive("a silo's weight", self.weight)
        if self.noise_multiplier is not None:
            check_noise_multiplier(self.noise_multiplier)

    @property
    def sigma(self) -> float:
        """The noise multiplier; 0 without privacy. Raises BadInputError before calibration."""
        if not self.mechanism.private:
            return 0.0
        if self.noise_multiplier is None:
            raise BadInputError(
                f"this {self.mechanism.kind} silo has no noise multiplier: set noise_multiplier, "
                "or calibrate the federation"
            )
        return self.noise_multiplier

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise on the clipped sum."""
        return self.sigma * self.mechanism.clip.sensitivity if self.mechanism.private else 0.0

    def to_section(self) -> dict[str, Any]:
        """Returns the mechanism's section of a configuration, with any noise multiplier."""
        section, private = self.mechanism.to_section(), self.mechanism.private
        return section | ({"noise_multiplier": self.noise_multiplier} if private else {})

    def noised_sums(self, rounds: int, unit: str) -> NoisedSums:
        """Returns the noised sums that are accounted for a ``"record"`` or a ``"subject"``."""
        participation, facts = self.mechanism.participation, self.facts
        return NoisedSums(
            participation.scheme_of(facts, unit),
            self.sigma,
            self.local_steps * rounds,
            participation.num_units(facts),
            contribution=participation.contribution(unit),
        )

    def event(self, rounds: int, unit: str | None = None) -> Any:
        """Returns the event of ``rounds`` rounds for one ``unit`` (None: the privacy unit)."""
        if not self.mechanism.private:
            return dp_accounting.NonPrivateDpEvent()
        return self.noised_sums(rounds, unit or self.mechanism.privacy_unit).event()


@dataclasses.dataclass(frozen=True)
class Federation:
    """The public plan of a whole federation, which is run and accounted.

    Attributes:
      silos: one plan for each silo of the data; silos without records do not take part.
      rounds: number of rounds R.
      max_silos_per_subject: most silos in which one subject has records, J. No silo can check this
        alone.
      cohort: how the silos of a round are drawn, which is public; None: all take part.

    Examples:
      >>> from dpfl_jax.federation import Federation, SiloFacts, SiloPlan, hi_grad_avg
      >>> facts = SiloFacts(num_records=500, num_subjects=200)
      >>> mechanism = hi_grad_avg(sampling_prob=0.1, max_records_per_subject=2)
      >>> silo = SiloPlan(mechanism, facts, local_steps=1)
      >>> federation = Federation((silo, silo), rounds=10, max_silos_per_subject=1)
      >>> federation.participants.tolist()
      [0, 1]
    """

    silos: tuple[SiloPlan, ...]
    rounds: int
    max_silos_per_subject: int
    cohort: Cohort | None = None

    def __post_init__(self) -> None:
        if not self.silos:
            raise BadInputError("the federation has no silos: give at least one SiloPlan")
        at_least("rounds", self.rounds, 1)
        if not 1 <= self.max_silos_per_subject <= len(self.silos):
            raise BadInputError(
                f"max_silos_per_subject is {self.max_silos_per_subject}, but it must be between 1 "
                f"and the {len(self.silos)} silos there are"
            )
        if len({plan.mechanism.layout for plan in self.silos}) > 1:
            raise BadInputError(
                "silos have different mechanisms: give all of them the same kind and options; only "
                "numbers may differ"
            )
        if isinstance(self.cohort, FixedSize):
            self.cohort.size_bound(len(self.silos))

    @property
    def mechanism(self) -> SiloMechanism:
        """The first silo's mechanism; those of all silos have the same kind."""
        return self.silos[0].mechanism

    @property
    def participants(self) -> np.ndarray:
        """The numbers of the silos that hold records, int64."""
        return np.flatnonzero([plan.facts.num_records > 0 for plan in self.silos])

    @property
    def members(self) -> list[SiloPlan]:
        """The plans of the silos that hold records."""
        return [plan for plan in self.silos if plan.facts.num_records > 0]

    @property
    def least_subjects(self) -> int:
        """The fewest subjects in all silos together that the silos' sizes allow."""
        counts = [plan.facts.num_subjects for plan in self.silos]
        return max(max(counts), math.ceil(sum(counts) / self.max_silos_per_subject))

    @property
    def participation(self) -> float:
        """The probability with which a silo takes part in a round."""
        if self.cohort is None:
            return 1.0
        if isinstance(self.cohort, FixedSize):
            return self.cohort.size / len(self.silos)
        return self.cohort.rate

    @property
    def max_local_steps(self) -> int:
        """The most local steps of any silo in a round."""
        return max(plan.local_steps for plan in self.silos)

    @property
    def silos_per_round(self) -> int:
        """An upper bound on the number of silos in a round."""
        most = len(self.participants)
        if self.cohort is None or not isinstance(self.cohort, FixedSize):
            return most
        return min(most, self.cohort.size)

    def cohort_of(
        self, key: RootKey, round_index: int, silo_key: Callable[[int], RootKey] | None = None
    ) -> np.ndarray:
        """Returns the silos of a round, int64, sorted.

        Args:
          key: the run's root key.
          round_index: number of the round, from 0.
          silo_key: returns each silo's key in this round, with which the silo draws whether it
            takes part (``participation_prob``); None: keys are derived from ``key``.
        """
        if self.cohort is None:
            return self.participants
        if isinstance(self.cohort, Poisson):
            key_of = silo_key or (lambda i: key.child("silo", i, round_index))
            members = self.participants.tolist()
            return np.array([i for i in members if self.takes_part(key_of(i))], np.int64)
        drawn = self.cohort.indices(key.child("silo-cohort"), round_index, len(self.silos))
        return np.intersect1d(drawn, self.participants)

    def takes_part(self, key: RootKey) -> bool:
        """Returns whether a silo takes part, by a coin from its key in this round."""
        if not isinstance(self.cohort, Poisson):
            return True
        words = int.from_bytes(key.derive("take-part")[:8], "little")
        # proof: rpdp-silos-1
        return (words >> 11) * 2.0**-53 < self.cohort.rate

    def with_noise(self, sigmas: Sequence[float]) -> Federation:
        """Returns a copy with these noise multipliers, one per silo; itself without privacy."""
        if not self.mechanism.private:
            return self
        silos = tuple(
            dataclasses.replace(plan, noise_multiplier=float(sigma))
            for plan, sigma in zip(self.silos, sigmas, strict=True)
        )
        return dataclasses.replace(self, silos=silos)

    def balance(self, dim: int) -> Balance:
        """Returns noise and signal of a run, for a model with ``dim`` parameters (d).

        In a round, silo i takes T_i steps along (clipped sum + noise) / b_i. The clipped sum over b
        has a norm of at most about C. Its noise has standard deviation sigma C / b in each of d
        coordinates. Averaged with weights w_i that add up to 1, and added up over R rounds, in
        units of the learning rate:

            signal  at most  R sum_i w_i T_i C_i                                 if all align
            noise   about    sqrt(R d sum_i w_i^2 T_i (sigma_i C_i / b_i)^2)     a random walk

        If the noise moves parameters farther than the signal can, a run learns nothing.
        """
        plans = self.members
        # Weights are relative to those of the silos that take part, on average.
        total = sum(plan.weight for plan in plans) * self.participation
        variance = signal = 0.0
        for plan in plans:
            mechanism, share = plan.mechanism, plan.weight / total
            stddev = plan.noise_stddev / mechanism.participation.divisor(plan.facts)
            variance += self.participation * share**2 * plan.local_steps * stddev**2
            signal += self.participation * share * plan.local_steps * mechanism.clip.sensitivity
        return Balance(math.sqrt(dim * variance), signal, self.rounds)

    def check(self, data: FederatedData, here: int | None = None) -> None:
        """Raises BadInputError unless the data keep the plan's sizes and limits.

        Args:
          data: the records of the silos.
          here: the only silo whose records are here; None: all are.
        """
        if data.num_silos != len(self.silos):
            raise BadInputError(
                f"the plan is for {len(self.silos)} silos, but the data have {data.num_silos}: "
                "make a plan for these data"
            )
        for silo, plan in zip(data.silos, self.silos, strict=True):
            if here not in (None, silo.index) or plan.facts == SiloFacts.of(silo):
                continue
            is_declared = plan.mechanism.participation.has_fixed_sampling_prob
            if not (is_declared and plan.facts.num_records):
                raise BadInputError(
                    f"the plan says that silo {silo.index} holds {plan.facts.num_records} records "
                    f"of {plan.facts.num_subjects} subjects, but it holds {silo.num_records} of "
                    f"{silo.num_subjects}, so that the accounted sampling probabilities would not "
                    "be those that run: make a plan for these data"
                )
        caps = np.array([p.mechanism.participation.max_records_per_subject for p in self.silos])
        # proof: cap-2
        over = np.flatnonzero(data.largest_counts() > caps)
        if len(over) and self.mechanism.private:
            raise BadInputError(
                f"silo {over[0]} holds more than max_records_per_subject={caps[over[0]]} records "
                "of one subject: cap the data (partition.cap_per_subject) before the run"
            )
        most = int(data.silos_of_subjects().max(initial=0))
        # Checked for mechanisms that protect records, too: they also state a subject's epsilon.
        # proof: cap-3
        if most > self.max_silos_per_subject and self.mechanism.private:
            raise BadInputError(
                f"a subject has records in {most} silos, but max_silos_per_subject is "
                f"{self.max_silos_per_subject}: raise it, or confine subjects (partition=confined)"
            )
