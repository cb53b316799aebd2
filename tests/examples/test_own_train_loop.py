"""The loop of the example, and ``fit``: the same key, the same parameters."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpfl_jax as dpfl
from dpfl_jax.data.schema import Schema
from dpfl_jax.data.store import Store, UserView
from dpfl_jax.errors import BadInputError
from examples.own_train_loop import loss_fn, make_data, make_plan, train

START = {"w": jnp.zeros(3), "b": jnp.zeros(())}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(
    "mechanism",
    [
        dpfl.uls(group_size=4, cohort_size=100, clip_norm=0.5),
        dpfl.els(group_size=2, batch_size=80, clip_norm=0.5, clipping="normalized"),
        dpfl.non_private(batch_size=80),
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


@pytest.mark.nightly
def test_it_learns_and_states_what_it_spent():
    plan = make_plan()
    trained = train(plan, START, optax.adam(0.1), dpfl.RootKey.from_seed(0))
    np.testing.assert_allclose(trained["w"], [1.0, -2.0, 0.5], atol=0.4)
    assert 7.9 < plan.guarantee().epsilon <= 8.0
    half, whole = plan.epsilons([30, 60])
    assert 0 < half < whole == plan.guarantee().epsilon
    assert half >= plan.guarantee(30).epsilon * (1 - 1e-6)


def test_a_secret_key_gives_the_noise_of_a_step_once():
    """Two plans share no noise; one plan gives none twice, whatever is trained with it."""
    key, data = dpfl.RootKey.generate(), make_data()
    made = dpfl.uls(group_size=4, cohort_size=100)
    plans = [made.plan(data, steps=steps, noise_multiplier=1.0, delta=1e-4) for steps in (3, 4)]
    drawn = [[batch.noise_key.tolist() for batch in plan.batches(key)] for plan in plans]
    seen = {tuple(words) for words in drawn[0] + drawn[1]}
    assert len(seen) == 7
    for start in (0, 2):
        with pytest.raises(BadInputError, match=f"step {start} was already drawn from this key"):
            next(plans[0].batches(key, start=start))
    other = dpfl.RootKey.generate()
    assert next(plans[0].batches(other)).noise_key.tolist() not in drawn[0]
    # A loop that goes on: its first batch is the next step, with that step's noise.
    again = dpfl.RootKey(other.secret)
    (batch,) = plans[0].batches(again, start=2)
    assert batch.step == 2
    public = dpfl.RootKey.from_seed(0)
    one, two = (next(plans[0].batches(public, start=1)) for _ in range(2))
    np.testing.assert_array_equal(one.noise_key, two.noise_key)


def test_a_batch_pays_for_one_release():
    """A second one with the same noise, as of a GAN or of SAM: their difference has none."""
    plan, total = make_plan(), {"w": jnp.ones(3), "b": jnp.ones(())}
    noise, other = plan.noise(), plan.noise()
    state, step = noise.init(START), jax.jit(noise.update)
    batches = plan.batches(dpfl.RootKey.generate())

    def release(noise, state, key):
        return noise.update(total, state, noise_key=key)

    first = next(batches)
    key = first.noise_key
    with pytest.raises(BadInputError, match="noise key of step 0 was already taken from its batch"):
        _ = first.noise_key
    assert "noise_key" not in repr(first)
    _, after = release(noise, state, key)
    for again in (noise, other):  # a loop that is not compiled
        with pytest.raises(BadInputError, match="step 0 is given a second time"):
            release(again, state, key)
    with pytest.raises(BadInputError, match="step 0 is given a second time"):
        release(noise, after, key.copy())

    @jax.jit
    def both(states, key):  # both losses in one compiled function
        return [release(n, s, key)[0] for n, s in zip((noise, other), states, strict=True)]

    with pytest.raises(BadInputError, match="a noise key is given a second time"):
        both((state, state), next(batches).noise_key)
    # Compiled, from the state that the first release left: nothing but NaN.
    third = next(batches).noise_key
    gradient, after = step(total, state, noise_key=third)  # a loop that begins at a later step
    assert np.isfinite(gradient["w"]).all()
    gradient, _ = step(total, after, noise_key=third)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(gradient))
    # Another run goes on with the state, and so does the next step.
    for fresh in (next(batches), next(plan.batches(dpfl.RootKey.generate()))):
        gradient, after = step(total, after, noise_key=fresh.noise_key)
        assert np.isfinite(gradient["w"]).all()


def test_copies_of_a_key_or_a_batch_pay_for_nothing():
    plan, total = make_plan(), {"w": jnp.ones(3), "b": jnp.ones(())}
    noise = plan.noise()
    state, batches = noise.init(START), plan.batches(dpfl.RootKey.generate())
    key = next(batches).noise_key
    noise.update(total, state, noise_key=jnp.asarray(key))
    for same in (jnp.asarray(key), np.array(key), key[:]):  # with the state of before
        with pytest.raises(BadInputError, match="step 0 is given a second time"):
            noise.update(total, state, noise_key=same)
    batch = next(batches)
    for copied in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert copied.plan == batch.plan
        with pytest.raises(BadInputError, match="a copy of the batch, which has no key"):
            _ = copied.noise_key
    noise.update(total, state, noise_key=batch.noise_key)  # other words


@pytest.mark.parametrize("base", [object, Store])
def test_a_store_whose_records_changed_gets_other_noise(base):
    """Under one plan and key: a run's key is made of the data's digest, computed afresh."""

    class Own(base):
        user_offsets = np.arange(41)

        def __init__(self):
            self.schema = Schema.arrays({"x": np.float32(0)}, leading_axis=False)
            self.x = np.zeros(40, np.float32)

        def read(self, positions):
            return {"x": self.x[positions]}

        def records(self, positions):
            return self.schema.pack(self.read(positions))

        def user_ids(self, indices):
            return [f"{i:03d}" for i in indices]

    store = Own()
    for data in [store] if base is object else [store, UserView(store, np.arange(20))]:
        plan = dpfl.uls(group_size=1, cohort_size=10).plan(data, steps=1, epsilon=1.0, delta=1e-3)
        before = plan.data_digest
        assert plan.data_digest == before
        store.x[3] += 1.0
        assert plan.data_digest != before


@pytest.mark.slow
def test_keys_are_in_no_state_and_in_no_program():
    plan = make_plan()
    noise, batch = plan.noise(), next(plan.batches(dpfl.RootKey.generate()))
    noise_key = batch.noise_key
    tx = optax.chain(noise, optax.adam(0.1))
    state = tx.init(START)
    total = plan.clipped_grad(loss_fn)(START, batch).sum

    def update(total, state, key):
        return tx.update(total, state, START, noise_key=key)

    text = jax.jit(update).lower(total, state, noise_key).as_text()
    alone, _ = noise.update(total, noise.init(START), START, noise_key=noise_key)
    chained, after = jax.jit(update)(total, state, noise_key)
    kept = [np.asarray(x).ravel().tolist() for x in jax.tree.leaves(after)]
    for word in noise_key[:8].tolist():  # the last three are the step and the run
        assert str(word) not in text
        assert all(word not in values for values in kept)
    want, _ = optax.adam(0.1).update(alone, optax.adam(0.1).init(START), START)
    np.testing.assert_allclose(chained["w"], want["w"], rtol=1e-5)


def test_what_a_plan_did_not_account_for_is_refused():
    data = make_data()
    small, large = (
        dpfl.uls(group_size=4, cohort_size=c).plan(data, steps=2, noise_multiplier=1.0, delta=1e-4)
        for c in (2, 200)
    )
    key = dpfl.RootKey.from_seed(0)
    with pytest.raises(BadInputError, match="the batch belongs to another plan"):
        small.clipped_grad(loss_fn)(START, next(large.batches(key)))
    for asked in (small.event, small.guarantee, lambda steps: small.epsilons([steps])):
        with pytest.raises(BadInputError, match="3 steps are asked for, but the plan is for 2"):
            asked(3)
    with pytest.raises(BadInputError, match="start is -1"):
        next(small.batches(key, start=-1))
    assert any("seed written" in caveat for caveat in small.guarantee(key=key).caveats)
    assert small.guarantee(key=dpfl.RootKey.generate()).caveats == small.guarantee().caveats
    # Its own batches' seed is named without being asked for, and once.
    assert not any("seed written" in caveat for caveat in small.guarantee().caveats)
    next(small.batches(key))
    for found in (small.guarantee(), small.guarantee(1, key=key)):
        assert sum("seed written" in caveat for caveat in found.caveats) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 2.5, "epsilon": 1.0}, "number of steps is 2.5"),
        ({"steps": 0, "epsilon": 1.0}, "number of steps is 0"),
        ({"steps": 2}, "neither epsilon nor"),
        ({"steps": 2, "epsilon": 1.0, "delta": 2.0}, "delta is 2"),
        ({"steps": 2, "noise_multiplier": 1.0, "delta": 2.0}, "delta is 2"),
        ({"steps": 2, "noise_multiplier": 1.0, "epsilon": 1.0}, "both epsilon and"),
    ],
)
def test_bad_plans_are_one_sentence(options, message):
    with pytest.raises(BadInputError, match=message):
        dpfl.uls(group_size=4, cohort_size=10).plan(make_data(40), **options)


def test_numbers_may_be_numpys():
    mechanism = dpfl.uls(group_size=np.int64(2), cohort_size=10, clip_norm=np.float32(0.5))
    plan = mechanism.plan(make_data(40), steps=np.int64(2), epsilon=np.float32(4.0))
    assert len(plan.digest) == 64
    assert plan.guarantee().epsilon <= 4.0


def mixing_by_vmap(params, example):
    """What is summed is the rule, which adds up the batch."""
    fresh = jax.custom_batching.custom_vmap(lambda x: x)
    fresh.def_vmap(lambda size, batched, x: (jnp.broadcast_to(x.sum(0), x.shape), True))
    return loss_fn(params, example | {"y": fresh(example["y"])})


def mixing_by_callback(params, example):
    y = example["y"]
    shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
    total = jax.pure_callback(
        lambda y: np.broadcast_to(y.sum(), y.shape), shape, y, vmap_method="broadcast_all"
    )
    return loss_fn(params, example | {"y": total})


@pytest.mark.parametrize("loss", [mixing_by_vmap, mixing_by_callback])
def test_losses_that_mix_units_are_refused_as_by_fit(loss):
    plan, key = make_plan(), dpfl.RootKey.from_seed(0)
    with pytest.raises(BadInputError, match=r"custom rule for vmap|calls into Python"):
        plan.clipped_grad(loss)(START, next(plan.batches(key)))


@pytest.mark.slow
def test_a_loop_is_checked_like_fit():
    """Losses with keys need them in the batch; parameters that are split are for ``fit``."""
    data = make_data()
    mechanism = dpfl.uls(group_size=4, cohort_size=100)

    def random(params, example, rng=None):
        drop = 1.0 if rng is None else jax.random.bernoulli(rng)
        return drop * loss_fn(params, example)

    plan = mechanism.plan(data, steps=2, noise_multiplier=1.0, delta=1e-4)
    key, params = dpfl.RootKey.from_seed(0), {"w": jnp.ones(3), "b": jnp.ones(())}
    grad = plan.clipped_grad(random)
    with pytest.raises(BadInputError, match=r"give plan\.batches loss_keys=True"):
        grad(params, next(plan.batches(key)))
    assert np.isfinite(grad(params, next(plan.batches(key, loss_keys=True))).sum["b"])
    execution = dpfl.Execution(mesh={"fsdp": 8})
    split = mechanism.plan(data, steps=2, noise_multiplier=1.0, delta=1e-4, execution=execution)
    with pytest.raises(BadInputError, match="splits parameters over devices"):
        split.clipped_grad(loss_fn)


@pytest.mark.nightly
def test_fit_keeps_a_run_in_a_folder(tmp_path):
    """A path is enough: stopped and begun again it ends like one that was not."""
    plan, folder, calls = make_plan(), tmp_path / "run", []

    class StopError(Exception):
        pass

    def stop(step):
        calls.append(step)
        if step == 20:
            raise StopError

    loop = dpfl.LoopConfig(checkpoint_every=10, eval_every=30)
    with pytest.raises(StopError):
        dpfl.fit(
            loss_fn, START, plan, optax.adam(0.1), run_dir=folder, loop=loop,
            hooks=dpfl.Hooks(on_checkpoint=stop),
        )  # fmt: skip
    assert not (folder / "report.json").exists()
    # Less at once, as after running out of memory: the run goes on, and says so.
    less = dataclasses.replace(plan, execution=dpfl.Execution(microbatch_size=4))
    result = dpfl.fit(
        loss_fn, START, less, optax.adam(0.1), run_dir=str(folder), loop=loop,
        validation=make_data(40),
    )  # fmt: skip
    assert (calls, result.steps) == ([10, 20], 60)
    assert any("another execution" in caveat for caveat in result.guarantee.caveats)
    assert 0.0 < result.final.loss < 0.2
    for name in ("report.json", "report.md", "curves.png"):
        assert (folder / name).exists()
    with pytest.raises(BadInputError, match="is finished"):
        dpfl.fit(loss_fn, START, plan, optax.adam(0.1), run_dir=folder)
    other = dpfl.RootKey.from_seed(3)
    with pytest.raises(BadInputError, match="another"):
        dpfl.fit(loss_fn, START, plan, optax.adam(0.1), run_dir=folder, key=other)


@pytest.mark.nightly
def test_some_parameters_may_be_trained():
    """The sum has none of the others, and neither has the gradient."""
    plan, key = make_plan(), dpfl.RootKey.from_seed(0)
    grad, noise = plan.clipped_grad(loss_fn, trainable=lambda name: name == "w"), plan.noise()
    batch = next(plan.batches(key))
    total = grad(START, batch).sum
    g, _ = noise.update(total, noise.init(START), START, noise_key=batch.noise_key)
    assert g["b"] is None
    assert np.isfinite(g["w"]).all()


def test_a_mesh_without_units_is_refused():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    mechanism = dpfl.uls(group_size=4, cohort_size=10)
    with pytest.raises(BadInputError, match=r"axes \('x',\)"):
        mechanism.plan(make_data(40), steps=2, noise_multiplier=1.0, mesh=mesh)
