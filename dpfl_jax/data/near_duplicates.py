"""Private texts that are in public data already, found by MinHash.

A model that was trained on public text may have seen what a private data set holds, and would then
do better on it than it can on new text. Texts are near-duplicates if the sets of their runs of five
words have a Jaccard similarity of at least ``SIMILARITY`` (Lee et al. 2022, arXiv 2107.06499).
MinHash finds candidates, of which the similarity is then computed.

Only private rows are removed because of public ones. That looks at each row by itself, so that one
person's rows change nothing of another's. To remove public rows because of private ones would be a
release about the private data, which no guarantee here covers.
"""

from __future__ import annotations

import pathlib
import re
import zlib
from collections.abc import Iterable, Iterator

import numpy as np

from dpfl_jax.data.documents import DocumentFiles, read_folder
from dpfl_jax.data.rows import guess_format, read_file_rows, text_of

SIMILARITY = 0.8
_RUN = 5  # words
# Pairs at SIMILARITY are missed with probability (1 - 0.8^4)^32, once in ten million.
_BANDS, _ROWS = 32, 4
_WORDS = re.compile(r"\w+")
_RANDOM = np.random.default_rng(0).integers(2**64, size=(2, _BANDS * _ROWS), dtype=np.uint64)
_STEPS = np.random.default_rng(1).integers(2**64, size=_RUN, dtype=np.uint64) | np.uint64(1)


class NearDuplicates:
    """Public texts, and whether a text is a near-duplicate of one of them.

    Examples:
      >>> public = NearDuplicates(["It was the best of times, it was the worst of times."])
      >>> "it was the best of times; it was the WORST of times" in public
      True
      >>> "It was the age of wisdom, it was the age of foolishness." in public
      False
    """

    def __init__(self, texts: Iterable[str]) -> None:
        """Keeps the runs of words of each text, as hashes, and an index of them."""
        self._runs: list[np.ndarray] = []
        self._index: dict[tuple[int, bytes], list[int]] = {}
        for text in texts:
            runs = _runs_of(text)
            for band in _bands_of(runs):
                self._index.setdefault(band, []).append(len(self._runs))
            self._runs.append(runs)

    def __contains__(self, text: str) -> bool:
        runs = _runs_of(text)
        candidates = {k for band in _bands_of(runs) for k in self._index.get(band, ())}
        return any(_similarity(runs, self._runs[k]) >= SIMILARITY for k in candidates)


def read_public_texts(paths: Iterable[pathlib.Path], how: DocumentFiles) -> Iterator[str]:
    """Streams the texts of files or folders; rows need no user."""
    for path in paths:
        kind = guess_format(path) if how.format in (None, "folder") else how.format
        if kind == "folder":
            yield from (text for _, text in read_folder(path))
            continue
        for where, row in read_file_rows([path], kind, [how.text_column], how.csv):
            yield text_of(row, how.text_column, where)


def _runs_of(text: str) -> np.ndarray:
    """Distinct hashes of all runs of words, uint64 [n]; of a shorter text one, of no words none."""
    words = [zlib.crc32(word.encode()) for word in _WORDS.findall(text.casefold())]
    if not words:
        return np.zeros(0, np.uint64)
    words += [0] * (_RUN - len(words))
    hashes = np.lib.stride_tricks.sliding_window_view(np.array(words, np.uint64), _RUN)
    return np.unique((hashes * _STEPS).sum(axis=1, dtype=np.uint64))


def _bands_of(runs: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """Keys of which near-duplicates share at least one; none for a text without words."""
    if not len(runs):
        return
    least = np.full(_BANDS * _ROWS, np.iinfo(np.uint64).max)
    for start in range(0, len(runs), 1024):
        mixed = _RANDOM[0] * runs[start : start + 1024, None] + _RANDOM[1]
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
        least = np.minimum(least, mixed.min(axis=0))
    for band, values in enumerate(least.reshape(_BANDS, _ROWS)):
        yield band, values.tobytes()


def _similarity(one: np.ndarray, other: np.ndarray) -> float:
    """Jaccard similarity of two sets."""
    both = len(np.intersect1d(one, other, assume_unique=True))
    return both / (len(one) + len(other) - both)
