"""Many processes: what they agree on, whom they miss, and what a lost one costs (nothing)."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import chex
import jax
import numpy as np
import pytest
import yaml
from runs import final_state
from silo_configs import SILOS

from dpfl_jax.accounting import Account, Ledger
from dpfl_jax.cli.main import main
from dpfl_jax.clipping import split
from dpfl_jax.config import load_config
from dpfl_jax.config.execution import ProcessesConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.mesh import make_mesh
from dpfl_jax.models import LanguageModel, TransformerConfig
from dpfl_jax.models.checkpoint import fingerprint, save_checkpoint
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import processes
from dpfl_jax.run.checkpoint import Checkpoints
from dpfl_jax.run.directory import RunDirectory, seal_of
from dpfl_jax.run.processes import ExitMessage, Heartbeats
from dpfl_jax.run.state import init_state
from dpfl_jax.training.start import build_transformer, make_optimizer, trained_by_name

LOCAL = pathlib.Path(__file__).parents[2] / "launch" / "local.py"
PATIENCE = 900  # seconds: of a machine that does much else at the same time
WORDS = ["river", "stone", "lamp", "green", "quiet", "seven", "horse", "under"]


# ---- alone -----------------------------------------------------------------------------------


def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("DPFL_", "SLURM_", "OMPI_")):
            monkeypatch.delenv(name)


def test_one_process_is_not_joined_to_anything(monkeypatch):
    clean(monkeypatch)
    assert processes.start(ProcessesConfig()) is False
    for name, value in zip(processes.ENVIRONMENT, ("a:1", "1", "0")):
        monkeypatch.setenv(name, value)
    assert processes.start(ProcessesConfig()) is False
    clean(monkeypatch)
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node1")
    assert processes.start(ProcessesConfig()) is False


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("", "2", ""), "DPFL_NUM_PROCESSES is set, but DPFL_COORDINATOR is not"),
        (("a:1", "2", ""), "DPFL_PROCESS_ID"),
        (("", "two", ""), "whole number"),
        (("a:1", "2", "2"), "must be below"),
    ],
)
def test_half_an_address_is_refused(values, message, monkeypatch):
    clean(monkeypatch)
    for name, value in zip(processes.ENVIRONMENT, values):
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInputError, match=message):
        processes.start(ProcessesConfig())


def test_an_unknown_mode_is_refused(monkeypatch):
    clean(monkeypatch)
    monkeypatch.setenv("DPFL_PROCESSES", "maybe")
    with pytest.raises(BadInputError, match="one of auto, detect, one"):
        processes.start(ProcessesConfig())


def test_alone_one_agrees_with_oneself():
    assert processes.gather({"a": 1}) == [{"a": 1}]
    assert processes.broadcast("b") == "b"
    assert processes.on_primary(lambda: 3) == processes.on_all_hosts(lambda: 3) == 3
    processes.check_same({"a": 1})
    assert processes.fresh_key() != processes.fresh_key()
    with processes.synchronized_shutdown("", ProcessesConfig()), pytest.raises(KeyError):
        raise KeyError


def test_who_is_silent_for_too_long_is_lost():
    heartbeats = Heartbeats(3, patience_s=10, now=0.0)
    heartbeats.update({0: "1", 1: "1", 2: "1"}, now=1.0)
    heartbeats.update({0: "2", 1: "1", 2: "done"}, now=8.0)
    assert heartbeats.lost(now=11.0) is None
    assert heartbeats.lost(now=11.1) == 1  # 2 has left by itself
    heartbeats.update({1: "2"}, now=11.2)
    assert heartbeats.lost(now=18.1) == 0


@pytest.mark.parametrize("cancel", [True, False])
def test_last_words_are_said_only_for_the_dead(cancel, capfd):
    exit_message = ExitMessage("--run-dir runs/mine")
    if cancel:
        exit_message.cancel()
    else:
        exit_message._shell.stdin.close()
    exit_message._shell.wait(timeout=10)
    said = capfd.readouterr().err
    assert ("--run-dir runs/mine" in said) is not cancel


def test_other_processes_read_the_key_from_the_directory_and_nowhere_else(tmp_path):
    run = RunDirectory(tmp_path / "run", {}, None, {"data": "abc", "noise_multiplier": 2.0})
    introduction = json.loads(json.dumps(run.introduction()))
    assert run.root_key.secret.hex() not in json.dumps(introduction)
    other = RunDirectory.join(introduction, {"data": "abc", "noise_multiplier": 2.1})
    assert other.root_key == run.root_key
    assert (other.run_id, other.facts) == (run.run_id, run.facts)  # process 0's noise
    other.append_metrics({"step": 1})
    other.drop_metrics_after(0)
    assert run.read_metrics() == []
    with pytest.raises(BadInputError, match="training data"):
        RunDirectory.join(introduction, {"data": "abd"})
    with pytest.raises(BadInputError, match="storage that all processes share"):
        RunDirectory.join(introduction | {"path": str(tmp_path / "else")}, {}, patience_s=0.0)
    with pytest.raises(BadInputError, match="storage that all processes share"):
        RunDirectory.join(introduction | {"root_key": "0" * 16}, {}, patience_s=0.0)
    run.close()
    other.close()


# ---- together --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    rng = np.random.default_rng(0)
    rows = [
        json.dumps({"user": f"u{user}", "text": " ".join(rng.choice(WORDS, size=8))})
        for user in range(40)
        for _ in range(int(rng.integers(1, 4)))
    ]
    (folder / "posts.jsonl").write_text("\n".join(rows))
    config = {
        "name": "small",
        "data": {
            "source": "jsonl",
            "path": str(folder / "posts.jsonl"),
            "seq_len": 16,
            "validation_fraction": 0.2,
            "test_fraction": 0.0,
        },
        "model": {"size": "tiny", "overrides": {"num_layers": 1, "embed_dim": 16, "num_heads": 2}},
        "mechanism": {"kind": "uls", "group_size": 2, "cohort_size": 8, "clipping": "normalized"},
        "privacy": {
            "epsilon": 8.0,
            "delta": 1e-3,
            "account": "people",
            "ledger": str(folder / "ledger.jsonl"),
        },
        # Plain SGD: rounding stays rounding (Adam divides by what may be nothing but rounding).
        "optimizer": {"name": "sgd", "learning_rate": 0.5},
        # Processes of a busy machine are silent for long; tests that kill one set it lower.
        "processes": {"lost_after_s": 200},
        "train": {"steps": 12, "checkpoint_every": 4},
        "execution": {"microbatch_size": 2},
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(config))
    table = {
        "name": "table",
        "data": {"source": "digits", "records_per_user": 6},
        "model": {"kind": "mlp", "options": {"hidden": [8]}},
        "privacy": config["privacy"] | {"account": "table"},  # another unit, another budget
    }
    (folder / "table.yaml").write_text(yaml.safe_dump(config | table))
    # The same on adapters of a checkpoint in the Hugging Face layout, in two files.
    shapes = jax.eval_shape(LanguageModel(LLAMA).init, jax.random.key(0))
    values = jax.tree.map(lambda x: 0.2 * rng.normal(size=x.shape).astype(np.float32), shapes)
    for norm in (values["blocks"]["norm1"], values["blocks"]["norm2"], values["final_norm"]):
        norm["scale"] = np.ones_like(norm["scale"])
    save_checkpoint(folder / "base", LLAMA, values, max_file_bytes=20_000)
    assert len(list((folder / "base").glob("*.safetensors"))) > 1
    config["name"] = "adapters"
    config["model"] = {
        "checkpoint": str(folder / "base"),
        "lora": {"rank": 2, "alpha": 4.0, "targets": ["*/attention/*", "*/mlp/down"]},
        "overrides": {"remat": "none"},
    }
    (folder / "lora.yaml").write_text(yaml.safe_dump(config))
    return folder


def start(workspace, run_dir, count, devices, *more, config="small"):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DPFL_")}
    return subprocess.Popen(
        [sys.executable, str(LOCAL), str(workspace / f"{config}.yaml"), str(run_dir), *more,
         "--processes", str(count), "--cpu-devices", str(devices)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment | {"XLA_FLAGS": ""},
    )  # fmt: skip


LLAMA = TransformerConfig(
    vocab_size=259,
    max_seq_len=16,
    embed_dim=16,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=24,
    activation="swiglu",
    tie_embeddings=False,
    remat="none",
)


def key_of(run_dir):
    secret = json.loads((run_dir / "private" / "root_key.json").read_text())["secret"]
    return RootKey(bytes.fromhex(secret))


def with_key_of(run_dir, other):
    """A run that has begun, at step 0, with the secret key of another one."""
    private = run_dir / "private"
    private.mkdir(parents=True)
    (private / "root_key.json").write_text((other / "private" / "root_key.json").read_text())
    known = yaml.safe_load((other / "config.yaml").read_text()) | {"run_id": run_dir.name}
    known["facts"].pop("hardware")
    known.pop("seal")
    known["seal"] = seal_of(known, key_of(other))
    (run_dir / "config.yaml").write_text(yaml.safe_dump(known))


def final(workspace, run_dir, config="small"):
    """The state in the newest checkpoint, and all hardware that the run was computed with."""
    config = load_config(workspace / f"{config}.yaml")
    model = build_transformer(config, 259, 1)
    params, _ = split(model.init(jax.random.key(0)), trained_by_name(config.model, model))
    like = init_state(params, make_optimizer(config.optimizer, 12), make_mesh())
    checkpoints = Checkpoints(run_dir / "checkpoints", 2)
    state, _ = checkpoints.read(like)
    checkpoints.close()
    used = yaml.safe_load((run_dir / "config.yaml").read_text())["facts"]["hardware"]
    return jax.tree.map(np.asarray, state), used


def same(a, b):
    assert a.step == b.step == 12
    chex.assert_trees_all_close(a.params, b.params, atol=3e-6)


def wait_for_steps(run_dir, steps, job):
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and job.poll() is None:
        if metrics.exists() and metrics.read_text().count("outside_guarantee") >= steps:
            return
        time.sleep(0.01)
    raise AssertionError(job.communicate()[0])


@pytest.fixture(scope="module")
def whole(workspace):
    """One process with eight devices, this one, never interrupted."""
    run_dir = workspace / "whole"
    assert main(["train", str(workspace / "small.yaml"), "--run-dir", str(run_dir)]) == 0
    return run_dir


@pytest.mark.slow
def test_two_processes_train_what_one_does(workspace):
    whole, run_dir = workspace / "table-whole", workspace / "table-two"
    assert main(["train", str(workspace / "table.yaml"), "--run-dir", str(whole)]) == 0
    with_key_of(run_dir, whole)
    job = start(workspace, run_dir, 2, 4, config="table")
    output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    states = [final_state(place, fallback_sharding=here) for place in (whole, run_dir)]
    chex.assert_trees_all_equal(*states)
    used = yaml.safe_load((run_dir / "config.yaml").read_text())["facts"]["hardware"]
    assert "in 2 processes" in used[0]
    assert output.count("finished after") == 1  # process 0 alone speaks
    reports = [json.loads((d / "report.json").read_text()) for d in (whole, run_dir)]
    assert reports[0]["privacy"]["epsilon"] == reports[1]["privacy"]["epsilon"]
    assert reports[0]["eval"]["final"]["loss"] == pytest.approx(
        reports[1]["eval"]["final"]["loss"], rel=1e-5
    )
    secret = json.loads((run_dir / "private" / "root_key.json").read_text())["secret"]
    for file in (run_dir / "checkpoints").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert secret.encode() not in content
            assert bytes.fromhex(secret) not in content


@pytest.mark.nightly
def test_two_processes_personalize_what_one_does(workspace):
    """Held-out users, each with a copy of their own, are split over the devices of both."""
    found, before = [], None
    for count, devices in ((1, 8), (2, 4)):
        run_dir = workspace / f"personal-{count}"
        if before:
            with_key_of(run_dir, before)
        before = run_dir
        job = start(workspace, run_dir, count, devices, "eval.personalize=true")
        output, _ = job.communicate(timeout=PATIENCE)
        assert job.returncode == 0, output
        found.append(json.loads((run_dir / "report.json").read_text())["personalization"])
    alone, together = found
    assert alone["users"] == together["users"] > 1
    assert alone["learning_rate"] == together["learning_rate"]
    assert together["before"] == pytest.approx(alone["before"], rel=1e-5)
    assert together["after"] == pytest.approx(alone["after"], rel=1e-5)
    assert alone["after"] != pytest.approx(alone["before"], rel=1e-3)


@pytest.fixture(scope="module")
def whole_of_adapters(workspace):
    """Adapters trained by one process with four devices, never interrupted."""
    run_dir = workspace / "lora-whole"
    job = start(workspace, run_dir, 1, 4, config="lora")
    output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    return run_dir


@pytest.mark.slow
def test_two_processes_train_the_same_adapters(workspace, whole_of_adapters):
    run_dir = workspace / "lora-two"
    with_key_of(run_dir, whole_of_adapters)
    job = start(workspace, run_dir, 2, 2, config="lora")
    output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    alone, _ = final(workspace, whole_of_adapters, "lora")
    together, used = final(workspace, run_dir, "lora")
    same(alone, together)
    assert "in 2 processes" in used[0]
    names = {jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(alone.params)}
    assert names
    assert all("lora_" in name for name in names)  # what was trained, kept and compared
    moved = [np.abs(x).max() for x in jax.tree.leaves(alone.params)]
    assert min(moved) > 1e-3  # one factor of each began at zero
    reports = [json.loads((d / "report.json").read_text()) for d in (whole_of_adapters, run_dir)]
    for report in reports:
        base = report["model"]["base"]
        assert base["name"] == "base"
        assert base["digest"] == fingerprint(workspace / "base")
        assert set(base["files"]) == {f.name for f in (workspace / "base").glob("*.safetensors")}


@pytest.mark.nightly
def test_two_processes_share_each_user(workspace, whole):
    """Four devices, of two processes, form one user's gradient together."""
    found, before = [], whole
    # Under a secret key, runs that start elsewhere (split parameters are drawn with other rounding)
    # draw anew: both begin as the first did.
    for count, devices in ((1, 4), (2, 2)):
        run_dir = workspace / f"shared-{count}"
        with_key_of(run_dir, before)
        before = run_dir
        split = ("execution.mesh.fsdp=4", "execution.split_users=true")
        job = start(workspace, run_dir, count, devices, *split)
        output, _ = job.communicate(timeout=PATIENCE)
        assert job.returncode == 0, output
        found.append(final(workspace, run_dir)[0])
    same(*found)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [1, 0])
def test_kill_9_of_one_process_costs_nothing(workspace, whole, victim):
    kill_and_resume(workspace, whole, workspace / f"killed{victim}", victim, "small")


@pytest.mark.nightly
def test_kill_9_costs_nothing_for_adapters_either(workspace, whole_of_adapters):
    kill_and_resume(workspace, whole_of_adapters, workspace / "lora-killed", 1, "lora")


def members(job):
    """The ids of a job's processes, in their order."""
    children = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(job.pid)], capture_output=True, text=True
    ).stdout.splitlines()
    return sorted(int(line.split()[0]) for line in children if "dpfl_jax" in line)


def kill_and_resume(workspace, whole, run_dir, victim, config):
    with_key_of(run_dir, whole)
    job = start(workspace, run_dir, 2, 2, "processes.lost_after_s=20", config=config)
    wait_for_steps(run_dir, 5, job)
    os.kill(members(job)[victim], signal.SIGKILL)
    output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 1, output
    assert not (run_dir / "report.json").exists(), "the run ended before it was killed"
    # The survivor says it in one sentence, and so does the launcher.
    said = [line for line in output.splitlines() if "counts nothing twice" in line]
    assert any(f"[{1 - victim}]" in line and str(run_dir) in line for line in said), output
    assert any(f"process {victim} was lost" in line for line in said), output

    resumed = start(workspace, run_dir, 1, 4, config=config)
    output, _ = resumed.communicate(timeout=PATIENCE)
    assert resumed.returncode == 0, output
    (alone, _), (together, used) = (final(workspace, d, config) for d in (whole, run_dir))
    same(alone, together)
    assert len(used) == 2
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    raw = [row["outside_guarantee"] for row in rows if "outside_guarantee" in row]
    assert [row["step"] for row in rows if "outside_guarantee" in row] == list(range(1, 13))
    waited = [row["slowest_input"] for row in raw if "slowest_input" in row]
    assert waited, "a row of several processes names the one that waited longest"
    assert set(waited) <= {0, 1}
    privacy = json.loads((run_dir / "report.json").read_text())["privacy"]
    assert any("other hardware" in caveat for caveat in privacy["caveats"])
    # Reserved once and committed once, whatever happened in between.
    records = [json.loads(line) for line in (workspace / "ledger.jsonl").read_text().splitlines()]
    mine = [record for record in records if record["run"].startswith(f"{run_dir.name}:")]
    assert [record["kind"] for record in mine] == ["reserve", "commit"]
    assert mine[0]["run"] == mine[1]["run"]
    assert mine[0]["run"] in Ledger(workspace / "ledger.jsonl").runs(Account("people"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_process_is_heard_by_both_at_the_next_step(workspace, number):
    """No row of metrics and no checkpoint, where processes wait for each other, is due."""
    run_dir = workspace / f"told-{number.name}"
    never = [f"train.{key}=5000" for key in ("steps", "log_every", "checkpoint_every")]
    job = start(workspace, run_dir, 2, 1, *never)
    noted, deadline = run_dir / "private" / "released_steps.json", time.monotonic() + PATIENCE
    while not noted.exists() or json.loads(noted.read_text())["steps"] < 3:
        if job.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(job.communicate()[0])
        time.sleep(0.05)
    begun = time.time()
    os.kill(members(job)[1], number)
    output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 1, output
    report = json.loads((run_dir / "report.json").read_text())
    assert report["status"] == "interrupted"
    assert 0 < report["steps"] < 5000
    saved = run_dir / "checkpoints" / str(report["steps"])
    assert saved.stat().st_mtime - begun < 120  # seconds of a busy machine


@pytest.mark.nightly
def test_bad_input_and_stops_are_told_to_all(workspace, whole):
    """A finished run is refused by both with one sentence; SIGTERM stops both at one step."""
    refused = start(workspace, whole, 2, 2)
    output, _ = refused.communicate(timeout=PATIENCE)
    assert refused.returncode == 2
    assert output.count("is finished and is not overwritten") == 1

    run_dir = workspace / "stopped"
    job = start(workspace, run_dir, 2, 2)
    wait_for_steps(run_dir, 2, job)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 1, output
    report = json.loads((run_dir / "report.json").read_text())
    assert report["status"] == "interrupted"
    assert (run_dir / "checkpoints" / str(report["steps"])).is_dir()
    assert output.count("resumes from there") == 1


# ---- federations -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("silos")
    for name, sections in SILOS.items():
        ledger = {"ledger": str(folder / "ledger.jsonl"), "account": name}
        sections = sections | {"privacy": sections["privacy"] | ledger}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, **sections}))
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("name", SILOS)
def test_silos_of_two_processes_train_what_those_of_one_do(silos, name):
    """Model, optimisers of silos, evaluation, guarantee; and each run is charged once."""
    found, here = [], jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for count, devices in ((1, 8), (2, 4)):
        run_dir = silos / f"{name}-{count}"
        if found:
            with_key_of(run_dir, silos / f"{name}-1")
        job = start(silos, run_dir, count, devices, config=name)
        output, _ = job.communicate(timeout=PATIENCE)
        assert job.returncode == 0, output
        assert output.count("finished after") == 1  # process 0 alone speaks
        report = json.loads((run_dir / "report.json").read_text())
        found.append((final_state(run_dir, fallback_sharding=here), report))
    (alone, first), (together, second) = found
    assert second["environment"]["processes"] == 2
    chex.assert_trees_all_equal(alone, together)
    assert first["privacy"]["epsilon"] == second["privacy"]["epsilon"] <= 8.0
    for when in ("initial", "final"):
        assert first["eval"][when]["loss"] == pytest.approx(second["eval"][when]["loss"], rel=1e-4)
    entries = [json.loads(x) for x in (silos / "ledger.jsonl").read_text().splitlines()]
    runs = {e["run"] for e in entries if e["account"]["dataset"] == name}
    assert len(runs) == 2  # one charge each, by process 0
