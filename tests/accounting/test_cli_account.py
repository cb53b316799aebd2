"""The command gives the numbers of the library, and refuses in one sentence."""

import json
import subprocess
import sys

import pytest

from dpfl_jax.accounting import epsilon
from dpfl_jax.cli.account import ROWS
from dpfl_jax.cli.main import main
from dpfl_jax.mechanisms import Population, bandmf, truncated

els = ["account", "els", "--delta", "1e-6", "--steps", "1000", "--group-size", "32"]
els += ["--sampling-prob", "0.001953125"]
VALUES = {
    "period": "20",
    "steps": "10",
    "sampling_prob": "0.05",
    "group_size": "3",
    "dataset_size": "1000",
    "batch_size": "50",
    "batch_cap": "90",
    "participation_prob": "0.5",
    "local_steps": "2",
}


def answer(capsys, arguments):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_noise_then_epsilon(capsys):
    first = answer(capsys, [*els, "--epsilon", "1"])
    assert first["noise_multiplier"] == pytest.approx(8.44425, rel=1e-3)
    keys = {"noise_multiplier", "epsilon", "delta", "steps", "accountant", "unit", "adjacency"}
    assert keys <= set(first)
    assert first["unit"] == "user"
    back = answer(capsys, [*els, "--noise-multiplier", str(first["noise_multiplier"])])
    assert 0.999 <= back["epsilon"] <= 1.0


@pytest.mark.nightly
def test_compare_and_plot(capsys, tmp_path):
    plot = tmp_path / "curve.png"
    found = answer(capsys, [*els, "--noise-multiplier", "8.5", "--compare", "--plot", str(plot)])
    assert plot.stat().st_size > 1000
    bounds = [row["epsilon"] for row in found["comparison"] if row["bound"]]
    assert min(bounds) == found["epsilon"]
    assert len(bounds) >= 5


def test_users_of_fewer_examples_spend_less(capsys):
    found = answer(capsys, [*els, "--noise-multiplier", "8.5", "--contributions", "32,1,4"])
    table = found["epsilon_by_contribution"]
    assert list(table) == ["1", "4", "32"]
    assert table["1"] < table["4"] < table["32"] == pytest.approx(found["epsilon"], rel=1e-9)


@pytest.mark.parametrize("missing", ["steps", "sampling_prob", "group_size"])
def test_other_parameters_are_solved(capsys, missing):
    arguments = ["account", "els", "--delta", "1e-6", "--epsilon", "2", "--noise-multiplier", "3"]
    for name in ("steps", "sampling_prob", "group_size"):
        if name != missing:
            arguments += [f"--{name.replace('_', '-')}", VALUES[name]]
    found = answer(capsys, arguments)
    assert found["solved_for"] == missing
    assert found["epsilon"] <= 2.0


@pytest.mark.parametrize("name", list(ROWS))
def test_every_mechanism_answers(capsys, name):
    arguments = ["account", name, "--delta", "1e-5", "--noise-multiplier", "6", "--compare"]
    for parameter in ROWS[name].parameters.values():
        if parameter.default is parameter.empty:
            arguments += [f"--{parameter.name.replace('_', '-')}", VALUES[parameter.name]]
    found = answer(capsys, arguments)
    assert 0 < found["epsilon"] < 100
    for row in found["comparison"]:
        if row["bound"]:
            assert row["epsilon"] == "inf" or row["epsilon"] >= found["epsilon"] * (1 - 1e-3)


@pytest.mark.parametrize(
    "arguments",
    [
        els,
        [*els, "--epsilon", "1", "--noise-multiplier", "2"],
        [*els, "--epsilon", "-1"],
        [*els, "--noise-multiplier", "1e-4"],
        ["account", "els", "--epsilon", "1"],
        [*els, "--noise-multiplier", "8.5", "--contributions", "33"],
        [*els, "--noise-multiplier", "8.5", "--contributions", "0,a"],
        ["account", "unheard-of"],
    ],
)
def test_bad_input_is_exit_code_2_and_one_line(capsys, arguments):
    assert main(arguments) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_correlated_noise_needs_no_jax_either():
    arguments = "--noise-multiplier=6 --delta=1e-5 --steps=10 --period=5 --sampling-prob=0.1"
    code = (
        "import sys; from dpfl_jax.cli.main import main; "
        f"assert main({['account', 'bandmf', *arguments.split()]}) == 0; "
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_an_account_is_that_of_the_mechanism(capsys):
    """Groups of users in turns, and a cap: of the same numbers a mechanism has the same epsilon."""
    population = Population(1000, 1000, 1000)
    common = ["--noise-multiplier", "2", "--delta", "1e-5", "--steps", "40"]
    for name, made, options in (
        ("bandmf", bandmf, "--sampling-prob 0.2 --period 4 --bands 4"),
        ("truncated-poisson", truncated, "--sampling-prob 0.05 --dataset-size 1000 --batch-cap 60"),
    ):
        more = {"cap": 60} if made is truncated else {}
        mechanism = made(group_size=1, cohort_size=50, **more)
        event = mechanism.calibrate(population, 40, noise_multiplier=2.0).event()
        found = answer(capsys, ["account", name, *common, *options.split()])
        assert found["epsilon"] == pytest.approx(epsilon(event, 1e-5), rel=1e-9)
