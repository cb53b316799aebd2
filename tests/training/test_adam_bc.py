"""DP-AdamBC: its update, and that it is told the noise that is really on its gradients."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpfl_jax as dpfl
from dpfl_jax.clipping import Adaptive
from dpfl_jax.config.schema import OptimizerConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.run.state import content_digest
from dpfl_jax.training import dp_adam_bc, scale_by_adam_bc
from dpfl_jax.training.fitting import algorithm_of
from dpfl_jax.training.optimizers import make_optimizer

STEPS = 4
USERS = dpfl.from_arrays({"x": np.ones((64, 1), np.float32)}, users=np.arange(64))
SIZES = {"group_size": 1, "cohort_size": 16}


def test_it_is_the_algorithm_of_the_paper():
    rng = np.random.default_rng(0)
    gradients, stddev = rng.normal(size=(6, 5)).astype(np.float32), 0.8
    transformation = scale_by_adam_bc(b1=0.8, b2=0.9, floor=0.1)
    params = jnp.zeros(5)
    state, m, v = transformation.init(params), np.zeros(5), np.zeros(5)
    for t, g in enumerate(gradients, start=1):
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        least = np.maximum(v / (1 - 0.9**t) - stddev**2, 0.1 * stddev**2)
        found, state = transformation.update(jnp.asarray(g), state, params, noise_stddev=stddev)
        np.testing.assert_allclose(found, m / (1 - 0.8**t) / np.sqrt(least), rtol=1e-4)


def test_without_noise_it_is_adam():
    """What a baseline without privacy takes."""
    gradient, params = {"w": jnp.array([0.5, -2.0]), "frozen": None}, {"w": jnp.zeros(2)}
    found, _ = dp_adam_bc(0.1).update(
        gradient, dp_adam_bc(0.1).init(params | {"frozen": None}), noise_stddev=0.0
    )
    want, _ = optax.adam(0.1, eps=0.0).update({"w": gradient["w"]}, optax.adam(0.1).init(params))
    np.testing.assert_allclose(found["w"], want["w"], rtol=1e-5)
    assert found["frozen"] is None


def hears():
    """An optimiser that moves nothing, and keeps how large gradients are and what it is told."""

    def init(params):
        return jnp.zeros(STEPS), jnp.zeros(STEPS), jnp.int32(0)

    def update(gradient, state, params=None, *, noise_stddev, **more):
        measured, passed, step = state
        moved = measured.at[step].set(jnp.std(gradient)), passed.at[step].set(noise_stddev)
        return jnp.zeros_like(gradient), (*moved, step + 1)

    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.parametrize(
    "mechanism",
    [
        dpfl.uls(**SIZES, clip_norm=0.5, clipping="normalized"),
        dpfl.els(group_size=1, batch_size=16, clip_norm=0.5),
        dpfl.uls(**SIZES, clip=Adaptive(clip_norm=0.5, learning_rate=1.0)),
        dpfl.experimental.individual(**SIZES),
        dpfl.bandmf(**SIZES, bands=2),
        dpfl.blt(**SIZES),
        dpfl.banded_inverse(**SIZES, bands=2),
    ],
    ids=lambda mechanism: f"{mechanism.kind}-{mechanism.clip.kind}",
)
def test_the_noise_it_is_told_is_the_noise_there_is(mechanism):
    def no_gradient(params, example):
        return 0.0 * jnp.sum(params) * jnp.sum(example["x"])

    plan = mechanism.plan(USERS, steps=STEPS, epsilon=4.0, delta=1e-3)
    algorithm = algorithm_of(no_gradient, jnp.zeros(20_000), plan, hears())
    steps, state = algorithm.begin(dpfl.RootKey.from_seed(0), 0), algorithm.init()
    for _, inputs in steps.inputs():
        state, _ = steps.step(state, inputs)
    measured, passed, _ = state.opt_state
    np.testing.assert_allclose(passed, measured, rtol=0.03)
    assert not np.any(algorithm.without_privacy().plan.calibrated.noise_on_gradients)


def slope(params, example):
    return jnp.sum(example["x"] * params)


def test_it_trains_and_changes_no_guarantee(tmp_path):
    found = {}
    for name, average in (("adam", "none"), ("adam", "ema"), ("dp_adam_bc", "none")):
        optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=0.1), STEPS)
        plan = dpfl.uls(**SIZES).plan(USERS, steps=STEPS, epsilon=4.0, delta=1e-3)
        folder = tmp_path / f"{name}-{average}"
        result = dpfl.fit(
            slope, jnp.zeros(3), plan, optimizer, run_dir=folder,
            key=dpfl.RootKey.from_seed(0), loop=dpfl.LoopConfig(average=average),
        )  # fmt: skip
        stated = json.loads((folder / "guarantee.json").read_text())
        del stated["digests"]  # of the checkpoints
        found[content_digest(result.params)] = stated
    assert len(found) == 3
    first, *others = found.values()
    assert others == [first, first]


def test_with_canaries_it_is_told_the_noise_too():
    plan = dpfl.uls(**SIZES).plan(USERS, steps=STEPS, epsilon=4.0, delta=1e-3)
    audit = dpfl.AuditConfig(canaries=100)
    result = dpfl.fit(slope, jnp.zeros(3), plan, dp_adam_bc(0.1), audit=audit)
    assert np.isfinite(result.params).all()


def test_whom_nobody_tells_it_asks():
    transformation, gradient = dp_adam_bc(0.1), jnp.ones(2)
    with pytest.raises(BadInputError, match="dp_adam_bc needs the noise on the gradient"):
        transformation.update(gradient, transformation.init(gradient), gradient)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"b1": 1.0}, "b1 is 1.0, but it must be"),
        ({"floor": 0.0}, "floor is 0.0, but it must be"),
        ({"eps": 1e-8}, "optimizer dp_adam_bc takes no option 'eps'; it takes learning_rate, b1"),
    ],
)
def test_options_that_do_not_fit_are_one_sentence(options, said):
    with pytest.raises(BadInputError, match=said):
        make_optimizer(OptimizerConfig(name="dp_adam_bc", options=options), STEPS)


def test_a_name_that_is_nearly_right_is_suggested():
    with pytest.raises(BadInputError, match="did you mean 'dp_adam_bc'"):
        make_optimizer(OptimizerConfig(name="adam_bc"), STEPS)
