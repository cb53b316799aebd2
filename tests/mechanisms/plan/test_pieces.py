"""Users too large to be processed at once: the same bounded sums, piece by piece."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit
from hypothesis import given, settings
from hypothesis import strategies as st
from neighbours import removed

from dpfl_jax.config import load_config
from dpfl_jax.data import ArrayStore, Schema
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import els, mean_of_examples, uls
from dpfl_jax.mechanisms.participation import pieces_of_unit
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import make_mesh, parameter_shardings, place
from dpfl_jax.models import LanguageModel, TransformerConfig
from dpfl_jax.randomness import RootKey

GROUP, LENGTH, VOCAB, CLIP = 5, 8, 16, 0.3
MODEL = LanguageModel(
    TransformerConfig(
        num_layers=1, embed_dim=16, num_heads=2, mlp_dim=32, vocab_size=VOCAB, max_seq_len=LENGTH
    )
)
USERS = uls(group_size=GROUP, cohort_size=8, clip_norm=CLIP)


def linear(params, example):
    return jnp.tanh(params["w"] @ example["x"]) + params["b"] * example["x"][0]


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=15)
@given(
    size=st.integers(1, 7),
    at_once=st.integers(1, 9),
    seed=st.integers(0, 2**16),
)
def test_any_cut_gives_the_same_norms_and_sums(size, at_once, seed):
    rng = np.random.default_rng(seed)
    mechanism = uls(group_size=size, cohort_size=3, clip_norm=0.4)
    params = {"w": rng.normal(size=3).astype("f4"), "b": np.float32(rng.normal())}
    units = {
        "examples": {"x": rng.normal(size=(4, size, 3)).astype("f4")},
        "mask": rng.random((4, size)) < 0.6,
    }
    units["mask"][:, 0] = True
    one = jax.tree.map(lambda x: jnp.asarray(x[0]), units)
    loss = mean_of_examples(linear)
    pieces = pieces_of_unit(one, at_once)
    np.testing.assert_allclose(
        jax.vmap(lambda piece: loss(params, piece))(pieces).sum(), loss(params, one), atol=1e-5
    )
    want = mechanism.clipped_grad(linear, strategy="vmap")(params, units)
    got = mechanism.clipped_grad(linear, examples_at_once=at_once)(params, units)
    np.testing.assert_allclose(got.norms, want.norms, rtol=1e-5)
    np.testing.assert_allclose(got.losses, want.losses, atol=1e-5)
    chex.assert_trees_all_close(got.sum, want.sum, atol=1e-5)


@pytest.mark.nightly
def test_a_bad_example_takes_its_user_out_and_nobody_else():
    params = {"w": np.ones(3, "f4"), "b": np.float32(1)}
    x = np.random.default_rng(0).normal(size=(3, 4, 3)).astype("f4")
    x[1, 3] = np.nan
    units = {"examples": {"x": x}, "mask": np.ones((3, 4), bool)}
    mechanism = uls(group_size=4, cohort_size=3, clip_norm=0.4)
    got = mechanism.clipped_grad(linear, examples_at_once=2)(params, units)
    assert got.nonfinite.tolist() == [False, True, False]
    rest = jax.tree.map(lambda leaf: leaf[np.array([0, 2])], units)
    want = mechanism.clipped_grad(linear, strategy="vmap")(params, rest)
    chex.assert_trees_all_close(got.sum, want.sum, atol=1e-6)


@pytest.mark.parametrize("options", [{"strategy": "vmap"}, {"examples_at_once": 2}])
def test_an_absent_example_does_not_choke_a_loss(options):
    """A norm has no gradient at the zeros that fill a user up."""
    mechanism = uls(group_size=3, cohort_size=3, clip_norm=10.0)
    units = {
        "examples": {"x": np.array([[[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]]], "f4")},
        "mask": np.array([[True, False, False]]),
    }
    got = mechanism.clipped_grad(
        lambda params, example: jnp.linalg.norm(params["w"] * example["x"]), **options
    )({"w": np.ones(2, "f4")}, units)
    assert not got.nonfinite.any()
    np.testing.assert_allclose(got.sum["w"], [9 / 5, 16 / 5], rtol=1e-6)


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0))


def buffers(rows=2, row=8):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (rows, row, GROUP, LENGTH)).astype("i4")
    present = rng.random((rows, row, GROUP)) < 0.6
    present[..., 0] = True
    examples = {"tokens": tokens, "mask": np.ones(tokens.shape, bool)}
    return {"examples": examples, "mask": present}, rng.random((rows, row)) < 0.8


def total(params, axes, units, mask, **cut):
    mesh = make_mesh(**axes)
    summed = jax.jit(clipped_sum_over_microbatches(USERS, MODEL.loss, mesh, **cut))
    return jax.device_get(
        summed(place(params, parameter_shardings(params, mesh)), units, mask, np.int32(2))
    )


@pytest.mark.nightly
@pytest.mark.slow("cut0", "cut3", "cut6")
@pytest.mark.parametrize(
    ("axes", "cut"),
    [
        ({"fsdp": 4}, {"split_users": True}),
        ({}, {"examples_at_once": 2}),
        ({"fsdp": 8}, {"examples_at_once": 1}),
        ({"fsdp": 8}, {"split_users": True}),
        ({"fsdp": 2}, {"split_users": True, "examples_at_once": 1}),
        ({"fsdp": 2, "tensor": 2}, {"split_users": True, "examples_at_once": 2}),
        ({"tensor": 8}, {"split_users": True}),
    ],
)
def test_users_in_pieces_on_every_layout(axes, cut, params):
    units, mask = buffers()
    want, want_stats = total(params, {}, units, mask, strategy="vmap")
    got, stats = total(params, axes, units, mask, **cut)
    chex.assert_trees_all_close(got, want, atol=1e-6)
    chex.assert_trees_all_close(stats, want_stats, rtol=1e-5)
    less, _ = total(params, axes, *removed(units, mask, (0, np.flatnonzero(mask[0])[0])), **cut)
    moved = sum(np.square(a - b).sum() for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(less)))
    assert CLIP * (1 - 1e-2) <= np.sqrt(moved) <= CLIP * (1 + 1e-4)


@pytest.mark.nightly
def test_devices_that_share_a_user_share_the_work(params):
    """Activations follow the examples, not the parameters: an eighth of the products each."""
    units, mask = buffers()

    def flops(axes, **cut):
        mesh = make_mesh(**axes)
        summed = jax.jit(clipped_sum_over_microbatches(USERS, MODEL.loss, mesh, **cut))
        placed = place(params, parameter_shardings(params, mesh))
        return summed.lower(placed, units, mask, np.int32(2)).compile().cost_analysis()["flops"]

    # Both count one turn of each loop: 8 examples on one device, or one on each of eight.
    alone = flops({"data": 8}, examples_at_once=8)
    assert flops({"fsdp": 8}, split_users=True) < alone / 4


@pytest.mark.nightly
def test_training_piece_by_piece_trains_the_same_parameters(params):
    rng = np.random.default_rng(0)
    users = (
        (
            f"u{u}",
            {
                "tokens": rng.integers(1, VOCAB, (1 + u % GROUP, LENGTH)).astype(np.int32),
                "mask": np.ones((1 + u % GROUP, LENGTH), bool),
            },
        )
        for u in range(30)
    )
    data = ArrayStore.from_users(users, Schema.tokens(LENGTH, VOCAB))

    def train(axes, **cut):
        return fit(
            loss_fn=MODEL.loss,
            params=params,
            data=data,
            mechanism=USERS,
            optimizer=optax.sgd(0.5),
            steps=3,
            noise_multiplier=1.0,
            delta=1e-3,
            key=RootKey.from_seed(3),
            microbatch_size=2,
            mesh=make_mesh(**axes),
            **cut,
        )

    want = train({})
    for axes, cut in (
        ({}, {"examples_at_once": 2}),
        ({"fsdp": 4}, {"split_users": True}),
        ({}, {"split_users": True}),  # nothing to split over
    ):
        got = train(axes, **cut)
        chex.assert_trees_all_close(got.params, want.params, atol=1e-5)
        assert got.guarantee.epsilon == want.guarantee.epsilon


def test_single_examples_are_not_cut(tmp_path):
    examples = els(group_size=2, batch_size=2)
    with pytest.raises(BadInputError, match="a unit of this mechanism is one example"):
        examples.clipped_grad(linear, examples_at_once=2)
    with pytest.raises(BadInputError, match="examples_at_once is 0"):
        USERS.clipped_grad(linear, examples_at_once=0)
    with pytest.raises(BadInputError, match="units in pieces"):
        USERS.clipped_grad(linear, examples_at_once=2, strategy="ghost")
    file = tmp_path / "job.yaml"
    file.write_text(
        "data: {source: jsonl, path: unread}\n"
        "mechanism: {kind: els, group_size: 2, batch_size: 4}\n"
        "privacy: {noise_multiplier: 1.0}\n"
        "train: {steps: 2}\n"
    )
    with pytest.raises(BadInputError, match=r"execution\.split_users is for users"):
        load_config(file, ["execution.split_users=true", "execution.mesh.fsdp=2"])
    with pytest.raises(BadInputError, match=r"execution\.examples_at_once forms users' gradients"):
        load_config(
            file,
            [
                "mechanism={kind: uls, group_size: 2, cohort_size: 4}",
                "execution.examples_at_once=2",
                "execution.strategy=ghost",
            ],
        )
