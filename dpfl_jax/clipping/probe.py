"""Asks the compiler how much memory a bounded gradient takes, before anything runs.

Book-keeping keeps the activations and output gradients of all units at hand alive. ``auto``
estimates that from shapes; the compiler knows. ``probe`` compiles what ``auto`` would take for
these shapes, and, where that does not fit, the same in ever smaller microbatches, and a scan over
single units.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import jax

from dpfl_jax.clipping.gradients import ClippedGrad
from dpfl_jax.errors import BadInputError

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Probed:
    """What a probe found.

    Attributes:
      bounded: the same bounded gradient with strategy and microbatch size fixed.
      temp_bytes: temporary memory that the compiler gives it on one device.
      tried: (strategy, microbatch size or None, temporary bytes) of all that were compiled.
    """

    bounded: ClippedGrad
    temp_bytes: int
    tried: tuple[tuple[str, int | None, int], ...]

    def __str__(self) -> str:
        """A line for each that was compiled."""
        return "\n".join(
            f"{strategy}{'' if size is None else f', {size} units at a time'}: "
            f"{taken / 2**20:.1f} MiB"
            for strategy, size, taken in self.tried
        )


def probe(
    bounded: ClippedGrad,
    *args: PyTree,
    mask: jax.Array | None = None,
    rng: jax.Array | None = None,
    weight: jax.Array | None = None,
    memory_limit: float | None = None,
) -> Probed:
    """Fixes the strategy of ``bounded`` by compiling it for arrays of these shapes.

    Args:
      bounded: usually with strategy ``"auto"``.
      *args: arrays or ``jax.ShapeDtypeStruct``s, as in a call.
      mask: as in a call.
      rng: as in a call.
      weight: as in a call.
      memory_limit: bytes of temporary memory; default what ``bounded`` was given, else half of what
        the device says it has; if neither is known the first choice is taken.

    Returns:
      A ``Probed``; use its ``bounded``.

    Raises:
      BadInputError: not even one unit at a time fits.
    """
    limit = bounded.memory_limit if memory_limit is None else memory_limit
    if limit is None:
        stats = jax.local_devices()[0].memory_stats() or {}
        limit = 0.5 * stats["bytes_limit"] if "bytes_limit" in stats else None
    units = jax.tree.leaves(bounded.arguments(args)[1])[0].shape[0]
    chosen = bounded.explain(*args, mask=mask, rng=rng, weight=weight)
    candidates: list[tuple[str, int | None]] = [(chosen.strategy, chosen.microbatch_size)]
    if chosen.strategy == "ghost":
        size = chosen.microbatch_size or units
        while size > 1:
            size = -(-size // 2)
            candidates.append(("ghost", size))
    if ("scan", 1) not in candidates:
        candidates.append(("scan", 1))
    tried: list[tuple[str, int | None, int]] = []
    for strategy, size in candidates:
        fixed = copy.copy(bounded)
        fixed.strategy, fixed.microbatch_size = strategy, size  # type: ignore[assignment]
        taken = _temp_bytes(fixed, args, mask, rng, weight)
        tried.append((strategy, size, taken))
        if limit is None or taken <= limit:
            return Probed(fixed, taken, tuple(tried))
    least = min(taken for _, _, taken in tried)
    raise BadInputError(
        f"clipped_grad: the gradient of one unit takes {least / 2**20:.0f} MiB of temporary "
        f"memory, but {(limit or 0) / 2**20:.0f} MiB are allowed: shorten the examples, lower the "
        "group size, turn remat on, or split the parameters over more devices"
    )


def _temp_bytes(
    bounded: ClippedGrad,
    args: tuple[PyTree, ...],
    mask: jax.Array | None,
    rng: jax.Array | None,
    weight: jax.Array | None,
) -> int:
    def call(args: tuple[PyTree, ...], mask: Any, rng: Any, weight: Any) -> Any:
        return bounded(*args, mask=mask, rng=rng, weight=weight)

    compiled = jax.jit(call).lower(args, mask, rng, weight).compile()
    memory = compiled.memory_analysis()
    return 0 if memory is None else int(memory.temp_size_in_bytes)
