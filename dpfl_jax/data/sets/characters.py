"""LEAF's task on Shakespeare: the character that follows a window of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dpfl_jax.data.documents import expand_paths
from dpfl_jax.data.sections import SourceConfig
from dpfl_jax.data.sets.text import SHAKESPEARE, read_shakespeare
from dpfl_jax.task import Task

# LEAF's 80 characters of Shakespeare; id 0 stands for any other.
LEAF_CHARACTERS = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
_IDS = len(LEAF_CHARACTERS) + 1
TASK = Task("classes", (), _IDS, _IDS)


def read_windows(section: SourceConfig, split: str) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yields ``x`` int32 [n, seq_len] and ``label`` int32 [n] of each role with enough text."""
    codes = np.zeros(256, np.int32)
    for i, character in enumerate(LEAF_CHARACTERS, start=1):
        codes[ord(character)] = i
    speeches: dict[str, list[str]] = {}
    for role, speech in read_shakespeare(expand_paths(section.path or SHAKESPEARE)[0], split):
        speeches.setdefault(role, []).append(speech)
    length = section.seq_len
    for role, parts in speeches.items():
        raw = np.frombuffer(" ".join(parts).encode("latin-1", "replace"), np.uint8)
        if len(raw) <= length:
            continue
        starts = np.arange(0, len(raw) - length, section.stride)
        ids = codes[raw]
        x = ids[starts[:, None] + np.arange(length)]
        yield role, {"x": x, "label": ids[starts + length]}
