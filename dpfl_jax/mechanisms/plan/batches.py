"""Sets up the data pipeline of a training run: the sizes of buffers, and the form of examples.

``data.pipeline`` reads, pads and ships examples. This module decides how large its buffers are, and
in which form examples are sent to the devices.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from dpfl_jax.clipping.preflight import TOLERANCE, away_from_zero, has_low, unoptimised
from dpfl_jax.config.execution import Execution
from dpfl_jax.data.packing import SAMPLE_UNITS, Shape, choose_shapes, pack_units
from dpfl_jax.data.pipeline import Bucket, Pipeline, StepBatch, bucket_group_sizes, is_token_store
from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError
from dpfl_jax.mesh import unit_axes, unit_parts
from dpfl_jax.randomness import RootKey, key_argument, keyed, with_keys
from dpfl_jax.sampling import Sampler
from dpfl_jax.task import handles_segments

if TYPE_CHECKING:
    from dpfl_jax.mechanisms.mechanism import Mechanism

PyTree = Any

# A draw exceeds its buffer with this probability, and then gets a larger one.
_OVERFLOW = 1e-15
# Types to compute with; ids and segments are sent to the devices in the narrowest type that fits.
_KINDS = {"tokens": np.int32, "segments": np.int32}


def training_pipeline(
    sampler: Sampler,
    store: Readable,
    mesh: Mesh,
    microbatch_size: int,
    group_buckets: bool = False,
    loss_key: RootKey | None = None,
    packing: int = 0,
) -> Pipeline:
    """Returns the pipeline of a run, whose batches all have the same shapes.

    Args:
      sampler: draws the units of each step.
      store: store that examples are read from. Tokens are shipped as stored (``example_loss``).
      mesh: devices that batches are shipped to.
      microbatch_size: units per device and row.
      group_buckets: whether to put users with few examples into buffers with a smaller group axis
        (1, 2, 4, ...) instead of padding them to the group size.
      loss_key: root key of the examples' random keys, for a loss that takes one (``example_loss``).
      packing: number of row shapes into which each unit's sequences are packed (``data.packing``);
        0: no packing.
    """
    row = microbatch_size * unit_parts(mesh)
    if packing:
        return _packed(sampler, store, mesh, row, packing)
    sizes, bounds = None, (sampler.size_bound(_OVERFLOW),)
    if group_buckets and sampler.group_size is not None:
        sizes = bucket_group_sizes(sampler.group_size)
        bounds = sampler.bucket_bounds(sizes, _OVERFLOW)  # type: ignore[attr-defined]
    return Pipeline(
        store,
        sampler,
        row,
        sizes,
        mesh,
        axis=unit_axes(mesh),
        compact=is_token_store(store),
        capacities=tuple(max(1, math.ceil(bound / row)) for bound in bounds),
        ahead=2,
        loss_key=loss_key,
    )


def _packed(sampler: Sampler, store: Readable, mesh: Mesh, row: int, most_shapes: int) -> Pipeline:
    """A packing pipeline, with room for units of each shape by its share in a sample of units."""
    most = sampler.size_bound(_OVERFLOW)
    shapes, shares = choose_shapes(
        store, sampler.group_size, sampler.expected_size, row, unit_parts(mesh), most_shapes
    )
    # The sample is small, so the true share may be larger by some standard errors.
    sure = [min(1.0, share + 4 * math.sqrt(share / SAMPLE_UNITS) + 0.004) for share in shares]
    units = [min(most, most * share + 6 * math.sqrt(most * share)) for share in sure]
    return Pipeline(
        store,
        sampler,
        row,
        mesh=mesh,
        axis=unit_axes(mesh),
        capacities=tuple(max(1, math.ceil(n / s.units)) for n, s in zip(units, shapes)),
        ahead=2,
        shapes=shapes,
    )


def check_packing(loss_fn: Callable[..., jax.Array], store: Readable, how: Execution) -> None:
    """Raises BadInputError if ``how`` asks for packing, but the examples cannot be packed."""
    if not how.packing:
        return
    schema = getattr(store, "schema", None)
    if schema is None or schema.kind == "arrays" or schema.pairs:
        raise BadInputError(
            "execution.packing packs single sequences of tokens, which these examples are not: "
            "set it to 0"
        )
    if not handles_segments(loss_fn):
        raise BadInputError(
            "execution.packing needs a loss that handles several sequences in one row, like the "
            "transformer's: set it to 0, or mark a loss that takes `segments` with "
            "dpfl_jax.task.takes_segments"
        )
    for name in ("group_buckets", "examples_at_once", "split_users"):
        if getattr(how, name):
            raise BadInputError(
                f"execution.packing and execution.{name} both say how a user's examples are cut "
                "up: leave one out"
            )


def check_packed_loss(loss_fn: Callable[..., jax.Array], store: Readable, params: PyTree) -> None:
    """Checks that the loss of packed rows is the sum of their sequences' losses.

    Args:
      loss_fn: loss of one example, or of a packed row.
      store: store whose first sequences are cut to half a row, so that two share a row.
      params: all parameters.

    Raises:
      BadInputError: the losses differ, or the loss depends on a random key.
    """
    offsets = np.asarray(store.user_offsets)
    positions = np.arange(offsets[0], min(offsets[0] + 4, offsets[-1]))
    cut = _Halved(store)
    length = store.read(positions[:1])["tokens"].shape[1]
    rows, *_ = pack_units(cut, positions[None], Shape(len(positions), length), grouped=True)
    rows = {n: x[0].astype(_KINDS.get(n, x.dtype)) for n, x in rows.items()}
    params = away_from_zero(params)

    def losses(params: PyTree, examples: PyTree, **key: Any) -> jax.Array:
        # One after the other, as a step may take no more at once.
        return jax.lax.map(lambda one: loss_fn(params, one, **key), examples)

    single = cut.read(positions)
    compiled = jax.jit(losses, compiler_options=unoptimised())
    low = has_low(losses, params, single)
    one_by_one = np.asarray(compiled(params, single), np.float64)
    room = TOLERANCE["bfloat16" if low else "float32"] * np.abs(one_by_one).sum()
    together = float(compiled(params, rows).sum())
    if not abs(together - one_by_one.sum()) <= room:
        raise BadInputError(
            f"the loss of packed rows is {together:.6g}, but the losses of their {len(positions)} "
            f"sequences add up to {one_by_one.sum():.6g}: set execution.packing to 0, or make the "
            "loss that takes_segments marks the sum of the losses of a row's sequences"
        )
    name = key_argument(loss_fn)
    if name is not None:
        drawn = np.asarray(compiled(params, single, **{name: jax.random.key(1)}))
        if not np.abs(drawn - one_by_one).sum() <= room:
            raise BadInputError(
                f"the loss draws at random (`{name}`), but sequences in a packed row have no keys: "
                "set execution.packing to 0, or leave dropout out"
            )


class _Halved:
    """A view of a store in which sequences end after half a row."""

    def __init__(self, store: Any) -> None:
        self._store, self.schema = store, getattr(store, "schema", None)
        self.user_offsets = store.user_offsets

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        rows = self._store.read(positions)
        length = rows["mask"].shape[1]
        kept = np.arange(length) < max(1, length // 2)
        return {"tokens": np.where(kept, rows["tokens"], 0), "mask": rows["mask"] & kept}


def example_loss(
    loss_fn: Callable[..., jax.Array], store: Readable, packing: bool = False
) -> Callable[..., jax.Array]:
    """Returns the loss of one example in the form that the pipeline ships.

    Token sequences are shipped as stored (two bytes per token, not five), and are unpacked on the
    device, one microbatch at a time. A loss that takes a key (``randomness.key_argument``) gets the
    key of its example. With ``packing``, an example is a row of several, and has no key.
    """
    if packing:

        def of_row(params: PyTree, row: PyTree) -> jax.Array:
            return loss_fn(params, {n: x.astype(_KINDS.get(n, x.dtype)) for n, x in row.items()})

        return of_row
    shipped = loss_fn
    if is_token_store(store):
        unpack = store.schema.unpack_on_device  # type: ignore[attr-defined]

        def shipped(params: PyTree, example: PyTree, **kwargs: Any) -> jax.Array:
            return loss_fn(params, unpack(example["records"]), **kwargs)

    name = key_argument(loss_fn)
    return shipped if name is None else keyed(shipped, name)


def step_arguments(mechanism: Mechanism, batch: StepBatch) -> tuple[Any, Any, Any]:
    """Returns a batch as arguments of the step: units, masks and numbers of rows, per bucket."""
    return (
        tuple(units_of(mechanism, bucket) for bucket in batch.buckets),
        tuple(bucket.unit_mask for bucket in batch.buckets),
        tuple(np.int32(bucket.num_rows) for bucket in batch.buckets),
    )


def units_of(mechanism: Mechanism, bucket: Bucket) -> PyTree:
    """Returns the units of a bucket: a pytree of arrays [rows, row, ...]."""
    examples = bucket.arrays if bucket.keys is None else with_keys(bucket.arrays, bucket.keys)
    units = mechanism.participation.units(examples, bucket.example_mask)
    if bucket.per_unit is not None:
        units = {**units, "bound": bucket.per_unit}
    # A packed unit has fewer rows than examples, but its loss is the mean over examples.
    return units if bucket.counts is None else {**units, "count": bucket.counts}


def draw_digest(sampler: Sampler, key: RootKey, step: int) -> str:
    """Returns a digest of a step's draw, for processes to compare, keyed so that it is secret.

    Args:
      sampler: draws the units of each step.
      key: root key of the run.
      step: number of the step.
    """
    draw = sampler.draw(step)
    content = hashlib.sha256(np.ascontiguousarray(draw.units).tobytes())
    content.update(np.ascontiguousarray(draw.positions).tobytes())
    return key.derive("draw-digest:" + content.hexdigest()).hex()[:32]
