"""Losses that draw at random: a key for each example and step, the same on every layout."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit

from dpfl_jax.data import ArrayStore, Schema
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import els, non_private, uls
from dpfl_jax.mechanisms.plan.batches import example_loss, step_arguments, training_pipeline
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import make_mesh, parameter_shardings, place
from dpfl_jax.randomness import RootKey, key_argument

KEY = RootKey.from_seed(5)
COUNTS = np.random.default_rng(1).integers(1, 7, 12)
PARAMS = {"w": np.ones((4, 2), "f4"), "b": np.zeros(2, "f4")}
# Nothing is clipped, so that sums can be written down.
ULS_ALL = uls(group_size=5, cohort_size=9, clip_norm=1e4)
ELS_ALL = els(group_size=5, batch_size=20, clip_norm=1e4)


def users(counts, seed):
    rng = np.random.default_rng(seed)
    schema = Schema.arrays({"x": np.zeros(4, "f4")})
    return ArrayStore.from_users(
        ((f"u{u}", {"x": rng.normal(size=(n, 4)).astype("f4")}) for u, n in enumerate(counts)),
        schema,
    )


STORE = users(COUNTS, 0)


def dropout_loss(params, example, rng=None):
    x = example["x"]
    if rng is not None:
        x = jnp.where(jax.random.bernoulli(rng, 0.5, x.shape), 2 * x, 0.0)
    return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]))


def by_hand(mechanism, step, key=KEY):
    """The sum of a step's gradients from the draw alone, one example after the other."""
    draw = mechanism.sampler(STORE.user_offsets, key).draw(step)
    total = jax.tree.map(np.zeros_like, PARAMS)
    gradient = jax.jit(jax.grad(dropout_loss))
    for unit in draw.positions.reshape(draw.size, -1):
        mine = unit[unit >= 0]
        for position in mine:
            example = jax.tree.map(lambda x: x[0], STORE.read(np.array([position])))
            rng = jax.random.fold_in(key.jax("loss", step), position)
            more = gradient(PARAMS, example, rng=rng)
            share = 1 / len(mine)
            total = jax.tree.map(lambda a, b, s=share: a + s * np.asarray(b), total, more)
    return total


LAYOUTS = {
    "one device": ((1, 1, 1), 3, {}, {}),
    "eight devices": ((8, 1, 1), 2, {}, {"strategy": "scan"}),
    "buckets": ((4, 1, 1), 1, {"group_buckets": True}, {}),
    "pieces": ((2, 1, 1), 2, {}, {"examples_at_once": 2}),
    "split users": ((2, 2, 1), 2, {}, {"split_users": True}),
    "fsdp": ((2, 2, 2), 1, {}, {"strategy": "ghost"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_example_has_its_own_key_on_every_layout(name):
    shape, microbatch, buffers, options = LAYOUTS[name]
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = make_mesh(*shape, devices)
    mechanism, step = ULS_ALL, 3
    sampler = mechanism.sampler(STORE.user_offsets, KEY)
    pipeline = training_pipeline(sampler, STORE, mesh, microbatch, loss_key=KEY, **buffers)
    loss = example_loss(dropout_loss, STORE)
    summed = jax.jit(clipped_sum_over_microbatches(mechanism, loss, mesh, **options))
    params = place(PARAMS, parameter_shardings(PARAMS, mesh))
    got, _ = summed(params, *step_arguments(mechanism, pipeline.build(step)))
    want = by_hand(mechanism, step)
    chex.assert_trees_all_close(got, want, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [ELS_ALL, non_private(batch_size=20)], ids=["els", "none"])
def test_training_draws_and_evaluation_does_not(mechanism):
    """Two steps of plain descent, with noise too small to see; the second has other keys."""
    held_out = users([2, 3], 1)
    if mechanism.private:
        mechanism = els(group_size=5, batch_size=20, clip_norm=1e4, arithmetic="float")
    result = fit(
        loss_fn=dropout_loss,
        params=PARAMS,
        data=STORE,
        mechanism=mechanism,
        optimizer=optax.sgd(1.0),
        steps=1,
        noise_multiplier=1e-12,
        key=KEY,
        validation=held_out,
    )
    want = jax.tree.map(lambda p, g: p - g / 20, PARAMS, by_hand(mechanism, 0))
    chex.assert_trees_all_close(result.params, want, atol=2e-5)
    plain = jax.vmap(dropout_loss, (None, 0))(result.params, held_out.read(np.arange(5)))
    np.testing.assert_allclose(result.final.loss, plain.mean(), rtol=1e-5)
    again, later = by_hand(mechanism, 0), by_hand(mechanism, 1)
    assert np.any(again["w"] != later["w"])


def test_what_takes_a_key():
    assert key_argument(dropout_loss) == "rng"
    assert key_argument(lambda params, example, *, key=None: 0.0) == "key"
    assert key_argument(lambda params, key: 0.0) is None
    assert key_argument(lambda params, example, **rest: 0.0) is None
    chosen = functools.partial(dropout_loss, rng=jax.random.key(0))
    assert key_argument(chosen) is None  # it has one already
    needs = lambda params, example, rng: 0.0  # noqa: E731
    assert key_argument(needs) == "rng"
    with pytest.raises(BadInputError, match=r"`rng`, but evaluation .* default None"):
        fit(
            loss_fn=needs,
            params=PARAMS,
            data=STORE,
            mechanism=ULS_ALL,
            optimizer=optax.sgd(1.0),
            steps=1,
            noise_multiplier=1.0,
            validation=STORE,
        )
