"""The server of a study: it waits for the silos, and runs ``run.pipeline`` with them."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from dpfl_jax.errors import BadInputError, StoppedError
from dpfl_jax.flower import federated, isrl
from dpfl_jax.flower.remote import NO_LEDGER, SILOS, RemoteRun, RemoteSilos, Transport
from dpfl_jax.flower.study import study_of
from dpfl_jax.flower.wire import pack, unpack, why_of
from dpfl_jax.run.pipeline import run_experiment
from dpfl_jax.task import Task

_RUNS: dict[str, Any] = {"silos": federated.RemoteFederatedRun, "isrl": isrl.RemoteIsrlRun}
# How many seconds a resumed server waits for all its silos to come back.
_RETURN_S = 60.0


def prepare(
    config: Any, transport: Transport, console: Console, known: list[dict[str, Any]] | None = None
) -> RemoteRun:
    """Waits for the silos to introduce themselves, and calibrates their noise.

    Args:
      config: the study's configuration.
      transport: sends requests to the silos.
      console: shows messages.
      known: the silos' rows of a resumed run, of which some may be gone; None: a new run.

    Raises:
      BadInputError: a silo's study or schema differs; the message names the silo.
      StoppedError: a resumed run has no silo.
    """
    if config.privacy.ledger is not None:
        raise BadInputError(NO_LEDGER)
    study = study_of(config)
    count = config.federation.silos
    console.print(f"waiting for {count} silos", highlight=False)
    most_s = math.inf if known is None else _RETURN_S
    replies = transport.hello(pack({"kind": "hello", "study": study}), count, most_s)
    headers = {}
    for name, reply in sorted(replies.items(), key=_in_order(replies)):
        header, _ = unpack(reply)
        if header["kind"] != "hello":
            raise BadInputError(f"silo {name} refuses: {why_of(header)}")
        headers[name] = header
    if known is not None:  # a silo that is new does not end a resumed run; it is ignored
        names = {row["name"] for row in known}
        headers = {name: header for name, header in headers.items() if name in names}
    elif len(headers) != count:
        raise BadInputError(
            f"{count} silos are expected, but there are {sorted(headers)}: look at federation.silos"
        )
    if not headers:
        raise StoppedError("no silo is connected; run the same command again to resume")
    introduced = {name: _introduced(name, header) for name, header in headers.items()}
    tasks = {name: json.dumps(header["task"], sort_keys=True) for name, header in headers.items()}
    first = next(iter(tasks))
    for name, task in tasks.items():
        if task != tasks[first]:
            raise BadInputError(
                f"the tables of {first} and {name} differ: {tasks[first]} and {task}; give all "
                "silos tables with the same columns"
            )
    rows = [row for row, _ in introduced.values()]
    if known is not None:
        for row in rows:
            if row not in known:
                raise BadInputError(
                    f"the run began with the silos {known}, not with {row}: bring that silo's data "
                    "back, or begin another run"
                )
        rows = known
    with console.status("calibrating noise"):
        silos = RemoteSilos(config, introduced[first][1], rows, transport)
        return _RUNS[config.variant](silos)


def _introduced(name: str, header: Mapping[str, Any]) -> tuple[dict[str, Any], Task]:
    """A silo's row of the plan, and its task, from its reply; BadInputError if it has none."""
    try:
        facts, task = header["facts"], Task.from_json(header["task"])
        whole = "name" not in facts and all(
            type(size) is int and 0 < size < 2**31 for size in facts.values()
        )
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise BadInputError(
            f"silo {name} sent no sizes and task, because it runs other software: install the "
            "server's version there"
        )
    return {"name": name, **facts}, task


def _in_order(names: Mapping[str, Any]) -> Callable[[tuple[str, Any]], Any]:
    """A sort key that orders silos as ``data.table`` does those of a silo column."""
    whole = all(name.isdecimal() for name in names)
    return lambda item: int(item[0]) if whole else item[0]


def run_study(
    config: Any, run_dir: str | os.PathLike[str], transport: Transport, console: Console
) -> dict[str, Any]:
    """Runs (or resumes) a study with remote silos, and returns its report.

    Args:
      config: the study's configuration.
      run_dir: run directory of the server; a run that was killed resumes from its last checkpoint.
      transport: sends requests to the silos.
      console: shows messages.

    Raises:
      BadInputError: a silo refuses; the message has its reason.
      StoppedError: no silo answers.
    """
    path = pathlib.Path(run_dir) / SILOS
    known = json.loads(path.read_text()) if path.exists() else None
    return run_experiment(
        config, run_dir, console, lambda: prepare(config, transport, console, known)
    )
