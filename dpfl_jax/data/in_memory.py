"""Stores of examples that are in memory: texts, arrays, data frames, data sets.

Each takes the owner of a row as ``data.user_column`` of a configuration does, and gives the store
that files of the same rows would give: a ``SharedStore`` if a row has several owners.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dpfl_jax.data.chats import conversations_in
from dpfl_jax.data.documents import store_from_documents
from dpfl_jax.data.keys import UserKey, key_name, owners_to_id
from dpfl_jax.data.owners import store_from_users
from dpfl_jax.data.rows import LocatedRow, text_of
from dpfl_jax.data.schema import Schema
from dpfl_jax.data.sections import SourceConfig
from dpfl_jax.data.store import Store, with_unit_key
from dpfl_jax.data.table import input_names, read_table
from dpfl_jax.data.tokenizers import load_tokenizer
from dpfl_jax.errors import BadInputError, expect, repeated


def from_texts(
    documents: Iterable[tuple[Any, str]], tokenizer: Any = "bytes", *, seq_len: int = 128
) -> Store:
    """Returns the store of (user, text) pairs.

    Args:
      documents: in any order of users; a user is text, an integer or a UUID, or a list of these:
        the owners of the text.
      tokenizer: see ``load_tokenizer``.
      seq_len: tokens in an example.

    Raises:
      BadInputError: naming the item that is not a pair of user and text.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> store = dpfl.from_texts([("ann", "one two"), ("bob", "three")], seq_len=16)
      >>> store.num_users, store.read([0])["tokens"].shape
      (2, (1, 16))
    """

    def pairs() -> Iterator[tuple[str, str]]:
        for number, pair in enumerate(documents):
            if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
                raise BadInputError(
                    f"document {number} is {type(pair).__name__}, but each must be a pair (user, "
                    "text)"
                )
            where = f"document {number}"
            yield owners_to_id(pair[0], where), text_of({"text": pair[1]}, "text", where)

    store = store_from_documents(pairs(), load_tokenizer(tokenizer), seq_len)
    return with_unit_key(store, "id that was given with each text")


def from_arrays(
    arrays: Mapping[str, Any], users: Sequence[Any] | np.ndarray, tokenizer: Any = None
) -> Store:
    """Returns the store of arrays with a leading axis of rows.

    Args:
      arrays: such as ``{"x": ..., "label": ...}``; or ``tokens`` and ``mask`` of a tokeniser.
      users: [n], the owner of each row: text, integers or UUIDs, or lists of these.
      tokenizer: the tokeniser that made ``tokens``; see ``load_tokenizer``.

    Raises:
      BadInputError: lengths differ, or a row has no user.

    Examples:
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> x = np.eye(3, dtype="float32")
      >>> store = dpfl.from_arrays({"x": x, "label": np.arange(3)}, users=["ann", "ann", "bob"])
      >>> store.num_users, store.num_examples
      (2, 3)
    """
    users = users.tolist() if hasattr(users, "tolist") else users
    expect(arrays, Mapping, "arrays", 'arrays by name, such as {"x": ..., "label": ...}')
    expect(users, Sequence, "users", "a list with the user of each row")
    columns = {name: _device_array(name, array) for name, array in arrays.items()}
    schema = None
    if tokenizer is not None:
        loaded = load_tokenizer(tokenizer)
        if "tokens" not in columns or columns["tokens"].ndim != 2:
            raise BadInputError(
                "a tokenizer goes with tokens of one length, [n, length], and their mask"
            )
        length = columns["tokens"].shape[1]
        schema = Schema.tokens(length, loaded.vocab_size, loaded.fingerprint)
    rows: dict[str, list[int]] = {}
    for number, user in enumerate(users):
        rows.setdefault(owners_to_id(user, f"row {number}"), []).append(number)
    for name, array in columns.items():
        if len(array) != len(users):
            raise BadInputError(f"there are {len(users)} users for {len(array)} rows of {name!r}")
    store = store_from_users(
        ((user, {n: a[indices] for n, a in columns.items()}) for user, indices in rows.items()),
        schema,
    )
    return with_unit_key(store, "id that was given with each row")


def _device_array(name: str, values: Any) -> np.ndarray:
    """Returns an array that devices can hold in 32 bits; refuses numbers that would change."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise BadInputError(
            f"the rows of {name!r} differ in length: cut or fill them up to one length"
        ) from None
    narrow_float = array.dtype.name.startswith(("bfloat16", "float8"))
    if array.dtype.kind not in "biuf" and not narrow_float:
        raise BadInputError(
            f"{name!r} holds {array.dtype.name}, not numbers: give numbers (from_texts takes "
            "texts, from_pandas a table with words, dates and gaps)"
        )
    if not array.ndim:
        raise BadInputError(f"{name!r} is a single number: give an array with a row for each")
    if array.dtype.kind in "iu" and array.size and array.dtype.itemsize > 4:
        limits = np.iinfo(np.int32 if array.dtype.kind == "i" else np.uint32)
        if array.min() < limits.min or array.max() > limits.max:
            raise BadInputError(
                f"{name!r} holds {array.dtype.name} beyond {limits.min} to {limits.max}, which 32 "
                "bits would turn into others: subtract a known number, or give float32 of order 1"
            )
    if array.dtype.kind == "f" or narrow_float:
        with np.errstate(over="ignore"):
            finite = np.isfinite(array.astype(np.float32))
        if not finite.all():
            raise BadInputError(
                f"{name!r} holds numbers that are missing (NaN), infinite or beyond float32, first "
                f"in row {int(np.argwhere(~finite)[0][0])}: mend or leave out such rows"
            )
    return array


def table_rows(table: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows of a ``DataFrame``, an Arrow table, columns by name, or dictionaries.

    Raises:
      BadInputError: it is none of these, or two columns have one name.
    """
    if hasattr(table, "to_pylist"):
        table = table.to_pylist()
    if not (isinstance(table, Mapping) or hasattr(table, "columns")):
        if not hasattr(table, "__iter__") or isinstance(table, str | bytes | np.ndarray):
            expect(table, (), "the table", "a DataFrame, columns by name, or dictionaries")
        return (dict(row) for row in table)
    columns = list(table if isinstance(table, Mapping) else table.columns)
    names = [str(name) for name in columns]
    if (twice := repeated(names)) is not None:
        raise BadInputError(f"two columns of the frame are called {twice!r}: rename one")
    # Python values, except from arrays, whose ``tolist`` turns times into integers.
    series = [table[name] for name in columns]
    values = [s.tolist() if hasattr(s, "tolist") and not isinstance(s, np.ndarray) else s
              for s in series]  # fmt: skip
    return (dict(zip(names, row, strict=True)) for row in zip(*values, strict=True))


def from_pandas(frame: Any, *, user: str | None, **columns: Any) -> Store:
    """Returns the store of a ``pandas.DataFrame``; columns as in ``from_rows``.

    Examples:
      >>> import pandas as pd
      >>> import dpfl_jax as dpfl
      >>> rows = {"who": ["ann", "bob", "bob"], "x": [0.1, 0.2, 0.3], "y": [0, 1, 1]}
      >>> frame = pd.DataFrame(rows)
      >>> store = dpfl.from_pandas(frame, user="who", target="y", classes=2)
      >>> store.num_users, store.num_examples
      (2, 3)
    """
    if not hasattr(frame, "columns"):
        expect(frame, (), "frame", "a pandas.DataFrame (from_rows takes dictionaries)")
    rows = table_rows(frame)
    columns = _named_inputs(columns, [str(name) for name in frame.columns], user)
    return from_rows(rows, user=user, **columns)


def from_huggingface(dataset: Any, *, user: str | None, **columns: Any) -> Store:
    """Returns the store of a ``datasets.Dataset`` (one split); columns as in ``from_rows``.

    Examples:
      >>> import datasets
      >>> import dpfl_jax as dpfl
      >>> split = datasets.Dataset.from_dict({"who": ["ann", "bob"], "text": ["one", "two"]})
      >>> dpfl.from_huggingface(split, user="who", text="text", seq_len=8).num_users
      2
    """
    if isinstance(dataset, Mapping):
        raise BadInputError(
            f"this is a dictionary of splits ({', '.join(dataset)}): give one of them"
        )
    names = getattr(dataset, "column_names", None)
    if names is not None:
        columns = _named_inputs(columns, names, user)
    return from_rows(dataset, user=user, **columns)


def _named_inputs(
    columns: Mapping[str, Any], names: Sequence[str], user: str | None
) -> dict[str, Any]:
    """Names the inputs from the columns of the whole table, not from its first row."""
    target, silo, given = (columns.get(name) for name in ("target", "silo", "inputs"))
    ids = [] if user is None else UserKey(user).columns
    if target is None or (ids is None and given is None):
        return dict(columns)
    used = [name for name in (target, silo, *(ids or ())) if name is not None]
    return {**columns, "inputs": input_names(given, names, used, "the table")}


def from_grain(source: Any, *, user: str | None, **columns: Any) -> Store:
    """Returns the store of a source with random access; columns as in ``from_rows``.

    Args:
      source: a Grain data source or ``MapDataset``, or ``tfds.data_source(...)``; its elements are
        dictionaries.
      user: column of the owner.
      **columns: see ``from_rows``.

    Examples:
      >>> import grain
      >>> import dpfl_jax as dpfl
      >>> rows = [{"who": "ann", "text": "one"}, {"who": "bob", "text": "two"}]
      >>> source = grain.MapDataset.source(rows)
      >>> dpfl.from_grain(source, user="who", text="text", seq_len=8).num_users
      2
    """
    return from_rows((source[i] for i in range(len(source))), user=user, **columns)


def from_rows(
    rows: Iterable[Mapping[str, Any]],
    *,
    user: str | None,
    text: str | None = None,
    messages: str | None = None,
    prompt: str | None = None,
    completion: str | None = None,
    chosen: str | None = None,
    rejected: str | None = None,
    chat_template: str | None = None,
    target: str | None = None,
    inputs: Sequence[str] | None = None,
    classes: int | None = None,
    silo: str | None = None,
    scale: Mapping[str, tuple[float, float]] | None = None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    missing: Sequence[str] = (),
    dates: Mapping[str, str] | None = None,
    tokenizer: Any = "bytes",
    seq_len: int = 128,
) -> Store:
    """Returns the store of rows that are dictionaries.

    Args:
      rows: one dictionary each.
      user: column of the owner, or of a list of owners, or a key expression
        (``docs/guides/data_reference.md``); None: every row is a user (tables only).
      text: column of the text, to be tokenised; or
      messages: column of a conversation (``docs/guides/finetune_reference.md``); or
      prompt: column of a prompt, text or messages, that is followed by
      completion: the answer; or by
      chosen: the better of two, and
      rejected: the other one; or
      target: column to predict, of a table, from
      inputs: these columns. A DataFrame or ``Dataset`` also takes shell patterns, and by default
        all other columns; rows alone do not declare what columns there are.
      silo: column of the silo.
      chat_template: file of a template for messages; default the tokeniser's.
      classes: number of classes of the target; None, or 0: it is a number.
      scale: (middle, half width) by column, known without these data.
      categories: words by column (of the target: names of its classes), known without these data.
      missing: inputs, names or patterns, whose cells may be empty (``SourceConfig``).
      dates: how dates that are text are written, by column; they become years since 2000.
      tokenizer: see ``load_tokenizer``.
      seq_len: tokens in an example.

    Raises:
      BadInputError: naming the row and the column.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> rows = [{"who": "ann", "text": "one"}, {"who": "bob", "text": "two"}]
      >>> dpfl.from_rows(rows, user="who", text="text", seq_len=8).num_users
      2
    """
    columns = {"messages": messages, "prompt": prompt, "completion": completion}
    columns |= {"chosen": chosen, "rejected": rejected}
    conversations = conversations_in(columns, tokenizer, chat_template)
    if [text is None, target is None, conversations is None].count(False) != 1:
        raise BadInputError(
            "give either text= (a column to tokenise), or columns of a conversation, such as "
            "messages=, or target= (to predict)"
        )
    located: Iterator[LocatedRow] = ((f"row {i}", dict(row)) for i, row in enumerate(rows))
    if target is None:
        if user is None:
            raise BadInputError("texts need user=, the column that says whose each text is")
        key = UserKey(user)

        def document(row: dict[str, Any], where: str) -> str:
            if conversations is not None:
                return conversations.document(row, where)
            return text_of(row, str(text), where)

        pairs = ((key(row, where), document(row, where)) for where, row in located)
        loaded = load_tokenizer(tokenizer)
        store = store_from_documents(pairs, loaded, seq_len, conversations=conversations)
        return with_unit_key(store, key_name(user))
    config = SourceConfig(
        source="rows",
        user_column=user,
        target_column=target,
        input_columns=None if inputs is None else tuple(inputs),
        classes=classes,
        silo_column=silo,
        scale=dict(scale or {}),
        categories={name: tuple(words) for name, words in (categories or {}).items()},
        missing=tuple(missing),
        dates=dict(dates or {}),
    )
    users, task = read_table(config, (), located)
    return with_unit_key(store_from_users(users.items()), key_name(user), task)
