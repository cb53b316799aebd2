"""The compiled round equals a plain Python loop over silos, whatever the devices and the sizes."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fed_zoo import (
    MECHANISMS,
    loss_fn,
    make_data,
    make_federation,
    make_params,
    reference_round,
)

from dpfl_jax.clipping import SelfCheckError
from dpfl_jax.config.execution import Execution
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation import federated
from dpfl_jax.federation.engine import make_release, mean_update
from dpfl_jax.federation.federated import run_rounds
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.mechanisms import local_item
from dpfl_jax.federation.participation import SiloFacts
from dpfl_jax.federation.rounds import RoundBuilder
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.noise import exact
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import FixedSize, Poisson

KEY = RootKey.from_seed(3)


def run_round(federation, data, devices=1, width=1, optimizer=None, poison=(), **options):
    """One round by the engine: (mean update, dropped, silos, stats)."""
    mesh = data_parallel_mesh(jax.devices()[:devices])
    builder = RoundBuilder(federation, data, KEY, mesh, width=width, microbatch_size=4, **options)
    release = make_release(
        federation.mechanism, loss_fn, optimizer or optax.sgd(0.1), mesh, width=width
    )
    total = None
    for part in builder.chunks(0):
        chunk = builder.build(0, part).chunk
        if poison:
            stddev = np.array(chunk.stddev)
            stddev[[k for k, i in enumerate(part) if i in poison]] = np.nan
            chunk = dataclasses.replace(chunk, stddev=jnp.asarray(stddev))
        released, _, stats = release(make_params(), None, chunk)
        total = released if total is None else jax.tree.map(jnp.add, total, released)
    return mean_update(total), int(total.dropped), int(total.silos), stats, builder


def assert_close(a, b):
    chex.assert_trees_all_close(a, b, rtol=3e-5, atol=3e-6)


@pytest.mark.nightly
@pytest.mark.slow("local_group")
@pytest.mark.parametrize("kind", MECHANISMS)
def test_engine_equals_a_plain_loop(kind):
    """Unequal sizes, clip norms, noise and steps; a silo with one record and an empty one."""
    data = make_data(only={1: 1, 3: 0})
    federation = make_federation(data, MECHANISMS[kind])
    optimizer = optax.adam(0.05)
    mean, dropped, silos, _, builder = run_round(federation, data, optimizer=optimizer)
    expected, _ = reference_round(federation, builder, make_params(), optimizer, [0, 1, 2, 4])
    assert (dropped, silos) == (0, 4)
    assert_close(mean, expected)


def test_a_local_optimizer_is_told_the_noise_of_its_step():
    """It moves by what it is told: silos differ in noise, sizes and numbers of steps."""

    def update(gradient, state, params=None, *, noise_stddev, **more):
        return jax.tree.map(lambda g: jnp.full_like(g, noise_stddev), gradient), state

    hears = optax.GradientTransformationExtraArgs(lambda params: (), update)
    federation = make_federation(make_data(), MECHANISMS["local_item"])
    mean, _, _, _, builder = run_round(federation, make_data(), optimizer=hears)
    silos = [federation.silos[i] for i in builder.cohort(0)]
    moved = [
        p.local_steps * p.noise_stddev / p.mechanism.participation.divisor(p.facts) for p in silos
    ]
    weights = [p.weight for p in silos]
    for leaf in jax.tree.leaves(mean):
        np.testing.assert_allclose(leaf, np.average(moved, weights=weights), rtol=1e-4)


_KNOWN = {}


def _alone(federation, data):
    """One device, one silo after the other; computed once."""
    if federation.mechanism.kind not in _KNOWN:
        _KNOWN[federation.mechanism.kind] = run_round(federation, data)[0]
    return _KNOWN[federation.mechanism.kind]


@pytest.mark.nightly
@pytest.mark.parametrize(("devices", "width", "chunk"), [(8, 1, None), (1, 3, None), (2, 2, 2)])
@pytest.mark.parametrize("kind", ["hi_grad_avg"])
def test_devices_width_and_chunks_change_nothing(kind, devices, width, chunk):
    data = make_data(silos=11, records=400, only={1: 1, 3: 0})
    federation = make_federation(data, MECHANISMS[kind], weights=np.arange(1, 12))
    one = _alone(federation, data)
    other, dropped, silos, *_ = run_round(federation, data, devices, width, chunk_silos=chunk)
    assert (dropped, silos) == (0, 10)
    assert_close(one, other)


@pytest.mark.slow
def test_vmapped_silos_of_large_arrays(monkeypatch):
    """Arrays that draw their noise by themselves."""
    monkeypatch.setattr(exact, "_SMALL", 4)
    data = make_data(silos=4, records=100)
    federation = make_federation(data, MECHANISMS["local_item"])
    assert_close(run_round(federation, data)[0], run_round(federation, data, width=2)[0])


@pytest.mark.nightly
@pytest.mark.parametrize("devices", [1, 8])
def test_a_silo_that_returns_nan_is_dropped_and_counted(devices):
    data = make_data()
    federation = make_federation(data, MECHANISMS["local_item"])
    mean, dropped, silos, _, builder = run_round(federation, data, devices, poison={2})
    expected, _ = reference_round(
        federation, builder, make_params(), optax.sgd(0.1), range(5), poison={2}
    )
    assert (dropped, silos) == (1, 4)
    assert_close(mean, expected)


def test_if_all_silos_fail_nothing_moves():
    data = make_data()
    federation = make_federation(data, MECHANISMS["local_item"])
    mean, dropped, silos, *_ = run_round(federation, data, poison=set(range(5)))
    assert (dropped, silos) == (5, 0)
    assert all(not np.any(x) for x in jax.tree.leaves(mean))


def test_noise_alone_has_the_stddev_of_every_silo():
    """With zero gradients a silo's one-step SGD update is -lr * noise / divisor."""
    data = make_data()
    plans = tuple(
        SiloPlan(
            local_item(batch_size=10, max_records_per_subject=3, clip_norm=0.5),
            SiloFacts.of(silo),
            1,
            noise_multiplier=s,
        )
        for s, silo in zip((0.5, 1.0, 2.0, 4.0, 8.0), data.silos)
    )
    federation = Federation(plans, 1, 5)
    mesh = data_parallel_mesh(jax.devices()[:1])
    builder = RoundBuilder(federation, data, KEY, mesh)
    big = {"w": jnp.zeros((200, 200))}

    def flat_loss(params, example):
        return 0.0 * jnp.sum(params["w"]) * example["x"][0]

    release = make_release(plans[0].mechanism, flat_loss, optax.sgd(1.0), mesh)
    seen = []
    for i, plan in enumerate(plans):
        chunk = builder.build(0, np.array([i])).chunk
        released, *_ = release(big, None, chunk)
        noise = np.ravel(released.update["w"])
        seen.append(noise)
        expected = plan.sigma * 0.5 / plan.mechanism.participation.divisor(plan.facts)
        # 40,000 draws: the estimate's own stddev is 0.35 %, so 1.6 % fails once in 200,000.
        assert noise.std() == pytest.approx(expected, rel=0.016)
    correlation = np.corrcoef(seen)
    off = correlation[~np.eye(len(seen), dtype=bool)]
    assert np.abs(off).max() < 0.026  # 5.2 standard deviations: silos never share noise


def test_keys_differ_between_silos_rounds_and_steps_and_survive_a_restart():
    data = make_data()
    federation = make_federation(data, MECHANISMS["local_item"])
    mesh = data_parallel_mesh(jax.devices()[:1])
    builder = RoundBuilder(federation, data, KEY, mesh)
    keys = np.concatenate([builder.noise_keys(i, r) for i in range(5) for r in range(20)])
    assert len(np.unique(keys, axis=0)) == len(keys)
    again = RoundBuilder(federation, data, RootKey.from_seed(3), mesh)
    np.testing.assert_array_equal(again.noise_keys(2, 7), builder.noise_keys(2, 7))
    for a, b in zip(again.draws(2, 7), builder.draws(2, 7)):
        np.testing.assert_array_equal(a.positions, b.positions)


@pytest.mark.nightly
def test_optimizer_state_is_kept_or_reset():
    data = make_data(silos=2, records=60)
    federation = make_federation(data, MECHANISMS["fed_avg"], uneven=False)
    mesh = data_parallel_mesh(jax.devices()[:1])
    builder = RoundBuilder(federation, data, KEY, mesh)
    momentum = optax.sgd(0.1, momentum=0.9)
    params = make_params()
    keep = make_release(federation.mechanism, loss_fn, momentum, mesh, keep_state=True)
    fresh = make_release(federation.mechanism, loss_fn, momentum, mesh)
    states = jax.tree.map(lambda x: jnp.stack([x, x]), momentum.init(params))
    chunk = builder.build(0, np.arange(2)).chunk
    first, states, _ = keep(params, states, chunk)
    second, _, _ = keep(params, states, chunk)
    reset, none, _ = fresh(params, None, chunk)
    assert_close(first.update, reset.update)
    assert none is None
    assert not np.allclose(second.update["w"], first.update["w"])


def test_cohorts_are_drawn_by_round_and_empty_ones_are_rounds():
    data = make_data(silos=8, records=300, only={5: 0})
    federation = make_federation(data, MECHANISMS["local_item"])
    fixed = dataclasses.replace(federation, cohort=FixedSize(3))
    drawn = [fixed.cohort_of(KEY, r) for r in range(40)]
    assert all(len(c) <= 3 and 5 not in c for c in drawn)
    assert len({tuple(c) for c in drawn}) > 10
    np.testing.assert_array_equal(drawn[7], fixed.cohort_of(KEY, 7))
    rare = dataclasses.replace(federation, cohort=Poisson(0.05))
    mesh = data_parallel_mesh(jax.devices()[:1])
    builder = RoundBuilder(rare, data, KEY, mesh)
    sizes = [len(list(pieces)) for _, pieces in builder.prefetch(0, 30)]
    assert 0 in sizes
    assert 1 in sizes


def test_a_plan_that_the_data_do_not_keep_is_refused():
    data = make_data(cap=3, how="uniform")
    with pytest.raises(BadInputError, match="cap the data"):
        make_federation(data, MECHANISMS["hi_grad_avg"], max_records_per_subject=2).check(data)
    federation = make_federation(data, MECHANISMS["hi_grad_avg"])
    federation.check(data)
    with pytest.raises(BadInputError, match="max_silos_per_subject"):
        dataclasses.replace(federation, max_silos_per_subject=2).check(data)
    first = dataclasses.replace(federation.silos[0], facts=SiloFacts(10_000, 500))
    lied = dataclasses.replace(federation, silos=(first, *federation.silos[1:]))
    with pytest.raises(BadInputError, match="accounted sampling probabilities would not be"):
        lied.check(data)
    with pytest.raises(BadInputError, match="between 1"):
        dataclasses.replace(federation, max_silos_per_subject=9)


@pytest.mark.nightly
def test_a_thousand_silos_equal_the_loop():
    data = make_data(records=6000, subjects=400, silos=1000, how="uniform")
    federation = make_federation(
        data, MECHANISMS["hi_grad_avg"], batch_size=None, sampling_prob=0.5
    )
    mean, dropped, silos, _, builder = run_round(federation, data, 8)
    members = federation.participants.tolist()
    expected, _ = reference_round(federation, builder, make_params(), optax.sgd(0.1), members)
    assert (dropped, silos) == (0, len(members))
    assert_close(mean, expected)


@pytest.mark.slow
def test_each_record_of_a_local_step_has_its_own_key():
    """A loss that draws at random, of units that hold several records."""

    def noisy(params, record, rng=None):
        return loss_fn(params, record) * (1.0 if rng is None else 2 * jax.random.uniform(rng))

    data = make_data()
    federation = make_federation(data, MECHANISMS["subject_uls"], rounds=1)

    def trained(loss, devices, size):
        return run_rounds(
            loss_fn=loss,
            params=make_params(),
            data=data,
            federation=federation,
            local_optimizer=optax.sgd(0.1),
            delta=1e-3,
            key=KEY,
            mesh=data_parallel_mesh(jax.devices()[:devices]),
            execution=Execution(microbatch_size=size),
        ).params

    one = trained(noisy, 1, 4)
    assert_close(one, trained(noisy, 8, 2))
    assert np.abs(one["b"] - trained(loss_fn, 1, 4)["b"]).max() > 1e-3
    builder = RoundBuilder(federation, data, KEY, data_parallel_mesh(), loss_keys=True)
    (silos,) = builder.chunks(0)
    chunk = builder.build(0, silos).chunk
    examples, steps = chunk.units["examples"], np.asarray(chunk.noise_key)
    keys, present = np.asarray(examples["key"]), np.asarray(chunk.units["mask"])
    found = np.argwhere(present)
    assert len(np.unique(keys[present], axis=0)) == len(found) > 10
    for at in found[:10]:
        silo, step = silos[at[0]], at[1]
        want = builder.silo_key(int(silo), 0).jax("loss", int(step))
        np.testing.assert_array_equal(keys[tuple(at)][:2], jax.random.key_data(want))
        record = data.read(np.array([keys[tuple(at)][2]]))
        np.testing.assert_array_equal(examples["example"]["x"][tuple(at)], record["x"][0])
        assert np.any(keys[tuple(at)][:2] != steps[at[0], at[1], :2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local_item", "subject_uls"])
def test_silos_in_which_units_mix_are_refused(kind, monkeypatch):
    """Whatever the strategy, in the program that runs: here one that adds a trace of all data."""
    data = make_data()
    federation = make_federation(data, MECHANISMS[kind], rounds=1)

    def run():
        return federated.run_rounds(
            loss_fn=loss_fn,
            params=make_params(),
            data=data,
            federation=federation,
            local_optimizer=optax.sgd(0.1),
            delta=1e-3,
            key=KEY,
            execution=Execution(strategy="scan"),
            show_spent=False,
        )

    assert run().steps == 1
    make = federated.make_release

    def mixing(*args, **options):
        release = make(*args, **options)

        def wrapped(params, states, chunk):
            released, states, stats = release(params, states, chunk)
            trace = 1e-6 * sum(jnp.sum(x) for x in jax.tree.leaves(chunk.units))
            update = jax.tree.map(lambda u: u + trace, released.update)
            return dataclasses.replace(released, update=update), states, stats

        return wrapped

    monkeypatch.setattr(federated, "make_release", mixing)
    with pytest.raises(SelfCheckError, match=r"units mix: .*no round was run"):
        run()
