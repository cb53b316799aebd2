"""The same build as an Apache Beam pipeline, for more rows than one machine takes (extra ``beam``).

Files are read in parallel, the runner's shuffle groups rows by partition, and the code of the local
build encodes every partition: the fingerprints are equal. Any runner will do whose workers and
caller share a file system (a mounted bucket, NFS); the staging folder lies beside the result.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from dpfl_jax.data.build import (
    BuildPlan,
    encode_partition,
    finish,
    group_by_user,
    prepare,
    side_path,
)
from dpfl_jax.data.documents import read_documents
from dpfl_jax.data.rows import PLAIN_CSV, CsvFormat, expand_paths
from dpfl_jax.data.shards import ShardStore
from dpfl_jax.data.sources import file_source
from dpfl_jax.data.store import user_order_key
from dpfl_jax.errors import BadInputError

_Keyed = tuple[int, tuple[bytes, str, int, bytes]]


def _read(
    item: tuple[int, str],
    plan: BuildPlan,
    format: str | None,
    user_column: str,
    text_column: str,
    csv: CsvFormat,
    todo: frozenset[int],
) -> Iterator[_Keyed]:
    file, path = item
    documents = read_documents([pathlib.Path(path)], format, user_column, text_column, csv)
    for row, (user, text) in enumerate(documents):
        shard = plan.partition(user)
        if shard in todo:  # a user's rows in the order of files, and of rows in each
            yield shard, (user_order_key(user)[0], user, (file << 40) | row, text.encode())


def _encode(
    group: tuple[int, Iterable[tuple[bytes, str, int, bytes]]], staging: str, plan: BuildPlan
) -> tuple[int, int]:
    shard, rows = group
    ordered = sorted(rows, key=lambda row: row[:3])
    users = group_by_user((user, data) for _, user, _, data in ordered)
    return shard, encode_partition(users, pathlib.Path(staging), plan, shard)


def build_with_beam(
    path: str | Sequence[str],
    out: str | os.PathLike[str],
    plan: BuildPlan,
    *,
    format: str | None = None,
    user_column: str = "user",
    text_column: str = "text",
    csv: CsvFormat = PLAIN_CSV,
    flags: Sequence[str] = (),
) -> ShardStore:
    """Builds a store from files with an Apache Beam runner.

    Paths must be the same on all workers, that of ``out`` too. ``format``, columns and ``csv`` are
    as in ``documents.read_documents``; ``flags`` go to the runner, e.g. ``["--runner=FlinkRunner",
    ...]``.

    Raises:
      BadInputError: Beam is not installed, ``out`` exists, or a row is bad.
    """
    try:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise BadInputError("--engine beam needs Apache Beam: pip install apache-beam") from error
    out = pathlib.Path(out).absolute()
    paths = [os.fspath(p.absolute()) for p in expand_paths(path)]
    identity = {
        "engine": "beam",
        **file_source(paths, format, user_column, text_column, csv).identity,
    }
    staging = prepare(out, plan, identity)
    todo = frozenset(s for s in range(plan.num_shards) if not side_path(staging, plan, s).exists())
    try:
        with beam.Pipeline(options=PipelineOptions(list(flags))) as pipeline:
            _ = (
                pipeline
                | "Files" >> beam.Create(list(enumerate(paths)))
                | "Spread files" >> beam.Reshuffle()
                | "Read"
                >> beam.FlatMap(
                    _read, plan, format, user_column, text_column, csv, todo
                ).with_output_types(tuple[int, tuple[bytes, str, int, bytes]])
                | "Group by partition" >> beam.GroupByKey()
                | "Encode" >> beam.Map(_encode, os.fspath(staging), plan)
            )
    except Exception as error:
        # Runners wrap what a worker raised; a user's mistake must still be one sentence.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, BadInputError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise BadInputError(str(cause).split(" [while running")[0]) from error
    for shard in sorted(todo):
        if not side_path(staging, plan, shard).exists():  # no row fell into it
            encode_partition((), staging, plan, shard)
    return finish(staging, out, plan, identity)
