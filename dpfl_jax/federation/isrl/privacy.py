"""The noise of a silo for what it grants, and the guarantee that it has.

Departures. Batches are Poisson, disjoint or full, each record is clipped, and noise is calibrated
by privacy-loss distributions under replace-one. The theorems' closed forms are valid, and spend a
thirtieth of the budget; the experiments sampled with replacement, with noise from an asymptotic
statement: what that spends is not established (``reproductions/isrl/_published.py`` has both).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE, Guarantee
from dpfl_jax.accounting.calibrate import noise_ahead
from dpfl_jax.accounting.cells import Everyone, NoisedSums, OnePass
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl.message import Sampling
from dpfl_jax.mechanisms.calibrated import check_noise_multiplier
from dpfl_jax.sampling import Poisson

# What a batch is drawn with has 23 random bits: what is compared with it is rounded up to that.
_BITS = 2**23


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a silo grants.

    Attributes:
      epsilon: > 0.
      delta: in (0, 1); the paper takes 1 / n^2.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> isrl.Budget(epsilon=3.0, delta=1e-6).epsilon
      3.0
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise BadInputError(f"epsilon is {self.epsilon}, but it must be finite and above 0")
        if not 0 < self.delta < 1:
            raise BadInputError(f"delta is {self.delta}, but it must lie between 0 and 1")


@dataclasses.dataclass(frozen=True)
class SiloNoise:
    """One silo's noise, and the event that it makes.

    Attributes:
      noise_multiplier: standard deviation on the sum of gradients, over the clip norm.
      batch: K, the constant divisor.
      silo_size: n, public.
      rounds: in which the silo answers, at most.
      sampling: of records.
      budget: asked for.
      noise: law of the noise that is drawn.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> budget = isrl.Budget(epsilon=3.0, delta=1e-6)
      >>> noise = isrl.silo_noise(budget, silo_size=1238, batch=443, rounds=35)
      >>> noise.rounds, noise.sampling
      (35, 'poisson')
    """

    noise_multiplier: float
    batch: float
    silo_size: int
    rounds: int
    sampling: Sampling
    budget: Budget
    noise: accounting.NoiseLaw = "exact"

    @property
    def sums(self) -> NoisedSums:
        """What is accounted, under replace-one."""
        return _sums(self.noise_multiplier, self.batch, self.silo_size, self.rounds, self.sampling)

    @property
    def event(self) -> Any:
        """What a record of the silo goes through, for replace-one accounting."""
        return self.sums.event()

    @property
    def rate(self) -> float:
        """How often a record is in a batch, at most."""
        return _rate(self.batch, self.silo_size)

    @property
    def epsilon(self) -> float:
        """What ``event`` spends at the budget's delta."""
        # proof: isrl-event-2
        return accounting.epsilon(self.event, self.budget.delta, relation=REPLACE)


def _sums(noise: float, batch: float, size: int, rounds: int, sampling: Sampling) -> NoisedSums:
    """What a record of the silo goes through."""
    scheme: Any = Poisson(_rate(batch, size))
    if sampling != "poisson":
        scheme = Everyone() if sampling == "full" else OnePass()
    return NoisedSums(scheme, noise, rounds, size, relation=REPLACE)


def _rate(batch: float, size: int) -> float:
    # One more for what float32 may add to K and to K / n.
    # proof: isrl-rate-1
    return min(1.0, (math.ceil(batch / size * _BITS) + 1) / _BITS)


def silo_noise(
    budget: Budget,
    silo_size: int,
    batch: float,
    rounds: int,
    *,
    sampling: Sampling = "poisson",
    near: float | None = None,
) -> SiloNoise:
    """The noise of a silo for its budget.

    Args:
      budget: of each record of the silo, against everybody outside it.
      silo_size: n.
      batch: K; ``"full"`` takes n whatever it is.
      rounds: R, the most rounds in which the silo answers.
      sampling: of records.
      near: a guess of the multiplier.

    Raises:
      BadInputError: K above n.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> budget = isrl.Budget(epsilon=3.0, delta=1e-6)
      >>> noise = isrl.silo_noise(budget, silo_size=1238, batch=443, rounds=35)
      >>> round(noise.noise_multiplier, 2)
      6.52
    """
    if sampling == "full":
        batch = float(silo_size)
    if not 0 < batch <= silo_size:
        raise BadInputError(
            f"the local batch is {batch}, but a silo of {silo_size} records allows 1 to {silo_size}"
        )
    noise = accounting.calibrate_noise_multiplier(
        lambda z: _sums(z, batch, silo_size, rounds, sampling).event(),
        budget.epsilon,
        budget.delta,
        relation=REPLACE,
        near=near,
    )
    check_noise_multiplier(noise)
    return SiloNoise(noise, batch, silo_size, rounds, sampling, budget)


def silo_guarantee(noise: SiloNoise) -> Guarantee:
    """What a silo's records have against everybody else.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> budget = isrl.Budget(epsilon=3.0, delta=1e-6)
      >>> noise = isrl.silo_noise(budget, silo_size=1238, batch=443, rounds=35)
      >>> guarantee = isrl.silo_guarantee(noise)
      >>> guarantee.unit, guarantee.epsilon <= 3.0
      ('record', True)
    """
    caveats = [
        "the clip norm, step sizes, preprocessing and the choice of rounds must be public or paid "
        "for apart; metrics of silo data are not private",
        *accounting.delta_caveats(noise.budget.delta, noise.silo_size, "records of the silo"),
    ]
    epsilon, cell = noise.epsilon, noise.sums.cell
    words = {
        "poisson": f"Poisson inside the silo, probability {noise.batch / noise.silo_size:.6g}",
        "full": "all records of the silo in every round",
        "disjoint": "disjoint batches in a random order: each record in one round at most",
    }[noise.sampling]
    return Guarantee(
        unit="record",
        adjacency="replace one record",
        trust="silo-local",
        epsilon=epsilon,
        delta=noise.budget.delta,
        noise_multiplier=noise.noise_multiplier,
        steps=noise.rounds,
        accountant=cell.accountant,
        sampling=f"{words}, at most {noise.rounds} rounds",
        assumptions=(
            "ISRL-DP: the adversary sees all messages of the silo, and may be the server together "
            "with all other silos",
            "the silo's size and the rounds in which it answers are public; no amplification by "
            "the choice of silos is counted",
            "the divisor of a message is a public constant",
            "the root key is secret",
            *cell.assumptions,
            *accounting.noise_assumptions(noise.noise, epsilon, noise.budget.delta, noise.rounds),
        ),
        caveats=tuple(caveats),
        released="every message of the silo, hence every model",
    )


def worst_guarantee(noise: Sequence[SiloNoise], caveats: tuple[str, ...] = ()) -> Guarantee:
    """What the records of all silos have, whichever theirs is, at the largest delta.

    Args:
      noise: of every silo.
      caveats: further ones.
    """
    silos = at_one_delta(noise)
    known = {(z.event, z.budget): silo_guarantee(z) for z in silos}
    worst = max(known.values(), key=lambda g: g.epsilon)
    # A delta that suits the silo of this guarantee may be too much for a larger one.
    largest = max(z.silo_size for z in silos)
    too_much = accounting.delta_caveats(worst.delta, largest, "records of the largest silo")
    if not set(too_much) <= set(worst.caveats):
        caveats = (*too_much, *caveats)
    if len(known) > 1:
        caveats = (
            "silos differ: this holds for all, at the largest of their deltas; the table has what "
            "each promises",
            *caveats,
        )
    return dataclasses.replace(
        worst,
        caveats=(*worst.caveats, *caveats),
        released="every message of every silo, hence every model",
    )


def federation_noise(
    budgets: Sequence[Budget],
    sizes: Sequence[int],
    batches: Sequence[float],
    rounds: int,
    *,
    sampling: Sampling = "poisson",
) -> list[SiloNoise]:
    """``silo_noise`` of every silo; equal silos are calibrated once."""
    asked = list(zip(budgets, map(int, sizes), map(float, batches), strict=True))
    known: dict[tuple[Budget, int, float], SiloNoise] = {}
    solved: dict[float, list[tuple[float, float]]] = {}
    for facts in sorted(set(asked), key=lambda f: (f[1:], dataclasses.astuple(f[0]))):
        budget, size, batch = facts
        before = solved.setdefault(budget.epsilon, [])
        near = noise_ahead(before, size)
        found = silo_noise(budget, size, batch, rounds, sampling=sampling, near=near)
        known[facts] = found
        before.append((size, found.noise_multiplier))
    return [known[facts] for facts in asked]


def at_one_delta(noise: Sequence[SiloNoise]) -> list[SiloNoise]:
    """Silos' noise whose epsilons are asked at the largest delta: one statement holds for all."""
    delta = max(z.budget.delta for z in noise)
    return [
        dataclasses.replace(z, budget=dataclasses.replace(z.budget, delta=delta)) for z in noise
    ]
