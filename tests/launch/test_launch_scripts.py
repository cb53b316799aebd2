"""The launch scripts say what they would do, and do nothing else on a dry run."""

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

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


def shellcheck(*args, **options):
    places = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    checker = shutil.which("shellcheck", path=places)
    done = subprocess.run([checker, *args], capture_output=True, text=True, timeout=60, **options)
    assert done.returncode == 0, done.stdout


def test_shell_scripts_are_clean():
    shellcheck(*sorted(LAUNCH.glob("*.sh")), LAUNCH.parent / "reproductions" / "on_gpu.sh")


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
    # The standard images' own Python is too old.
    assert any("uv sync --frozen --no-dev --extra tpu --python 3.13" in word for word in install)
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
    shellcheck("--shell=bash", "--exclude=SC1091", "-", input=script)
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
    # srun does not inherit it.
    assert f"--cpus-per-task={options['cpus-per-task']}" in words
    understood(words[words.index("dpfl") :], "job.yaml", "/shared/a b")


def test_slurm_runs_in_a_container_if_asked():
    done = launch("slurm.sh", "--container-image", "my image.sqsh", "--container-mounts",
                  "/shared:/shared", "--dry-run", "job.yaml", "run", "train.steps=3")  # fmt: skip
    (srun,) = (line for line in done.stdout.splitlines() if line.startswith("srun"))
    words = shlex.split(srun)
    assert "--container-image=my image.sqsh" in words
    assert "--container-mounts=/shared:/shared" in words
    understood(words[words.index("dpfl") :], "job.yaml", "run")


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


def jobset(*options, storage=("--claim", "disk"), run="/shared/run"):
    """The manifest, which JobSet's and Kubernetes' schemas know all fields of."""
    done = launch("kubernetes.py", "--name", "mine", "--image", "image:1", *storage,
                  *options, "--dry-run", "/shared/job.yaml", run, "train.steps=3")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load(done.stdout)
    known = JobsetV1alpha2JobSet.from_dict(found)  # required fields and types
    assert known.to_dict() == found, "a field that the schemas do not know"
    (part,) = found["spec"]["replicatedJobs"]
    pod = part["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    understood(container["command"], "/shared/job.yaml", run)
    return found, part, pod, container


@pytest.mark.parametrize(
    ("where", "hosts", "limit"),
    [
        (["--tpu", "v5e:4x4"], 4, {"google.com/tpu": 4}),
        (["--tpu", "v5p:4x4x4"], 16, {"google.com/tpu": 4}),
        (["--gpus", "8", "--hosts", "2"], 2, {"nvidia.com/gpu": 8}),
    ],
)
def test_kubernetes_tells_every_pod_who_it_is(where, hosts, limit):
    found, part, pod, container = jobset(*where)
    assert found["kind"] == "JobSet"
    job = part["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == hosts
    assert container["resources"]["limits"] == limit
    ((device, count),) = limit.items()
    asked = {"cpu": str(2 * count), "memory": f"{8 * count}Gi", device: count}
    assert container["resources"]["requests"] == asked
    assert device in [toleration["key"] for toleration in pod["tolerations"]]
    known = {entry["name"]: entry.get("value") for entry in container["env"]}
    # The first pod of the only job of the set: NAME-JOB-0-0, in the set's own subdomain.
    assert known["DPFL_COORDINATOR"] == f"mine-{part['name']}-0-0.mine:8476"
    assert known["DPFL_NUM_PROCESSES"] == str(hosts)
    assert "DPFL_PROCESS_ID" in known
    exclusive = found["metadata"].get("annotations", {})
    if where[0] == "--tpu":
        topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
        assert topology == where[1].split(":")[1]
        assert list(exclusive) == ["alpha.jobset.sigs.k8s.io/exclusive-topology"]
    else:
        assert not exclusive


# What the Job controller writes (the first two by rules 0 and 1 of the pods), and what JobSet does.
@pytest.mark.parametrize(
    ("reason", "message", "action"),
    [
        (
            "PodFailurePolicy",
            "Container dpfl for pod default/mine-run-0-1-x failed with exit code 2 matching "
            "FailJob rule at index 0",
            "FailJobSet",
        ),
        (
            "PodFailurePolicy",
            "Pod default/mine-run-0-1-x has condition DisruptionTarget matching FailJob rule at "
            "index 1",
            "RestartJobSetAndIgnoreMaxRestarts",
        ),
        ("BackoffLimitExceeded", "Job has reached the specified backoff limit", None),
    ],
)
def test_kubernetes_counts_no_evictions_and_repeats_no_bad_input(reason, message, action):
    found, part, _, _ = jobset("--tpu", "v5e:4x4", "--restarts", "7")
    wrong, evicted = part["template"]["spec"]["podFailurePolicy"]["rules"]
    assert wrong["onExitCodes"]["values"] == [2]
    assert evicted["onPodConditions"][0]["type"] == "DisruptionTarget"
    policy = found["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7
    matching = [
        rule["action"]
        for rule in policy["rules"]
        if reason in rule["onJobFailureReasons"]
        and any(re.search(known, message) for known in rule["onJobFailureMessagePatterns"])
    ]
    assert matching == ([] if action is None else [action])
    assert all(re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
               for rule in policy["rules"])  # fmt: skip


def test_kubernetes_takes_spot_slices_of_a_queue():
    found, part, pod, container = jobset(
        "--tpu", "v5e:16x16", "--slices", "2", "--spot", "--queue", "research"
    )
    assert found["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}
    assert part["replicas"] == 2
    assert part["template"]["spec"]["completions"] == 64
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert "cloud.google.com/gke-spot" in [found["key"] for found in pod["tolerations"]]
    known = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert known["DPFL_PROCESSES"] == "detect"
    assert "DPFL_PROCESS_ID" not in known, "the same in both slices"


def test_kubernetes_takes_the_gpus_and_the_network_that_are_asked_for():
    _, _, pod, container = jobset(
        "--gpus", "8", "--hosts", "2", "--select", "cloud.google.com/gke-accelerator=h100",
        "--tolerate", "team=mine", "--rdma", "rdma/ib=8", "--cpu", "100", "--memory", "1Ti",
    )  # fmt: skip
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "h100"}
    assert {"key": "team", "operator": "Equal", "value": "mine", "effect": "NoSchedule"} in pod[
        "tolerations"
    ]
    limits = {"nvidia.com/gpu": 8, "rdma/ib": "8"}
    assert container["resources"]["limits"] == limits
    assert container["resources"]["requests"] == {"cpu": "100", "memory": "1Ti", **limits}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}


def test_an_image_is_made_of_what_a_checkout_has():
    text = (LAUNCH / "Dockerfile").read_text()
    lines = re.findall("^COPY (?!--from)(.*)$", text, re.MULTILINE)
    copied = {name for line in lines for name in line.split()[:-1]}
    assert {"uv.lock", "dpfl_jax", "configs"} <= copied
    assert "." not in copied, "runs/ holds secret keys"
    assert all((LAUNCH.parent / name).exists() for name in copied)


def test_skypilot_starts_one_process_a_node(tmp_path):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    for part in ("setup", "run"):
        shellcheck("--shell=bash", "-", input=task[part])
    assert set(task["envs"]) == {"CONFIG", "RUN_DIR", "OVERRIDES", "NFS"}
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    dpfl = tmp_path / ".venv" / "bin" / "dpfl"
    dpfl.write_text(
        '#!/bin/bash\nprintf "%s\\n" "$DPFL_COORDINATOR" "$DPFL_NUM_PROCESSES" "$DPFL_PROCESS_ID" '
        'dpfl "$@"\n'
    )
    dpfl.chmod(0o755)
    given = {"CONFIG": "job.yaml", "RUN_DIR": "/shared/a b", "OVERRIDES": "train.steps=3"}
    sky = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
    }
    done = subprocess.run(
        ["bash", "-c", task["run"]], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, **given, **sky},
    )  # fmt: skip
    address, total, mine, *words = done.stdout.splitlines()
    assert (address, total, mine) == ("10.0.0.1:8476", "2", "1")
    understood(words, "job.yaml", "/shared/a b")


def test_kubernetes_needs_no_volume_for_a_run_in_a_bucket():
    _, _, pod, container = jobset("--tpu", "v5e:4x4", storage=(), run="gs://bucket/run")
    assert [volume["name"] for volume in pod["volumes"]] == ["memory"]
    assert [mount["name"] for mount in container["volumeMounts"]] == ["memory"]
    assert all("CACHE" not in entry["name"] for entry in container["env"])
    alone = launch("kubernetes.py", "--name", "mine", "--image", "i", "--tpu", "v5e:4x4",
                   "--dry-run", "a.yaml", "/run")  # fmt: skip
    assert alone.returncode == 2
    assert "RUN_DIR is /run, which only this pod would see: give --claim" in alone.stderr


def test_kubernetes_refuses_what_does_not_divide():
    common = ["--name", "mine", "--image", "i", "--claim", "c", "--dry-run", "a.yaml", "run"]
    assert launch("kubernetes.py", "--tpu", "v5e:abc", *common).returncode == 2
    assert launch("kubernetes.py", "--tpu", "v5e:4x4", "--hosts", "3", *common).returncode == 2
    assert launch("kubernetes.py", "--gpus", "8", *common).returncode == 2


def test_a_run_is_repeated_until_it_is_done(tmp_path):
    done = launch("until_done.sh", "--dry-run", "job.yaml", "runs/a b", "train.steps=3")
    understood(shlex.split(done.stdout), "job.yaml", "runs/a b")


# In the place of a command that runs long: writes each start and signal down, and then ends.
RUNS_LONG = """#!/bin/bash
trap 'echo INT >>heard; exit 1' INT
trap 'echo TERM >>heard; exit 1' TERM
echo start >>heard
for _ in {1..500}; do sleep 0.1; done
"""
# Two shells that start their command again: how they are called, and what runs long.
REPEATERS = {
    "until_done.sh": ((), "dpfl"),
    "tpu_pod.sh": (("--tpu", "mine", "--zone", "here"), "gcloud"),
}


def heard(folder, count):
    """What was written down, once there are so many words."""
    file, deadline = folder / "heard", time.monotonic() + 30
    while not file.exists() or len(file.read_text().split()) < count:
        assert time.monotonic() < deadline, file.read_text() if file.exists() else "nothing"
        time.sleep(0.02)
    return file.read_text().split()


def repeater(folder, name, body):
    """One of ``REPEATERS``, started, in ``folder``, with ``body`` as what it repeats."""
    options, command = REPEATERS[name]
    (folder / command).write_text(body)
    (folder / command).chmod(0o755)
    return subprocess.Popen(
        ["bash", LAUNCH / name, *options, "a.yaml", "run"],
        cwd=folder,
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        # A shell cannot trap what was ignored when it began, as in the background of a script.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


@pytest.mark.parametrize("by", ["Ctrl-C", "SIGTERM"])
def test_a_stopped_run_hears_it_once_and_is_not_repeated(by, tmp_path):
    job = repeater(tmp_path, "until_done.sh", RUNS_LONG)
    try:
        heard(tmp_path, 1)
        if by == "Ctrl-C":  # a terminal sends it to the whole process group
            os.killpg(job.pid, signal.SIGINT)
        else:
            job.terminate()
        _, said = job.communicate(timeout=30)
    finally:
        job.kill()
    assert job.returncode == 1
    assert heard(tmp_path, 2) == ["start", "INT" if by == "Ctrl-C" else "TERM"]
    assert "stopped; the same command resumes" in said


@pytest.mark.parametrize("name", REPEATERS)
def test_no_run_is_started_if_the_signal_comes_between_two(name, tmp_path):
    job = repeater(tmp_path, name, "#!/bin/bash\necho start >>heard; exit 1\n")
    try:
        heard(tmp_path, 1)
        time.sleep(0.3)
        os.killpg(job.pid, signal.SIGINT)
        job.communicate(timeout=30)
    finally:
        job.kill()
    assert job.returncode == 1
    # The workers of a slice are told all the same.
    assert heard(tmp_path, 1) == ["start"] * (2 if name == "tpu_pod.sh" else 1)


def test_a_slice_is_stopped_by_a_call_to_its_workers(tmp_path):
    """ssh passes no signal on; the run on the workers, and with it the first call, ends."""
    told = 'case "$*" in *pkill*) echo told >>heard; touch told; exit ;; esac\n'
    runs = "echo start >>heard\nfor _ in {1..500}; do [ -e told ] && exit 1; sleep 0.1; done\n"
    job = repeater(tmp_path, "tpu_pod.sh", "#!/bin/bash\n" + told + runs)
    try:
        heard(tmp_path, 1)
        os.killpg(job.pid, signal.SIGINT)
        job.communicate(timeout=30)
    finally:
        job.kill()
    assert job.returncode == 1
    assert heard(tmp_path, 2) == ["start", "told"]


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
