"""The part of a server that others reach: the calls of silos, over TLS, and nothing else.

A SuperLink has one port for silos and for apps to run, and runs the app of whoever reaches it. So
it listens to its own machine alone, and this hands on what silos ask of it.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Iterator

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dpfl_jax.errors import BadInputError

_NOT_HANDED_ON = {
    "host", "connection", "content-length", "content-encoding", "transfer-encoding",
    "accept-encoding",
}  # fmt: skip


def _app(link: int) -> Starlette:
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{link}", timeout=60.0)

    async def hand_on(request: Request) -> Response:
        call = request.path_params["call"]
        if re.fullmatch("[a-z-]+", call) is None:
            return Response(status_code=404)
        told = {k: v for k, v in request.headers.items() if k not in _NOT_HANDED_ON}
        try:
            found = await client.post(
                f"/v1/fleet/{call}", content=await request.body(), headers=told
            )
        except httpx.HTTPError:  # it starts, or is gone
            return Response(status_code=503)
        back = {k: v for k, v in found.headers.items() if k not in _NOT_HANDED_ON}
        return Response(found.content, found.status_code, back)

    return Starlette(routes=[Route("/v1/fleet/{call}", hand_on, methods=["POST"])])


@contextlib.contextmanager
def front(
    host: str, port: int, link: int, tls: tuple[str, str] | None, silos: str | None = None
) -> Iterator[int]:
    """Hands calls of silos on to the SuperLink, until the block ends; yields its own port.

    Args:
      host: address to listen at.
      port: likewise.
      link: port of the SuperLink on this machine.
      tls: files of a certificate and its key; None: without TLS.
      silos: file with the certificate that signs those of silos: who has none is turned away; None:
        whoever reaches the port is heard.

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
