"""The protocol as Flower apps. Each Flower message holds one record with the bytes of ``wire``."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from dpfl_jax.errors import BadInputError, StoppedError, ignore_matplotlibrc
from dpfl_jax.flower.server import run_study
from dpfl_jax.flower.silo import UNSAID, SiloClient
from dpfl_jax.flower.study import is_name, read_study
from dpfl_jax.flower.wire import pack, unpack, why_of
from dpfl_jax.run.console import Console
from dpfl_jax.run.directory import open_plain, write_atomically

_RECORD, _BODY = "dpfl", "body"
_POLL_S = 0.1
_AGAIN_S = 20.0  # seconds until a silo that did not answer is asked again; it repeats its reply


def content_of(body: bytes) -> RecordDict:
    """Returns a request or reply as the content of a Flower message."""
    return RecordDict({_RECORD: ConfigRecord({_BODY: body})})


def body_of(message: Message) -> bytes:
    """Returns the request or reply in a Flower message.

    Raises:
      BadInputError: the message holds something else.
    """
    try:
        body = message.content[_RECORD][_BODY]
    except KeyError:
        body = None
    if not isinstance(body, bytes):
        raise BadInputError("a Flower message holds no message of this protocol")
    return body


def client_app(silo: SiloClient) -> ClientApp:
    """Returns a ClientApp whose queries a silo answers."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        del context
        try:
            reply = silo.answer(body_of(message))
        except Exception:  # the reason may depend on the data, so it is not sent
            silo.console.print(traceback.format_exc(), markup=False, highlight=False)
            reply = pack({"kind": "refused", "silo": silo.name, "why": UNSAID})
        return Message(content_of(reply), reply_to=message)

    return app


class GridTransport:
    """Finds silos by name among the nodes of a SuperLink, and asks until they answer."""

    def __init__(self, grid: Grid, wait_s: float, console: Console) -> None:
        """Stores the arguments; ``wait_s`` is how many seconds to wait for a silo that is gone."""
        self._grid, self._wait, self._console = grid, wait_s, console
        self._nodes: dict[str, int] = {}
        self._tokens: dict[str, Any] = {}
        self._hello = b""

    def hello(self, request: bytes, count: int, most_s: float = math.inf) -> dict[str, bytes]:
        """Asks every node until ``count`` silos have answered, for at most ``most_s`` seconds."""
        self._hello = request
        replies: dict[str, bytes] = {}
        asked: dict[str, int] = {}
        known: set[int] = set()
        end = time.monotonic() + most_s
        while len(replies) < count and time.monotonic() < end:
            known |= self._greet(known, asked)
            for node, reply in self._pulled(asked):
                if self._knows(node, reply):
                    replies[name := _name_of(reply)] = reply
                    self._console.print(f"{name} is here ({len(replies)} of {count})", markup=False)
            time.sleep(_POLL_S)
        return replies

    def ask(self, requests: Mapping[str, bytes], most_s: float = math.inf) -> dict[str, bytes]:
        """Returns the replies of all silos that answer in time, even if they restart meanwhile."""
        replies: dict[str, bytes] = {}
        asked: dict[str, int] = {}
        greeted: dict[str, int] = {}
        last: dict[str, float] = {}
        known = set(self._nodes.values())
        end = time.monotonic() + min(self._wait, most_s)
        while len(replies) < len(requests) and time.monotonic() < end:
            for name in self._nodes.keys() & (requests.keys() - replies.keys()):
                if time.monotonic() - last.get(name, -_AGAIN_S) >= _AGAIN_S:
                    last[name] = time.monotonic()
                    self._push(self._nodes[name], requests[name], asked)
            known |= self._greet(known, greeted)
            for node, reply in self._pulled(greeted):
                if _name_of(reply) in requests and self._knows(node, reply):  # it was restarted
                    last.pop(_name_of(reply), None)
            for node, reply in self._pulled(asked):
                replies |= {n: reply for n in requests if self._nodes.get(n) == node}
            time.sleep(_POLL_S)
        return replies

    def _knows(self, node: int, reply: bytes) -> bool:
        """Whether a node that was greeted is a silo, new or restarted.

        Other nodes cannot take a silo's place or end a run, as they do not know its token.
        """
        header, _ = unpack(reply)
        name, why = _name_of(reply), None
        if header["kind"] != "hello":
            why = f"a node that says it is {name} refuses: {why_of(header)}"
        elif self._tokens.setdefault(name, header.get("token")) != header.get("token"):
            why = f"another node says that it is {name}, too: it is ignored"
        else:
            self._nodes[name] = node
        if why is not None:
            self._console.print(why, markup=False, highlight=False)
        return why is None

    def _greet(self, known: set[int], asked: dict[str, int]) -> set[int]:
        new = set(self._grid.get_node_ids()) - known
        for node in new:
            self._push(node, self._hello, asked)
        return new

    def _push(self, node: int, request: bytes, asked: dict[str, int]) -> None:
        message = Message(content_of(request), dst_node_id=node, message_type="query")
        for identity in self._grid.push_messages([message]):
            if identity:
                asked[identity] = node

    def _pulled(self, asked: dict[str, int]) -> list[tuple[int, bytes]]:
        """Replies that have arrived, each with its node; drops messages of other protocols."""
        replies = []
        for message in self._grid.pull_messages(list(asked)) if asked else ():
            node = asked.pop(message.metadata.reply_to_message_id, None)
            if node is not None and message.has_content():
                with contextlib.suppress(BadInputError):  # anyone who reaches the port can send
                    header, _ = unpack(body := body_of(message))
                    name = header.get("name", header.get("silo"))
                    if is_name(name) and isinstance(header.get("kind"), str):
                        replies.append((node, body))
        return replies


def _name_of(reply: bytes) -> str:
    header, _ = unpack(reply)
    return str(header.get("name", header.get("silo")))


def _end_with(parent: int) -> None:
    """Ends this process once its SuperLink was killed, or it would keep the run locked."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def server_app() -> ServerApp:
    """Returns a ServerApp that runs the study that its run configuration names.

    The keys of this run configuration are ``config`` (file of the study's configuration),
    ``run-dir`` (the server's run directory), ``log`` (file for messages), ``wait`` (seconds until a
    silo that is gone is left out) and ``outcome`` (file for how the run ended).
    """
    ignore_matplotlibrc()  # Flower starts this process, not the command line
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        options = context.run_config
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        run_dir, log = pathlib.Path(str(options["run-dir"])), pathlib.Path(str(options["log"]))
        outcome: dict[str, Any] = {}
        # Flower does not show what an app prints, so it goes to a file, whose reader wraps lines.
        with open_plain(log) as file:
            console = Console(file=file, width=1000)
            try:
                transport = GridTransport(grid, float(options["wait"]), console)
                config = read_study(pathlib.Path(str(options["config"])))
                outcome = {"status": run_study(config, run_dir, transport, console)["status"]}
            except (BadInputError, StoppedError) as error:
                outcome = {"status": "failed", "why": str(error)}
            except Exception:
                console.print(traceback.format_exc(), markup=False, highlight=False)
                raise
            finally:
                outcome = outcome or {"status": "failed", "why": f"the server failed: see {log}"}
                write_atomically(pathlib.Path(str(options["outcome"])), json.dumps(outcome))

    return app
