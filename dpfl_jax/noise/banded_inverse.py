"""Noise that is correlated between all steps, by few of its own: C^-1 Z where C^-1 has b bands.

Source: Kalinin, McKenna, Upadhyay and Lampert 2025, "Back to square roots" (arXiv 2505.12128),
whose bands are those of a square root (BISR); here they are the best for a run. C is lower
triangular and Toeplitz; with f_1, ..., f_{b-1} of 0 or more, C^-1 has the first column 1, -f_1,
..., -f_{b-1}: of the noise of a step these parts are taken back in the steps that follow.

    h_t = g_t + f_1 h_{t-1} + ... + f_{b-1} h_{t-b+1}                  # = (C G)_t
    y_t = h_t + z_t                                                    # independent noise
    x_t = y_t - f_1 y_{t-1} - ... - f_{b-1} y_{t-b+1}                  # = g_t + (C^-1 Z)_t

So 3 (b - 1) numbers are kept for each parameter (the h are pairs), as for b - 1 buffers. Or none:

    x_t = g_t + (z_t - floor(f_1 z_{t-1} + ... + f_{b-1} z_{t-b+1}))   # all of it in integers

with past noise drawn again from its keys (``redrawn``). It is next to people's data only as
integers; docs/theory/banded_inverse.md says why what is rounded down tells nothing.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import optimize, signal, special

from dpfl_jax.errors import BadInputError
from dpfl_jax.noise.correlated import correlated
from dpfl_jax.noise.pairs import plus, plus_products
from dpfl_jax.noise.transform import Noise, NoiseState, divided, goes_on
from dpfl_jax.noise.workload import PREFIX_SUMS, Workload

MOST_BANDS = 64


def inverse_column(taken: tuple[float, ...], steps: int) -> np.ndarray:
    """The first column of C, float64 [steps], rounded upwards to one that never grows.

    No number is below that of C, and none below a later one: what is accounted by it for users who
    take part some steps apart or more is a bound, and exact where C's own column never grows.

    Args:
      taken: f, numbers of 0 or more that add up to 1 at most.
      steps: T, at least 1.
    """
    column = signal.lfilter([1.0], _bands(taken), np.eye(1, steps)[0])
    # Sums of products of numbers >= 0: each is off by its own operations and those before it.
    upwards = 1 + (steps * (len(taken) + 2) + 8) * 2.0**-52
    column = np.r_[1.0, np.minimum(column[1:] * upwards, 1.0)]
    return np.maximum.accumulate(column[::-1])[::-1]


def inverse_error(taken: tuple[float, ...], steps: int, workload: Workload = PREFIX_SUMS) -> float:
    """``Workload.error`` of these bands, in ``steps`` steps."""
    return workload.error(signal.lfilter(_bands(taken), [1.0], workload.response(steps)))


@functools.lru_cache(maxsize=256)
def inverse_strategy(
    bands: int, steps: int, separation: int, workload: Workload = PREFIX_SUMS
) -> tuple[float, ...]:
    """The bands whose noise has the least mean square in a workload, at one sensitivity.

    That of a user who takes part at every ``separation``-th step from the first on.

    Args:
      bands: b, at least 2.
      steps: T.
      separation: s.
      workload: what an optimiser makes of the noise.

    Returns:
      b - 1 numbers that float32 has, all 0 or more, which add up to less than 1.

    Raises:
      BadInputError: too few or too many bands.
    """
    if not 2 <= bands <= MOST_BANDS:
        raise BadInputError(
            f"mechanism.bands is {bands}, but it must be at least 2 and at most {MOST_BANDS}"
        )
    columns, responses = workload.columns(steps), workload.response(steps)
    turns = np.full(steps, 1e-100)  # not 0, on which filters end in subnormal numbers: slow
    turns[::separation] = 1.0
    delays = np.arange(1, bands)

    def taken_of(given: np.ndarray) -> tuple[float, np.ndarray]:
        """What is taken back in all, and the share of each step in it."""
        return float(special.expit(given[0])), special.softmax(given[1:])

    def reached(weighted: np.ndarray) -> np.ndarray:
        """-d noise / d f_j, of all noise together."""
        if workload == PREFIX_SUMS:
            return np.r_[np.cumsum(weighted[::-1])[::-1], np.zeros(bands)][delays]
        return np.array([(weighted[j:] * responses[: max(steps - j, 0)]).sum() for j in delays])

    def loss(given: np.ndarray) -> tuple[float, np.ndarray]:
        """Logarithm of error times sensitivity, squared, and its gradient."""
        whole, shares = taken_of(given)
        filtered = _bands(tuple(whole * shares))
        noise = columns.moved(signal.lfilter(filtered, [1.0], responses))
        moved = signal.lfilter([1.0], filtered, turns)
        change = signal.lfilter([1.0], filtered, moved)  # d moved / d f_j, delayed by j
        error, reach = (columns.weights * noise**2).sum(), (moved**2).sum()
        weighted = columns.pulled(columns.weights * noise)
        left = reached(weighted)
        gained = [(moved[j:] * change[: steps - j]).sum() for j in delays]
        slope = 2 * (np.array(gained) / reach - left / error)
        mean = (slope * shares).sum()
        own = mean * whole * (1 - whole)
        return math.log(error * reach), np.r_[own, whole * shares * (slope - mean)]

    start = np.cumprod((2 * delays - 1) / (2 * delays)) / (2 * delays - 1)  # of BISR
    if workload != PREFIX_SUMS:  # than the best of which it is never worse
        start = np.maximum(inverse_strategy(bands, steps, separation), 1e-6)
    best = optimize.minimize(
        loss,
        np.r_[special.logit(min(start.sum(), 0.999)), np.log(start)],
        jac=True,
        method="L-BFGS-B",
        options={"ftol": 1e-13, "gtol": 1e-8, "maxiter": 1000, "maxcor": 20},
    )
    whole, shares = taken_of(best.x)
    # Four digits: the error hardly feels them, and what a search ends with depends on the machine.
    numbers = [float(f"{min(whole, 0.999) * share:.4g}") for share in shares]
    return tuple(np.asarray(numbers, np.float32).tolist())


def banded_inverse(
    noise: Noise, taken: tuple[float, ...], divisor: float
) -> optax.GradientTransformationExtraArgs:
    """Adds C^-1 Z over the steps, where ``noise`` draws Z, and divides.

    Rows without noise are pairs of numbers, of 48 bits, as ``buffered`` has them and why.

    Args:
      noise: of each row of C G; as for ``buffered``.
      taken: f.
      divisor: expected number of units, a constant.

    Returns:
      As ``correlated``, with arrays [2 (b - 1), ...] of rows without noise, the newest first, in
      ``sums``, and [b - 1, ...] of noised rows in ``released``.
    """
    numbers = np.asarray(taken, np.float32)
    window = len(numbers)

    def encode(g: jax.Array, kept: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        del step
        return plus(*plus_products(g, numbers, kept[:window], kept[window:]))

    def past(kept: jax.Array) -> jax.Array:
        return sum((f * row for f, row in zip(numbers, kept)), start=jnp.zeros_like(kept[0]))

    def decode(y: jax.Array, kept: jax.Array, step: jax.Array) -> jax.Array:
        del step
        return y - past(kept)

    def keep(kept: jax.Array, new: jax.Array, step: jax.Array) -> jax.Array:
        if len(kept) == window:  # what was released, of which the noised row is made again
            return jnp.concatenate([(new + past(kept))[None], kept[:-1]])
        row, rest = encode(new, kept, step)
        large, small = kept[: window - 1], kept[window:-1]
        return jnp.concatenate([row[None], large, rest[None], small])

    return correlated(noise, divisor, (2 * window, window), encode, decode, keep)


def redrawn(
    noise: Noise, taken: tuple[float, ...], divisor: float
) -> optax.GradientTransformationExtraArgs:
    """As ``banded_inverse``, with noise of b steps drawn at every step, and nothing kept.

    Args:
      noise: of each row of C G; its ``rows`` are ``redrawn_rows``.
      taken: f, multiples of 2^-16.
      divisor: expected number of units, a constant.

    Returns:
      As ``transformation``. ``noise_key`` is uint32 [8 b + 3]: the keys of the step and of the
      b - 1 steps before it, the latest first, its step and its run, which alone the state's memory
      is. If the state's are others, what is released is NaN (``correlated``).
    """
    parts = np.asarray(taken, float) * 2**16
    whole = parts.astype(np.uint32)
    assert (whole == parts).all()

    def init(params: Any) -> NoiseState:
        del params
        return NoiseState(jnp.zeros((), jnp.int32), {"run": np.zeros(2, np.uint32)})

    def update(
        total: Any, state: NoiseState, params: Any = None, *, noise_key: jax.Array, **others: Any
    ) -> tuple[Any, NoiseState]:
        del others
        keys, told = noise_key[:-3].reshape(-1, 8), noise_key[-3:]
        alike, run = goes_on(state.step, state.memory["run"], told)
        there = jnp.arange(1, len(keys), dtype=jnp.uint32) <= told[0]  # none is before the first
        # proof: redrawn-noise-1
        noised = noise.add(keys[0], total, earlier=(keys[1:], jnp.where(there, whole, 0)))
        noised = jax.tree.map(lambda x: jnp.where(alike, x, jnp.nan), noised)
        return divided(noised, divisor, params), NoiseState(state.step + 1, {"run": run})

    return optax.GradientTransformationExtraArgs(init, update)


def redrawn_rows(column: np.ndarray) -> int:
    """Rows of noise for rounding that C passes on: 2 at every step, and C is no more than its sum.

    Args:
      column: first of C, [T], numbers of 0 or more.
    """
    # proof: redrawn-rows-1
    return math.ceil(4 * len(column) * column.sum() ** 2)


def _bands(taken: tuple[float, ...]) -> np.ndarray:
    """The first column of C^-1, as far as it is not 0."""
    return np.r_[1.0, -np.asarray(taken, float)]
