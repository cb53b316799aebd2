"""The sources of rows for a build: files, installed packages, named sets, TFDS.

A source is opened lazily: a build that resumes after its rows were read does not read them again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dpfl_jax.data.documents import DocumentFiles, read_documents
from dpfl_jax.data.keys import UserKey
from dpfl_jax.data.near_duplicates import NearDuplicates, read_public_texts
from dpfl_jax.data.rows import BadRows, expand_paths, text_of
from dpfl_jax.data.schema import Schema
from dpfl_jax.data.sections import SourceConfig
from dpfl_jax.data.sets import data_source, installed_package_files
from dpfl_jax.errors import BadInputError, extra

Row = tuple[str, bytes]  # user, and text or packed records


@dataclasses.dataclass(frozen=True)
class Source:
    """Rows to build a store from.

    Attributes:
      rows: opens the stream of (user id, data).
      identity: identifies the rows, so that a resumed build notices a changed source.
      size: approximate bytes of input, which set the number of shards.
      schema: layout of packed records; None if the data are text to tokenise.
      bad: what to do with rows that cannot be used, and how many were left out.
    """

    rows: Callable[[], Iterator[Row]]
    identity: dict[str, Any]
    size: int
    schema: Schema | None = None
    bad: BadRows = dataclasses.field(default_factory=BadRows)


def file_identity(path: pathlib.Path) -> list[Any]:
    """Returns path, size and modification time of a file, or of all files in a folder."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return [[os.fspath(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def file_source(
    path: str | Sequence[str], how: DocumentFiles | None = None, drop: bool = False
) -> Source:
    """Returns the documents of JSONL, Parquet, CSV, Hugging Face files or folders of text."""
    how = how or DocumentFiles()
    UserKey(how.user_column or "")
    paths, bad = expand_paths(path), BadRows(drop)
    files = [entry for p in paths for entry in file_identity(p)]

    def rows() -> Iterator[Row]:
        for user, text in read_documents(paths, how, bad):
            yield user, text.encode()

    on_bad_row = "drop" if drop else "error"
    identity = {"files": files, **dataclasses.asdict(how), "on_bad_row": on_bad_row}
    # Compressed columns and gzip grow about threefold.
    packed = (".gz", ".parquet")
    size = sum(s * (3 if name.endswith(packed) else 1) for name, s, _ in files)
    return Source(rows, identity, size, bad=bad)


def without_near_duplicates(
    source: Source, public: str | Sequence[str], how: DocumentFiles
) -> Source:
    """Returns a source of texts without those that public files hold, which ``bad`` counts.

    Args:
      source: source of texts.
      public: files, patterns or folders of public texts.
      how: their format, and the column of their text.
    """
    paths = expand_paths(public)
    files = [entry for path in paths for entry in file_identity(path)]

    def rows() -> Iterator[Row]:
        known = NearDuplicates(read_public_texts(paths, how))
        for user, data in source.rows():
            if data.decode() in known:
                source.bad.dropped += 1
            else:
                yield user, data

    identity = {**source.identity, "near_duplicates_of": files}
    return dataclasses.replace(source, rows=rows, identity=identity)


def python_files_source() -> Source:
    """Returns the source files of the installed packages, one user each."""
    files = installed_package_files()
    sizes = {user: len(data) for user, data in files.items()}
    return Source(lambda: iter(files.items()), {"python_files": sizes}, sum(sizes.values()))


def tfds_source(
    name: str,
    user_column: str,
    split: str = "train",
    text_column: str | None = None,
    data_dir: str | None = None,
) -> Source:
    """Returns the examples of a prepared TFDS data set, by random access and without TensorFlow.

    Args:
      name: a folder that holds a prepared builder (``.../version``), or a registered name whose
        prepared data lie in ``data_dir``. Nothing is downloaded.
      user_column: key expression over the example's features.
      split: name of the split.
      text_column: a text feature to tokenise; None to keep all numeric features as arrays.
      data_dir: folder of the prepared data of registered names.

    Raises:
      BadInputError: the data are missing, have no random-access format, or hold another number of
        examples than their metadata say.
    """
    key = UserKey(user_column)
    source, info = _open_tfds(name, split, data_dir)
    expected = info.splits[split].num_examples
    readable = _count_examples(source, info.splits[split])
    if readable != expected:
        raise BadInputError(
            f"the TFDS data set {name}, split {split}, gives {readable} examples but its "
            f"metadata says {expected}: prepare it again with file_format='array_record'"
        )
    if expected == 0:
        raise BadInputError(f"the TFDS data set {name}, split {split}, is empty")
    identity = {
        "tfds": info.full_name,
        "split": split,
        "examples": expected,
        "user_column": user_column,
        "text_column": text_column,
    }
    size = info.splits[split].num_bytes or expected * 1024
    schema = None
    if text_column is None:
        schema = Schema.arrays(_numeric(source[0], key, name))

    def rows() -> Iterator[Row]:
        for row in range(len(source)):
            example = source[row]
            where = f"{name}, split {split}, example {row}"
            user = key(example, where)
            if schema is None:
                assert text_column is not None
                yield user, text_of(example, text_column, where).encode()
            else:
                arrays = {f.name: np.asarray(example[f.name])[None] for f in schema.fields}
                yield user, schema.pack(arrays).tobytes()

    return Source(rows, identity, size, schema)


def _open_tfds(name: str, split: str, data_dir: str | None) -> tuple[Any, Any]:
    with extra("tfds", "reading TFDS data"):
        import tensorflow_datasets as tfds
    try:
        # Without code for a name, the library reads the prepared files.
        prepared = pathlib.Path(name)
        if data_dir is not None and not prepared.is_dir():
            prepared = pathlib.Path(data_dir)
        _refuse_foreign_classes(prepared)
        if os.path.isdir(name):
            builder = tfds.builder_from_directory(name)
        else:
            builder = tfds.builder(name, data_dir=data_dir)
        if split not in builder.info.splits:
            raise BadInputError(
                f"the TFDS data set {name} has no split {split!r}; it has "
                f"{sorted(builder.info.splits)} (prepare it first if there are none)"
            )
        return builder.as_data_source(split=split), builder.info
    except BadInputError:
        raise
    except Exception as error:  # the library raises many kinds, all for a missing file
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInputError(
            f"cannot open the TFDS data set {name} ({first}): give the folder of a builder "
            "prepared with file_format='array_record'"
        ) from error


def _refuse_foreign_classes(folder: pathlib.Path) -> None:
    """Refuses prepared data whose features name classes that TFDS would import."""
    for file in folder.rglob("features.json"):
        left = [json.loads(file.read_text())]
        while left:
            value = left.pop()
            if isinstance(value, list):
                left += value
            elif isinstance(value, dict):
                left += value.values()
                for key in ("pythonClassName", "python_class_name", "type"):
                    named = value.get(key)
                    if isinstance(named, str) and not named.startswith("tensorflow_datasets."):
                        raise BadInputError(
                            f"{file} names {named!r}, code that would be run: prepare the data "
                            "with features of tensorflow_datasets itself"
                        )


def _count_examples(source: Any, split: Any) -> int:
    """Counts the examples that can be read: for ArrayRecord, len() only repeats the metadata."""
    names = [os.fspath(p) for p in split.filepaths]
    if not all("array_record" in os.path.basename(n) for n in names):
        return len(source)
    from array_record.python import array_record_module

    total = 0
    for name in names:
        reader = array_record_module.ArrayRecordReader(name, "index_storage_option:in_memory")
        try:
            total += reader.num_records()
        finally:
            reader.close()
    return total if total != split.num_examples else len(source)


def _numeric(example: dict[str, Any], key: UserKey, name: str) -> dict[str, np.ndarray]:
    arrays = {}
    for feature, value in example.items():
        array = np.asarray(value) if not isinstance(value, (bytes, str, dict)) else None
        if array is not None and array.dtype.kind in "biuf" and feature not in (key.columns or ()):
            arrays[feature] = array
    if not arrays:
        raise BadInputError(f"{name} has no numeric features: give --text-column to tokenise text")
    return arrays


def set_source(section: SourceConfig, split: str = "train") -> Source:
    """Returns the rows of one split of a named set.

    Raises:
      BadInputError: the set, the split or a file does not exist.
    """
    name, chosen = section.source, data_source(section.source)
    if chosen.splits == ("all",) and split in ("all", "train"):
        split = "all"
    elif split not in (*chosen.splits, *(("validation",) if name == "stack_overflow" else ())):
        raise BadInputError(f"{name} has the splits {', '.join(chosen.splits)}, not {split!r}")
    files = [] if section.path is None else file_identity(expand_paths(section.path)[0])
    identity = {"set": name, "split": split, "files": files}
    size = sum(entry[1] for entry in files)
    if chosen.task is None:

        def texts() -> Iterator[Row]:
            for user, document in chosen.read(section, split):
                yield user, document.encode()

        return Source(texts, identity, size)
    first = next(chosen.read(section, split), None)
    if first is None:
        raise BadInputError(f"{section.path} holds no examples of {name}, split {split}")
    schema = Schema.arrays(first[1], leading_axis=True)

    def packed() -> Iterator[Row]:
        for user, batch in chosen.read(section, split):
            yield user, schema.pack(batch).tobytes()

    return Source(packed, identity, size, schema)
