"""Folders and files in buckets (``gs://``, ``s3://``), through fsspec.

The library works with files of this machine. A folder in a bucket gets a *working copy* here, from
which ``publish`` uploads what was written, whole file by whole file; checkpoints are not copied
(``located``). An object is only replaced if it still is what this process last read or wrote, so
that no process overwrites what another wrote. One process holds the *lease* of a folder, an object
that it rewrites every few seconds: whoever saw it unchanged for long takes it over. A file that
many append to (``append``) is replaced on the same condition, again and again until it holds.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from dpfl_jax.errors import FULL_DISK, BadInputError, UnreachableError, extra, one_line
from dpfl_jax.files import default_cache_dir, on_disk

T = TypeVar("T")
Location = str | os.PathLike[str]

_ADDRESS = re.compile(r"(gs|s3):/+([^/].*?)/*", re.DOTALL)
_IN_PLACE = "checkpoints"  # read and written in the bucket itself: Orbax does
_LAST = ("manifest.json", "guarantee.json", "report.json")  # they say that the rest is complete
_LEASE = "run.lock"
_UPLOADING = ".uploading"  # is there until a new folder is complete
BEAT_S, LEASE_S = 5.0, 30.0
PATIENCE_S = 600.0


class ConflictError(Exception):
    """An object is not what it was when this process last read or wrote it."""


def address(path: Location) -> str | None:
    """``gs://bucket/name`` or ``s3://bucket/name`` if a path is, or came from, such an address."""
    if match := _ADDRESS.fullmatch(os.fspath(path)):
        return f"{match[1]}://{match[2]}"
    shown = as_given(os.fspath(path))
    return None if shown == os.fspath(path) else shown


def as_given(text: str) -> str:
    """A sentence in which the folders of this module are the addresses that people gave."""
    for path, where in _GIVEN.items():
        text = text.replace(path, where)
    return text


_GIVEN: dict[str, str] = {}


def stands_for(path: pathlib.Path, where: str) -> None:
    """Notes that what is below a folder of this machine is a copy of what an address has."""
    _GIVEN[str(path)] = where


# ---- objects -------------------------------------------------------------------------------------


def _reach(where: str, call: Callable[[], T]) -> T:
    """Calls; a bucket that was reached before is tried again for ``PATIENCE_S``.

    Raises:
      FileNotFoundError, FileExistsError: as ``call`` did.
      BadInputError: the bucket refuses, or was never reached.
      UnreachableError: it was reached before, and now has not been for long.
    """
    bucket, until, pause = where.split("/")[2], time.monotonic() + PATIENCE_S, 1.0
    while True:
        try:
            result = call()
            _REACHED.add(bucket)
            return result
        except (BadInputError, FileNotFoundError, FileExistsError, TypeError, AttributeError):
            raise
        except Exception as error:  # every client has its own
            if isinstance(error, OSError) and error.errno in FULL_DISK:
                raise
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            status = _status(error)
            refused = isinstance(error, PermissionError) or 400 <= status < 500
            if bucket not in _REACHED or (refused and status not in (408, 429)):
                raise BadInputError(
                    f"{where} cannot be reached ({reason}): check the name of the bucket, and that "
                    "this machine has credentials that may list, read and write there"
                ) from error
            if time.monotonic() > until:
                raise UnreachableError(
                    f"{where} could not be reached for {PATIENCE_S / 60:g} minutes ({reason}): "
                    "what was written before is there, and the same command resumes from it"
                ) from error
            logging.getLogger("dpfl_jax").warning(
                "%s cannot be reached (%s): trying again for %g minutes",
                where, reason, PATIENCE_S / 60,
            )  # fmt: skip
            time.sleep(pause)
            pause = min(2 * pause, 30.0)


_REACHED: set[str] = set()  # buckets


def _client(where: str) -> Any:
    """The file system of an address; Orbax uses the same ones."""
    if where.startswith("gs:"):
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs what it also raises
        with extra("gcs", "gs://"):
            return _file_system("gcs")
    with extra("s3", "s3://"):
        return _file_system("s3")


def _file_system(name: str) -> Any:
    import fsspec

    # Others write there, too.
    options = fsspec.config.conf.setdefault(name, {})
    options.setdefault("use_listings_cache", False)
    if name == "s3":  # gcsfs tries as often
        options.setdefault("config_kwargs", {"retries": {"mode": "standard", "max_attempts": 10}})
    return fsspec.filesystem(name)


def _parts(where: str) -> tuple[str, str]:
    bucket, _, name = where.partition("://")[2].partition("/")
    return bucket, name


def _read(where: str) -> tuple[bytes, str | None]:
    """An object and its version (S3's ETag, Google's generation); (b"", None) if there is none."""
    client, (bucket, name) = _client(where), _parts(where)

    def call() -> tuple[bytes, str]:
        if where.startswith("gs:"):
            headers, content = client.call("GET", client.url(f"{bucket}/{name}"))
            return content, headers["x-goog-generation"]
        import fsspec

        found = client.call_s3("get_object", Bucket=bucket, Key=name)
        return fsspec.asyn.sync(client.loop, found["Body"].read), found["ETag"]

    try:
        return _reach(where, call)
    except FileNotFoundError:
        return b"", None


def _replace(where: str, content: bytes, version: str | None) -> str:
    """Writes an object in one piece if it has this version (None: if there is none).

    Returns its new version.

    Raises:
      ConflictError: it has another one.
    """
    try:
        made = _put(where, content, version)
    except ConflictError:
        found, now = _read(where)
        if now is None or found != content:
            raise
        made = now  # it was written, but the answer was lost, and the client repeated
    if (place := where.split("/")[2]) not in _CONDITIONAL:
        for other in (None, "1" if where.startswith("gs:") else f'"{0:032}"'):
            with contextlib.suppress(ConflictError):
                _put(where, content, other)
                raise BadInputError(
                    f"the server of {where} writes although a condition does not hold, so that two "
                    "jobs could spend one budget: use another, or a newer version of it"
                )
        _CONDITIONAL.add(place)
    return made


_CONDITIONAL: set[str] = set()  # buckets that were seen to refuse


def _put(where: str, content: bytes, version: str | None) -> str:
    client, (bucket, name) = _client(where), _parts(where)

    def call() -> str:
        if where.startswith("gs:"):
            made = client.call(
                "POST",
                f"{client._location}/upload/storage/v1/b/{bucket}/o",
                uploadType="media",
                name=name,
                ifGenerationMatch=version or "0",
                data=content,
                headers={"Content-Type": "application/octet-stream"},
                json_out=True,
            )
            return str(made["generation"])
        only = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        try:
            made = client.call_s3("put_object", Bucket=bucket, Key=name, Body=content, **only)
        except Exception as error:
            if _status(error) in (409, 412):
                raise FileExistsError(where) from error
            raise
        return str(made["ETag"])

    try:
        return _reach(where, call)
    except FileExistsError:
        raise ConflictError(where) from None
    except FileNotFoundError:
        if version is not None and _exists(where):
            raise ConflictError(where) from None  # it was removed
        raise _no_bucket(where) from None


def _no_bucket(where: str) -> BadInputError:
    bucket = "/".join(where.split("/")[:3])
    return BadInputError(f"there is no bucket {bucket}: create it, or give another address")


def _exists(where: str) -> bool:
    """Whether there is the bucket of an address."""
    client, (bucket, _) = _client(where), _parts(where)

    def call() -> Any:
        if where.startswith("gs:"):
            return client.call("GET", "b/{}/o", bucket, maxResults=1, json_out=True)
        return client.call_s3("list_objects_v2", Bucket=bucket, MaxKeys=1)

    try:
        _reach(where, call)
        return True
    except FileNotFoundError:
        return False


def _status(error: BaseException | None) -> int:
    """The HTTP status that led to an error of a client, or 0."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):  # botocore's
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if str(code := getattr(error, "code", "")).isdecimal():  # gcsfs'
            return int(code)
        if str(error).startswith("Forbidden: "):
            return 403
        error = error.__cause__
    return 0


def sizes(where: str) -> dict[str, int]:
    """The sizes of all objects below an address, by name.

    Raises:
      BadInputError: there is no such bucket.
    """
    client, (bucket, name) = _client(where), _parts(where)
    above = f"{bucket}/{name}/"
    try:
        found = _reach(where, lambda: client.find(above, detail=True))
    except FileNotFoundError:
        found = {}
    if not found and not _exists(where):
        raise _no_bucket(where)
    return {
        path[len(above) :]: info["size"]
        for path, info in found.items()
        if path.startswith(above) and info["type"] == "file" and not path.endswith("/")
    }


def append(where: str, decide: Callable[[bytes], tuple[bytes, T]]) -> T:
    """Appends to an object what ``decide`` returns for its content, and returns the rest of that.

    No other process appends in between: then it is read, and decided, again.
    """
    while True:
        content, version = _read(where)
        more, result = decide(content)
        if not more:
            return result
        try:
            _replace(where, content + more, version)
            return result
        except ConflictError:
            time.sleep(0.1 * int.from_bytes(os.urandom(1)) / 255)


def create(where: str, content: bytes) -> None:
    """Writes a new object, or leaves one that has this content.

    Raises:
      FileExistsError: it has another one.
    """
    try:
        _replace(where, content, None)
    except ConflictError:
        raise FileExistsError(where) from None


def content(where: str) -> bytes:
    """The bytes of an object; none if there is no such object."""
    return _read(where)[0]


def part(where: str, begin: int, end: int) -> bytes:
    """Some bytes of an object.

    Raises:
      FileNotFoundError: there is no such object.
    """
    client, at = _client(where), "/".join(_parts(where))
    return _reach(where, lambda: client.cat_file(at, start=begin, end=end))


# ---- working copies ------------------------------------------------------------------------------


class _Copy:
    """A folder of this machine with the files of a folder in a bucket.

    Attributes:
      lease: the lease of the folder in the bucket, if this process has it.
    """

    lease: Lease | None = None

    def __init__(self, where: str) -> None:
        self.address = where
        above = tempfile.mkdtemp(prefix="dpfl-")  # only its owner can open it
        atexit.register(shutil.rmtree, above, ignore_errors=True)
        self.folder = pathlib.Path(above).resolve() / where.rpartition("/")[2]
        stands_for(self.folder, where)
        self._versions: dict[str, str] = {}
        self._published: dict[str, tuple[int, int]] = {}

    def fetch(self) -> None:
        """Makes the copy what the folder in the bucket is now, unless only we can change that."""
        if self.lease is not None:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self._versions, self._published = {}, {}
        for name in sizes(self.address):
            top = name.partition("/")[0]
            if top == _IN_PLACE:
                (self.folder / top).mkdir(parents=True, exist_ok=True)
            elif name != _LEASE:
                self._fetch_one(name)

    def _fetch_one(self, name: str) -> None:
        path = self.folder / name
        if ".." in pathlib.PurePath(name).parts or pathlib.PurePath(name).is_absolute():
            raise BadInputError(f"{self.address}/{name} would lead out of its folder: remove it")
        path.parent.mkdir(parents=True, exist_ok=True)
        found, version = _read(f"{self.address}/{name}")
        if version is not None:
            path.write_bytes(found)
            self._versions[name], self._published[name] = version, _stamp(path)

    def publish(self, path: pathlib.Path) -> None:
        """Uploads a file, or the files below a folder in the order of their writing."""
        if self.lease is not None:
            self.lease.check()
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        for file in sorted(files, key=_order):
            name = file.relative_to(self.folder).as_posix()
            is_ours = not file.is_symlink() and not file.match(".*.tmp") and name != _LEASE
            if is_ours and self._published.get(name) != (stamp := _stamp(file)):
                at, version = f"{self.address}/{name}", self._versions.get(name)
                try:
                    self._versions[name] = _replace(at, file.read_bytes(), version)
                except ConflictError:
                    raise BadInputError(
                        f"{at} was changed by somebody else while this process worked with it: "
                        "only one process may write there"
                    ) from None
                self._published[name] = stamp

    def remove(self, path: pathlib.Path) -> None:
        name = path.relative_to(self.folder).as_posix()
        if self._versions.pop(name, None) is not None:
            at, client = "/".join(_parts(f"{self.address}/{name}")), _client(self.address)
            with contextlib.suppress(FileNotFoundError):
                _reach(self.address, lambda: client.rm_file(at))
        self._published.pop(name, None)


_COPIES: dict[str, _Copy] = {}


def _stamp(path: pathlib.Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _order(path: pathlib.Path) -> tuple[bool, int]:
    return path.name in _LAST, path.stat().st_mtime_ns


def _copy_of(path: pathlib.Path) -> _Copy | None:
    return next((c for c in _COPIES.values() if path.is_relative_to(c.folder)), None)


def folder(path: Location) -> pathlib.Path:
    """The path of a folder; for an address, of its working copy, as it is there now.

    Raises:
      BadInputError: it is an address of something else than a bucket, or cannot be reached.
    """
    if _ADDRESS.fullmatch(os.fspath(path)) is None:
        return on_disk(path)
    where = str(address(path))
    if where not in _COPIES:
        _COPIES[where] = _Copy(where)
    _COPIES[where].fetch()
    return _COPIES[where].folder


def located(path: pathlib.Path) -> Any:
    """Where the content of a path is: in the bucket, if it is not in the working copy.

    Then the result is a path of ``etils.epath``, which Orbax takes, and which has the methods of
    ``pathlib``.
    """
    copy = _copy_of(path)
    if copy is None or path.relative_to(copy.folder).parts[:1] != (_IN_PLACE,):
        return path
    from etils import epath

    _client(copy.address)
    return epath.Path(str(address(path)))


def files_below(path: Any) -> list[Any]:
    """All files below a ``located`` folder."""
    if isinstance(path, pathlib.Path):
        return [file for file in path.rglob("*") if file.is_file()]
    return [path / name for name in sizes(str(path))]


def publish(path: pathlib.Path) -> None:
    """Uploads what was written to a path of a working copy, before it returns; else does nothing.

    Raises:
      BadInputError: another process has written there, or the bucket cannot be reached.
    """
    if (copy := _copy_of(path)) is not None:
        copy.publish(path)


def remove(path: pathlib.Path) -> None:
    """Removes a file, and what it is a copy of."""
    path.unlink(missing_ok=True)
    if (copy := _copy_of(path)) is not None:
        copy.remove(path)


@contextlib.contextmanager
def output(out: Location, what: str = "") -> Iterator[pathlib.Path]:
    """Where to write a new folder; for an address, it is uploaded from there at the end.

    Args:
      out: a path or an address.
      what: identifies the content; a folder with this content whose upload was interrupted is there
        already, and needs not be written again.

    Raises:
      BadInputError: an address has something already, or cannot be reached.
    """
    where = address(out)
    if where is None:
        yield on_disk(out)
        return
    if (there := sizes(where)) and _UPLOADING not in there:
        raise BadInputError(f"{where} exists: give another name or remove it")
    # The same folder again after an interruption, so that a build resumes.
    above = default_cache_dir() / "uploads" / hashlib.sha256(where.encode()).hexdigest()[:16]
    path = above.absolute() / where.rpartition("/")[2]
    note = above / "what"
    if not (what and note.is_file() and note.read_text() == what):
        shutil.rmtree(path, ignore_errors=True)
    above.mkdir(parents=True, exist_ok=True, mode=0o700)
    note.write_text(what)
    stands_for(path, where)
    yield path
    client, below = _client(where), "/".join(_parts(where))
    _reach(where, lambda: client.pipe_file(f"{below}/{_UPLOADING}", b"."))
    for file in sorted((p for p in path.rglob("*") if p.is_file()), key=_order):
        at = f"{below}/{file.relative_to(path).as_posix()}"
        _reach(where, functools.partial(client.put_file, str(file), at))
    _reach(where, lambda: client.rm_file(f"{below}/{_UPLOADING}"))
    shutil.rmtree(above, ignore_errors=True)


# ---- the lease of a folder -----------------------------------------------------------------------


class Lease:
    """The right of one process to write to a folder in a bucket, until it is closed or silent.

    The folder of a working copy; a folder of this machine has none, and nothing happens.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Takes the lease, after ``LEASE_S`` if its holder died without a word.

        Raises:
          BadInputError: another process has it.
        """
        self._copy = _copy_of(path)
        if self._copy is None:
            return
        self._where = f"{self._copy.address}/{_LEASE}"
        self._me, self._beats, self._lost = uuid.uuid4().hex, 0, False
        self._guard, self._ended = threading.Lock(), threading.Event()
        self._version = self._free()
        self._beat()
        self._copy.fetch()  # what the last one left
        self._copy.lease = self
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _free(self) -> str | None:
        """The version of a lease that is free or has expired, by the clock of this process."""
        assert self._copy is not None
        found, version = _read(self._where)
        held = self._parsed(found)
        if held["holder"] is None:
            return version
        host, until = one_line(str(held["host"])), time.monotonic() + LEASE_S
        logging.getLogger("dpfl_jax").warning(
            "%s was last used by a process on %s: waiting %g s to see that it has ended",
            self._copy.address, host, LEASE_S,
        )  # fmt: skip
        while time.monotonic() < until:
            time.sleep(BEAT_S / 5)
            if (now := _read(self._where))[1] != version:
                if self._parsed(now[0])["holder"] is None:
                    return now[1]
                raise BadInputError(
                    f"another process, on {host}, is training in {self._copy.address}: wait for "
                    "it, or choose another --run-dir"
                )
        return version

    def _parsed(self, found: bytes) -> dict[str, Any]:
        try:
            content = json.loads(found) if found else {}
            return {name: content.get(name) for name in ("holder", "by", "host")}
        except (ValueError, AttributeError, RecursionError):
            raise BadInputError(f"{self._where} is no lease of a run: remove it") from None

    def _beat(self, holder: str | None = "") -> None:
        """Rewrites the object; raises BadInputError if another process has done so."""
        with self._guard:
            if self._lost:
                self._refuse()
            self._beats += 1
            holder, began = self._me if holder == "" else holder, time.monotonic()
            words = {"holder": holder, "by": self._me, "beat": self._beats}
            content = json.dumps({**words, "host": socket.gethostname()}).encode()
            try:
                self._version = _replace(self._where, content, self._version)
            except ConflictError:
                found, self._version = _read(self._where)
                if self._parsed(found)["by"] != self._me:
                    self._lost = True
                    self._refuse()
                # The answer to the last one was lost, and it was written.
            self._beaten = began

    def _refuse(self) -> None:
        assert self._copy is not None
        raise BadInputError(
            f"another process has taken over {self._copy.address}, as this one was silent for "
            f"{LEASE_S:g} s: it continues there, and this one stops"
        )

    def _keep(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(BadInputError, UnreachableError):  # ``check`` raises it
                self._beat()

    def check(self) -> None:
        """Raises BadInputError unless this process has the lease, as the bucket says now."""
        if self._lost or time.monotonic() > self._beaten + 1:  # buckets take one write a second
            self._beat()

    def close(self) -> None:
        """Gives the lease back."""
        if self._copy is None or self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        self._copy.lease = None
        with contextlib.suppress(BadInputError, UnreachableError):
            self._beat(holder=None)
