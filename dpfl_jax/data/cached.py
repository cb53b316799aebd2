"""The cache of the stores in buckets: files of this machine, whose processes share them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pathlib
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpfl_jax import buckets
from dpfl_jax.errors import BadInputError
from dpfl_jax.files import default_cache_dir

BLOCK = 2**18
_PIECE = 2**26  # of a file that has no digests of blocks


class CachedFolder:
    """The files of a folder in a bucket, in the cache of this machine, whose processes share them.

    A tenth of the disk stays free: for that, the files of other folders that were not used for
    longest go.
    """

    def __init__(self, where: str, index: str) -> None:
        """Downloads ``index``, which decides what the other files are.

        Raises:
          BadInputError: the bucket cannot be reached.
        """
        self._address, self.sizes = where, buckets.sizes(where)
        found = buckets.content(f"{where}/{index}") if index in self.sizes else b""
        self._cache = default_cache_dir().absolute() / "stores"
        self.path = self._cache / hashlib.sha256(f"{where}\n".encode() + found).hexdigest()[:32]
        buckets.stands_for(self.path, where)
        if found:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial = self.path / f"{uuid.uuid4().hex}.partial"
            partial.write_bytes(found)
            partial.rename(self.path / index)

    def file(self, name: str, digests: Sequence[bytes]) -> CachedFile:
        """A file whose blocks have these digests."""
        return CachedFile(
            self.path / name, f"{self._address}/{name}", self.sizes[name], digests, self.make_room
        )

    def make_room(self, size: int) -> None:
        """Removes files of other folders, until so many bytes can be written.

        Raises:
          BadInputError: that does not suffice.
        """
        disk = shutil.disk_usage(self.path)
        short = size + disk.total // 10 - disk.free
        if short <= 0:
            return
        others = [
            (status.st_mtime, status.st_blocks * 512, entry.path)
            for folder in os.scandir(self._cache)
            for entry in os.scandir(folder)
            # Whoever is opening it has just touched it. What is open stays readable.
            if folder.name != self.path.name
            and time.time() - (status := entry.stat()).st_mtime > 60
        ]
        for _, freed, file in sorted(others):
            if short > 0:
                short -= freed
                pathlib.Path(file).unlink(missing_ok=True)
        if short > 0:
            raise BadInputError(
                f"{self._address} does not fit into the cache {self._cache}: "
                f"{short / 2**20:,.0f} MiB more are needed, and a tenth of the disk stays free; "
                "set DPFL_CACHE_DIR to a folder of a larger disk"
            )


class CachedFile:
    """A file in a bucket, of which the blocks that were asked for are in a file of this machine.

    A block is there if it has its digest: nothing else is noted. So each process compares a block
    when it first reads it, and downloads what is missing, damaged or cut off.

    Attributes:
      path: the file of this machine; where a block was not asked for, it may hold anything.
      bytes: uint8 [size], its content.
    """

    def __init__(
        self,
        path: pathlib.Path,
        where: str,
        size: int,
        digests: Sequence[bytes],
        make_room: Callable[[int], None],
    ) -> None:
        """``digests`` are the SHA-256 of each block of ``BLOCK`` bytes; of the whole if one."""
        self.path, self._address, self._digests, self._make_room = path, where, digests, make_room
        self._block = size if len(digests) == 1 else BLOCK
        if len(digests) not in (1, num_blocks(size)):
            raise BadInputError(f"{where} has another size than its manifest says")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with open(os.open(path, flags, 0o600), "r+b", buffering=0) as file:
            file.truncate(size)
            os.utime(path)
            self.bytes = np.asarray(np.memmap(file, np.uint8, "r", shape=(size,)))
        self._here = np.zeros(len(digests), bool)
        self._guard = threading.Lock()

    def need(self, begin: np.ndarray, size: np.ndarray | int) -> None:
        """Returns when the bytes at ``begin`` [n] are there, ``size`` from each.

        Raises:
          BadInputError: the bucket has others than the digests say, or there is no room for them.
        """
        first = np.clip(begin // self._block, 0, len(self._here) - 1)
        last = np.clip((begin + size - 1) // self._block, first, len(self._here) - 1)
        blocks = first
        if (last > first).any():
            most = int((last - first).max()) + 1
            blocks = np.minimum(first[:, None] + np.arange(most), last[:, None])
        missing = np.unique(blocks[~self._here[blocks]])
        if missing.size:
            with self._guard, self.path.open("r+b", buffering=0) as file:
                if len(self._digests) == 1:
                    fcntl.flock(file, fcntl.LOCK_EX)  # another process may be downloading it
                for block in missing:
                    self._fetch(int(block), file)

    def _fetch(self, block: int, file: Any) -> None:
        start = block * self._block
        content = memoryview(self.bytes[start : start + self._block])  # type: ignore[arg-type]
        if hashlib.sha256(content).digest() != self._digests[block]:
            self._make_room(len(content))
            for begin in range(start, start + len(content), _PIECE):
                end = min(begin + _PIECE, start + len(content))
                try:
                    os.pwrite(file.fileno(), buckets.part(self._address, begin, end), begin)
                except FileNotFoundError:
                    raise BadInputError(
                        f"{self._address} is missing: build the store again"
                    ) from None
            if hashlib.sha256(content).digest() != self._digests[block]:
                raise BadInputError(
                    f"{self._address} does not have the checksum of its manifest: it was damaged, "
                    "or belongs to another build; build the store again"
                )
        self._here[block] = True


def num_blocks(size: int) -> int:
    """The number of blocks of a file of so many bytes."""
    return -(-size // BLOCK)


def block_digests(path: pathlib.Path) -> bytes:
    """The SHA-256 of each block of ``BLOCK`` bytes of a file, one after the other."""
    with path.open("rb") as file:
        return b"".join(hashlib.sha256(b).digest() for b in iter(lambda: file.read(BLOCK), b""))
