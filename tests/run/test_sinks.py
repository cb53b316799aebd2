"""What trackers are sent: only what the guarantee covers, unless all is asked for."""

import json
import struct
import sys
import types

import numpy as np
import pytest
import yaml

from dpfl_jax.cli.main import main
from dpfl_jax.run.sinks import Sink, sink_of

STEPS = 4
COVERED = {"epsilon_spent"}
REST = {
    *("units", "train_loss", "fraction_clipped", "mean_norm", "nonfinite_units"),
    *("input_wait", "goodput"),
    *("seconds_per_step", "held_out_loss", "held_out_loss_by_user", "held_out_examples"),
    "held_out_users",
}


@pytest.fixture
def file(tmp_path):
    rng = np.random.default_rng(0)
    rows = ["user,a,b,label"]
    for i in range(180):
        a, b = rng.normal(size=2)
        rows.append(f"u{i // 3},{a},{b},{a + b}")
    (tmp_path / "visits.csv").write_text("\n".join(rows))
    config = {
        "seed": 1,
        "data": {"source": "csv", "path": str(tmp_path / "visits.csv"), "target_column": "label"},
        "model": {"kind": "linear"},
        "mechanism": {"kind": "uls", "group_size": 2, "cohort_size": 8},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "train": {"steps": STEPS, "eval_every": 2},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


class Trackers:
    """Stand-ins for the packages, which remember what they were told."""

    def __init__(self, monkeypatch):
        self.sent = {"wandb": [], "mlflow": []}
        self.told, self.ended = {}, []
        run = types.SimpleNamespace(
            log=lambda values, step: self.sent["wandb"].append((step, values)),
            finish=lambda: self.ended.append("wandb"),
        )
        self.wandb = types.SimpleNamespace(
            Settings=lambda **given: given, init=lambda **given: self.told.update(given) or run
        )
        info = types.SimpleNamespace(info=types.SimpleNamespace(run_id="7"))

        def log_metrics(values, step, run_id, timestamp):
            assert run_id == "7"
            self.sent["mlflow"].append((step, values))
            self.times = [*getattr(self, "times", []), timestamp]

        self.mlflow = types.SimpleNamespace(
            start_run=lambda **given: info,
            log_metrics=log_metrics,
            end_run=lambda: self.ended.append("mlflow"),
        )
        monkeypatch.setitem(sys.modules, "wandb", self.wandb)
        monkeypatch.setitem(sys.modules, "mlflow", self.mlflow)


def board(folder):
    """(name, step, time) of all scalars in event files."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for path in folder.iterdir():
        content, place = path.read_bytes(), 0
        while place < len(content):
            (size,) = struct.unpack_from("<Q", content, place)
            event = event_pb2.Event.FromString(content[place + 12 : place + 12 + size])
            found += [(v.tag, event.step, event.wall_time) for v in event.summary.value]
            place += 16 + size
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("everything", [False, True])
def test_what_is_sent(everything, file, tmp_path, monkeypatch, capsys):
    pytest.importorskip("tensorboardX")
    trackers, run_dir = Trackers(monkeypatch), tmp_path / "run"
    sinks = "metrics.sinks=[tensorboard,wandb,mlflow]"
    command = ["train", str(file), "--run-dir", str(run_dir), "--json", sinks]
    assert main([*command, f"metrics.not_private={str(everything).lower()}"]) == 0
    caveats = json.loads(capsys.readouterr().out.splitlines()[-1])["privacy"]["caveats"]
    wanted = COVERED | ({f"not_private/{name}" for name in REST} if everything else set())
    scalars = board(run_dir / "tensorboard")
    assert {name for name, _, _ in scalars} == wanted
    for sent in trackers.sent.values():
        assert {name for _, values in sent for name in values} == wanted
        spent = {step: v["epsilon_spent"] for step, v in sent if "epsilon_spent" in v}
        assert list(spent) == [1, 2, 3, 4]
        assert 7.9 < spent[4] <= 8.0
    # Times, too, are computed from people's data.
    times = [trackers.times, [time for _, _, time in scalars]]
    assert all(time is None for time in times[0]) == everything
    assert (max(times[1]) > STEPS) == everything
    quiet = trackers.told["settings"]
    assert quiet["console"] == "off"
    assert all(quiet[name] for name in quiet if "disable" in name)
    assert sorted(trackers.ended) == ["mlflow", "wandb"]
    assert any("not_private/" in caveat for caveat in caveats) == everything
    assert any("by when rows arrived" in caveat for caveat in caveats)


def test_rows_of_other_systems():
    sent = []
    sink = Sink(lambda values, step: sent.append((step, values)), lambda: None)
    sink({"step": 3, "silos": 5, "dropped_silos": 0, "epsilon_spent": None,
          "outside_guarantee": {"train_loss": 1.0}})  # fmt: skip
    sink({"step": 3, "eval": {"loss": 1.0}})
    assert sent == [(3, {"silos": 5, "dropped_silos": 0})]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_package_that_is_missing_is_named(name, file, tmp_path, monkeypatch, capsys):
    package = "tensorboardX" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, package, None)
    run_dir = tmp_path / "run"
    assert main(["train", str(file), "--run-dir", str(run_dir), f"metrics.sinks=[{name}]"]) == 2
    assert f"the package {package}: pip install 'dpfl_jax[{name}]'" in capsys.readouterr().err
    assert not run_dir.exists()
    assert main(["train", str(file), "metrics.sinks=[excel]"]) == 2
    assert "metrics.sinks" in capsys.readouterr().err


def test_where_metrics_go_is_no_part_of_a_run(file, monkeypatch):
    from dpfl_jax.config import config_fingerprint, load_config

    fingerprints = {
        config_fingerprint(load_config(file, changes))
        for changes in ([], ["metrics.sinks=[wandb]"], ["metrics.not_private=true"])
    }
    assert len(fingerprints) == 1
    assert callable(sink_of("tensorboard"))
