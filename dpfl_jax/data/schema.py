"""The arrays of an example as they are read, and the fixed-width record that is stored.

A stored record is one item of a NumPy structured type: a store in memory, a memory-mapped file and
a shard on disk hold the same bytes, and gathering a batch is one copy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpfl_jax.errors import BadInputError, at_least, expect, one_of


@dataclasses.dataclass(frozen=True)
class Field:
    """One array of an example.

    Attributes:
      name: key in the dict that ``Store.read`` returns.
      dtype: NumPy dtype name, e.g. ``"int32"``.
      shape: shape of one example's array (no leading axis).

    Examples:
      >>> from dpfl_jax.data import Field
      >>> Field("x", "float32", (28, 28)).shape
      (28, 28)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Schema:
    """The layout of the examples of a store.

    - ``"arrays"``: records hold the arrays as they are read.
    - ``"tokens"``: a record is a length and token ids in the smallest unsigned type that holds the
      vocabulary. It is read as ``tokens`` int32 [seq_len] (0 is padding) and ``mask`` bool
      [seq_len].
    - ``"answers"``: read like ``"tokens"``, but ``mask`` is True only for the tokens of answers
      (one bit each in the record). For a preference pair both arrays are [2, seq_len], the chosen
      sequence first.

    Attributes:
      kind: ``"arrays"``, ``"tokens"`` or ``"answers"``.
      fields: what ``Store.read`` returns.
      vocab_size: ids are below it (0 for ``"arrays"``).
      tokenizer: fingerprint of the tokeniser that made the ids, or None.

    Examples:
      >>> from dpfl_jax.data import Field, Schema
      >>> schema = Schema("arrays", (Field("x", "float32", (2,)), Field("label", "int32", ())))
      >>> [field.name for field in schema.fields]
      ['x', 'label']
    """

    kind: str
    fields: tuple[Field, ...]
    vocab_size: int = 0
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        one_of("the kind of a schema", self.kind, ("arrays", "tokens", "answers"))
        if not self.fields:
            raise BadInputError("a schema needs at least one field")

    @classmethod
    def tokens(cls, seq_len: int, vocab_size: int, tokenizer: str | None = None) -> Schema:
        """Returns the schema of language-model examples of ``seq_len`` tokens."""
        expect(seq_len, (int, np.integer), "seq_len", "a whole number of tokens")
        at_least("seq_len", seq_len, 1)
        fields = (Field("tokens", "int32", (seq_len,)), Field("mask", "bool", (seq_len,)))
        return cls("tokens", fields, int(vocab_size), tokenizer)

    @classmethod
    def answers(
        cls, seq_len: int, vocab_size: int, tokenizer: str | None = None, pairs: bool = False
    ) -> Schema:
        """Returns the schema of prompts with answers, or of preference ``pairs``."""
        lead = (2,) if pairs else ()
        tokens = cls.tokens(seq_len, vocab_size, tokenizer)
        fields = tuple(dataclasses.replace(f, shape=(*lead, *f.shape)) for f in tokens.fields)
        return dataclasses.replace(tokens, kind="answers", fields=fields)

    @classmethod
    def arrays(cls, example: Mapping[str, Any], leading_axis: bool = False) -> Schema:
        """Infers the schema from one example (or, with ``leading_axis``, a batch of them)."""
        fields = []
        for name, value in example.items():
            array = np.asarray(value)
            shape = array.shape[1:] if leading_axis else array.shape
            fields.append(Field(name, array.dtype.name, tuple(int(s) for s in shape)))
        return cls("arrays", tuple(fields))

    @property
    def seq_len(self) -> int:
        """Tokens of an example, or of either sequence of a pair.

        Raises:
          BadInputError: the examples are not token sequences.
        """
        if self.kind == "arrays":
            raise BadInputError("this store holds plain arrays, not token sequences")
        return self.fields[0].shape[-1]

    @property
    def pairs(self) -> bool:
        """Whether an example is a preference pair."""
        return self.kind == "answers" and len(self.fields[0].shape) == 2

    @property
    def has_lengths(self) -> bool:
        """Whether an example is one sequence of tokens, which has a length (``lengths``)."""
        return self.kind != "arrays" and not self.pairs

    @functools.cached_property
    def record_dtype(self) -> np.dtype[Any]:
        """The structured type of a stored record (little-endian, unpadded)."""
        width = "<u2" if self.vocab_size <= 2**16 else "<u4"
        if self.kind == "tokens":
            return np.dtype([("length", "<u4"), ("tokens", width, (self.seq_len,))])
        if self.kind == "answers":
            *lead, length = self.fields[0].shape
            bits = (*lead, -(-length // 8))
            return np.dtype([("mask", "u1", bits), ("tokens", width, (*lead, length))])
        return np.dtype(
            [(f.name, np.dtype(f.dtype).newbyteorder("<"), f.shape) for f in self.fields]
        )

    def unpack(self, records: np.ndarray) -> dict[str, np.ndarray]:
        """Turns stored records [n] into arrays with leading axis n."""
        if self.kind == "tokens":
            # Narrow integers compare several to an instruction.
            narrow = np.dtype(np.uint16 if self.seq_len < 2**16 else np.uint32)
            lengths: np.ndarray = records["length"].astype(narrow)
            mask = np.arange(self.seq_len, dtype=narrow) < lengths[:, None]
            return {"tokens": records["tokens"].astype(np.int32), "mask": mask}
        if self.kind == "answers":
            bits = np.unpackbits(records["mask"], axis=-1, count=self.seq_len)
            return {"tokens": records["tokens"].astype(np.int32), "mask": bits.astype(bool)}
        return {f.name: np.ascontiguousarray(records[f.name]) for f in self.fields}

    def lengths(self, records: np.ndarray) -> np.ndarray:
        """Returns the tokens of stored records [n], up to the last that is predicted: int [n]."""
        if self.kind == "tokens":
            return records["length"]
        return ends(np.unpackbits(records["mask"], axis=-1, count=self.seq_len))

    def unpack_on_device(self, raw: Any) -> dict[str, Any]:
        """Turns raw records into ``tokens`` and ``mask``, inside jit (``"tokens"`` only).

        Records cross to the device at two bytes a token instead of five.

        Args:
          raw: uint8 [..., record bytes]; all zero where there is no example.

        Returns:
          ``tokens`` int32 [..., seq_len] and ``mask`` bool [..., seq_len].

        Raises:
          BadInputError: the examples are not token sequences.
        """
        import jax
        import jax.numpy as jnp

        seq_len = self.seq_len
        width = self.record_dtype["tokens"].base.itemsize
        kind = jnp.uint16 if width == 2 else jnp.uint32
        lead = raw.shape[:-1]
        length = jax.lax.bitcast_convert_type(raw[..., :4], jnp.uint32)
        ids = raw[..., 4:].reshape(*lead, seq_len, width)
        tokens = jax.lax.bitcast_convert_type(ids, kind).astype(jnp.int32)
        mask = jnp.arange(seq_len, dtype=jnp.uint32) < length[..., None]
        return {"tokens": tokens, "mask": mask}

    def pack(self, batch: Mapping[str, Any]) -> np.ndarray:
        """Turns arrays with leading axis n into stored records [n].

        Raises:
          BadInputError: an array is missing or has another shape; a mask of tokens has a hole; a
            token id is outside the vocabulary.
        """
        arrays = {}
        for f in self.fields:
            if f.name not in batch:
                raise BadInputError(f"an example lacks the array {f.name!r} of its store's schema")
            arrays[f.name] = np.asarray(batch[f.name])
            if arrays[f.name].shape[1:] != f.shape:
                raise BadInputError(
                    f"array {f.name!r} has shape {arrays[f.name].shape[1:]} per example, but the "
                    f"store's schema says {f.shape}"
                )
        sizes = {len(a) for a in arrays.values()}
        if len(sizes) != 1:
            raise BadInputError(f"the arrays of one user differ in length: {sorted(sizes)}")
        records = np.zeros(sizes.pop(), self.record_dtype)
        if self.kind == "tokens":
            mask = arrays["mask"].astype(bool)
            lengths = mask.sum(axis=1)
            if not np.array_equal(mask, np.arange(self.seq_len) < lengths[:, None]):
                raise BadInputError("the mask of a token sequence must be True first, then False")
            arrays["tokens"] = np.where(mask, arrays["tokens"], 0)
            records["length"] = lengths
        elif self.kind == "answers":
            records["mask"] = np.packbits(arrays["mask"].astype(bool), axis=-1)
        if self.kind != "arrays":
            tokens = arrays["tokens"]
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < max(self.vocab_size, 1):
                raise BadInputError(f"a token id lies outside 0..{self.vocab_size - 1}")
            records["tokens"] = tokens
        else:
            for name, array in arrays.items():
                records[name] = array
        return records


def ends(mask: np.ndarray) -> np.ndarray:
    """One past the last nonzero of each row; 0 if there is none."""
    present = mask.astype(bool)
    last = mask.shape[-1] - present[..., ::-1].argmax(-1)
    return np.where(present.any(-1), last, 0)
