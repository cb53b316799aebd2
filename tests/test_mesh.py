"""Every layout of devices: the same sums, noise, parameters and sensitivity."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit
from jax.sharding import NamedSharding, PartitionSpec
from neighbours import removed

from dpfl_jax.data import ArrayStore, Schema
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import els, uls
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import (
    make_mesh,
    parameter_shardings,
    state_shardings,
    sum_over_devices,
    unit_axes,
    unit_parts,
)
from dpfl_jax.models import LanguageModel, TransformerConfig
from dpfl_jax.noise import Noise
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.state import init_state
from dpfl_jax.training.central import make_train_step
from dpfl_jax.training.slices import collectives
from tests.noised import noised

LAYOUTS = {
    "data": {},
    "fsdp": {"fsdp": 8},
    "mixed": {"data": 2, "fsdp": 2, "tensor": 2},
    "tensor": {"data": 4, "tensor": 2},
}
# When the sum over fsdp is taken, in layouts that split it.
ONCE = {"fsdp": "step", "mixed, once": "step"}
LAYOUTS["mixed, once"] = LAYOUTS["mixed"]
LENGTH, VOCAB, CLIP = 16, 64, 0.1
MODEL = LanguageModel(
    TransformerConfig(num_layers=2, embed_dim=32, num_heads=4, vocab_size=VOCAB, max_seq_len=LENGTH)
)
MECHANISMS = {
    "els": els(group_size=2, batch_size=20, clip_norm=CLIP),
    "uls": uls(group_size=2, cohort_size=20, clip_norm=CLIP),
}


def buffers(mechanism, rows=3, row=16, used=2, scale=1):
    """Two rows in use of three, the second half full."""
    group = () if mechanism.kind == "els" else (2,)
    tokens = jax.random.randint(jax.random.key(1), (rows, row, *group, LENGTH), 0, VOCAB)
    examples = {"tokens": tokens // scale, "mask": jnp.ones(tokens.shape, bool)}
    mask = jnp.arange(rows * row).reshape(rows, row) < used * row - row // 2
    if not group:
        return examples, mask, np.int32(used)
    some = jnp.broadcast_to(jnp.arange(2) < 2, (rows, row, 2)).at[0, 3, 1].set(False)
    return {"examples": examples, "mask": some}, mask, np.int32(used)


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0))


def norm(tree):
    return float(jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree))))


def close(a, b, atol):
    chex.assert_trees_all_close(a, b, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["els", "uls"])
def test_sums_and_sensitivity_are_the_same_on_every_layout(kind, params):
    mechanism = MECHANISMS[kind]
    units, mask, used = buffers(mechanism)
    want = None
    for name in LAYOUTS if kind == "els" else ("data", "mixed", "mixed, once"):
        mesh = make_mesh(**LAYOUTS[name])
        once = {"sum_over_fsdp": ONCE.get(name, "auto")}
        total = jax.jit(clipped_sum_over_microbatches(mechanism, MODEL.loss, mesh, **once))
        placed = jax.device_put(params, parameter_shardings(params, mesh))
        got, stats = total(placed, units, mask, used)
        want = (got, stats) if want is None else want
        close(got, want[0], 3e-6)
        close(stats, want[1], 2e-4)
        assert float(stats.units) == 24
        for unit in ((0, 0), (0, 15), (1, 7)):
            less, _ = total(placed, *removed(units, mask, unit), used)
            moved = norm(jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), got, less))
            assert moved <= CLIP * (1 + 1e-4), name
            assert moved >= CLIP * (1 - 1e-2), name  # every unit here is above the clip norm


@pytest.mark.slow
@pytest.mark.nightly("names1")
@pytest.mark.parametrize("names", [("data", "mixed"), ("data", "fsdp", "tensor")])
def test_a_step_draws_the_same_noise_and_trains_the_same_parameters(params, names):
    mechanism, optimizer = MECHANISMS["uls"], optax.adam(1e-2)
    batch = buffers(mechanism)
    results = {}
    for name in names:
        mesh = make_mesh(**LAYOUTS[name])
        state = init_state(params, optimizer, mesh)
        step = make_train_step(noised(mechanism, 0.7), MODEL.loss, optimizer, mesh)
        for i in range(2):
            state, _ = step(state, *batch, RootKey.from_seed(0).words("noise", i))
        results[name] = jax.tree.map(np.asarray, state.params)
        places = parameter_shardings(params, mesh)
        for x, place in zip(jax.tree.leaves(state.params), jax.tree.leaves(places)):
            assert x.sharding.is_equivalent_to(place, x.ndim), name
        # The optimiser's moments are split like the parameters.
        for x, place in zip(jax.tree.leaves(state.opt_state[0].mu), jax.tree.leaves(places)):
            assert x.sharding.is_equivalent_to(place, x.ndim), name
        assert step.sum._cache_size() == step.update._cache_size() == 1, name
    for name in names:
        close(results[name], results["data"], 2e-5)  # Adam's steps are 1e-2


@pytest.mark.slow
def test_noise_is_drawn_in_place(params):
    """The same numbers on every layout, and no device draws (or receives) all of them."""
    tree = {"w": jnp.ones((512, 320)), "like it": jnp.zeros((512, 320))}
    key = jnp.asarray(RootKey.from_seed(5).words("noise", 0))

    def noised(k, x):
        return Noise(1.0, 1.0).add(k, x)

    want = jax.jit(noised)(key, tree)
    for name in ("fsdp", "mixed"):
        places = parameter_shardings(tree, make_mesh(**LAYOUTS[name]))
        drawn = jax.jit(noised, in_shardings=(None, places), out_shardings=places)
        compiled = drawn.lower(key, tree).compile()
        assert not collectives(compiled.as_text())
        got = compiled(key, jax.device_put(tree, places))
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"tensor": 4}, {"fsdp": 4}])
def test_gradients_meet_over_data_once_a_step(sizes, params):
    """A second copy of the parameters sends nothing more inside the loop over microbatches."""
    mechanism = MECHANISMS["els"]

    def sent(devices):
        mesh = make_mesh(**sizes, devices=jax.devices()[:devices])
        total = clipped_sum_over_microbatches(mechanism, MODEL.loss, mesh)
        places = parameter_shardings(params, mesh)
        rows = NamedSharding(mesh, PartitionSpec(None, unit_axes(mesh)))
        units, mask, used = buffers(mechanism, row=2 * devices)
        arguments = (
            jax.device_put(params, places),
            jax.device_put(units, rows),
            jax.device_put(mask, rows),
            used,
        )
        found = collectives(jax.jit(total).lower(*arguments).compile().as_text())
        return [sum(c.bytes for c in found if c.in_loop is inside) for inside in (True, False)]

    (one_inside, one_after), (two_inside, two_after) = sent(4), sent(8)
    assert one_inside > 0
    assert two_inside <= 1.05 * one_inside
    assert two_after > one_after + 4 * MODEL.num_params / 4  # the reduction over data


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ghost", "scan"])
def test_gradients_may_meet_over_fsdp_once_a_step(strategy, params):
    """The loop then sends only parameters. The sum and its sensitivity stay the same."""
    mechanism, mesh = MECHANISMS["els"], make_mesh(data=2, fsdp=4)
    units, mask, used = buffers(mechanism)
    rows = NamedSharding(mesh, PartitionSpec(None, unit_axes(mesh)))
    placed = jax.device_put(params, parameter_shardings(params, mesh))

    def compiled(when):
        options = {"strategy": strategy, "sum_over_fsdp": when}
        summed = jax.jit(clipped_sum_over_microbatches(mechanism, MODEL.loss, mesh, **options))
        program = summed.lower(placed, *jax.device_put((units, mask), rows), used).compile()
        found = collectives(program.as_text())
        sent = [sum(c.sent for c in found if c.in_loop is inside) for inside in (True, False)]
        return lambda *given: program(placed, *jax.device_put(given, rows), used), sent

    each_time, (in_loop, after) = compiled("microbatch")
    at_once, (less_in_loop, more_after) = compiled("step")
    (often, stats), (once, same) = each_time(units, mask), at_once(units, mask)
    close(often, once, 3e-6)
    close(stats, same, 2e-4)
    close(once, by_definition(params, units), 3e-6)
    for unit in ((0, 0), (0, 15), (1, 7)):
        less, _ = at_once(*removed(units, mask, unit))
        moved = norm(jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), once, less))
        assert CLIP * (1 - 1e-2) <= moved <= CLIP * (1 + 1e-4)
    for x, place in zip(jax.tree.leaves(once), jax.tree.leaves(parameter_shardings(once, mesh))):
        assert x.sharding.is_equivalent_to(place, x.ndim)
    matrices = sum(x.size for x in jax.tree.leaves(params) if x.ndim > 1)
    assert less_in_loop < in_loop - 2 * matrices
    assert more_after > after


def by_definition(params, units):
    """The sum of the clipped gradients of the 24 units, by plain vmap(grad)."""
    flat = jax.tree.map(lambda x: x.reshape(48, *x.shape[2:])[:24], units)
    each = jax.jit(jax.vmap(jax.grad(MODEL.loss), (None, 0)))(params, flat)
    squared = sum(jnp.sum(g.reshape(24, -1) ** 2, -1) for g in jax.tree.leaves(each))
    weights = jnp.minimum(1.0, CLIP / jnp.sqrt(squared))
    return jax.tree.map(lambda g: np.asarray(jnp.einsum("n...,n->...", g, weights)), each)


class Chip:
    """A device of a TPU slice, as far as a mesh asks."""

    platform, device_kind, core_on_chip = "tpu", "TPU v5 lite", 0

    def __init__(self, slice_index, x, y):
        self.slice_index, self.coords, self.process_index = slice_index, (x, y, 0), slice_index
        self.id = 100 * slice_index + 4 * y + x


def test_copies_of_the_parameters_lie_within_slices():
    chips = [Chip(s, x, y) for s in range(2) for y in range(4) for x in range(4)]
    mesh = make_mesh(fsdp=4, tensor=2, devices=chips)
    assert dict(mesh.shape) == {"data": 4, "fsdp": 4, "tensor": 2}
    assert [{chip.slice_index for chip in copy.flat} for copy in mesh.devices] == [{0}] * 2 + [
        {1}
    ] * 2
    with pytest.raises(BadInputError, match="lower fsdp x tensor x sequence, 32, to the 16"):
        make_mesh(fsdp=32, devices=chips)


def store():
    rng = np.random.default_rng(0)

    def examples(n):
        return {
            "tokens": rng.integers(1, VOCAB, (n, LENGTH)).astype(np.int32),
            "mask": np.ones((n, LENGTH), bool),
        }

    users = ((f"u{u}", examples(1 + u % 3)) for u in range(60))
    return ArrayStore.from_users(users, Schema.tokens(LENGTH, VOCAB))


def train(data, sizes, params, run_dir=None, **options):
    return fit(
        loss_fn=MODEL.loss,
        params=params,
        data=data,
        mechanism=MECHANISMS["uls"],
        optimizer=optax.sgd(0.5),
        steps=4,
        delta=1e-3,
        key=RootKey.from_seed(3),
        validation=data,
        microbatch_size=2,
        mesh=make_mesh(**sizes),
        run_dir=run_dir,
        checkpoint_every=2,
        **options,
    )


@pytest.mark.nightly
def test_a_run_goes_on_with_another_layout(params, tmp_path, monkeypatch):
    data = store()
    want = train(data, {}, params)
    whole = train(data, LAYOUTS["mixed"], params)
    close(whole.params, want.params, 1e-5)
    assert whole.guarantee.epsilon == want.guarantee.epsilon
    assert whole.final.loss == pytest.approx(want.final.loss, rel=1e-4)

    def directory():
        return RunDirectory(tmp_path / "run", {}, RootKey.from_seed(3), {})

    from dpfl_jax.training import central

    stop_after = central.step_arguments

    def dies(mechanism, batch):
        if batch.step == 3:
            raise KeyboardInterrupt
        return stop_after(mechanism, batch)

    monkeypatch.setattr(central, "step_arguments", dies)
    run = directory()
    with pytest.raises(KeyboardInterrupt):
        train(data, LAYOUTS["fsdp"], params, run)
    run.close()
    monkeypatch.setattr(central, "step_arguments", stop_after)
    run = directory()
    resumed = train(data, LAYOUTS["tensor"], params, run)
    run.close()
    close(resumed.params, want.params, 1e-5)
    assert any("other hardware" in caveat for caveat in resumed.guarantee.caveats)


def test_layouts_that_do_not_divide_up_are_refused():
    with pytest.raises(BadInputError, match="there are 8"):
        make_mesh(fsdp=3)
    with pytest.raises(BadInputError, match="are 16 devices"):
        make_mesh(data=4, fsdp=4)


def test_what_does_not_divide_stays_whole():
    mesh = make_mesh(data=1, fsdp=4, tensor=2)
    tree = {
        "up": {"kernel": jnp.zeros((3, 8, 6))},
        "down": {"kernel": jnp.zeros((3, 6, 8))},
        "odd": {"kernel": jnp.zeros((5, 7))},
        "norm": {"scale": jnp.zeros((4, 8))},
        "bias": jnp.zeros(8),
    }
    specs = jax.tree.map(lambda s: tuple(s.spec), parameter_shardings(tree, mesh))
    assert specs["up"]["kernel"] == (None, "fsdp", "tensor")
    assert specs["down"]["kernel"] == (None, "tensor", "fsdp")
    assert specs["odd"]["kernel"] == ()
    assert specs["norm"]["scale"] == specs["bias"] == ()
    assert unit_parts(mesh) == 4
    state = jax.eval_shape(optax.adafactor(1e-3).init, tree)
    found = state_shardings(tree, state, mesh)
    for x, place in zip(jax.tree.leaves(state), jax.tree.leaves(found)):
        assert len(place.spec) <= x.ndim


def test_an_axis_may_be_a_part_of_a_side_of_a_slice():
    """A 4 x 4 slice has no side of two; neighbours form the pairs all the same."""

    class Chip:
        platform, device_kind, core_on_chip, process_index = "tpu", "TPU v6 lite", 0, 0

        def __init__(self, x, y):
            self.id, self.coords = 4 * y + x, (x, y, 0)

        client = None

    chips = [Chip(x, y) for y in range(4) for x in range(4)]
    grid = make_mesh(fsdp=2, devices=chips).devices
    assert grid.shape == (8, 2, 1)
    assert len({chip.id for chip in grid.flat}) == 16
    for left, right in grid[:, :, 0]:
        assert sum(abs(a - b) for a, b in zip(left.coords, right.coords)) == 1


def test_sums_over_devices_are_made_in_the_order_of_the_devices():
    """Floats: bit for bit the sum of the parts one after the other; no sum is left to a backend."""
    mesh = make_mesh()
    tree = {
        "matrix": jax.random.normal(jax.random.key(0), (mesh.size, 3, 7)) * 10.0 ** jnp.arange(7),
        "scalar": jax.random.normal(jax.random.key(1), (mesh.size,)),
        "count": jnp.arange(mesh.size),
    }
    rows, whole = PartitionSpec("data"), PartitionSpec()
    summed = jax.jit(
        jax.shard_map(
            lambda tree: sum_over_devices(jax.tree.map(lambda x: x[0], tree)),
            mesh=mesh,
            in_specs=rows,
            out_specs=whole,
        )
    )
    found = summed(tree)
    for name, x in tree.items():
        expected = np.asarray(x[0])
        for part in np.asarray(x)[1:]:
            expected = expected + part
        np.testing.assert_array_equal(found[name], expected)
        assert found[name].dtype == x.dtype
    assert "all-reduce" not in summed.lower(tree).compile().as_text()
