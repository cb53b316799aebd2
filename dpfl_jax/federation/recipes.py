"""Calibration by name: the sound one, and the papers' own with what they really cost.

Source: Marathe et al., texts "A" ("Subject Granular Differential Privacy in Federated Learning")
and "B" ("Subject Level Differential Privacy with Hierarchical Gradient Averaging").

sound         the federation's real events, composed over at most H silos.
paper_batch_z LocalGroupDP: sigma for Z records of a subject *in the batch*, with the amplification
              of one record; chosen anew for each batch (A, Algorithm 1).
paper_a       HiGradAvgDP: a subject is sampled with probability K q (A, section 3.3).
paper_b       HiGradAvgDP: a subject is sampled with probability q (B, section 3.1).
              UserLDP under either: sensitivity C instead of 2C. LocalGroupDP: paper_batch_z.

The papers calibrate one silo alone for R rounds, then run R / sqrt(s) of them to pay for s silos
(``paper_sqrt``), or calibrate for s times the steps (``more_noise``).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np
from scipy import stats

from dpfl_jax import accounting
from dpfl_jax.accounting import events
from dpfl_jax.accounting.closed_forms import subject
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.accountant import calibrate_federation, federated_epsilon, subject_epsilon
from dpfl_jax.federation.data import Silo
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.mechanisms import HiGradAvgDP, LocalGroupDP, LocalItemDP, UserLDP
from dpfl_jax.federation.partition import batch_statistics
from dpfl_jax.randomness import RootKey

Recipe = Literal["sound", "paper_batch_z", "paper_a", "paper_b"]
Horizontal = Literal["paper_sqrt", "more_noise"]
_MOST_KINDS = 3
RECIPES: tuple[Recipe, ...] = ("sound", "paper_batch_z", "paper_a", "paper_b")
# The sound recipe for a mechanism of which nothing sound can be said (``SiloMechanism.unsound``).
AS_IF_SOUND = "as_if_sound"


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

    def to_json(self) -> dict[str, Any]:
        """Plain values; an infinite epsilon is the string "inf"."""
        out = dataclasses.asdict(self)
        for name in ("epsilon", "real_epsilon", "if_constant", "subject_epsilon"):
            out[name] = "inf" if out[name] == math.inf else out[name]
        return out | {"why": list(self.why)}


def apply_recipe(
    federation: Federation,
    recipe: Recipe,
    epsilon: float,
    delta: float,
    horizontal: Horizontal = "paper_sqrt",
) -> tuple[Federation, Claim]:
    """Calibrates a federation by a recipe.

    Args:
      federation: its rounds are those the noise is calibrated for.
      recipe: see the module.
      epsilon: target.
      delta: target.
      horizontal: how the papers' recipes pay for several silos.

    Returns:
      The federation that is to be run (perhaps with fewer rounds), and what is claimed of it.

    Raises:
      BadInputError: a recipe that does not fit the mechanism.
    """
    mechanism = federation.mechanism
    if not mechanism.private:
        rounds = federation.rounds
        none = Claim("none", math.inf, delta, math.inf, math.inf, rounds, rounds, unit="none")
        return federation, none
    if recipe == "sound" or isinstance(mechanism, LocalItemDP):
        made = calibrate_federation(federation, epsilon, delta)
        return made, claim_of(made, AS_IF_SOUND if mechanism.unsound() else "sound", delta, epsilon)
    if recipe not in RECIPES:
        raise BadInputError(f"the recipe {recipe!r} is not one of {', '.join(RECIPES)}")
    silos = federation.silos_per_round
    copies, rounds = 1, federation.rounds
    why: list[str] = []
    if silos > 1:
        if horizontal == "paper_sqrt":
            rounds = max(1, subject.rounds_printed(federation.rounds, silos))
            why.append(
                f"running R/sqrt(s) = {rounds} of {federation.rounds} rounds does not pay for "
                f"{silos} silos: R/s would"
            )
        else:
            copies = silos
    plans = _paper_plans(federation, recipe, copies, epsilon, delta)
    made = dataclasses.replace(federation, silos=tuple(plans), rounds=rounds)
    why += _reasons(made, recipe)
    constant = _if_constant(made, delta)
    return made, Claim(
        recipe,
        epsilon,
        delta,
        math.inf if made.mechanism.unsound() else constant,
        constant,
        federation.rounds,
        rounds,
        tuple(why),
    )


def claim_of(
    federation: Federation, recipe: str, delta: float, epsilon: float | None = None
) -> Claim:
    """What noise costs that is constant, whoever chose it.

    Args:
      federation: with its noise.
      recipe: its name.
      delta: asked for.
      epsilon: claimed; default what is real.
    """
    mechanism, rounds = federation.mechanism, federation.rounds
    constant = federated_epsilon(federation, delta, if_constant=True)
    reasons, whole = mechanism.unsound(), None
    real = math.inf if reasons else constant
    if mechanism.unit == "record":
        reasons += ("it protects records: a subject has up to K of them in each of H silos",)
        whole = subject_epsilon(federation, delta)
    return Claim(
        recipe,
        real if epsilon is None else epsilon,
        delta,
        real,
        constant,
        rounds,
        rounds,
        reasons,
        mechanism.unit,
        whole,
    )


def _paper_plans(
    federation: Federation, recipe: Recipe, copies: int, epsilon: float, delta: float
) -> list[SiloPlan]:
    """Every silo with the paper's noise; many kinds of silos share it in classes of 1 % in q."""
    probs = [plan.mechanism.probability(plan.facts) for plan in federation.silos]
    if len(set(probs)) > _MOST_KINDS:
        probs = [min(1.0, 1.01 ** math.ceil(math.log(p) / math.log(1.01) - 1e-9)) for p in probs]
    known: dict[Any, Any] = {}
    plans = []
    for plan, prob in zip(federation.silos, probs, strict=True):
        steps = plan.local_steps * federation.rounds * copies
        key = (plan.mechanism, prob, steps)
        if key not in known:
            known[key] = _paper(plan.mechanism, prob, recipe, steps, epsilon, delta)
        plans.append(dataclasses.replace(plan, mechanism=known[key]))
    return plans


def _paper(
    mechanism: Any, prob: float, recipe: Recipe, steps: int, epsilon: float, delta: float
) -> Any:
    """One silo's mechanism with the paper's noise."""
    cap = mechanism.max_items_per_subject
    if isinstance(mechanism, LocalGroupDP):
        largest = min(cap, int(stats.binom.isf(1e-12, cap, prob)) + 1) if prob < 1 else cap
        table = tuple(
            subject.noise_by_group(epsilon, delta, z, prob, steps) for z in range(1, largest + 1)
        )
        return dataclasses.replace(mechanism, batch_noise=table, noise_multiplier=None)
    if isinstance(mechanism, HiGradAvgDP) and recipe in ("paper_a", "paper_b"):
        fraction = subject.hi_grad_fraction(prob, cap, "A" if recipe == "paper_a" else "B")
        sigma = accounting.calibrate_noise_multiplier(
            lambda s: events.poisson(s, fraction, steps), epsilon, delta
        )
        return dataclasses.replace(mechanism, noise_multiplier=sigma)
    if isinstance(mechanism, UserLDP) and recipe in ("paper_a", "paper_b"):
        sigma = accounting.calibrate_noise_multiplier(
            lambda s: events.user_ldp(s, steps, sensitivity=1.0), epsilon, delta
        )
        return dataclasses.replace(mechanism, noise_multiplier=sigma)
    raise BadInputError(
        f"the recipe {recipe!r} is not one of the papers' for {mechanism.kind}: use 'sound'"
    )


def _reasons(federation: Federation, recipe: Recipe) -> list[str]:
    mechanism = federation.mechanism
    reasons = list(mechanism.unsound())
    if isinstance(mechanism, LocalGroupDP):
        reasons.append("the group that matters is K records in the silo, not Z in the batch")
    elif isinstance(mechanism, HiGradAvgDP) and recipe == "paper_b":
        reasons.append("a subject is in a batch with probability 1-(1-q)^K, not q")
    elif isinstance(mechanism, UserLDP):
        reasons.append("two clipped means may be opposite: the sensitivity is 2C, not C")
    return reasons


def _if_constant(federation: Federation, delta: float) -> float:
    """The cost if each silo's noise stayed at its value for the usual largest group."""
    mechanism = federation.mechanism
    if not (isinstance(mechanism, LocalGroupDP) and mechanism.batch_noise is not None):
        return subject_epsilon(federation, delta, if_constant=True)
    plans = []
    for plan in federation.silos:
        own = plan.mechanism
        assert isinstance(own, LocalGroupDP)
        assert own.batch_noise is not None
        z = min(usual_group(plan), len(own.batch_noise))
        constant = dataclasses.replace(
            own, batch_noise=None, noise_multiplier=own.batch_noise[z - 1]
        )
        plans.append(dataclasses.replace(plan, mechanism=constant))
    constant_noise = dataclasses.replace(federation, silos=tuple(plans))
    return subject_epsilon(constant_noise, delta, if_constant=True)


def usual_group(plan: SiloPlan, draws: int = 100) -> int:
    """Most frequent Z in simulated batches of a silo whose subjects all have K records."""
    cap, records = plan.mechanism.max_items_per_subject, plan.facts.num_records
    offsets = np.arange(0, max(records // cap, 1) * cap + 1, cap)
    silo = Silo(0, 0, offsets.astype(np.int64))
    prob = plan.mechanism.probability(plan.facts)
    found = batch_statistics(silo, prob, draws, RootKey.from_seed(0))
    return max(1, found.dominant_group)
