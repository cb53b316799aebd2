"""From a configuration to a report: the same for every system."""

import io
import json
import types

import jax
import pytest
import yaml
from rich.console import Console
from runs import death_after_a_checkpoint
from silo_configs import SILOS

from dpfl_jax.accounting import Account, Ledger, events
from dpfl_jax.cli.main import main
from dpfl_jax.config import validate_config
from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.pipeline import Charge, _Bill, dry_run, run_experiment
from dpfl_jax.run.terms import PUBLIC_KEY_CAVEAT

pytestmark = pytest.mark.slow
pytest.importorskip("sklearn")
QUIET = Console(quiet=True)
KEYS = {
    "status", "name", "steps", "privacy", "guarantee", "eval", "throughput", "clipping",
    "outside_guarantee", "model", "data", "mechanism", "environment", "run_dir",
}  # fmt: skip


@pytest.fixture
def traced(monkeypatch):
    """How many functions were traced before each row of metrics: the list grows with the run."""
    count, rows, write = [0], [], RunDirectory.append_metrics

    def heard(event, duration, **_):
        count[0] += event == "/jax/core/compile/jaxpr_trace_duration"

    def append(self, row):
        rows.append(count[0])
        write(self, row)

    monkeypatch.setattr(RunDirectory, "append_metrics", append)
    jax.monitoring.register_event_duration_secs_listener(heard)
    yield rows
    jax.monitoring.unregister_event_duration_listener(heard)


@pytest.mark.parametrize("name", SILOS)
def test_two_runs_on_one_ledger_beyond_its_budget(tmp_path, capsys, name, traced):
    """The first is charged and reported like any run; the second is refused before it begins."""
    config = SILOS[name] | {"name": name}
    config["privacy"] = config["privacy"] | {
        "ledger": "spent.jsonl", "account": "people", "budget": 9.0
    }  # fmt: skip
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    run = ["train", str(file), "--json", "--run-dir"]
    assert main([*run, str(tmp_path / "first")]) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report.keys() >= KEYS
    assert {"examples_per_s", "tokens_per_s", "mfu", "goodput"} == report["throughput"].keys()
    assert report["privacy"]["epsilon"] <= 8.0
    assert 0 < traced[0] < traced[2] == traced[-1]  # no later round traces anything again
    assert main([*run, str(tmp_path / "second")]) == 2
    assert "beyond the budget of 9" in capsys.readouterr().err
    assert not (tmp_path / "second" / "metrics.jsonl").exists()
    entries = [json.loads(line) for line in (tmp_path / "spent.jsonl").read_text().splitlines()]
    account = entries[0]["account"]
    assert account["unit"] == report["privacy"]["unit"]
    assert account["adjacency"] == report["privacy"]["adjacency"]
    key = "synthetic group of 6 rows" if account["unit"] == "subject" else "row"
    assert entries[0]["unit_key"] == key


def test_what_is_to_be_known_of_an_account_is_printed(tmp_path):
    """A second run without a budget; then one with it, after runs that had none."""
    said, event = io.StringIO(), events.gaussian(4.0, 1)
    for run, budget in (("a", None), ("b", None), ("c", 4.0)):
        privacy = {"ledger": str(tmp_path / "spent"), "account": "people", "budget": budget}
        prepared = types.SimpleNamespace(
            config=types.SimpleNamespace(privacy=types.SimpleNamespace(**privacy)),
            charge=lambda: Charge(event, 1e-6, "column patient"),
        )
        _Bill(prepared, types.SimpleNamespace(run_id=run), Console(file=said)).pay("draws")
    lines = said.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == [
        "a",
        "ledger",
        "ledger",
        "this",
        "ledger",
        "this",
    ]
    assert "has no budget" in lines[3]
    assert "before it had the budget 4" in lines[5]


def test_no_delta_or_epsilon_is_printed_below_what_it_is(tmp_path):
    said, event = io.StringIO(), events.gaussian(4.0, 1)
    budget = 0.00012348 + Ledger(tmp_path / "other").reserve(
        Account("people"), "a", event, 1.0004e-6
    ).after  # fmt: skip
    privacy = {"ledger": str(tmp_path / "spent"), "account": "people", "budget": budget}
    prepared = types.SimpleNamespace(
        config=types.SimpleNamespace(privacy=types.SimpleNamespace(**privacy)),
        charge=lambda: Charge(event, 1.0004e-6, "column patient"),
    )
    _Bill(prepared, types.SimpleNamespace(run_id="a"), Console(file=said)).pay("draws")
    assert "(delta 1.01e-06)" in said.getvalue()
    assert ", 0.0001234 left" in said.getvalue()  # down: 0.0001235 are not
    ledger = Ledger(tmp_path / "spent")
    assert "is now 2.00001 " in ledger.reserve(
        Account("people", unit_key="column patient"), "b", event, 1.0004e-6, 2.000001
    ).notes[0]  # fmt: skip


TABLE = {
    "data": {"source": "digits", "records_per_user": 6},
    "model": {"kind": "linear"},
    "mechanism": {"kind": "uls", "group_size": 2, "cohort_size": 20},
    "privacy": {"epsilon": 8.0, "delta": 1e-4},
    "train": {"steps": 4, "checkpoint_every": 1},
}


def test_a_resumed_run_states_what_was_sent_before(tmp_path, monkeypatch):
    sinks = {"sinks": ["tensorboard"], "not_private": True}
    with death_after_a_checkpoint(monkeypatch):
        run_experiment(validate_config(TABLE | {"metrics": sinks}), tmp_path / "run", QUIET)
    report = run_experiment(validate_config(TABLE), tmp_path / "run", QUIET)
    assert "tensorboard were sent" in " ".join(report["privacy"]["caveats"])


def test_a_ledger_takes_no_public_key(tmp_path):
    """Two runs under it are one, and not independent."""
    spent = {"ledger": str(tmp_path / "spent.jsonl"), "account": "people"}
    config = validate_config(TABLE | {"privacy": TABLE["privacy"] | spent})
    with pytest.raises(BadInputError, match="the key is public"):
        run_experiment(config, tmp_path / "run", QUIET, key=RootKey.from_seed(3))
    assert not (tmp_path / "run").exists()


def test_a_dry_run_has_the_caveats_of_the_run(tmp_path):
    config = validate_config(TABLE | {"seed": 3})
    priced = dry_run(config, QUIET)["privacy"]
    assert priced == run_experiment(config, tmp_path / "run", QUIET)["privacy"]
    assert PUBLIC_KEY_CAVEAT in priced["caveats"]
