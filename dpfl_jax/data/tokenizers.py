"""Tokenisers: bytes (no file needed), and files of the ``tokenizers`` and SentencePiece libraries.

Ids of a document never include the beginning-of-sequence token: the model prepends ``bos_id``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.hub import local_path


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
      vocab_size: ids are below it (``bos_id`` included).
      bos_id: the id that a model prepends; never produced by ``encode``.
      eos_id: the id that ends a document, or None if the tokeniser has none.
      fingerprint: hex digest; equal fingerprints give equal ids.
    """

    vocab_size: int
    bos_id: int
    eos_id: int | None
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """Returns the ids of ``text``, without special tokens."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text as an integer array."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ``ids``; special tokens are left out."""


class ByteTokenizer:
    """UTF-8 bytes: ids 0 padding, 1 beginning, 2 end, 3..258 the bytes 0..255."""

    vocab_size = 259
    pad_id = 0
    bos_id = 1
    eos_id: int | None = 2
    fingerprint = hashlib.sha256(b"dpfl_jax bytes: pad 0, bos 1, eos 2, byte b = 3 + b").hexdigest()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the text's UTF-8 bytes."""
        return self.encode_bytes(text.encode()).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text as a uint16 array."""
        return [self.encode_bytes(text.encode()) for text in texts]

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Returns the ids of UTF-8 bytes as a uint16 array, without decoding them."""
        return np.frombuffer(data, np.uint8).astype(np.uint16) + np.uint16(3)

    def encode_placed(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns of each text the ids, and [n, 2]: from which character to which each is made."""
        found = []
        for text in texts:
            sizes = [len(character.encode()) for character in text]
            place = np.repeat(np.arange(len(text)), sizes)
            found.append((self.encode_bytes(text.encode()), np.stack([place, place + 1], axis=1)))
        return found

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(i) - 3 for i in ids if 3 <= i < 259).decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokeniser of the ``tokenizers`` library."""

    _EOS = ("</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>", "[EOS]", "[SEP]")
    _BOS = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]")

    def __init__(self, data: bytes, name: str):
        """Takes the content of a ``tokenizer.json``; ``name`` is what errors call it.

        Raises:
          BadInputError: if it is not a tokeniser.
        """
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:
            raise BadInputError(f"{name} is not a tokenizers JSON file: {error}") from error
        self._name = name
        # Truncation or padding written into the file would silently drop or invent text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        size = max(size, highest + 1)
        self.eos_id = self._special(self._EOS)
        bos = self._special(self._BOS)
        self.bos_id = size if bos is None or bos == self.eos_id else bos
        self.vocab_size = max(size, self.bos_id + 1)
        self.fingerprint = hashlib.sha256(b"tokenizers\0" + data).hexdigest()

    def _special(self, names: Sequence[str]) -> int | None:
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of ``text``, without special tokens."""
        return self._encoded([text])[0].ids

    def _encoded(self, texts: Sequence[str]) -> Any:
        try:
            return self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except BaseException as error:  # a panic of the library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
        # Without the library's reason, which may quote a text.
        raise BadInputError(f"{self._name} fails on a text: mend that file, or choose another")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text; the library uses its own threads."""
        return [np.asarray(e.ids, dtype=np.uint32) for e in self._encoded(texts)]

    def encode_placed(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns of each text the ids, and [n, 2]: from which character to which each is made."""
        done = self._encoded(texts)
        return [(np.asarray(e.ids, np.uint32), np.array(e.offsets).reshape(-1, 2)) for e in done]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ``ids``; special tokens are left out."""
        known = [int(i) for i in ids if i != self.bos_id and i != self.eos_id]
        return self._tokenizer.decode(known, skip_special_tokens=True)


class SentencePieceTokenizer:
    """A SentencePiece ``.model`` file (extra ``sentencepiece``)."""

    def __init__(self, path: str | os.PathLike[str]):
        """Reads the file.

        Raises:
          BadInputError: if it is not there, is not a model, or the library is not installed.
        """
        try:
            import sentencepiece
        except ImportError as error:
            raise BadInputError(
                f"{path} needs the sentencepiece library: pip install 'dpfl_jax[sentencepiece]'"
            ) from error
        data = _read(path)
        self._model: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(data)
        except Exception as error:
            raise BadInputError(f"{path} is not a SentencePiece model: {error}") from error
        size, bos, eos = self._model.GetPieceSize(), self._model.bos_id(), self._model.eos_id()
        self.eos_id: int | None = eos if eos >= 0 else None
        self.bos_id = bos if bos >= 0 else size
        self.vocab_size = max(size, self.bos_id + 1)
        self.fingerprint = hashlib.sha256(b"sentencepiece\0" + data).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of ``text``, without special tokens."""
        return self._model.EncodeAsIds(text)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text as a uint32 array."""
        return [np.asarray(ids, dtype=np.uint32) for ids in self._model.Encode(list(texts))]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ``ids``; special tokens are left out."""
        known = [int(i) for i in ids if i != self.bos_id and i != self.eos_id]
        return self._model.DecodeIds(known)


def load_tokenizer(name: Any) -> Tokenizer:
    """Returns the tokeniser called ``"bytes"``, the one in a file, or one that is at hand.

    Args:
      name: ``"bytes"``; a ``tokenizer.json`` of the tokenizers library or a SentencePiece
        ``.model``, or a folder that holds one (a checkpoint, say) or its name of the hub; a
        ``tokenizers.Tokenizer`` or a fast tokeniser of ``transformers``; or a ``Tokenizer``.

    Raises:
      BadInputError: if the file is missing or of another kind.
    """
    library = getattr(name, "backend_tokenizer", name)  # transformers keep one of tokenizers
    if hasattr(library, "to_str") and hasattr(library, "get_vocab"):
        return HuggingFaceTokenizer(library.to_str().encode(), type(name).__name__)
    if hasattr(name, "encode_batch") and hasattr(name, "fingerprint"):
        return name
    if not isinstance(name, str | os.PathLike):
        raise BadInputError(
            f"the tokenizer is {type(name).__name__}, but it must be 'bytes', a file, or a fast "
            "tokeniser of the libraries tokenizers or transformers"
        )
    path = os.fspath(name)
    if path == "bytes":
        return ByteTokenizer()
    path = local_path(path, "model")
    if os.path.isdir(path):
        held = [os.path.join(path, f) for f in ("tokenizer.json", "tokenizer.model")]
        path = next((f for f in held if os.path.exists(f)), path)
    if path.endswith(".json"):
        return HuggingFaceTokenizer(_read(path), path)
    if path.endswith((".model", ".spm")):
        return SentencePieceTokenizer(path)
    raise BadInputError(
        f"tokenizer {path!r} is neither 'bytes' nor a .json (tokenizers) nor a .model "
        "(SentencePiece) file, nor a folder with one"
    )


def _read(path: str | os.PathLike[str]) -> bytes:
    if os.path.exists(path) and not os.path.isfile(path):  # a device never ends
        raise BadInputError(f"cannot read the tokenizer file {path}: it is no regular file")
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        reason = error.strerror or error
        raise BadInputError(f"cannot read the tokenizer file {path}: {reason}") from error
