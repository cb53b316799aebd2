"""What the server's process says, when it does not begin, and what it ends."""

import contextlib
import gc
import io
import os
import pathlib
import signal
import subprocess
import sys
import time
import tomllib
import types

import pytest
import yaml
from rich.console import Console

from dpfl_jax.config import config_to_dict
from dpfl_jax.errors import BadInputError, StoppedError
from tests.flower.studies import QUIET, config_of, study

pytest.importorskip("flwr")
from dpfl_jax.flower import apps
from dpfl_jax.flower import serve as serving
from dpfl_jax.flower.apps import server_app
from dpfl_jax.flower.serve import _print_new, serve


def test_what_a_log_says_is_said_once_and_in_whole_lines(tmp_path):
    log, console = tmp_path / "study.log", Console(file=io.StringIO(), width=40)
    assert _print_new(log, 0, console) == 0
    log.write_text("of the run before\nbern is here\nround")
    told = _print_new(log, len("of the run before\n"), console)
    log.write_text(log.read_text() + " 1/2\n")
    assert _print_new(log, told, console) == log.stat().st_size
    assert console.file.getvalue() == "bern is here\nround 1/2\n"


def test_a_finished_study_is_not_served_again(tmp_path):
    done = tmp_path / "run"
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study()))
    done.mkdir()
    content = config_to_dict(config_of(tmp_path))
    (done / "config.yaml").write_text(yaml.safe_dump({"config": content}))
    (done / "report.json").write_text('{"status": "finished"}')
    with pytest.raises(BadInputError, match="is finished and is not overwritten"):
        serve(tmp_path / "study.yaml", done, QUIET)


def test_a_study_is_told_to_silos_as_it_is_written(tmp_path, monkeypatch):
    """A variable of the server's environment is no part of it."""
    monkeypatch.setenv("DB_PASSWORD", "s3cr3t")
    file = tmp_path / "study.yaml"
    raw = study()
    file.write_text(
        yaml.safe_dump({**raw, "data": {**raw["data"], "user_column": "${DB_PASSWORD}"}})
    )
    told = []

    def keep(config, *_):
        told.append(config.data.user_column)
        raise ZeroDivisionError

    monkeypatch.setattr(serving, "study_of", keep)
    with pytest.raises(ZeroDivisionError):
        serve(file, tmp_path / "run", QUIET)
    assert told == ["${DB_PASSWORD}"]
    monkeypatch.setattr(apps, "run_study", keep)
    monkeypatch.setattr(apps, "_end_with", lambda parent: None)
    started = []
    monkeypatch.setattr(apps.ServerApp, "main", lambda app: started.append)
    server_app()
    context = {"config": file, "run-dir": tmp_path / "run", "log": tmp_path / "log", "wait": 1.0}
    context["outcome"] = tmp_path / "outcome.json"
    with pytest.raises(ZeroDivisionError):
        started[0](None, types.SimpleNamespace(run_config=context))
    assert told == ["${DB_PASSWORD}"] * 2


def test_flowers_process_of_a_server_ignores_the_current_folder_too(monkeypatch):
    done = []
    monkeypatch.setattr(apps, "ignore_matplotlibrc", lambda: done.append(1))
    server_app()
    assert done


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """The folder beside a run, as somebody sent it; and what the server would run."""
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study()))
    ran = []

    def start(environment, app, *_):
        ran.extend(path.relative_to(app).as_posix() for path in app.rglob("*"))
        ran.append(str(pathlib.Path(environment["FLWR_HOME"]).stat().st_mode & 0o777))
        told = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
        pathlib.Path(told["outcome"]).write_text('{"status": "failed", "why": "it is over"}')

    for name in ("_running", "front"):
        monkeypatch.setattr(serving, name, lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(serving, "_start", start)
    folder = tmp_path / "run.flower"
    folder.mkdir()
    return folder, ran


def test_nothing_that_lies_beside_a_run_is_run_or_written_to(sent, tmp_path):
    folder, ran = sent
    (tmp_path / "kept").write_text("mine")
    (folder / "app" / "dpfl_jax").mkdir(parents=True)
    (folder / "app" / "dpfl_jax" / "__init__.py").write_text("raise SystemExit('it ran')")
    for name in ("app/study.py", "app/pyproject.toml", "config.toml"):
        (folder / name).symlink_to(tmp_path / "kept")
    (tmp_path / "run.outcome.json").symlink_to(tmp_path / "kept")
    with pytest.raises(StoppedError, match="it is over"):
        serve(tmp_path / "study.yaml", tmp_path / "run", QUIET)
    assert sorted(ran) == [str(0o700), "pyproject.toml", "study.py"]
    assert (tmp_path / "kept").read_text() == "mine"


@pytest.mark.parametrize("log", ["study.log", "superlink.log"])
def test_logs_of_a_server_are_plain_files(sent, log, tmp_path):
    folder, ran = sent
    (tmp_path / "kept").write_text("mine")
    (folder / log).symlink_to(tmp_path / "kept")
    with pytest.raises(BadInputError, match=f"{log} cannot be opened"):
        serve(tmp_path / "study.yaml", tmp_path / "run", QUIET)
    (folder / log).unlink()
    os.mkfifo(folder / log)
    with pytest.raises(BadInputError, match=f"{log} is no plain file"):
        serve(tmp_path / "study.yaml", tmp_path / "run", QUIET)
    assert not ran
    assert (tmp_path / "kept").read_text() == "mine"


# Flower's commands are looked for beside the interpreter.
BESIDE = """
import sys
from dpfl_jax.cli.main import main
sys.executable = sys.argv[1]
sys.exit(main(sys.argv[2:]))
"""
# As a SuperLink does, it starts what goes on without it; the pipe is open as long as that lives.
LINK = """#!/bin/sh
sleep 60 > "$ALIVE" &
wait
"""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_during_garbage_collection_is_not_lost():
    """Python ignores what its callbacks raise."""

    def signals(phase, _):
        if phase == "stop":
            gc.callbacks.remove(signals)
            signal.raise_signal(signal.SIGTERM)

    with serving.exits_on_sigterm() as check:
        check()
        gc.callbacks.append(signals)
        gc.collect()
        with pytest.raises(SystemExit, match="143"):
            check()


@pytest.mark.slow
def test_a_server_that_is_told_to_end_ends_what_it_started(tmp_path):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study()))
    for name, text in {"flower-superlink": LINK, "flwr": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    alive_file = tmp_path / "alive"
    os.mkfifo(alive_file)
    pipe = os.open(alive_file, os.O_RDONLY | os.O_NONBLOCK)

    def alive():
        try:
            return os.read(pipe, 1) != b""
        except BlockingIOError:  # somebody may still write
            return True

    def waits_for(condition, what):
        end = time.monotonic() + 120
        while not condition():
            assert server.poll() is None, what
            assert time.monotonic() < end, what
            time.sleep(0.05)

    words = ["silo", "serve", "study.yaml", "--run-dir", "run", "--port", "0", "--insecure"]
    server = subprocess.Popen(
        [sys.executable, "-c", BESIDE, str(tmp_path / "python"), *words],
        cwd=tmp_path,
        env={**os.environ, "ALIVE": str(alive_file), "TMPDIR": str(tmp_path)},
    )
    try:
        waits_for(alive, "the server did not begin")
        server.send_signal(signal.SIGTERM)
        assert server.wait(300) == 143
        end = time.monotonic() + 10
        while alive():
            assert time.monotonic() < end, "what it started goes on"
        assert not list(tmp_path.glob("dpfl-*"))
    finally:
        server.kill()
        os.close(pipe)
