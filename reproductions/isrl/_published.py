"""The paper's own noise and messages, beside the sound ones.

* ``paper_closed_form``: the theorems' noise (valid; Theorem D.1's is 30 times too much), on sound
  messages.
* ``as_published``: what the authors' experiments did: sampling with replacement (it may draw a
  record several times) and noise from an asymptotic statement. ``with_replacement`` bounds what it
  spends. One of their scripts, ``DP_FL_insurance_linreg_FINAL.py`` (commit 421aeb6), clips the
  mean of a batch: a record may then move it by twice the clip norm, not by 2C/K.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import special, stats

from dpfl_jax import accounting
from dpfl_jax.accounting import closed_forms, events
from dpfl_jax.clipping import clipped_grad
from dpfl_jax.federation.isrl import privacy
from dpfl_jax.federation.isrl.algorithms import Oracle
from dpfl_jax.federation.isrl.message import (
    Loss,
    Message,
    MessageSpec,
    Sampling,
    SiloData,
    clipped_sum,
    make_message,
    mean_message,
    of_all_silos,
)
from dpfl_jax.federation.isrl.privacy import Budget, SiloNoise
from dpfl_jax.noise import Noise
from dpfl_jax.noise.chacha import uniform

Arm = Literal["sound", "paper_closed_form", "as_published"]


def silo_noise(
    budget: Budget,
    silo_size: int,
    batch: float,
    rounds: int,
    *,
    arm: Arm = "sound",
    sampling: Sampling = "poisson",
) -> SiloNoise:
    """The noise of a silo by an arm.

    The epsilon of the published noise is that of Poisson batches at the same rate, for comparison
    only: ``with_replacement`` has its own.

    Args:
      budget: of each record of the silo.
      silo_size: n.
      batch: K.
      rounds: R.
      arm: see the module.
      sampling: that is accounted.

    Raises:
      BadInputError: a budget outside the range of the paper's theorem.
    """
    if arm == "sound":
        return privacy.silo_noise(budget, silo_size, batch, rounds, sampling=sampling)
    if arm == "as_published":
        noise = closed_forms.experiment_noise(rounds, silo_size, budget.epsilon, budget.delta)
    elif sampling == "disjoint":
        noise = closed_forms.one_pass_noise(batch, budget.epsilon, budget.delta)
    else:
        noise = closed_forms.minibatch_noise(rounds, silo_size, budget.epsilon, budget.delta)
    return SiloNoise(noise * batch, batch, silo_size, rounds, sampling, budget)


def with_replacement(
    noise_multiplier: float, batch: int, silo_size: int, rounds: int, delta: float
) -> tuple[float, float]:
    """What R sums of K records spend that are drawn from n with replacement, under replace-one.

    A record is drawn j ~ Bin(K, 1/n) times, and each time replacing it moves the sum by at most 2C.

    Args:
      noise_multiplier: standard deviation of the noise on the sum, over C.
      batch: K.
      silo_size: n.
      rounds: R.
      delta: of the budget.

    Returns:
      (least, most): an epsilon that some data attain, those whose other gradients are all opposite
      to the record's; and a bound for all data (Balle, Barthe, Gaboardi 2018, Theorem 10, composed
      by its privacy profile).
    """
    attained = events.els(noise_multiplier / 2, 1 / silo_size, batch, rounds)
    least = accounting.epsilon(attained, delta)
    # Epsilons of one round: the grid ends where delta of a round is far below the target.
    step = 0.002 / max(1.0, noise_multiplier / 5)
    top = min(400.0, max(500 / noise_multiplier, 1500 / noise_multiplier**2))
    points = np.arange(math.ceil(top / step) + 1) * step
    above = _profile(points, noise_multiplier, batch, silo_size)
    below = -np.expm1(-points) + np.exp(-points) * above  # at -epsilon
    deltas = np.minimum.accumulate(np.concatenate([below[:0:-1], above]))
    last = len(points) - 1
    losses = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, -last, last, deltas)
    whole = PrivacyLossDistribution(losses).self_compose(rounds)
    return least, float(whole.get_epsilon_for_delta(delta))


def _profile(epsilons: np.ndarray, noise: float, batch: int, silo_size: int) -> np.ndarray:
    """delta(epsilon) of one round, float [n]."""
    drawn = -math.expm1(batch * math.log1p(-1 / silo_size))
    inner = epsilons + np.log1p(-(1 - drawn) * np.exp(-epsilons)) - math.log(drawn)
    found = np.zeros_like(epsilons)
    for j in range(1, batch + 1):
        weight = float(stats.binom.pmf(j, batch, 1 / silo_size))
        if weight < 1e-30:  # and all that follow, of which there are fewer than n
            return found + batch * weight
        apart = 2 * j / noise
        far = special.log_ndtr(-apart / 2 - inner / apart)
        found += weight * (special.ndtr(apart / 2 - inner / apart) - np.exp(inner + far))
    return np.clip(found, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Published:
    """How a silo of the experiments makes a message.

    Attributes:
      clip: ``example``, or ``batch_mean``.
      sampling: ``with_replacement`` (K draws), or ``poisson``.
    """

    clip: Literal["example", "batch_mean"] = "example"
    sampling: Literal["with_replacement", "poisson"] = "with_replacement"


def message_of(loss: Loss, spec: MessageSpec | Published, most: int) -> Message:
    """A silo's message by a specification; ``most``: the largest K."""
    if isinstance(spec, MessageSpec):
        return make_message(loss, spec)

    def message(
        w: jax.Array,
        examples: Any,
        size: jax.Array,
        rank: jax.Array,
        turn: jax.Array,
        batch: jax.Array,
        clip_norm: jax.Array,
        stddev: jax.Array,
        keys: jax.Array,
    ) -> jax.Array:
        del turn
        if spec.sampling == "with_replacement":
            place = uniform(keys[0], most) * jnp.maximum(size, 1)
            chosen = jnp.minimum(place.astype(jnp.int32), jnp.maximum(size, 1) - 1)
            units = jax.tree.map(lambda x: x[chosen], examples)
            mask = (jnp.arange(most) < batch) & (size > 0)
        else:
            units, n = examples, rank.shape[0]
            mask = (jnp.arange(n) < size) & (uniform(keys[0], n) < batch / size)
        if spec.clip == "example":
            total = clipped_sum(loss, w, units, mask, clip_norm)
        else:
            total = _mean_clipped(loss, w, units, mask, clip_norm, batch)
        noised = Noise(stddev, clip_norm, "exact").add(keys[1], total)
        return noised / jnp.maximum(batch, 1.0)

    return message


def _mean_clipped(
    loss: Loss,
    w: jax.Array,
    units: Any,
    mask: jax.Array,
    clip_norm: jax.Array,
    batch: jax.Array,
) -> jax.Array:
    """K times the clipped mean gradient."""
    free = clipped_grad(lambda p, x: loss(p["w"], x), clip_norm=1e30, strategy="ghost")
    total = free({"w": w}, units, mask=mask).sum["w"]
    mean_norm = jnp.linalg.norm(total.ravel()) / jnp.maximum(batch, 1.0)
    return total * jnp.minimum(1.0, clip_norm / jnp.maximum(mean_norm, 1e-30))


def oracle_of(
    loss: Loss,
    spec: MessageSpec | Published,
    data: SiloData,
    *,
    batch: int,
    clip_norm: jax.Array | float,
    stddev: jax.Array,
) -> Oracle:
    """``dpfl_jax.federation.isrl.make_oracle`` of either specification; K alike in all silos."""
    message, batches = message_of(loss, spec, batch), jnp.full(data.num_silos, float(batch))
    messages = of_all_silos(message, repr(spec), loss, data, batches, clip_norm, stddev)
    return lambda w, row: mean_message(messages(w, row), row["present"])
