"""Runs that share a key share no noise, and a run that goes on is the one that began."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from fitting import fit_given as fit
from jax.extend.core import Primitive
from jax.interpreters import batching

from dpfl_jax.clipping.isolation import refuse_opaque
from dpfl_jax.data import ArrayStore
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import els, non_private, uls
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.terms import computation_digest, refuse_other

USERS, SIGMA = 12, 1.5


def make_store(changed=None):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(USERS, 4)).astype(np.float32)
    if changed is not None:
        x[0] = changed
    return ArrayStore.from_users((f"u{i}", {"x": x[i : i + 1]}) for i in range(USERS))


def loss_fn(params, example):
    return jnp.vdot(params["w"], example["x"])


def arguments(**changes):
    return {
        "loss_fn": loss_fn,
        "params": {"w": jnp.zeros(4)},
        "data": make_store(),
        "mechanism": uls(group_size=1, cohort_size=USERS, clip_norm=1.0),
        "noise_multiplier": SIGMA,
        "optimizer": optax.sgd(1.0),
        "steps": 1,
        "delta": 1e-3,
    } | changes  # fmt: skip


CHANGES = {
    "data": {"data": make_store(changed=9.0)},
    "mechanism.clip_norm": {"mechanism": uls(group_size=1, cohort_size=USERS, clip_norm=0.5)},
    "mechanism.noise_multiplier": {"noise_multiplier": 3.0},
    "mechanism.batch_size": {"mechanism": els(group_size=1, batch_size=USERS, clip_norm=1.0)},
    "delta": {"delta": 1e-4},
    "steps": {"steps": 2},
    "the loss": {"loss_fn": lambda p, e: 2.0 * loss_fn(p, e)},
    "or the optimiser": {"optimizer": optax.sgd(0.5)},
    "start": {"params": {"w": jnp.ones(4)}},
}


def weighted(factor):
    """A loss whose weights belong to a compiled function inside of it."""
    weigh = jax.jit(lambda x: x * (factor * jnp.ones(4)))
    return lambda p, e: jnp.vdot(p["w"], weigh(e["x"]))


def noise_of(key, **changes):
    """What the first step added to the clipped sum, over its standard deviation."""
    factor = changes.pop("factor", 2.0 if "loss_fn" in changes else 1.0)
    given = arguments(**changes)
    seen = []

    def watch(updates, state, params=None):
        del params
        jax.debug.callback(lambda u: seen.append(np.asarray(u, np.float64)), updates["w"])
        return updates, state

    watcher = optax.GradientTransformation(lambda _: optax.EmptyState(), watch)
    fit(**given | {"optimizer": optax.chain(watcher, given["optimizer"])}, key=key)
    x = given["data"].read(np.arange(USERS))["x"].astype(np.float64)
    mechanism = given["mechanism"]
    norm = factor * np.linalg.norm(x, axis=1, keepdims=True)
    clean = (factor * x * np.minimum(1.0, mechanism.clip_norm / norm)).sum(0)
    stddev = given["noise_multiplier"] * mechanism.clip_norm
    return (seen[0] * USERS - clean) / stddev


@pytest.mark.slow
def test_two_runs_with_one_secret_key_share_no_noise():
    """Whatever they differ in; with one noise their difference would be clipped gradients."""
    key = RootKey.generate()
    first = noise_of(key)
    # 36 numbers of a standard normal distribution: beyond 6 with probability 1e-7.
    assert np.abs(first).max() < 6
    for name, change in CHANGES.items():
        other = noise_of(key, **change)
        assert np.abs(other).max() < 6, name
        # Two independent normals lie within 1e-4 of each other with probability 6e-5.
        assert np.abs(first - other).min() > 1e-4, name
    np.testing.assert_allclose(noise_of(key), first, rtol=1e-6)  # the same run is the same run
    once, twice = (noise_of(key, loss_fn=weighted(f), factor=f) for f in (1.0, 2.0))
    assert np.abs(once - twice).min() > 1e-4


@pytest.mark.slow
def test_sampling_is_a_runs_own_too():
    """Runs that drew the same users would not compose as independent draws do."""
    key, drawn = RootKey.generate(), []
    for steps in (20, 21):
        result = fit(
            **arguments(
                mechanism=uls(group_size=1, cohort_size=6), noise_multiplier=1.0, steps=steps
            ),
            key=key,
        )
        drawn.append([row["outside_guarantee"]["units"] for row in result.metrics][:20])
    assert drawn[0] != drawn[1]  # the same by chance with probability (1/4)^20 or so


@pytest.mark.slow
def test_a_continued_run_is_held_against_what_ran(tmp_path):
    directory = RunDirectory(tmp_path / "run", {}, None)
    fit(**arguments(), run_dir=directory)
    directory.close()
    directory = RunDirectory(tmp_path / "run", {}, None)
    for change in set(CHANGES) - {"start"}:
        words = "training data" if change == "data" else change
        with pytest.raises(BadInputError, match=f"(?s){words}.*start another run"):
            fit(**arguments(**CHANGES[change]), run_dir=directory)
    again = fit(**arguments(), run_dir=directory)
    assert again.steps == 1
    directory.close()


def test_a_target_that_falls_later_is_refused(tmp_path):
    """20 steps at epsilon 50 cannot become one more step and a statement of epsilon 1."""
    loud = {"mechanism": uls(group_size=1, cohort_size=6), "noise_multiplier": None, "steps": 20}
    directory = RunDirectory(tmp_path / "run", {}, None)
    spent = fit(**arguments(**loud), epsilon=50.0, run_dir=directory).guarantee.epsilon
    assert spent > 40
    with pytest.raises(BadInputError, match=r"noise_multiplier is .* began with"):
        fit(**arguments(**loud | {"steps": 21}), epsilon=1.0, run_dir=directory)
    directory.close()


def test_checkpoints_hold_the_terms_and_are_sealed(tmp_path):
    directory = RunDirectory(tmp_path / "run", {}, None)
    fit(**arguments(steps=2), run_dir=directory, checkpoint_every=1)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    file = tmp_path / "run" / "checkpoints" / "1" / "progress" / "metadata"
    progress = json.loads(file.read_text())
    assert progress["terms"]["mechanism"]["noise_multiplier"] == SIGMA
    assert progress["terms"]["steps"] == 2
    progress["terms"]["mechanism"]["noise_multiplier"] = 30.0
    file.write_text(json.dumps(progress))
    with pytest.raises(BadInputError, match="was changed after it was written"):
        fit(**arguments(steps=2), run_dir=directory)
    directory.close()


def test_an_edited_config_is_refused(tmp_path):
    directory = RunDirectory(tmp_path / "run", {}, None, {"noise_multiplier": 0.97})
    fit(**arguments(), run_dir=directory)
    directory.close()
    file = tmp_path / "run" / "config.yaml"
    whole = file.read_text()
    for old, new in (("0.97", "30.0"), (f"noise_multiplier: {SIGMA}", "noise_multiplier: 30.0")):
        assert old in whole
        file.write_text(whole.replace(old, new))
        with pytest.raises(BadInputError, match=r"config\.yaml was changed after the run began"):
            RunDirectory(tmp_path / "run", {}, None, {"noise_multiplier": 0.97})
    content = yaml.safe_load(whole)
    content.pop("seal")
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(BadInputError, match="was changed after the run began"):
        RunDirectory(tmp_path / "run", {}, None, {"noise_multiplier": 0.97})
    file.write_text(whole)
    RunDirectory(tmp_path / "run", {}, None, {"noise_multiplier": 0.97}).close()


def test_computations_are_told_apart_by_operations_constants_and_gradients():
    def digest(function):
        return computation_digest(jax.value_and_grad(function), jnp.ones(3))

    def scaled(constant):
        return lambda x: jnp.sum(jnp.asarray(constant) * jax.nn.relu(x))

    def with_rule(factor):
        fresh = jax.custom_jvp(lambda x: jnp.sum(x))
        fresh.defjvp(lambda x, t: (jnp.sum(x[0]), factor * jnp.sum(t[0])))
        return fresh

    def within(constant, depth=1):
        """The array belongs to a compiled function, which lies in others."""
        inner = jax.jit(lambda x: jnp.asarray(constant) * jnp.tanh(x))
        for _ in range(depth):
            inner = jax.jit(lambda x, f=inner: jax.lax.cond(x[0] > 0, f, jnp.sin, x))
        return lambda x: jnp.sum(inner(x))

    def drawn(seed):
        key = jax.random.key(seed)
        inner = jax.jit(lambda x: jax.random.normal(key, (3,)) * x)
        return lambda x: jnp.sum(inner(x))

    one, two = np.arange(3.0), np.array([0.0, 1.0, 3.0])
    assert digest(scaled(one)) == digest(scaled(one.copy()))
    assert digest(within(one)) == digest(within(one.copy()))
    for other in (within, lambda c: within(c, 2), lambda c: drawn(int(c.sum()))):
        assert digest(other(one)) != digest(other(two))
    found = [digest(f) for f in (scaled(one), scaled(two), with_rule(1.0), with_rule(2.0))]
    assert len(set(found)) == 4


@pytest.mark.slow
def test_frozen_parameters_are_part_of_a_run(tmp_path):
    """Else a second try of a step would add the same noise to another gradient."""

    def loss(params, example):
        return jnp.vdot(params["w"] * params["frozen"], example["x"])

    given = arguments(loss_fn=loss, steps=2, trainable=lambda name: name == "w")
    first = {"w": jnp.zeros(4), "frozen": jnp.ones(4)}
    directory = RunDirectory(tmp_path / "run", {}, None)
    fit(**given | {"params": first}, run_dir=directory, checkpoint_every=1)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    with pytest.raises(BadInputError, match="parameters that are not trained are not what"):
        fit(**given | {"params": first | {"frozen": jnp.full(4, 2.0)}}, run_dir=directory)
    assert fit(**given | {"params": first}, run_dir=directory).steps == 2
    directory.close()


@pytest.mark.slow
def test_on_other_hardware_another_computation_draws_anew(tmp_path):
    """A loss may trace to something else there; what was drawn before must not meet it."""
    directory = RunDirectory(tmp_path / "run", {}, None)
    whole = fit(**arguments(steps=2), run_dir=directory, checkpoint_every=1)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    same = fit(**arguments(steps=2), run_dir=directory, checkpoint_every=1, mesh=one)
    np.testing.assert_allclose(same.params["w"], whole.params["w"], rtol=1e-5)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    two = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    other = arguments(steps=2, loss_fn=lambda p, e: 1.0 * loss_fn(p, e) + 0.0)
    moved = fit(**other, run_dir=directory, checkpoint_every=1, mesh=two)
    # The same gradient, of other operations: the second step's noise is another one.
    assert np.abs(np.asarray(moved.params["w"]) - np.asarray(whole.params["w"])).min() > 1e-6
    directory.close()


def test_on_other_hardware_nothing_but_the_computation_may_be_another():
    names = ("computation", "data", "frozen", "plan", "execution", "steps")
    began = dict.fromkeys(names, "one")
    refuse_other(began, began | {"computation": "another"}, "the run", moved=True)
    for name in names[1:]:
        with pytest.raises(BadInputError, match="start another run"):
            refuse_other(began, began | {name: "another"}, "the run", moved=True)


def test_arrays_of_a_checkpoint_are_sealed(tmp_path):
    """Parameters of another run, put into this one's folder, would be stated as private."""
    for name in ("private", "public"):
        directory = RunDirectory(tmp_path / name, {}, None)
        changes = {} if name == "private" else {"mechanism": non_private(batch_size=USERS)}
        fit(**arguments(steps=2, **changes), run_dir=directory, checkpoint_every=1)
        directory.close()
    shutil.rmtree(tmp_path / "private" / "checkpoints" / "2")
    state = tmp_path / "private" / "checkpoints" / "1" / "state"
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "public" / "checkpoints" / "1" / "state", state)
    directory = RunDirectory(tmp_path / "private", {}, None)
    with pytest.raises(BadInputError, match="was changed after it was written"):
        fit(**arguments(steps=2), run_dir=directory)
    directory.close()


@pytest.mark.slow
def test_strategies_and_layouts_share_no_noise_under_one_secret_key():
    """They round differently, and a rounding allowance is a multiple of the clipped sum."""
    key = RootKey.generate()
    first = noise_of(key)
    for options in ({"strategy": "scan"}, {"microbatch_size": 2}, {"group_buckets": True}):
        other = noise_of(key, **options)
        assert np.abs(first - other).min() > 1e-4, options


def test_a_public_seed_cannot_be_made_secret_afterwards(tmp_path):
    RunDirectory(tmp_path / "run", {}, RootKey.from_seed(3)).close()
    file = tmp_path / "run" / "private" / "root_key.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"public": False}))
    with pytest.raises(BadInputError, match="was changed after the run began"):
        RunDirectory(tmp_path / "run", {}, RootKey.from_seed(3))


def test_losses_that_call_back_into_python_are_refused():
    def loss(params, example):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.pure_callback(lambda x: x, shape, loss_fn(params, example))

    loss = jax.custom_jvp(loss)
    loss.defjvp(lambda p, t: (loss(*p), loss_fn(t[0], p[1])))
    with pytest.raises(BadInputError, match=r"calls into Python \(pure_callback\)"):
        fit(**arguments(loss_fn=loss), key=RootKey.generate())


def test_losses_with_a_rule_for_vmap_are_refused():
    """What is trained is the rule, which nothing that is traced tells."""
    fresh = jax.custom_batching.custom_vmap(lambda x: x)
    fresh.def_vmap(lambda size, batched, x: (3.0 * x, True))
    loss = jax.jit(lambda p, e: loss_fn(p, {"x": fresh(e["x"])}))
    with pytest.raises(BadInputError, match=r"custom rule for vmap \(custom_vmap_call\)"):
        fit(**arguments(loss_fn=loss), key=RootKey.generate())


def test_losses_with_a_primitive_of_another_rule_for_vmap_are_refused():
    """Of four equal units a check sees nothing of a rule that looks at all of them."""
    mixing = Primitive("mixing")
    mixing.def_abstract_eval(lambda x: x)

    def rule(args, dims):
        return jnp.where(jnp.any(jnp.abs(args[0]) > 50), -args[0], args[0]), dims[0]

    batching.primitive_batchers[mixing] = rule

    def of_a_kernel(x):
        kernel = jax.ffi.ffi_call("kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))
        return kernel(x)

    for function, what in ((mixing.bind, "vmap (mixing)"), (of_a_kernel, "JAX (ffi_call)")):
        program = jax.make_jaxpr(lambda x, f=function: jax.jit(f)(x).sum())(jnp.ones(3))
        with pytest.raises(BadInputError, match=re.escape(what)):
            refuse_opaque(program, "the loss")
    refuse_opaque(jax.make_jaxpr(lambda x: jnp.sort(jnp.linalg.inv(x)))(jnp.eye(3)), "the loss")


@pytest.mark.slow
def test_a_run_that_moves_and_draws_anew_is_charged_again(tmp_path):
    """Else a copy of its directory would be another run that nobody pays for."""
    charged = []
    directory = RunDirectory(tmp_path / "run", {}, None)

    def train(**changes):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "2", ignore_errors=True)
        fit(**arguments(steps=2) | changes, run_dir=directory, checkpoint_every=1,
            charge=charged.append)  # fmt: skip

    one, two = (jax.sharding.Mesh(np.array(jax.devices()[:n]), ("data",)) for n in (1, 2))
    train()
    train(mesh=one)
    train(mesh=two, loss_fn=lambda p, e: 1.0 * loss_fn(p, e) + 0.0)
    directory.close()
    assert charged[0] == charged[1]
    assert charged[2] != charged[1]


def test_damaged_files_of_a_run_are_named(tmp_path):
    for name in ("config.yaml", "report.json"):
        for content in ("", "[1]", "{"):
            RunDirectory(tmp_path / "run", {}, None).close()
            (tmp_path / "run" / name).write_text(content)
            with pytest.raises(BadInputError, match=rf"{name} is damaged"):
                RunDirectory(tmp_path / "run", {}, None)
            shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize("offsets", [[0, 4, 0, 4], [0.0, 4.0], [-1, 4]])
def test_users_who_share_examples_are_refused(offsets):
    class Store:
        user_offsets = np.array(offsets)

        def read(self, positions):
            return {"x": np.zeros((len(positions), 4), np.float32)}

    with pytest.raises(BadInputError, match="user_offsets"):
        fit(**arguments(data=Store()))


def test_a_terminal_and_a_notebook_tell_the_same(monkeypatch):
    """JAX prints programs in colour there: keys and what a resume is held against must not."""
    from jax._src import pretty_printer

    told = set()
    for coloured in (False, True):
        monkeypatch.setattr(pretty_printer, "CAN_USE_COLOR", coloured)
        jax.clear_caches()
        told.add(computation_digest(lambda x: jnp.log1p(jnp.exp(x)).sum(), jnp.ones(3)))
    assert len(told) == 1
