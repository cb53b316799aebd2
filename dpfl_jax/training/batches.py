"""From draws to device buffers: reads what was drawn, pads it to whole rows, ships it ahead.

A buffer has a fixed shape [capacity, row, ...], row = devices * microbatch. The capacity covers
all draws but a fraction 1e-15 of them; a larger one gets a larger buffer (one compilation more),
never a truncation: dropping units would be another sampling than the one accounted for.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpfl_jax.mechanisms import Mechanism
from dpfl_jax.sampling import Draw, Sampler
from dpfl_jax.training.state import DATA_AXIS

PyTree = Any


class Readable(Protocol):
    """The part of a store that training needs."""

    @property
    def user_offsets(self) -> np.ndarray:
        """int64 [num_users + 1]."""

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at ``positions`` [m] as arrays [m, ...]."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One step's units on the devices.

    Attributes:
      units: pytree of arrays [capacity, row, ...], sharded over the second axis.
      mask: bool [capacity, row], True for real units.
      num_microbatches: rows that hold real units.
      num_units: real units.
      num_examples: real examples in them.
      num_tokens: real tokens in those (0 if examples carry no token mask).
    """

    units: PyTree
    mask: jax.Array
    num_microbatches: np.int32
    num_units: int
    num_examples: int
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class BufferBuilder:
    """Builds the buffer of any step, independently of all others.

    Attributes:
      mechanism: says how examples make up a unit.
      sampler: says which units each step has.
      store: where examples are read.
      mesh: where the buffer goes.
      microbatch_size: units per device and row.
    """

    mechanism: Mechanism
    sampler: Sampler
    store: Readable
    mesh: Mesh
    microbatch_size: int

    @property
    def row(self) -> int:
        """Units per row over all devices."""
        return self.microbatch_size * self.mesh.shape[DATA_AXIS]

    @property
    def capacity(self) -> int:
        """Rows in the usual buffer."""
        return max(1, math.ceil(self.sampler.size_bound() / self.row))

    def build(self, step: int) -> Buffer:
        """Reads and ships the units of ``step``."""
        draw = self.sampler.draw(step)
        examples = self.store.read(draw.positions[draw.example_mask])
        units = self.mechanism.unit_batch(draw, examples)
        rows = math.ceil(draw.size / self.row)
        capacity = self.capacity
        while capacity < rows:
            capacity *= 2
        sharding = NamedSharding(self.mesh, PartitionSpec(None, DATA_AXIS))

        def ship(leaf: np.ndarray) -> jax.Array:
            padded = np.zeros((capacity * self.row, *leaf.shape[1:]), leaf.dtype)
            padded[: draw.size] = leaf
            shaped = padded.reshape(capacity, self.row, *leaf.shape[1:])
            return jax.device_put(shaped, sharding)

        return Buffer(
            units=jax.tree.map(ship, units),
            mask=ship(np.ones(draw.size, bool)),
            num_microbatches=np.int32(rows),
            num_units=draw.size,
            num_examples=int(draw.example_mask.sum()),
            num_tokens=int(examples["mask"].sum()) if "mask" in examples else 0,
        )

    def first_units(self, count: int) -> PyTree:
        """Returns the first ``count`` (or fewer) units of the run's first draws, on the host."""
        for step in range(10):
            draw = self.sampler.draw(step)
            if draw.size:
                break
        draw = Draw(draw.units[:count], draw.positions[:count])
        examples = self.store.read(draw.positions[draw.example_mask])
        return self.mechanism.unit_batch(draw, examples)

    def prefetch(self, start: int, stop: int, ahead: int = 2) -> Iterator[tuple[int, Buffer]]:
        """Yields (step, buffer) for steps start..stop-1, building ``ahead`` of them in advance."""
        with concurrent.futures.ThreadPoolExecutor(1, "dpfl-batches") as pool:
            pending: list[concurrent.futures.Future[Buffer]] = []
            try:
                for step in range(start, stop):
                    while len(pending) <= ahead and step + len(pending) < stop:
                        pending.append(pool.submit(self.build, step + len(pending)))
                    yield step, pending.pop(0).result()
            finally:
                for future in pending:
                    future.cancel()
