"""What a build of a store is made of: the plan that every worker gets, and its files' names."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from dpfl_jax.data.chats import Conversations
from dpfl_jax.data.records import FORMATS
from dpfl_jax.data.schema import Schema
from dpfl_jax.data.store import user_order_key
from dpfl_jax.data.tokenizers import load_tokenizer
from dpfl_jax.errors import BadInputError

PARTITION_BYTES = 256 * 2**20

Row = tuple[str, int, bytes]
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """Everything a worker must know to encode a partition; equal plans give equal stores.

    Attributes:
      schema: layout of an example.
      shard_format: ``"arrow"`` or ``"arrayrecord"``.
      num_shards: number of partitions.
      tokenizer: for text rows, the name or file of the tokeniser; None if the rows already are
        packed records.
      max_examples_per_user: keep each user's first examples.
    """

    schema: Schema
    shard_format: str = "arrow"
    num_shards: int = 1
    tokenizer: str | None = "bytes"
    max_examples_per_user: int | None = None

    def __post_init__(self) -> None:
        """Checks the settings."""
        if self.shard_format not in FORMATS:
            raise BadInputError(
                f"unknown store format {self.shard_format!r}: use one of {', '.join(FORMATS)}"
            )
        if not 1 <= self.num_shards <= 100_000:
            raise BadInputError(f"the number of shards is {self.num_shards}: use 1 to 100000")

    @classmethod
    def for_text(
        cls,
        tokenizer: str,
        seq_len: int,
        conversations: Conversations | None = None,
        **settings: Any,
    ) -> BuildPlan:
        """Returns the plan of a store of texts, or of conversations."""
        loaded = load_tokenizer(tokenizer)
        if conversations is not None:
            schema = conversations.schema(seq_len, loaded)
        else:
            schema = Schema.tokens(seq_len, loaded.vocab_size, loaded.fingerprint)
        return cls(schema, tokenizer=tokenizer, **settings)

    def partition(self, user_id: str) -> int:
        """Returns the shard in which a user lies."""
        key = int.from_bytes(user_order_key(user_id)[0], "big")
        return (key * self.num_shards) >> 64

    def keys(self, shard: int) -> tuple[int, int]:
        """Returns the smallest and the largest key (of ``user_order_key``) in a shard."""
        low, end = (-(-((shard + i) << 64) // self.num_shards) for i in (0, 1))
        return low, end - 1

    def shard_stem(self, shard: int) -> str:
        """Returns the name of a shard's file without its suffix."""
        return f"shard-{shard:05d}-of-{self.num_shards:05d}"

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON object that identifies the plan."""
        return {**dataclasses.asdict(self), "schema": self.schema.to_json()}


def default_num_shards(total_bytes: int) -> int:
    """Returns a number of partitions that keeps each at about ``PARTITION_BYTES`` of input."""
    return max(1, min(4096, -(-total_bytes // PARTITION_BYTES)))


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a small file in one step."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.rename(path)


def disk_error(path: pathlib.Path, error: Exception) -> BadInputError:
    """Returns the error to raise when a build cannot write."""
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return BadInputError(
        f"cannot write {path} ({reason}): free space, then run the same command "
        "again; it goes on where it stopped"
    )
