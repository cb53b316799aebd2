"""``dpfl train`` on a federation: report, bad input."""

import contextlib
import io
import json

import pytest
import yaml

from dpfl_jax.cli.main import main

pytestmark = pytest.mark.slow

pytest.importorskip("sklearn")

CONFIG = {
    "name": "small-federation",
    "seed": 1,
    "data": {"source": "digits", "records_per_user": 6},
    "federation": {
        "silos": 5,
        "rounds": 6,
        "local_steps": 3,
        "local_state": "keep",
        "local_optimizer": {"name": "sgd", "learning_rate": 0.5, "options": {"momentum": 0.5}},
        "server_optimizer": {"name": "sgd", "learning_rate": 1.0, "options": {"momentum": 0.1}},
    },
    "model": {"kind": "mlp", "options": {"hidden": [8]}},
    "mechanism": {"kind": "hi_grad_avg", "sampling_prob": 0.2, "max_records_per_subject": 3},
    "privacy": {"epsilon": 8.0, "delta": 1e-4},
    "train": {"checkpoint_every": 2, "eval_every": 3},
    "execution": {"microbatch_size": 16},
}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("federation") / "small.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def dpfl(*args):
    return main([str(a) for a in args])


def last_json(text):
    return json.loads(text.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def finished(config_file):
    run_dir = config_file.parent / "whole"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert dpfl("train", config_file, "--run-dir", run_dir, "--json") == 0
    return run_dir, last_json(output.getvalue())


def test_the_report_says_what_a_subject_gets(finished):
    run_dir, report = finished
    assert (report["status"], report["steps"]) == ("finished", 6)
    privacy = report["privacy"]
    assert (privacy["unit"], privacy["trust"]) == ("subject", "silo-local")
    assert 7.0 < privacy["epsilon"] <= 8.0
    assert "in all silos" in privacy["adjacency"]
    assert any("more than 5 of the 5 silos" in a for a in privacy["assumptions"])
    assert any("seed" in c for c in privacy["caveats"])
    assert len(report["silos"]) == 5
    assert all(s["epsilon_alone"] < privacy["epsilon"] for s in report["silos"])
    assert {"initial", "final"} <= report["eval"].keys()
    assert 0 <= report["eval"]["final"]["accuracy"] <= 1
    for name in ("config.yaml", "metrics.jsonl", "report.json", "report.md", "curves.png"):
        assert (run_dir / name).stat().st_size > 0
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rounds = [r for r in rows if "outside_guarantee" in r]
    assert [r["step"] for r in rounds] == list(range(1, 7))
    spent = [r["epsilon_spent"] for r in rounds]
    assert spent == sorted(spent)
    assert spent[-1] <= 8.0
    assert sorted(r["step"] for r in rows if "eval" in r) == [0, 3, 6]
    assert all(r["silos"] == 5 and r["dropped_silos"] == 0 for r in rounds)


def test_show_and_a_second_start(finished, config_file, capsys):
    run_dir, report = finished
    assert dpfl("show", run_dir, "--json") == 0
    assert last_json(capsys.readouterr().out)["privacy"] == report["privacy"]
    assert dpfl("train", config_file, "--run-dir", run_dir) == 2
    assert "finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "unit", "extra"),
    [
        ("fed_avg", "none", []),
        ("local_item", "record", []),
        ("local_group", "subject", ["mechanism.batch_cap=2", "federation.silos_per_round=2"]),
        ("user_ldp", "subject", ["federation.partition=power", "federation.alpha=4"]),
        ("subject_uls", "subject", ["federation.partition=confined"]),
    ],
)
def test_other_mechanisms_are_an_override_away(config_file, tmp_path, capsys, kind, unit, extra):
    code = dpfl(
        "train", config_file, f"mechanism.kind={kind}", "federation.rounds=2",
        "privacy.epsilon=4", "federation.local_state=reset", "execution.strategy=vmap", *extra,
        "--run-dir", tmp_path / kind, "--json",
    )  # fmt: skip
    report = last_json(capsys.readouterr().out)
    assert code == 0
    assert report["privacy"]["unit"] == unit
    if kind == "fed_avg":
        assert report["privacy"]["epsilon"] == "inf"
    else:
        assert 2.5 < report["privacy"]["epsilon"] <= 4.0
    if kind == "local_item":
        assert any("protects single records" in c for c in report["privacy"]["caveats"])
        assert "for a subject of up to" in (tmp_path / kind / "report.md").read_text()
    if "federation.silos_per_round=2" in extra:
        rows = (tmp_path / kind / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(r)["silos"] for r in rows if "outside" in r] == [2, 2]


def test_a_dry_run_prices_without_writing(config_file, tmp_path, capsys):
    run_dir = tmp_path / "none"
    assert dpfl("train", config_file, "--dry-run", "--json", "--run-dir", run_dir) == 0
    price = last_json(capsys.readouterr().out)
    assert price["epsilon"] <= 8.0
    assert price["noise_multiplier"]["least"] > 0
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["federation.silo=3"], "did you mean 'silos'"),
        (["mechanism.batch_size=3"], "only one of them"),
        (["mechanism.batch_cap=3"], "option of local_group"),
        (["federation.max_silos_per_subject=2"], "max_silos_per_subject"),
        (["federation.silos_per_round=9"], "there are 5 silos"),
        (["federation.weights=[1, 2]"], "weights"),
        (["privacy.recipe=paper_a"], "unknown key 'privacy.recipe'"),
        (["mechanism.denominator=distinct_subjects"], "unknown key 'mechanism.denominator'"),
        (["mechanism.sampling=fixed"], "unknown key 'mechanism.sampling'"),
        (["model.kind=lstm"], "does not fit"),
        (["data.source=mnist"], "data.path"),
        (["data.source=mnist", "data.path=/nowhere"], "does not exist"),
        (["federation.local_optimizer.name=adamm"], "did you mean"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    config_file, tmp_path, capsys, overrides, message
):
    code = dpfl("train", config_file, *overrides, "--run-dir", tmp_path / "bad")
    errors = capsys.readouterr().err.strip()
    assert code == 2
    assert message in errors
    assert len(errors.splitlines()) == 1
