"""What a silo's process puts on the wire, byte for byte, and what it never asks for."""

import contextlib
import gzip
import http.server
import io
import threading
import types

import httpx
import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesResponse
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedResponse,
    PullObjectResponse,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from rich.console import Console

from dpfl_jax.flower import apps, node
from dpfl_jax.flower.apps import GridTransport, body_of, client_app, content_of
from dpfl_jax.flower.node import _answer, run_node
from dpfl_jax.flower.silo import UNSAID
from dpfl_jax.flower.silo_folder import SiloConfig
from dpfl_jax.flower.wire import pack
from tests.flower.studies import POLICY


@pytest.fixture(autouse=True)
def _inside_a_run(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 3, raising=False)


class Link:
    """A SuperLink that holds one message, and keeps all that is sent to it."""

    def __init__(self, body, message_type="query"):
        message = Message(content_of(body), dst_node_id=7, message_type=message_type)
        message.metadata.__dict__["_message_id"] = message.object_id
        message.metadata.__dict__["_run_id"] = 3
        self.message, self.tree = message_to_proto(message), get_object_tree(message)
        self.message.content.Clear()
        self.objects = {k: o.deflate() for k, o in get_all_nested_objects(message).items()}
        self.pushed, self.heads = {}, []

    def PullMessages(self, request):
        return PullMessagesResponse(messages_list=[self.message], message_object_trees=[self.tree])

    def PullObject(self, request):
        content = self.objects[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request):
        return ConfirmMessageReceivedResponse()

    def PushMessages(self, request):
        self.heads.append(request)
        left, ids = list(request.message_object_trees), []
        while left:
            tree = left.pop()
            ids.append(tree.object_id)
            left += tree.children
        return PushMessagesResponse(objects_to_push=ids, session_id="s")

    def PushObject(self, request):
        self.pushed[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)


class Answers:
    """In the place of a silo."""

    name, console = "bern", Console(quiet=True)

    def __init__(self, reply):
        self.reply = reply

    def answer(self, request):
        if isinstance(self.reply, Exception):
            raise self.reply
        assert request == b"a request"
        return self.reply


def test_what_is_sent_is_the_reply_and_nothing_else():
    reply = pack({"kind": "message"}, released=np.arange(5000, dtype=np.float32))
    link = Link(b"a request")
    assert _answer(link, Node(node_id=7), client_app(Answers(reply)))
    sent = b"".join(link.pushed.values())
    assert reply in sent
    # Not even how long it took, which tells how many records were drawn.
    assert [list(head.clientapp_runtime_list) for head in link.heads] == [[0.0]]
    around = len(sent) - len(reply) + sum(head.ByteSize() for head in link.heads)
    assert around < 2000  # names and numbers of messages
    # It asked for no app: ``Link`` has nothing else.


def test_what_goes_wrong_in_a_silo_stays_there():
    link = Link(b"a request")
    _answer(link, Node(node_id=7), client_app(Answers(ValueError("patient 17 has no age"))))
    sent = b"".join(link.pushed.values())
    assert UNSAID.encode() in sent
    assert b"patient" not in sent


def test_no_message_ends_a_silo(monkeypatch):
    answers = Answers(b"a reply")
    answers.config = SiloConfig(name="bern", config="", policy=POLICY)
    answers.largest_request = 1 << 20
    answers.log = types.SimpleNamespace(rows=[])
    cut = Link(b"a request")
    cut.objects = {key: value[:9] for key, value in cut.objects.items()}
    links = [Link(b"a request", "train"), Link(b"a request", "query.x"), cut, Link(b"a request")]
    asked = []

    @contextlib.contextmanager
    def connects(*_):
        asked.append(links[len(asked)])
        yield asked[-1], Node(node_id=7)
        assert asked[-1] is links[-1]

    def ended(seconds):
        if len(asked) == len(links):
            answers.log.rows.append({"kind": "finished"})

    monkeypatch.setattr(node, "connected", connects)
    monkeypatch.setattr(node.time, "sleep", ended)
    link = links[-1]
    link.PushMessages = lambda request, push=link.PushMessages: (ended(0), push(request))[1]
    run_node(answers, insecure=True, finish=True)
    assert len(asked) == len(links)
    assert link.pushed


class Large(http.server.BaseHTTPRequestHandler):
    """Answers with more than anybody has asked for."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        body = self.server.body
        self.send_response(200)
        if (encoding := self.server.encoding) is not None:
            self.send_header("content-encoding", encoding)
        self.server.accepted.add(self.headers["accept-encoding"])
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # who reads has left
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("compressed", [True, False])
def test_a_server_does_not_fill_a_silos_memory(compressed, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Large)
    body = bytes(1 << 20)
    server.body = gzip.compress(gzip.compress(body)) if compressed else body
    server.encoding, server.accepted = "gzip, gzip" if compressed else None, set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with (
            pytest.raises(httpx.HTTPError, match="compressed" if compressed else "larger than"),
            node.connected(f"127.0.0.1:{server.server_port}", None, 1000),
        ):
            pass
        assert server.accepted == {"identity"}
    finally:
        server.shutdown()
        server.server_close()


def test_a_request_has_no_parts_without_end():
    link = Link(b"a request")
    link.tree.children.extend([link.tree.children[0]] * 100)
    link.PullObject = None  # nothing is fetched
    with pytest.raises(httpx.HTTPError, match="more parts than a request has"):
        _answer(link, Node(node_id=7), client_app(Answers(b"a reply")))


def test_a_message_of_something_else_is_refused():
    with pytest.raises(Exception, match="no message of this protocol"):
        body_of(Message(content_of("text"), dst_node_id=7, message_type="query"))


NOBODY = (
    {},
    {"name": "bern"},
    {"kind": "hello"},
    {"kind": ["hello"], "name": "bern"},
    {"kind": "hello", "name": "bern\nall is well"},
    {"kind": "hello", "name": "b" * 301},
)


def test_what_a_stranger_answers_stops_no_server():
    def reply(content, to):
        metadata = types.SimpleNamespace(reply_to_message_id=to)
        return types.SimpleNamespace(content=content, metadata=metadata, has_content=lambda: True)

    known = pack({"kind": "hello", "name": "bern"})
    rubbish = [{}, content_of(b"rubbish"), *(content_of(pack(told)) for told in NOBODY)]
    replies = [reply(content, i) for i, content in enumerate((*rubbish, content_of(known)))]
    grid = types.SimpleNamespace(pull_messages=lambda identities: replies)
    transport = GridTransport(grid, 1.0, Console(quiet=True))
    last = len(rubbish)
    assert transport._pulled({i: i for i in range(last + 1)}) == [(last, known)]


class Nodes:
    """A SuperLink's nodes by number; what each answers to a hello, and to all else."""

    def __init__(self, **replies):
        self.replies = {int(name[1:]): pack(told) for name, told in replies.items()}
        self.asked, self.waiting = [], {}

    def get_node_ids(self):
        return list(self.replies)

    def push_messages(self, messages):
        made = []
        for message in messages:
            node = message.metadata.dst_node_id
            self.asked.append((node, body_of(message)))
            made.append(f"{node}-{len(self.asked)}")
            self.waiting[made[-1]] = self.replies[node]
        return made

    def pull_messages(self, identities):
        found = []
        for identity in identities:
            metadata = types.SimpleNamespace(reply_to_message_id=identity)
            content = content_of(self.waiting.pop(identity))
            found.append(
                types.SimpleNamespace(content=content, metadata=metadata, has_content=lambda: True)
            )
        return found


def test_a_stranger_takes_no_silos_place_and_ends_no_study(monkeypatch):
    """Without certificates anybody may say that it is a silo, or that it refuses."""
    monkeypatch.setattr(apps, "_POLL_S", 0.0)
    bern = {"kind": "hello", "name": "bern", "token": "b"}
    refused = {"kind": "refused", "silo": "bern", "why": "ha"}
    refused["why"] = "ha\nround 7: all is well" + "a" * 3_000_000
    nodes = Nodes(n1=refused, n2=bern, n3={**bern, "token": "?"}, n4=refused)
    said = io.StringIO()
    transport = GridTransport(nodes, 60.0, Console(file=said, width=200))
    nodes.replies[5] = pack({"kind": "hello", "name": "chur", "token": "c"})
    found = transport.hello(b"hello", 2)
    assert set(found) == {"bern", "chur"}
    assert transport._nodes == {"bern": 2, "chur": 5}
    for text in ("it is bern refuses: ha?round 7", "another node says that it is bern, too"):
        assert text in said.getvalue()
    assert len(said.getvalue()) < 5000
    # While the study runs a stranger comes, then bern again, under another number.
    nodes.replies |= {6: pack({**bern, "token": None}), 7: pack(refused)}
    assert set(transport.ask({"bern": b"round"})) == {"bern"}
    assert transport._nodes["bern"] == 2
    assert not {(node, b"round") for node in (6, 7)} & set(nodes.asked)
    nodes.replies |= {8: pack(bern)}
    assert set(transport.ask({"bern": b"round"})) == {"bern"}
    assert transport._nodes["bern"] == 8
    assert (8, b"round") in nodes.asked
