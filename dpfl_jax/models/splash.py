"""JAX's splash attention, a Pallas kernel for TPUs, usable inside ``jax.shard_map``.

Inside ``shard_map`` an array's type says over which mesh axes it varies, and JAX refuses a
``pallas_call`` whose outputs do not declare it, as this kernel's do not. (That check stays on: it
keeps gradients from being summed over devices before they are clipped.) So the kernel is traced to
a jaxpr without a mesh, and the jaxpr is evaluated inside ``shard_map``, where each ``pallas_call``
is bound with outputs that vary over every axis over which an input varies. JAX's own operations
declare the same, and it is true: a jaxpr traced without a mesh cannot name a mesh axis, so that
a device's outputs depend on its own inputs only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from dpfl_jax.errors import BadInputError
from dpfl_jax.varying import vary, varying_axes

_BLOCK = 512  # positions, forward and backward: a multiple of the lanes
_LANES = 128
_INLINED = frozenset({"jit", "pjit"})


def splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    softcap: float | None,
    window: int | None,
    segments: jax.Array | None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention by the kernel; it is traced anywhere, and lowered for TPUs only.

    Args:
      q: queries [kv_heads, group, length, width], scaled.
      k: keys [kv_heads, length, width].
      v: values, like the keys.
      softcap: scores become cap * tanh(scores / cap).
      window: positions that a position sees, itself included; None: all before it.
      segments: int [length]; a position sees its own segment only. None: one segment.
      interpret: interprets the kernel, on any device (for tests).

    Raises:
      BadInputError: this version of JAX has another kernel than the one this was written for.
    """
    length = q.shape[2]
    size = min(_BLOCK, -(-length // _LANES) * _LANES)
    more = -length % size

    def padded(x: jax.Array) -> jax.Array:
        """Positions are added behind all others, where causality hides them."""
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, more), (0, 0)])

    given = [padded(q.reshape(-1, *q.shape[2:])), padded(k), padded(v)]
    if segments is not None:
        given.append(jnp.pad(segments.astype(jnp.int32), (0, more)))
    # What is differentiated varies already, so that JAX itself transposes these casts (to sums over
    # devices, of gradients with respect to what is the same on all of them).
    given = vary(given, varying_axes(given))
    shapes = tuple((x.shape, x.dtype) for x in given)
    asked: Any = jax.config  # what the kernel's products depend on, too
    settings = (asked.jax_default_matmul_precision, asked.jax_enable_x64)
    programs = _programs(shapes, size, softcap, window, settings, interpret)
    return _attention(programs, *given)[:, :length].reshape(*q.shape[:3], -1).astype(v.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class _Programs:
    """Traced without a mesh: inputs -> output, *saved; and *saved, gradient -> gradients."""

    forward: Any
    backward: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(programs: _Programs, *given: jax.Array) -> jax.Array:
    return _forward(programs, *given)[0]


def _forward(programs: _Programs, *given: jax.Array) -> tuple[jax.Array, Any]:
    out, *saved = _bound(programs.forward, given)
    return out, saved


def _backward(programs: _Programs, saved: list[jax.Array], d_out: jax.Array) -> Any:
    gradients = _bound(programs.backward, [*saved, d_out])
    return (*gradients, *[None] * (len(programs.forward.jaxpr.invars) - len(gradients)))


_attention.defvjp(_forward, _backward)


@functools.cache
def _programs(
    shapes: tuple[Any, ...],
    size: int,
    softcap: float | None,
    window: int | None,
    settings: tuple[str | None, bool],
    interpret: bool,
) -> _Programs:
    try:  # imported here: Pallas takes most of a second
        from jax.experimental.pallas.ops.tpu import splash_attention as library
    except ImportError as error:
        raise _unknown(f"it cannot be imported ({error})") from error

    def trace() -> _Programs:
        # Two kernels for the backward pass: the fused one writes gradients of all queries for each
        # block of keys, in memory that grows with the square of the length.
        names = (
            "block_q",
            "block_kv",
            "block_kv_compute",
            "block_q_dkv",
            "block_kv_dkv",
            "block_kv_dkv_compute",
            "block_q_dq",
            "block_kv_dq",
        )
        blocks: dict[str, Any] = dict.fromkeys(names, size)
        heads, length, _ = shapes[0][0]
        square = (length, length)
        if window is None:
            mask: Any = library.CausalMask(square)
        else:
            mask = library.LocalMask(square, (window - 1, 0), 0)
        kernel: Any = library.make_splash_mha(
            mask=library.MultiHeadMask([mask] * heads),
            block_sizes=library.BlockSizes(**blocks),
            attn_logits_soft_cap=softcap,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        pulled: list[Callable[..., Any]] = []

        def forward(q: Any, k: Any, v: Any, segments: Any = None) -> Any:
            ids = None if segments is None else library.SegmentIds(segments, segments)
            out, back = jax.vjp(lambda *x: kernel(*x, ids), q, k, v)
            tree: Any
            leaves, tree = jax.tree.flatten(back)
            # Only what was computed is saved. Which blocks are masked is known: under vmap it must
            # stay without a unit axis, or JAX would run the kernel for one unit after the other.
            computed = [isinstance(x, jax.core.Tracer) for x in leaves]

            def pull(*given: Any) -> Any:
                *saved, d_out = given
                ready = iter(saved)
                all_leaves = [next(ready) if c else x for c, x in zip(computed, leaves)]
                return tree.unflatten(all_leaves)(d_out)

            pulled.append(pull)
            return out, [x for x, c in zip(leaves, computed) if c]

        first: Any = jax.make_jaxpr(forward)(*(jax.ShapeDtypeStruct(*x) for x in shapes))
        out, *saved = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in first.out_avals)
        return _Programs(first, jax.make_jaxpr(pulled[0])(*saved, out))

    def trace_so() -> _Programs:
        with jax.default_matmul_precision(settings[0]):
            return trace()

    # JAX keeps the mesh, the trace under way, and settings of a `with`, for each thread: a new one
    # has none of them.
    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(trace_so).result()
        except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
            raise _unknown(f"it does not take these options ({error})") from error


def _bound(program: Any, given: Sequence[jax.Array]) -> list[jax.Array]:
    """Evaluates a program, in which everything varies over the mesh axes of any of its inputs."""
    axes = varying_axes(given)

    def run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(v: Any) -> Any:
            kind: Any = v.aval
            return vary(
                jnp.asarray(v.val, kind.dtype) if isinstance(v, Literal) else known[v], axes
            )

        for equation in jaxpr.eqns:
            name, params = equation.primitive.name, dict(equation.params)
            values = [read(v) for v in equation.invars]
            inner = [x for x in jax.tree.leaves(params) if isinstance(x, (ClosedJaxpr, Jaxpr))]
            if name in _INLINED and len(inner) == 1:
                outs = run(inner[0].jaxpr, inner[0].consts, values)
            elif name == "pallas_call" and "out_avals" in params:
                kinds = tuple(_varying(x, axes) for x in params.pop("out_avals"))
                outs = equation.primitive.bind(*values, out_avals=kinds, **params)
            elif inner:
                raise _unknown(f"it contains {name}")
            else:
                outs = equation.primitive.bind(*values, **params)
            outs = outs if equation.primitive.multiple_results else [outs]
            known |= zip(equation.outvars, outs, strict=True)
        return [read(v) for v in jaxpr.outvars]

    # Constants are NumPy's: they belong to no device.
    consts = [jnp.asarray(np.asarray(x)) for x in program.consts]
    return run(program.jaxpr, consts, given)


def _varying(aval: Any, axes: frozenset[str]) -> Any:
    """The type of an array of this shape that varies over ``axes``, here."""
    made = jax.make_jaxpr(lambda: vary(jnp.zeros(aval.shape, aval.dtype), axes))()
    return made.out_avals[0]


def _unknown(what: str) -> BadInputError:
    return BadInputError(
        f"execution.attention=fused: the splash attention of JAX {jax.__version__} is not the one "
        f"known here, {what}: take auto"
    )
