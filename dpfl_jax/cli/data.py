"""``dpfl data``: build, inspect and verify user-partitioned stores."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Annotated, Any, ClassVar, Literal

from dpfl_jax.buckets import as_given
from dpfl_jax.cli import options
from dpfl_jax.cli.options import Flag
from dpfl_jax.data.sections import CONVERSATION
from dpfl_jax.errors import BadInputError, require
from dpfl_jax.run.console import Console

DESCRIPTION = """\
Build a store of examples grouped by user, or look into one.

A store is a folder: examples in Arrow files, an index by user, a manifest with checksums. It is
written under another name and renamed when complete; an interrupted build resumes by the same
command.

examples:
  dpfl data build --input posts.jsonl --user-column author --text-column body --out STORE
  dpfl data build --input 'parts/*.parquet' --user-column 'domain(url)' --out STORE
  dpfl data build --input mails.jsonl --user-column authors --out STORE   # a list: several owners
  dpfl data build --input speeches.jsonl.gz --user-column '{play}/{speaker}' --out STORE
  dpfl data build --input visits.csv --delimiter ';' --user-column name --out STORE
  dpfl data build --input chats.jsonl --messages-column messages --tokenizer CHECKPOINT --out STORE
  dpfl data build --input posts.jsonl --remove-near-duplicates-of 'public/*.jsonl' --out STORE
  dpfl data build --source python_source --out STORE --store-format arrayrecord
  dpfl data build --source tfds --input DIR --user-column user_id --text-column text --out STORE
  dpfl data build --source shakespeare --out STORE
  dpfl data build --input big.jsonl --out STORE --engine beam -- --runner=DirectRunner
  dpfl data inspect STORE --verify --png sizes.png
  dpfl data inspect STORE --private --epsilon 1
"""


class Build(options.Options):
    """A build.

    Attributes:
      source: files, python_source, tfds, or a named data set (see docs/guides/data_reference.md).
      input: files, patterns or folders.
      format: jsonl, parquet, csv, folder or huggingface (else from the name of the files).
      split: which split (tfds and named data sets).
      data_dir: folder of prepared TFDS data (tfds).
      remove_near_duplicates_of: public texts, such as those of pre-training: files, patterns or
        folders. Rows of which four fifths are in one of them are left out.
      out: folder to make.
      store_format: arrow (memory-mapped) or arrayrecord (compressed, for object stores).
      shards: number of shards (default: from the input size).
      workers: processes that encode (default: all cores).
      engine: what builds the store.
      engine_flags: after --: flags for the Beam runner.
    """

    keys: ClassVar[dict[str, Any]] = {
        "data.user_column": options.SCHEMA,
        **dict.fromkeys(f"data.{kind}_column" for kind in ("text", *CONVERSATION)),
        **dict.fromkeys(("data.chat_template", "data.delimiter", "data.encoding")),
        **dict.fromkeys(("data.on_bad_row", "data.tokenizer", "data.seq_len"), options.SCHEMA),
        "data.max_examples_per_user": None,
    }

    source: str = "files"
    input: Annotated[tuple[str, ...] | None, Flag("PATH")] = None
    format: str | None = None
    split: str = "train"
    data_dir: str | None = None
    remove_near_duplicates_of: Annotated[tuple[str, ...] | None, Flag("PATH")] = None
    out: Annotated[str, Flag("STORE", in_buckets=True)]
    store_format: str = "arrow"
    shards: int | None = None
    workers: int | None = None
    engine: Literal["local", "beam"] = "local"
    engine_flags: Annotated[tuple[str, ...], Flag(is_positional=True)] = ()


class Inspect(options.Options):
    """A look into a store.

    Attributes:
      store: the folder.
      verify: read everything and check it.
      png: plot the examples per user.
      private: differentially private quantiles only.
      epsilon: privacy loss of all quantiles together.
      quantiles: quantiles of --private.
      largest: upper bound on the examples of a user, for --private.
      seed: public seed of --private, for tests only.
    """

    store: Annotated[str, Flag("STORE", is_positional=True, in_buckets=True)]
    verify: bool = False
    png: Annotated[str | None, Flag("FILE")] = None
    private: bool = False
    epsilon: float | None = None
    quantiles: tuple[float, ...] = (0.5,)
    largest: int = 100_000
    seed: int | None = None


VERBS = {"build": (Build, "make a store from files"), "inspect": (Inspect, "count, plot and check")}


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Runs the chosen sub-command."""
    return _build(args) if args.verb == "build" else _inspect(args)


def _build(args: argparse.Namespace) -> dict[str, Any]:
    import time

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dpfl_jax.data.build import BuildPlan, build_store, default_num_shards
    from dpfl_jax.data.owners import SharedStore

    console = Console(stderr=args.json)
    started = time.monotonic()
    if args.on_bad_row == "drop" and (args.source != "files" or args.engine == "beam"):
        raise BadInputError("--on-bad-row drop is for files, read by the local engine")
    conversations = _conversations(args)
    source = _source(args, conversations)
    if args.remove_near_duplicates_of:
        from dpfl_jax.data.sources import without_near_duplicates

        if source.schema is not None or conversations is not None or args.engine == "beam":
            raise BadInputError(
                "--remove-near-duplicates-of compares texts, read by the local engine: leave it out"
            )
        public = dataclasses.replace(_document_files(args, None), format=None)
        source = without_near_duplicates(source, args.remove_near_duplicates_of, public)
    settings: dict[str, Any] = {
        "shard_format": args.store_format,
        "num_shards": args.shards or default_num_shards(source.size),
        "max_examples_per_user": args.max_examples_per_user,
    }
    if source.schema is None:
        plan = BuildPlan.for_text(args.tokenizer, args.seq_len, conversations, **settings)
    else:
        plan = BuildPlan(source.schema, tokenizer=None, **settings)
    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, Any] = {}

        def progress(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=None)
            bar.update(tasks[phase], completed=done, total=total or None)

        if args.engine == "beam":
            from dpfl_jax.data.build import build_with_beam

            if args.source != "files":
                raise BadInputError("--engine beam reads files: leave --source out")
            files = _document_files(args, None)
            store = build_with_beam(args.input, args.out, plan, files, args.engine_flags)
        else:
            if args.engine_flags:
                raise BadInputError(f"unknown arguments {args.engine_flags}: only Beam takes flags")
            store = build_store(
                source.rows,
                args.out,
                plan,
                sources=source.identity,
                workers=args.workers or os.cpu_count() or 1,
                progress=progress,
                bad=source.bad,
            )
    people = SharedStore(store) if store.manifest.shared else store
    shared = {"most_owners": people.most_owners} if isinstance(people, SharedStore) else {}
    result: dict[str, Any] = {
        "store": as_given(os.fspath(store.path)),
        "users": people.num_users,
        "examples": store.num_examples,
        **shared,
        "shards": len(store.manifest.shards),
        "bytes": sum(s.bytes for s in store.manifest.shards),
        "fingerprint": store.fingerprint,
        "dropped_rows": store.manifest.build["dropped_rows"],
        "seconds": round(time.monotonic() - started, 2),
    }
    console.print(
        f"{result['store']}: {result['users']} users, {result['examples']} examples"
        + (f" of up to {result['most_owners']} owners each" if shared else "")
        + " in "
        f"{result['shards']} shards, {float(result['bytes']) / 1e6:.1f} MB, {result['seconds']} s"
    )
    if result["dropped_rows"]:
        left_out = "bad rows and near-duplicates" if args.remove_near_duplicates_of else "bad rows"
        console.print(f"{result['dropped_rows']} {left_out} left out: a number no guarantee covers")
    return result


def csv_format(args: argparse.Namespace) -> Any:
    """The format of CSV files that ``--delimiter`` and ``--encoding`` describe."""
    from dpfl_jax.data.rows import CsvFormat

    good = args.delimiter is None or len(args.delimiter) == 1
    require(good, "--delimiter", args.delimiter, "one character")
    return CsvFormat(args.delimiter, args.encoding)


def _conversations(args: argparse.Namespace) -> Any:
    from dpfl_jax.data.chats import conversations_in

    columns = {name: getattr(args, f"{name}_column") for name in CONVERSATION}
    result = conversations_in(columns, args.tokenizer, args.chat_template)
    if result is not None and (args.source != "files" or args.engine == "beam" or args.text_column):
        raise BadInputError(
            f"--{result.columns[0]}-column is for files, read by the local engine, instead of "
            "--text-column"
        )
    return result


def _document_files(args: argparse.Namespace, conversations: Any) -> Any:
    from dpfl_jax.data.documents import DocumentFiles

    text_column = args.text_column or "text"
    return DocumentFiles(
        args.format, args.user_column, text_column, csv_format(args), conversations
    )


def _source(args: argparse.Namespace, conversations: Any) -> Any:
    from dpfl_jax.data import sources

    if args.source == "files":
        how = _document_files(args, conversations)
        return sources.file_source(args.input or (), how, args.on_bad_row == "drop")
    if args.source == "python_source":
        return sources.python_files_source()
    inputs = args.input or (None,)
    if len(inputs) != 1 or (args.source == "tfds" and not args.input):
        raise BadInputError(f"--source {args.source} needs one --input: the folder of its files")
    if args.source == "tfds":
        return sources.tfds_source(
            args.input[0], args.user_column, args.split, args.text_column, args.data_dir
        )
    from dpfl_jax.data.sections import SourceConfig
    from dpfl_jax.data.sources import set_source

    section = SourceConfig(source=args.source, path=inputs[0], seq_len=args.seq_len)
    return set_source(section, args.split)


def _inspect(args: argparse.Namespace) -> dict[str, Any]:
    from dpfl_jax.data import inspect as inspection
    from dpfl_jax.data.owners import grouped_by_owner_set
    from dpfl_jax.data.shards import open_store

    console = Console(stderr=args.json)
    store = open_store(args.store)
    if args.verify:
        grouped_by_owner_set(store).verify()
        if not args.json:
            # The fingerprint is a function of all records without noise: not under --private.
            identity = "" if args.private else f" ({store.fingerprint[:16]})"
            console.print(f"{args.store}: every byte is as built{identity}")
    if args.private:
        if args.png:
            raise BadInputError("--png shows exact counts: leave it out with --private")
        result = inspection.private_summary(
            store, args.epsilon, args.quantiles, args.largest, args.seed
        )
    else:
        if args.epsilon is not None:
            raise BadInputError("--epsilon is for --private quantiles: add --private")
        result = inspection.summary(store)
        if args.png:
            inspection.plot_sizes(store, args.png)
            result["png"] = args.png
    result["verified"] = bool(args.verify)
    inspection.show(result, console)
    return result
