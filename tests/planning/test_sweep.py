"""Sweeps: cells, restarts, ranks, tables; the best of what is tuned."""

import json

import pyarrow.parquet
import pytest

from dpfl_jax.cli.main import main
from dpfl_jax.errors import BadInputError
from dpfl_jax.planning.sweep import Sweep, best_rows

CONFIG = """
name: swept
data: {source: python_source, seq_len: 16, max_users: 60, max_examples_per_user: 4}
model: {size: tiny, overrides: {num_layers: 1, embed_dim: 16, num_heads: 2}}
mechanism: {kind: uls, compute_budget: 8, uls: {group_size: 2}, els: {group_size: 2}}
privacy: {epsilon: 8.0}
train: {steps: 2, microbatch_size: 8, log_every: 2}
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
    assert (found["els"].els.group_size, found["els"].compute_budget) == (4, 6)
    assert (found["uls"].uls.group_size, found["uls"].compute_budget) == (4, 24)
    grid = sweep(config, {"epsilon": [1.5], "learning_rate": [0.01], "data.seq_len": [8]})
    (cell,) = grid.cells()
    made = grid.cell_config(cell)
    assert (made.privacy.epsilon, made.optimizer.learning_rate, made.data.seq_len) == (1.5, 0.01, 8)
    assert made.seed == 0


def test_processes_share_all_cells_and_no_cell_is_run_twice(config, monkeypatch):
    from rich.console import Console

    seen = []

    def fake(self, cell, load):
        seen.append((tuple(cell.values.values()), cell.repeat))
        return {**cell.values, "repeat": cell.repeat, "status": "finished", "loss": 1.0}

    monkeypatch.setattr(Sweep, "_run_cell", fake)
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
        {"epsilon": e, "learning_rate": lr, "loss": loss}
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
        ({"epsilon": [1]}, {"tuned": ("clip_norm",)}, "no axis"),
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


@pytest.mark.slow
def test_a_sweep_end_to_end(config, capsys, monkeypatch):
    """Real runs, one cell that cannot be, an interruption, and the tables."""
    monkeypatch.setenv("DPFL_CACHE_DIR", str(config.parent / "cache"))
    config.write_text(CONFIG + "sweep: {grid: {cohort_size: [4, 8, 5000], epsilon: [2, 8]}}\n")
    out = config.parent / "out"
    arguments = ["sweep", str(config), "--out", str(out), "--json"]
    assert main([*arguments, "--rank", "1", "--of", "2"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (first["status"], first["ran"], first["results"]) == ("unfinished", 3, 3)
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["status"], result["ran"], result["infeasible"]) == ("finished", 3, 2)
    assert len(result["best"]) == 4
    rows = pyarrow.parquet.read_table(out / "table.parquet").to_pylist()
    assert len(rows) == 6
    for row in rows:
        if row["cohort_size"] == 5000:
            assert "probability" in row["reason"] or "population" in row["reason"]
        else:
            assert row["epsilon_spent"] <= row["epsilon"]
    assert (out / "sweep.png").stat().st_size > 1000
