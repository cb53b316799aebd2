"""Of a server, others reach the calls of silos alone."""

import http.server
import threading

import pytest

pytest.importorskip("flwr")

import httpx

from dpfl_jax.errors import BadInputError
from dpfl_jax.flower.front import front


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


def test_what_it_cannot_listen_with_is_one_sentence(link, tmp_path):
    (tmp_path / "a").write_text("no certificate")
    with pytest.raises(BadInputError, match="look at --host"), front("127.0.0.1", link, 1, None):
        pass
    files = (str(tmp_path / "a"),) * 2
    with pytest.raises(BadInputError, match="look at --cert"), front("127.0.0.1", 0, 1, files):
        pass
