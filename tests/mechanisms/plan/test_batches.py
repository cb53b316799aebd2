"""What training reads ahead: every unit drawn, once, in buffers whose shapes never change."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit

from dpfl_jax.data import ArrayStore, Schema
from dpfl_jax.data.build import write_store
from dpfl_jax.data.pipeline import Pipeline
from dpfl_jax.data.shards import open_store
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import els, uls
from dpfl_jax.mechanisms.plan.batches import step_arguments, training_pipeline
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Poisson, UserSampler

KEY = RootKey.from_seed(2)
LENGTH, VOCAB = 6, 20
COUNTS = np.random.default_rng(1).zipf(1.5, 150).clip(max=40)

MECHANISMS = {
    "els": els(group_size=5, batch_size=40, clip_norm=0.5),
    "uls": uls(group_size=8, cohort_size=30, clip_norm=0.5),
}


def token_store():
    rng = np.random.default_rng(0)

    def examples(n):
        mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, n)[:, None]
        return {"tokens": np.where(mask, rng.integers(0, VOCAB, (n, LENGTH)), 0), "mask": mask}

    schema = Schema.tokens(LENGTH, VOCAB)
    return ArrayStore.from_users(((f"u{u}", examples(n)) for u, n in enumerate(COUNTS)), schema)


@pytest.fixture(scope="module")
def store():
    return token_store()


class Plain:
    """The same examples from a reader that has nothing but ``read``: no raw records."""

    def __init__(self, store):
        self.user_offsets = store.user_offsets
        self.read = store.read


def loss_fn(params, example):
    """Unigram loss: linear in what is read, so that a lost or repeated token shows."""
    logp = jax.nn.log_softmax(params["logits"])[example["tokens"]]
    return -jnp.sum(logp * example["mask"]) / jnp.maximum(jnp.sum(example["mask"]), 1)


def run(data, mechanism, **kwargs):
    return fit(
        loss_fn=loss_fn,
        params={"logits": jnp.linspace(-1.0, 1.0, VOCAB)},
        data=data,
        mechanism=mechanism,
        optimizer=optax.sgd(1.0),
        steps=6,
        noise_multiplier=1.0,
        delta=1e-3,
        key=KEY,
        microbatch_size=2,
        **kwargs,
    )


def pipelines(store):
    for name, mechanism in MECHANISMS.items():
        sampler = mechanism.sampler(store.user_offsets, KEY)
        for buckets in (False, True):
            yield (
                f"{name}, {buckets}",
                mechanism,
                training_pipeline(sampler, store, data_parallel_mesh(), 2, buckets),
            )


def test_every_step_has_the_same_shapes_and_every_unit_once(store):
    for name, mechanism, pipeline in pipelines(store):
        shapes = set()
        for batch in pipeline.iterate(0, 12):
            units, masks, rows = step_arguments(mechanism, batch)
            shapes.add(str(jax.tree.map(lambda leaf: leaf.shape, (units, masks))))
            assert all(count <= len(mask) for count, mask in zip(rows, masks))
            draw = pipeline.sampler.draw(batch.step)
            assert sum(int(mask.sum()) for mask in masks) == batch.num_units == draw.size
            raw = [np.asarray(b.arrays["records"]) for b in batch.buckets]
            real = [
                np.asarray(b.unit_mask if b.example_mask is None else b.example_mask)
                for b in batch.buckets
            ]
            read = sorted(bytes(r) for a, m in zip(raw, real) for r in a[m])
            positions = draw.positions[draw.example_mask]
            records = store.records(positions)
            assert read == sorted(r.tobytes() for r in records)
            assert batch.num_examples == len(positions)
            assert batch.num_tokens == records["length"].sum()
            assert not any(a[~m].any() for a, m in zip(raw, real))
        assert len(shapes) == 1, name


def test_a_draw_larger_than_the_buffer_gets_a_larger_one(store):
    sampler = UserSampler(Poisson(0.9), store.user_offsets, 4, KEY)
    pipeline = Pipeline(store, sampler, 8, (2, 4), capacities=(1, 1))
    batch = pipeline.build(0)
    assert sum(b.unit_mask.sum() for b in batch.buckets) == sampler.draw(0).size > 100
    rows = [len(b.unit_mask) for b in batch.buckets]
    assert all(r & (r - 1) == 0 for r in rows)  # doubled, so that few shapes occur
    with pytest.raises(BadInputError, match="one for each of the group sizes"):
        Pipeline(store, sampler, 8, (2, 4), capacities=(1,))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", MECHANISMS)
def test_raw_records_train_to_the_parameters_that_examples_train_to(store, kind):
    raw = run(store, MECHANISMS[kind])
    plain = run(Plain(store), MECHANISMS[kind])
    np.testing.assert_allclose(raw.params["logits"], plain.params["logits"], rtol=1e-6)
    assert raw.tokens == plain.tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "vmap"])
def test_buckets_of_group_sizes_change_the_work_and_not_the_result(store, strategy):
    whole = run(store, MECHANISMS["uls"], strategy=strategy)
    buckets = run(store, MECHANISMS["uls"], strategy=strategy, group_buckets=True)
    np.testing.assert_allclose(buckets.params["logits"], whole.params["logits"], rtol=2e-5)
    for a, b in zip(whole.metrics, buckets.metrics, strict=True):
        left, right = a["outside_guarantee"], b["outside_guarantee"]
        assert left["units"] == right["units"]
        assert left["fraction_clipped"] == right["fraction_clipped"]
        assert left["train_loss"] == pytest.approx(right["train_loss"], rel=1e-5)


def test_a_shard_damaged_during_a_run_is_named(store, tmp_path):
    write_store(store, tmp_path / "store", "arrayrecord")
    opened = open_store(tmp_path / "store")
    shard = next((tmp_path / "store").glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0x10
    shard.write_bytes(data)
    with pytest.raises(BadInputError, match=f"{shard.name} is damaged"):
        run(opened, MECHANISMS["uls"])
