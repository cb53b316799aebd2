"""A silo's process: a SuperNode that runs only the code that is installed here.

Flower's SuperNode runs any app that a server sends, with access to the data. This node speaks the
same protocol with a SuperLink, but never asks for an app: it passes every message to the silo's
ClientApp. If a connection fails, it makes another, because the silo's folder holds what was
answered.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from flwr.app import Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from dpfl_jax.errors import BadInputError
from dpfl_jax.flower.apps import client_app
from dpfl_jax.flower.silo import SiloClient

_POLL_S = 0.2
_RETRY_S = 2.0
# Seconds until a node leaves: replies that the server has not fetched by then are lost.
_LEAVE_S = 5.0
_OBJECTS = 3  # objects in a request: the message, its content, the record of bytes


def run_node(silo: SiloClient, insecure: bool = False, finish: bool = False) -> None:
    """Answers the server of a silo's configuration until it is interrupted.

    Args:
      silo: the silo that answers.
      insecure: whether to connect without TLS, for tests on one machine.
      finish: whether to return once a run is finished.
    """
    tls = None if insecure else context_of(silo)
    for name in ("flwr", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    app, before = client_app(silo), _finished(silo)

    def ended() -> bool:
        return finish and _finished(silo) > before

    waiting = False
    while not ended():
        try:
            most = silo.largest_request
            with connected(silo.config.server, tls, most) as (client, node):
                silo.console.print(f"{silo.name} is connected to {silo.config.server}")
                waiting = False
                while not ended():
                    if not _answer(client, node, app):
                        time.sleep(_POLL_S)
                time.sleep(_LEAVE_S)
        except Exception as error:  # a missing server, or what one sends, must not end a silo
            if not waiting:
                why = f"{silo.name} waits for {silo.config.server}: {error}"
                silo.console.print(why, markup=False, highlight=False)
            waiting = True
            time.sleep(_RETRY_S)


def context_of(silo: SiloClient) -> ssl.SSLContext:
    """Returns the TLS context with which a silo and its server recognise each other.

    Raises:
      BadInputError: a file is missing, or is not a certificate or key.
    """
    names = ("root_certificates", "certificate", "certificate_key")
    files: dict[str, str | None] = dict.fromkeys(names)
    for name in names:
        if (given := getattr(silo.config, name)) is not None:
            path = silo.folder / pathlib.Path(given).expanduser()
            if not path.is_file():
                raise BadInputError(f"{name}: there is no file {path}")
            files[name] = str(path)
    root, mine, key = files.values()
    if (mine is None) != (key is None):
        raise BadInputError("certificate and certificate_key of silo.yaml go together: set both")
    try:
        context = ssl.create_default_context(cafile=root)
        if mine is not None:
            context.load_cert_chain(mine, key)
    except ssl.SSLError as error:
        raise BadInputError(
            f"{', '.join(name for name in names if files[name])} in silo.yaml are not files of "
            f"certificates and a matching key ({error.reason}): set them to such files"
        ) from None
    return context


def _finished(silo: SiloClient) -> int:
    return sum(row["kind"] == "finished" for row in silo.log.rows)


@contextlib.contextmanager
def connected(
    address: str, tls: ssl.SSLContext | None, most: int
) -> Iterator[tuple[FleetHttpClient, Node]]:
    """Registers a node at the SuperLink, with a new identity for this connection.

    Args:
      address: HOST:PORT of the server.
      tls: context that checks the server's identity; None: no TLS.
      most: largest number of bytes in a reply; a longer reply ends the connection.

    Yields:
      The HTTP client, and the node.
    """
    private, public = generate_key_pairs()
    identity = public_key_to_bytes(public)
    signs: Any = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(private, public),
    ]
    with FleetHttpClient(
        f"http{'s' * (tls is not None)}://{address}", interceptors=signs, verify=tls or False
    ) as client:
        client._client.follow_redirects = False  # a server must not make a silo call other machines
        client._client.headers["accept-encoding"] = "identity"
        client._client.event_hooks = {"response": [functools.partial(_read, most=most)]}
        client.RegisterNode(RegisterNodeFleetRequest(public_key=identity))
        interval = HEARTBEAT_DEFAULT_INTERVAL
        made = client.ActivateNode(
            ActivateNodeRequest(public_key=identity, heartbeat_interval=interval)
        )
        node, over = Node(node_id=made.node_id), threading.Event()

        def beat() -> None:
            request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=interval)
            while not over.wait(interval / 3):
                with contextlib.suppress(httpx.HTTPError, RuntimeError):
                    client.SendNodeHeartbeat(request)

        beating = threading.Thread(target=beat, daemon=True)
        beating.start()
        try:
            yield client, node
        finally:
            over.set()
            beating.join()
            with contextlib.suppress(httpx.HTTPError, RuntimeError):
                client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
                client.UnregisterNode(UnregisterNodeFleetRequest(node_id=node.node_id))


def _read(response: httpx.Response, most: int) -> None:
    """Reads a reply, but not one that is too long, or compressed and might expand to too much."""
    if "content-encoding" in response.headers:
        raise httpx.RemoteProtocolError("its reply is compressed, which was not asked for")
    held = bytearray()
    for piece in response.iter_raw():
        held += piece
        if len(held) > most:
            raise httpx.RemoteProtocolError(
                f"its reply is larger than the {most:,} bytes that this study's model needs"
            )
    response._content = bytes(held)


def _answer(client: FleetHttpClient, node: Node, app: Callable[..., Message]) -> bool:
    """Answers one message; returns whether there was one."""
    got = client.PullMessages(PullMessagesRequest(node=node))
    if not got.messages_list:
        return False
    run = message_from_proto(got.messages_list[0]).metadata.run_id
    tree = got.message_object_trees[0]
    if sum(1 for _ in iterate_object_tree(tree)) > _OBJECTS:
        raise httpx.RemoteProtocolError("its message has more parts than a request has")
    message = pull_and_inflate_object_from_tree(
        tree,
        make_pull_object_fn_protobuf(client.PullObject, node, run),
        make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run),
        return_type=Message,
    )
    message.metadata.__dict__["_message_id"] = tree.object_id
    reply = app(message=message, context=Context(run, node.node_id, {}, RecordDict(), {}))
    reply.metadata.__dict__["_message_id"] = reply.object_id
    with no_object_id_recompute():
        pushed = client.PushMessages(
            PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[0.0],  # the true time depends on how many were sampled
            )
        )
        push_objects(
            get_all_nested_objects(reply),
            make_push_object_fn_protobuf(client.PushObject, node, run, pushed.session_id),
            object_ids_to_push=set(pushed.objects_to_push),
        )
    return True
