"""Tokenisers: bytes (no file needed), and files of the ``tokenizers`` and SentencePiece libraries.

Where texts begin and end follows ``transformers`` on the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dpfl_jax.errors import BadInputError, extra
from dpfl_jax.files import local_path


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
      vocab_size: ids are below it.
      bos_id: the id at the beginning of every text, which a model prepends and ``encode`` leaves
        out; None if there is none.
      eos_id: the id that ends a document; None if there is none.
      stop_ids: ids that end what a model generates.
      fingerprint: hex digest; equal fingerprints give equal ids.

    Examples:
      >>> from dpfl_jax.data import Tokenizer, load_tokenizer
      >>> tokenizer: Tokenizer = load_tokenizer("bytes")
      >>> tokenizer.vocab_size
      259
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    stop_ids: frozenset[int]
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """Returns the ids of ``text``, without special tokens."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text as integer arrays, without special tokens."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ``ids``; special tokens are left out."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes: ids 0 padding, 1 beginning, 2 end, 3..258 the bytes 0..255.

    Examples:
      >>> from dpfl_jax.data import ByteTokenizer
      >>> tokenizer = ByteTokenizer()
      >>> tokenizer.decode(tokenizer.encode("hi")), tokenizer.vocab_size
      ('hi', 259)
    """

    vocab_size = 259
    bos_id: int | None = 1
    eos_id: int | None = 2
    stop_ids = frozenset({2})
    fingerprint = hashlib.sha256(b"dpfl_jax bytes: pad 0, bos 1, eos 2, byte b = 3 + b").hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        raw = (np.frombuffer(text.encode(), np.uint8) for text in texts)
        return [data.astype(np.uint16) + np.uint16(3) for data in raw]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns for each text its ids, and int [n, 2]: the range of characters of each id."""
        offsets = []
        for text in texts:
            sizes = [len(character.encode()) for character in text]
            character_of = np.repeat(np.arange(len(text)), sizes)
            offsets.append(np.stack([character_of, character_of + 1], axis=1))
        return list(zip(self.encode_batch(texts), offsets))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return bytes(int(i) - 3 for i in ids if 3 <= i < 259).decode(errors="replace")


class HuggingFaceTokenizer(Tokenizer):
    """A tokeniser of the ``tokenizers`` library."""

    # Tokens that end a text by convention, if no file next to the tokeniser's names one.
    _ENDS = ("</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>", "[EOS]")

    def __init__(self, data: bytes, name: str, settings: Mapping[str, Any] | None = None):
        """Takes the content of a ``tokenizer.json``.

        Args:
          data: content of the file.
          name: name of the file for errors.
          settings: ``tokenizer_settings`` of the files next to it.

        Raises:
          BadInputError: it is not a tokeniser, or its beginning or end of texts is ambiguous.
        """
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:
            raise BadInputError(f"{name} is not a tokenizers JSON file: {error}") from error
        self._name = name
        # Truncation or padding set in the file would silently drop or invent text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        settings = settings or {}
        self.bos_id, after = _added_ids(json.loads(data).get("post_processor"), name)
        id_of = self._tokenizer.token_to_id
        self.eos_id, self.stop_ids = _end_ids(settings, id_of, after, name)
        if self.eos_id is None and not settings:
            tokens = [token for token in self._ENDS if token in vocabulary]
            if len(tokens) > 1:
                raise BadInputError(
                    f"{name} has the tokens {' and '.join(tokens)}, each of which may end a text: "
                    'put a tokenizer_config.json next to it that holds {"eos_token": ...}'
                )
            self.eos_id = vocabulary[tokens[0]] if tokens else None
            self.stop_ids = frozenset(vocabulary[token] for token in tokens)
        ends = f"\0{self.bos_id}\0{self.eos_id}".encode()
        self.fingerprint = hashlib.sha256(b"tokenizers\0" + data + ends).hexdigest()

    def _encode(self, texts: Sequence[str]) -> Any:
        try:
            return self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except BaseException as error:  # a panic in Rust is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
        # Without the library's reason, which may quote a text.
        raise BadInputError(f"{self._name} fails on a text: mend that file, or choose another")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(e.ids, dtype=np.uint32) for e in self._encode(texts)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns for each text its ids, and int [n, 2]: the range of characters of each id."""
        done = self._encode(texts)
        return [(np.asarray(e.ids, np.uint32), np.array(e.offsets).reshape(-1, 2)) for e in done]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        known = [int(i) for i in ids if i != self.bos_id and i not in self.stop_ids]
        return self._tokenizer.decode(known, skip_special_tokens=True)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece ``.model`` file (extra ``sentencepiece``)."""

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any] | None = None):
        """Reads the file; ``settings`` as in ``HuggingFaceTokenizer``.

        Raises:
          BadInputError: it is missing or not a model, or the library is not installed.
        """
        with extra("sentencepiece", str(path)):
            import sentencepiece
        data = _read(path)
        self._model: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(data)
        except Exception as error:
            raise BadInputError(f"{path} is not a SentencePiece model: {error}") from error
        bos, eos = (i if i >= 0 else None for i in (self._model.bos_id(), self._model.eos_id()))

        def piece(text: str) -> int | None:
            token_id = self._model.PieceToId(text)
            return None if token_id == self._model.unk_id() else token_id

        settings = settings or {}
        self.bos_id = bos if settings.get("add_bos_token", True) else None
        self.eos_id, self.stop_ids = _end_ids(settings, piece, eos, str(path))
        self.vocab_size = self._model.GetPieceSize()
        ends = f"\0{self.bos_id}\0{self.eos_id}".encode()
        self.fingerprint = hashlib.sha256(b"sentencepiece\0" + data + ends).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(ids, dtype=np.uint32) for ids in self._model.Encode(list(texts))]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        known = [int(i) for i in ids if i != self.bos_id and i not in self.stop_ids]
        return self._model.DecodeIds(known)


def load_tokenizer(name: Any) -> Tokenizer:
    """Returns a tokeniser by name, file or object.

    Args:
      name: ``"bytes"``; a ``tokenizer.json`` of the tokenizers library or a SentencePiece
        ``.model``, a folder that holds one (a checkpoint, say), or a name on the hub; a
        ``tokenizers.Tokenizer`` or a fast tokeniser of ``transformers``; or a ``Tokenizer``. Files
        next to a tokeniser's say how texts begin and end (``tokenizer_settings``).

    Raises:
      BadInputError: the file is missing or of another kind.

    Examples:
      >>> from dpfl_jax.data import load_tokenizer
      >>> load_tokenizer("bytes").encode("hi")
      [107, 108]
    """
    library = getattr(name, "backend_tokenizer", name)  # transformers keep one of tokenizers
    if hasattr(library, "to_str") and hasattr(library, "get_vocab"):
        named = {} if library is name else named_tokens(getattr(name, "special_tokens_map", {}))
        return HuggingFaceTokenizer(library.to_str().encode(), type(name).__name__, named)
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
        candidates = [os.path.join(path, f) for f in ("tokenizer.json", "tokenizer.model")]
        path = next((f for f in candidates if os.path.exists(f)), path)
    if path.endswith(".json"):
        return HuggingFaceTokenizer(_read(path), path, tokenizer_settings(path))
    if path.endswith((".model", ".spm")):
        return SentencePieceTokenizer(path, tokenizer_settings(path))
    raise BadInputError(
        f"tokenizer {path!r} is neither 'bytes' nor a .json (tokenizers) nor a .model "
        "(SentencePiece) file, nor a folder with one"
    )


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Returns the ids of a prompt as a model reads it, with the beginning of a text.

    Raises:
      BadInputError: the prompt is empty, and texts have no beginning-of-sequence token.

    Examples:
      >>> from dpfl_jax.data import load_tokenizer, prompt_ids
      >>> prompt_ids(load_tokenizer("bytes"), "hi")  # 1 begins a text
      [1, 107, 108]
    """
    ids = list(tokenizer.encode(prompt))
    if tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    if not ids:
        raise BadInputError(
            "the prompt is empty, and this tokenizer has no token that begins a text: give a first "
            "word"
        )
    return ids


def tokenizer_settings(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the files next to a tokeniser's: special tokens by name, and ``eos_token_id``.

    As in ``transformers``, tokenizer_config.json precedes special_tokens_map.json, and
    generation_config.json precedes config.json.

    Raises:
      BadInputError: one of them cannot be read.
    """
    folder = pathlib.Path(file).parent
    settings: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        tokens = read_json_object(folder / name)
        settings = named_tokens(tokens) | settings
        if tokens.get("add_bos_token") is False:
            settings["add_bos_token"] = False
    for name in ("generation_config.json", "config.json"):
        ids = read_json_object(folder / name).get("eos_token_id")
        if ids is not None and "eos_token_id" not in settings:
            settings["eos_token_id"] = ids
    return settings


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file; {} if the file is missing or holds something else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise BadInputError(f"{path} is not a JSON file: {error}") from None
    return value if isinstance(value, dict) else {}


def named_tokens(named: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens (``bos_token``, ...) as text; files have text, or an object that holds it."""
    tokens = {}
    for key, token in named.items():
        content = token.get("content") if isinstance(token, Mapping) else token
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = str(content)
    return tokens


def _added_ids(processor: Any, name: str) -> tuple[int | None, int | None]:
    """The ids that a post-processor of ``tokenizers`` puts before and after a text."""
    kind = (processor or {}).get("type")
    if kind == "Sequence":
        pairs = [_added_ids(part, name) for part in processor["processors"]]
        return tuple(next((i for i in side if i is not None), None) for side in zip(*pairs))  # type: ignore[return-value]
    if kind in ("BertProcessing", "RobertaProcessing"):
        return processor["cls"][1], processor["sep"][1]
    if kind != "TemplateProcessing":
        return None, None
    parts = processor["single"]
    at = next((i for i, part in enumerate(parts) if "Sequence" in part), len(parts))

    def ids(parts: list[dict[str, Any]]) -> list[int]:
        named = [part["SpecialToken"]["id"] for part in parts if "SpecialToken" in part]
        return [i for token in named for i in processor["special_tokens"][token]["ids"]]

    before, after = ids(parts[:at]), ids(parts[at:])
    if len(before) > 1:
        raise BadInputError(
            f"{name} begins each text with {len(before)} tokens, but at most one is supported"
        )
    return next(iter(before), None), next(iter(after), None)


def _end_ids(
    settings: Mapping[str, Any], id_of: Callable[[str], int | None], after: int | None, name: str
) -> tuple[int | None, frozenset[int]]:
    """The id that ends a text, and all that end a sample; ``after``: what the tokeniser appends."""
    token, listed = settings.get("eos_token"), settings.get("eos_token_id")
    eos = None if token is None else id_of(token)
    if token is not None and eos is None:
        raise BadInputError(
            f"{name} has no token {token!r}, which a file next to it calls the eos_token: correct "
            "one of them"
        )
    ends = [i for i in (listed if isinstance(listed, list) else [listed]) if type(i) is int]
    eos = next((i for i in (eos, after, *ends) if i is not None), None)
    return eos, frozenset(ends if eos is None else [*ends, eos])


def _read(path: str | os.PathLike[str]) -> bytes:
    if os.path.exists(path) and not os.path.isfile(path):  # a device never ends
        raise BadInputError(f"cannot read the tokenizer file {path}: it is not a regular file")
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        reason = error.strerror or error
        raise BadInputError(f"cannot read the tokenizer file {path}: {reason}") from error
