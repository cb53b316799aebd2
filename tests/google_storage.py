"""A stand-in for Google Cloud Storage: the JSON API, with preconditions on generations.

It has one bucket, and as much as gcsfs and TensorStore use.
"""

import http.server
import itertools
import json
import re
import threading
import urllib.parse

# What has the clients use it (``conf`` is fsspec's, which reads its variables once).
ENVIRONMENT = {
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else it asks for the kind of bucket, by gRPC
    "FSSPEC_GCS_TOKEN": "anon",
    "GCE_METADATA_ROOT": "127.0.0.1:1",  # TensorStore asks there for credentials
}
BUCKET = "bucket"


def environment(port):
    """The variables that send clients to it."""
    here = f"http://127.0.0.1:{port}"
    return {**ENVIRONMENT, "STORAGE_EMULATOR_HOST": here, "TENSORSTORE_GCS_HTTP_URL": here}


class Server(http.server.ThreadingHTTPServer):
    """``objects``: (content, generation) by name."""

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.objects, self.pieces, self.lock = {}, {}, threading.Lock()
        self.generations = itertools.count(1000)

    def handle_error(self, request, client_address):
        """A client that is killed, or no longer wants to know, is no error."""


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def _answer(self, status, body=b"", **headers):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def _missing(self):
        self._answer(404, {"error": {"code": 404, "message": "Not Found"}})

    def _asked(self):
        """(name of the bucket, of the object or "", what follows the question mark)"""
        url = urllib.parse.urlsplit(self.path)
        found = re.search(r"/b/([^/]+)(?:/o(?:/([^/]+))?)?", url.path)
        bucket, name = (urllib.parse.unquote(x or "") for x in found.groups())
        return bucket, name, dict(urllib.parse.parse_qsl(url.query))

    def _about(self, name):
        content, generation = self.server.objects[name]
        made = {"kind": "storage#object", "name": name, "bucket": BUCKET}
        return {**made, "size": str(len(content)), "generation": str(generation)}

    def do_GET(self):
        objects, (bucket, name, query) = self.server.objects, self._asked()
        if bucket != BUCKET or (name and name not in objects):
            return self._missing()
        if not name:
            if not urllib.parse.urlsplit(self.path).path.endswith("/o"):
                return self._answer(200, {"kind": "storage#bucket", "name": BUCKET})
            return self._list(query)
        if query.get("alt") != "media":
            return self._answer(200, self._about(name))
        content, generation = objects[name]
        tags = {"x_goog_generation": generation, "x_goog_stored_content_length": len(content)}
        if not (span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
            return self._answer(200, content, **tags)
        first, last = int(span[1]), min(int(span[2] or len(content)), len(content) - 1)
        if first >= len(content):
            return self._answer(416, Content_Range=f"bytes */{len(content)}")
        where = f"bytes {first}-{last}/{len(content)}"
        return self._answer(206, content[first : last + 1], Content_Range=where, **tags)

    def _list(self, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        first = query.get("pageToken", query.get("startOffset", ""))
        most = int(query.get("maxResults", 1000))
        names = sorted(n for n in list(self.server.objects) if n.startswith(prefix) and n >= first)
        folders = set()
        if delimiter:
            folders = {n[: n.index(delimiter, len(prefix)) + 1] for n in names
                       if delimiter in n[len(prefix) :]}  # fmt: skip
            names = [n for n in names if delimiter not in n[len(prefix) :]]
        page = {"kind": "storage#objects", "items": [self._about(n) for n in names[:most]]}
        page |= {"prefixes": sorted(folders)} if folders else {}
        self._answer(200, page | ({"nextPageToken": names[most]} if names[most:] else {}))

    def do_POST(self):
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "/batch/" in self.path:
            return self._remove_all(data)
        bucket, name, query = self._asked()
        if bucket != BUCKET:
            return self._missing()
        name, condition = query.get("name", name), query.get("ifGenerationMatch")
        if query["uploadType"] == "resumable":
            if "pieces" not in query:
                base = f"http://{self.headers['Host']}{self.path}&pieces={next(self.server.generations)}"
                return self._answer(200, Location=base)
            span, pieces = self.headers["Content-Range"], self.server.pieces
            pieces[query["pieces"]] = data = pieces.get(query["pieces"], b"") + data
            if span.endswith("/*"):  # more follows
                return self._answer(308, Range=f"bytes=0-{len(data) - 1}")
        if query["uploadType"] == "multipart":
            border = re.search("boundary=['\"]?([^'\";]+)", self.headers["Content-Type"])[1]
            _, meta, data = data.split(f"--{border}".encode(), 2)
            name = json.loads(meta.split(b"\n\n", 1)[1])["name"]
            data = data.rsplit(b"\n", 1)[0].split(b"\n\n", 1)[1]
        with self.server.lock:
            now = self.server.objects.get(name, (b"", 0))[1]
            if condition is not None and int(condition) != now:
                return self._answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
            self.server.objects[name] = (data, next(self.server.generations))
            self._answer(200, self._about(name))

    def do_DELETE(self):
        _, name, _ = self._asked()
        there = self.server.objects.pop(name, None) is not None
        self._answer(204) if there else self._missing()

    def _remove_all(self, data):
        parts = []
        for name in re.findall(r"DELETE /storage/v1/b/[^/]+/o/([^ ?]+)", data.decode()):
            gone = self.server.objects.pop(urllib.parse.unquote(name), None)
            status = "404 Not Found" if gone is None else "204 No Content"
            parts.append(f"--batch\r\n\r\nHTTP/1.1 {status}\r\n\r\n")
        body = "".join(parts) + "--batch--"
        self._answer(200, body.encode(), Content_Type="multipart/mixed; boundary=batch")
