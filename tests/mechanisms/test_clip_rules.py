"""Every clip rule can be named in a configuration, trains, and is accounted as any other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit
from neighbours import people
from runs import went_on_bit_for_bit

from dpfl_jax.clipping import Adaptive, NoClip, PerGroup
from dpfl_jax.config.kinds import CENTRAL, CLIPS
from dpfl_jax.errors import BadInputError
from dpfl_jax.experimental import IndividualBudget, individual
from dpfl_jax.mechanisms import (
    Mechanism,
    NoNoise,
    OwnerSets,
    Users,
    UserUpdate,
    bandmf,
    uls,
)
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import make_mesh
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import RunDirectory

SIZES = {"group_size": 2, "cohort_size": 20}
RULES = {
    "flat": {"clip_norm": 0.5},
    "normalized": {"clip_norm": 0.5},
    "automatic": {"gamma": 0.1},
    "per_layer": {"clip_norm": 0.5},
    "per_group": {"clip_norms": {"w": 0.3, "*": 0.4}},
    "adaptive": {"clip_norm": 0.5, "quantile": 0.75},
}
PARAMS = {"w": jnp.zeros(4), "b": jnp.zeros(4)}


def loss_fn(params, example):
    return jnp.sum(params["w"] * example["x"]) + jnp.sum(params["b"] ** 2 - params["b"])


def run(kind, **given):
    mechanism = CENTRAL.parse({"kind": "uls", **SIZES, "clip": {"kind": kind, **RULES[kind]}})
    return fit(
        loss_fn=loss_fn, params=PARAMS, data=people(60), mechanism=mechanism, steps=4,
        epsilon=8.0, delta=1e-4, optimizer=optax.sgd(0.1), **given,
    )  # fmt: skip


def test_all_rules_are_tried_here():
    assert {*CLIPS.names()} - {"none"} == set(RULES)


@pytest.mark.parametrize("kind", RULES)
def test_a_section_is_the_rule_and_is_dumped_as_short_as_it_can_be(kind):
    clip = {"kind": kind, **RULES[kind]}
    made = CENTRAL.parse({"kind": "uls", **SIZES, "clip": clip})
    section = made.to_section()
    assert section["kind"] == "uls"
    assert ("clip" in section) == (kind in ("per_group", "adaptive", "automatic"))
    assert CENTRAL.parse(section) == made


@pytest.mark.parametrize("kind", RULES)
def test_what_it_costs_is_that_of_its_noise_multiplier(kind):
    """Noise is scaled to the rule's own sensitivity, so that epsilon is that of any other rule."""
    result = run(kind, key=RootKey.from_seed(0))
    assert result.steps == 4
    assert 7.9 < result.guarantee.epsilon <= 8.0
    assert result.guarantee.noise_multiplier == pytest.approx(
        run("flat", key=RootKey.from_seed(0)).guarantee.noise_multiplier
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.params))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 2, "fsdp": 4}])
@pytest.mark.parametrize("kind", RULES)
def test_a_unit_moves_what_is_noised_by_no_more_than_the_noise_is_scaled_to(kind, axes):
    """It is left out, and has other data, on eight devices; at another clip norm if it adapts."""
    mechanism = CENTRAL.parse({"kind": "uls", **SIZES, "clip": {"kind": kind, **RULES[kind]}})
    mesh = make_mesh(**axes)
    total = jax.jit(clipped_sum_over_microbatches(mechanism, loss_fn, mesh))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 16, 2, 4)).astype(np.float32)
    norms = (None,) if kind != "adaptive" else (None, jnp.float32(0.05), jnp.float32(20.0))
    for clip_norm in norms:
        sums = []
        for there, size in ((True, 1.0), (False, 1.0), (True, -300.0), (True, np.nan)):
            units = x.copy()
            units[0, 3] *= size
            mask = np.ones((1, 16), bool)
            mask[0, 3] = there
            examples = {"examples": {"x": units}, "mask": np.ones((1, 16, 2), bool)}
            one, _ = total(PARAMS, examples, mask, np.int32(1), None, clip_norm)
            sums.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(one)]))
        for some in (0, 2, 3):
            moved = np.linalg.norm(sums[some] - sums[1])
            assert moved <= mechanism.clip.sensitivity * (1 + 1e-5)
        assert np.linalg.norm(sums[2] - sums[1]) > 0.5 * mechanism.clip.sensitivity


@pytest.mark.slow
def test_a_clip_norm_that_adapts_follows_the_quantile_and_is_resumed(tmp_path, monkeypatch):
    clip = Adaptive(clip_norm=10.0, quantile=0.5, learning_rate=1.0, count_weight=1.0)
    given = functools.partial(
        fit, loss_fn=loss_fn, params=PARAMS, data=people(60), steps=12, epsilon=300.0, delta=1e-4,
        mechanism=uls(group_size=2, cohort_size=40, clip=clip), optimizer=optax.sgd(0.0),
    )  # fmt: skip

    def start(name):
        directory = RunDirectory(tmp_path / name, {}, RootKey.from_seed(1))
        try:
            return given(run_dir=directory, checkpoint_every=4)
        finally:
            directory.close()

    whole = went_on_bit_for_bit(tmp_path, monkeypatch, start)[0]
    rows = [row["outside_guarantee"] for row in whole.metrics if "eval" not in row]
    norms = [row["clip_norm"] for row in rows]
    assert norms[0] == 10.0
    assert norms[-1] < 5.0  # the units' norms are far below 10
    with pytest.raises(
        BadInputError, match=r"mechanism\.clip is adaptive: the clip norm of a step"
    ):
        uls(**SIZES, clip=clip).plan(people(60), steps=2, epsilon=1.0).clipped_grad(loss_fn)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bandmf(**SIZES, clip=Adaptive()), "proven for independent noise only"),
        (lambda: individual(**SIZES, clip=Adaptive()), "budgets bound the norm of the whole"),
        (lambda: individual(**SIZES, clip=PerGroup((("*", 1.0),))), "budgets bound the norm of"),
        (lambda: uls(**SIZES, clip=Adaptive(), clip_norm=2.0), "clip_norm or clipping are given"),
        (lambda: uls(**SIZES, clip="flat"), "clip is 'flat', but it must be one of adaptive"),
        (lambda: uls(**SIZES, clip=NoClip()), "noise hides only what is bounded"),
        (
            lambda: Mechanism(
                participation=Users(**SIZES),
                clip=NoClip(),
                noise=NoNoise(),
                update=UserUpdate(user_learning_rate=0.1),
            ),
            "user updates are clipped",
        ),
        (
            lambda: Mechanism(
                participation=OwnerSets(**SIZES, sets_per_user=2), budget=IndividualBudget()
            ).participation.unit_counts(np.arange(4)),
            "is owner_sets, which cannot have individual budgets",
        ),
    ],
)
def test_what_does_not_go_together_is_one_sentence(make, message):
    with pytest.raises(BadInputError, match=message):
        make()
