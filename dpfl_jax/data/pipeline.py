"""Reads the units of a draw, pads them to whole rows, and ships them to devices ahead of the step.

A step's units become one or several *buckets* of fixed shapes [rows, row, ...] with masks; a step
function loops over the rows that hold units, so that a varying number of them never recompiles it.
Users with few examples go to buckets with a smaller group axis instead of being padded to the
largest. Every process reads only the columns of its devices. Training and ``dpfl bench data`` both
read through this. Nothing here is random: a resumed run starts at another step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dpfl_jax.data import packing
from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey, example_keys
from dpfl_jax.sampling import Draw, share_of


class Drawer(Protocol):
    """The part of a sampler that the pipeline needs."""

    def draw(self, step: int) -> Draw:
        """Returns the draw of a step."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Units of one shape.

    Attributes:
      arrays: [rows, row, ...] (a unit is one example) or [rows, row, group_size, ...]; zeros where
        there is no example.
      unit_mask: bool [rows, row], False for padding.
      example_mask: bool [rows, row, group_size], False for padding; None if a unit is one example.
      num_rows: number of rows with real units; the others are padding (``padded_rows``).
      num_units: number of real units, over all hosts.
      keys: uint32 [rows, row, (group_size,) 3], what the examples' keys are made of
        (``example_keys``); None if the loss takes no key.
      counts: int32 [rows, row], examples of each unit, if they are packed: the group axis then has
        rows of tokens, and ``example_mask`` says which are used.
      per_unit: [rows, row], a number for each unit (its bound); None without one.
    """

    arrays: Mapping[str, Any]
    unit_mask: Any
    example_mask: Any | None
    num_rows: int
    num_units: int
    keys: Any | None = None
    counts: Any | None = None
    per_unit: Any | None = None

    @property
    def group_size(self) -> int | None:
        """Length of the group axis; None if a unit is one example."""
        return None if self.example_mask is None else self.example_mask.shape[2]


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """All units of one step.

    Attributes:
      step: number of the step.
      buckets: buckets of fixed shapes; together they hold every unit once.
      num_units: number of real units.
      num_examples: number of real examples.
      num_tokens: real tokens that this process read (0 if examples are not token sequences).
      columns: number of columns of each row that this process read.
      num_places: tokens, padding included, that this process's part of the step computes.
    """

    step: int
    buckets: tuple[Bucket, ...]
    num_units: int
    num_examples: int
    num_tokens: int
    columns: int
    num_places: int = 0


def bucket_group_sizes(group_size: int) -> tuple[int, ...]:
    """Returns 1, 2, 4, ... up to ``group_size``: users are padded to less than twice their size."""
    sizes = [2**k for k in range(group_size.bit_length()) if 2**k < group_size]
    return (*sizes, group_size)


def split_into_buckets(draw: Draw, sizes: tuple[int, ...] | None) -> list[Draw]:
    """Splits a draw of users (positions [n, group_size]) by their numbers of examples.

    ``sizes`` are increasing group sizes up to that of the draw; None, or units that are single
    examples: one bucket. Returns one draw per size, possibly empty.
    """
    if draw.positions.ndim == 1 or sizes is None:
        return [draw]
    positions = draw.positions
    if sizes[-1] < positions.shape[1] or list(sizes) != sorted(set(sizes)):
        raise BadInputError(
            f"the bucket sizes {sizes} must increase up to the group size {positions.shape[1]}"
        )
    real = positions >= 0
    counts = real.sum(axis=1)
    if not np.array_equal(real, np.arange(positions.shape[1]) < counts[:, None]):
        order = np.argsort(~real, axis=1, kind="stable")
        positions = np.take_along_axis(positions, order, axis=1)
    which = np.searchsorted(np.asarray(sizes), counts)
    return [
        Draw(draw.units[which == b], positions[which == b][:, :size])
        for b, size in enumerate(sizes)
    ]


def padded_rows(units: int, row: int) -> int:
    """Returns the rows of a buffer: exact up to 15, then in steps of at most an eighth.

    A run sees few shapes (each is compiled once), and little padding is shipped.
    """
    needed = max(1, -(-units // row))
    grain = 1 << max(0, needed.bit_length() - 4)
    return -(-needed // grain) * grain


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Random access to the batches of a run, and an iterator that reads ahead.

    Attributes:
      store: where examples are read.
      sampler: which units each step has (the same on every host).
      row: units per row over all devices; a multiple of their number.
      group_sizes: bucket sizes for users (``bucket_group_sizes``); None for one bucket.
      mesh: a ``jax.sharding.Mesh`` to ship to, or None to keep NumPy arrays.
      axis: mesh axis (or axes) over which units are split.
      compact: ship stored records, ``{"records": uint8 [rows, row, ..., bytes]}``, to be unpacked
        by ``store.schema.unpack_on_device`` inside the step; token stores only.
      capacities: rows of each bucket's buffer, so that every step has the same shapes; one that
        overflows is doubled (and recompiled), never truncated: leaving units out would be another
        sampling than the one accounted for. None sizes buffers to the step.
      threads: threads that read ahead.
      ahead: steps read ahead.
      loss_key: root key from which each example gets a key at each step; None: no keys.
      shapes: pack the examples of each unit into rows of these shapes (``packing.choose_shapes``);
        None: an example is a row, and users go by group sizes.
      per_unit: [units], a number that is shipped with each unit; None: nothing is.
    """

    store: Readable
    sampler: Drawer
    row: int
    group_sizes: tuple[int, ...] | None = None
    mesh: Any = None
    axis: str | tuple[str, ...] = "data"
    compact: bool = False
    capacities: tuple[int, ...] | None = None
    threads: int = 2
    ahead: int = 4
    loss_key: RootKey | None = None
    shapes: tuple[packing.Shape, ...] | None = None
    per_unit: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.compact and not is_token_store(self.store):
            raise BadInputError("compact=True, but the store's examples are not token sequences")
        if self.capacities is not None and len(self.capacities) != self.num_buckets:
            raise BadInputError(
                f"the capacities {self.capacities} must be one for each of the group sizes "
                f"{self.shapes or self.group_sizes}"
            )
        axes = (self.axis,) if isinstance(self.axis, str) else self.axis
        parts = 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)
        if self.row < 1 or self.row % parts:
            raise BadInputError(f"a row of {self.row} units cannot be split over {parts} devices")

    @property
    def num_buckets(self) -> int:
        """Number of buffers of different group sizes (or shapes) in a step."""
        return len(self.shapes or self.group_sizes or (1,))

    def build(self, step: int) -> StepBatch:
        """Reads and ships the units of one step, independently of all other steps."""
        draw = self.sampler.draw(step)
        shapes: list[packing.Shape | None] = [None] * self.num_buckets
        if self.shapes is None:
            parts = split_into_buckets(draw, self.group_sizes)
        else:
            # Every process looks up all lengths: all must agree on the buffer of each unit.
            lengths, shapes = packing.example_lengths(self.store, draw.positions), [*self.shapes]
            parts = packing.split_by_shape(draw, lengths, self.shapes)
        if self.capacities is None:
            nonempty = [i for i, part in enumerate(parts) if part.size] or [0]
            parts, shapes = [parts[i] for i in nonempty], [shapes[i] for i in nonempty]
            rows = [padded_rows(p.size, self.width(shape)) for p, shape in zip(parts, shapes)]
        else:
            given = zip(parts, shapes, self.capacities)
            rows = [self._rows(p.size, self.width(shape), most) for p, shape, most in given]
        local, tokens, places = [], 0, 0
        for part, shape, count in zip(parts, shapes, rows):
            tree, real_tokens = self._read(part, count, step, shape)
            local.append(tree)
            tokens += real_tokens
            used = len(self._columns(shape)) * -(-part.size // self.width(shape))
            places += used * self._places(part.positions, shape)
        buckets = tuple(
            Bucket(**tree, num_rows=-(-part.size // self.width(shape)), num_units=part.size)
            for tree, part, shape in zip(self._ship(local, shapes), parts, shapes)
        )
        examples = int(draw.example_mask.sum())
        return StepBatch(step, buckets, draw.size, examples, tokens, len(self._columns()), places)

    def _places(self, positions: np.ndarray, shape: packing.Shape | None) -> int:
        """Tokens of one unit, padding included."""
        if shape is not None:
            return shape.tokens
        length = self.store.schema.seq_len if self.compact else 0  # type: ignore[attr-defined]
        return length * (1 if positions.ndim == 1 else positions.shape[1])

    def width(self, shape: packing.Shape | None) -> int:
        """Units in a row of the buffer of a shape, over all devices."""
        return self.row if shape is None or not shape.units else shape.units

    def _rows(self, units: int, width: int, capacity: int) -> int:
        needed = -(-units // width)
        while capacity < needed:
            capacity *= 2
        return capacity

    def first_units(self, count: int, group_size: int | None) -> list[Bucket]:
        """Returns a few units of the store (up to ``count``), once for each shape of a step.

        They are the user with most examples, and the first others: one bucket of one row for every
        group size (``group_size`` is the sampler's), with as many of the users' examples as fit.
        The check before the first step uses them, whatever is drawn. The arrays stay on the host.
        """
        offsets = np.asarray(self.store.user_offsets)
        sizes: tuple[Any, ...] = self.shapes or (group_size,)
        if group_size is None:
            first = np.arange(offsets[0], min(offsets[0] + count, offsets[-1]))
        else:
            sizes = self.shapes or self.group_sizes or sizes
            examples = np.diff(offsets)
            users = np.flatnonzero(examples)[:count]
            if len(users) > 1:  # it comes first, as a narrow row holds few of them
                most = examples.argmax()
                users = np.r_[most, users[users != most]][:count]
            first = np.full((len(users), group_size), -1, np.int64)
            for row, start, stop in zip(first, offsets[users], offsets[users + 1]):
                row[: stop - start] = np.arange(start, stop)[: len(row)]
        host = dataclasses.replace(
            self, row=max(1, len(first)), mesh=None, group_sizes=None, capacities=None, shapes=None
        )
        buckets = []
        for size in sizes:
            shape = dataclasses.replace(size, units=0) if self.shapes else None
            positions = first[:, :size] if isinstance(size, int) else first
            one = Draw(np.arange(len(first)), positions)
            tree, _ = host._read(one, rows=1, shape=shape, partial=True)
            buckets.append(Bucket(**tree, num_rows=1, num_units=len(first)))
        return buckets

    def spread(self, units: list[Bucket], which: list[np.ndarray]) -> tuple[Bucket, ...]:
        """Ships buffers of the shapes of a step, with units of ``first_units`` in chosen places.

        ``which`` has for each bucket int [rows, row]: the number of the unit at each place.
        """
        local, shapes = [], [*(self.shapes or [None] * len(units))]
        for b, (bucket, slots) in enumerate(zip(units, which, strict=True)):
            rows = len(slots) if self.capacities is None else self.capacities[b]
            places = slots[:, self._columns(shapes[b])]

            def fill(x: Any, places: np.ndarray = places, rows: int = rows) -> np.ndarray:
                empty = np.zeros((rows - len(places), places.shape[1], *x.shape[2:]), x.dtype)
                return np.concatenate([x[0][places], empty])

            optional = ("example_mask", "keys", "counts", "per_unit")
            rest = {name: getattr(bucket, name) for name in optional}
            local.append(
                {
                    "arrays": {name: fill(x) for name, x in bucket.arrays.items()},
                    "unit_mask": fill(np.ones(bucket.unit_mask.shape, bool)),
                    **{name: None if x is None else fill(x) for name, x in rest.items()},
                }
            )
        return tuple(
            Bucket(**tree, num_rows=len(slots), num_units=slots.size)
            for tree, slots in zip(self._ship(local, shapes), which)
        )

    def _columns(self, shape: packing.Shape | None = None) -> np.ndarray:
        """The columns of this process's devices."""
        if self.mesh is None:
            return np.arange(self.width(shape))
        return local_columns(self._sharding(), self.width(shape), axis=1)

    def _sharding(self) -> Any:
        import jax

        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(None, self.axis))

    def _read(
        self,
        draw: Draw,
        rows: int,
        step: int = 0,
        shape: packing.Shape | None = None,
        partial: bool = False,
    ) -> tuple[dict[str, Any], int]:
        """Reads this process's columns of one bucket: host arrays [rows, columns, ...], tokens."""
        share = share_of(draw, self.width(shape), self._columns(shape), rows)
        numbers = None
        if self.per_unit is not None:
            numbers = np.zeros(share.slots.shape, self.per_unit.dtype)
            there = share.slots >= 0
            numbers[there] = self.per_unit[draw.units[share.slots[there]]]
        if shape is not None:
            grouped, lead = share.positions.ndim == 3, share.positions.shape[:2]
            flat = share.positions.reshape(math.prod(lead), -1)
            arrays, used, counts, tokens = packing.pack_units(
                self.store, flat, shape, grouped, partial
            )

            def laid(x: np.ndarray) -> np.ndarray:
                return x.reshape(*lead, *x.shape[1:])

            return {
                "arrays": {name: laid(array) for name, array in arrays.items()},
                "unit_mask": share.slots >= 0,
                "example_mask": None if used is None else laid(used),
                "counts": None if counts is None else laid(counts),
                "per_unit": numbers,
            }, tokens
        real = share.positions >= 0
        examples, tokens = self._examples(share.positions[real])
        no_padding = bool(real.all())

        def place(values: np.ndarray) -> np.ndarray:
            if no_padding:
                return values.reshape(*real.shape, *values.shape[1:])
            local = np.zeros((*real.shape, *values.shape[1:]), values.dtype)
            local[real] = values
            return local

        return {
            "arrays": {name: place(values) for name, values in examples.items()},
            "unit_mask": share.slots >= 0,
            "example_mask": real if real.ndim == 3 else None,
            "keys": None
            if self.loss_key is None
            else example_keys(self.loss_key, (step,), share.positions),
            "per_unit": numbers,
        }, tokens

    def _examples(self, positions: np.ndarray) -> tuple[dict[str, np.ndarray], int]:
        """Returns the examples at these positions, and their number of real tokens."""
        if not self.compact:
            examples = self.store.read(positions)
            return examples, int(examples["mask"].sum()) if "mask" in examples else 0
        records = self.store.records(positions)  # type: ignore[attr-defined]
        # Not reshape(-1, ...): a step, or a process's share of it, may hold no example.
        raw = np.ascontiguousarray(records).view(np.uint8)
        raw = raw.reshape(len(positions), records.dtype.itemsize)
        return {"records": raw}, int(records["length"].sum())

    def _ship(
        self, trees: list[dict[str, Any]], shapes: Sequence[packing.Shape | None]
    ) -> list[dict[str, Any]]:
        if self.mesh is None:
            return trees
        wide = {self.width(shape) for shape in shapes}
        if len(wide) == 1:
            return ship_columns(trees, self._columns(shapes[0]), wide.pop(), 1, self._sharding())
        return [
            ship_columns(tree, self._columns(shape), self.width(shape), 1, self._sharding())
            for tree, shape in zip(trees, shapes, strict=True)
        ]

    def iterate(self, start: int, stop: int) -> Iterator[StepBatch]:
        """Yields the batches of steps ``start`` to ``stop - 1`` in order, read ahead by Grain.

        An error while reading ahead is raised when its step is due.
        """
        import grain

        if stop <= start:
            return
        options = grain.ReadOptions(num_threads=self.threads, prefetch_buffer_size=self.ahead)
        steps = grain.MapDataset.range(start, stop).map(self.build)
        batches = iter(steps.to_iter_dataset(options))
        try:
            yield from batches
        finally:
            batches.close()  # stops the threads if the run is interrupted


def is_token_store(store: Readable) -> bool:
    """Whether the examples are token sequences of fixed length, stored as such."""
    schema = getattr(store, "schema", None)
    return schema is not None and schema.kind == "tokens" and hasattr(store, "records")


# ---- arrays over processes -----------------------------------------------------------------------


def local_columns(sharding: Any, size: int, axis: int) -> np.ndarray:
    """Returns the indices along ``axis``, of length ``size``, that this process's devices hold.

    They increase, but need not be adjacent: a mesh follows the network of a slice, not its hosts.
    ``sharding`` is a ``jax.sharding.NamedSharding`` that splits only ``axis``.
    """
    shape = (1,) * axis + (size,)
    indices = sharding.addressable_devices_indices_map(shape).values()
    spans = {index[axis].indices(size)[:2] for index in indices}
    return np.concatenate([np.arange(*span) for span in sorted(spans)])


def ship_columns(tree: Any, columns: np.ndarray, size: int, axis: int, sharding: Any) -> Any:
    """Makes global arrays of the ``columns`` along ``axis`` that each process holds.

    ``columns`` come from ``local_columns``, with the same ``size`` (of the global axis) and
    ``sharding``.
    """
    import jax

    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)  # one call for all arrays: many are small

    def one(local: np.ndarray) -> Any:
        def part(index: Any) -> np.ndarray:
            # The columns of one device are adjacent, and this process has all of them.
            start, stop, _ = index[axis].indices(size)
            first = int(np.searchsorted(columns, start))
            return local[(slice(None),) * axis + (slice(first, first + stop - start),)]

        shape = (*local.shape[:axis], size, *local.shape[axis + 1 :])
        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(one, tree)
