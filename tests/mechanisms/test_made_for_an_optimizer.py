"""Noise made for an optimiser, from YAML and in plans, and what it does to the last parameters."""

import json
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from neighbours import people
from noising import banded_matrix, buffered_matrix, inverse_banded_matrix
from rich.console import Console

from dpfl_jax import Hooks, LoopConfig, fit
from dpfl_jax.cli.main import main
from dpfl_jax.config import load_config
from dpfl_jax.config.schema import OptimizerConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.matrices import PREFIX_SUMS, banded_strategy, inverse_strategy
from dpfl_jax.mechanisms import banded_inverse, bandmf, blt, uls
from dpfl_jax.noise import workload_of
from dpfl_jax.randomness import RootKey
from dpfl_jax.training.central_run import prepare
from dpfl_jax.training.optimizers import make_optimizer

STEPS = 12
KINDS = {
    "bandmf": (bandmf, {"bands": 3}, lambda m: banded_matrix(m.noise.chosen, STEPS)),
    "blt": (blt, {}, lambda m: buffered_matrix(m.noise.chosen, STEPS)),
    "banded_inverse": (banded_inverse, {}, lambda m: inverse_banded_matrix(m.noise.chosen, STEPS)),
}


def optimizer_of(steps=STEPS, schedule="linear"):
    options = {"momentum": 0.9}
    section = OptimizerConfig(name="sgd", learning_rate=0.5, schedule=schedule, options=options)
    return make_optimizer(section, steps)


def nothing(params, example):
    """A loss without a gradient: parameters move by noise alone."""
    return 0.0 * jnp.sum(params["w"]) + 0.0 * jnp.sum(example["x"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_noise_of_the_last_parameters_is_what_is_foretold(kind):
    """Their variance over 40,000 coordinates, within 5 standard errors: by luck 6e-7 of the time.

    Foretold by dense matrices: parameters are - sum over s of rate_s times the sum over i <= s of
    .9^(s - i) x_i, with x = C sigma / M times K^-1 Z.
    """
    cls, more, matrix = KINDS[kind]
    mechanism = cls(group_size=1, cohort_size=20, clip_norm=0.5, **more)
    plan = mechanism.plan(
        people(60), steps=STEPS, noise_multiplier=1.5, delta=1e-5, optimizer=optimizer_of()
    )
    plain = mechanism.plan(people(60), steps=STEPS, noise_multiplier=1.0, delta=1e-5)
    assert plan.mechanism != plain.mechanism
    size, key = 40_000, RootKey.from_seed(1)
    found = fit(nothing, {"w": jnp.zeros(size)}, plan, optimizer_of(), key=key).params["w"]
    rates = 0.5 * (1 - np.arange(STEPS) / STEPS)
    memory = np.tril(0.9 ** np.maximum(np.subtract.outer(np.arange(STEPS), np.arange(STEPS)), 0))
    last = rates @ memory @ np.linalg.inv(matrix(plan.mechanism))
    wanted = (0.5 * 1.5 / 20) ** 2 * (last @ last)
    assert np.mean(np.square(found)) == pytest.approx(wanted, rel=5 * math.sqrt(2 / size))


def test_a_plan_has_the_noise_of_its_optimiser_and_others_have_that_of_sums():
    made = banded_inverse(group_size=1, cohort_size=20)
    data = people(60)

    def taken(**given):
        plan = made.plan(data, steps=STEPS, noise_multiplier=1.0, delta=1e-5, **given)
        return plan.mechanism.noise.fractions

    plain = inverse_strategy(3, STEPS, 3)
    own = inverse_strategy(3, STEPS, 3, workload_of(optimizer_of(), STEPS))
    assert own != plain
    assert taken(optimizer=optimizer_of()) == own
    for other in ({}, {"optimizer": optax.adam(0.1)}, {"optimizer": optax.sgd(0.1)}):
        assert taken(**other) == plain
    # A strategy that is given stays; independent noise has none.
    given = bandmf(group_size=1, cohort_size=10, bands=2, column=(1.0, 0.5))
    plan = given.plan(data, steps=STEPS, noise_multiplier=1.0, delta=1e-5, optimizer=optimizer_of())
    assert plan.mechanism == given
    plain = uls(group_size=1, cohort_size=10)
    plan = plain.plan(data, steps=STEPS, noise_multiplier=1.0, delta=1e-5, optimizer=optimizer_of())
    assert plan.mechanism == plain
    with pytest.raises(BadInputError, match="optimizer"):
        plain.plan(data, steps=STEPS, noise_multiplier=1.0, delta=1e-5, optimizer="sgd")


def test_the_strategy_is_in_what_a_plan_states_and_epsilon_is_what_was_asked_for():
    made = blt(group_size=1, cohort_size=20)
    data = people(60)
    plans = [
        made.plan(data, steps=STEPS, epsilon=3.0, delta=1e-5, optimizer=optimizer)
        for optimizer in (None, optimizer_of())
    ]
    assert plans[0].digest != plans[1].digest
    assert plans[1].stated["mechanism"]["decays"] == list(plans[1].mechanism.noise.decays)
    for plan in plans:
        assert 2.99 < plan.guarantee().epsilon <= 3.0


@pytest.mark.slow
def test_a_run_goes_on_with_its_schedule_alone(tmp_path):
    """Another schedule is another strategy, and another computation: both are refused."""
    data, params = people(60), {"w": jnp.zeros(4)}
    made = bandmf(group_size=1, cohort_size=15, bands=3)

    def go_on(optimizer, planned, hooks=None):
        plan = made.plan(data, steps=STEPS, epsilon=3.0, delta=1e-3, optimizer=planned)
        loop = LoopConfig(checkpoint_every=4)
        return fit(nothing, params, plan, optimizer, run_dir=tmp_path, loop=loop, hooks=hooks)

    def die(row):
        if row["step"] == 6:
            raise KeyError

    with pytest.raises(KeyError):
        go_on(optimizer_of(), optimizer_of(), Hooks(on_step=die))
    other = optimizer_of(schedule="cosine")
    for optimizer, planned in ((other, other), (other, optimizer_of()), (optimizer_of(), None)):
        with pytest.raises(BadInputError):
            go_on(optimizer, planned)
    assert go_on(optimizer_of(), optimizer_of()).steps == STEPS


CONFIG = {
    "data": {
        "source": "python_source", "seq_len": 16, "max_users": 30, "max_examples_per_user": 2,
        "validation_fraction": 0.0, "test_fraction": 0.0,
    },
    "model": {"size": "tiny", "overrides": {"num_layers": 1, "embed_dim": 16, "num_heads": 2}},
    "mechanism": {"kind": "bandmf", "group_size": 2, "cohort_size": 6, "bands": 3},
    "privacy": {"epsilon": 8.0, "delta": 1e-4},
    "train": {"steps": STEPS},
}  # fmt: skip


@pytest.mark.nightly
def test_a_file_need_not_say_twice_what_its_optimiser_is(tmp_path, capsys):
    """What trains, what --dry-run prices and what ``dpfl plan`` compares are of one workload."""
    own = {
        "name": "sgd", "learning_rate": 0.5, "schedule": "linear", "options": {"momentum": 0.9},
    }  # fmt: skip
    file = tmp_path / "own.yaml"
    for optimizer, workload in (
        (own, workload_of(optimizer_of(), STEPS)),
        ({"name": "adam", "schedule": "linear"}, PREFIX_SUMS),
    ):
        file.write_text(yaml.safe_dump(CONFIG | {"optimizer": optimizer}))
        ready = prepare(load_config(str(file)), Console(quiet=True))
        assert ready.mechanism.noise.column == banded_strategy(3, STEPS, workload)
        assert main(["train", str(file), "--dry-run", "--json"]) == 0
        told = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert told["noise_multiplier"] == ready.calibrated.noise_multiplier
