"""``dpfl plan`` on statistics alone and on data, and its refusals."""

import json
import pathlib
import types

import pytest
import yaml

from dpfl_jax.cli.main import main
from dpfl_jax.planning.figures import draw_heat_map
from dpfl_jax.planning.planner import Option

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def plan(capsys, *arguments):
    assert main(["plan", *[str(a) for a in arguments], "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["stackoverflow_uls", "ccnews_uls"])
def test_the_papers_settings_from_statistics_alone(capsys, tmp_path, name):
    png, out = tmp_path / "plan.png", tmp_path / "planned.yaml"
    found = plan(
        capsys, CONFIGS / "userlevel" / f"{name}.yaml", "--compute-budget", 1024,
        "--max-group-size", 4, "--png", png, "--out", out,
    )  # fmt: skip
    assert found["best"]["noise"] == min(o["noise"] for o in found["options"])
    assert found["doubling_as_printed"]["noise"] >= found["doubling"]["noise"]
    assert png.stat().st_size > 1000
    written = yaml.safe_load(out.read_text())
    assert written["mechanism"]["kind"] == found["best"]["kind"] == "bandmf"
    assert written["mechanism"]["bands"] == found["best"]["bands"] > 1
    assert main(["train", str(out), "--dry-run", "--json"]) == 0
    price = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert price["noise_multiplier"] == pytest.approx(found["best"]["noise_multiplier"], rel=1e-6)


@pytest.mark.nightly
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


@pytest.mark.nightly
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
    private, plain = found["median"]["group_size"], exact["median"]["group_size"]
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


@pytest.mark.nightly
def test_of_devices_it_counts_user_epochs_and_leaves_examples_out(capsys, tmp_path):
    """From statistics alone: no data are read."""
    out = tmp_path / "planned.yaml"
    local = {"user_learning_rate": 0.5, "user_batch_size": 2, "user_epochs": 3}
    mechanism = {"kind": "uls", "group_size": 2, "cohort_size": 32, **local}
    file = tmp_path / "devices.yaml"
    base = yaml.safe_load((CONFIGS / "userlevel" / "stackoverflow_uls.yaml").read_text())
    file.write_text(yaml.safe_dump(base | {"mechanism": mechanism}))
    found = plan(capsys, file, "--max-group-size", 2, "--out", out)
    assert found["budget"] == 64
    assert {o["kind"] for o in found["options"]} >= {"uls", "bandmf", "blt"}
    assert "els" not in {o["kind"] for o in found["options"]}
    assert found["median"] is None
    private, by_layer, devices = found["notes"]
    assert private.startswith("personal budgets are not priced")
    assert by_layer.startswith("mechanism.clipping=per_layer has the noise of these rows")
    assert "in 3 epochs" in devices
    assert "a round evaluates 192 gradients" in devices
    written = yaml.safe_load(out.read_text())["mechanism"]
    assert written["kind"] == found["best"]["kind"]
    assert {name: written[name] for name in local} == local
    flops = []
    for epochs in (1, 3):
        change = [f"mechanism.user_epochs={epochs}", "--dry-run", "--json"]
        assert main(["train", str(file), *change]) == 0
        flops.append(json.loads(capsys.readouterr().out.splitlines()[-1])["training_flops"])
    assert flops[1] == 3 * flops[0]


def test_the_picture_is_readable_and_has_the_recommended_row(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "dpfl_jax.planning.figures.save_figure", lambda figure, file: drawn.append(figure)
    )
    groups = (1, 2, 4)
    planner = types.SimpleNamespace(
        sensitivities=types.SimpleNamespace(user=dict.fromkeys(groups, 1.0)),
        users=types.SimpleNamespace(num_users=10_000),
        heat_map=lambda cohorts: [
            Option("uls", g, m, 0.1, 0.5, g**-0.5) for g in groups for m in cohorts
        ],
    )
    best = Option("bandmf", 4, 16, 0.1, 0.5, 0.5, bands=8, error=0.2)
    draw_heat_map(planner, types.SimpleNamespace(budget=64, best=best, options=[best]), "plan.png")
    axes, bar = drawn[0].axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["1", "2", "4", "recommended"]
    cells = axes.texts
    assert cells[-1].get_text() == f"BandMF, group size 4, 16 a step: noise {best.noise:.3g}"
    # Dark cells hold white numbers, bright ones black.
    image = axes.images[0]
    for text in cells[:-1]:
        column, row = text.get_position()
        dark = image.norm(image.get_array()[int(row), int(column)]) > 0.5
        assert text.get_color() == ("white" if dark else "black")
    assert "log10" not in bar.get_ylabel()
