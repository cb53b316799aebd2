"""Causal attention: with all scores at once, or blockwise in memory linear in the length.

Up to ``PLAIN_UP_TO`` positions the plain form is as fast. The blockwise form (online softmax:
Milakov & Gimelshein 2018; Dao et al. 2022) holds only the scores of one pair of blocks at a time:
the backward pass recomputes them from queries, keys and the logarithm of each row's sum. Pairs of
blocks that no query may see are not computed, which saves half the products of the plain form, and
more with a window. The fused form is a kernel made for one platform.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.config import RopeScaling
from dpfl_jax.models.splash import splash

# Positions up to which scores of one head take 4 MiB, and plain attention is as fast.
PLAIN_UP_TO = 1024
BLOCK = 512  # positions
# Finite, so that nothing is inf - inf; its exponential is exactly 0.
_MASKED = -1e30


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    form: str = "auto",
    softcap: float | None = None,
    window: int | None = None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Attention of every position to itself and to earlier positions.

    Args:
      q: queries [kv_heads, group, length, width], scaled; a group of heads shares a key head.
      k: keys [kv_heads, length, width].
      v: values, like the keys.
      form: ``plain``, ``blockwise``, ``auto`` (plain up to ``PLAIN_UP_TO``), or ``fused``: the
        kernel of NVIDIA's GPUs, or that of TPUs, as ``TransformerConfig`` says.
      softcap: scores become cap * tanh(scores / cap).
      window: positions that a position sees, itself included; None: all before it.
      segments: int32 [length]; a position sees its own segment only. None: one segment.

    Returns:
      [kv_heads, group, length, width], in the dtype of ``v``; scores and sums are float32.

    Raises:
      BadInputError: the form is ``fused``, and this platform's kernel cannot do what is asked.
    """
    length = q.shape[2]
    if window is not None and window >= length:
        window = None
    if form == "fused":
        # cuDNN's function asks for its GPU while it is traced, so it is traced only where one is.
        # The TPUs' kernel can be traced anywhere, and need be: programs are compiled for TPUs that
        # are not here. The compiler cannot split it, so it is taken where no device's program is
        # split any more.
        if jax.default_backend() == "gpu":
            return _cudnn(q, k, v, softcap, window, segments)
        if _each_device_alone():
            return splash(q, k, v, softcap, window, segments)
        form = "auto"
    if form == "plain" or (form == "auto" and length <= PLAIN_UP_TO):
        place = jnp.arange(length) if segments is not None else np.arange(length)
        seen = visible(place, place, window)
        if segments is not None:
            seen &= segments[:, None] == segments[None, :]
        return weighted(q, k, v, seen, softcap)
    size = min(BLOCK, length)
    blocks = -(-length // size)

    def cut(x: jax.Array, axis: int) -> jax.Array:
        """Moves blocks to the first axis, and pads the last one, where no position sees it."""
        padding = blocks * size - length
        x = jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], blocks, size, *x.shape[axis + 1 :]), axis, 0)

    segments = None if segments is None else cut(segments, 0)
    out = _blockwise((softcap, window), cut(q, 2), cut(k, 1), cut(v, 1), segments)
    return jnp.moveaxis(out, 0, 2).reshape(*q.shape[:2], -1, v.shape[-1])[:, :, :length]


def _each_device_alone() -> bool:
    """Whether this is traced inside ``jax.shard_map`` over all axes of a mesh."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return bool(kinds) and all(kind == jax.sharding.AxisType.Manual for kind in kinds)


def _cudnn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    softcap: float | None,
    window: int | None,
    segments: jax.Array | None,
) -> jax.Array:
    """Attention by cuDNN's kernel, on NVIDIA GPUs; arguments as in ``attend``."""
    if softcap is not None:
        raise BadInputError(
            "execution.attention=fused knows no attention_softcap on GPUs: take auto"
        )
    mask = None
    if segments is not None:  # under vmap JAX wants it of each head
        same = segments[:, None] == segments
        mask = jnp.broadcast_to(same, (q.shape[0] * q.shape[1], *same.shape))
    try:
        out = jax.nn.dot_product_attention(
            jnp.moveaxis(q.reshape(-1, *q.shape[2:]), 0, 1),
            jnp.moveaxis(k, 0, 1),
            jnp.moveaxis(v, 0, 1),
            mask=mask,
            scale=1.0,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
    except (RuntimeError, NotImplementedError) as error:
        raise BadInputError(
            f"execution.attention=fused cannot be used here ({error}): it needs an NVIDIA GPU, "
            "bfloat16, and heads of at most 128 coordinates in multiples of 8; take auto"
        ) from error
    return jnp.moveaxis(out, 1, 0).reshape(*q.shape[:3], -1)


def visible(query: Any, key: Any, window: int | None) -> Any:
    """Bool [queries, keys]: which keys a query sees, from the positions of both."""
    seen = key[None, :] <= query[:, None]
    return seen if window is None else seen & (query[:, None] - key[None, :] < window)


def weighted(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: Any, softcap: float | None
) -> jax.Array:
    """Attention with all scores at once; shapes as in ``attend``, ``seen`` bool [queries, keys]."""
    scores = jnp.einsum("kgtw,ksw->kgts", q, k, preferred_element_type=jnp.float32)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    future = jnp.where(seen, 0.0, _MASKED).astype(jnp.float32)
    weights = jax.nn.softmax(scores + future, axis=-1).astype(v.dtype)
    return jnp.einsum("kgts,ksw->kgtw", weights, v)


_Static = tuple[float | None, int | None]  # softcap and window
# Below, arrays begin with an axis of blocks: q [blocks, kv_heads, group, size, width], k and v
# [blocks, kv_heads, size, width], segments [blocks, size].


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(
    static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> jax.Array:
    return _forward(static, q, k, v, segments)[0]


def _forward(
    static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, Any]:
    def pair(state: Any, i: Any, j: Any) -> Any:
        most, total, mixed = state
        scores, seen, _ = _scores(static, q, k, segments, i, j)
        now = jnp.maximum(_row(most, i), jnp.where(seen, scores, _MASKED).max(-1))
        weights = jnp.where(seen, jnp.exp(scores - now[..., None]), 0.0)
        kept = jnp.exp(_row(most, i) - now)
        more = _product("kgts,ksw->kgtw", weights.astype(v.dtype), _row(v, j))
        return (
            _put(most, i, now),
            _put(total, i, kept * _row(total, i) + weights.sum(-1)),
            _put(mixed, i, kept[..., None] * _row(mixed, i) + more),
        )

    none = _zeros(q, segments)
    start = (jnp.full_like(none[..., 0], _MASKED), none[..., 0], none)
    most, total, mixed = _over_pairs(pair, start, q, static)
    out = (mixed / total[..., None]).astype(v.dtype)  # every position sees itself: no total is 0
    return out, (q, k, v, segments, out, most + jnp.log(total))


def _backward(static: _Static, saved: Any, d_out: jax.Array) -> Any:
    q, k, v, segments, out, log_total = saved
    # For the gradient of the softmax: the sum over keys of weight times gradient.
    inner = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def pair(state: Any, i: Any, j: Any) -> Any:
        (dq, dk, dv), d_rows = state, _row(d_out, i)
        scores, seen, slope = _scores(static, q, k, segments, i, j)
        weights = jnp.where(seen, jnp.exp(scores - _row(log_total, i)[..., None]), 0.0)
        d_weights = _product("kgtw,ksw->kgts", d_rows, _row(v, j))
        d_scores = weights * (d_weights - _row(inner, i)[..., None])
        d_scores = (d_scores if slope is None else d_scores * slope).astype(q.dtype)
        return (
            _put(dq, i, _row(dq, i) + _product("kgts,ksw->kgtw", d_scores, _row(k, j))),
            _put(dk, j, _row(dk, j) + _product("kgts,kgtw->ksw", d_scores, _row(q, i))),
            _put(dv, j, _row(dv, j) + _product("kgts,kgtw->ksw", weights.astype(v.dtype), d_rows)),
        )

    start = tuple(_zeros(x, segments) for x in (q, k, v))
    dq, dk, dv = _over_pairs(pair, start, q, static)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_blockwise.defvjp(_forward, _backward)


def _over_pairs(
    pair: Callable[[Any, Any, Any], Any], start: Any, q: jax.Array, static: _Static
) -> Any:
    """Scans ``pair`` over the pairs of blocks in which a query sees a key."""
    blocks, size, window = q.shape[0], q.shape[-2], static[1]
    i, j = np.tril_indices(blocks)
    if window is not None:  # the first query of a block sees furthest back
        near = i * size - window < (j + 1) * size - 1
        i, j = i[near], j[near]
    pairs = (jnp.asarray(i, jnp.int32), jnp.asarray(j, jnp.int32))
    # Within a scan over layers, the masks of all pairs, which depend only on constants, would be
    # computed before the scan and kept: the barrier makes them depend on the queries.
    pairs, _ = jax.lax.optimization_barrier((pairs, q))
    return jax.lax.scan(lambda state, at: (pair(state, *at), None), start, pairs)[0]


def _scores(
    static: _Static, q: jax.Array, k: jax.Array, segments: jax.Array | None, i: Any, j: Any
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Scores of one pair of blocks, which of them are visible, and the slope of the softcap."""
    softcap, window = static
    scores, slope = _product("kgtw,ksw->kgts", _row(q, i), _row(k, j)), None
    if softcap is not None:
        capped = jnp.tanh(scores / softcap)
        scores, slope = softcap * capped, 1.0 - capped * capped
    size = q.shape[-2]
    places = jnp.arange(size)
    seen = visible(i * size + places, j * size + places, window)
    if segments is not None:
        seen &= _row(segments, i)[:, None] == _row(segments, j)[None, :]
    return scores, seen, slope


def _zeros(like: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Float32 zeros like ``like``, of a type that varies over the mesh axes of both arrays."""
    zeros = jnp.zeros_like(like, jnp.float32)
    return zeros if segments is None else zeros + jnp.zeros_like(segments[0, 0], jnp.float32)


def _row(x: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x: jax.Array, i: Any, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, row, i, axis=0)


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


# ---- rotary positions (Su et al. 2021), halves convention ------------------------------------


def rotary_frequencies(width: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians per position of each pair of coordinates, float64 [width / 2]."""
    freqs = theta ** (-np.arange(0, width, 2) / width)
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    # Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated.
    rotations = scaling.original_max_len * freqs / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = (rotations - low) / (high - low)
    share = np.clip(share, 0.0, 1.0)
    return (1 - share) * freqs / scaling.factor + share * freqs


def rotary_tables(length: int, freqs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of positions 0 to length - 1, float32 [length, width / 2] each."""
    angles = np.arange(length)[:, None] * freqs
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: jax.Array, cos: jax.Array | np.ndarray, sin: jax.Array | np.ndarray) -> jax.Array:
    """Rotates x [heads, length, width] by angles given as cos and sin [length, width / 2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
