"""``dpfl train`` without a trusted server: report, resume, what is refused."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
import yaml
from rich.console import Console
from runs import final_state

from dpfl_jax.cli.main import main
from dpfl_jax.config import load_config
from dpfl_jax.config.schema import ModelConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl import rounds as isrl_rounds
from dpfl_jax.federation.isrl.isrl_run import prepare
from dpfl_jax.federation.isrl.losses import linear_loss
from dpfl_jax.federation.isrl.silos import padded
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import driver

pytest.importorskip("sklearn")

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "isrl"
SMALL = {
    "name": "small-isrl",
    "seed": 1,
    "data": {"source": "digits", "max_users": 600},
    "federation": {"silos": 5, "partition": "pairs", "rounds": 8},
    "mechanism": {"kind": "minibatch_sgd", "step_size": 0.5, "average_last": 4},
    "privacy": {"epsilon": 8.0},
    "train": {"checkpoint_every": 1, "eval_every": 2},
    "execution": {"rounds_per_block": 2},
}
ACCELERATED = {"kind": "accelerated", "sampling": "disjoint", "batch_fraction": 0.12}
STAGES = {"kind": "multi_stage", "sampling": "full", "stage_constant": 1e-3}
ROUNDS = {"minibatch_sgd": 8, "accelerated": None, "multi_stage": 60}


def dpfl(*args):
    return main([str(a) for a in args])


def written(tmp_path, mechanism=SMALL["mechanism"], **sections):
    path = tmp_path / "config.yaml"
    silos = SMALL["federation"] | {"rounds": ROUNDS[mechanism["kind"]]}
    content = SMALL | {"mechanism": mechanism, "federation": silos} | sections
    path.write_text(yaml.safe_dump(content))
    return path


def last_json(text):
    return json.loads(text.strip().splitlines()[-1])


class StopAtOnce(driver.StopRequest):
    """As if a signal had come during the first block."""

    def __enter__(self):
        super().__enter__()
        self.requested = "SIGTERM"
        return self


@pytest.mark.slow
@pytest.mark.parametrize(
    "mechanism",
    [
        pytest.param(SMALL["mechanism"], id="minibatch"),
        pytest.param(ACCELERATED, id="one-pass"),
        pytest.param(STAGES, id="multi-stage"),
    ],
)
def test_a_run_reports_its_guarantee_and_goes_on_where_it_stopped(
    tmp_path, monkeypatch, capsys, mechanism
):
    model = {"loss": "logistic", "regularization": 0.1 if mechanism is STAGES else 0.0}
    config = written(tmp_path, mechanism, model=model)
    assert dpfl("train", config, "--run-dir", tmp_path / "whole", "--json") == 0
    report = last_json(capsys.readouterr().out)
    assert report["status"] == "finished"
    privacy = report["privacy"]
    assert privacy["unit"] == "record"
    assert privacy["adjacency"] == "replace one record"
    assert privacy["trust"] == "silo-local"
    assert privacy["assumptions"][0].startswith("ISRL-DP: the adversary sees all messages")
    assert 0 < privacy["epsilon"] <= 8.0
    assert privacy["delta"] == max(row["delta"] for row in report["silos"])
    assert privacy["epsilon"] <= max(row["epsilon"] for row in report["silos"])
    assert all(row["epsilon"] <= row["target_epsilon"] for row in report["silos"])
    assert all(row["delta"] == row["records"] ** -2.0 for row in report["silos"])
    assert report["eval"]["final"]["loss"] < report["eval"]["initial"]["loss"]
    assert {row["notion"] for row in report["relations"]} >= {"ISRL-DP", "central DP"}
    assert {"rounds", "variance", "clip_norm"} <= set(report["parameters"])
    for name in ("report.md", "report.json", "curves.png", "metrics.jsonl", "config.yaml"):
        assert (tmp_path / "whole" / name).stat().st_size > 0
    rows = [json.loads(r) for r in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    spent = [r["epsilon_spent"] for r in rows if "epsilon_spent" in r]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(privacy["epsilon"], rel=1e-6)

    # Stopped in the first block, and gone on with.
    with monkeypatch.context() as patch:
        patch.setattr(driver, "StopRequest", StopAtOnce)
        assert dpfl("train", config, "--run-dir", tmp_path / "parts") == 1
    half = json.loads((tmp_path / "parts" / "report.json").read_text())
    assert half["status"] == "interrupted"
    assert half["steps"] == 2
    if mechanism is not ACCELERATED:  # one pass: whoever has answered once has spent it all
        assert half["privacy"]["epsilon"] < privacy["epsilon"]
    assert dpfl("train", config, "--run-dir", tmp_path / "parts", "--json") == 0
    again = last_json(capsys.readouterr().out)
    assert again["privacy"]["epsilon"] == privacy["epsilon"]
    assert again["eval"]["final"] == report["eval"]["final"]
    jax.tree.map(
        np.testing.assert_array_equal,
        final_state(tmp_path / "whole"),
        final_state(tmp_path / "parts"),
    )
    # A finished run is not overwritten, and other data are other data.
    assert dpfl("train", config, "--run-dir", tmp_path / "whole") == 2


def test_multi_stage_runs_the_rounds_that_it_pays_for(capsys):
    """Its stages follow from the noise, and the noise from the rounds: none is left over."""
    overrides = ("federation.rounds=300", "privacy.epsilon=6", "--dry-run", "--json")
    assert dpfl("train", CONFIGS / "multi_stage.yaml", *overrides) == 0
    price = last_json(capsys.readouterr().out)
    parameters = price["parameters"]
    assert price["rounds"] == parameters["rounds"]["value"] == 300
    assert sum(parameters["stages"]["value"]) == 300
    assert len(parameters["stages"]["value"]) > 1
    assert all(5.99 < s["epsilon"] <= 6.0 for s in price["silos"])


def test_silos_may_grant_different_budgets(tmp_path, capsys):
    config = written(tmp_path, privacy={"epsilon": [8, 8, 8, 8, 2]})
    assert dpfl("train", config, "--dry-run", "--json") == 0
    price = last_json(capsys.readouterr().out)
    assert [row["target_epsilon"] for row in price["silos"]] == [8, 8, 8, 8, 2]
    assert price["silos"][4]["epsilon"] <= 2
    noise = [row["noise_multiplier"] for row in price["silos"]]
    assert noise[4] > 2 * max(noise[:4])
    local, upper, lower, shuffled, central = (row["privacy"] for row in price["possible_risk"])
    assert local > upper >= lower > central > 0
    assert upper > shuffled


def test_noise_of_another_silo_stops_a_run_before_it_begins(tmp_path):
    config = load_config(written(tmp_path, privacy={"epsilon": [8, 8, 8, 8, 2]}))
    made = prepare(config, Console(quiet=True))
    noise = made.parameters.noise[::-1]
    made = dataclasses.replace(made, parameters=dataclasses.replace(made.parameters, noise=noise))
    with pytest.raises(BadInputError, match=r"silo 0 grants epsilon 8 on .* that grants 2 on"):
        made.algorithm()


@pytest.mark.parametrize("loss", ["logistic", "hinge", "softmax"])
def test_two_classes_are_scored_as_by_other_systems(loss):
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=(n, 3)), rng.integers(0, 2, n)) for n in (9, 14)]
    x, y = (np.concatenate([part[i] for part in rows]) for i in (0, 1))
    shown = [(a, 2 * b - 1 if loss == "hinge" else b) for a, b in rows]
    task = linear_loss(ModelConfig(loss=loss), 3, 2, 1.0, 1.0, 0.1)
    w = rng.normal(size=task.shape).astype("f4")
    found = isrl_rounds.make_scores(task, padded(shown))(w)
    scores = x @ (w if w.ndim == 1 else w[1] - w[0])
    assert found["auc"] == pytest.approx(np.mean(scores[y == 1][:, None] > scores[y == 0]))
    assert found["base_rate"] == y.mean()
    assert found["majority_accuracy"] == max(y.mean(), 1 - y.mean())
    assert found["accuracy"] == pytest.approx(np.mean((scores > 0) == y))


def test_without_a_budget_nobody_is_protected(tmp_path, capsys):
    config = written(tmp_path)
    assert dpfl("train", config, "privacy.epsilon=null", "--dry-run", "--json") == 0
    assert last_json(capsys.readouterr().out)["privacy"]["unit"] == "none"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("mechanism={kind: multi_stage}", "strongly convex"),
        ("mechanism.kind=multi_stage", "an option of minibatch_sgd"),
        ("isrl.algorithm=accelerated", "unknown key 'isrl'"),
        ("mechanism.arm=as_published", "unknown key 'mechanism.arm'"),
        ("mechanism.sampling=with_replacement", "mechanism.sampling"),
        ("mechanism.kind=acelerated", "did you mean 'accelerated'"),
        ("mechanism={kind: accelerated, samplin: full}", "did you mean 'sampling'"),
        ("mechanism={kind: accelerated, sampling: full, batch_fraction: 0.5}", "takes all records"),
        ("federation.weights=[0.5, 0.5]", "2 numbers for 5 silos"),
        ("federation.weights=[1, 1, 1, 1, 1]", "sum to 1"),
        ("federation.partition=labels", "take one of uniform, sorted, natural, pairs"),
        ("federation.local_steps=2", "is for silos that train locally"),
        ("mechanism.sampling=disjoint", "one pass"),
        ("model.loss=squared", "does not fit"),
        ("data.source=mnist", "data.path"),
        ("federation.silos=7", "5 or 25 silos"),
        ("federation.silos_per_round=6", "there are 5 silos"),
        ("federation.silos_law={6: 1}", "a number from 1 to 5"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, override, words):
    silos = SMALL["federation"] | {"rounds": 30}
    config = written(tmp_path, SMALL["mechanism"] | {"batch_fraction": 0.5}, federation=silos)
    assert dpfl("train", config, *override.split("; "), "--run-dir", tmp_path / "run") == 2
    text = " ".join(capsys.readouterr().err.split())
    assert words in text
    assert "Traceback" not in text
    assert not (tmp_path / "run").exists()


def test_the_shipped_configurations_are_valid(monkeypatch):
    monkeypatch.setenv("DPFL_DATA_DIR", "/data")
    names = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    assert names == ["accelerated", "heart", "multi_stage", "one_pass", "quickstart"]
    for name in names:
        assert load_config(CONFIGS / f"{name}.yaml").variant == "isrl"


def test_no_record_is_written_into_a_compiled_program(tmp_path):
    """Programs are kept where JAX is told to, outside of the run and its private folder."""
    config = load_config(written(tmp_path))
    prepared = prepare(config, Console(quiet=True))
    data, parameters, task = prepared.records.train, prepared.parameters, prepared.loss
    algorithm = isrl_rounds.make_method(config, parameters)
    schedule = isrl_rounds.schedule_of(
        config, parameters, np.asarray(data.sizes), RootKey.from_seed(0)
    )
    made = isrl_rounds.CompiledRound(config, task, parameters, algorithm)
    row = jax.tree.map(lambda x: x[0], schedule.rows())
    records = int(np.asarray(data.sizes).max())
    traced = jax.make_jaxpr(made.messages)(
        np.zeros(task.shape, np.float32), row, data, schedule.rank
    )
    assert all(records not in np.shape(c) for c in traced.consts)


def test_a_run_goes_on_with_another_execution(tmp_path):
    """And under another name; what it computes is the same."""
    found = []
    for changes in ({}, {"execution": {"rounds_per_block": 3}}, {"name": "other"}):
        config = load_config(written(tmp_path, **changes))
        prepared = prepare(config, Console(quiet=True))
        run = isrl_rounds.IsrlAlgorithm(
            config, prepared.loss, prepared.records.train,
            prepared.parameters, data_parallel_mesh(jax.devices()[:1]),
        )  # fmt: skip
        found.append(run.terms())
    assert found[0] == found[1] == found[2]
