"""Calibration by name: the sound one, and the papers' own with what they really cost.

Source: Marathe et al., texts "A" ("Subject Granular Differential Privacy in Federated Learning")
and "B" ("Subject Level Differential Privacy with Hierarchical Gradient Averaging").

sound         the federation's real events, composed over at most H silos.
paper_batch_z LocalGroupDP: sigma for Z records of a subject *in the batch*, with the amplification
              of one record; chosen anew for each batch (A, Algorithm 1).
paper_a       HiGradAvgDP: a subject is sampled with probability K q (A, section 3.2), and sums are
              divided by the number of subjects in the batch (A, Algorithm 2).
              UserLDP: sensitivity C instead of 2C, without amplification (A, Theorem 3.10; Theorem
              3.11 asks for more noise still, and B states no fraction).
paper_b       HiGradAvgDP: a subject is sampled with probability q (B, section 3.2).

All are calibrated by the tight accountant, which gives less noise than the papers' moments
accountant. Batches are Poisson; the papers draw B records.

The papers calibrate one silo alone for R rounds, then run R / sqrt(s) of them to pay for s silos
(``paper_sqrt``), or calibrate for s times the steps (``more_noise``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from scipy import stats

from dpfl_jax import accounting
from dpfl_jax.accounting import events
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.accountant import calibrate_federation, federated_epsilon, subject_epsilon
from dpfl_jax.federation.data import Silo
from dpfl_jax.federation.federated import FederatedAlgorithm, FederatedSteps
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.mechanisms import SiloMechanism
from dpfl_jax.federation.participation import SiloDraw
from dpfl_jax.federation.rounds import RoundBuilder
from dpfl_jax.randomness import RootKey
from reproductions._seeds import of
from reproductions.subject import _closed_forms
from reproductions.subject._batches import batch_statistics

Recipe = Literal["sound", "paper_batch_z", "paper_a", "paper_b"]
Horizontal = Literal["paper_sqrt", "more_noise"]
_MOST_KINDS = 3
RECIPES: tuple[Recipe, ...] = ("sound", "paper_batch_z", "paper_a", "paper_b")
FOLLOWS_THE_BATCH = (
    "the noise multiplier of each step is chosen by the largest group in the private batch, so the "
    "size of the noise itself tells about the data"
)
SECRET_DIVISOR = (
    "the noised sum is divided by the number of subjects in the private batch, which the size of "
    "the noise tells"
)


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a recipe claims, and what is true of the mechanism that it makes.

    Attributes:
      recipe: its name.
      epsilon: claimed for a ``unit`` over the whole federation.
      delta: claimed.
      real_epsilon: of a ``unit`` (a subject: over at most H silos) of the mechanism as it runs;
        ``inf`` if none follows.
      if_constant: the same if a noise or divisor that follows the private batch were constant at
        its usual value; equals real_epsilon where nothing follows the batch.
      rounds_calibrated: rounds that the noise was calibrated for.
      rounds: rounds that are run.
      why: why the two differ, in words; empty for the sound recipe.
      unit: whom the mechanism protects: subject, record or none.
      subject_epsilon: where that is a record, what a subject of K records in each of H silos has;
        None where it was not computed.
    """

    recipe: str
    epsilon: float
    delta: float
    real_epsilon: float
    if_constant: float
    rounds_calibrated: int
    rounds: int
    why: tuple[str, ...] = ()
    unit: str = "subject"
    subject_epsilon: float | None = None


@dataclasses.dataclass(frozen=True)
class Applied:
    """What is to be run.

    Attributes:
      federation: with its noise, perhaps with fewer rounds.
      claim: of it.
      by_group: of each silo the noise multipliers for Z = 1, 2, ... records of one subject in the
        batch, instead of the federation's, which are their smallest (``NoiseByBatch``); None where
        the noise is constant.
      by_subjects: whether sums are divided by the number of subjects (``DistinctSubjects``).
    """

    federation: Federation
    claim: Claim
    by_group: tuple[tuple[float, ...], ...] | None = None
    by_subjects: bool = False


@dataclasses.dataclass(frozen=True)
class NoiseByBatch(RoundBuilder):
    """Text A's Algorithm 1: the noise of a step is that of the largest group in its batch.

    Attributes:
      by_group: of ``Applied``.
    """

    by_group: tuple[tuple[float, ...], ...] = ()

    def scale(self, silo: int, draw: SiloDraw) -> tuple[float, float]:
        """The noise of Z."""
        _, divisor = super().scale(silo, draw)
        clip_norm, table = self.federation.silos[silo].mechanism.clip_norm, self.by_group[silo]
        counts = np.bincount(self.data.subjects[draw.positions])
        return table[int(counts.max(initial=1)) - 1] * clip_norm, divisor


class DistinctSubjects(RoundBuilder):
    """Text A's Algorithm 2: sums are divided by the number of subjects in the private batch.

    It can be read off the size of the noise.
    """

    def scale(self, silo: int, draw: SiloDraw) -> tuple[float, float]:
        """The number of this batch."""
        stddev, _ = super().scale(silo, draw)
        return stddev, float(max(len(np.unique(self.data.subjects[draw.positions])), 1))


class Rounds(FederatedAlgorithm):
    """Rounds whose noise and divisors are another builder's than the accounted ones."""

    def __init__(self, builder: Callable[..., RoundBuilder], **options: Any) -> None:
        super().__init__(**options)
        self.builder = builder

    def begin(self, key: RootKey, start: int) -> FederatedSteps:
        """The rounds after the first ``start``."""
        return FederatedSteps(self, key, start, builder=self.builder)


def apply_recipe(
    federation: Federation,
    recipe: Recipe,
    epsilon: float,
    delta: float,
    horizontal: Horizontal = "paper_sqrt",
) -> Applied:
    """Calibrates a federation by a recipe.

    Args:
      federation: its rounds are those the noise is calibrated for.
      recipe: see the module.
      epsilon: target.
      delta: target.
      horizontal: how the papers' recipes pay for several silos.

    Raises:
      BadInputError: a recipe that does not fit the mechanism.
    """
    mechanism = federation.mechanism
    if not mechanism.private:
        rounds = federation.rounds
        none = Claim("none", math.inf, delta, math.inf, math.inf, rounds, rounds, unit="none")
        return Applied(federation, none)
    if recipe == "sound" or mechanism.kind == "local_item":
        made = calibrate_federation(federation, epsilon, delta)
        return Applied(made, _sound_claim(made, delta, epsilon))
    if recipe not in RECIPES:
        raise BadInputError(f"the recipe {recipe!r} is not one of {', '.join(RECIPES)}")
    silos = federation.silos_per_round
    copies, rounds = 1, federation.rounds
    why: list[str] = []
    if silos > 1:
        if horizontal == "paper_sqrt":
            rounds = max(1, _closed_forms.rounds_printed(federation.rounds, silos))
            why.append(
                f"running R/sqrt(s) = {rounds} of {federation.rounds} rounds does not pay for "
                f"{silos} silos: R/s would"
            )
        else:
            copies = silos
    noise, tables = _paper_noise(federation, recipe, copies, epsilon, delta)
    made = dataclasses.replace(federation.with_noise(noise), rounds=rounds)
    why += _reasons(mechanism, recipe)
    constant = subject_epsilon(made if tables is None else _at_usual(made, tables), delta)
    by_subjects = mechanism.kind == "hi_grad_avg" and recipe == "paper_a"
    real = constant if tables is None and not by_subjects else math.inf
    planned = federation.rounds
    claim = Claim(recipe, epsilon, delta, real, constant, planned, rounds, tuple(why))
    return Applied(made, claim, tables, by_subjects)


def _sound_claim(federation: Federation, delta: float, epsilon: float) -> Claim:
    """Of a federation that meets the target."""
    unit, rounds = federation.mechanism.privacy_unit, federation.rounds
    real = federated_epsilon(federation, delta)
    why: tuple[str, ...] = ()
    whole = None
    if unit == "record":
        why = ("it protects records: a subject has up to K of them in each of H silos",)
        whole = subject_epsilon(federation, delta)
    return Claim("sound", epsilon, delta, real, real, rounds, rounds, why, unit, whole)


def _paper_noise(
    federation: Federation, recipe: Recipe, copies: int, epsilon: float, delta: float
) -> tuple[list[float], tuple[tuple[float, ...], ...] | None]:
    """Every silo's noise by the paper, and ``Applied.by_group``.

    Many kinds of silos share it in classes of 1 % in q.
    """
    probs = [plan.mechanism.participation.sampling_prob_of(plan.facts) for plan in federation.silos]
    if len(set(probs)) > _MOST_KINDS:
        probs = [min(1.0, 1.01 ** math.ceil(math.log(p) / math.log(1.01) - 1e-9)) for p in probs]
    known: dict[Any, tuple[float, ...]] = {}
    found = []
    for plan, prob in zip(federation.silos, probs, strict=True):
        steps = plan.local_steps * federation.rounds * copies
        key = (plan.mechanism, prob, steps)
        if key not in known:
            known[key] = _paper(plan.mechanism, prob, recipe, steps, epsilon, delta)
        found.append(known[key])
    by_batch = federation.mechanism.kind == "local_group"
    return [min(noise) for noise in found], tuple(found) if by_batch else None


def _paper(
    mechanism: Any, prob: float, recipe: Recipe, steps: int, epsilon: float, delta: float
) -> tuple[float, ...]:
    """One silo's noise multiplier by the paper; for LocalGroupDP one of each Z."""
    cap = mechanism.participation.max_records_per_subject
    if mechanism.kind == "local_group":
        largest = min(cap, int(stats.binom.isf(1e-12, cap, prob)) + 1) if prob < 1 else cap
        return tuple(
            _closed_forms.noise_by_group(epsilon, delta, z, prob, steps)
            for z in range(1, largest + 1)
        )
    if mechanism.kind == "hi_grad_avg" and recipe in ("paper_a", "paper_b"):
        fraction = _closed_forms.hi_grad_fraction(prob, cap, "A" if recipe == "paper_a" else "B")

        def event(sigma: float) -> Any:
            return events.poisson(sigma, fraction, steps)

    elif mechanism.kind == "user_ldp" and recipe == "paper_a":

        def event(sigma: float) -> Any:
            return events.user_ldp(sigma, steps, sensitivity=1.0)

    else:
        raise BadInputError(
            f"the recipe {recipe!r} is not one of the papers' for {mechanism.kind}: use 'sound'"
        )
    return (accounting.calibrate_noise_multiplier(event, epsilon, delta),)


def _reasons(mechanism: SiloMechanism, recipe: Recipe) -> list[str]:
    if mechanism.kind == "local_group":
        return [
            FOLLOWS_THE_BATCH,
            "the group that matters is K records in the silo, not Z in the batch",
        ]
    if mechanism.kind == "user_ldp":
        return ["two clipped means may be opposite: the sensitivity is 2C, not C"]
    if recipe == "paper_a":
        return [SECRET_DIVISOR]
    if recipe == "paper_b":
        return ["a subject is in a batch with probability 1-(1-q)^K, not q"]
    return []


def _at_usual(federation: Federation, tables: tuple[tuple[float, ...], ...]) -> Federation:
    """Each silo with the noise of its usual largest group, as if it were constant."""
    return federation.with_noise(
        [
            table[min(usual_group(plan), len(table)) - 1]
            for plan, table in zip(federation.silos, tables, strict=True)
        ]
    )


def usual_group(plan: SiloPlan, draws: int = 100) -> int:
    """Most frequent Z in simulated batches of a silo whose subjects all have K records."""
    cap, records = plan.mechanism.participation.max_records_per_subject, plan.facts.num_records
    offsets = np.arange(0, max(records // cap, 1) * cap + 1, cap)
    silo = Silo(0, 0, offsets.astype(np.int64))
    prob = plan.mechanism.participation.sampling_prob_of(plan.facts)
    found = batch_statistics(silo, prob, draws, RootKey.from_seed(of(0)))
    return max(1, found.dominant_group)
