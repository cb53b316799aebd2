"""Before the first step, a run's sum on its mesh is held against itself and one device's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit
from jax.sharding import NamedSharding, PartitionSpec

from dpfl_jax.clipping import SelfCheckError
from dpfl_jax.data import ArrayStore, Schema
from dpfl_jax.data.schema import Field
from dpfl_jax.mechanisms import els, uls
from dpfl_jax.mechanisms.plan import sum_check
from dpfl_jax.mechanisms.plan.batches import training_pipeline
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import make_mesh, parameter_shardings, place
from dpfl_jax.randomness import RootKey
from dpfl_jax.training import central

GROUP = 3
MECHANISM = uls(group_size=GROUP, cohort_size=4.0, clip_norm=0.1)
SAMPLER = MECHANISM.sampler(np.arange(6), RootKey.from_seed(0))


def store(examples, size=4):
    rng = np.random.default_rng(0)
    users = (
        (f"u{u}", {"x": rng.normal(size=(n, size)).astype("f4")}) for u, n in enumerate(examples)
    )
    return ArrayStore.from_users(users, Schema("arrays", (Field("x", "float32", (size,)),)))


def loss(params, example):
    return jnp.sum(jnp.tanh(example["x"] @ params["a"]) @ params["b"]) ** 2


def parameters(b=0.5):
    return {
        "a": 0.5 * np.random.default_rng(1).normal(size=(4, 6)).astype("f4"),
        "b": np.full((6, 2), b, "f4"),
    }


@functools.cache
def compiled(**sizes):
    mesh = make_mesh(**sizes)
    return mesh, jax.jit(clipped_sum_over_microbatches(MECHANISM, loss, mesh))


def check(change=None, examples=(1, 2, 3, 2, 1), params=None, group_buckets=False, **sizes):
    """The check of a run whose sum is changed by ``change(sum, stats, units, mask)``."""
    mesh, total = compiled(**sizes)
    pipeline = training_pipeline(SAMPLER, store(examples), mesh, 2, group_buckets)
    params = parameters() if params is None else params
    placed = place(params, parameter_shardings(params, mesh))

    def summed(params, units, mask, *rest):
        found = total(params, units, mask, *rest)
        if change is None:
            return found
        shardings = jax.tree.map(lambda x: x.sharding, found[0])
        changed, stats = change(*found, units[0], mask[0])
        return jax.device_put(changed, shardings), stats

    nothing = {"a": None, "b": None}
    return sum_check.check_sum(summed, MECHANISM, loss, placed, nothing, pipeline, GROUP)


def scaled(factor, leaf=None):
    return lambda total, stats, units, mask: (
        {k: x * factor if leaf in (None, k) else x for k, x in total.items()}, stats
    )  # fmt: skip


def mixed(total, stats, units, mask):
    """A millionth of all data, masked out or not."""
    return {**total, "a": total["a"] + 1e-6 * jnp.sum(units["examples"]["x"])}, stats


def norms_halved(total, stats, units, mask):
    return total, dataclasses.replace(stats, norm=0.5 * stats.norm)


def shared(total, stats, units, mask):
    """Several units together count as one."""
    return jax.tree.map(lambda x: x / jnp.maximum(mask.sum(), 1), total), stats


@pytest.fixture
def too_large(monkeypatch):
    """Parameters that no single device could hold."""
    monkeypatch.setattr(sum_check._OneDevice, "made", lambda *_: None)


@pytest.mark.slow
def test_a_right_sum_passes_with_or_without_one_device(monkeypatch):
    found = check()
    assert found.compared
    assert found.max_relative_error < 1e-5
    assert check(group_buckets=True).compared
    assert check(examples=[1]).compared  # the same unit everywhere
    assert check(examples=[0, 0, 0, 0, 0, 0, 2]).compared  # the first users hold nothing
    monkeypatch.setattr(sum_check._OneDevice, "made", lambda *_: None)
    found = check()
    assert not found.compared
    assert found.max_relative_error < 1e-5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (mixed, "units mix: .* at parameter 'a'"),
        (scaled(1.01), "not that of one device"),
        (scaled(np.nan), "not that of one device"),
        (norms_halved, "norms in the sum of several units are not those of one device"),
        (shared, "sum of several units is not that of one device"),
    ],
)
def test_a_wrong_sum_is_refused_in_one_sentence(change, says):
    with pytest.raises(SelfCheckError, match=says) as found:
        check(change)
    text = str(found.value)
    assert "\n" not in text
    assert "mesh data 8" in text
    assert "no step was taken" in text
    with pytest.raises(SelfCheckError):
        check(change, examples=[2])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (mixed, "units mix"),
        (scaled(1.01), "a single unit adds 0.101 to it"),
        (shared, "do not add up"),
    ],
)
def test_what_needs_no_other_device_is_seen_without(too_large, change, says):
    with pytest.raises(SelfCheckError, match=says):
        check(change)


def test_parameters_that_are_zero_are_looked_at_elsewhere():
    """With ``b`` zero the gradient of ``a`` is: any multiple of it would be right."""
    with pytest.raises(SelfCheckError, match="'a'"):
        check(scaled(5.0, "a"), params=parameters(b=0.0))


@pytest.mark.slow
def test_a_loss_that_is_bound_to_the_mesh_is_checked_without_one_device():
    mesh = make_mesh(fsdp=2)
    anywhere = NamedSharding(mesh, PartitionSpec(PartitionSpec.UNCONSTRAINED))

    def bound(params, example):
        return loss(params, {"x": jax.lax.with_sharding_constraint(example["x"], anywhere)})

    pipeline = training_pipeline(SAMPLER, store([1, 2, 3]), mesh, 2)
    total = jax.jit(clipped_sum_over_microbatches(MECHANISM, bound, mesh))
    params, nothing = parameters(), {"a": None, "b": None}
    placed = place(params, parameter_shardings(params, mesh))
    assert not sum_check.check_sum(
        total, MECHANISM, bound, placed, nothing, pipeline, GROUP
    ).compared


def convolved(params, example):
    x = example["x"].reshape(1, 6, 4)
    y = jax.lax.conv_general_dilated(
        x, params["w"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jnp.sum(jnp.tanh(y) ** 2)


def train(mesh, kind=els, steps=3, **options):
    size = {"cohort_size": 12.0} if kind is uls else {"batch_size": 12.0}
    return fit(
        loss_fn=convolved,
        params={"w": np.random.default_rng(0).normal(size=(3, 4, 8)).astype("f4")},
        data=store([1 + u % GROUP for u in range(24)], 24),
        mechanism=kind(group_size=GROUP, clip_norm=0.1, **size),
        optimizer=optax.adam(0.1),
        steps=steps,
        noise_multiplier=1.0,
        delta=1e-3,
        microbatch_size=2,
        key=RootKey.from_seed(3),
        mesh=mesh,
        **options,
    )


WAYS = [
    {"strategy": "scan"},
    {"kind": uls, "examples_at_once": 1},
    {"kind": uls, "split_users": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_with_convolutions_trains_as_on_one_device_or_not_at_all(way, monkeypatch):
    made, make = [], central.make_train_step
    monkeypatch.setattr(
        central, "make_train_step", lambda *a, **k: made.append(make(*a, **k)) or made[-1]
    )
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    want = train(make_mesh(devices=jax.devices()[:1]), way.get("kind", els))
    got = train(mesh, **way)
    np.testing.assert_allclose(got.params["w"], want.params["w"], atol=1e-4)  # steps of 0.1
    assert got.params["w"].sharding.is_fully_replicated
    # What was checked is what trained.
    assert made[-1].sum._cache_size() == made[-1].update._cache_size() == 1
    if "split_users" in way:
        return
    # The layout that was: no step is taken.
    monkeypatch.setattr(central, "convolution_kernels", lambda *_: frozenset())
    monkeypatch.setattr(central, "step_arguments", None)
    with pytest.raises(SelfCheckError, match="sum of the training step is wrong on the mesh"):
        train(mesh, **way)
