"""One entry to all data: a validated description in, a data set split by user out."""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

from pydantic import ConfigDict

from dpfl_jax.data import python_source
from dpfl_jax.data.chunking import store_from_documents
from dpfl_jax.data.documents import expand_paths, read_documents
from dpfl_jax.data.sets import SETS, load_set
from dpfl_jax.data.splits import limit_store, split_by_user, split_within_users
from dpfl_jax.data.store import ArrayStore, Store
from dpfl_jax.data.tokenizers import Tokenizer, load_tokenizer
from dpfl_jax.errors import BadInputError

Source = Literal[
    "python_source",
    "jsonl",
    "parquet",
    "csv",
    "arrow",
    "folder",
    "huggingface",
    "store",
    "shakespeare",
    "stack_overflow",
    "cc_news",
    "femnist",
    "mnist",
    "heart_disease",
    "medical_cost",
]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which data, how cut into examples, how split.

    Attributes:
      source: where the private examples come from. ``python_source`` needs no files.
      path: file, files or glob pattern (all sources but ``python_source``); the folder of a store
        or of a named set.
      user_column: column of the user id, or a key expression (jsonl, parquet, csv, arrow,
        huggingface).
      text_column: column of the text (the same sources).
      seq_len: tokens in an example (a store keeps its own).
      tokenizer: ``"bytes"``, a tokenizers ``.json`` or a SentencePiece ``.model`` file; in a run's
        configuration also ``"checkpoint"``, that of model.checkpoint.
      validation_fraction: expected share of users held out for tuning.
      test_fraction: expected share of users held out for the report.
      split_seed: chooses which users.
      split: ``"by_user"`` (a user is on one side; default), or ``"within_user"`` (the fractions are
        the leading share of each user's examples, at most ``held_out_max`` of them; users with one
        example are left out; Charles et al. 2024 split CC-News so with 0 and 0.1). A named set that
        comes with a test part keeps it, and ``test_fraction`` is not used.
      held_out_max: most held-out examples of a user in each part (``within_user``).
      max_users: keep that many users (a choice fixed by their ids), before splitting.
      max_examples_per_user: keep each user's first examples, before splitting.
      public: public corpus for pre-training: ``"auto"`` (the standard library for
        ``python_source``, nothing otherwise), ``"stdlib"``, ``"none"``, or a text file or folder.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    source: Source = "python_source"
    path: str | tuple[str, ...] | None = None
    user_column: str = "user"
    text_column: str = "text"
    seq_len: int = 128
    tokenizer: str = "bytes"
    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    split_seed: int = 0
    split: Literal["by_user", "within_user"] = "by_user"
    held_out_max: int = 32
    max_users: int | None = None
    max_examples_per_user: int | None = None
    public: str = "auto"


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set split by user.

    Attributes:
      train: the private training users; the only part a mechanism may touch.
      validation: held-out users for tuning (None if its fraction is 0).
      test: held-out users for the report (None if its fraction is 0).
      public: a public corpus, or None.
      description: one line: source, users, examples.
      tokenizer: what made the ids, or None for examples that are not text.
    """

    train: Store
    validation: Store | None
    test: Store | None
    public: Store | None
    description: str
    tokenizer: Tokenizer | None = None


def load_dataset(config: DataConfig) -> Dataset:
    """Reads, cuts and splits the data that ``config`` describes.

    Raises:
      BadInputError: with one sentence naming the file and line, or the setting to change.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    store, given_test = _load_private(config, tokenizer)
    store = limit_store(store, config.max_users, config.max_examples_per_user)
    fractions = {"validation": config.validation_fraction, "test": config.test_fraction}
    if given_test is not None:
        fractions["test"] = 0.0
    parts = _split(store, fractions, config)
    for name, part in parts.items():
        if part.num_users == 0 and (name == "train" or fractions[name] > 0):
            raise BadInputError(
                f"the {name} part holds none of the {store.num_users} users: change the fractions "
                "or data.split_seed, or give more users"
            )
    if given_test is not None:
        parts["test"], fractions["test"] = given_test, 1.0
    public = _load_public(config, tokenizer)
    description = (
        f"{config.source}: {store.num_users} users, {store.num_examples} examples"
        + "".join(f"; {n} {p.num_users} users" for n, p in parts.items() if p.num_users)
        + (f"; public {public.num_examples} examples" if public is not None else "")
    )
    held_out = {n: p if fractions[n] > 0 else None for n, p in parts.items() if n != "train"}
    is_text = store.schema.kind == "tokens"
    return Dataset(
        parts["train"],
        held_out["validation"],
        held_out["test"],
        public,
        description,
        tokenizer if is_text else None,
    )


def _split(store: Store, fractions: dict[str, float], config: DataConfig) -> dict[str, Store]:
    if config.split == "by_user":
        return split_by_user(store, fractions, config.split_seed)
    parts = {"train": store}
    for name in ("test", "validation"):
        parts["train"], parts[name] = split_within_users(
            parts["train"],
            fractions[name],
            config.held_out_max,
            smallest=2 if name == "test" else 1,
        )
    return parts


def _load_private(config: DataConfig, tokenizer: Tokenizer) -> tuple[Store, Store | None]:
    """Returns the private examples, and the test part if the set comes with one."""
    if config.source == "python_source":
        store: Store = python_source.private_store(
            tokenizer, config.seq_len, config.max_users, config.max_examples_per_user
        )
        return store, None
    if config.source == "store":
        store = ArrayStore.load(os.fspath(expand_paths(config.path)[0]))
        check_tokenizer(store, tokenizer, config.tokenizer)
        return store, None
    if config.source in SETS:
        paths = expand_paths(config.path)
        limit = config.max_examples_per_user
        stores = load_set(config.source, paths[0], tokenizer, config.seq_len, limit)
        return (stores["all"], None) if "all" in stores else (stores["train"], stores["test"])
    documents = read_documents(
        expand_paths(config.path), config.source, config.user_column, config.text_column
    )
    store = store_from_documents(
        documents, tokenizer, config.seq_len, max_examples=config.max_examples_per_user
    )
    return store, None


def _load_public(config: DataConfig, tokenizer: Tokenizer) -> Store | None:
    kind = config.public
    if kind == "auto":
        kind = "stdlib" if config.source == "python_source" else "none"
    if kind == "none":
        return None
    if kind == "stdlib":
        return python_source.public_store(tokenizer, config.seq_len)
    paths = expand_paths(kind)
    if paths[0].is_dir():
        return store_from_documents(read_documents(paths, "folder"), tokenizer, config.seq_len)
    try:
        text = paths[0].read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read the public text {paths[0]}: {error}") from error
    return store_from_documents([(paths[0].name, text)], tokenizer, config.seq_len)


def check_tokenizer(store: Store, tokenizer: Tokenizer, name: str) -> None:
    """Raises BadInputError if a token store was made by another tokeniser."""
    made_by = store.schema.tokenizer
    if store.schema.kind == "tokens" and made_by not in (None, tokenizer.fingerprint):
        raise BadInputError(
            f"the store's tokens were made by another tokeniser (fingerprint {made_by[:12]}) than "
            f"data.tokenizer={name} ({tokenizer.fingerprint[:12]}): give the one it was built with"
        )
