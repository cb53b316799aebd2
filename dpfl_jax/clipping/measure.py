"""The fastest way to clip on the devices that there are, by a clock instead of by estimates.

XLA tunes its products in the same way. What was measured is cached by loss, shapes, rule and chip,
so that a run that resumes computes as before. A choice changes how sums round, and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.clipping.gradients import ClippedGrad
from dpfl_jax.files import answer_file, write_answer

PyTree = Any
_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to compute a clipped gradient: options of ``clipped_grad``.

    Attributes:
      strategy: as for ``clipped_grad``, but not ``auto``.
      microbatch_size: as for ``clipped_grad``.
      kernel: as for ``clipped_grad``.

    Examples:
      >>> from dpfl_jax.clipping import Way
      >>> Way("vmap").options
      {'strategy': 'vmap', 'microbatch_size': None, 'kernel': False}
    """

    strategy: str
    microbatch_size: int | None = None
    kernel: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Options of ``clipped_grad``."""
        return dataclasses.asdict(self)


def fastest(
    gradient: ClippedGrad,
    *args: PyTree,
    seconds: Callable[[Callable[[], Any]], float] | None = None,
) -> Way:
    """Measures the ways that may be fastest, once for each loss, shapes, rule and chip.

    They are what ``auto`` takes, book-keeping with the products of XLA or of the kernel, and all
    gradients at once. What does not compile, or does not fit into memory, does not count.

    Args:
      gradient: a clipped gradient with strategy ``"auto"``.
      *args: as in a call; only shapes and types matter.
      seconds: measures how long a call takes; default: the median of three, after a first one.

    Returns:
      The fastest way; if none can be run, what ``auto`` estimates to be fastest.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import clipped_grad, fastest
      >>> grad = clipped_grad(lambda w, x: jnp.tanh(x @ w) ** 2, clip_norm=1.0)
      >>> fastest(grad, jnp.ones(2), jnp.ones((4, 2))).strategy in ("ghost", "scan", "vmap")
      True
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    file = _cache_file(gradient, shapes)
    if (known := _remembered(file)) is not None:
        return known
    ways = list(_candidates(gradient, shapes))
    values = jax.jit(lambda: jax.tree.map(_some, shapes))()
    times = {}
    for way in ways:
        # One candidate's failure is no failure of the run: compilers refuse in many ways.
        with contextlib.suppress(Exception):
            times[way] = _measured(dataclasses.replace(gradient, **way.options), values, seconds)
    if not times:
        return ways[0]
    best = min(times, key=lambda way: times[way])
    write_answer(file, best.options)
    return best


def _candidates(gradient: ClippedGrad, shapes: tuple[PyTree, ...]) -> Iterator[Way]:
    found = dataclasses.replace(gradient, kernel=False).explain(*shapes)
    size = found.microbatch_size
    if found.strategy != "ghost":
        yield Way(found.strategy, size)
        size = None
    seen = []
    for kernel in (False, True):
        way = Way("ghost", size, kernel)
        leaves = dataclasses.replace(gradient, **way.options).explain(*shapes).leaves
        methods = [leaf.method for leaf in leaves]
        if methods not in seen:
            yield way
        seen.append(methods)
    yield Way("vmap")


def _measured(
    gradient: ClippedGrad,
    values: tuple[PyTree, ...],
    seconds: Callable[[Callable[[], Any]], float] | None,
) -> float:
    compiled = jax.jit(lambda *args: gradient(*args).sum).lower(*values).compile()
    memory, limit = compiled.memory_analysis(), gradient.memory
    if limit is not None and memory is not None and memory.temp_size_in_bytes > limit:
        raise MemoryError
    return (_seconds if seconds is None else seconds)(lambda: compiled(*values))


def _seconds(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(_ROUNDS + 1):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def _some(x: jax.ShapeDtypeStruct) -> jax.Array:
    """Values that take as long as any: tokens that differ, numbers of ordinary size."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), x.shape)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return 0.02 * jax.random.normal(jax.random.key(0), x.shape, x.dtype)
    return (jnp.arange(x.size).reshape(x.shape) % 61 + 1).astype(x.dtype)


# ---- measured before -----------------------------------------------------------------------------


def _cache_file(gradient: ClippedGrad, shapes: tuple[PyTree, ...]) -> pathlib.Path | None:
    params, batch, rebuild = gradient.arguments(shapes)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    return answer_file(
        "clipping",
        jax.__version__,
        jax.devices()[0].device_kind,
        str(jax.make_jaxpr(gradient.loss_fn)(*rebuild(params, one))),
        repr((gradient.rule, gradient.memory, jax.tree.leaves(shapes))),
    )


def _remembered(file: pathlib.Path | None) -> Way | None:
    if file is None:
        return None
    try:
        known = Way(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    # A bad file must not choose a way that was not measured.
    sized = known.microbatch_size is None or known.microbatch_size in range(1, 2**31)
    valid = known.strategy in ("ghost", "scan", "vmap") and sized and known.kernel in (True, False)
    return known if valid else None
