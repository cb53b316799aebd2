"""Batches hold exactly what was drawn, padded with zeros, on any number of devices and hosts."""

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from dpfl_jax.data import ArrayStore, Schema
from dpfl_jax.data.build import write_store
from dpfl_jax.data.pipeline import (
    Pipeline,
    bucket_group_sizes,
    padded_rows,
    split_into_buckets,
)
from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Draw, ExampleSampler, Poisson, UserSampler

KEY = RootKey.from_seed(3)
COUNTS = [1, 1, 2, 3, 5, 8, 13, 40, 100, 1, 2, 7] * 3


def make_store():
    """Example i of user u holds (u + 1, i + 1): never zero, so padding can be told."""
    users = (
        (f"u{u}", {"x": np.stack([np.full(n, u + 1), np.arange(1, n + 1)], 1).astype(np.int32)})
        for u, n in enumerate(COUNTS)
    )
    return ArrayStore.from_users(users)


@pytest.fixture(scope="module")
def store():
    return make_store()


def samplers(store):
    everything = np.arange(store.num_examples)
    yield ExampleSampler(Poisson(0.05), everything, KEY), None
    users = UserSampler(Poisson(0.4), store.user_offsets, 8, KEY)
    yield users, None
    yield users, bucket_group_sizes(8)


def content(batch):
    """Real examples of a batch, and whether all else is zero."""
    found = []
    for bucket in batch.buckets:
        x, units = np.asarray(bucket.arrays["x"]), np.asarray(bucket.unit_mask)
        mask = units if bucket.example_mask is None else np.asarray(bucket.example_mask)
        assert not x[~mask].any()
        assert units.sum() == bucket.num_units
        assert units[: bucket.num_rows].any(axis=1).all()
        assert not units[bucket.num_rows :].any()
        if bucket.example_mask is not None:
            assert np.array_equal(mask.any(axis=2), units)
            owners = [set(x[r, c, mask[r, c], 0].tolist()) for r, c in zip(*np.nonzero(units))]
            assert all(len(o) == 1 for o in owners)  # never two users in one unit
            assert len({next(iter(o)) for o in owners}) == len(owners)
        found += [tuple(e) for e in x[mask].tolist()]
    return sorted(found)


@pytest.mark.parametrize("devices", [None, 1, 8])
def test_batches_hold_exactly_what_was_drawn(store, devices):
    mesh = None
    if devices:
        mesh = jax.make_mesh(
            (devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
        )
    for sampler, sizes in samplers(store):
        pipeline = Pipeline(store, sampler, 8, sizes, mesh)
        for step, batch in enumerate(pipeline.iterate(0, 6)):
            draw = sampler.draw(step)
            expected = store.read(draw.positions[draw.example_mask])["x"]
            assert content(batch) == sorted(tuple(e) for e in expected.tolist())
            assert (batch.step, batch.num_units) == (step, draw.size)
            assert batch.num_examples == len(expected)


def test_resuming_skips_exactly(store):
    for sampler, sizes in samplers(store):
        pipeline = Pipeline(store, sampler, 4, sizes)
        whole = [content(b) for b in pipeline.iterate(0, 9)]
        assert [content(b) for b in pipeline.iterate(5, 9)] == whole[5:]
        assert list(pipeline.iterate(9, 9)) == []


@pytest.mark.parametrize("vocab_size", [300, 100_000])
def test_raw_records_unpack_on_the_device(vocab_size):
    rng = np.random.default_rng(0)
    schema = Schema.tokens(10, vocab_size)

    def examples(n):
        mask = np.arange(10) < rng.integers(1, 11, n)[:, None]
        return {"tokens": np.where(mask, rng.integers(0, vocab_size, (n, 10)), 0), "mask": mask}

    store = ArrayStore.from_users(((f"u{u}", examples(n)) for u, n in enumerate(COUNTS)), schema)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sampler = UserSampler(Poisson(0.4), store.user_offsets, 8, KEY)
    raw = Pipeline(store, sampler, 8, (2, 8), mesh, compact=True)
    plain = Pipeline(store, sampler, 8, (2, 8), mesh)
    for step in range(3):
        for a, b in zip(raw.build(step).buckets, plain.build(step).buckets):
            unpacked = jax.jit(schema.unpack_on_device)(a.arrays["records"])
            for name, values in b.arrays.items():
                assert unpacked[name].dtype == values.dtype
                np.testing.assert_array_equal(unpacked[name], values)
    with pytest.raises(BadInputError, match="not token sequences"):
        Pipeline(make_store(), sampler, 8, compact=True)

    class Nothing:
        def draw(self, step):
            return Draw(np.zeros(0, np.int64), np.zeros((0, 8), np.int64))

    (bucket,) = (
        Pipeline(store, Nothing(), 8, mesh=mesh, compact=True, capacities=(2,)).build(0).buckets
    )
    assert bucket.num_rows == 0
    width = schema.record_dtype.itemsize
    assert bucket.arrays["records"].shape == (2, 8, 8, width)
    assert not np.asarray(bucket.arrays["records"]).any()


def test_an_empty_draw_is_a_step_of_padding(store):
    class Nothing:
        def draw(self, step):
            return Draw(np.zeros(0, np.int64), np.zeros((0, 8), np.int64))

    batch = Pipeline(store, Nothing(), 4, (1, 8)).build(0)
    assert (batch.num_units, len(batch.buckets)) == (0, 1)
    assert batch.buckets[0].num_rows == 0
    assert content(batch) == []


def test_buckets_waste_less_than_half_and_lose_nothing():
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 17, 200)
    positions = np.where(np.arange(16) < counts[:, None], rng.integers(0, 999, (200, 16)), -1)
    scattered = rng.permuted(positions, axis=1)  # holes anywhere, not only at the end
    for given in (positions, scattered):
        parts = split_into_buckets(Draw(np.arange(200), given), bucket_group_sizes(16))
        assert sum(p.size for p in parts) == 200
        for part in parts:
            for unit, row in zip(part.units, part.positions):
                assert sorted(row[row >= 0]) == sorted(given[unit][given[unit] >= 0])
                assert (row >= 0).sum() * 2 > len(row)
    assert bucket_group_sizes(1) == (1,)
    assert bucket_group_sizes(16) == (1, 2, 4, 8, 16)
    assert bucket_group_sizes(12) == (1, 2, 4, 8, 12)
    with pytest.raises(BadInputError, match="bucket sizes"):
        split_into_buckets(Draw(np.arange(2), np.zeros((2, 8), int)), (1, 4))


def test_few_shapes_and_little_padding():
    shapes = {padded_rows(n, 4) for n in range(0, 4000)}
    assert len(shapes) < 80
    for n in range(1, 4000):
        needed = -(-n // 4)
        assert needed <= padded_rows(n, 4) <= needed * 1.125
    assert padded_rows(0, 4) == 1


def test_rows_must_fit_the_devices(store):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(BadInputError, match="cannot be split over 8 devices"):
        Pipeline(store, next(samplers(store))[0], 12, mesh=mesh)


PROGRAM = """
import json, os, sys
rank, processes, port, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=%d" % (4 // processes)
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np
if processes > 1:
    jax.distributed.initialize("localhost:" + port, processes, rank)
from jax.sharding import AxisType
from dpfl_jax.data.pipeline import Pipeline, bucket_group_sizes
from dpfl_jax.data.shards import open_store
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Poisson, UserSampler
class Counting:
    reads = 0
    def __init__(self, store): self.store = store
    def read(self, positions):
        Counting.reads += len(positions)
        return self.store.read(positions)
store = open_store(path)
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
sampler = UserSampler(Poisson(0.4), store.user_offsets, 8, RootKey.from_seed(3))
pipeline = Pipeline(Counting(store), sampler, 8, bucket_group_sizes(8), mesh)
out = []
for batch in pipeline.iterate(0, 4):
    for bucket in batch.buckets:
        for leaf in (bucket.arrays["x"], bucket.unit_mask, bucket.example_mask):
            for shard in leaf.addressable_shards:
                out.append([list(leaf.shape), str(shard.index), np.asarray(shard.data).tolist()])
print(json.dumps({"reads": Counting.reads, "shards": out}))
"""


def launch(path, processes):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(processes), port, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        for rank in range(processes)
    ]
    results = []
    for process in running:
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, err.decode()[-2000:]
        results.append(json.loads(out.decode().strip().splitlines()[-1]))
    return results


@pytest.mark.slow
def test_two_processes_ship_the_global_batches_of_one(store, tmp_path):
    write_store(store, tmp_path / "store", "arrow")
    (one,) = launch(tmp_path / "store", 1)
    two = launch(tmp_path / "store", 2)

    def order(shards):
        return sorted(map(json.dumps, shards))

    assert order(two[0]["shards"] + two[1]["shards"]) == order(one["shards"])
    assert two[0]["reads"] + two[1]["reads"] == one["reads"]  # each reads only its share
    assert all(r["reads"] < 0.75 * one["reads"] for r in two)
