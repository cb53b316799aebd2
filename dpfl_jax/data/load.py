"""Loads the examples, owners and task of a data section, and splits them."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from dpfl_jax.buckets import address
from dpfl_jax.data.chats import conversations_in
from dpfl_jax.data.documents import (
    Document,
    DocumentFiles,
    read_documents,
    store_from_documents,
)
from dpfl_jax.data.features import with_features
from dpfl_jax.data.keys import key_name, value_to_id
from dpfl_jax.data.owners import SharedStore, grouped_by_owner_set, store_from_users
from dpfl_jax.data.rows import FORMATS, BadRows, expand_paths
from dpfl_jax.data.sections import CONVERSATION, DataConfig, SourceConfig
from dpfl_jax.data.sets import data_source, installed_package_files, standard_library_files
from dpfl_jax.data.shards import open_store
from dpfl_jax.data.store import (
    ArrayStore,
    Store,
    UserView,
    are_classes,
    unit_key_of,
    user_order_key,
    with_unit_key,
)
from dpfl_jax.data.table import read_table
from dpfl_jax.data.templates import RowTemplate
from dpfl_jax.data.tokenizers import Tokenizer, load_tokenizer
from dpfl_jax.errors import BadInputError, at_least, expect, probability
from dpfl_jax.task import EACH_ROW, Task

# Settings for tables and stores of arrays, and for tables only.
_ARRAY_SETTINGS = ("target_column", "input_columns", "classes", "silo_column")
_TABLE_SETTINGS = ("scale", "categories", "missing", "dates")
# Those of them that templates take, too.
_TEMPLATE_SETTINGS = ("categories", "missing")
_RANDOM_TEXTS = 10_000  # of data.public=template


@dataclasses.dataclass(frozen=True)
class LoadedExamples:
    """The examples of a source.

    Attributes:
      store: the examples, by user.
      task: what is learned.
      unit: what a user is, in one line.
      test: a test part that the source itself defines, or None.
      tokenizer: the tokeniser that made the ids; None for examples that are not text.
      dropped: number of rows that were left out.

    Examples:
      >>> from dpfl_jax.data import SourceConfig, load_examples
      >>> examples = load_examples(SourceConfig(source="shakespeare"))
      >>> examples.unit, examples.dropped
      ('speaking role', 0)
    """

    store: Store
    task: Task
    unit: str
    test: Store | None = None
    tokenizer: Tokenizer | None = None
    dropped: int = 0

    @property
    def left_out(self) -> str:
        """The end of a description: how many rows were left out, if any."""
        if not self.dropped:
            return ""
        return f"; {self.dropped} bad rows left out, a number that no guarantee covers"


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set split by user.

    Attributes:
      train: the private training users; the only part a mechanism may touch.
      validation: held-out users for tuning (None if its fraction is 0).
      test: held-out users for the report (None if its fraction is 0).
      public: a public corpus, or None.
      description: one line: source, users, examples.
      task: what is learned.
      tokenizer: the tokeniser that made the ids; None for examples that are not text.
      known: whether some users of the test part are in training, too.
      rules: how each held-out part was chosen, in words.

    Examples:
      >>> from dpfl_jax.data import DataConfig, load_dataset
      >>> data = load_dataset(DataConfig(source="shakespeare", seq_len=64))
      >>> data.task.kind, data.task.input_shape
      ('tokens', (64,))
    """

    train: Store
    validation: Store | None
    test: Store | None
    public: Store | None
    description: str
    task: Task
    tokenizer: Tokenizer | None = None
    known: bool = False
    rules: Mapping[str, str] = dataclasses.field(default_factory=dict)


def load_examples(config: SourceConfig, keep: Sequence[str] = ()) -> LoadedExamples:
    """Reads all examples of a data section.

    ``keep`` names further columns of numbers that a table's examples carry.

    Raises:
      BadInputError: naming the file and line, or the setting to change.

    Examples:
      >>> from dpfl_jax.data import SourceConfig, load_examples
      >>> load_examples(SourceConfig(source="shakespeare")).task.kind
      'tokens'
    """
    is_file, bad = config.source in FORMATS, BadRows(config.on_bad_row == "drop")
    if config.on_bad_row == "drop" and not is_file:
        raise BadInputError("data.on_bad_row is for files (of a store: dpfl data build)")
    is_table = is_file and config.target_column is not None
    if not is_table:
        of_arrays = () if config.source == "store" else _ARRAY_SETTINGS
        of_template = () if config.template is None else _TEMPLATE_SETTINGS
        for name in (*of_arrays, *_TABLE_SETTINGS):
            if getattr(config, name) and name not in of_template:
                more = ", whose data.target_column is set" if is_file else ""
                if name in _ARRAY_SETTINGS and not is_file:
                    more = " and stores of arrays"
                raise BadInputError(f"data.{name} is for tables{more}")
    if config.conversations and (not is_file or is_table):
        raise BadInputError(
            f"data.{config.conversations[0]} is for files of conversations (of a store: dpfl data "
            "build), not for tables and other sources"
        )
    if config.template is None:
        if config.ranges or config.rows_per_text > 1:
            name = "ranges" if config.ranges else "rows_per_text"
            raise BadInputError(f"data.{name} is for texts that data.template makes: set that")
    elif is_table or config.conversations or not is_file:
        other = config.conversations[:1] or (("target_column",) if is_table else ("source",))
        raise BadInputError(
            f"data.template makes texts of the columns of a file, which data.{other[0]} does not "
            "go with: leave one out"
        )
    if is_table:
        users, task = read_table(config, keep, bad=bad)
        unit = "a row" if config.user_column is None else config.user_column
        checked = _checked(users.items(), task, config.source)
        loaded = LoadedExamples(store_from_users(checked), task, unit)
    elif is_file or config.source == "python_source":
        loaded = _texts(config, bad)
    elif config.source == "store":
        loaded = _stored(config)
    else:
        loaded = _named(config)
    if isinstance(loaded.store, SharedStore):
        for name in ("records_per_user", "max_users", "max_examples_per_user"):
            if getattr(config, name) is not None:
                raise BadInputError(
                    f"some records have several owners: leave out data.{name}; "
                    "mechanism.group_size says how many of each owner's are used"
                )
    if config.records_per_user is not None:
        store = ArrayStore.from_users(_synthetic(loaded.store, config))
        unit = f"users are synthetic: {config.records_per_user} records each, drawn at random"
        loaded = dataclasses.replace(loaded, store=store, unit=unit)
    key = _unit_key(config, loaded)
    limited = limit_store(loaded.store, config.max_users, config.max_examples_per_user)
    loaded = dataclasses.replace(loaded, store=limited, dropped=loaded.dropped or bad.dropped)
    if config.features is not None:
        loaded = _with_features(loaded)
    with_unit_key(loaded.store, key, loaded.task)
    return loaded


def _with_features(loaded: LoadedExamples) -> LoadedExamples:
    (store, task), test = with_features(loaded.store, loaded.task), loaded.test
    if test is not None:
        test, _ = with_features(test, loaded.task)
    return dataclasses.replace(loaded, store=store, task=task, test=test)


def _unit_key(config: SourceConfig, loaded: LoadedExamples) -> str:
    """What makes a user, as a guarantee names it."""
    if config.records_per_user is not None:
        return f"synthetic group of {config.records_per_user} rows"
    if config.source in FORMATS and config.source != "folder":
        return key_name(config.user_column)
    key = unit_key_of(loaded.store) if config.source == "store" else ""
    return key or f"{loaded.unit} of {config.source}"


def load_dataset(config: DataConfig) -> Dataset:
    """Reads, limits and splits the data that ``config`` describes.

    Raises:
      BadInputError: naming the file and line, or the setting to change.

    Examples:
      >>> from dpfl_jax.data import DataConfig, load_dataset
      >>> data = load_dataset(DataConfig(source="shakespeare", validation_fraction=0.1))
      >>> data.train.num_users > data.validation.num_users
      True
    """
    expect(config, DataConfig, "config", "a DataConfig(source=..., path=...)")
    loaded = load_examples(config)
    store = loaded.store
    fractions = {"validation": config.validation_fraction, "test": config.test_fraction}
    if loaded.test is not None:
        fractions["test"] = 0.0
    parts = hold_out(store, config, fractions, config.split, config.held_out_max)
    rules = {name: rule_of(config, config.split, name, fractions[name]) for name in fractions}
    known = False
    if loaded.test is not None:
        rules["test"] = f"the test part of data.source={config.source}"
        parts["test"], fractions["test"] = loaded.test, 1.0
        names = [set(s.user_ids(range(s.num_users))) for s in (store, loaded.test)]
        known = not names[0].isdisjoint(names[1])
    public = _load_public(config, loaded.tokenizer)
    users = "rows" if unit_key_of(store) == EACH_ROW else "users"
    description = (
        f"{config.source}: {store.num_users} {users}, {store.num_examples} examples"
        + _shared_description(store, parts)
        + loaded.left_out
        + "".join(f"; {n} {p.num_users} {users}" for n, p in parts.items() if p.num_users)
        + (f"; public {public.num_examples} examples" if public is not None else "")
    )
    held_out = {n: p if fractions[n] > 0 else None for n, p in parts.items() if n != "train"}
    return Dataset(
        parts["train"],
        held_out["validation"],
        held_out["test"],
        public,
        description,
        loaded.task,
        loaded.tokenizer,
        known,
        rules,
    )


def rule_of(config: SourceConfig, split: str, part: str, share: float) -> str:
    """Says in words how a part of the users, or of each user's examples, is chosen."""
    chosen = "users chosen by a hash of their ids"
    if split == "within_user":
        chosen = "the first examples of each user (data.split=within_user)"
    return f"{chosen}; data.{part}_fraction={share:g}, data.split_seed={config.split_seed}"


def _shared_description(store: Store, parts: Mapping[str, Store]) -> str:
    if not isinstance(store, SharedStore):
        return ""
    between = store.num_examples - sum(part.num_examples for part in parts.values())
    left_out = f", {between} left out: owners on several sides" if between else ""
    return f" of up to {store.most_owners} owners each{left_out}"


def hold_out(
    store: Store,
    config: SourceConfig,
    fractions: dict[str, float],
    split: str,
    most: int | None = None,
) -> dict[str, Store]:
    """Splits a store into ``train`` and the held-out parts of ``fractions``.

    ``split`` and ``most`` are ``DataConfig.split`` and ``held_out_max``.

    Raises:
      BadInputError: a part would be empty.
    """
    if split == "by_user":
        parts = split_by_user(store, fractions, config.split_seed)
    elif isinstance(store, SharedStore):
        raise BadInputError(
            "data.split=within_user holds out examples of one user, but some records have several "
            "owners: set data.split=by_user"
        )
    else:
        parts = {"train": store}
        for number, name in enumerate(reversed(fractions)):
            parts["train"], parts[name] = split_within_users(
                parts["train"], fractions[name], most, smallest=2 if number == 0 else 1
            )
    for name, part in parts.items():
        if part.num_users == 0 and (name == "train" or fractions[name] > 0):
            column, asked = config.user_column, ""
            if column and store.num_users <= FEW < store.num_examples:
                asked = (
                    f"does data.user_column={column}, which has {store.num_users} values in "
                    f"{store.num_examples} rows, name people? If it does, "
                )
            raise BadInputError(
                f"the {name} part holds none of the {store.num_users} users: {asked}change the "
                "fractions or data.split_seed, or give more users"
            )
    return parts


def count_users(config: SourceConfig) -> tuple[int, int]:
    """Counts the users and the texts of a store, or of files of texts, which are not tokenised.

    Raises:
      BadInputError: as in ``load_examples``.
    """
    if config.source == "store":
        store = open_store(_store_of(config))
        return store.num_users, store.num_examples
    documents, _ = _documents(config, BadRows(config.on_bad_row == "drop"))
    texts = collections.Counter(user for user, _ in documents)
    return len(texts), texts.total()


def _store_of(config: SourceConfig) -> str:
    """The path or address of a built store."""
    path = config.path
    return path if isinstance(path, str) and address(path) else os.fspath(expand_paths(path)[0])


def _documents(config: SourceConfig, bad: BadRows) -> tuple[Iterator[Document], DocumentFiles]:
    columns = {name: getattr(config, f"{name}_column") for name in CONVERSATION}
    how = DocumentFiles(
        config.source,
        config.user_column,
        config.text_column,
        config.csv,
        conversations_in(columns, config.tokenizer, config.chat_template),
        template_of(config),
        config.decimal,
    )
    return read_documents(expand_paths(config.path), how, bad), how


def _texts(config: SourceConfig, bad: BadRows) -> LoadedExamples:
    tokenizer, limit = load_tokenizer(config.tokenizer), config.max_examples_per_user
    if config.source == "python_source":
        files = installed_package_files()
        users = sorted(files, key=user_order_key)[: config.max_users]
        texts = ((user, files[user].decode()) for user in users)
        store = store_from_documents(texts, tokenizer, config.seq_len, limit)
        return _tokens(store, tokenizer, "a source file of an installed package")
    documents, how = _documents(config, bad)
    store = store_from_documents(
        documents, tokenizer, config.seq_len, limit, how.conversations, bad, how.template
    )
    return _tokens(store, tokenizer, config.user_column or "a document")


def template_of(config: SourceConfig) -> RowTemplate | None:
    """The template of a data section; None without one.

    Raises:
      BadInputError: it is malformed, or does not fit the settings of its columns.
    """
    if config.template is None:
        return None
    return RowTemplate.parse(
        config.template, config.categories, config.ranges, config.missing, config.rows_per_text
    )


def _tokens(
    store: Store, tokenizer: Tokenizer, unit: str, test: Store | None = None
) -> LoadedExamples:
    schema = store.schema
    kind: Literal["tokens", "preferences"] = "preferences" if schema.pairs else "tokens"
    bos_id = None if schema.kind == "answers" else tokenizer.bos_id  # else it is in the data
    task = Task(kind, schema.fields[0].shape, 0, schema.vocab_size, bos_id)
    return LoadedExamples(store, task, unit, test, tokenizer)


def _named(config: SourceConfig) -> LoadedExamples:
    source, name = data_source(config.source), config.source
    task, limit = source.task, config.max_examples_per_user
    tokenizer = load_tokenizer(config.tokenizer) if task is None else None
    parts: list[Store] = []
    for split in source.splits:
        users = ((value_to_id(user, name), held) for user, held in source.read(config, split))
        if tokenizer is not None:
            parts.append(store_from_documents(users, tokenizer, config.seq_len, limit))
        else:
            assert task is not None
            parts.append(ArrayStore.from_users(_checked(users, task, name)))
    test = parts[1] if len(parts) > 1 else None
    if tokenizer is not None:
        return _tokens(parts[0], tokenizer, source.unit, test)
    assert task is not None
    if not task.input_shape:
        shape = next(f.shape for f in parts[0].schema.fields if f.name == "x")
        task = dataclasses.replace(task, input_shape=shape)
    return LoadedExamples(parts[0], task, source.unit, test)


def _stored(config: SourceConfig) -> LoadedExamples:
    """Reads a built store: tokens as they are, arrays as ``x`` and ``label``."""
    path = _store_of(config)
    store, classes = open_store(path), config.classes
    if store.schema.kind in ("tokens", "answers"):
        tokenizer = load_tokenizer(config.tokenizer)
        made_by = store.schema.tokenizer
        if made_by not in (None, tokenizer.fingerprint):
            raise BadInputError(
                f"the store's tokens were made by another tokeniser (fingerprint {made_by[:12]}) "
                f"than data.tokenizer={config.tokenizer} ({tokenizer.fingerprint[:12]}): give the "
                "one it was built with"
            )
        loaded = _tokens(store, tokenizer, "a user of the store")
        build = grouped_by_owner_set(store).manifest.build
        return dataclasses.replace(loaded, dropped=build.get("dropped_rows", 0))
    fields = {f.name: f for f in store.schema.fields}
    target = config.target_column or "label"
    inputs = config.input_columns or tuple(n for n, f in fields.items() if f.shape) or ("x",)
    for option, name in (("input_columns", inputs[0]), ("target_column", target)):
        if name not in fields:
            raise BadInputError(
                f"the examples of {path} have no field {name!r}, but {sorted(fields)}: "
                f"set data.{option}"
            )
    if len(inputs) > 1:
        raise BadInputError(
            f"the examples of {path} have several fields, {list(inputs)}: set data.input_columns "
            "to the one that is the input"
        )
    if classes is None and np.dtype(fields[target].dtype).kind in "iu":
        raise BadInputError(
            f"the labels in {path} are whole numbers: set data.classes, how many classes there are"
        )
    shape = tuple(size for size in fields[inputs[0]].shape if size != 1)

    def users() -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        sets = grouped_by_owner_set(store)
        bounds = zip(sets.user_offsets, sets.user_offsets[1:])
        for name, (start, stop) in zip(sets.user_ids(range(sets.num_users)), bounds):
            arrays = sets.read(np.arange(start, stop))
            x, label = arrays[inputs[0]], arrays[target]
            scale = 255.0 if x.dtype == np.uint8 else 1.0
            pair = {"x": x.reshape(len(x), *shape).astype(np.float32) / scale,
                   "label": label.astype(np.float32) if classes is None else label}  # fmt: skip
            # Other numbers of a record, such as its silo or its budget.
            rest = {n: a for n, a in arrays.items() if a.ndim == 1 and n not in (inputs[0], target)}
            yield name, rest | pair

    scaled = fields[inputs[0]].dtype == "uint8"
    task = Task("regression" if classes is None else "classes", shape, classes or 0, scaled=scaled)
    return LoadedExamples(store_from_users(_checked(users(), task, path)), task, "a user of it")


def _checked(
    users: Iterable[tuple[str, Mapping[str, Any]]], task: Task, name: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Refuses numbers and labels that would silently train nothing, or something else."""
    for user, batch in users:
        x, label = np.asarray(batch["x"]), np.asarray(batch["label"])
        where = f"{name}: a user has"
        if not (np.isfinite(x).all() and np.isfinite(label).all()):
            raise BadInputError(f"{where} numbers that are not finite: mend or leave out the row")
        if task.classes and not are_classes(label, task.classes):
            raise BadInputError(
                f"{where} labels that are not whole numbers from 0 to {task.classes - 1}: check "
                "data.target_column and data.classes"
            )
        silo = np.asarray(batch.get("silo", 0))
        if silo.dtype.kind not in "iu" or (silo < 0).any():
            raise BadInputError(f"{where} silos that are not whole numbers from 0 on")
        yield user, {**batch, "label": label.astype(np.int32)} if task.classes else batch


def _synthetic(store: Store, config: SourceConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    if store.num_users < store.num_examples:
        raise BadInputError(
            "data.records_per_user makes synthetic users if every record is a person, but users of "
            f"data.source={config.source} have several: remove it"
        )
    digest = hashlib.sha256(b"dpfl_jax synthetic users %d" % config.split_seed).digest()
    order = np.random.default_rng(np.frombuffer(digest, np.uint32)).permutation(store.num_examples)
    size = config.records_per_user
    assert size is not None
    for number, start in enumerate(range(0, len(order), size)):
        yield f"user {number:05d}", store.read(order[start : start + size])


def _load_public(config: DataConfig, tokenizer: Tokenizer | None) -> Store | None:
    kind = config.public
    if kind == "auto":
        kind = "stdlib" if config.source == "python_source" else "none"
    if kind == "none":
        return None
    tokenizer = tokenizer or load_tokenizer(config.tokenizer)
    if kind == "stdlib":
        library = standard_library_files().items()
        texts = ((name, data.decode()) for name, data in library)
        return store_from_documents(texts, tokenizer, config.seq_len)
    if kind == "template":
        if (template := template_of(config)) is None:
            raise BadInputError(
                "data.public=template draws random rows of data.template, which is not set: set "
                "it, or name a public text"
            )
        generator = np.random.default_rng(0)
        rows = [("random rows", template.draw(generator)) for _ in range(_RANDOM_TEXTS)]
        single = dataclasses.replace(template, rows=1)  # each is a whole text already
        return store_from_documents(rows, tokenizer, config.seq_len, template=single)
    paths = expand_paths(kind)
    if paths[0].is_dir():
        return store_from_documents(
            read_documents(paths, DocumentFiles("folder")), tokenizer, config.seq_len
        )
    try:
        text = paths[0].read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read the public text {paths[0]}: {error}") from error
    return store_from_documents([(paths[0].name, text)], tokenizer, config.seq_len)


# ---- splits --------------------------------------------------------------------------------------
# A user's side depends only on a hash of the id: adding or removing a user never moves another.


FEW = 20  # a column with at most so few values, and many more rows, may not name people


def user_uniforms(store: Store, seed: int = 0, purpose: str = "split") -> np.ndarray:
    """Returns float64 [num_users] in [0, 1), a keyed hash of each user's id."""
    key = hashlib.sha256(f"dpfl_jax {purpose} {seed}".encode()).digest()
    words = [
        hashlib.blake2b(name.encode(), digest_size=8, key=key).digest()
        for name in store.user_ids(range(store.num_users))
    ]
    integers = np.frombuffer(b"".join(words), dtype="<u8")
    return (integers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def split_by_user(store: Store, fractions: Mapping[str, float], seed: int = 0) -> dict[str, Store]:
    """Splits users at random, each independently of all others.

    Args:
      store: the store to split.
      fractions: expected share of the users per named part, e.g. ``{"validation": 0.1}``.
      seed: seed of the hash key; public, and not part of the mechanism.

    Returns:
      The named parts and "train", the remaining users, as views. A part may be empty by chance. A
      record whose owners are on several sides is in none.

    Raises:
      BadInputError: a fraction is outside [0, 1), or they leave nothing to train on.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.data import split_by_user
      >>> store = dpfl.from_texts([(f"user {i}", "text") for i in range(100)])
      >>> parts = split_by_user(store, {"test": 0.2})
      >>> sorted(parts), sum(part.num_users for part in parts.values())
      (['test', 'train'], 100)
    """
    for name, fraction in fractions.items():
        probability(f"{name}_fraction", fraction, one=False)
    if sum(fractions.values()) >= 1.0:
        raise BadInputError(
            f"the fractions {dict(fractions)} leave no users for 'train': lower them"
        )
    uniforms = user_uniforms(store, seed)
    side = np.searchsorted(np.cumsum(list(fractions.values())), uniforms, side="right")
    names = {"train": len(fractions), **{name: i for i, name in enumerate(fractions)}}
    if isinstance(store, SharedStore):
        sides = [set(side[list(members)].tolist()) for members in store.owners]
        side_of_set = np.array([min(s) if len(s) == 1 else -1 for s in sides])
        return {
            name: SharedStore(UserView(store.sets, np.flatnonzero(side_of_set == i)))
            for name, i in names.items()
        }
    return {name: UserView(store, np.flatnonzero(side == i)) for name, i in names.items()}


def split_within_users(
    store: Store, fraction: float, most: int | None = None, smallest: int = 1
) -> tuple[Store, Store]:
    """Holds out the first ``ceil(fraction * n)``, at most ``most``, of each user's n examples.

    This is the rule of Charles et al. 2024, section 5 (CC-News: the first 10 % of each user, at
    most 32, after users with a single example are removed: ``smallest=2``).

    Args:
      store: the store to split.
      fraction: share of each user's examples to hold out, rounded up.
      most: most held-out examples of one user.
      smallest: users with fewer examples are left out of both parts.

    Returns:
      The training part and the held-out part.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.data import split_within_users
      >>> store = dpfl.from_arrays({"x": [[0.0], [1.0], [2.0]]}, users=["ann", "ann", "bob"])
      >>> train, held_out = split_within_users(store, 0.5, smallest=2)
      >>> train.num_examples, held_out.num_examples
      (1, 1)
    """
    probability("the held-out fraction", fraction)
    at_least("data.held_out_max", most, 0)
    counts = store.examples_per_user
    users = np.flatnonzero(counts >= smallest)
    # The rounding guard keeps ceil(0.1 * 30) at 3.
    held = np.ceil(counts[users] * fraction - 1e-9).astype(np.int64)
    if most is not None:
        held = np.minimum(held, most)
    return UserView(store, users, first=held), UserView(store, users, counts=held)


def limit_store(
    store: Store, max_users: int | None = None, max_examples_per_user: int | None = None
) -> Store:
    """Keeps the first ``max_users`` users in store order, and the first examples of each.

    Store order is a hash order: the users kept are a pseudo-random choice that their ids determine.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.data import limit_store
      >>> store = dpfl.from_arrays({"x": [[0.0], [1.0], [2.0]]}, users=["ann", "ann", "bob"])
      >>> limit_store(store, max_examples_per_user=1).num_examples
      2
    """
    if max_users is None and max_examples_per_user is None:
        return store
    if isinstance(store, SharedStore):
        raise BadInputError(
            "some records have several owners: leave out max_users and max_examples_per_user; "
            "mechanism.group_size says how many of each owner's are used"
        )
    for name, value in (("max_users", max_users), ("max_examples_per_user", max_examples_per_user)):
        at_least(f"data.{name}", value, 1)
    users = np.arange(min(store.num_users, max_users or store.num_users))
    counts = None
    if max_examples_per_user is not None:
        counts = np.full(len(users), max_examples_per_user, np.int64)
    return UserView(store, users, counts=counts)
