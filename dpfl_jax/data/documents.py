"""Documents, (user, text) pairs: read from files, and cut into examples of fixed length.

Nothing is guessed: a null user, a missing column or bytes that are not UTF-8 stop the reading. A
row of tokens never holds tokens of two documents, and so never tokens of two users.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from dpfl_jax.data.chats import TOO_LONG, Conversations, encode_conversations
from dpfl_jax.data.keys import UserKey
from dpfl_jax.data.owners import infer_shared_ownership
from dpfl_jax.data.rows import (
    FORMATS,
    PLAIN_CSV,
    BadRows,
    CsvFormat,
    guess_format,
    is_number,
    read_file_rows,
    text_of,
)
from dpfl_jax.data.schema import Schema
from dpfl_jax.data.store import ArrayStore, Store, user_order_key
from dpfl_jax.data.table import user_key
from dpfl_jax.data.templates import RowTemplate
from dpfl_jax.data.tokenizers import Tokenizer
from dpfl_jax.errors import BadInputError
from dpfl_jax.files import within

Document = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class DocumentFiles:
    """How files hold documents.

    Attributes:
      format: one of ``FORMATS``, or None to go by each file's name.
      user_column: column of the user id, or a key expression (``keys``); None, with a template:
        every row is a user.
      text_column: column of the text, if there are no ``conversations``.
      csv: how CSV files are written.
      conversations: how to read conversations.
      template: how columns make a text.
      decimal: the decimal separator of numbers in its columns.
    """

    format: str | None = None
    user_column: str | None = "user"
    text_column: str = "text"
    csv: CsvFormat = PLAIN_CSV
    conversations: Conversations | None = None
    template: RowTemplate | None = None
    decimal: str = "point"


def read_documents(
    paths: Iterable[pathlib.Path], how: DocumentFiles | None = None, bad: BadRows | None = None
) -> Iterator[Document]:
    """Streams the documents of files one after another.

    Args:
      paths: files (``expand_paths``).
      how: where documents are in them.
      bad: takes rows without a user or a text; default: they are errors.

    Raises:
      BadInputError: naming the file and the line or row; or all texts of CSV files are numbers.
    """
    how, bad, any_row, any_word = how or DocumentFiles(), bad or BadRows(), False, False
    text_column, conversations = how.text_column, how.conversations
    key: Any = UserKey(how.user_column or "") if how.template is None else user_key(how.user_column)
    texts = [text_column] if conversations is None else conversations.columns
    if (template := how.template) is not None:
        texts = [column.name for column in template.columns]
    named = getattr(key, "columns", None)
    columns = None if named is None else list(dict.fromkeys([*named, *texts]))
    for path in paths:
        kind = how.format or guess_format(path)
        if kind not in FORMATS:
            raise BadInputError(f"unknown data format {kind!r}: use one of {', '.join(FORMATS)}")
        if kind == "folder":
            if conversations is not None or template is not None:
                raise BadInputError(f"the folder {path} holds texts, which have no columns")
            yield from read_folder(path)
            continue
        for where, row in read_file_rows([path], kind, columns, how.csv, bad):
            try:
                user = key(row, where)
                if conversations is not None:
                    document = user, conversations.document(row, where)
                elif template is not None:
                    document = user, template.write([row], where, how.decimal)
                else:
                    document = user, text_of(row, text_column, where)
            except BadInputError as error:
                bad(error)
                continue
            # Cells of CSV files are text, even where they mean numbers.
            any_row = True
            any_word = any_word or kind not in ("csv", "tsv") or not is_number(document[1])
            yield document
    if bad.dropped and not any_row:
        raise bad.none_left("the data are empty")
    if any_row and not any_word:
        raise BadInputError(
            f"every text in the column {text_column!r} is a number: set data.text_column to the "
            "texts, or data.target_column to predict numbers"
        )


def read_folder(root: pathlib.Path) -> Iterator[Document]:
    """Streams the text files of a folder; a user is a file or a folder at its first level.

    Hidden files are skipped. Every other file must be UTF-8 text, and must not link out of the
    folder.
    """
    any_file = False
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if any(part.startswith(".") for part in parts):
            continue
        if path.is_symlink():
            within(root, os.path.join(*parts))
        if not path.is_file():
            continue
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise BadInputError(f"{path}: the text is not UTF-8 ({error.reason})") from error
        except OSError as error:
            raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error
        any_file = True
        yield parts[0], text
    if not any_file:
        raise BadInputError(f"the folder {root} holds no files: each entry in it is a user")


def chunk_documents(
    documents: Sequence[np.ndarray], schema: Schema, eos_id: int | None, min_tokens: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents, one integer array of ids each, into records of ``schema.seq_len`` tokens.

    ``eos_id`` is appended to each document that has any token, unless None. A last piece of less
    than ``min_tokens`` is dropped; the default drops a lone end token.

    Returns:
      records: [n] of ``schema.record_dtype``, in the order of documents and of pieces.
      counts: int64 [len(documents)], pieces of each document (0 for an empty one).
    """
    length = schema.seq_len
    min_tokens = min(min_tokens, length)
    extra = 0 if eos_id is None else 1
    raw = np.array([len(d) for d in documents], dtype=np.int64)
    kept = np.where(raw > 0, raw + extra, 0)
    tail = kept % length
    kept -= np.where(tail < min_tokens, tail, 0)
    counts = -(-kept // length)
    rows = int(counts.sum())
    flat = np.zeros(rows * length, schema.record_dtype["tokens"].base)
    starts = (np.cumsum(counts) - counts) * length
    for document, start, total in zip(documents, starts.tolist(), kept.tolist()):
        body = min(len(document), total)
        flat[start : start + body] = document[:body]
        if eos_id is not None and total > body:
            flat[start + body] = eos_id
    records = np.empty(rows, schema.record_dtype)
    records["tokens"] = flat.reshape(rows, length)
    lengths = np.full(rows, length, np.int64)
    last = np.cumsum(counts)[counts > 0] - 1
    lengths[last] = (kept - (counts - 1) * length)[counts > 0]
    records["length"] = lengths
    return records, counts


def encode_user(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    schema: Schema,
    max_examples: int | None = None,
    bad: BadRows | None = None,
    one_each: bool = False,
) -> np.ndarray:
    """Returns the records of one user's documents, in order, at most ``max_examples``.

    ``bad`` counts the conversations left out because no answer begins within ``seq_len``. With
    ``one_each`` a document makes one record, and what is too long is cut off.
    """
    step = max_examples or max(len(texts), 1)
    parts, count = [np.empty(0, schema.record_dtype)], 0
    for start in range(0, len(texts), step):  # what would be cut off need not be tokenised
        batch = texts[start : start + step]
        if schema.kind == "answers":
            records, dropped = encode_conversations(batch, tokenizer, schema)
            if bad is not None:
                bad.dropped += dropped
        else:
            ids = [_bare(document, tokenizer) for document in tokenizer.encode_batch(batch)]
            if one_each:
                ids = [document[: schema.seq_len] for document in ids]
            records = chunk_documents(ids, schema, tokenizer.eos_id)[0]
        parts.append(records)
        count += len(parts[-1])
        if max_examples is not None and count >= max_examples:
            break
    return np.concatenate(parts)[:max_examples]


def _bare(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Removes a beginning and an end that are written into the text: both are added anyway."""
    if len(ids) and ids[0] == tokenizer.bos_id:
        ids = ids[1:]
    return ids[:-1] if len(ids) and ids[-1] == tokenizer.eos_id else ids


def none_usable(schema: Schema) -> BadInputError:
    """Returns the error of data that yield no example."""
    why = TOO_LONG.format(schema.seq_len) if schema.kind == "answers" else "every text is empty"
    return BadInputError(f"the data hold zero usable examples: {why}")


def text_schema(seq_len: int, tokenizer: Tokenizer, conversations: Conversations | None) -> Schema:
    """The layout of examples of texts, or of conversations."""
    if conversations is not None:
        return conversations.schema(seq_len, tokenizer)
    return Schema.tokens(seq_len, tokenizer.vocab_size, tokenizer.fingerprint)


def store_from_documents(
    documents: Iterable[tuple[str, str]],
    tokenizer: Tokenizer,
    seq_len: int,
    max_examples: int | None = None,
    conversations: Conversations | None = None,
    bad: BadRows | None = None,
    template: RowTemplate | None = None,
) -> Store:
    """Groups documents, (user, text) pairs, by user in memory, tokenises and cuts them.

    A user's documents keep their order; a user may be the id of a set of owners
    (``keys.owners_to_id``). ``max_examples`` keeps each user's first examples; ``bad`` counts
    conversations that are too long. Documents of a ``template`` are its rows: as many as it takes
    make one text, which is cut to one example.

    Raises:
      BadInputError: there is no document, or none yields an example.

    Examples:
      >>> from dpfl_jax.data import ByteTokenizer, store_from_documents
      >>> store = store_from_documents([("ann", "hello world")], ByteTokenizer(), seq_len=8)
      >>> store.num_users, store.num_examples
      (1, 2)
    """
    schema = text_schema(seq_len, tokenizer, conversations)
    texts: dict[str, list[str]] = {}
    for user, text in documents:
        texts.setdefault(user, []).append(text)
    if not texts:
        raise BadInputError("the data hold no users: there is not one row")
    packed: dict[str, np.ndarray] = {}
    for user in sorted(texts, key=user_order_key):
        of_user = texts.pop(user)
        if template is not None:
            of_user = template.joined(of_user)
        is_row = template is not None
        records = encode_user(of_user, tokenizer, schema, max_examples, bad, is_row)
        if len(records):
            packed[user] = records
    if not packed:
        raise none_usable(schema)
    return infer_shared_ownership(ArrayStore.from_records(packed, schema, allow_sets=True))
