"""Before the first step, a run's sum on its mesh is held against itself and one device's."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit
from jax._src import compiler
from jax._src.lib.mlir import ir
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import check as bench
from dpfl_jax.clipping import Adaptive, Flat, Normalized, PerLayer, SelfCheckError
from dpfl_jax.clipping.rules import OwnBound
from dpfl_jax.data import ArrayStore, Schema
from dpfl_jax.data.schema import Field
from dpfl_jax.experimental import individual
from dpfl_jax.mechanisms import els, participation, uls
from dpfl_jax.mechanisms.plan import sum_check
from dpfl_jax.mechanisms.plan.batches import training_pipeline
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import make_mesh, parameter_shardings, place, replicated
from dpfl_jax.randomness import RootKey
from dpfl_jax.training import central

GROUP = 3
MECHANISM = uls(group_size=GROUP, cohort_size=4.0, clip_norm=0.1)
SAMPLER = MECHANISM.sampler(np.arange(6), RootKey.from_seed(0))


def store(examples, size=4, scale=1.0, alike=False):
    rng = np.random.default_rng(0)
    first = rng.normal(size=(max(examples), size))
    users = (
        (f"u{u}", {"x": (scale * (first if alike else rng.normal(size=(n, size)))).astype("f4")})
        for u, n in enumerate(examples)
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


def norms_of_one_parameter(total, stats, units, mask):
    return total, dataclasses.replace(stats, leaf_norms=stats.leaf_norms.at[1].multiply(0.5))


def shared(total, stats, units, mask):
    """Several units together count as one."""
    return jax.tree.map(lambda x: x / jnp.maximum(mask.sum(), 1), total), stats


@pytest.fixture
def too_large(monkeypatch):
    """Parameters that no single device could hold."""
    monkeypatch.setattr(sum_check.Reference, "on_one_device", lambda *_: None)


@pytest.mark.slow
def test_a_right_sum_passes_with_or_without_one_device(monkeypatch):
    found = check()
    assert found.on_one_device
    assert found.max_relative_error < 1e-5
    assert check(group_buckets=True).on_one_device
    assert check(examples=[1]).on_one_device  # the same unit everywhere
    assert check(examples=[0, 0, 0, 0, 0, 0, 2]).on_one_device  # the first users hold nothing
    monkeypatch.setattr(sum_check.Reference, "on_one_device", lambda *_: None)
    check(fsdp=2, tensor=2)
    found = check()
    assert not found.on_one_device
    assert found.max_relative_error < 1e-5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (mixed, "units mix: .* at parameter 'a'"),
        (scaled(1.01), "not that of one device"),
        (scaled(np.nan), "not that of one device"),
        (norms_halved, "norms in the sum of several units are not those of one device"),
        (norms_of_one_parameter, "norms of the gradients of parameter 'b' in the sum of several"),
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
        (scaled(1.01), "the sum of several units is not that of plain gradients"),
        (shared, "the sum of several units is not that of plain gradients"),
        (norms_halved, "norms in the sum of several units are not those of plain gradients"),
        (norms_of_one_parameter, "norms of the gradients of parameter 'b'"),
    ],
)
def test_the_same_is_seen_where_no_device_holds_all_parameters(too_large, change, says):
    with pytest.raises(SelfCheckError, match=says):
        check(change)


def test_a_clip_rule_that_gives_more_than_it_says_is_seen(monkeypatch):
    """The plain gradients are clipped by the same rule."""
    right = Flat.leaf_weights

    def doubled(*args):
        reported, weights = right(*args)
        return reported, [2.0 * w for w in weights]

    monkeypatch.setattr(Flat, "leaf_weights", doubled)
    compiled.cache_clear()
    with pytest.raises(SelfCheckError, match=r"a single unit adds 0.2 to it, but .* allows 0.1"):
        check()
    compiled.cache_clear()


def test_a_wrong_cut_of_a_users_examples_is_seen(monkeypatch):
    """``examples_at_once`` divides a user's pieces by the count of all the user's examples."""
    right = participation.pieces_of_unit

    def of_each_piece(*args, **options):
        pieces = right(*args, **options)
        return {**pieces, "count": pieces["mask"].sum(axis=1)}

    monkeypatch.setattr(participation, "pieces_of_unit", of_each_piece)
    mesh = make_mesh()
    total = jax.jit(clipped_sum_over_microbatches(MECHANISM, loss, mesh, examples_at_once=1))
    pipeline = training_pipeline(SAMPLER, store([1, 2, 3]), mesh, 2)
    params, nothing = place(parameters(1e-4), replicated(mesh)), {"a": None, "b": None}
    given = (total, MECHANISM, loss, params, nothing, pipeline, GROUP)
    with pytest.raises(SelfCheckError, match="sum of several units is not that of one device"):
        sum_check.check_sum(*given)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["uls lora 1 example at once", "uls packed, 4 rows of 64"])
def test_the_check_takes_no_more_memory_than_the_step(case):
    _, settings, packed = next(row for row in bench.CASES if row[0] == case)
    found = bench.measure([*settings, "model.size=tiny"], packed)
    assert found["check"] <= found["step"]


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
    ).on_one_device


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """JAX keeps programs, also small ones; the checks that ran."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    reset_cache()
    ran, run_all = [], sum_check._Check.run_all
    monkeypatch.setattr(sum_check._Check, "run_all", lambda c: ran.append(c) or run_all(c))
    yield ran
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def check_program(
    loss=loss, mechanism=MECHANISM, examples=(1, 2, 3), b=0.5, scale=1.0, alike=False
):
    mesh = make_mesh(devices=jax.devices()[:1])
    total = jax.jit(clipped_sum_over_microbatches(mechanism, loss, mesh))
    pipeline = training_pipeline(SAMPLER, store(examples, scale=scale, alike=alike), mesh, 2)
    params, nothing = place(parameters(b), replicated(mesh)), {"a": None, "b": None}
    return sum_check.check_sum(total, mechanism, loss, params, nothing, pipeline, GROUP)


NORMALIZED = uls(group_size=GROUP, cohort_size=4.0, clip=Normalized(1.0))


def nearly_of_b(params, example):
    """Its gradient is nearly all that of ``b``, if ``b`` is small."""
    return jnp.sum((jnp.tanh(example["x"] @ params["a"]) @ params["b"] - 1) ** 2)


@pytest.mark.slow
def test_a_program_that_was_right_is_not_run_again_and_another_is(kept, monkeypatch, tmp_path):
    factor = np.float32(1.0)

    def scaled_loss(params, example):  # its constant is captured
        return factor * loss(params, example)

    for _ in range(2):  # compiled, then loaded for the first time
        assert check_program(scaled_loss) is not None
    assert check_program(scaled_loss, b=0.6) is None  # whatever the parameters
    factor = np.float32(2.0)
    assert check_program(scaled_loss) is not None
    other = uls(group_size=GROUP, cohort_size=4.0, clip_norm=0.2)
    assert check_program(mechanism=other) is not None
    monkeypatch.setattr(sum_check.platform, "node", lambda: "another machine")
    assert check_program(scaled_loss) is not None
    assert check_program(scaled_loss) is None
    fast = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", not fast)
    try:
        assert check_program(scaled_loss) is not None  # other machine code of the same program
    finally:
        jax.config.update("jax_disable_most_optimizations", fast)
    for program in tmp_path.glob("jit_*"):
        program.unlink()
    assert check_program(scaled_loss) is not None  # it is not kept any more
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert check_program(scaled_loss) is not None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shown",
    [
        {"scale": 0.0},
        {"b": 1e-4},
        {"examples": (1, 1, 1)},
        {"examples": (3,)},
        {"alike": True},
        {"mechanism": NORMALIZED, "scale": 0.1},
    ],
    ids=[
        *("no gradients", "none is clipped", "one example each", "one unit", "copies of a unit"),
        "all are divided and none is clipped",
    ],
)
def test_data_that_would_show_no_fault_are_not_enough_to_remember(kept, shown):
    for _ in range(3):
        assert check_program(**shown) is not None
    # Now on data that would have shown a fault.
    mechanism = shown.get("mechanism", MECHANISM)
    assert check_program(mechanism=mechanism, scale=5.0) is not None
    assert check_program(mechanism=mechanism, scale=5.0) is None


@pytest.fixture
def compiled_wrong(monkeypatch):
    """Changes what is compiled of a sum, unseen by JAX's key of it: a function of its StableHLO."""

    @contextlib.contextmanager
    def changed(change):
        right = compiler.backend_compile_and_load

        def compiled(backend, module, *args, **options):
            text = str(module)
            if "@jit_total" in text:
                assert change(text) != text
                with module.context:
                    module = ir.Module.parse(change(text))
            return right(backend, module, *args, **options)

        with monkeypatch.context() as wrong:
            wrong.setattr(compiler, "backend_compile_and_load", compiled)
            jax.clear_caches()
            yield
        jax.clear_caches()

    return changed


def other_clip_norm(text):
    return text.replace("dense<1.000000e-01>", "dense<2.000000e-01>")


def five_times_a(text):
    """The program that returns five times the sum of the gradients of ``a``."""
    body = re.search(r"func.func public @main.*?\n(\s+)return (%\S+?),", text, re.S)
    of_a = "tensor<4x6xf32>"
    lines = (
        f"%five = stablehlo.constant dense<5.0> : {of_a}",
        (f"%times = stablehlo.multiply {body[2]}, %five : {of_a}"),
    )
    changed = "".join(f"{body[1]}{line}\n" for line in lines) + f"{body[1]}return %times,"
    return text[: body.start(1)] + changed + text[body.end() :]


@pytest.mark.slow
def test_other_data_of_the_same_program_are_checked(kept):
    """They may fill places that the first data left empty."""
    check_program(examples=(1, 2, 2, 1, 3))  # compiled
    for examples in ((1, 2, 2, 1, 3), (1, 2, 3, 3, 3)):
        assert check_program(examples=examples) is not None
        assert check_program(examples=examples) is None


@pytest.mark.slow
def test_a_frozen_parameter_of_zeros_shows_nothing_and_is_not_remembered(kept):
    def shifted(params, example):
        return jnp.sum(jnp.tanh(example["x"] @ params["a"]) @ params["b"] + params["c"]) ** 2

    def check(c):
        mesh = make_mesh(devices=jax.devices()[:1])
        options = {"trainable": lambda name: name != "c"}
        total = jax.jit(clipped_sum_over_microbatches(MECHANISM, shifted, mesh, **options))
        pipeline = training_pipeline(SAMPLER, store((1, 2, 3)), mesh, 2)
        trained, frozen = {**parameters(), "c": None}, {"a": None, "b": None, "c": c}
        given = (place(x, replicated(mesh)) for x in (trained, frozen))
        return sum_check.check_sum(total, MECHANISM, shifted, *given, pipeline, GROUP, **options)

    for _ in range(3):
        assert check(np.zeros(2, "f4")) is not None
    assert check(np.ones(2, "f4")) is not None
    assert check(np.ones(2, "f4")) is None


@pytest.mark.slow
def test_an_error_that_is_lost_in_the_tolerance_is_not_remembered(kept, compiled_wrong):
    with compiled_wrong(five_times_a):
        for _ in range(3):
            assert check_program(nearly_of_b, b=1e-5) is not None
        with pytest.raises(SelfCheckError, match="parameter 'a'"):
            check_program(nearly_of_b)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["as before", "another", "a kill"])
def test_a_program_that_was_compiled_anew_is_checked_anew(
    kept, compiled_wrong, monkeypatch, tmp_path, setting
):
    """Whatever was remembered of the one in its place: under other settings, and after a kill."""
    for node in ("one", "another"):
        monkeypatch.setattr(sum_check.platform, "node", lambda node=node: node)
        for _ in range(2):
            check_program()
        assert check_program() is None
    for program in tmp_path.glob("jit_total*"):  # as JAX removes the oldest
        program.unlink()
    with compiled_wrong(other_clip_norm):
        with monkeypatch.context() as killed:
            if setting == "a kill":  # before it is checked
                killed.delattr(sum_check._Check, "run_all")
            with pytest.raises((SelfCheckError, AttributeError)):
                check_program()
        if setting == "another":
            monkeypatch.setattr(sum_check.platform, "node", lambda: "one")
        ran = len(kept)
        for _ in range(2):
            with pytest.raises(SelfCheckError):
                check_program()
    assert len(kept) == ran + 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "dead"),
    [(MECHANISM, True), (uls(group_size=GROUP, cohort_size=4.0, clip=PerLayer(0.1)), False)],
    ids=["a parameter without gradient", "a clip norm for each parameter"],
)
def test_what_one_unit_cannot_show_of_each_parameter_is_not_remembered(kept, mechanism, dead):
    def of_a_alone(params, example):
        return loss({"a": params["a"], "b": jax.lax.stop_gradient(params["b"])}, example)

    for _ in range(3):
        assert check_program(of_a_alone if dead else loss, mechanism) is not None


@pytest.mark.slow
def test_a_wrong_sum_and_a_folder_in_the_files_place_are_not_remembered(
    kept, monkeypatch, tmp_path
):
    right = Flat.leaf_weights

    def doubled(*args):
        reported, weights = right(*args)
        return reported, [2.0 * w for w in weights]

    monkeypatch.setattr(Flat, "leaf_weights", doubled)
    for _ in range(2):
        with pytest.raises(SelfCheckError):
            check_program()
    monkeypatch.setattr(Flat, "leaf_weights", right)
    assert not list(tmp_path.glob("passed-*"))
    for _ in range(2):
        assert check_program() is not None
    (file,) = tmp_path.glob("passed-*")
    file.unlink()
    file.mkdir()
    assert check_program() is not None


def test_an_adapting_clip_norm_is_tried_at_another_value(monkeypatch):
    """Its first value, 1, hides a sum that is divided by it once too often."""
    mechanism = uls(group_size=GROUP, cohort_size=4.0, clip=Adaptive(clip_norm=1.0))
    mesh = make_mesh(devices=jax.devices()[:1])
    total = jax.jit(clipped_sum_over_microbatches(mechanism, loss, mesh))

    def divided(*given):
        summed, stats = total(*given)
        return jax.tree.map(lambda x: x / given[-1], summed), stats

    pipeline = training_pipeline(SAMPLER, store([1, 2, 3]), mesh, 2)
    params, nothing = place(parameters(), replicated(mesh)), {"a": None, "b": None}
    given = (mechanism, loss, params, nothing, pipeline, GROUP)
    assert sum_check.check_sum(total, *given).max_relative_error < 1e-4
    with pytest.raises(SelfCheckError, match="the sum of a single unit is not that of one device"):
        sum_check.check_sum(divided, *given)


def test_the_user_with_most_examples_is_among_those_that_are_looked_at(monkeypatch):
    """The first four have one example each, with which a wrong count is not seen."""
    right = participation.pieces_of_unit

    def of_each_piece(*args, **options):
        pieces = right(*args, **options)
        return {**pieces, "count": pieces["mask"].sum(axis=1)}

    monkeypatch.setattr(participation, "pieces_of_unit", of_each_piece)
    mesh = make_mesh(devices=jax.devices()[:1])
    total = jax.jit(clipped_sum_over_microbatches(MECHANISM, loss, mesh, examples_at_once=1))
    pipeline = training_pipeline(SAMPLER, store([1, 1, 1, 1, 1, 3]), mesh, 2)
    params, nothing = place(parameters(1e-4), replicated(mesh)), {"a": None, "b": None}
    with pytest.raises(SelfCheckError, match="sum of several units is not that of one device"):
        sum_check.check_sum(total, MECHANISM, loss, params, nothing, pipeline, GROUP)


def test_a_rule_that_ignores_a_units_own_bound_is_seen(monkeypatch):
    """The plain gradients are clipped by the same rule, but a unit's bound is known."""
    weights = OwnBound.weights

    def ignored(self, norms, bound=None):
        return weights(self, norms, jnp.full_like(bound, self.clip_norm))

    monkeypatch.setattr(OwnBound, "weights", ignored)
    mechanism = individual(group_size=GROUP, cohort_size=2.0, refresh=10, clip_norm=0.1)
    mesh = make_mesh(devices=jax.devices()[:1])
    total = jax.jit(clipped_sum_over_microbatches(mechanism, loss, mesh))
    sampler = mechanism.sampler(np.arange(4), RootKey.from_seed(0))
    pipeline = training_pipeline(sampler, store([1, 2, 3]), mesh, 2)
    pipeline = dataclasses.replace(pipeline, per_unit=np.float32([0.05, 0.1, 0.1]))
    params, nothing = place(parameters(), replicated(mesh)), {"a": None, "b": None}
    given = (total, mechanism, loss, params, nothing, pipeline, GROUP)
    with pytest.raises(SelfCheckError, match=r"single unit adds 0.1 to it, .* allows 0.05"):
        sum_check.check_sum(*given)


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
