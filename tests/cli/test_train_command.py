"""``dpfl train`` as a user meets it: overrides, JSON, bad input, SIGTERM and resume."""

import contextlib
import io
import json
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import yaml
from runs import final_state

from dpfl_jax.cli.main import main

WORDS = ["river", "stone", "lamp", "green", "quiet", "seven", "horse", "under"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A config on 60 users' invented posts, small enough for seconds."""
    folder = tmp_path_factory.mktemp("train")
    rng = np.random.default_rng(0)
    rows = []
    for user in range(60):
        for _ in range(int(rng.integers(1, 6))):
            text = " ".join(rng.choice(WORDS, size=12))
            rows.append(json.dumps({"user": f"u{user}", "text": text}))
    (folder / "posts.jsonl").write_text("\n".join(rows))
    config = {
        "name": "small",
        "seed": 1,
        "data": {
            "source": "jsonl",
            "path": str(folder / "posts.jsonl"),
            "seq_len": 32,
            "validation_fraction": 0.2,
            "test_fraction": 0.0,
        },
        "model": {"size": "tiny", "overrides": {"num_layers": 1, "embed_dim": 16, "num_heads": 2}},
        "mechanism": {"kind": "uls", "group_size": 2, "cohort_size": 8, "clipping": "normalized"},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "optimizer": {"name": "adam", "learning_rate": 0.01},
        "train": {"steps": 12, "checkpoint_every": 3, "eval_every": 6},
        "execution": {"microbatch_size": 4},
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(config))
    return folder


def dpfl(*args):
    return main([str(a) for a in args])


def last_json(text):
    return json.loads(text.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def finished(workspace):
    """An uninterrupted run."""
    run_dir = workspace / "whole"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert dpfl("train", workspace / "small.yaml", "--run-dir", run_dir, "--json") == 0
    return run_dir, last_json(output.getvalue())


def command(workspace, run_dir, *args):
    """In a process of its own, with the devices of this one: its state is compared bit for bit."""
    return subprocess.Popen(
        [sys.executable, "-m", "dpfl_jax.cli.main", "train", str(workspace / "small.yaml"),
         "--run-dir", str(run_dir), *args],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.nightly
def test_report_has_what_the_design_asks_for(finished):
    run_dir, report = finished
    assert report["status"] == "finished"
    assert report["steps"] == 12
    privacy = report["privacy"]
    assert privacy["unit"] == "user"
    assert privacy["trust"] == "central"
    assert 7.0 < privacy["epsilon"] <= 8.0
    assert privacy["delta"] == 1e-3
    assert privacy["noise_multiplier"] > 0
    assert {"adjacency", "accountant", "sampling"} <= privacy.keys()
    assert any("seed" in caveat for caveat in privacy["caveats"])
    assert {"initial", "final"} <= report["eval"].keys()
    assert report["throughput"]["tokens_per_s"] > 0
    assert report["environment"]["jax"]
    for name in ("config.yaml", "metrics.jsonl", "report.json", "report.md", "curves.png"):
        assert (run_dir / name).stat().st_size > 0
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "outside_guarantee" in r]
    assert [r["step"] for r in steps] == list(range(1, 13))
    assert all(r["epsilon_spent"] <= 8.0 for r in steps)
    assert sorted(r["step"] for r in rows if "eval" in r) == [0, 6, 12]


@pytest.mark.nightly
def test_a_finished_run_is_not_overwritten(finished, workspace, capsys):
    run_dir, _ = finished
    before = (run_dir / "report.json").read_bytes()
    assert dpfl("train", workspace / "small.yaml", "--run-dir", run_dir) == 2
    assert "finished" in capsys.readouterr().err
    assert (run_dir / "report.json").read_bytes() == before


@pytest.mark.nightly
def test_show_prints_the_report_again(finished, capsys):
    run_dir, report = finished
    assert dpfl("show", run_dir, "--json") == 0
    assert last_json(capsys.readouterr().out)["privacy"] == report["privacy"]


@pytest.mark.slow
def test_sigterm_saves_and_the_run_goes_on(finished, workspace, tmp_path):
    whole, _ = finished
    run_dir = tmp_path / "stopped"
    process = command(workspace, run_dir)
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_text().count("outside_guarantee") >= 1:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "resumes from there" in errors
    report = json.loads((run_dir / "report.json").read_text())
    assert report["status"] == "interrupted"
    assert report["steps"] < 12
    assert report["privacy"]["epsilon"] < 8.0
    assert dpfl("train", workspace / "small.yaml", "--run-dir", run_dir) == 0
    jax.tree.map(np.testing.assert_array_equal, final_state(run_dir), final_state(whole))


@pytest.mark.nightly
def test_personalisation_leaves_two_losses_and_nothing_else(finished, workspace, tmp_path):
    """What held-out users' own copies learnt is in no checkpoint, no metrics and no report."""
    whole, without = finished
    run_dir = tmp_path / "personal"
    done = command(workspace, run_dir, "eval.personalize=true", "--json")
    output, errors = done.communicate(timeout=300)
    assert done.returncode == 0, errors
    report = last_json(output)
    found = report.pop("personalization")
    assert report.keys() == without.keys()
    assert found.keys() == {"before", "after", "learning_rate", "users"}
    assert found["users"] > 1
    assert found["learning_rate"] in (0.003, 0.01, 0.03, 0.1, 0.3)
    # Words drawn at random have little to tell of a person, but their vocabulary is learnt.
    assert 0 < found["after"] < found["before"]
    # On half of the users and half of their examples, of the model that was evaluated.
    assert found["before"] == pytest.approx(report["eval"]["final"]["loss_by_user"], rel=0.1)
    assert "## Personalization" in (run_dir / "report.md").read_text()

    jax.tree.map(np.testing.assert_array_equal, final_state(run_dir), final_state(whole))
    assert report["eval"] == without["eval"]
    assert report["privacy"] == without["privacy"]
    files = [{p.name for p in d.iterdir()} for d in (run_dir, whole)]
    assert files[0] == files[1]
    rows = [(d / "metrics.jsonl").read_text().splitlines() for d in (run_dir, whole)]
    assert [json.loads(r).keys() for r in rows[0]] == [json.loads(r).keys() for r in rows[1]]
    sizes = [sum(p.stat().st_size for p in (d / "checkpoints" / "12").rglob("*") if p.is_file())
             for d in (run_dir, whole)]  # fmt: skip
    assert sizes[0] < 1.5 * sizes[1]  # a copy more would double it; files are cut up as time has it


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "mechanism"),
    [
        ("els", "{kind: els, group_size: 2, batch_size: 16}"),
        ("none", "{kind: none, batch_size: 16}"),
    ],
)
def test_other_mechanisms_are_an_override_away(workspace, tmp_path, capsys, kind, mechanism):
    code = dpfl(
        "train", workspace / "small.yaml", f"mechanism={mechanism}", "train.steps=2",
        "privacy.epsilon=2", "--run-dir", tmp_path / kind, "--json",
    )  # fmt: skip
    report = last_json(capsys.readouterr().out)
    assert code == 0
    assert report["steps"] == 2
    if kind == "els":
        assert 1.5 < report["privacy"]["epsilon"] <= 2.0
    else:
        assert report["privacy"]["epsilon"] == "inf"
        assert "NO differential-privacy guarantee" in report["guarantee"]


@pytest.mark.slow
def test_without_a_seed_the_key_is_secret(workspace, tmp_path, capsys):
    run_dir = tmp_path / "secret"
    code = dpfl("train", workspace / "small.yaml", "seed=null", "train.steps=1",
                "--run-dir", run_dir, "--json")  # fmt: skip
    assert code == 0
    report = last_json(capsys.readouterr().out)
    assert not any("seed" in caveat for caveat in report["privacy"]["caveats"])
    key_file = run_dir / "private" / "root_key.json"
    assert key_file.stat().st_mode & 0o077 == 0
    secret = json.loads(key_file.read_text())["secret"]
    others = [p for p in run_dir.rglob("*") if p.is_file() and p != key_file]
    assert all(secret.encode() not in p.read_bytes() for p in others)


@pytest.mark.slow
def test_the_ledger_refuses_what_the_budget_does_not_allow(
    workspace, tmp_path, capsys, monkeypatch
):
    common = [
        "seed=null",
        "train.steps=1",
        "privacy.epsilon=2",
        "privacy.ledger=ledgers/spent.jsonl",
        "privacy.account=posts",
        "privacy.budget=2.1",
    ]
    run = ["train", workspace / "small.yaml", *common, "--run-dir"]
    for folder in ("here", "there"):  # one ledger, wherever the command is started
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert dpfl(*run, tmp_path / "first") == 0
    output = capsys.readouterr().out
    assert f"a new ledger was made at {workspace / 'ledgers' / 'spent.jsonl'}\n" in output
    monkeypatch.chdir(tmp_path / "there")
    assert dpfl(*run, tmp_path / "second") == 2
    output, errors = capsys.readouterr()
    assert "new ledger" not in output
    assert "beyond the budget of 2.1" in errors
    assert str(workspace / "ledgers" / "spent.jsonl") in errors
    assert not (tmp_path / "second" / "metrics.jsonl").exists()


def test_a_price_is_printed_in_words(capsys):
    """Of silos, with rows of them, sources of constants and bounds: no brackets of Python."""
    assert dpfl("train", "configs/isrl/quickstart.yaml", "--dry-run") == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "clip norm 4 (bound of the logistic loss)" in printed
    assert "{" not in printed
    assert "['" not in printed


def test_a_dry_run_prices_without_writing(workspace, tmp_path, capsys):
    run_dir = tmp_path / "none"
    code = dpfl("train", workspace / "small.yaml", "--dry-run", "--json", "--run-dir", run_dir)
    assert code == 0
    price = last_json(capsys.readouterr().out)
    assert price["noise_multiplier"] > 0
    assert price["parameters"] > 0
    assert price["tokens"] == 16 * 32 * 12
    assert price["epsilon"] <= 8.0
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mechanism.clipnorm=1"], "did you mean 'clip_norm'"),
        (["privacy.epsilon=0"], "epsilon is 0"),
        (["privacy.delta=2"], "delta is 2"),
        (["mechanism.cohort_size=50000"], "sampling probability"),
        (["data.user_column=author"], "author"),
        (["data.path=/nowhere/posts.jsonl"], "nowhere"),
        (["optimizer.name=adamm"], "did you mean"),
        (["optimizer.options={beta: 1}"], "takes no option"),
        (["optimizer.warmup_steps=50"], "warmup_steps"),
        (["optimizer.name=lbfgs"], "from their gradients alone"),
        (["optimizer.options={b1: x}"], "cannot be used with these options"),
        (["optimizer.learning_rate=.inf"], "optimizer.learning_rate"),
        (["init_seed=99999999999999999999"], "init_seed"),
        (["name=../../x"], "name"),
        (["data.split=within_user", "data.held_out_max=-2"], "held_out_max is -2"),
        (["pretrain={steps: 2}"], "public corpus"),
        (["model.size=huge"], "size"),
        (["eval.personalize=true", "data.validation_fraction=0"], "there is no validation part"),
        (["eval.personalize=true", "eval.max_examples_per_user=1"], "two held-out users"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(workspace, tmp_path, capsys, overrides, message):
    code = dpfl("train", workspace / "small.yaml", *overrides, "--run-dir", tmp_path / "bad")
    errors = capsys.readouterr().err.strip()
    assert code == 2
    assert message in errors
    assert len(errors.splitlines()) == 1
    assert errors.startswith("dpfl: error: ")


def test_bad_files_are_named(workspace, tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    blank = tmp_path / "blank.jsonl"
    blank.write_text('{"user": "a", "text": ""}\n')
    for file in (empty, blank):
        code = dpfl("train", workspace / "small.yaml", f"data.path={file}",
                    "--run-dir", tmp_path / "bad")  # fmt: skip
        errors = capsys.readouterr().err.strip()
        assert code == 2
        assert len(errors.splitlines()) == 1


@pytest.mark.nightly
def test_a_run_directory_of_another_config_is_refused(finished, workspace, tmp_path, capsys):
    run_dir, _ = finished
    (run_dir / "report.json").rename(tmp_path / "report.json")
    try:
        code = dpfl("train", workspace / "small.yaml", "train.steps=13", "--run-dir", run_dir)
        assert code == 2
        assert "another configuration: train.steps differs" in capsys.readouterr().err
    finally:
        (tmp_path / "report.json").rename(run_dir / "report.json")
    other = tmp_path / "full"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    assert dpfl("train", workspace / "small.yaml", "--run-dir", other) == 2
    assert "not empty" in capsys.readouterr().err
    assert (other / "notes.txt").read_text() == "mine"


def test_bad_arguments_exit_with_2(capsys):
    assert dpfl("train") == 2
    assert dpfl("trian", "x") == 2
    assert "dpfl: error:" in capsys.readouterr().err


def test_a_run_that_made_things_worse_says_what_to_change():
    from dpfl_jax.cli.train import _got_worse

    def told(before, after):
        return _got_worse({"eval": {"initial": {"loss": before}, "final": {"loss": after}}})

    assert "smaller learning rate" in told(1.5, 293816.9)
    assert "data.scale" in told(1.5, float("nan"))
    assert told(1.5, 1.4) == told(1.5, 1.5) == _got_worse({"eval": {}}) == ""
