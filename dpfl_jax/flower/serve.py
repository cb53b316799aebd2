"""The server's process: a SuperLink behind a proxy, which runs the study as a Flower app."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import pathlib
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import uvicorn
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dpfl_jax.config import config_to_dict
from dpfl_jax.errors import BadInputError, StoppedError
from dpfl_jax.files import on_disk
from dpfl_jax.flower.study import read_study, study_of
from dpfl_jax.run.directory import RunDirectory, finished_report, open_plain, private_folder

_APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "dpfl-study"
version = "1.0.0"
description = "A study of dpfl_jax"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "dpfl"

[tool.flwr.app.components]
serverapp = "study:server"
clientapp = "study:none"

[tool.flwr.app.config]
config = {config}
run-dir = {run_dir}
log = {log}
outcome = {outcome}
wait = {wait}
"""
# Only the server runs this app: silos run what is installed with them (``flower.node``).
_STUDY = """\
from flwr.clientapp import ClientApp

from dpfl_jax.flower.apps import server_app

server = server_app()
none = ClientApp()
"""


def serve(
    config: str | os.PathLike[str],
    run_dir: str | os.PathLike[str],
    console: Console,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    tls: tuple[str, str] | None = None,
    silos: str | None = None,
    wait: float = 600.0,
) -> dict[str, Any]:
    """Runs (or resumes) a study as its server, and returns its report.

    Args:
      config: file of the study's configuration, whose contents every silo gets.
      run_dir: run directory of the server; a run that was killed resumes from its last checkpoint.
      console: shows messages.
      host: address to listen at.
      port: port to listen at.
      tls: files of the server's certificate and its key; None: no TLS, for tests on one machine.
      silos: file with the certificate that signs silos' certificates; None: silos need none.
      wait: seconds until a silo that is gone is left out of a round.

    Raises:
      BadInputError: anything is wrong with the configuration or the run directory.
      StoppedError: a silo refuses, no silo answers, or the server was stopped.
    """
    study_of(study := read_study(pathlib.Path(config)))
    RunDirectory.check(run_dir, config_to_dict(study))
    directory = on_disk(run_dir).absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    logs = directory.with_name(directory.name + ".flower")
    private_folder(logs)
    study_log, log = logs / "study.log", logs / "superlink.log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        link = free.getsockname()[1]
    # Insecure, because it listens on localhost, for which the server's certificate is not valid.
    command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(link), "--insecure"]
    command += ["--disable-runtime-dependency-installation"]
    _wait_for_another(directory)
    with open_plain(study_log) as file:
        seen = file.seek(0, os.SEEK_END)
    with exits_on_sigterm() as check, contextlib.ExitStack() as stack:
        # A new folder, because code is run from it, and others may have sent the run directory.
        fresh = tempfile.TemporaryDirectory(prefix="dpfl-", ignore_cleanup_errors=True)
        home = pathlib.Path(stack.enter_context(fresh))
        outcome = home / "outcome.json"
        files = {"config": pathlib.Path(config).absolute(), "run_dir": directory}
        _write_app(home, link, wait, files | {"log": study_log, "outcome": outcome})
        environment = {
            **os.environ,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
        }
        file = stack.enter_context(open_plain(log))
        stack.enter_context(_running(command, environment, file))
        stack.enter_context(front(host, port, link, tls, silos))
        _start(environment, home / "app", log, console, check)
        console.print(f"serving {config} at {host}:{port}; logs: {logs}", markup=False)
        while not outcome.exists():
            check()
            time.sleep(0.2)
            seen = _print_new(study_log, seen, console)
        _print_new(study_log, seen, console)
        how = json.loads(outcome.read_text())
    if how["status"] == "failed":
        raise StoppedError(how["why"])
    report = finished_report(directory)
    if report is None:
        raise StoppedError("the server was stopped; run the same command again to resume")
    return report


@contextlib.contextmanager
def exits_on_sigterm() -> Iterator[Callable[[], None]]:
    """Makes SIGTERM exit with status 143 within the block, so that blocks clean up.

    Yields:
      A function to call regularly: it exits again if the first exit was lost, as Python ignores
      exceptions in callbacks of the garbage collector.
    """
    received = False

    def handle(*_: Any) -> None:
        nonlocal received
        received = True
        sys.exit(143)

    def check() -> None:
        if received:
            sys.exit(143)

    if threading.current_thread() is not threading.main_thread():
        yield check
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield check
    finally:
        signal.signal(signal.SIGTERM, before)


def _write_app(home: pathlib.Path, link: int, wait: float, files: dict[str, pathlib.Path]) -> None:
    """Writes the study as an app, and the address of the SuperLink that runs it."""
    app = home / "app"
    app.mkdir()
    quoted = {name: json.dumps(str(path)) for name, path in files.items()}
    (app / "pyproject.toml").write_text(_APP.format(wait=float(wait), **quoted))
    (app / "study.py").write_text(_STUDY)
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "study"\n\n[superlink.study]\n'
        f'address = "127.0.0.1:{link}"\ninsecure = true\n'
    )


def _print_new(log: pathlib.Path, seen: int, console: Console) -> int:
    """Prints the complete lines of a log after ``seen`` bytes; returns the new number of bytes."""
    whole, _, _ = (log.read_bytes()[seen:] if log.exists() else b"").rpartition(b"\n")
    for line in whole.decode().splitlines():
        console.print(line, markup=False, highlight=False)
    return seen + len(whole) + bool(whole)


def _start(
    environment: dict[str, str],
    app: pathlib.Path,
    log: pathlib.Path,
    console: Console,
    check: Callable[[], None],
) -> None:
    """Submits the study once the SuperLink listens."""
    for attempt in range(60):
        check()
        made = subprocess.run(
            ["flwr", "run", str(app), "study"], env=environment, capture_output=True, text=True
        )
        if made.returncode == 0:
            return
        time.sleep(1.0)
        if attempt == 3:
            console.print("waiting for the SuperLink")
    raise BadInputError(f"the study could not be started: {made.stdout}{made.stderr} (see {log})")


def _wait_for_another(directory: pathlib.Path, most_s: float = 60.0) -> None:
    """Waits until all processes of a server that was killed have ended and unlocked its run."""
    lock, end = directory / "run.lock", time.monotonic() + most_s
    while lock.exists() and time.monotonic() < end:
        with lock.open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                time.sleep(0.5)


def _end_with_parent() -> None:
    """Called in a child process: on Linux, kills it when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str], log: Any) -> Iterator[None]:
    """Runs a process within the block, and then ends it with all processes that it started."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


# ---- a reverse proxy for the SuperLink -----------------------------------------------------------
# A SuperLink takes silos' calls and apps to run on one port, from anyone who reaches it. So it
# listens on localhost only, and this proxy forwards silos' calls, over TLS.

_NOT_FORWARDED = {
    "host", "connection", "content-length", "content-encoding", "transfer-encoding",
    "accept-encoding",
}  # fmt: skip


# Anyone who reaches the port may send any number of bytes, and can become a node with a new key.
# Only silos' updates are large. A node sends one update at a time, and states its length first. An
# update waits until it fits with the others, and must not stall or be too slow.
_LARGE, _MOST_BYTES = "push-object", 2 << 30  # protobuf's limit, here for all nodes together
_MOST_OTHER_BYTES, _MOST_CALLS = 1 << 20, 1000
_STILL_S, _SLOWEST = 60.0, 20_000  # longest pause in seconds, slowest rate in bytes per second
_WAIT_S = 25.0  # a silo gives up after 30 seconds
_NODE = "flwr-public-key"  # the signed header by which a SuperLink recognises a node


async def _body(request: Request, most: int) -> bytes | None:
    """The body of a request; None if it is too long, stalls or is too slow."""
    pieces, held = request.stream(), bytearray()
    try:
        async with asyncio.timeout(_STILL_S + most / _SLOWEST):
            while len(held) <= most:
                held += await asyncio.wait_for(anext(pieces), _STILL_S)
    except StopAsyncIteration:
        return bytes(held)
    except (TimeoutError, ClientDisconnect):
        pass
    return None


def _app(link: int) -> Starlette:
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{link}", timeout=60.0)
    nodes: set[str] = set()
    sending: dict[str, int] = {}  # bytes of each node's update that is on its way

    async def forward_silo_call(request: Request) -> Response:
        call = request.path_params["call"]
        if re.fullmatch("[a-z-]+", call) is None:
            return Response(status_code=404)
        node = request.headers.get(_NODE, "")
        if call != _LARGE:
            return await forward(request, call, node, _MOST_OTHER_BYTES)
        if node not in nodes:
            return Response(status_code=401)
        length = request.headers.get("content-length", "")
        if re.fullmatch("[0-9]{1,10}", length) is None or int(length) > _MOST_BYTES:
            return Response(status_code=413, headers={"connection": "close"})
        end = time.monotonic() + _WAIT_S
        while node in sending or sum(sending.values()) + int(length) > _MOST_BYTES:
            if time.monotonic() > end:
                return Response(status_code=503, headers={"connection": "close"})
            await asyncio.sleep(0.01)
        sending[node] = int(length)
        try:
            return await forward(request, call, node, int(length))
        finally:
            del sending[node]

    async def forward(request: Request, call: str, node: str, most: int) -> Response:
        body = await _body(request, most)
        if body is None:
            return Response(status_code=413, headers={"connection": "close"})
        headers = {k: v for k, v in request.headers.items() if k not in _NOT_FORWARDED}
        try:
            reply = await client.post(f"/v1/fleet/{call}", content=body, headers=headers)
        except httpx.HTTPError:  # the SuperLink is starting, or gone
            return Response(status_code=503)
        if call == "activate-node" and reply.is_success and node:
            nodes.add(node)
        back = {k: v for k, v in reply.headers.items() if k not in _NOT_FORWARDED}
        return Response(reply.content, reply.status_code, back)

    return Starlette(routes=[Route("/v1/fleet/{call}", forward_silo_call, methods=["POST"])])


@contextlib.contextmanager
def front(
    host: str, port: int, link: int, tls: tuple[str, str] | None, silos: str | None = None
) -> Iterator[int]:
    """Forwards silos' calls to the SuperLink until the block ends.

    Args:
      host: address to listen at.
      port: port to listen at.
      link: port of the SuperLink on this machine.
      tls: files of a certificate and its key; None: no TLS.
      silos: file with the certificate that signs silos' certificates; callers without one are
        turned away. None: all callers may connect.

    Yields:
      The port that it listens at.

    Raises:
      BadInputError: it cannot listen there, or the files are not a certificate and its key.
    """
    certificate, key = tls or (None, None)
    config = uvicorn.Config(
        _app(link),
        ssl_certfile=certificate,
        ssl_keyfile=key,
        ssl_ca_certs=silos,
        ssl_cert_reqs=ssl.CERT_NONE if silos is None else ssl.CERT_REQUIRED,
        log_config=None,
        access_log=False,
        limit_concurrency=_MOST_CALLS,
    )
    try:
        config.load()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        what = "--certificate and --key" if isinstance(error, ssl.SSLError) else "--host and --port"
        raise BadInputError(
            f"no server can listen at {host}:{port} ({error}): check {what}"
        ) from None
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()
