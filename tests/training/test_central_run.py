"""What is said of noise and signal before central training: measured, and what would do does."""

import io

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from dpfl_jax.config import validate_config
from dpfl_jax.mechanisms import blt, els, uls
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.pipeline import dry_run
from dpfl_jax.training.central_run import balance_of_steps, prepare
from tests.flower.studies import QUIET, write_tables
from tests.noised import noised

SWAMPED = {
    "name": "swamped",
    "data": {
        "source": "csv", "user_column": "person", "target_column": "sick", "classes": 2,
        "input_columns": ["age", "dose"], "scale": {"age": [50, 25], "dose": [1, 2]},
    },
    "model": {"kind": "mlp", "options": {"hidden": [60]}},
    "train": {"steps": 20},
}  # fmt: skip
MECHANISMS = {
    "uls": {"kind": "uls", "cohort_size": 1, "group_size": 2},
    "els": {"kind": "els", "batch_size": 1, "group_size": 3},
}


@pytest.mark.parametrize("clipping", ["flat", "normalized"])
def test_the_noise_of_a_step_is_as_large_as_it_is_said_to_be(clipping):
    """4,000 Gaussians: their norm is within 6 % (5 standard deviations) of what is expected."""
    mechanism = uls(cohort_size=8, group_size=2, clip_norm=0.5, clipping=clipping)
    made = noised(mechanism, 1.5)
    noise, zeros = made.noise_transform(), jnp.zeros(4000)
    state = noise.init(zeros)
    words = RootKey.from_seed(3).numpy("noise").integers(0, 2**32, 8, dtype=np.uint32)
    got, _ = noise.update(zeros, state, noise_key=jnp.asarray(words))
    balance = balance_of_steps(made, 4000)
    assert float(jnp.linalg.norm(got)) == pytest.approx(balance.noise, rel=0.06)
    assert balance.signal == mechanism.rule.sensitivity
    assert balance.ratio == pytest.approx(balance.noise / balance.signal / 3)
    assert "over all 9 steps" in str(balance)


def test_a_run_says_how_much_of_the_held_out_part_it_evaluates(tmp_path):
    write_tables(tmp_path)
    raw = {**SWAMPED, "mechanism": MECHANISMS["uls"], "privacy": {"epsilon": 8.0}}
    data = {**raw["data"], "path": str(tmp_path / "all.csv"), "validation_fraction": 0.3}
    raw["data"] = data
    whole = prepare(validate_config(raw), QUIET)
    part = prepare(validate_config({**raw, "eval": {"max_users": 3}}), QUIET)
    assert part.held_out.num_users == 3
    said = (
        f"evaluated: 3 users, {part.held_out.num_examples} examples, of {whole.held_out.num_users}"
    )
    assert any(line.startswith(said) for line in part.headline())
    assert not any("evaluated" in line for line in whole.headline())
    everybody = prepare(validate_config({**raw, "eval": {"max_users": 10**6}}), QUIET)
    assert not any("evaluated" in line for line in everybody.headline())


def test_noise_that_is_taken_back_is_not_judged():
    taken_back = blt(cohort_size=8, group_size=2)
    assert balance_of_steps(noised(taken_back, 1.5), 4000) is None
    assert balance_of_steps(noised(els(batch_size=8, group_size=2), 1.0), 10)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_what_is_advised_would_do(tmp_path, kind):
    write_tables(tmp_path)
    raw = {**SWAMPED, "mechanism": MECHANISMS[kind], "privacy": {"epsilon": 8.0}}
    raw["data"] = {**raw["data"], "path": str(tmp_path / "all.csv")}
    console = Console(width=1000, record=True, file=io.StringIO())
    assert dry_run(validate_config(raw), console)["noise_over_signal"]["over_a_run"] > 1
    line = next(x for x in console.export_text().splitlines() if "swamps" in x)
    advised = line.split("noise over signal then): ")[1].split(", ")
    assert len(advised) > 1
    for item in advised:
        key, value = item.split(" (")[0].split("=")
        section, name = key.split(".")
        kept = raw[section].get(name, 0)
        part = {**raw[section], name: type(kept)(float(value))}
        better = dry_run(validate_config({**raw, section: part}), QUIET)
        assert better["noise_over_signal"]["over_a_run"] <= 0.5
