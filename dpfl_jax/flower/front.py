"""A reverse proxy for a SuperLink: it forwards the calls of silos, over TLS, and nothing else.

A SuperLink has one port for silos and for apps to run, and runs the app of anybody who reaches it.
So it listens on localhost alone, and this forwards what silos ask of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dpfl_jax.errors import BadInputError

_NOT_FORWARDED = {
    "host", "connection", "content-length", "content-encoding", "transfer-encoding",
    "accept-encoding",
}  # fmt: skip


# Anybody who reaches the port may send bytes without end, and is a node by a key made a moment ago.
# Only updates of silos are large: a node sends one at a time and states its length first; what does
# not fit with the others waits, and none may stall or crawl.
_LARGE, _MOST_BYTES = "push-object", 2 << 30  # what protobuf allows, of all nodes together
_MOST_OTHER_BYTES, _MOST_CALLS = 1 << 20, 1000
_STILL_S, _SLOWEST = 60.0, 20_000  # bytes a second
_WAIT_S = 25.0  # after 30 a silo gives up
_NODE = "flwr-public-key"  # the header by which a SuperLink knows a node, signed


async def _body(request: Request, most: int) -> bytes | None:
    """The body of a request; None if it is too long, or stalls."""
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
    """Forwards calls of silos to the SuperLink until the block ends; yields the port.

    Args:
      host: address to listen at.
      port: to listen at.
      link: port of the SuperLink on this machine.
      tls: files of a certificate and its key; None: without TLS.
      silos: file with the certificate that signs those of silos, without which a caller is turned
        away; None: all callers are heard.

    Raises:
      BadInputError: it cannot listen there, or the files are no certificate and key.
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
            f"no server can be at {host}:{port} ({error}): look at {what}"
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
