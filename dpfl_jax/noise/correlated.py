"""Noise that is correlated over steps: K^-1 Z for a lower-triangular Toeplitz matrix K.

Let G be the clipped sums, one row per step. Independent noise Z is added to K G, exactly
(``exact``). Adding K^-1 Z itself would round numbers of the size of the noise together with private
data. The release, a row of G + K^-1 Z, is then computed from noised rows alone.

``banded``: K has b bands. ``buffered``: K is full, made of a few decays. ``banded_inverse``: K^-1
has b bands. In the last two, rows of K G are sums over all earlier steps and are kept as pairs of
float32 numbers with 48 bits: in 24 bits, a unit's part would be rounded with the sum of all units
of all earlier steps, and would not decay as K says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpfl_jax.errors import BadInputError
from dpfl_jax.matrices import Buffers
from dpfl_jax.noise.transform import (
    Noise,
    NoiseState,
    continues_same_run,
    divided,
    transformation,
)

PyTree = Any


def correlated(
    noise: Noise,
    divisor: float,
    lengths: tuple[int, int],
    encode: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]],
    decode: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    keep: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> optax.GradientTransformationExtraArgs:
    """Adds K^-1 Z over the steps, where ``noise`` draws Z, and divides.

    Args:
      noise: the noise on each row of K G.
      divisor: expected number of units, a constant.
      lengths: numbers of rows kept for each parameter: of earlier sums, and of releases.
      encode: (sum, kept float32 [length, ...], step) -> the row of K G, and its remainder that
        float32 has no room for, or None.
      decode: (noised row, kept, step) -> the row of G + K^-1 Z.
      keep: (kept, new row, step) -> the rows to keep.

    Returns:
      A transformation like ``transformation``'s. The state's memory has "sums" and "released",
      trees like the parameters of float32 [length, ...], and "run". ``noise_key`` is uint32 [11]:
      the key, its step and its run. If the state has another step or run, a step was skipped, the
      state was lost or the plan changed. The release could then show sums without noise, so it is
      NaN.
    """

    def init(params: PyTree) -> NoiseState:
        def empty(length: int) -> PyTree:
            return jax.tree.map(lambda p: np.zeros((length, *p.shape), np.float32), params)

        memory = {"sums": empty(lengths[0]), "released": empty(lengths[1])}
        memory["run"] = np.zeros(2, np.uint32)
        return NoiseState(jnp.zeros((), jnp.int32), memory)

    def update(
        total: PyTree,
        state: NoiseState,
        params: PyTree | None = None,
        *,
        noise_key: jax.Array,
        **others: Any,
    ) -> tuple[PyTree, NoiseState]:
        step, sums, released = state.step, state.memory["sums"], state.memory["released"]
        same_run, run = continues_same_run(step, state.memory["run"], noise_key[8:])
        # Kept rows start at zero, so that rows before the first step add nothing.
        both = jax.tree.map(lambda g, kept: encode(g, kept, step), total, sums)
        encoded = jax.tree.map(lambda _, pair: pair[0], total, both)
        rest = jax.tree.map(lambda _, pair: pair[1], total, both)
        # proof: correlated-noise-1
        noised = noise.add(noise_key[:8], encoded, rest if jax.tree.leaves(rest) else None)
        plain = jax.tree.map(
            lambda y, kept: jnp.where(same_run, decode(y, kept, step), jnp.nan), noised, released
        )
        memory = {
            "sums": jax.tree.map(lambda kept, g: keep(kept, g, step), sums, total),
            "released": jax.tree.map(lambda kept, x: keep(kept, x, step), released, plain),
            "run": run,
        }
        return divided(plain, divisor, params), NoiseState(step + 1, memory)

    return optax.GradientTransformationExtraArgs(init, update)


def banded(
    noise: Noise, column: tuple[float, ...], divisor: float
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that adds the noise of a K of b bands.

    Source: Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization" (arXiv
    2306.08153), Algorithm 9. With c the first column of K and g_t the clipped sum of step t:

        y_t = c_0 g_t + c_1 g_{t-1} + ... + c_{b-1} g_{t-b+1} + z_t       # independent noise
        x_t = (y_t - c_1 x_{t-1} - ... - c_{b-1} x_{t-b+1}) / c_0         # = g_t + (K^-1 Z)_t

    Past noise cannot be drawn again from its keys instead of keeping these rows, because K^-1 has
    no bands: step t would draw the noise of all steps before it.

    Args:
      noise: the noise on each row of K G; its ``rows`` must be the number of bands. Its standard
        deviation and the clip norm must be constant, because rows mix several steps.
      column: c; (1.0,) is independent noise.
      divisor: expected number of units, a constant.

    Returns:
      A transformation as of ``correlated``, with arrays [b - 1, ...]; step t is at t modulo b - 1.

    Raises:
      BadInputError: ``rows`` of the noise is not the number of bands.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.noise import Noise, banded
      >>> noise = banded(Noise(1.0, 1.0, rows=2), column=(0.8, 0.6), divisor=8.0)
      >>> noise.init({"w": jnp.zeros(3)}).memory["sums"]["w"].shape  # one earlier step
      (1, 3)
    """
    if column == (1.0,):
        return transformation(noise, divisor)
    if noise.rows != len(column):
        raise BadInputError(
            f"banded: the noise is for {noise.rows} rows, but there are {len(column)} bands: give "
            f"Noise(..., rows={len(column)})"
        )
    window = len(column) - 1
    later = jnp.asarray(column[1:], jnp.float32)
    first = np.float32(column[0])

    def past(kept: jax.Array, step: jax.Array) -> jax.Array:
        """c_1 kept_{t-1} + ... + c_{b-1} kept_{t-b+1}, added in this order on every device."""

        def more(i: jax.Array, total: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_index_in_dim(kept, (step - 1 - i) % window, keepdims=False)
            return total + later[i] * row

        return jax.lax.fori_loop(0, window, more, jnp.zeros_like(kept[0]))

    def encode(g: jax.Array, kept: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
        return first * g + past(kept, step), None

    def decode(y: jax.Array, kept: jax.Array, step: jax.Array) -> jax.Array:
        return (y - past(kept, step)) / first

    def keep(kept: jax.Array, new: jax.Array, step: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(kept, new, step % window, 0)

    return correlated(noise, divisor, (window, window), encode, decode, keep)


def buffered(
    noise: Noise, buffers: Buffers, divisor: float
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that adds the noise of a buffered linear Toeplitz matrix K (BLT).

    Source: Dvijotham et al. 2024, "Efficient and near-optimal noise generation for streaming
    differential privacy" (arXiv 2404.16706); McMahan, Xu and Xu 2024, "A hassle-free algorithm for
    private learning in practice" (arXiv 2408.08868), for users who take part several times. With
    decays d and scales w of B buffers, the first column of K is
    1, sum w_i, sum w_i d_i, sum w_i d_i^2, ...

        y_t = g_t + w_1 a_1 + ... + w_B a_B + z_t,  then  a_i = d_i a_i + g_t  # independent noise
        x_t = y_t - w_1 r_1 - ... - w_B r_B,        then  r_i = d_i r_i + x_t  # = g_t + (K^-1 Z)_t

    So 3 B numbers are kept for each parameter (the a are pairs), whatever the number of steps.

    Args:
      noise: the noise on each row of K G; its ``rows`` must be four times the steps of the run, all
        of which a unit may move. Its standard deviation and the clip norm must be constant.
      buffers: decays and scales.
      divisor: expected number of units, a constant.

    Returns:
      A transformation as of ``correlated``: [2 B, ...] in ``sums``, and [B, ...] in ``released``.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.noise import Noise, buffered
      >>> noise = buffered(Noise(1.0, 1.0), buffers=((0.9, 0.5), (0.2, 0.1)), divisor=8.0)
      >>> noise.init({"w": jnp.zeros(3)}).memory["sums"]["w"].shape
      (4, 3)
    """
    decays, scales = (np.asarray(numbers, np.float32) for numbers in buffers)
    number = len(scales)

    def encode(g: jax.Array, kept: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _plus_products(g, scales, kept[:number], kept[number:])

    def decode(y: jax.Array, kept: jax.Array, step: jax.Array) -> jax.Array:
        return y - sum(scale * row for scale, row in zip(scales, kept, strict=True))

    def keep(kept: jax.Array, new: jax.Array, step: jax.Array) -> jax.Array:
        if len(kept) == number:  # the buffers of releases
            return jnp.stack([d * row + new for d, row in zip(decays, kept, strict=True)])
        large, small = [], []
        for i, decay in enumerate(decays):
            product, more = _times(decay, kept[i], kept[number + i])
            row, left = _plus(product, new)
            row, left = _plus(row, left + more)
            large.append(row)
            small.append(left)
        return jnp.stack([*large, *small])

    return correlated(noise, divisor, (2 * number, number), encode, decode, keep)


def banded_inverse(
    noise: Noise, coefficients: tuple[float, ...], divisor: float
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that adds the noise of a K whose inverse has b bands.

    Source: Kalinin, McKenna, Upadhyay and Lampert 2025, "Back to square roots" (arXiv 2505.12128),
    whose bands are those of a square root (BISR); here they are optimised for the run. The first
    column of K^-1 is 1, -f_1, ..., -f_{b-1} with all f >= 0: these shares of a step's noise are
    subtracted from the noise of the steps after it.

        h_t = g_t + f_1 h_{t-1} + ... + f_{b-1} h_{t-b+1}                  # = (K G)_t
        y_t = h_t + z_t                                                    # independent noise
        x_t = y_t - f_1 y_{t-1} - ... - f_{b-1} y_{t-b+1}                  # = g_t + (K^-1 Z)_t

    So 3 (b - 1) numbers are kept for each parameter (the h are pairs), as for b - 1 buffers.

    Args:
      noise: the noise on each row of K G, as for ``buffered``.
      coefficients: f.
      divisor: expected number of units, a constant.

    Returns:
      A transformation as of ``correlated``, with rows without noise, [2 (b - 1), ...], the newest
      first, in ``sums``, and noised rows, [b - 1, ...], in ``released``.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.noise import Noise, banded_inverse
      >>> noise = banded_inverse(Noise(1.0, 1.0), coefficients=(0.5, 0.25), divisor=8.0)
      >>> noise.init({"w": jnp.zeros(3)}).memory["sums"]["w"].shape
      (4, 3)
    """
    numbers = np.asarray(coefficients, np.float32)
    window = len(numbers)

    def encode(g: jax.Array, kept: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _plus(*_plus_products(g, numbers, kept[:window], kept[window:]))

    def past(kept: jax.Array) -> jax.Array:
        return sum((f * row for f, row in zip(numbers, kept)), start=jnp.zeros_like(kept[0]))

    def decode(y: jax.Array, kept: jax.Array, step: jax.Array) -> jax.Array:
        return y - past(kept)

    def keep(kept: jax.Array, new: jax.Array, step: jax.Array) -> jax.Array:
        if len(kept) == window:  # noised rows: recompute the new one from the release
            return jnp.concatenate([(new + past(kept))[None], kept[:-1]])
        row, rest = encode(new, kept, step)
        large, small = kept[: window - 1], kept[window:-1]
        return jnp.concatenate([row[None], large, rest[None], small])

    return correlated(noise, divisor, (2 * window, window), encode, decode, keep)


def redrawn(
    noise: Noise, coefficients: tuple[float, ...], divisor: float
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation like ``banded_inverse``'s that draws past noise again from its keys.

        x_t = g_t + (z_t - floor(f_1 z_{t-1} + ... + f_{b-1} z_{t-b+1}))   # all of it in integers

    No rows are kept. Past noise is added to private data as integers only, and
    docs/theory/banded_inverse.md says why rounding it down reveals nothing.

    Args:
      noise: the noise on each row of K G; its ``rows`` must be ``redrawn_rows``.
      coefficients: f, multiples of 2^-16.
      divisor: expected number of units, a constant.

    Returns:
      A transformation like ``transformation``'s. ``noise_key`` is uint32 [8 b + 3]: the keys of the
      step and of the b - 1 steps before it, the latest first, the step, and the run. Only the run
      is in the state's memory. If the state has another step or run, the release is NaN
      (``correlated``).

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.noise import Noise, redrawn
      >>> noise = redrawn(Noise(1.0, 1.0), coefficients=(0.5, 0.25), divisor=8.0)
      >>> noise.init({"w": jnp.zeros(3)}).memory.keys() >= {"sums"}  # no noise is kept
      False
    """
    parts = np.asarray(coefficients, float) * 2**16
    whole = parts.astype(np.uint32)
    assert (whole == parts).all()

    def init(params: Any) -> NoiseState:
        return NoiseState(jnp.zeros((), jnp.int32), {"run": np.zeros(2, np.uint32)})

    def update(
        total: Any, state: NoiseState, params: Any = None, *, noise_key: jax.Array, **others: Any
    ) -> tuple[Any, NoiseState]:
        keys, key_tail = noise_key[:-3].reshape(-1, 8), noise_key[-3:]
        same_run, run = continues_same_run(state.step, state.memory["run"], key_tail)
        exists = jnp.arange(1, len(keys), dtype=jnp.uint32) <= key_tail[0]  # no step is below 0
        # proof: redrawn-noise-1
        noised = noise.add(keys[0], total, earlier=(keys[1:], jnp.where(exists, whole, 0)))
        noised = jax.tree.map(lambda x: jnp.where(same_run, x, jnp.nan), noised)
        return divided(noised, divisor, params), NoiseState(state.step + 1, {"run": run})

    return optax.GradientTransformationExtraArgs(init, update)


def redrawn_rows(column: np.ndarray) -> int:
    """Returns ``Noise.rows`` for ``redrawn``: K carries the rounding of two rows a step onwards.

    Args:
      column: first column of K, float [T], all >= 0; the norm of K is at most its sum.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.noise import redrawn_rows
      >>> redrawn_rows(np.array([1.0, 0.5, 0.25])) >= 2
      True
    """
    # proof: redrawn-rows-1
    return math.ceil(4 * len(column) * column.sum() ** 2)


def _plus(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum in float32, and its exact rounding error (Knuth's TwoSum)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _times(number: Any, large: jax.Array, small: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``number`` times (large + small) in float32, and the remainder, to 48 bits.

    Products of halves are exact, and the rounding error of their sum is kept: otherwise it would
    accumulate over the steps of a long memory, and neighbours' rows would drift apart.
    """
    top, half = _first_half(number), _first_half(large)
    product, first = _plus(top * half, top * (large - half))
    product, second = _plus(product, (number - top) * half)
    rest = (number - top) * (large - half) + number * small
    return product, (first + second) + rest


def _plus_products(
    total: jax.Array, numbers: Iterable[Any], large: jax.Array, small: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``total`` plus each number times its pair, in float32, and the remainder.

    Args:
      total: float32 array.
      numbers: only a few, as they are added one after the other, in this order on every device.
      large: float32 [numbers, ...].
      small: float32 [numbers, ...].
    """
    row, rest = total, jnp.zeros_like(total)
    for number, first, second in zip(numbers, large, small, strict=True):
        product, more = _times(number, first, second)
        row, left = _plus(row, product)
        rest = rest + (left + more)
    return row, rest


def _first_half(x: Any) -> jax.Array:
    """The first 12 of 24 bits: products of two such numbers are exact in float32."""
    bits = jax.lax.bitcast_convert_type(jnp.asarray(x, jnp.float32), jnp.uint32)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFF000), jnp.float32)
