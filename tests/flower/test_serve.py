"""What the server's process says, begins and ends; others reach the calls of silos alone."""

import contextlib
import gc
import http.server
import io
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import types

import pytest
import yaml
from rich.console import Console

from dpfl_jax.config import config_to_dict
from dpfl_jax.errors import BadInputError, StoppedError
from tests.flower.studies import POLICY, QUIET, config_of, study

pytest.importorskip("flwr")
import httpx
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

from dpfl_jax.flower import apps
from dpfl_jax.flower import serve as serving
from dpfl_jax.flower.apps import server_app
from dpfl_jax.flower.node import connected, context_of
from dpfl_jax.flower.serve import _print_new, front, serve
from dpfl_jax.flower.silo_folder import SiloConfig


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
    with pytest.raises(BadInputError, match=f"{log} is not a regular file"):
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


class Link(http.server.BaseHTTPRequestHandler):
    """Answers everything with what it was asked."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("x-signed", self.headers["x-signed"] or "")
        self.end_headers()
        self.wfile.write(self.path.encode() + b" " + body)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *args):
        pass


@pytest.fixture
def link():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Link)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_calls_of_silos_are_handed_on_and_no_others(link):
    with front("127.0.0.1", 0, link, None) as port:
        at = f"http://127.0.0.1:{port}"
        found = httpx.post(
            f"{at}/v1/fleet/pull-messages", content=b"\0body", headers={"X-Signed": "s"}
        )
        assert (found.content, found.headers["x-signed"]) == (
            b"/v1/fleet/pull-messages \0body",
            "s",
        )
        for path in (
            "v1/control/start-run", "v1/runtime/push-object", "docs", "", "v1/fleet/",
            "v1/fleet/%2e%2e%2fcontrol%2fstart-run", "v1/fleet/..%2Fcontrol",
            "v1/fleet/a%3fb", "v1/fleet/a%0d%0ab",
        ):  # fmt: skip
            assert httpx.post(f"{at}/{path}", content=b"x").status_code == 404, path
        assert httpx.get(f"{at}/v1/fleet/pull-messages").status_code == 405


def test_nothing_large_is_held_for_who_is_no_node(link, monkeypatch):
    monkeypatch.setattr(serving, "_STILL_S", 0.3)
    with front("127.0.0.1", 0, link, None) as port:
        at, large = f"http://127.0.0.1:{port}/v1/fleet", bytes((1 << 20) + 1)
        assert httpx.post(f"{at}/push-messages", content=large).status_code == 413
        node = {FLEET_HTTP_PUBLIC_KEY_HEADER: "bern"}
        assert httpx.post(f"{at}/push-object", content=b"x", headers=node).status_code == 401
        assert httpx.post(f"{at}/activate-node", content=b"x", headers=node).status_code == 200
        assert httpx.post(f"{at}/push-object", content=large, headers=node).status_code == 200
        # 100 MiB that are announced, and do not come.
        with socket.create_connection(("127.0.0.1", port), timeout=10) as open_end:
            head = "POST /v1/fleet/push-object HTTP/1.1\r\nHost: a\r\nContent-Length: 104857600\r\n"
            open_end.sendall(f"{head}{FLEET_HTTP_PUBLIC_KEY_HEADER}: bern\r\n\r\n".encode() + b"x")
            assert open_end.recv(100).startswith(b"HTTP/1.1 413")


def test_updates_of_all_nodes_together_are_bounded(link, monkeypatch):
    """Anybody is a node by a key that was just made."""
    monkeypatch.setattr(serving, "_MOST_BYTES", 3 << 20)
    monkeypatch.setattr(serving, "_WAIT_S", 0.3)
    with front("127.0.0.1", 0, link, None) as port:
        at, two = f"http://127.0.0.1:{port}/v1/fleet", bytes(2 << 20)

        def push(node, content):
            node = {FLEET_HTTP_PUBLIC_KEY_HEADER: node}
            return httpx.post(f"{at}/push-object", content=content, headers=node).status_code

        for node in ("bern", "chur"):
            head = {FLEET_HTTP_PUBLIC_KEY_HEADER: node}
            assert httpx.post(f"{at}/activate-node", content=b"x", headers=head).is_success
        assert push("chur", bytes((3 << 20) + 1)) == 413
        with socket.create_connection(("127.0.0.1", port), timeout=10) as open_end:
            head = (
                f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: a\r\nContent-Length: {2 << 20}\r\n"
            )
            open_end.sendall(f"{head}{FLEET_HTTP_PUBLIC_KEY_HEADER}: bern\r\n\r\nx".encode())
            end = time.monotonic() + 10
            while push("bern", b"x") != 503:  # it sends already
                assert time.monotonic() < end
            assert push("chur", two) == 503  # no room beside it
            assert push("chur", bytes(1 << 20)) == 200
        while push("chur", two) != 200:
            assert time.monotonic() < end
        chunks = httpx.post(
            f"{at}/push-object",
            content=iter([b"x"]),
            headers={FLEET_HTTP_PUBLIC_KEY_HEADER: "bern"},
        )
        assert chunks.status_code == 413  # of no length


def test_what_it_cannot_listen_with_is_one_sentence(link, tmp_path):
    (tmp_path / "a").write_text("no certificate")
    with pytest.raises(BadInputError, match="check --host"), front("127.0.0.1", link, 1, None):
        pass
    files = (str(tmp_path / "a"),) * 2
    with pytest.raises(BadInputError, match="check --cert"), front("127.0.0.1", 0, 1, files):
        pass


def certificate(folder, name, authority=None):
    """NAME.pem and NAME.key, signed by another or by itself."""
    san = "subjectAltName=IP:127.0.0.1"
    command = f"req -x509 -newkey rsa:2048 -nodes -days 2 -keyout {name}.key -out {name}.pem"
    command += f" -subj /CN={name} -addext {san}"
    if authority:
        command += f" -CA {authority}.pem -CAkey {authority}.key -addext basicConstraints=CA:FALSE"
    else:
        command += " -addext keyUsage=critical,keyCertSign,cRLSign"
    subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_who_has_no_certificate_of_a_silo_is_turned_away(link, tmp_path):
    for name, authority in (("ca", None), ("other", None), ("server", "ca"), ("bern", "ca"),
                            ("stranger", "other")):  # fmt: skip
        certificate(tmp_path, name, authority)

    def silo(name):
        files = {"certificate": f"{name}.pem", "certificate_key": f"{name}.key"} if name else {}
        told = SiloConfig(
            name="bern", config="", policy=POLICY, root_certificates="ca.pem", **files
        )
        return types.SimpleNamespace(config=told, folder=tmp_path)

    tls = (str(tmp_path / "server.pem"), str(tmp_path / "server.key"))
    with front("127.0.0.1", 0, link, tls, str(tmp_path / "ca.pem")) as port:
        call = f"https://127.0.0.1:{port}/v1/fleet/pull-messages"
        assert httpx.post(call, content=b"x", verify=context_of(silo("bern"))).status_code == 200
        for name in (None, "stranger"):
            with pytest.raises(httpx.HTTPError):
                httpx.post(call, content=b"x", verify=context_of(silo(name)))
            with (
                pytest.raises(httpx.HTTPError),
                connected(f"127.0.0.1:{port}", context_of(silo(name)), 1 << 20),
            ):
                pass
    wrong = silo("bern")
    wrong.config = wrong.config.model_copy(update={"certificate_key": "stranger.key"})
    with pytest.raises(BadInputError, match="not files of certificates"):
        context_of(wrong)
    wrong.config = wrong.config.model_copy(update={"certificate_key": None})
    with pytest.raises(BadInputError, match="set both"):
        context_of(wrong)
