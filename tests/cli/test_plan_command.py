"""``dpfl plan`` on statistics alone and on data, and its refusals."""

import json
import pathlib

import pytest
import yaml

from dpfl_jax.cli.main import main

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def plan(capsys, *arguments):
    assert main(["plan", *[str(a) for a in arguments], "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stackoverflow_uls", "ccnews_uls"])
def test_the_papers_settings_from_statistics_alone(capsys, tmp_path, name):
    png, out = tmp_path / "plan.png", tmp_path / "planned.yaml"
    found = plan(
        capsys, CONFIGS / "userlevel" / f"{name}.yaml", "--compute-budget", 1024,
        "--max-group-size", 4, "--png", png, "--out", out,
    )  # fmt: skip
    assert found["best"]["noise"] == min(o["noise"] for o in found["options"])
    assert found["literal_uls"]["noise"] >= found["heuristic_uls"]["noise"]
    assert png.stat().st_size > 1000
    written = yaml.safe_load(out.read_text())
    assert written["mechanism"]["kind"] == found["best"]["kind"] == "bandmf"
    assert written["mechanism"]["bands"] == found["best"]["bands"] > 1
    assert main(["train", str(out), "--dry-run", "--json"]) == 0
    price = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert price["noise_multiplier"] == pytest.approx(found["best"]["noise_multiplier"], rel=1e-6)


@pytest.mark.slow
def test_from_data(capsys):
    found = plan(
        capsys, CONFIGS / "quickstart.yaml", "data.max_users=300", "--compute-budget", 64,
        "--users", 16, "--target-noise", "0.05",
    )  # fmt: skip
    assert "median gradient norms" in found["sensitivities"]
    assert {o["kind"] for o in found["options"]} == {
        "els", "uls", "bandmf", "blt", "banded_inverse", "allocation"
    }  # fmt: skip
    assert "smallest_epsilon" in found["inverse"]


@pytest.mark.slow
def test_a_private_median_chooses_the_group_of_els(capsys, tmp_path):
    png = tmp_path / "heat.png"
    found = plan(
        capsys, CONFIGS / "quickstart.yaml", "data.max_users=300", "pretrain=null",
        "--compute-budget", 32, "--users", 8, "--private-median", 50, "--max-group-size", 4,
        "--overtake", 2, "--png", png,
    )  # fmt: skip
    # So large an epsilon finds the power of two of the exact median.
    exact = plan(
        capsys, CONFIGS / "quickstart.yaml", "data.max_users=300", "pretrain=null",
        "--compute-budget", 32, "--users", 8, "--max-group-size", 4,
    )  # fmt: skip
    private, plain = found["heuristic_els"]["group_size"], exact["heuristic_els"]["group_size"]
    assert 0.5 <= private / plain <= 2
    assert set(found["overtake"]) == {"examples_per_user", "users"}
    assert png.stat().st_size > 1000


@pytest.mark.parametrize(
    "arguments",
    [
        ["--compute-budget", "-3"],
        ["--compute-budget", "64", "--epsilon", "0"],
        ["--compute-budget", "64", "--decay", "7"],
        ["--compute-budget", "64", "--private-median", "1"],
        ["--compute-budget", "400000000"],
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments):
    config = str(CONFIGS / "userlevel" / "stackoverflow_uls.yaml")
    assert main(["plan", config, *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
