"""Sweeps: cells, restarts, ranks, tables; the best of what is tuned."""

import dataclasses
import json
import pathlib

import jax
import matplotlib.axes
import numpy as np
import pyarrow.parquet
import pytest
from rich.console import Console

from dpfl_jax.accounting import Account, Ledger, events
from dpfl_jax.accounting import epsilon as epsilon_of
from dpfl_jax.accounting.filters import filtered_epsilon
from dpfl_jax.cli.main import main
from dpfl_jax.config import config_to_dict
from dpfl_jax.data import DataConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.planning.figures import draw_sweep
from dpfl_jax.planning.sweep import Sweep, best_rows
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.driver import PUBLIC_KEY_CAVEAT
from dpfl_jax.run.report import PRIVATE_METRICS_CAVEAT

CONFIG = """
name: swept
data: {source: python_source, seq_len: 16, max_users: 60, max_examples_per_user: 4}
model: {size: tiny, overrides: {num_layers: 1, embed_dim: 16, num_heads: 2}}
mechanism: {kind: uls, group_size: 2, cohort_size: 4}
privacy: {epsilon: 8.0}
train: {steps: 2, log_every: 2}
execution: {microbatch_size: 8}
eval: {max_users: 4, max_examples_per_user: 1}
"""


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return file


def sweep(config, axes, **options):
    return Sweep(config.parent / "sweep", config, axes, **options)


def test_axes_become_overrides(config):
    grid = sweep(config, {"kind": ["els", "uls"], "group_size": [4], "cohort_size": [6]})
    found = {c.values["kind"]: grid.cell_config(c).mechanism for c in grid.cells()}
    assert (found["els"].group_size, found["els"].compute_budget) == (4, 6)
    assert (found["uls"].group_size, found["uls"].compute_budget) == (4, 24)
    grid = sweep(config, {"epsilon": [1.5], "learning_rate": [0.01], "data.seq_len": [8]})
    (cell,) = grid.cells()
    made = grid.cell_config(cell)
    assert (made.privacy.epsilon, made.optimizer.learning_rate, made.data.seq_len) == (1.5, 0.01, 8)


def test_every_run_has_a_secret_key_unless_a_seed_is_asked_for(config, capsys):
    """Repetitions too; one seed in several runs would be the same run, and is refused."""
    grid = sweep(config, {"epsilon": [1, 8]}, repeats=3)
    assert [grid.cell_config(cell).seed for cell in grid.cells()] == [None] * 6
    assert len({grid.digest(cell) for cell in grid.cells()}) == 6
    asked = sweep(config, {"seed": [4, 5]})
    assert {asked.cell_config(cell).seed for cell in asked.cells()} == {4, 5}
    for axes, overrides in (({"seed": [4, 5]}, ()), ({"epsilon": [1]}, ("seed=4",))):
        with pytest.raises(BadInputError, match="2 repeats with one seed would be the same run"):
            sweep(config, axes, overrides=overrides, repeats=2).cells()
    ledger = ("privacy.ledger=spent.jsonl", "privacy.account=people")
    with pytest.raises(BadInputError, match="leave seed unset"):
        sweep(config, {"seed": [4]}, overrides=ledger).run(Console(quiet=True))


def pretend(monkeypatch, steps=3, sigma=1.0):
    """Replaces training by a charge to the ledger and an invented report; returns what ran."""
    ran = []

    def run_experiment(config, path, console, prepared):
        key = None if config.seed is None else RootKey.from_seed(config.seed)
        directory = RunDirectory(path, config_to_dict(config), key)
        try:
            privacy, caveats = config.privacy, []
            if privacy.ledger is not None:
                ledger = Ledger(privacy.ledger)
                event = events.uls(sigma, 0.5, steps)
                account = Account(privacy.account)
                ledger.reserve(account, directory.run_id, event, 1e-3, privacy.budget)
            if directory.root_key.public:
                caveats = [PUBLIC_KEY_CAVEAT]
            ran.append(str(path))
            loss = {"loss": 1.0, "loss_by_user": 1.0}
            stated = {"epsilon": 1.0, "delta": 1e-3, "noise_multiplier": sigma, "caveats": caveats}
            report = {"status": "finished", "eval": {"initial": loss, "final": loss}}
            (path / "report.json").write_text(json.dumps(report | {"privacy": stated}))
            return report | {"privacy": stated}
        finally:
            directory.close()

    monkeypatch.setattr("dpfl_jax.planning.sweep.run_experiment", run_experiment)
    return ran


def test_a_ledger_takes_every_cell_once_and_refuses_what_is_beyond_the_budget(
    config, monkeypatch, capsys
):
    ran = pretend(monkeypatch)
    one = epsilon_of(events.uls(1.0, 0.5, 3), 1e-3)
    two, three = (filtered_epsilon([events.uls(1.0, 0.5, 3)] * runs, 1e-3) for runs in (2, 3))
    assert one < two < three
    out = config.parent / "out"
    charged = ["privacy.ledger=spent.jsonl", "privacy.account=people"]
    command = ["sweep", str(config), *charged, "--grid", "learning_rate=0.1,0.2,0.3", "--out",
               str(out)]  # fmt: skip
    assert main([*command, f"privacy.budget={two + 1e-3}"]) == 2
    output, errors = capsys.readouterr()
    file = config.parent / "spent.jsonl"
    assert f"a new ledger is made at {file}\n" in output
    assert "was not run, and finished cells are kept" in errors
    assert "beyond the budget" in errors
    assert errors.startswith("dpfl: error: ")
    assert len(errors.splitlines()) == 1
    assert len(ran) == 2
    assert len((out / "table.jsonl").read_text().splitlines()) == 2
    ledger, account = Ledger(file), Account("people")
    assert ledger.spent(account, 1e-3) == pytest.approx(two, rel=1e-6)
    # Killed after the report and before the result: neither run nor charged again.
    lost = sorted((out / "results").iterdir())[0]
    row = json.loads(lost.read_text())
    lost.unlink()
    # A larger budget goes on in the same folder, with the cell that was refused.
    assert main([*command, f"privacy.budget={three + 1e-3}", "--json"]) == 0
    output, errors = capsys.readouterr()
    assert "new ledger" not in errors
    assert json.loads(output.splitlines()[-1])["status"] == "finished"
    assert len(ran) == len(set(ran)) == len(ledger.runs(account)) == 3
    assert ledger.spent(account, 1e-3) == pytest.approx(three, rel=1e-6)
    assert json.loads(lost.read_text()) | {"seconds": 0} == row | {"seconds": 0}
    # A damaged ledger is no property of a cell, and is not kept as one.
    file.write_bytes(file.read_bytes()[60:])
    wider = [*command, "--grid", "clip_norm=1", f"privacy.budget={three}"]
    results = len(list((out / "results").iterdir()))
    assert main(wider) == 2
    assert "damaged" in capsys.readouterr().err
    assert len(list((out / "results").iterdir())) == results


def test_a_seed_is_named_wherever_the_results_are(config, monkeypatch, capsys):
    pretend(monkeypatch)
    for axis, overrides in (("seed=4,5", []), ("epsilon=1,8", ["seed=7"])):
        out = config.parent / axis
        command = ["sweep", str(config), *overrides, "--grid", axis, "--out", str(out)]
        assert main(command) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert PUBLIC_KEY_CAVEAT in shown
        assert "the choice among these runs has no guarantee" in shown
        assert "seed" in shown.split(PUBLIC_KEY_CAVEAT)[0]
        assert main([*command, "--json"]) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert result["caveats"] == [PUBLIC_KEY_CAVEAT]
        rows = pyarrow.parquet.read_table(out / "table.parquet", partitioning=None).to_pylist()
        rows += [json.loads(line) for line in (out / "table.jsonl").read_text().splitlines()]
        rows += [json.loads(line) for line in (out / "best.jsonl").read_text().splitlines()]
        assert len(rows) == 6
        assert all(row["caveats"] == [PUBLIC_KEY_CAVEAT] for row in rows)
        assert {row["seed"] for row in rows} == ({4, 5} if "seed" in axis else {7})
    out = config.parent / "secret"
    assert main(["sweep", str(config), "--grid", "epsilon=1", "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["caveats"], result["best"][0]["seed"]) == ([], None)


def test_processes_share_all_cells_and_no_cell_is_run_twice(config, monkeypatch):
    seen = []

    def fake(self, cell, load):
        seen.append((tuple(cell.values.values()), cell.repeat))
        return {**cell.values, "repeat": cell.repeat, "status": "finished", "loss": 1.0}

    monkeypatch.setattr(Sweep, "run_cell", fake)
    quiet = Console(quiet=True)
    grid = sweep(config, {"epsilon": [1, 2, 4], "steps": [2, 3]}, repeats=2)
    ran = [grid.run(quiet, rank, 5) for rank in range(5)]
    assert sum(ran) == len(seen) == len(set(seen)) == 12
    assert [grid.run(quiet, rank, 2) for rank in range(2)] == [0, 0]
    # A wider grid in the same folder keeps what is there.
    wider = sweep(config, {"epsilon": [1, 2, 4, 8], "steps": [2, 3]}, repeats=2)
    assert wider.run(quiet) == 4
    assert len(wider.table()) == 16
    with pytest.raises(BadInputError, match="rank 2 of 2"):
        grid.run(quiet, 2, 2)


def test_the_best_of_tuned_axes_with_an_interval():
    axes = {"epsilon": [1, 8], "learning_rate": [0.1, 0.2, 0.3]}
    rows = [
        {"epsilon": e, "learning_rate": lr, "loss": loss, "seed": None, "caveats": []}
        for e, lr, losses in [
            (1, 0.1, [5.0, 5.2]),
            (1, 0.2, [4.0, 4.2]),
            (1, 0.3, [1.0, 9.0]),
            (8, 0.1, [2.0]),
            (8, 0.2, [None, float("nan")]),
        ]
        for loss in losses
    ]
    one, eight = sorted(best_rows(rows, axes, ["learning_rate"]), key=lambda r: r["epsilon"])
    assert one["learning_rate"] == 0.2
    assert one["loss"] == pytest.approx(4.1)
    # Student's t with one degree of freedom: 6.314 * 0.1.
    assert one["high"] - one["low"] == pytest.approx(2 * 6.3138 * 0.1, rel=1e-4)
    assert one["edge"] == []
    assert eight["learning_rate"] == 0.1
    assert (eight["low"], eight["high"], eight["edge"]) == (None, None, ["learning_rate"])


def test_bad_sweeps_are_refused_before_the_first_run(config, capsys):
    for axes, options, message in (
        ({}, {}, "at least one axis"),
        ({"epsilon": [1]}, {"repeats": 0}, "number of repeats is 0"),
        ({"epsilon": [1]}, {"tuned": ("clip_norm",)}, "no such axis"),
        ({"budget": [8], "cohort_size": [4]}, {}, "keep one"),
    ):
        with pytest.raises(BadInputError, match=message):
            sweep(config, axes, **options)
    out = str(config.parent / "out")
    for arguments, message in (
        (["--grid", "epsilon"], "must look like"),
        (["--grid", "mechanism.klip_norm=1,2"], "clip_norm"),
        ([], "grid is empty"),
    ):
        assert main(["sweep", str(config), "--out", out, *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.nightly
def test_a_sweep_end_to_end(config, capsys, monkeypatch):
    """Real runs, one cell that cannot be, an interruption, and the tables."""
    monkeypatch.setenv("DPFL_CACHE_DIR", str(config.parent / "cache"))
    charged = CONFIG.replace("epsilon: 8.0", "epsilon: 8.0, ledger: spent.jsonl, account: people")
    config.write_text(charged + "sweep: {grid: {cohort_size: [4, 8, 5000], epsilon: [2, 8]}}\n")
    out = config.parent / "out"
    arguments = ["sweep", str(config), "--out", str(out), "--json"]
    assert main([*arguments, "--rank", "1", "--of", "2"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (first["status"], first["ran"], first["results"]) == ("unfinished", 3, 3)
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["status"], result["ran"], result["infeasible"]) == ("finished", 3, 2)
    assert "the choice among these runs has no guarantee" in result["guarantee"]
    assert len(result["best"]) == 4
    rows = pyarrow.parquet.read_table(out / "table.parquet", partitioning=None).to_pylist()
    assert len(rows) == 6
    for row in rows:
        if row["cohort_size"] == 5000:
            assert "probability" in row["reason"] or "population" in row["reason"]
        else:
            assert row["epsilon_spent"] <= row["epsilon"]
            assert row["seed"] is None
            assert PRIVATE_METRICS_CAVEAT in row["caveats"]
            assert PUBLIC_KEY_CAVEAT not in row["caveats"]
    # One account, charged once for each cell that ran: more than any one of them, however started.
    ledger, account = Ledger(config.parent / "spent.jsonl"), Account("people")
    assert len(ledger.runs(account)) == 4
    (delta,) = {row["delta"] for row in rows} - {None}
    assert ledger.spent(account, delta) > max(row["epsilon_spent"] or 0 for row in rows)
    assert (out / "sweep.png").stat().st_size > 1000


def test_group_and_cohort_sizes_make_a_heat_map(tmp_path, monkeypatch):
    seen = []
    plain = matplotlib.axes.Axes.imshow
    monkeypatch.setattr(
        matplotlib.axes.Axes, "imshow", lambda ax, x, **o: seen.append(x) or plain(ax, x, **o)
    )
    rows = [
        {"group_size": g, "cohort_size": c, "loss": g + c / 10, "seed": None}
        for g in (2, 1)
        for c in (4, 8)
    ]
    draw_sweep(rows, ["cohort_size", "group_size"], tmp_path / "map.png")
    np.testing.assert_allclose(seen[0], [[1.4, 1.8], [2.4, 2.8]])


def test_sections_of_data_are_kept_between_cells():
    """A sweep reads data once: it remembers them by their section."""
    one, same = (DataConfig(source="csv", path="a.csv", target_column="y") for _ in range(2))
    other = dataclasses.replace(one, scale={"y": (0.0, 2.0)})
    assert len({one, same, other}) == 2


def test_no_program_that_came_with_the_folder_is_run(config, monkeypatch):
    """What JAX keeps of compiled programs is machine code."""
    monkeypatch.setattr(Sweep, "cells", lambda self: [])
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        made = sweep(config, {"epsilon": [1]})
        assert made.run(Console(quiet=True)) == 0
        assert made.directory not in pathlib.Path(jax.config.jax_compilation_cache_dir).parents
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize("name", ["cells", "cells/DIGEST", "cells/DIGEST/checkpoints", "results",
                                  "table.parquet"])  # fmt: skip
def test_a_sweep_changes_nothing_behind_links(name, config, monkeypatch):
    """A folder that somebody sent: it leads to another run, whose checkpoints would go."""
    ran, other = pretend(monkeypatch), config.parent / "other"
    grid = sweep(config, {"clip_norm": [1.0]})
    digest = grid.digest(grid.cells()[0])
    loss = {"final": {"loss": 1.0, "loss_by_user": 1.0}, "initial": {"loss": 1.0}}
    stated = {"epsilon": 1.0, "delta": 1e-3, "noise_multiplier": 1.0, "caveats": []}
    report = {"status": "finished", "eval": loss, "privacy": stated}
    for run in (other, other / digest):
        (run / "checkpoints").mkdir(parents=True)
        (run / "report.json").write_text(json.dumps(report))
    link = grid.directory / name.replace("DIGEST", digest)
    link.parent.mkdir(parents=True)
    link.symlink_to(other)
    before = sorted(other.rglob("*"))

    def whole():
        grid.run(Console(quiet=True))
        grid.write_tables()

    with pytest.raises(BadInputError, match="outside of the folder"):
        whole()
    assert sorted(other.rglob("*")) == before
    assert not ran or name == "table.parquet"
