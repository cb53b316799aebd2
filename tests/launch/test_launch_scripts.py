"""The launch scripts say what they would do, and do nothing else on a dry run."""

import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest
import yaml

from dpfl_jax.cli.main import build_parser

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"
SCRIPTS = sorted(path.name for path in LAUNCH.iterdir() if path.suffix in (".py", ".sh"))


def launch(name, *args):
    start = [sys.executable] if name.endswith(".py") else ["bash"]
    return subprocess.run(
        [*start, str(LAUNCH / name), *args], capture_output=True, text=True, timeout=60
    )


def understood(words, config, run_dir):
    """The command is one that `dpfl` itself takes, and takes as meant."""
    assert words[:2] == ["dpfl", "train"]
    args = build_parser("train").parse_args(words[1:])
    assert (args.config, args.run_dir, args.overrides) == (config, run_dir, ["train.steps=3"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_how_to_use_it(name):
    done = launch(name, "--help")
    assert done.returncode == 0, done.stderr
    assert name in done.stdout
    assert "--dry-run" in done.stdout
    assert "RUN_DIR" in done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_bad_arguments_are_exit_code_2(name):
    assert launch(name).returncode == 2
    assert launch(name, "--no-such-option", "job.yaml", "runs/mine").returncode == 2


def test_local_runs_one_command_in_every_process():
    done = launch("local.py", "job.yaml", "runs/a b", "train.steps=3", "--processes", "3",
                  "--gpus-per-process", "2", "--dry-run")  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert len(lines) == 3
    for process, words in enumerate(lines):
        first = words.index("dpfl")
        understood(words[first:], "job.yaml", "runs/a b")
        known = dict(word.split("=", 1) for word in words[:first])
        assert known["DPFL_PROCESS_ID"] == str(process)
        assert known["DPFL_NUM_PROCESSES"] == "3"
        assert known["DPFL_COORDINATOR"] == lines[0][0].split("=")[1]
        assert known["CUDA_VISIBLE_DEVICES"] == f"{2 * process},{2 * process + 1}"


# In the place of `dpfl train`: writes down every signal, and ends after the first (or never).
LISTENER = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["HEARD_IN"])
mine = folder / os.environ["DPFL_PROCESS_ID"]
heard = []

def hear(number, frame):
    heard.append(number)
    mine.write_text(" ".join(signal.Signals(n).name for n in heard))

signal.signal(signal.SIGINT, hear)
signal.signal(signal.SIGTERM, hear)
with (folder / "starts").open("a") as file:
    file.write("x")
end = time.monotonic() + 100  # nobody is left behind by a test that fails
while time.monotonic() < end and (not heard or os.environ.get("STUBBORN")):
    time.sleep(0.02)
time.sleep(1.0)  # a second signal would come now
sys.exit(1)
"""


def local(folder, main, *args, **more):
    """`launch/local.py` with ``main`` in the place of `dpfl train`."""
    package = folder / "dpfl_jax" / "cli"
    package.mkdir(parents=True)
    (folder / "dpfl_jax" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "main.py").write_text(main)
    return subprocess.Popen(
        [sys.executable, str(LAUNCH / "local.py"), "a.yaml", "run", *args],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)} | more,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def interrupt(folder, times, **more):
    """Ctrl-C without a terminal: SIGINT to the whole process group of the launcher."""
    job = local(folder, LISTENER, "--restarts", "3", HEARD_IN=str(folder), **more)
    try:
        seen = [{"starts": "xx"}, {"0": "SIGINT", "1": "SIGINT"}]
        for expected in seen[:times]:
            deadline = time.monotonic() + 60
            for name, text in expected.items():
                file = folder / name
                while not (file.exists() and file.read_text() == text):
                    assert time.monotonic() < deadline, f"{name} does not hold {text}"
                    time.sleep(0.02)
            os.killpg(job.pid, signal.SIGINT)
        output, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    return job.returncode, output


@pytest.mark.parametrize(
    ("end", "how"), [("os.kill(os.getpid(), 9)", "SIGKILL"), ("sys.exit(1)", "exit status 1")]
)
def test_who_was_lost_is_who_was_lost_first(tmp_path, end, how):
    """The others may well abort, too, when they notice."""
    main = (
        "import os, sys, time\n"
        f"if os.environ['DPFL_PROCESS_ID'] == '1': {end}\n"
        "time.sleep(2)\nos.kill(os.getpid(), 6)\n"
    )
    job = local(tmp_path, main)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 1, output
    assert f"process 1 was lost ({how})" in output


def test_ctrl_c_reaches_every_process_once_and_ends_the_job(tmp_path):
    code, output = interrupt(tmp_path, 1)
    assert code == 1, output
    assert [(tmp_path / str(process)).read_text() for process in (0, 1)] == ["SIGINT"] * 2
    assert "stopped; the same command goes on in run" in output
    assert (tmp_path / "starts").read_text() == "xx", "what was stopped was started again"


def test_a_second_ctrl_c_kills_who_does_not_stop(tmp_path):
    code, output = interrupt(tmp_path, 2, STUBBORN="1")
    assert code == 1, output
    assert [(tmp_path / str(process)).read_text() for process in (0, 1)] == ["SIGINT"] * 2
    assert "was lost" not in output


def test_a_tpu_slice_is_reached_by_ssh_to_all_workers():
    done = launch("tpu_pod.sh", "--tpu", "mine", "--zone", "europe-west4-b", "--install",
                  "--dry-run", "job.yaml", "/shared/a b", "train.steps=3")  # fmt: skip
    assert done.returncode == 0, done.stderr
    pack, copy, install, run = (shlex.split(line) for line in done.stdout.splitlines())
    # What is committed alone: a checkout's runs/ holds secret keys.
    assert pack[0] == "git"
    assert pack[3] == "archive"
    assert pack[-1] == "HEAD"
    assert copy[:5] == ["gcloud", "compute", "tpus", "tpu-vm", "scp"]
    assert any("pip install '.[tpu]'" in word for word in install)
    for words in (copy, install, run):
        assert "--worker=all" in words
        assert words[words.index("--zone") + 1] == "europe-west4-b"
    remote = run[run.index("--command") + 1]
    assert "DPFL_PROCESSES=detect" in remote
    words = shlex.split(remote)
    understood(words[words.index("dpfl") :], "job.yaml", "/shared/a b")


def test_slurm_submits_one_task_per_gpu_that_stops_before_its_time():
    done = launch("slurm.sh", "--nodes", "4", "--gpus-per-node", "8", "--partition", "big",
                  "--setup", "source venv/bin/activate", "--restarts", "7", "--dry-run",
                  "job.yaml", "/shared/a b", "train.steps=3")  # fmt: skip
    assert done.returncode == 0, done.stderr
    script = done.stdout
    options = dict(
        line.removeprefix("#SBATCH --").split("=", 1)
        for line in script.splitlines()
        if line.startswith("#SBATCH") and "=" in line
    )
    assert options["nodes"] == "4"
    assert options["ntasks-per-node"] == options["gpus-per-node"] == "8"
    assert options["signal"] == "TERM@120"
    assert options["partition"] == "big"
    assert "source venv/bin/activate" in script
    (srun,) = (line for line in script.splitlines() if line.startswith("srun"))
    words = shlex.split(srun)
    assert "--kill-on-bad-exit=1" in words
    understood(words[words.index("dpfl") :], "job.yaml", "/shared/a b")
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


@pytest.mark.parametrize(
    ("end", "restarted", "requeued"),
    [(0, 0, False), (2, 0, False), (1, 0, True), (137, 6, True), (1, 7, False)],
)
def test_slurm_requeues_what_was_interrupted(end, restarted, requeued, tmp_path):
    script = launch("slurm.sh", "--restarts", "7", "--dry-run", "job.yaml", "run").stdout
    for name, body in (("srun", f"exit {end}"), ("scontrol", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "5",
        "SLURM_RESTART_COUNT": str(restarted),
    }
    done = subprocess.run(
        ["bash"], input=script, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == end
    assert ("requeue 5" in done.stdout) is requeued


@pytest.mark.parametrize(
    ("where", "hosts", "limit"),
    [
        (["--tpu", "v5e:4x4"], 4, {"google.com/tpu": 4}),
        (["--tpu", "v5p:4x4x4"], 16, {"google.com/tpu": 4}),
        (["--gpus", "8", "--hosts", "2"], 2, {"nvidia.com/gpu": 8}),
    ],
)
def test_kubernetes_tells_every_pod_who_it_is(where, hosts, limit):
    done = launch("kubernetes.py", "--name", "mine", "--image", "image:1", "--claim", "disk",
                  *where, "--dry-run", "/shared/job.yaml", "/shared/run",
                  "train.steps=3")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load(done.stdout)
    assert found["kind"] == "JobSet"
    (part,) = found["spec"]["replicatedJobs"]
    job = part["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == hosts
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    understood(container["command"], "/shared/job.yaml", "/shared/run")
    assert container["resources"]["limits"] == limit
    known = {entry["name"]: entry.get("value") for entry in container["env"]}
    # The first pod of the only job of the set: NAME-JOB-0-0, in the set's own subdomain.
    assert known["DPFL_COORDINATOR"] == f"mine-{part['name']}-0-0.mine:8476"
    assert known["DPFL_NUM_PROCESSES"] == str(hosts)
    assert "DPFL_PROCESS_ID" in known
    # Bad input is not repeated, whatever else goes wrong is.
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
    assert found["spec"]["failurePolicy"]["maxRestarts"] > 0
    if where[0] == "--tpu":
        topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
        assert topology == where[1].split(":")[1]


def test_kubernetes_refuses_what_does_not_divide():
    common = ["--name", "mine", "--image", "i", "--claim", "c", "--dry-run", "a.yaml", "run"]
    assert launch("kubernetes.py", "--tpu", "v5e:abc", *common).returncode == 2
    assert launch("kubernetes.py", "--tpu", "v5e:4x4", "--hosts", "3", *common).returncode == 2
    assert launch("kubernetes.py", "--gpus", "8", *common).returncode == 2


def test_a_run_is_repeated_until_it_is_done(tmp_path):
    done = launch("until_done.sh", "--dry-run", "job.yaml", "runs/a b", "train.steps=3")
    understood(shlex.split(done.stdout), "job.yaml", "runs/a b")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("local.py", ("--processes", "2")),
        ("slurm.sh", ()),
        ("tpu_pod.sh", ("--tpu", "mine", "--zone", "here")),
        ("kubernetes.py", ("--name", "mine", "--image", "i", "--claim", "c", "--tpu", "v5e:4x4")),
    ],
)
def test_programs_are_kept_for_later_starts_and_none_comes_with_a_run(name, options, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    done = launch(name, *options, "--dry-run", "job.yaml", "/shared/run")
    assert done.returncode == 0, done.stderr
    assert "JAX_COMPILATION_CACHE_DIR" in done.stdout
    assert ".cache/dpfl_jax/compiled" in done.stdout
    assert "run.compiled" not in done.stdout


# What the launcher's four commands do here: nothing, except that a silo may fail.
DPFL = """#!/bin/bash
case "$2" in
  init) mkdir -p "$3"; touch "$3/silo.yaml" ;;
  run) if [[ "$3" == *$FAILS ]]; then echo "no such table"; exit 2; fi ;;
  serve) exec sleep "$SERVES" ;;
  check) echo "checked $3" ;;
esac
"""


@pytest.mark.parametrize(("fails", "serves"), [("bern", "60"), ("nobody", "2")])
def test_a_silo_that_cannot_begin_ends_the_federation_and_is_named(fails, serves, tmp_path):
    """The server would wait for it; who finishes ends nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "dpfl").write_text(DPFL)
    (folder / "dpfl").chmod(0o755)
    certificates = tmp_path / "run" / "certificates"
    certificates.mkdir(parents=True)
    (certificates / "server.pem").touch()
    path = f"{folder}:{os.environ['PATH']}"
    ended = subprocess.run(
        [
            "bash",
            LAUNCH / "flower_local.sh",
            "--resume",
            tmp_path / "run",
            "study.yaml",
            "aarau=a",
            "bern=b",
        ],
        env={**os.environ, "PATH": path, "FAILS": fails, "SERVES": serves},
        capture_output=True,
        text=True,
        timeout=50,
    )
    if fails == "bern":
        assert ended.returncode == 1
        assert "silo bern has ended:\nno such table" in ended.stderr
        assert "checked" not in ended.stdout
    else:
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count("checked") == 2


def test_launchers_run_nothing_of_the_current_folder_or_beside_a_run(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    dpfl = DPFL.replace("case", '[ "$1" = train ] && echo "$JAX_COMPILATION_CACHE_DIR"\ncase', 1)
    (tmp_path / "bin" / "dpfl").write_text(dpfl)
    (tmp_path / "bin" / "dpfl").chmod(0o755)
    (tmp_path / "csv.py").write_text("open('ran', 'w')")
    (tmp_path / "run" / "certificates").mkdir(parents=True)
    (tmp_path / "run" / "certificates" / "server.pem").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    for name, value in {"HOME": "/home/me", "FAILS": "nobody", "SERVES": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert launch("until_done.sh", "a.yaml", "run").stdout.strip().startswith("/home/me/.cache/")
    done = launch("flower_local.sh", "--resume", "run")
    assert (tmp_path / "run" / "bern.csv").exists(), done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_federation_uses_no_keys_and_certificates_that_were_sent(tmp_path):
    """Who made the folder knows them, and its `silo.yaml` says where the data are sent."""
    (tmp_path / "run").mkdir()
    (tmp_path / "kept").write_text("mine")
    (tmp_path / "run" / "bern.csv").symlink_to(tmp_path / "kept")
    done = launch("flower_local.sh", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "--resume if this script made it" in done.stderr
    assert (tmp_path / "kept").read_text() == "mine"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["bern.csv"]


def test_commands_of_a_federation_are_quoted():
    """They are printed to be pasted."""
    lines = launch("flower_local.sh", "--dry-run", "r;touch P", "my study.yaml", "b=b.csv").stdout
    silo, server = map(shlex.split, lines.splitlines())
    assert silo == ["dpfl", "silo", "run", "r;touch P/silo-b", "--finish"]
    assert server[:6] == ["dpfl", "silo", "serve", "my study.yaml", "--run-dir", "r;touch P/run"]
