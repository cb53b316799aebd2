"""Private sweeps: one charge, one release, nothing of the others; bit for bit after a death."""

import json
import math

import jax
import numpy as np
import pytest
import yaml

from dpfl_jax.accounting import Account, Ledger
from dpfl_jax.cli.main import main
from dpfl_jax.errors import BadInputError
from dpfl_jax.planning import private_sweep
from dpfl_jax.planning.private_sweep import PrivateSweep
from dpfl_jax.planning.selection import Selection
from dpfl_jax.planning.sweep import Sweep
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import pipeline
from dpfl_jax.run.directory import RunDirectory
from tests.runs import DiedError, death_after_a_checkpoint, final_state

CONFIG = """
name: swept
data: {source: csv, path: visits.csv, user_column: who, target_column: kind, classes: 3,
       validation_fraction: 0.3}
model: {kind: mlp, options: {hidden: [4]}}
mechanism: {kind: uls, group_size: 2, cohort_size: 4}
privacy: {epsilon: 8.0, delta: 1.0e-3, ledger: spent.jsonl, account: people}
optimizer: {name: sgd}
train: {steps: 2, checkpoint_every: 1, log_every: 2}
execution: {microbatch_size: 8}
"""
AXES = {"learning_rate": [0.1, 0.2], "cohort_size": [4, 8]}
KEY = RootKey(bytes([10]) * 32)  # four runs of 6 expected ones, two of 2
GRID = ["--grid", "learning_rate=0.1,0.2", "--grid", "cohort_size=4,8", "--private"]


def test_a_link_in_the_place_of_compiled_programs_is_not_followed(tmp_path):
    """What lies there is run."""
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "program").write_text("x")
    for target in ("sent", "nowhere"):
        (tmp_path / "compiled").symlink_to(tmp_path / target)
        private_sweep._make_empty(tmp_path / "compiled")
        assert (tmp_path / "compiled").is_dir()
        assert not (tmp_path / "compiled").is_symlink()
        assert (tmp_path / "sent" / "program").exists()
        (tmp_path / "compiled" / "old").touch()
        private_sweep._make_empty(tmp_path / "compiled")
        assert list((tmp_path / "compiled").iterdir()) == []
        (tmp_path / "compiled").rmdir()


@pytest.fixture
def config(tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    rng = np.random.default_rng(0)
    rows = ["who,a,b,kind"]
    for person in range(60):
        for _ in range(rng.integers(1, 5)):
            a, b = rng.normal(size=2)
            rows.append(f"p{person},{a:.4f},{b:.4f},{int(a > 0) + int(b > 0)}")
    (tmp_path / "visits.csv").write_text("\n".join(rows) + "\n")
    monkeypatch.chdir(tmp_path)
    return file


def private(config, out="out", axes=AXES, overrides=(), **options):
    sweep = Sweep(config.parent / out, config, axes, tuple(overrides))
    return PrivateSweep(sweep, **{"expected_runs": 6.0, "key": KEY, **options})


@pytest.fixture
def pretend(monkeypatch):
    """Runs cost nothing: the score is made up of the run's key; returns what ran."""
    ran = []

    def run_experiment(config, path, console, prepare, key):
        run = prepare()
        directory = RunDirectory(path, {}, key)
        try:
            if ran and ran[-1] == "die":
                raise DiedError
            ran.append((directory.root_key.fingerprint, dict(run.values)))
            assert config.privacy.ledger is None
            assert run.held_out is None
            losses = np.full(run.people.num_users, 2.0)
            score = run.selection.score(losses, np.arange(len(losses) + 1), key)
            (path / "checkpoints").mkdir(exist_ok=True)
            (path / "checkpoints" / "model").write_text(key.fingerprint)
            (path / "metrics.jsonl").write_text('{"loss": "of private data"}')
            stated = run.selection.statement()
            (path / "guarantee.json").write_text(stated.dumps())
            selected = {"cell": run.values, "noisy_score": score, "noise_of_scores": 1.0}
            report = {
                "status": "finished",
                "name": "fake",
                "steps": 2,
                "planned_steps": 2,
                "summary": stated.privacy.summary(),
                "privacy": stated.privacy.to_json(),
                "guarantee": stated.text,
                "eval": {},
                "selection": selected,
                "outside_guarantee": {"final_train_loss": 1.0},
            }
            (path / "report.json").write_text(json.dumps(report))
            return report
        finally:
            directory.close()

    monkeypatch.setattr(private_sweep, "run_experiment", run_experiment)
    return ran


def test_nothing_is_run_behind_a_link(config, pretend):
    """Runs that somebody else made would be scored, and lose their checkpoints."""
    (config.parent / "out" / "private").mkdir(parents=True)
    (config.parent / "other").mkdir()
    (config.parent / "out" / "private" / "runs").symlink_to(config.parent / "other")
    with pytest.raises(BadInputError, match="outside of the folder"):
        private(config).run(_quiet())
    assert not list((config.parent / "other").iterdir())


def test_the_best_is_released_and_nothing_of_the_others(config, pretend, monkeypatch, capsys):
    monkeypatch.setattr(RootKey, "generate", classmethod(lambda cls: KEY))
    out = config.parent / "out"
    command = ["sweep", str(config), *GRID, "--expected-runs", "6", "--out", str(out)]
    assert main([*command, "--json"]) == 0
    output, errors = capsys.readouterr()
    result = json.loads(output.splitlines()[-1])
    runs = Selection.from_json(
        yaml.safe_load((out / "config.yaml").read_text())["facts"]["selection"]
    ).runs
    assert runs.mean == 6
    assert len(pretend) == runs.draw(KEY) > 3  # by this key
    assert len({fingerprint for fingerprint, _ in pretend}) == len(pretend)
    # Cells are drawn, not gone through; the best is the least.
    assert len({json.dumps(values) for _, values in pretend}) < len(pretend)
    scores = {}
    for number in range(len(pretend)):
        child = KEY.child("selection:run", number)
        noise = private_sweep.Selection.from_json(
            json.loads((out / "guarantee.json").read_text())["basis"]
        )
        scores[child.fingerprint] = noise.score(
            np.full(noise.held_out, 2.0), np.arange(noise.held_out + 1), child
        )
    assert result["best"]["noisy_score"] == min(scores.values())
    best = min(scores, key=scores.get)
    assert (out / "best" / "checkpoints" / "model").read_text() == best
    assert dict(pretend)[best] == result["best"]["cell"]
    # What is left: of one run, and without what its guarantee does not cover.
    left = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert left == {
        "run.lock",
        "config.yaml",
        "private/root_key.json",
        *[f"{at}{n}" for at in ("", "best/") for n in ("report.json", "report.md")],
        *[f"{at}guarantee.json" for at in ("", "best/")],
        *[f"best/{n}" for n in ("config.yaml", "private/root_key.json", "checkpoints/model")],
    }
    public = [out / name for name in left if "private" not in name]
    # When it was made, and so how long all of it took.
    assert {path.stat().st_mtime for path in (out / "best").rglob("*")} == {0.0}
    assert json.loads((out / "report.json").read_text())["finished_at"] is None
    told = output + errors + "".join(path.read_text() for path in public)
    assert f"{len(pretend)} runs" not in told
    assert "final_train_loss" not in told
    for fingerprint in {f for f, _ in pretend} - {best}:
        assert fingerprint not in told
    # One charge; the same command again runs nothing.
    ledger, account = Ledger(config.parent / "spent.jsonl"), Account("people")
    assert len(ledger.runs(account)) == 1
    (charged,) = map(json.loads, ledger.path.read_text().splitlines())
    assert charged["unit_key"] == "column who"
    assert ledger.spent(account, 1e-3) == pytest.approx(result["privacy"]["epsilon"], rel=1e-6)
    assert 7.5 < result["privacy"]["epsilon"] <= 8
    count = len(pretend)
    assert main(command) == 2
    assert "finished and is not overwritten" in capsys.readouterr().err
    assert len(pretend) == count
    for folder in (out, out / "best"):
        assert main(["verify", str(folder)]) == 0


def test_a_death_anywhere_changes_nothing(config, pretend, monkeypatch):
    console = _quiet()
    whole = private(config, "whole").run(console)
    all_runs, spent = list(pretend), Ledger(config.parent / "spent.jsonl")
    assert len(all_runs) > 3
    run_experiment = private_sweep.run_experiment
    for turn in range(len(all_runs)):
        pretend.clear()

        def dies(*args, **more):
            if len(pretend) == 1:
                raise DiedError
            return run_experiment(*args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(private_sweep, "run_experiment", dies)
            if turn == len(all_runs) - 1:  # between the reports, then
                patch.setattr(private_sweep, "write_reports", _dying(private_sweep.write_reports))
            with pytest.raises(DiedError):
                private(config).run(console)
        assert [f for f, _ in pretend] == [all_runs[turn][0]]
    found = private(config).run(console)
    assert len(pretend) == 1  # nothing was run twice
    assert found["selection"] == whole["selection"]
    same = [config.parent / at / "best" / "checkpoints" / "model" for at in ("whole", "out")]
    assert same[0].read_text() == same[1].read_text()
    assert len(spent.runs(Account("people"))) == 2  # one for each sweep


def _quiet():
    from rich.console import Console

    return Console(quiet=True)


def _dying(leave):
    """The reports of ``best/`` are written, those of the sweep are not."""
    calls = []

    def dies(*args):
        if calls:
            raise DiedError
        calls.append(1)
        return leave(*args)

    return dies


def test_another_version_does_not_go_on_with_a_sweep(config, pretend, monkeypatch):
    """Which of them trained the run that is released would tell how many there were before it."""

    def dies(*_, **__):
        raise DiedError

    with monkeypatch.context() as patch:
        patch.setattr(private_sweep, "run_experiment", dies)
        with pytest.raises(DiedError):
            private(config).run(_quiet())
    with monkeypatch.context() as patch:
        for module in (pipeline, private_sweep):
            patch.setattr(module, "this_version", lambda: "9.9.9")
        for _ in range(2):
            with pytest.raises(BadInputError, match="secret number of runs: resume it with"):
                private(config).run(_quiet())
    private(config).run(_quiet())


def test_another_grid_key_or_corpus_is_another_sweep(config, pretend, tmp_path):
    pretend.append("die")
    with pytest.raises(DiedError):
        private(config).run(_quiet())
    pretend.clear()
    with pytest.raises(BadInputError, match="another configuration"):
        private(config, expected_runs=7.0).run(_quiet())
    with pytest.raises(BadInputError, match="its own root key"):
        private(config, key=RootKey(bytes(32))).run(_quiet())
    (tmp_path / "public.txt").write_text("another corpus")
    with pytest.raises(BadInputError, match=r"are not those that the run in .* began with"):
        private(config, overrides=[f"data.public={tmp_path / 'public.txt'}"]).run(_quiet())
    assert pretend == []


def test_a_ledger_without_room_refuses_before_the_first_run(config, pretend):
    tight = private(config, overrides=["privacy.budget=3"])
    with pytest.raises(BadInputError, match="beyond the budget of 3"):
        tight.run(_quiet())
    assert pretend == []
    assert Ledger(config.parent / "spent.jsonl").runs(Account("people")) == []
    # As much as is asked for suffices, and the same folder goes on.
    private(config, overrides=["privacy.budget=8"]).run(_quiet())
    assert len(pretend) > 3


@pytest.mark.parametrize(
    ("axes", "overrides", "words"),
    [
        ({"epsilon": [1, 8]}, (), "epsilon is an axis.*same people and target"),
        ({"data.validation_fraction": [0.1, 0.2]}, (), "the same people"),
        ({"kind": ["uls", "none"]}, (), "mechanism.kind=none has no privacy"),
        (
            {"kind": ["uls", "allocation"]},
            (),
            "kind=allocation: use.*uls, els or bandmf",
        ),
        ({"cohort_size": [4, 5000]}, (), "the cell cohort_size 5000 cannot be run"),
        (AXES, ("train.keep_best=true", "train.eval_every=1"), "train.keep_best.*leave them out"),
        (AXES, ("eval.personalize=true",), "set eval.personalize=false"),
        (AXES, ("eval.max_users=4",), "set eval.max_users=null"),
        (AXES, ("metrics.sinks=[wandb]",), "metrics.sinks"),
        (AXES, ("privacy.ledger=null", "seed=4"), "leave it unset"),
        (AXES, ("privacy.epsilon=null", "privacy.noise_multiplier=1"), "set privacy.epsilon"),
        (AXES, ("data.split=within_user",), "data.split=by_user"),
        (AXES, ("data.validation_fraction=0",), "set data.validation_fraction"),
    ],
)
def test_what_has_no_room_is_refused_first(config, pretend, axes, overrides, words):
    with pytest.raises(BadInputError, match=f"(?s){words}"):
        private(config, axes=axes, overrides=overrides).run(_quiet())
    assert pretend == []
    assert not (config.parent / "spent.jsonl").exists()


def test_options_of_the_other_kind_of_sweep_are_refused(config, capsys):
    out = ["--out", str(config.parent / "out")]
    for options, words in (
        ([*GRID, "--tune", "learning_rate"], "leave out --tune"),
        ([*GRID, "--repeats", "3"], "leave out --repeats"),
        ([*GRID, "--of", "2"], "leave out --of"),
        ([*GRID, "--keep-runs"], "leave out --keep-runs"),
        ([*GRID[:-1], "--expected-runs", "4"], "add --private"),
        ([*GRID, "--expected-runs", "1"], "expected number of runs is 1"),
        ([*GRID, "--expected-runs", "1.0001"], "give 1.001 or more"),
    ):
        assert main(["sweep", str(config), *options, *out]) == 2
        assert words in capsys.readouterr().err
    assert main(["sweep", str(config), *GRID, *out, "--dry-run", "--json"]) == 0
    priced = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert priced["cells"] == 4
    assert 7.5 < priced["privacy"]["epsilon"] <= 8
    assert not (config.parent / "out").exists()


@pytest.mark.slow
def test_a_private_sweep_end_to_end(config, capsys, monkeypatch):
    """From the command line, killed after a checkpoint; the score is what the model gives."""
    monkeypatch.setenv("DPFL_CACHE_DIR", str(config.parent / "cache"))
    monkeypatch.setattr(RootKey, "generate", classmethod(lambda cls: KEY))
    command = ["sweep", str(config), *GRID[:2], "--private", "--expected-runs", "2", "--json"]
    command.append("--out")
    whole, out = config.parent / "whole", config.parent / "out"
    assert main([*command, str(whole)]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    with death_after_a_checkpoint(monkeypatch):
        main([*command, str(out)])
    assert not (out / "report.json").exists()
    assert main([*command, str(out)]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["best"] == first["best"]
    states = [final_state(at / "best") for at in (whole, out)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    ledger, account = Ledger(config.parent / "spent.jsonl"), Account("people")
    assert len(ledger.runs(account)) == 2
    for folder in (out, out / "best"):
        assert main(["verify", str(folder)]) == 0
    capsys.readouterr()
    # The score again, from what was released.
    sweep = private(config, "other", {"learning_rate": AXES["learning_rate"]})
    (run,) = [
        run for run in map(sweep._prepared, sweep._cells) if run.values == first["best"]["cell"]
    ]
    made = Selection.from_json(json.loads((out / "guarantee.json").read_text())["basis"])
    secret = json.loads((out / "best" / "private" / "root_key.json").read_text())["secret"]
    evaluator = private_sweep.Evaluator(run.model.loss, run.mesh)
    losses, _ = evaluator.measure(states[0]["params"], run.people)
    offsets = run.people.user_offsets
    key = RootKey(bytes.fromhex(secret))
    assert made.score(losses, offsets, key) == pytest.approx(first["best"]["noisy_score"], rel=1e-6)
    assert made.held_out == run.people.num_users > 3
    assert made.bound == math.log(3)
    for text in ("loss_by_user", "epsilon_spent", "train_loss"):
        assert text not in (out / "best" / "report.md").read_text()
