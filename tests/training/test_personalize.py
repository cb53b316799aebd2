"""Local tuning of held-out users: one copy each, scored on what it was not tuned on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpfl_jax.data import ArrayStore
from dpfl_jax.errors import BadInputError
from dpfl_jax.mesh import make_mesh, parameter_shardings, place
from dpfl_jax.training.evaluate import personalize


def loss_fn(params, example):
    return 0.5 * jnp.sum((params["mean"] - example["x"]) ** 2)


def store(counts, spread=0.1):
    rng = np.random.default_rng(0)
    users = (
        (f"u{i}", {"x": (rng.normal(size=3) + spread * rng.normal(size=(n, 3))).astype("f4")})
        for i, n in enumerate(counts)
    )
    return ArrayStore.from_users(users)


def one_by_one(params, data, rate, users, epochs, batch, most):
    """Plain loops over users, epochs and batches."""
    before, after = [], []
    for u in users:
        first, last = (
            data.user_offsets[u],
            min(data.user_offsets[u + 1], data.user_offsets[u] + most),
        )
        x = data.read(np.arange(first, last))["x"]
        tune, score = x[::2], x[1::2]

        def mean_loss(p, part):
            return jnp.mean(jax.vmap(lambda e: loss_fn(p, {"x": e}))(part))

        own = params
        for _ in range(epochs):
            for start in range(0, len(tune), batch):
                gradient = jax.grad(mean_loss)(own, tune[start : start + batch])
                own = jax.tree.map(lambda p, g: p - rate * g, own, gradient)
        before.append(float(mean_loss(params, score)))
        after.append(float(mean_loss(own, score)))
    return np.mean(before), np.mean(after)


@pytest.mark.nightly
def test_equals_plain_loops():
    data = store([1, 2, 3, 9, 10, 25, 0, 7, 4])
    params = {"mean": jnp.zeros(3)}
    got = personalize(
        loss_fn, params, data, (0.1,), epochs=4, batch_size=4, most_examples=10, users_at_once=3
    )
    scored = [u for u, n in enumerate(np.diff(data.user_offsets)) if n >= 2][1::2]
    before, after = one_by_one(params, data, 0.1, scored, 4, 4, 10)
    assert got.users == len(scored)
    assert got.before == pytest.approx(before, rel=1e-5)
    assert got.after == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "fsdp": 2}])
def test_users_split_over_devices_are_scored_alike(axes):
    data = store([1, 2, 3, 9, 10, 25, 0, 7, 4])
    params = {"mean": jnp.arange(4.0), "scale": jnp.ones((4, 8))}

    def loss(params, example):
        x = jnp.concatenate([example["x"], jnp.ones(1)])
        return 0.5 * jnp.sum((jnp.tanh(x - params["mean"]) @ params["scale"]) ** 2)

    alone = personalize(loss, params, data, (0.01, 0.03), users_at_once=3)
    mesh = make_mesh(**axes, devices=jax.devices()[:4])
    placed = place(params, parameter_shardings(params, mesh))
    split = personalize(loss, placed, data, (0.01, 0.03), users_at_once=3)
    assert (split.learning_rate, split.users) == (alone.learning_rate, alone.users)
    assert split.before == pytest.approx(alone.before, rel=1e-5)
    assert split.after == pytest.approx(alone.after, rel=1e-5)
    assert alone.after < alone.before


def test_frozen_parameters_are_not_tuned():
    """With an offset that is frozen, users tune what is left: the same as a smaller problem."""
    data = store([8] * 6)

    def shifted(params, example):
        return loss_fn({"mean": params["mean"] + params["offset"]}, example)

    def wanted(params, example):
        return loss_fn({"mean": params["mean"] + 0.5}, example)

    params = {"mean": jnp.zeros(3), "offset": jnp.full(3, 0.5)}
    got = personalize(shifted, params, data, (0.1,), trainable=lambda name: name == "mean")
    want = personalize(wanted, {"mean": jnp.zeros(3)}, data, (0.1,))
    assert got.after == pytest.approx(want.after, rel=1e-5)
    every = personalize(shifted, params, data, (0.1,))
    assert every.after != pytest.approx(want.after, rel=1e-3)


def test_the_rate_is_chosen_on_other_users():
    data = store([16] * 12)
    got = personalize(loss_fn, {"mean": jnp.zeros(3)}, data, (1e-3, 0.3, 30.0))
    assert got.learning_rate == 0.3  # the small one hardly moves, the large one diverges
    assert got.after < 0.2 * got.before


def test_users_without_a_second_example_are_refused():
    with pytest.raises(BadInputError, match="two examples"):
        personalize(loss_fn, {"mean": jnp.zeros(3)}, store([1, 1, 5]))


def test_a_rate_that_ends_in_nan_is_not_chosen():
    def loss(params, example):
        return jnp.where(jnp.abs(params["mean"]).max() > 1e3, jnp.nan, loss_fn(params, example))

    got = personalize(loss, {"mean": jnp.zeros(3)}, store([16] * 12), (1e6, 0.3))
    assert got.learning_rate == 0.3
    assert np.isfinite(got.after)
