"""The loop of the example, and ``fit``: the same key, the same parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpfl_jax as dpfl
from dpfl_jax.errors import BadInputError
from examples.own_train_loop import loss_fn, make_data, make_plan, train

START = {"w": jnp.zeros(3), "b": jnp.zeros(())}


@pytest.mark.privacy
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(
    "mechanism",
    [
        dpfl.ULS(group_size=4, cohort_size=100, clip_norm=0.5),
        dpfl.ELS(group_size=2, batch_size=80, clip_norm=0.5, clipping="normalized"),
        dpfl.NonPrivate(batch_size=80),
    ],
    ids=lambda m: m.kind,
)
def test_it_equals_fit_bit_for_bit(mechanism, devices):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
    plan = mechanism.plan(make_data(), steps=12, epsilon=8.0, delta=1e-4, mesh=mesh)
    key, optimizer = dpfl.RootKey.from_seed(5), optax.adam(0.1)
    own, fitted = (
        train(plan, START, optimizer, key),
        dpfl.fit(loss_fn, START, plan, optimizer, key=key),
    )
    spent = dataclasses.replace(fitted.guarantee, caveats=())
    assert spent == dataclasses.replace(plan.guarantee(), caveats=())
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(fitted.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert np.all(np.asarray(a) != 0)


def test_it_learns_and_states_what_it_spent():
    plan = make_plan()
    trained = train(plan, START, optax.adam(0.1), dpfl.RootKey.from_seed(0))
    np.testing.assert_allclose(trained["w"], [1.0, -2.0, 0.5], atol=0.4)
    assert 7.9 < plan.guarantee().epsilon <= 8.0
    half, whole = plan.epsilons([30, 60])
    assert 0 < half < whole == plan.guarantee().epsilon
    assert half >= plan.guarantee(30).epsilon * (1 - 1e-6)


@pytest.mark.privacy
def test_one_secret_key_in_two_plans_gives_two_noises():
    """What a user does with a kept key: the same noise would show the difference of two sums."""
    key, like = dpfl.RootKey.generate(), {"w": jnp.zeros((200,))}
    data, made = make_data(), dpfl.ULS(group_size=4, cohort_size=100, noise_multiplier=1.0)

    def drawn(mechanism, steps):
        noise = mechanism.plan(data, steps=steps, delta=1e-4).noise(key)
        return np.asarray(noise.update(like, noise.init(like))[0]["w"])

    one, again, other = drawn(made, 3), drawn(made, 3), drawn(made, 4)
    np.testing.assert_array_equal(one, again)
    # Two independent normals of stddev 0.01 lie within 1e-9 of each other with chance 1e-7.
    assert np.abs(one - other).min() > 1e-9


@pytest.mark.privacy
def test_no_noise_is_used_beyond_the_plan():
    plan = dpfl.ULS(group_size=4, cohort_size=100, noise_multiplier=1.0).plan(
        make_data(), steps=2, delta=1e-4
    )
    noise, like = plan.noise(dpfl.RootKey.from_seed(0)), {"w": jnp.zeros(3)}
    state, drawn = noise.init(like), []
    for _ in range(4):
        g, state = jax.jit(noise.update)(like, state)
        drawn.append(np.asarray(g["w"]))
    assert np.isfinite(drawn[:2]).all()
    assert np.isnan(drawn[2:]).all()
    assert (drawn[0] != drawn[1]).all()


@pytest.mark.privacy
def test_a_loop_is_checked_like_fit():
    """Losses with keys need them in the batch; parameters that are split are for ``fit``."""
    data = make_data()
    mechanism = dpfl.ULS(group_size=4, cohort_size=100, noise_multiplier=1.0)

    def random(params, example, rng=None):
        drop = 1.0 if rng is None else jax.random.bernoulli(rng)
        return drop * loss_fn(params, example)

    plan = mechanism.plan(data, steps=2, delta=1e-4)
    key, params = dpfl.RootKey.from_seed(0), {"w": jnp.ones(3), "b": jnp.ones(())}
    grad = plan.clipped_grad(random)
    with pytest.raises(BadInputError, match=r"give plan\.batches loss_keys=True"):
        grad(params, next(plan.batches(key)))
    assert np.isfinite(grad(params, next(plan.batches(key, loss_keys=True))).sum["b"])
    execution = dpfl.Execution(mesh={"fsdp": 8})
    split = mechanism.plan(data, steps=2, delta=1e-4, execution=execution)
    with pytest.raises(BadInputError, match="splits parameters over devices"):
        split.clipped_grad(loss_fn)


def test_fit_keeps_a_run_in_a_folder(tmp_path):
    """A path is enough: stopped and begun again it ends like one that was not."""
    plan, folder, calls = make_plan(), tmp_path / "run", []

    class StopError(Exception):
        pass

    def stop(step):
        calls.append(step)
        if step == 20:
            raise StopError

    pace = dpfl.Pace(checkpoint_every=10, eval_every=30)
    with pytest.raises(StopError):
        dpfl.fit(
            loss_fn, START, plan, optax.adam(0.1), run_dir=folder, pace=pace,
            hooks=dpfl.Hooks(on_checkpoint=stop),
        )  # fmt: skip
    assert not (folder / "report.json").exists()
    result = dpfl.fit(
        loss_fn, START, plan, optax.adam(0.1), run_dir=str(folder), pace=pace,
        validation=make_data(40),
    )  # fmt: skip
    assert (calls, result.steps) == ([10, 20], 60)
    assert 0.0 < result.final.loss < 0.2
    for name in ("report.json", "report.md", "curves.png"):
        assert (folder / name).exists()
    with pytest.raises(BadInputError, match="is finished"):
        dpfl.fit(loss_fn, START, plan, optax.adam(0.1), run_dir=folder)
    other = dpfl.RootKey.from_seed(3)
    with pytest.raises(BadInputError, match="another"):
        dpfl.fit(loss_fn, START, plan, optax.adam(0.1), run_dir=folder, key=other)
