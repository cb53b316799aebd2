"""P_vec: sums of vectors in the shuffle model (Algorithms 4 and 5; Cheu et al. 2021).

Every record's clipped gradient is rounded at random to g levels a coordinate and sent as g + b bits
a coordinate, b of them noise; after shuffling only the number of ones matters. The paper gives no
g, b, p; the constants known from the literature ask for a noise of hundreds of L at any size one
can run. So b is calibrated here, numerically, and the closed form is not offered.

Corrections of the printed protocol: coordinates lie in [-L, L], so the range is 2 L, and the sum is
re-centred by L for every report.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from dpfl_jax.accounting import IDEALISED_FLOAT, Guarantee
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl.algorithms import Oracle
from dpfl_jax.federation.isrl.message import loss_name
from dpfl_jax.federation.isrl.schedule import Schedule, derived_keys, words_of
from dpfl_jax.run.state import mixed

_ORDERS = np.concatenate([np.linspace(1.2, 8, 18), np.geomspace(9, 2000, 30)])
_MOST_TRIALS = 2**24


@dataclasses.dataclass(frozen=True)
class VectorProtocol:
    """Parameters of P_vec.

    Attributes:
      levels: g, levels of a coordinate.
      noise_bits: b, noise bits of one report and coordinate.
      bit_probability: p.
      bound: L, of a record's gradient.
    """

    levels: int
    noise_bits: int
    bit_probability: float
    bound: float

    def variance(self, reports: int) -> float:
        """Of one coordinate of the *sum*: binomial noise, and rounding (at most)."""
        p, unit = self.bit_probability, 2 * self.bound / self.levels
        return unit**2 * (reports * self.noise_bits * p * (1 - p) + reports / 4)

    def messages(self, dim: int) -> int:
        """Bits that one record sends."""
        return dim * (self.levels + self.noise_bits)

    def sum(self, vectors: jax.Array, mask: jax.Array, reports: int, key: jax.Array) -> jax.Array:
        """What the analyser outputs for vectors [m, d], real where ``mask``; unbiased.

        A simulation of protocol and shuffler: only the number of ones matters after shuffling.

        Args:
          vectors: float32 [m, d], each of norm at most L.
          mask: bool [m]; exactly ``reports`` of them are real.
          reports: number of real vectors, public.
          key: a key used once.
        """
        round_key, noise_key = jax.random.split(key)
        scaled = (vectors + self.bound) * (self.levels / (2 * self.bound))
        scaled = jnp.clip(scaled, 0.0, self.levels)
        low = jnp.floor(scaled)
        up = jax.random.uniform(round_key, scaled.shape) < scaled - low
        ones = jnp.where(mask[:, None], low + up, 0.0).sum(axis=0)
        trials = float(reports * self.noise_bits)
        noise = jax.random.binomial(noise_key, trials, self.bit_probability, vectors.shape[1:])
        centred = ones + (noise - self.bit_probability * trials)
        return centred * (2 * self.bound / self.levels) - self.bound * reports


def protocol_epsilon(protocol: VectorProtocol, reports: int, dim: int, delta: float) -> float:
    """Upper bound on the shuffle-DP epsilon of one sum; inf if delta cannot be reached.

    Replacing one record moves the integer counts by a vector k with |k_j| <= g and
    |k| <= g + sqrt(d) (rounding moves each coordinate by at most one more). The noise of a
    coordinate is Binomial(reports b, p). At each order alpha the Renyi divergence of a shift k_j is
    at most c k_j^2, with c the largest ratio over 1 <= |k_j| <= g, computed from the exact
    probabilities; coordinates add up. What the shift moves off the support is added to delta.
    Unit: record; adjacency: replace one; trust: a shuffler and the record's own silo.
    """
    trials, p = reports * protocol.noise_bits, protocol.bit_probability
    if trials < 1:
        return math.inf
    if trials > _MOST_TRIALS:
        raise BadInputError(
            f"this protocol's noise is a sum of {trials:.2g} bits, more than {_MOST_TRIALS:.2g}, "
            "which no run needs: use fewer noise bits, or a larger epsilon"
        )
    sd = math.sqrt(trials * p * (1 - p))
    mean = trials * p
    law = stats.binom(trials, p)
    reach = protocol.levels
    low = max(0, math.floor(mean - 38 * sd - reach))
    high = min(trials, math.ceil(mean + 38 * sd + reach))
    support = np.arange(low, high + 1)
    log_p = law.logpmf(support)
    # Mass from which a shift leaves the support (or the window) is lost, in both directions.
    lost = dim * (law.cdf(low + reach - 1) + law.sf(high - reach))
    if low == 0 or high == trials:
        lost = max(lost, dim * (law.cdf(reach - 1) + law.sf(trials - reach)))
    if lost >= delta:
        return math.inf
    worst = np.zeros(len(_ORDERS))
    shifts = np.arange(1, reach + 1)
    if reach > 32:
        shifts = np.unique(np.concatenate([shifts[:32], np.geomspace(32, reach, 24).astype(int)]))
    before = 0
    for k in shifts:
        # P: the count shifted up by k; Q: not shifted; and the other way round.
        for first, second in (
            (log_p[:-k], log_p[k:]),  # mass of P at x + k against Q there
            (log_p[k:], log_p[:-k]),
        ):
            gap = first - second
            exponent = first[None, :] + (_ORDERS[:, None] - 1) * gap[None, :]
            top = exponent.max(axis=1, keepdims=True)
            total = top[:, 0] + np.log(np.exp(exponent - top).sum(axis=1))
            divergence = np.maximum(total / (_ORDERS - 1), 0.0)
            # The law is log-concave, so that the divergence grows with the shift: this covers all
            # shifts since the one before.
            worst = np.maximum(worst, divergence / float(before + 1) ** 2)
        before = int(k)
    squared = (protocol.levels + math.sqrt(dim)) ** 2
    renyi = worst * squared
    values = renyi + math.log(1 / (delta - lost)) / (_ORDERS - 1)
    return float(values.min())


def calibrate_protocol(
    epsilon: float, delta: float, reports: int, dim: int, bound: float, *, levels: int | None = None
) -> VectorProtocol:
    """The fewest noise bits that meet (epsilon, delta), with p = 1/2.

    Args:
      epsilon: target.
      delta: target.
      reports: records that report in a round, M K.
      dim: d.
      bound: L.
      levels: g; default so many that rounding adds little: the larger of 8 and sqrt(d).

    Raises:
      BadInputError: no number of bits up to 2^24 / reports meets it.
    """
    g = max(8, math.ceil(math.sqrt(dim))) if levels is None else levels

    def spent(bits: int) -> float:
        return protocol_epsilon(VectorProtocol(g, bits, 0.5, bound), reports, dim, delta)

    most = _MOST_TRIALS // reports
    # Gaussian noise of the same variance needs about this much: the search starts below it.
    sd = (g + math.sqrt(dim)) * math.sqrt(2 * math.log(1 / delta)) / epsilon
    low, high = 0, max(1, int(sd**2 / reports))
    while high <= most and spent(high) > epsilon:
        low, high = high, 2 * high
    if high > most:
        raise BadInputError(
            f"P_vec cannot reach epsilon {epsilon} at delta {delta} with {reports} reports of "
            f"{dim} coordinates within {_MOST_TRIALS:.2g} noise bits: raise epsilon, or let more "
            "records report"
        )
    while high - low > max(1, low // 200):
        middle = (low + high) // 2
        if spent(middle) > epsilon:
            low = middle
        else:
            high = middle
    return VectorProtocol(g, high, 0.5, bound)


def protocol_guarantee(
    protocol: VectorProtocol, *, batch: int, cohort: int, dim: int, delta: float, rounds: int
) -> Guarantee:
    """What a one-pass run through P_vec gives every record: it is in one round at most.

    Args:
      protocol: whose noise ran.
      batch: K records of each of the ``cohort`` silos report in a round.
      cohort: M.
      dim: d.
      delta: in (0, 1).
      rounds: R, for the record.
    """
    own = protocol_epsilon(protocol, batch, dim, delta)
    return Guarantee(
        unit="record",
        adjacency="replace one record",
        trust="shuffle",
        epsilon=protocol_epsilon(protocol, batch * cohort, dim, delta),
        delta=delta,
        noise_multiplier=math.sqrt(protocol.variance(batch * cohort)) / protocol.bound,
        steps=rounds,
        accountant="Renyi divergence of binomial counts, computed from their probabilities",
        sampling="disjoint batches in a random order: each record in one round at most",
        assumptions=(
            "the shuffler is secure and mixes the bits of all records of a round",
            "all silos that were to answer do: nobody drops out",
            "the root key is secret",
            IDEALISED_FLOAT,
            "the noise is binomial: the sampler of jax.random counts as exact",
        ),
        caveats=(
            f"against a server that sees a silo's bits apart, epsilon is {own:.3g}: from that "
            "silo's own noise bits alone",
        ),
        released="the sum of every round, hence every model",
    )


def make_vector_oracle(
    loss: Callable[[jax.Array, Any], jax.Array],
    data: Any,
    schedule: Schedule,
    protocol: VectorProtocol,
    *,
    batch: int,
    cohort: int,
) -> Oracle:
    """Algorithm 6's oracle: disjoint batches of K records of M silos through the shuffler.

    Args:
      loss: of one record.
      data: ``SiloData``.
      schedule: made with ``one_pass_batch``; its random order says whose turn it is.
      protocol: calibrated for ``batch * cohort`` reports.
      batch: K, alike in all silos.
      cohort: M, silos that answer in every round (fixed: the protocol's noise is for it).

    Raises:
      BadInputError: a round in which another number of silos answers, or a silo without K unused
        records: its noise bits would be missing.
    """
    reports = batch * cohort
    present, turn = np.asarray(schedule.present), np.asarray(schedule.turn)
    counts = present.sum(axis=1)
    short = present & ((turn + 1) * batch > np.asarray(data.sizes)[None, :])
    if (counts != cohort).any() or short.any():
        at = int(np.argmax((counts != cohort) | short.any(axis=1)))
        raise BadInputError(
            f"P_vec is calibrated for {cohort} silos with {batch} unused records each, but in "
            f"round {at} there are {int((present[at] & ~short[at]).sum())}: take fewer rounds or a "
            "smaller batch, and make the schedule with one_pass_batch"
        )
    rank = schedule.rank
    words = words_of(repr(protocol), data, jnp.asarray([batch, cohort]))

    def clipped(w: jax.Array, example: Any) -> jax.Array:
        gradient = jax.grad(loss)(w, example)
        norm = jnp.linalg.norm(gradient)
        bounded = gradient * jnp.minimum(1.0, protocol.bound / jnp.maximum(norm, 1e-30))
        # A record without a finite gradient would be told by the sum: it counts as zero.
        return jnp.where(jnp.isfinite(norm), bounded, 0.0)

    def oracle(w: jax.Array, row: Any) -> jax.Array:
        turn, present = row["turn"][:, None], row["present"][:, None]
        mask = present & (rank >= turn * batch) & (rank < (turn + 1) * batch)
        gradients = jax.vmap(jax.vmap(clipped, in_axes=(None, 0)), in_axes=(None, 0))(
            w, data.examples
        )
        flat = gradients.reshape(-1, gradients.shape[-1])
        own = derived_keys(row["keys"][0, 1], mixed(words, words_of(loss_name(loss, w, data))))
        key = jax.random.wrap_key_data(own[:2], impl="threefry2x32")
        return protocol.sum(flat, mask.reshape(-1), reports, key) / reports

    return oracle
