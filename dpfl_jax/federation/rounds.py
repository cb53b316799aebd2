"""Draws what each silo does in a round, and ships its records to device buffers.

Buffers have one shape for the whole run. A draw exceeds their capacity with probability 1e-15. Then
it gets a larger buffer, which costs one more compilation; it is never truncated.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpfl_jax.data.pipeline import local_columns
from dpfl_jax.federation.data import FederatedData
from dpfl_jax.federation.engine import Chunk
from dpfl_jax.federation.federation import Federation
from dpfl_jax.federation.participation import SiloDraw
from dpfl_jax.mesh import DATA_AXIS, place
from dpfl_jax.randomness import RootKey, example_keys, with_keys

_BYTES = 192 << 20


@dataclasses.dataclass(frozen=True)
class PlacedChunk:
    """One chunk of a round, on the devices.

    Attributes:
      silos: int64 [k], silos of the chunk, which is padded with silos of weight 0.
      chunk: the work of these silos.
      num_records: number of records that are drawn for it.
    """

    silos: np.ndarray
    chunk: Chunk
    num_records: int


@dataclasses.dataclass(frozen=True)
class RoundBuilder:
    """Builds any chunk of any round, independently of all others.

    Attributes:
      federation: what every silo does.
      data: the records of the silos.
      key: root key of the run.
      mesh: devices; silos are split over its ``"data"`` axis.
      width: number of silos that a device processes at once, by ``vmap``.
      microbatch_size: units in a microbatch.
      chunk_silos: silos in a chunk; None: as many as 192 MiB of buffers hold.
      loss_keys: whether each record gets a random key (``randomness.example_keys``).
    """

    federation: Federation
    data: FederatedData
    key: RootKey
    mesh: Mesh
    width: int = 1
    microbatch_size: int = 32
    chunk_silos: int | None = None
    loss_keys: bool = False

    # ---- shapes ----------------------------------------------------------------------------

    # Shapes follow from public numbers, so that a remote silo, which holds only its own records,
    # computes with the same shapes as a simulation of all silos.

    @functools.cached_property
    def capacity(self) -> int:
        """Number of microbatches in a step's buffer."""
        held = [self.data.silos[i] for i in self.federation.participants]
        bounds = [
            plan.mechanism.participation.size_bound(silo)
            for plan, silo in zip(self.federation.members, held, strict=True)
        ]
        return max(1, math.ceil(max([*bounds, self._usual]) / self.row))

    @functools.cached_property
    def row(self) -> int:
        """Number of units in a microbatch, at most as many as a large step has."""
        return max(1, min(self.microbatch_size, self._usual))

    @functools.cached_property
    def _usual(self) -> int:
        plans = self.federation.members
        sizes = [plan.mechanism.participation.public_size_guess(plan.facts) for plan in plans]
        return max(sizes, default=1)

    @functools.cached_property
    def unit_size(self) -> int | None:
        """Number of records in a unit, or None if a unit is a record."""
        plans = self.federation.members
        sizes = [plan.mechanism.participation.unit_records(plan.facts) for plan in plans]
        return max((size for size in sizes if size is not None), default=None)

    @functools.cached_property
    def size(self) -> int:
        """Number of silos in a chunk: a multiple of devices times width."""
        unit = self.mesh.shape[DATA_AXIS] * self.width
        most = unit * math.ceil(max(self.federation.silos_per_round, 1) / unit)
        if self.chunk_silos is not None:
            return min(most, unit * math.ceil(self.chunk_silos / unit))
        fit = max(1, _BYTES // max(self.silo_bytes * unit, 1))
        # Chunks of equal size, because padding of the last one would be computed, too.
        return unit * math.ceil(most / unit / math.ceil(most / unit / fit))

    @functools.cached_property
    def silo_bytes(self) -> int:
        """Bytes of the records of one silo in a round's buffer."""
        return self._bytes(self.capacity * self.row)

    @functools.cached_property
    def public_bytes(self) -> int:
        """Upper bound on ``silo_bytes`` from public numbers only, without personal rates."""
        plans = self.federation.members
        most = [plan.mechanism.participation.public_size_bound(plan.facts) for plan in plans]
        return self._bytes(max([*most, self._usual]) + self.row)

    def _bytes(self, units: int) -> int:
        one = self.data.read(np.zeros(1, np.int64)) if self.data.num_records else {}
        record = sum(np.asarray(v).nbytes for v in one.values())
        slots = self.federation.max_local_steps * units * (self.unit_size or 1)
        return record * slots

    @property
    def _by_silo(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(DATA_AXIS))

    # ---- building --------------------------------------------------------------------------

    def silo_key(self, silo: int, round_index: int) -> RootKey:
        """Returns the key of one silo in one round, from which its draws and noise come."""
        # proof: noise-5
        return self.key.child("silo", silo, round_index)

    def draws(self, silo: int, round_index: int) -> list[SiloDraw]:
        """Returns what a silo draws in a round, one entry per local step."""
        plan, key = self.federation.silos[silo], self.silo_key(silo, round_index)
        data = self.data.silos[silo].at_round(round_index)
        draw = plan.mechanism.participation.draw
        return [draw(data, key, t) for t in range(plan.local_steps)]

    def noise_keys(self, silo: int, round_index: int) -> np.ndarray:
        """Returns one noise key per local step, uint32 [local steps, 8]."""
        key = self.silo_key(silo, round_index)
        steps = self.federation.silos[silo].local_steps
        return np.stack([key.words("noise", t) for t in range(steps)])

    def scale(self, silo: int, draw: SiloDraw) -> tuple[float, float]:
        """Returns the standard deviation of the noise on a silo's sum, and the sum's divisor.

        Both are constants of the plan, not functions of the draw, because what the silo sends
        reveals them.
        """
        del draw
        plan = self.federation.silos[silo]
        # proof: noise-3
        return plan.noise_stddev, plan.mechanism.participation.divisor(plan.facts)

    def build(self, round_index: int, silos: np.ndarray) -> PlacedChunk:
        """Draws, reads and ships the work of ``silos`` (at most ``size``) in a round.

        With several processes, each reads the records of its own devices' silos.
        """
        mine = local_columns(self._by_silo, self.size, axis=0)
        return self.ship(silos, *self.gather(round_index, silos, mine))

    def ship(self, silos: np.ndarray, host: dict[str, Any], records: int) -> PlacedChunk:
        """Puts what ``gather`` returned for ``silos`` on the devices."""
        sharding = self._by_silo
        if sharding.is_fully_addressable:  # one call for all arrays, as many of them are small
            return PlacedChunk(silos, jax.device_put(Chunk(**host), sharding), records)
        places = jax.tree.map(lambda _: sharding, host)
        return PlacedChunk(silos, Chunk(**place(host, places, copy=False)), records)

    def gather(
        self, round_index: int, silos: np.ndarray, mine: np.ndarray | None = None
    ) -> tuple[dict[str, Any], int]:
        """Returns the fields of a chunk on the host, and the number of records drawn for it.

        Args:
          round_index: number of the round, from 0.
          silos: int64, at most ``size`` silos.
          mine: int64, places in the chunk whose records are read; the others are zeros. None: all
            are read.
        """
        drawn = [self.draws(int(i), round_index) for i in silos]
        records = sum(int((d.positions >= 0).sum()) for row in drawn for d in row)
        steps, unit_size = self.federation.max_local_steps, self.unit_size
        most = max((d.size for row in drawn for d in row), default=0)
        capacity = self.capacity
        while capacity * self.row < most:
            capacity *= 2
        if unit_size is not None:
            widest = max((d.positions.shape[1] for row in drawn for d in row), default=0)
            while unit_size < widest:
                unit_size *= 2
        shape = (self.size, steps, capacity, self.row)
        read = [row if mine is None or s in mine else [] for s, row in enumerate(drawn)]
        slots, positions = self._slots(read, capacity * self.row, unit_size)
        examples = self.data.read(positions)
        full = shape if unit_size is None else (*shape, unit_size)

        def scatter(leaf: np.ndarray) -> np.ndarray:
            out = np.zeros((math.prod(full), *leaf.shape[1:]), leaf.dtype)
            out[slots] = leaf
            return out.reshape(*full, *leaf.shape[1:])

        units: Any = {name: scatter(leaf) for name, leaf in examples.items()}
        if self.loss_keys:
            keys_of = self._record_keys(silos, round_index, read)
            units = with_keys(units, scatter(keys_of))
        present = scatter(np.ones(len(slots), bool))
        mask = np.zeros((self.size, steps, capacity * self.row), bool)
        unit_weight = np.ones(mask.shape, np.float32)
        active = np.zeros(shape[:2], bool)
        keys = np.zeros((*shape[:2], 8), np.uint32)
        stddev, divisor = np.zeros(shape[:2], np.float32), np.ones(shape[:2], np.float32)
        clip_norm, weight = np.ones(self.size, np.float32), np.zeros(self.size, np.float32)
        for s, (i, row) in enumerate(zip(silos.tolist(), drawn)):
            plan = self.federation.silos[i]
            clip_norm[s], weight[s] = plan.mechanism.clip_norm, plan.weight
            active[s, : plan.local_steps] = True
            keys[s, : plan.local_steps] = self.noise_keys(i, round_index)
            for t, draw in enumerate(row):
                mask[s, t, : draw.size] = True
                unit_weight[s, t, : draw.size] = draw.weight
                stddev[s, t], divisor[s, t] = self.scale(i, draw)
        rows = np.ceil(mask.sum(axis=2) / self.row).astype(np.int32)
        if unit_size is not None:
            units = {"examples": units, "mask": present}
        host: dict[str, Any] = {
            "units": units,
            "mask": mask.reshape(shape),
            "unit_weight": unit_weight.reshape(shape),
            "microbatches": rows,
            "active": active,
            "noise_key": keys,
            "stddev": stddev,
            "divisor": divisor,
            "clip_norm": clip_norm,
            "weight": weight,
        }
        return host, records

    def _record_keys(
        self, silos: np.ndarray, round_index: int, drawn: list[list[SiloDraw]]
    ) -> np.ndarray:
        """The records' random keys, uint32 [records, 3], in the order of ``_slots``."""
        keys = [np.zeros((0, 3), np.uint32)]
        for silo, row in zip(silos.tolist(), drawn):
            key = self.silo_key(silo, round_index)
            for t, draw in enumerate(row):
                # From the record's place in its silo, which does not depend on other silos.
                local = draw.positions[draw.positions >= 0] - self.data.silos[silo].first
                keys.append(example_keys(key, (t,), local))
        return np.concatenate(keys)

    def _slots(
        self, drawn: list[list[SiloDraw]], units: int, unit_size: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The place of each drawn record in the flat buffer, and its position in the data."""
        steps = self.federation.max_local_steps
        slots, positions = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for s, row in enumerate(drawn):
            for t, draw in enumerate(row):
                first = (s * steps + t) * units
                real = draw.positions >= 0
                if unit_size is None:
                    where = first + np.flatnonzero(real)
                else:
                    unit, column = np.nonzero(real)
                    where = (first + unit) * unit_size + column
                slots.append(where)
                positions.append(draw.positions[real])
        return np.concatenate(slots), np.concatenate(positions)

    def cohort(self, round_index: int) -> np.ndarray:
        """Returns the silos of a round, int64, sorted."""
        return self.federation.cohort_of(
            self.key, round_index, lambda silo: self.silo_key(silo, round_index)
        )

    def chunks(self, round_index: int) -> list[np.ndarray]:
        """Returns the cohort of a round in chunks; an empty list if no silo takes part."""
        cohort = self.cohort(round_index)
        return [cohort[k : k + self.size] for k in range(0, len(cohort), self.size)]

    def prefetch(self, start: int, stop: int) -> Iterator[tuple[int, Iterator[PlacedChunk]]]:
        """Yields (round, its chunks), building one chunk ahead."""
        work = ((r, part) for r in range(start, stop) for part in self.chunks(r))
        counts = {r: len(self.chunks(r)) for r in range(start, stop)}
        with concurrent.futures.ThreadPoolExecutor(1, "dpfl-rounds") as pool:
            pending: list[concurrent.futures.Future[PlacedChunk]] = []

            def refill() -> None:
                while len(pending) < 2:
                    following = next(work, None)
                    if following is None:
                        return
                    pending.append(pool.submit(self.build, *following))

            def take(count: int) -> Iterator[PlacedChunk]:
                for _ in range(count):
                    refill()
                    yield pending.pop(0).result()

            try:
                for r in range(start, stop):
                    yield r, take(counts[r])
            finally:
                for future in pending:
                    future.cancel()
