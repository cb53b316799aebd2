"""The named sets: which reader, which splits, what files they need."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from dpfl_jax.data.build_plan import Row
from dpfl_jax.data.chunking import store_from_documents
from dpfl_jax.data.schema import Schema
from dpfl_jax.data.sets import arrays, text
from dpfl_jax.data.sources import Source, file_identity, sequence_number
from dpfl_jax.data.store import ArrayStore, Store
from dpfl_jax.data.tokenizers import Tokenizer
from dpfl_jax.errors import BadInputError


@dataclasses.dataclass(frozen=True)
class NamedSet:
    """One set.

    Attributes:
      read: ``(folder or file, split) -> iterator`` of (user, text) or (user, arrays).
      splits: the splits that the files themselves define; ``("all",)`` if they define none.
      is_text: whether the reader yields text to tokenise.
      unit: what a user is.
    """

    read: Callable[[pathlib.Path, str], Iterator[tuple[str, Any]]]
    splits: tuple[str, ...]
    is_text: bool
    unit: str


SETS: dict[str, NamedSet] = {
    "shakespeare": NamedSet(text.read_shakespeare, ("all",), True, "speaking role"),
    "stack_overflow": NamedSet(text.read_stack_overflow, ("train", "test"), True, "account"),
    "cc_news": NamedSet(text.read_cc_news, ("all",), True, "base domain"),
    "femnist": NamedSet(arrays.read_femnist, ("train", "test"), False, "writer"),
    "mnist": NamedSet(arrays.read_mnist, ("train", "test"), False, "image"),
    "heart_disease": NamedSet(arrays.read_heart_disease, ("all",), False, "patient"),
    "medical_cost": NamedSet(arrays.read_medical_cost, ("all",), False, "person"),
}


def named_set(name: str) -> NamedSet:
    """Returns the set called ``name``, or raises BadInputError with the known names."""
    if name not in SETS:
        raise BadInputError(
            f"unknown data source {name!r}: use files, python_source, tfds, {', '.join(SETS)}"
        )
    return SETS[name]


def set_source(name: str, path: str | os.PathLike[str], split: str = "train") -> Source:
    """Returns the rows of one split of a named set, to build a store from.

    Raises:
      BadInputError: if the set, the split or a file does not exist.
    """
    chosen = named_set(name)
    root = pathlib.Path(path)
    if not root.exists():
        raise BadInputError(f"{root} does not exist: give the folder that holds the {name} files")
    if chosen.splits == ("all",) and split in ("all", "train"):
        split = "all"
    elif split not in (*chosen.splits, *(("validation",) if name == "stack_overflow" else ())):
        raise BadInputError(f"{name} has the splits {', '.join(chosen.splits)}, not {split!r}")
    files = file_identity(root)
    identity = {"set": name, "split": split, "files": files}
    size = sum(entry[1] for entry in files)
    if chosen.is_text:

        def texts() -> Iterator[Row]:
            for row, (user, document) in enumerate(chosen.read(root, split)):
                yield user, sequence_number(0, row), document.encode()

        return Source(texts, identity, size)
    first = next(chosen.read(root, split), None)
    if first is None:
        raise BadInputError(f"{root} holds no examples of {name}, split {split}")
    schema = Schema.arrays(first[1], leading_axis=True)

    def packed() -> Iterator[Row]:
        for row, (user, batch) in enumerate(chosen.read(root, split)):
            yield user, sequence_number(0, row), schema.pack(batch).tobytes()

    return Source(packed, identity, size, schema)


def load_set(
    name: str,
    path: str | os.PathLike[str],
    tokenizer: Tokenizer,
    seq_len: int,
    max_examples_per_user: int | None = None,
) -> dict[str, Store]:
    """Reads a named set into memory.

    Args:
      name: a key of ``SETS``.
      path: the folder (or file) that holds its files.
      tokenizer: makes the ids of text sets.
      seq_len: tokens in an example of text sets.
      max_examples_per_user: keep each user's first examples.

    Returns:
      One store per split that the files define, or ``{"all": store}``.

    Raises:
      BadInputError: if the set or a file does not exist, or a row is bad.
    """
    chosen = named_set(name)
    stores: dict[str, Store] = {}
    for split in chosen.splits:
        source = set_source(name, path, split)  # checks that the files are there
        root = pathlib.Path(path)
        if chosen.is_text:
            stores[split] = store_from_documents(
                chosen.read(root, split), tokenizer, seq_len, max_examples_per_user
            )
        else:
            users = (
                (user, {k: v[:max_examples_per_user] for k, v in batch.items()})
                for user, batch in chosen.read(root, split)
            )
            stores[split] = ArrayStore.from_users(users, source.schema)
    return stores
