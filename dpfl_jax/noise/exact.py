"""Exact Gaussian noise, on an integer grid: the low bits of a release reveal nothing of the sum.

The sum is clamped, scaled and truncated to 64-bit integers (two words), and the noise is an integer
distributed as a Gaussian rounded down. Adding real noise and then rounding down would give the same
distribution, so what is accounted is what is drawn. docs/internals/noise.md has the proof.
"""

from __future__ import annotations

import decimal
import fractions
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dpfl_jax.accounting import MOST_COORDINATES
from dpfl_jax.errors import BadInputError
from dpfl_jax.noise import chacha

# ---- the distribution: a table of 2,048 columns, computed in exact arithmetic --------------------
# Noise is Z = V 2^32 + U - 11 (2^31 - 1/2) - 1/2, where U is the sum of eleven uniform words of 32
# bits, and V, one of +-1/2, +-3/2, ..., is drawn from the table: a spline of degree 10 with 2^32
# integers between its knots. The weights of V make that spline Gaussian, up to a distance that
# docs/internals/noise.md bounds. Python's integers and decimals make the table equal on every
# machine.

COLUMNS = 1 << 11
WORDS = 11  # uniform words in a number: the order of the spline
STDDEV = 157.5 * 2.0**32  # of Z
THRESHOLD_BITS = 148  # of a column; with 2^11 columns, weights are multiples of 2^-159
_BERNOULLI = ("1/6", "1/30", "1/42", "1/30", "5/66", "691/2730", "7/6", "3617/510")


def table_weights(count: int = COLUMNS) -> list[decimal.Decimal]:
    """Returns P(V = i + 1/2 | V > 0) for i = 0, 1, ..., count - 1, to at least 60 digits.

    The weights' Fourier transform is that of the Gaussian divided by that of the spline,
    exp(-v t^2 / 2 + c_2 t^4 + ...): a Gaussian density times a series in Hermite polynomials.
    """
    with decimal.localcontext(decimal.Context(prec=90)) as context:
        # c_k = 11 |B_2k| / (2k (2k)!), from log(sin(x) / x); then the exponential of that series.
        log_terms = [fractions.Fraction(0), fractions.Fraction(0)]
        for k, number in enumerate(_BERNOULLI[1:], 2):
            divisor = 2 * k * math.factorial(2 * k)
            log_terms.append(WORDS * fractions.Fraction(number) / divisor)
        terms = [fractions.Fraction(1)]
        for n in range(1, len(log_terms)):
            weighted = sum(j * log_terms[j] * terms[n - j] for j in range(1, n + 1))
            terms.append(fractions.Fraction(weighted) / n)

        def exactly(x: fractions.Fraction) -> decimal.Decimal:
            return context.divide(decimal.Decimal(x.numerator), decimal.Decimal(x.denominator))

        step = fractions.Fraction(STDDEV) / 2**32
        variance = exactly(step**2 - fractions.Fraction(WORDS, 12) + fractions.Fraction(1, 2**64))
        series = [(-1) ** k * exactly(e) / variance**k for k, e in enumerate(terms)]

        def one(i: int) -> decimal.Decimal:
            square = decimal.Decimal(2 * i + 1) ** 2 / (4 * variance)
            z = square.sqrt()
            before, now, total = decimal.Decimal(1), z, series[0]
            for n in range(1, 2 * len(series) - 2):
                before, now = now, z * now - n * before
                if n % 2:
                    total += series[(n + 1) // 2] * now
            return total * (-square / 2).exp()

        # Over all half-integers the densities sum to sqrt(2 pi v), to more digits than are kept.
        densities = [one(i) for i in range(max(count, COLUMNS + 200))]
        whole = sum(densities, decimal.Decimal(0))
        return [w / whole for w in densities[:count]]


def table_counts() -> list[int]:
    """Returns the weights times 2^159, rounded to integers whose sum is 2^159."""
    with decimal.localcontext(decimal.Context(prec=90)):
        drawn = table_weights()
        scale = 2 ** (THRESHOLD_BITS + 11) / sum(drawn, decimal.Decimal(0))
        rounded = [int((w * scale).to_integral_value()) for w in drawn]
    rounded[0] += (COLUMNS << THRESHOLD_BITS) - sum(rounded)
    return rounded


@functools.cache
def alias_table() -> np.ndarray:
    """Returns each column's threshold (148 bits in five words) and alias, uint32 [6, 2048].

    Walker's alias method (1977, Vose 1991) in integers, which keeps the weights exactly: a draw
    below the threshold is the column itself, any other draw is its alias.
    """
    left, full = table_counts(), 1 << THRESHOLD_BITS
    threshold, alias = [full] * COLUMNS, list(range(COLUMNS))
    small = [i for i, n in enumerate(left) if n < full]
    large = [i for i, n in enumerate(left) if n >= full]
    while small:
        i, j = small.pop(), large[-1]
        threshold[i], alias[i] = left[i], j
        left[j] -= full - left[i]
        if left[j] < full:
            small.append(large.pop())
    rows = [[(t >> by) & 0xFFFFFFFF for t in threshold] for by in (128, 96, 64, 32, 0)]
    return np.array([*rows, alias], np.uint32)


# ---- noise and sum on one grid -------------------------------------------------------------------

PyTree = Any
# Relative margin, in float32, so that rounding never makes noise smaller: 16 units in the last
# place, of which fewer than four are needed.
_ROUNDING = 2.0**-20
_CLAMP = 2.0**61
_SMALL = 1 << 17


def compiler_options(mesh: Mesh) -> dict[str, int] | None:
    """Returns the ``compiler_options`` of ``jax.jit`` for programs that draw noise on a mesh.

    With vectors of 512 bits, on CPUs that have them, noise takes two thirds of the time that it
    takes with LLVM's default of 256 bits; the rest of a step takes as long as before.

    Examples:
      >>> import jax
      >>> from dpfl_jax.noise import compiler_options
      >>> from dpfl_jax.training import data_parallel_mesh
      >>> options = compiler_options(data_parallel_mesh(jax.devices()[:1]))
      >>> sorted(options or {})
      ['xla_cpu_prefer_vector_width']
    """
    on_cpu = all(device.platform == "cpu" for device in mesh.devices.flat)
    return {"xla_cpu_prefer_vector_width": 512} if on_cpu else None


def add_exact(
    key: jax.Array,
    tree: PyTree,
    stddev: Any,
    sensitivity: Any,
    rows: int = 1,
    rest: PyTree | None = None,
    earlier: tuple[jax.Array, jax.Array] | None = None,
) -> PyTree:
    """Returns ``tree`` plus Gaussian noise, both on one integer grid, as float32.

    The noise's standard deviation is 157.5 * 2^32 steps of the grid, and slightly more than
    ``stddev``: truncation can move two sums apart by the root of the number of coordinates, in
    steps of the grid, which the noise must hide in addition to ``sensitivity``. A coordinate is
    clamped at 3.4 million standard deviations; NaN counts as 0.

    Args:
      key: uint32 [8], used for this sum only.
      tree: pytree of float32 arrays.
      stddev: standard deviation of the noise, above 0; a number or a scalar array.
      sensitivity: norm by which two neighbours' sums may differ; a number or a scalar array.
      rows: number of sums, noised one after the other, over which ``sensitivity`` extends, as each
        is truncated. The standard deviation is at most 10^6 / sqrt(rows) times the sensitivity.
      rest: pytree of float32 arrays that is added to the tree. With it every sum counts as four
        rows, because it is truncated twice.
      earlier: noise to be subtracted: keys, uint32 [n, 8], and the share of each key's noise in
        units of 2^-16, uint32 [n], at most 1 in all. Their sum is rounded down to the grid.

    Raises:
      BadInputError: there are more coordinates than are accounted for.
    """
    leaves, treedef = jax.tree.flatten(tree)
    coordinates = sum(math.prod(leaf.shape) for leaf in leaves)
    if coordinates > MOST_COORDINATES:
        raise BadInputError(
            f"the sum has {coordinates:,} coordinates, but exact noise is accounted for up to "
            f"{MOST_COORDINATES:,}: train fewer parameters, or set mechanism.arithmetic=float"
        )
    scale = grid(stddev, sensitivity, rows * coordinates)
    remainders = [None] * len(leaves) if rest is None else jax.tree.leaves(rest)
    if longest := max((n for leaf in leaves for n in leaf.shape if n > 1 << 32), default=0):
        raise BadInputError(
            f"a parameter has an axis of {longest:,} entries, but exact noise needs at most "
            "2^32: split that axis into two"
        )
    # To compile few shapes, small arrays are drawn as one, and large ones of one shape together. A
    # place is an array's number and an index in it: draws depend on the tree's shapes alone.
    shapes: dict[tuple[int, ...], list[int]] = {}
    for number, leaf in enumerate(leaves):
        shapes.setdefault(leaf.shape if leaf.size >= _SMALL else (), []).append(number)
    for shape, numbers in shapes.items():
        parts = [leaves[n] for n in numbers]
        # Not one constant, because a constant in a loop would vary over devices under shard_map.
        each = [jnp.full((1,), n, jnp.uint32) for n in (numbers if shape else [2**32 - 1])]
        names = jnp.concatenate(each)
        small = None if rest is None else _joined([remainders[n] for n in numbers], shape)
        noised: Any = _noised(key, _joined(parts, shape), names, scale, small, earlier)
        if not shape:
            noised = jnp.split(noised[0], np.cumsum([x.size for x in parts])[:-1])
        for n, x, part in zip(numbers, noised, parts, strict=True):
            leaves[n] = x.reshape(part.shape)
    return jax.tree.unflatten(treedef, leaves)


def _joined(parts: list[Any], shape: tuple[int, ...]) -> jax.Array:
    return jnp.stack(parts) if shape else jnp.concatenate([x.ravel() for x in parts])[None]


def grid(stddev: Any, sensitivity: Any, coordinates: int) -> jax.Array:
    """Returns the number of grid steps per unit, float32.

    Noise with a standard deviation of ``STDDEV`` steps then hides the sensitivity and what
    truncation adds to it.
    """
    stddev = jnp.asarray(stddev, jnp.float32)
    cut_off = math.sqrt(coordinates) / STDDEV * (stddev / sensitivity)
    # As noise multipliers are at most a million (``transform``), at least half is left.
    return STDDEV / stddev * jnp.maximum(1.0 - (_ROUNDING + cut_off), 2.0**-10)


def _noised(
    key: jax.Array,
    x: jax.Array,
    numbers: jax.Array,
    scale: jax.Array,
    rest: jax.Array | None,
    earlier: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    places = _places(x.shape, numbers)

    def body(_: jax.Array, before: jax.Array) -> jax.Array:
        high, low = noised_integers(key, x, places, scale, rest, earlier)
        # From here on everything is computed from the noised integers alone.
        value = high.astype(jnp.int32).astype(jnp.float32) * 2.0**32 + low.astype(jnp.float32)
        return value / scale

    # A loop whose single iteration the compiler cannot know: otherwise XLA would draw the noise
    # again for each of its uses (moments of an optimiser, parts of an array).
    times = 1 + (key == 0).all().astype(jnp.int32)
    return jax.lax.fori_loop(0, times, body, x + 0 * key[0].astype(jnp.float32))


def noised_integers(
    key: jax.Array,
    x: jax.Array,
    places: list[jax.Array],
    scale: jax.Array,
    rest: jax.Array | None = None,
    earlier: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns sum plus noise on the grid as 64-bit integers (high, low), uint32: ``add_exact``."""
    words = chacha.block(key, places)
    high, low = integers(x, scale)
    if rest is not None:
        some_high, some_low = integers(_within(x, rest, _CLAMP / scale), scale)
        high, low = _plus(high + some_high, low, some_low)
    more_high, more_low = draw(words)
    high, low = _plus(high + more_high, low, more_low)
    if earlier is None:
        return high, low
    other_high, other_low = _weighted_noise(*earlier, places)
    high, low = _plus(high + ~other_high, low, ~other_low)
    return _plus(high, low, jnp.uint32(1))  # subtraction adds the complement and 1


def _weighted_noise(
    keys: jax.Array, parts: jax.Array, places: list[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The sum of shares of the noise of several keys, rounded down, as (high, low)."""

    def more(i: jax.Array, total: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # Noise has 44 bits and shares have 16, so the 64-bit product does not overflow.
        high, low = draw(chacha.block(keys[i], places))
        part = jnp.where(i < len(keys), parts[i], 0)
        middle = (low >> 16) * part
        top, bottom = _plus(high * part + (middle >> 16), (low & 0xFFFF) * part, middle << 16)
        return _plus(total[0] + top, total[1], bottom)

    nothing = jnp.zeros_like(places[0]) + 0 * keys[0, 0]
    # With one key the loop has one iteration, which is hidden from the compiler as in ``_noised``.
    turns = len(keys) + (keys == 0).all().astype(jnp.int32)
    high, low = jax.lax.fori_loop(0, turns, more, (nothing, nothing))
    below = (low >> 16) | (high << 16)
    return (high.astype(jnp.int32) >> 16).astype(jnp.uint32), below


def _within(x: jax.Array, rest: jax.Array, most: jax.Array) -> jax.Array:
    """``rest`` (at most half a unit in the last place of x) where x + rest is not clamped, else 0.

    At the clamp itself a rest that points inwards is kept: otherwise two sums that hardly differ
    would end up half a unit apart.
    """
    inwards = jnp.where(x > 0, jnp.minimum(rest, 0.0), jnp.maximum(rest, 0.0))
    return jnp.where(jnp.abs(x) < most, rest, jnp.where(jnp.abs(x) == most, inwards, 0.0))


def draw_integer(key: np.ndarray) -> int:
    """Returns one draw of the noise, an integer with standard deviation ``STDDEV``.

    Args:
      key: uint32 [8], used for this number only.
    """
    high, low = _one(jnp.asarray(key))
    number = (int(high) << 32) | int(low)
    return number - (1 << 64) if number >> 63 else number


@jax.jit
def _one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    return draw(chacha.block(key, [jnp.zeros((), jnp.uint32)] * 4))


def draw(words: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns noise made of 16 random words: 64-bit integers (high, low), uint32 arrays."""
    table = jnp.asarray(alias_table())
    column, least = (words[0] >> 20) & 2047, words[0] & 0xFFFFF
    row = [jnp.take(part, column, mode="clip") for part in table]
    below = words[4] < row[4]
    for word, threshold in ((words[3], row[3]), (words[2], row[2]), (words[1], row[1])):
        below = (word < threshold) | ((word == threshold) & below)
    below = (least < row[0]) | ((least == row[0]) & below)
    size = jnp.where(below, column, row[5])
    negative = jnp.uint32(0) - (words[0] >> 31)
    # +-(size + 1/2) 2^32 - 11 (2^31 - 1/2) - 1/2 leaves changes to the high words, and 5.
    high, low = (size ^ negative) - jnp.uint32(5), jnp.full_like(size, 5)
    for word in words[5:]:
        high, low = _plus(high, low, word)
    return high, low


def integers(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns x * scale truncated exactly to 64-bit integers (high, low), uint32 arrays.

    Args:
      x: float32 array.
      scale: float32 scalar, above 0 and not subnormal; the product is clamped near 2^61.
    """
    most = _CLAMP / scale
    x = jnp.clip(jnp.where(jnp.isnan(x), 0.0, x), -most, most)
    (m, e), (n, f) = _parts(x), _parts(scale)
    # The product of two 24-bit mantissas, computed by halves of 12 bits.
    middle = (m >> 12) * (n & 0xFFF) + (m & 0xFFF) * (n >> 12)
    bottom = (m & 0xFFF) * (n & 0xFFF) + ((middle & 0xFFF) << 12)
    top = (m >> 12) * (n >> 12) + (middle >> 12) + (bottom >> 24)
    high, low = top >> 8, (top << 24) | (bottom & 0xFFFFFF)
    shift = e + f - 300
    left, right = jnp.clip(shift, 0, 31), jnp.clip(-shift, 0, 63)
    up, down = left.astype(jnp.uint32), (right & 31).astype(jnp.uint32)
    high = (high << up) | ((low >> 1) >> (31 - up))
    low = low << up
    far = right >= 32
    low, high = jnp.where(far, high, low), jnp.where(far, jnp.uint32(0), high)
    low = (low >> down) | ((high << 1) << (31 - down))
    high = high >> down
    negative = jnp.signbit(x)
    return (
        jnp.where(negative, ~high + (low == 0).astype(jnp.uint32), high),
        jnp.where(negative, ~low + 1, low),
    )


def _parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mantissa, uint32 below 2^24, and exponent, int32, of |x| = mantissa * 2^(exponent - 150)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    exponent = (bits >> 23) & 0xFF
    mantissa = (bits & 0x7FFFFF) | jnp.where(exponent > 0, jnp.uint32(1 << 23), jnp.uint32(0))
    return mantissa, jnp.maximum(exponent, 1).astype(jnp.int32)


def _plus(high: jax.Array, low: jax.Array, word: jax.Array) -> tuple[jax.Array, jax.Array]:
    low = low + word
    return high + (low < word).astype(jnp.uint32), low


def _places(shape: tuple[int, ...], numbers: jax.Array) -> list[jax.Array]:
    """For every entry of [arrays, ...]: its index in its array (two words), its array's number, 0.

    A zero that XLA does not recognise is added to constant words. Otherwise XLA computes what
    follows from them as scalars and shares the rotation counts between scalars and arrays. The
    counts then become variables, LLVM sees no rotations, and a draw takes a third more time.
    """
    words, strides = [jnp.zeros(shape, jnp.uint32)] * 2, [1, 1]
    for axis in range(len(shape) - 1, 0, -1):
        which = int(strides[0] * shape[axis] > 1 << 32)  # the second word once the first is full
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        words[which] = words[which] + index * jnp.uint32(strides[which] % (1 << 32))
        strides[which] *= shape[axis]
    array = jnp.broadcast_to(numbers.reshape(-1, *[1] * (len(shape) - 1)), shape)
    zeros = words[0] >> 31 if math.prod(shape[1:]) <= 1 << 31 else jnp.zeros(shape, jnp.uint32)
    return [words[0], words[1] + zeros, array + zeros, zeros]
