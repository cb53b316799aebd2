"""Of a server, others reach the calls of silos alone."""

import http.server
import shutil
import socket
import subprocess
import threading
import time
import types

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

from dpfl_jax.errors import BadInputError
from dpfl_jax.flower import front as front_module
from dpfl_jax.flower.front import front
from dpfl_jax.flower.node import connected, context_of
from dpfl_jax.flower.silo_folder import SiloConfig
from tests.flower.studies import POLICY


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
    monkeypatch.setattr(front_module, "_STILL_S", 0.3)
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
    monkeypatch.setattr(front_module, "_MOST_BYTES", 3 << 20)
    monkeypatch.setattr(front_module, "_WAIT_S", 0.3)
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
    with pytest.raises(BadInputError, match="look at --host"), front("127.0.0.1", link, 1, None):
        pass
    files = (str(tmp_path / "a"),) * 2
    with pytest.raises(BadInputError, match="look at --cert"), front("127.0.0.1", 0, 1, files):
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
    with pytest.raises(BadInputError, match="no certificates and key"):
        context_of(wrong)
    wrong.config = wrong.config.model_copy(update={"certificate_key": None})
    with pytest.raises(BadInputError, match="set both"):
        context_of(wrong)
