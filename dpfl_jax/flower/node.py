"""A silo's process: a SuperNode that runs no code but what is installed here.

Flower's own SuperNode runs the app that a server sends it, with whatever that does to the data.
This one speaks the same protocol with a SuperLink, never asks for an app, and gives every message
to the silo's ClientApp.
"""

from __future__ import annotations

import functools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from dpfl_jax.errors import BadInputError
from dpfl_jax.flower.apps import client_app
from dpfl_jax.flower.silo import Silo

_POLL_S = 0.2
_RETRY_S = 3.0
_LEAVE_S = 5.0


def run_node(silo: Silo, insecure: bool = False, finish: bool = False) -> None:
    """Answers the server of a silo's configuration until it is interrupted.

    Args:
      silo: whose.
      insecure: without TLS; for tests on one machine.
      finish: return once a run is finished.
    """
    certificates: bytes | None = None
    if silo.config.root_certificates is not None:
        path = silo.folder / pathlib.Path(silo.config.root_certificates).expanduser()
        if not path.is_file():
            raise BadInputError(f"root_certificates: there is no file {path}")
        certificates = path.read_bytes()
    app, before = client_app(silo), _finished(silo)

    def ended() -> bool:
        return finish and _finished(silo) > before

    while True:
        try:
            with http_request_response(
                silo.config.server, insecure, certificates, max_wait_time=_RETRY_S
            ) as connection:
                silo.console.print(f"{silo.name} is connected to {silo.config.server}")
                _serve(connection, app, ended)
            if ended():
                return
        except SystemExit:  # Flower's way to say that nobody is there
            pass
        silo.console.print(f"{silo.name} waits for {silo.config.server}")
        time.sleep(_RETRY_S)


def _finished(silo: Silo) -> int:
    return sum(row["kind"] == "finished" for row in silo.log.rows)


def _serve(connection: Any, app: Any, ended: Callable[[], bool]) -> None:
    node, receive, send, _, _, pull_object, push_object, confirm = connection
    until = math.inf
    while time.monotonic() < until:
        if ended():  # whoever leaves takes back what was not fetched yet
            until = min(until, time.monotonic() + _LEAVE_S)
        got = receive()
        if got is None:
            time.sleep(_POLL_S)
            continue
        message, tree = got
        run = message.metadata.run_id
        started = time.monotonic()
        try:
            message = pull_and_inflate_object_from_tree(
                tree,
                functools.partial(pull_object, run),
                functools.partial(confirm, run),
                return_type=Message,
            )
            message.metadata.__dict__["_message_id"] = tree.object_id
            context = Context(run, node, {}, RecordDict(), {}, 0)
            reply = app(message=message, context=context)
            reply.metadata.__dict__["_message_id"] = reply.object_id
            with no_object_id_recompute():
                needed, session = send(reply, get_object_tree(reply), time.monotonic() - started)
                push_objects(
                    get_all_nested_objects(reply),
                    functools.partial(push_object, run, session),
                    object_ids_to_push=needed,
                )
        except RunNotRunningException:  # the server was restarted and asks anew
            continue
