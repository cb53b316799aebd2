"""The products of units' bfloat16 factors by a kernel that adds up squares as it goes.

XLA writes a unit's gradient to memory before it reads it for the norm. This kernel (Pallas: Triton
on GPUs, Mosaic on TPUs) adds up each tile's squares while it has the tile, and then writes the tile
(``fused``) or not (``squares``). On a CPU XLA computes the same.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dpfl_jax.clipping.result import pinned
from dpfl_jax.varying import axes_of, vary

Platform = Literal["gpu", "tpu"]
_PLATFORMS: tuple[Platform, ...] = ("gpu", "tpu")
# Mosaic loads all positions of a tile's rows and columns: so many fit beside their successors.
MOST_POSITIONS = 8192
_VMEM = 2.0**23  # bytes for factors; by default Mosaic grants a kernel twice that
_LANES = 128  # a TPU's arrays are padded to this width, and a row of squares fills it


def fused(
    left: jax.Array, right: jax.Array, interpret: Platform | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns units' gradients, bfloat16 [n, s, a, b], and their squared norms, float32 [n].

    The norms are those of the gradients as they are returned: of the rounded numbers.

    Args:
      left: bfloat16 [s, n, positions, a], for n units and s products of each (stacked layers).
      right: bfloat16 [s, n, positions, b].
      interpret: interprets that platform's kernel, on any device (for tests).
    """
    gradients, squared = _on_platform(left, right, True, interpret)
    return gradients, squared


def squares(left: jax.Array, right: jax.Array, interpret: Platform | None = None) -> jax.Array:
    """Returns the squared norms of the products, float32 [n], and writes nothing else.

    Args:
      left: as for ``fused``.
      right: as for ``fused``.
      interpret: as for ``fused``.
    """
    (squared,) = _on_platform(left, right, False, interpret)
    return squared


def _on_platform(
    left: jax.Array, right: jax.Array, write: bool, interpret: Platform | None
) -> list[jax.Array]:
    left, right = vary((left, right), axes_of(jax.typeof(left)) | axes_of(jax.typeof(right)))
    if interpret is not None:
        return _run(left, right, platform=interpret, write=write, interpret=True)
    gpu, tpu = (
        functools.partial(_run, platform=name, write=write, interpret=False) for name in _PLATFORMS
    )
    plain = functools.partial(_plain, write=write)
    return lax.platform_dependent(left, right, cpu=plain, tpu=tpu, default=gpu)


def _plain(left: jax.Array, right: jax.Array, write: bool) -> list[jax.Array]:
    """What the kernel computes, by XLA."""

    def one(factors: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
        x, y = (z.astype(jnp.float32) for z in factors)
        out = jnp.einsum("ska,skb->sab", x, y, precision=lax.Precision.HIGHEST)
        rounded = pinned(out.astype(jnp.bfloat16))
        squared = jnp.square(rounded.astype(jnp.float32) if write else out).sum()
        return [rounded, squared] if write else [squared]

    return lax.map(one, (left.swapaxes(0, 1), right.swapaxes(0, 1)))


def padded(positions: int, left: int, right: int) -> tuple[int, int, int]:
    """Returns the sizes that a GPU's kernel computes with."""
    sides = _sides("gpu", positions, left, right)
    return tuple(-(-size // side) * side for size, side in zip((positions, left, right), sides))  # type: ignore[return-value]


def _sides(platform: str, positions: int, left: int, right: int) -> tuple[int, int, int]:
    """Positions at a time, and the sides of a tile."""
    if platform == "tpu":
        rows = next(x for x in (512, 256, 128, 64, 32, 16) if x == 16 or positions >= x)
        wide, high = (
            next(x for x in (512, 256, _LANES) if x == _LANES or size % x == 0)
            for size in (left, right)
        )
        while wide + high > 2 * _LANES and 4 * positions * (wide + high) > _VMEM:
            wide, high = (wide, high // 2) if high >= wide else (wide // 2, high)
        return rows, wide, high

    def power(size: int, most: int) -> int:  # tensor cores take at least 16
        return min(most, max(16, pl.next_power_of_2(size)))

    return power(positions, 64), power(left, 128), power(right, 256)


def _filled(x: jax.Array, rows: int, width: int) -> jax.Array:
    """``x`` with zeros behind its last two axes, which change no norm."""
    more = [(0, 0)] * 2 + [(0, -x.shape[2] % rows), (0, -x.shape[3] % width)]
    return x if x.shape[2] % rows == x.shape[3] % width == 0 else jnp.pad(x, more)


def _run(
    left: jax.Array, right: jax.Array, platform: Platform, write: bool, interpret: bool
) -> list[jax.Array]:
    (s, n, positions, a), b = left.shape, right.shape[3]
    rows, wide, high = _sides(platform, positions, a, b)
    left, right = _filled(left, rows, wide), _filled(right, rows, high)
    positions = left.shape[2]
    tiles, units = (left.shape[3] // wide, right.shape[3] // high), n * s
    # The first axis of a grid changes fastest on a GPU, where tiles of one unit then share a cache;
    # on a TPU the last one does, and the tiles of a unit add to one sum after the other.
    fastest_first = platform == "gpu"

    def at(place: Any) -> Any:
        def index(*ids: Any) -> tuple[Any, ...]:
            j, i, unit = ids if fastest_first else reversed(ids)
            return place(lax.div(unit, s), lax.rem(unit, s), i, j)

        return index

    kind = {"manual_axis_type": jax.typeof(left).manual_axis_type}
    gradients = jax.ShapeDtypeStruct((n, s, left.shape[3], right.shape[3]), jnp.bfloat16, **kind)
    block = pl.BlockSpec((None, None, wide, high), at(lambda u, k, i, j: (u, k, i, j)))
    if fastest_first:
        squared = jax.ShapeDtypeStruct((n, s, *tiles), jnp.float32, **kind)
        sums = pl.BlockSpec((1, 1, 1, 1), at(lambda u, k, i, j: (u, k, i, j)))
    else:
        squared = jax.ShapeDtypeStruct((n, s, 1, _LANES), jnp.float32, **kind)
        sums = pl.BlockSpec((1, 1, 1, _LANES), at(lambda u, k, i, j: (u, k, 0, 0)))
    out = pl.pallas_call(
        functools.partial(_kernel, rows, platform, interpret),
        [gradients, squared] if write else [squared],
        grid=(*tiles[::-1], units) if fastest_first else (units, *tiles),
        in_specs=[
            pl.BlockSpec((None, None, positions, wide), at(lambda u, k, i, j: (k, u, 0, i))),
            pl.BlockSpec((None, None, positions, high), at(lambda u, k, i, j: (k, u, 0, j))),
        ],
        out_specs=[block, sums] if write else [sums],
        interpret=interpret,
        compiler_params=_triton() if platform == "gpu" and not interpret else None,
    )(left, right)
    each = out[-1].reshape(n, -1) if fastest_first else out[-1][..., 0].reshape(n, s)
    return [*(x[:, :, :a, :b] for x in out[:-1]), each.sum(1)]


def _triton() -> Any:
    from jax.experimental.pallas import triton  # takes most of a second, and only GPUs need it

    return triton.CompilerParams(num_warps=8, num_stages=3)


def _kernel(
    rows: int, platform: Platform, interpret: bool, left: Any, right: Any, *outs: Any
) -> None:
    """One tile of one unit's product: its squares, and the tile if there is a place for it."""

    def add(k: Any, total: jax.Array) -> jax.Array:
        some = pl.ds(k * rows, rows)
        over_positions = (((0,), (0,)), ((), ()))
        return total + lax.dot_general(
            left[some, :], right[some, :], over_positions, preferred_element_type=jnp.float32
        )

    tile = jnp.zeros((left.shape[1], right.shape[1]), jnp.float32)
    tile = lax.fori_loop(0, left.shape[0] // rows, add, tile)
    if len(outs) == 2:
        rounded = tile.astype(jnp.bfloat16)
        outs[0][...] = rounded
        # XLA, which interprets, may leave a pair of casts out. Triton does not, and its threads may
        # not see yet what others have written. On a TPU the tile is read again.
        if interpret:
            tile = lax.reduce_precision(tile, 8, 7)
        else:
            tile = (rounded if platform == "gpu" else outs[0][...]).astype(jnp.float32)
    squared = jnp.sum(tile * tile)
    sums = outs[-1]
    if platform == "gpu":
        sums[0, 0, 0, 0] = squared
        return

    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    sums[...] += squared
