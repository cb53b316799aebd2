"""Packed units: the losses, sums and sensitivity of unpacked ones, on every layout."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit
from neighbours import removed

from dpfl_jax.config.execution import Execution
from dpfl_jax.data import ArrayStore, Schema
from dpfl_jax.data.packing import Shape, pack_units
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import els, uls
from dpfl_jax.mechanisms.plan.batches import example_loss, step_arguments
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import make_mesh, parameter_shardings, place
from dpfl_jax.models import LanguageModel, TransformerConfig, attention
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.driver import Hooks
from dpfl_jax.task import takes_segments
from dpfl_jax.training.central import Central

VOCAB, LENGTH, CLIP = 16, 24, 0.3
MECHANISMS = {
    "uls": uls(group_size=5, cohort_size=20, clip_norm=CLIP),
    "els": els(group_size=4, batch_size=40, clip_norm=CLIP),
}


def model(**options):
    given = {"num_layers": 2, "embed_dim": 16, "num_heads": 4, "mlp_dim": 32} | options
    return LanguageModel(TransformerConfig(vocab_size=VOCAB, max_seq_len=LENGTH, **given))


def store(answers=False):
    rng = np.random.default_rng(0)
    users = []
    for u in range(40):
        count = rng.integers(1, 8)
        lengths = np.clip(rng.lognormal(1.6, 0.9, count), 1, LENGTH).astype(int)
        mask = np.arange(LENGTH) < lengths[:, None]
        if answers:
            mask &= rng.random(mask.shape) < 0.5
        users.append((f"u{u}", {"tokens": rng.integers(0, VOCAB, mask.shape), "mask": mask}))
    return ArrayStore.from_users(
        users, (Schema.answers if answers else Schema.tokens)(LENGTH, VOCAB)
    )


@pytest.mark.nightly
@pytest.mark.slow("{'positions': 'learned'")
@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_heads": 2},
        {"positions": "learned", "attention": "blockwise"},
        {"sliding_window": 5, "attention": "blockwise"},
        {"attention_softcap": 2.0, "logit_softcap": 3.0},
        {"scan_layers": False},
        {"remat": "light"},
    ],
    ids=str,
)
def test_a_row_costs_what_its_sequences_cost(options, monkeypatch):
    """Losses and gradients, where a row holds answers of which not all tokens are predicted."""
    monkeypatch.setattr(attention, "BLOCK", 8)
    own, data = model(**options), store(answers=True)
    params = jax.tree.map(lambda x: 4 * x, jax.jit(own.init)(jax.random.key(0)))
    positions = np.arange(8)[None]
    rows, *_ = pack_units(data, positions, Shape(2, 24), grouped=True)

    rows = {name: array[0] for name, array in rows.items()}
    rows["tokens"] = rows["tokens"].astype("i4")

    def of_rows(params):
        return jax.vmap(lambda row: own.loss(params, row))(rows).sum()

    def of_examples(params):
        return jax.vmap(lambda one: own.loss(params, one))(data.read(positions[0])).sum()

    got, want = (jax.jit(jax.value_and_grad(f))(params) for f in (of_rows, of_examples))
    assert (rows["segments"][1] > 0).any()
    chex.assert_trees_all_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_rows_longer_than_any_sequence_may_be_empty():
    """Learned positions end before such a row does."""
    own = model(positions="learned", num_layers=1)
    params = jax.jit(own.init)(jax.random.key(0))
    row = {
        "tokens": np.zeros((2, 2 * LENGTH), "i4"),
        "segments": np.array([[1] * 5 + [0] * (2 * LENGTH - 5), [0] * 2 * LENGTH], "i4"),
    }
    row["mask"] = row["segments"] > 0
    losses = jax.jit(jax.vmap(own.loss, (None, 0)))
    found = losses(params, row)
    slope = jax.jit(jax.grad(lambda p: losses(p, row).sum()))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slope))
    one = {"tokens": row["tokens"][:1, :5], "mask": row["mask"][:1, :5]}
    np.testing.assert_allclose(found, [losses(params, one)[0], 0.0], rtol=1e-5)


@takes_segments
def mean_of_them(params, example):
    """Of a row the mean of its sequences, where the sum is wanted."""
    real = example["mask"]
    each = jnp.square(params["w"] - example["tokens"]) * real
    return each.sum() / jnp.maximum(real.sum(), 1)


@takes_segments
def random_one(params, example, rng=None):
    """Draws where it has a key."""
    each = params["w"] * example["tokens"] * example["mask"]
    return each.sum() * (1.0 if rng is None else jax.random.uniform(rng))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (mean_of_them, "sequences add up to"),
        (random_one, "draws at random"),
        (functools.wraps(mean_of_them)(lambda params, example: 0.0), "several sequences in one"),
    ],
    ids=["mean", "random", "wrapped"],
)
def test_a_loss_that_is_no_sum_over_a_row_is_refused_before_anything_is_paid(loss, said):
    how = Execution(packing=2)
    plan = MECHANISMS["uls"].plan(store(), steps=1, noise_multiplier=0.5, delta=1e-3, execution=how)
    with pytest.raises(BadInputError, match=said):
        Central(loss, {"w": np.float32(2)}, plan, optax.sgd(0.1))


def sums(kind, packing, data, params, axes, change=None, how_seen="plain", **options):
    """The bounded sum of step 0, laid out as a run lays it out; ``change``: of units and masks."""
    mesh = make_mesh(**axes)
    mechanism, how = MECHANISMS[kind], Execution(microbatch_size=1, packing=3 if packing else 0)
    plan = dataclasses.replace(
        mechanism.plan(data, steps=3, noise_multiplier=0.5, delta=1e-3, execution=how), mesh=mesh
    )
    own = model(num_kv_heads=2, attention=how_seen)
    pipeline = plan.pipeline(plan.sampler(RootKey.from_seed(4)))
    batch = dataclasses.replace(pipeline, mesh=None).build(0)
    units, mask, rows = step_arguments(mechanism, batch)
    if change is not None:
        units, mask = change(units, mask)
    loss = example_loss(own.loss if packing else lambda p, e: own.loss(p, e), data, packing)
    summed = jax.jit(clipped_sum_over_microbatches(mechanism, loss, mesh, **options))
    placed = place(params, parameter_shardings(params, mesh))
    return jax.device_get(summed(placed, units, mask, rows)), batch


@pytest.mark.slow
@pytest.mark.nightly("blockwise")
@pytest.mark.parametrize(
    ("kind", "axes", "form"),
    [
        ("uls", {}, "blockwise"),
        ("els", {"fsdp": 2, "tensor": 2}, "plain"),
        ("els", {}, "blockwise"),
        ("uls", {"fsdp": 4}, "blockwise"),
        ("uls", {"fsdp": 2, "tensor": 2}, "blockwise"),
    ],
    ids=str,
)
def test_sums_and_sensitivity_on_every_layout(kind, axes, form, monkeypatch):
    data = store()
    params = jax.tree.map(lambda x: 4 * x, model(num_kv_heads=2).init(jax.random.key(0)))
    (want, want_stats), plain = sums(kind, False, data, params, {}, strategy="vmap")
    monkeypatch.setattr(attention, "BLOCK", 8)
    (got, stats), batch = sums(kind, True, data, params, axes, how_seen=form)
    assert len(batch.buckets) > 1
    assert batch.num_units == plain.num_units
    chex.assert_trees_all_close(got, want, atol=1e-5)
    chex.assert_trees_all_close(stats, want_stats, rtol=1e-5)

    def without_one(units, mask):
        """Of the fullest buffer: left out, with other data in its place."""
        full = int(np.argmax([m.sum() for m in mask]))
        where = tuple(np.argwhere(mask[full])[0])
        units, mask = list(units), list(mask)
        units[full], mask[full] = removed(units[full], mask[full], where)
        return tuple(units), tuple(mask)

    (less, _), _ = sums(kind, True, data, params, axes, without_one, how_seen=form)
    moved = sum(np.square(a - b).sum() for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(less)))
    assert CLIP * (1 - 1e-2) <= np.sqrt(moved) <= CLIP * (1 + 1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", MECHANISMS)
def test_a_run_is_that_of_unpacked_units_and_goes_on(kind, tmp_path):
    """The same draws and noise under a public key; its shapes are chosen again by a resume."""
    own, data = model(), store()
    given = {
        "loss_fn": own.loss,
        "params": own.init(jax.random.key(0)),
        "data": data,
        "mechanism": MECHANISMS[kind],
        "optimizer": optax.sgd(0.5),
        "steps": 4,
        "noise_multiplier": 0.5,
        "delta": 1e-3,
        "microbatch_size": 1,
    }
    key, mesh = RootKey.from_seed(5), make_mesh(devices=jax.devices()[:1])
    plain = fit(**given, key=key, mesh=mesh)
    both = fit(**given, key=key, packing=3, mesh=mesh)
    chex.assert_trees_all_close(both.params, plain.params, atol=1e-5)
    assert both.examples == plain.examples
    assert both.tokens == plain.tokens
    assert both.tokens / both.padded_tokens > 1.2 * plain.tokens / plain.padded_tokens

    def stop(row):
        if row["step"] == 2:
            raise KeyboardInterrupt

    given |= {
        "key": key,
        "mesh": mesh,
        "packing": 3,
        "run_dir": tmp_path / "run",
        "checkpoint_every": 1,
    }
    with pytest.raises(KeyboardInterrupt):
        fit(**given, hooks=Hooks(on_step=stop), log_every=1)
    del given["key"]
    again = fit(**given)
    chex.assert_trees_all_equal(again.params, both.params)
