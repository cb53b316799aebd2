"""No step is taken with a strategy whose norms were not compared, whatever is drawn."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit

import dpfl_jax as dpfl
from dpfl_jax.clipping import SelfCheckError
from dpfl_jax.clipping.taps import leaves
from dpfl_jax.data import ArrayStore, Schema
from dpfl_jax.data.schema import Field
from dpfl_jax.mechanisms import uls
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.console import RunConsole

WIDTH, LENGTH, GROUP = 64, 8, 32


def loss(params, example):
    """A product inside a recomputed block, of which each shape of user has another plan."""
    layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w).sum())
    return layer(params["w"], example["x"].reshape(LENGTH, WIDTH))


def users(examples):
    rng = np.random.default_rng(0)
    sets = ((f"u{u}", {"x": rng.normal(size=(n, LENGTH * WIDTH)).astype("f4")})
            for u, n in enumerate(examples))  # fmt: skip
    schema = Schema("arrays", (Field("x", "float32", (LENGTH * WIDTH,)),))
    return ArrayStore.from_users(sets, schema)


def train(data, cohort=4.0, steps=1, **options):
    weights = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype("f4")
    return fit(
        loss_fn=loss,
        params={"w": weights * 0.02},
        data=data,
        mechanism=uls(group_size=GROUP, cohort_size=cohort, clip_norm=1e-2),
        optimizer=optax.sgd(0.0),
        steps=steps,
        noise_multiplier=0.5,
        delta=1e-3,
        microbatch_size=1,
        key=RootKey.from_seed(3),
        strategy="ghost",
        **options,
    )


@pytest.fixture
def wrong(monkeypatch):
    """Norms that are formed without gradients are a hundred times too small; others are right."""
    right = leaves.squared_norm

    def too_small(pairs, shape, method, *rest):
        return 1e-4 * right(pairs, shape, method, *rest)

    monkeypatch.setattr(leaves, "squared_norm", too_small)


@pytest.mark.slow
def test_every_shape_of_user_is_compared(wrong):
    data = users([1] * 16)
    train(data)  # users at their full size have another plan, which is right
    with pytest.raises(SelfCheckError, match="'w'"):
        train(data, group_buckets=True)


@pytest.mark.slow
def test_what_is_compared_does_not_wait_for_a_draw(wrong):
    """One of twenty users comes in a hundred steps."""
    with pytest.raises(SelfCheckError, match="'w'"):
        train(users([GROUP] * 20), cohort=0.01, steps=2, group_buckets=True)


def test_the_check_says_what_it_does_and_how_far_it_is():
    told = []

    class Listening(RunConsole):
        def begin(self, doing):
            told.append(doing.partition(": ")[2])

    def run(params, example):
        return jnp.square(params["w"].sum() - example["x"][0])

    plan = uls(group_size=2, cohort_size=2.0, clip_norm=1.0).plan(
        users([1, 2] * 4),
        steps=1,
        noise_multiplier=0.5,
        delta=1e-3,
        execution=dpfl.Execution(group_buckets=True),
    )
    console = Listening(file=io.StringIO())
    dpfl.fit(run, {"w": jnp.ones(2)}, plan, optax.sgd(0.0), console=console)
    found = [part for part in told if part]
    assert found[0] == "compiling its sum, which is that of every step"
    assert found[1:] == [f"sum {number} of 7 over a few units" for number in range(2, 8)]
