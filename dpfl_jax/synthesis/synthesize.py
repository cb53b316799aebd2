"""Writes synthetic rows with the language model of a finished run.

Beside the rows lie README.md, a dataset card, and guarantee.json, the guarantee of the run with the
rows' digest. ``.NAME.part`` has the rows so far: the command that was stopped resumes with them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import pathlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import pyarrow as pa
import pyarrow.parquet
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpfl_jax.accounting import digests
from dpfl_jax.accounting.statement import NAME
from dpfl_jax.buckets import address, located
from dpfl_jax.config.load import refuse_code_of_data
from dpfl_jax.data import load_dataset
from dpfl_jax.data.templates import RowTemplate
from dpfl_jax.errors import BadInputError, StoppedError, at_least, nearest, one_line
from dpfl_jax.files import on_disk
from dpfl_jax.mesh import make_mesh, parameter_shardings, place, unit_axes, unit_parts
from dpfl_jax.models import LanguageModel
from dpfl_jax.models.generate import Sampled, Sampling, generate_texts
from dpfl_jax.models.params import merge
from dpfl_jax.run.console import Console, StepProgress, StopRequest
from dpfl_jax.run.directory import open_plain, write_atomically
from dpfl_jax.synthesis.card import CARD, Made, card
from dpfl_jax.synthesis.histogram import allotted, released_histogram
from dpfl_jax.synthesis.report import NAME as REPORT
from dpfl_jax.synthesis.report import RealRows, write_report
from dpfl_jax.synthesis.writer import Writer, real_rows, writer_of
from dpfl_jax.training.export import (
    FinishedRun,
    TrainedModel,
    base_params,
    language_model,
    read_run,
)
from dpfl_jax.training.start import build_transformer, data_section

LABELS_CAVEAT = (
    "how many synthetic rows each label has was given by whoever wrote them: it is taken as known "
    "without these data"
)
PROMPTS_CAVEAT = (
    "the prompts that synthetic answers follow are taken as public: nobody who wrote or is named "
    "in them is protected by this guarantee"
)
CHOICE_CAVEAT = (
    "synthetic rows that were left out, or settings of sampling that were chosen, by looking at "
    "private data (by their likeness to training texts, say) are outside the guarantee"
)
# Rows of the model before training, for the report.
_BASELINE_ROWS = 1000
# As many rows are tried before a model that writes none of the template is given up.
_TRIED = 20


@dataclasses.dataclass(frozen=True)
class Settings:
    """How rows are drawn; they make the rows, together with the model and the prompts.

    Attributes:
      seed: seed of all draws; it may be public.
      temperature: as in ``models.generate.Sampling``, like the next two.
      top_k: as there.
      top_p: as there.
      max_tokens: most tokens of a row; default the length that was trained on.

    Examples:
      >>> from dpfl_jax.synthesis import Settings
      >>> Settings(seed=7, top_p=0.95).top_p
      0.95
    """

    seed: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        at_least("the seed", self.seed, 0, most=2**63 - 1, whole=True)
        at_least("the number of tokens of a row (--max-tokens)", self.max_tokens, 1, whole=True)
        self.sampling()

    def sampling(self, stop_ids: Collection[int] = ()) -> Sampling:
        """How tokens are drawn by a model whose texts end with one of ``stop_ids``."""
        return Sampling(self.temperature, self.top_k, self.top_p, frozenset(stop_ids))


def synthesize(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    rows: int | None = None,
    settings: Settings | None = None,
    *,
    labels: Mapping[str, int] | None = None,
    label_epsilon: float | None = None,
    prompts: str | os.PathLike[str] | None = None,
    batch_size: int = 64,
    report: str | os.PathLike[str] | None = None,
    allow_code: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Writes synthetic rows, or resumes a call that was stopped.

    Args:
      run: directory of a finished run of a language model.
      out: a new file, .jsonl or .parquet, in a folder of its own.
      rows: number of rows; with ``labels`` their sum.
      settings: how they are drawn.
      labels: number of rows of each label: of each word of the first column of ``data.template``.
      label_epsilon: release a histogram of the training users' labels at this epsilon, and split
        ``rows`` like it (``histogram``).
      prompts: file of public prompts, for a model of answers, which takes each in turn.
      batch_size: rows that are drawn at once; it does not change them, up to rounding.
      report: folder of a private report (``report``), which compares the rows with people's.
      allow_code: whether the run may name code that says whose a row is (``load_config``); it is
        needed for reports and histograms alone.
      console: prints for people.

    Returns:
      out, rows, tokens, tokens_per_s, redraws, given_up, guarantee (in words) and privacy (its
      fields).

    Raises:
      BadInputError: the run is not finished, or something does not fit it.
    """
    settings, console = settings or Settings(), console or Console(quiet=True)
    at_least("the batch size", batch_size, 1, whole=True)
    at_least("the number of rows (--rows)", rows, 1, whole=True)
    target, folder = on_disk(out), None if report is None else on_disk(report)
    _check_folder(target)
    kept = read_run(run)
    with console.status("reading the model"):
        trained = language_model(kept)
    if not allow_code and (report is not None or label_epsilon is not None):
        refuse_code_of_data(trained.config, str(kept.path / "config.yaml"))
    writer = writer_of(trained, prompts)
    counts = _asked(kept, writer, rows, labels, label_epsilon)
    total = sum(counts.values()) if labels else (rows or 0)
    at_least("the number of rows (--label)", total, 1, whole=True)
    longest = max(map(len, writer.prompts(total, counts, settings.seed)))
    room = trained.model.config.max_seq_len + 1 - longest
    most = settings.max_tokens or max(min(trained.config.data.seq_len, room), 1)
    if most > room:
        raise BadInputError(
            f"after a prompt of {longest} tokens there is room for {max(room, 0)}, but a row may "
            f"have {most} (--max-tokens): shorten one of them"
        )
    real = None if folder is None else _real(trained, folder, target)
    stated = kept.stated
    if label_epsilon is not None:  # after all that could be refused: it is charged
        if address(run):
            raise BadInputError(
                f"a histogram of labels is kept in the run's directory, and {run} is in a bucket: "
                "copy it here, and give that directory from now on"
            )
        people, stated = released_histogram(kept, label_epsilon, console)
        counts = allotted(people, total)
    texts = writer.prompts(total, counts, settings.seed)
    known: dict[str, Any] = {
        "model": _digest(kept),
        "rows": total,
        "labels": counts,
        "settings": dataclasses.asdict(dataclasses.replace(settings, max_tokens=most)),
        "prompts": writer.digest,
        "histogram": stated.basis.get("histogram"),
    }
    draw = functools.partial(
        _generated, trained.model, writer, settings=settings, most=most, mesh=_mesh(trained)
    )
    with _partial(target, known, total, writer) as part:
        drawn = draw(trained.params, texts, min(batch_size, total), part.numbers)
        rate = _draw(drawn, part, total, console)
        found = part.read()
        whole = [row for number in sorted(found) for row in found[number]["rows"]]
        if not whole:
            raise BadInputError(
                f"none of {total} texts can be read back by data.template: train for longer, or "
                "draw them at another --temperature"
            )
        _write_rows(target, whole, writer.template)
        facts = Made(
            report=kept.report,
            settings=known["settings"],
            rows=whole,
            labels=counts,
            redraws=sum(one["redraws"] for one in found.values()),
            given_up=total - sum(bool(one["rows"]) for one in found.values()),
            template=writer.template,
        )
        privacy = stated.privacy
        if privacy.private:
            given = [LABELS_CAVEAT] if labels else []
            given += [PROMPTS_CAVEAT] if prompts is not None else []
            caveats = dict.fromkeys((*privacy.caveats, *given, CHOICE_CAVEAT))
            stated = stated.about(dataclasses.replace(privacy, caveats=tuple(caveats)))
        stated = stated.model_copy(update={"digests": None})
        stated = stated.tied(exported={target.name: digests.digest(target)})
        write_atomically(target.parent / CARD, card(target.name, stated, facts))
        write_atomically(target.parent / NAME, stated.dumps())  # last: now the folder is whole
        if folder is not None and real is not None:  # the same command repeats it if it is killed
            with console.status("comparing with real people's rows"):
                before = _before(kept, trained, texts, draw, batch_size)
                write_report(folder, whole, real, before, writer.template)
    made = {
        "out": str(target),
        "rows": len(whole),
        "tokens": sum(one["tokens"] for one in found.values()),
        "tokens_per_s": rate,
        "redraws": facts.redraws,
        "given_up": facts.given_up,
        "guarantee": stated.text,
        "privacy": stated.privacy.to_json(),
        **({} if folder is None else {"report": str(folder / REPORT)}),
    }
    return made


def _generated(
    model: LanguageModel,
    writer: Writer,
    params: Any,
    prompts: Sequence[Sequence[int]],
    batch_size: int,
    skip: Collection[int] = (),
    *,
    settings: Settings,
    most: int,
    mesh: Mesh,
) -> Iterator[tuple[Sampled, list[dict[str, Any]]]]:
    """Yields texts, as they end, with their rows."""
    split, parts = NamedSharding(mesh, PartitionSpec(unit_axes(mesh))), unit_parts(mesh)
    texts = generate_texts(
        model,
        place(params, parameter_shardings(params, mesh)),
        prompts,
        max_tokens=most,
        key=jax.random.key(settings.seed),
        sampling=settings.sampling(writer.tokenizer.stop_ids),
        batch_size=-(-batch_size // parts) * parts,
        skip=skip,
        validator=lambda text, over: writer.validate(prompts[text.number], text, over),
        sharding=split if parts > 1 else None,
    )
    for text in texts:
        yield text, writer.read(prompts[text.number], text)


def _real(trained: TrainedModel, report: pathlib.Path, out: pathlib.Path) -> RealRows:
    """The rows of real people for the report."""
    place, mine = report.resolve(), out.parent.resolve()
    published = (
        above == mine or all((above / name).exists() for name in (NAME, CARD))
        for above in place.parents
    )
    if place == mine or (report / NAME).exists() or any(published):
        raise BadInputError(
            f"--report is {report}, a folder that is to be published, but the report must not be: "
            "give another one"
        )
    try:
        report.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(
            f"--report is {report}, which is no folder ({error.strerror}): give another one"
        ) from None
    section = data_section(trained.config)
    if section.split != "by_user":
        raise BadInputError(
            "a report tests on people who are held out with all their rows: leave out --report, or "
            "train with data.split=by_user"
        )
    rows = list(real_rows(trained.config))
    data = load_dataset(section)
    train, *held_out = (
        set() if store is None else set(store.user_ids(range(store.num_users)))
        for store in (data.train, data.validation, data.test)
    )
    others = set().union(*held_out)
    return RealRows(
        [row for user, row in rows if user in train],
        [(user, row) for user, row in rows if user in others],
    )


def _before(
    kept: FinishedRun,
    trained: TrainedModel,
    texts: Sequence[Sequence[int]],
    draw: Any,
    batch_size: int,
) -> list[dict[str, Any]]:
    """Rows that the model wrote before private training; none of one that was not trained then."""
    config = kept.config
    if config.model.checkpoint is None and config.pretrain is None:
        return []
    model = build_transformer(config, trained.tokenizer.vocab_size, trained.tokenizer.bos_id)
    base = merge(base_params(config, kept.report, model), model.config.lora)
    found: list[dict[str, Any]] = []
    some = texts[:_BASELINE_ROWS]
    for tried, (_, rows) in enumerate(draw(base, some, min(batch_size, len(some))), 1):
        found += rows
        if tried == _TRIED and not found:
            break
    return found


def _digest(kept: FinishedRun) -> str:
    name = digests.checkpoint(kept.step)
    known = {} if kept.stated.digests is None else kept.stated.digests.run
    return known.get(name) or digests.digest(located(kept.path / name))


def _mesh(trained: TrainedModel) -> Any:
    """The run's mesh, if there are devices for it here; else one that splits rows alone."""
    try:
        return make_mesh(**trained.config.execution.mesh.axes)
    except BadInputError:
        return make_mesh()


def _asked(
    kept: FinishedRun,
    writer: Writer,
    rows: int | None,
    labels: Mapping[str, int] | None,
    label_epsilon: float | None,
) -> dict[str, int]:
    """The number of rows of each label as far as it is asked for; 1 where a histogram says it."""
    template = writer.template
    words = () if template is None else template.columns[0].words
    if labels:
        if not words or template is None:
            raise BadInputError(
                f"--label is for runs whose data.template begins with a column of "
                f"data.categories, which that of {kept.path} does not: leave it out"
            )
        if label_epsilon is not None:
            raise BadInputError(
                "both --label and --label-epsilon say how many rows each label has: keep one"
            )
        for word, count in labels.items():
            if word not in words:
                raise BadInputError(
                    f"--label names {word!r}, which is none of the words of "
                    f"{template.columns[0].name!r}: {nearest(word, words)}"
                )
            at_least(f"the number of rows with {word!r} (--label)", count, 0, whole=True)
        if rows is not None and rows != sum(labels.values()):
            raise BadInputError(
                f"--rows is {rows}, but the numbers of --label sum to {sum(labels.values())}: "
                "leave out --rows"
            )
        return dict(labels)
    if rows is None:
        raise BadInputError("it is not said how many rows to write: give --rows, or --label")
    return {} if label_epsilon is None else dict.fromkeys(words, 1)


def _draw(
    texts: Iterator[tuple[Sampled, list[dict[str, Any]]]],
    part: _Partial,
    total: int,
    console: Console,
) -> float | None:
    """Writes texts down as they end; returns tokens per second."""
    done, tokens, given_up, began = len(part.numbers), 0, 0, 0.0
    with StopRequest() as stop, StepProgress(console, "row", total, done) as progress:
        began = time.monotonic()
        for tried, (text, rows) in enumerate(texts, 1):
            part.add(text, rows)
            done, tokens = done + 1, tokens + len(text.tokens)
            given_up += not text.valid
            if given_up == tried == _TRIED:
                raise BadInputError(
                    f"none of the first {_TRIED} texts can be read back by data.template, however "
                    "often a part was drawn again: train for longer, or with columns that are "
                    "easier to write"
                )
            progress.update(done, f"{tokens / (time.monotonic() - began):,.0f} tokens/s")
            if stop.requested and done < total:
                raise StoppedError(
                    f"stopped ({stop.requested}) with {done} of {total} rows: the same command "
                    "resumes"
                )
    return round(tokens / (time.monotonic() - began), 1) if tokens else None


# ---- files ---------------------------------------------------------------------------------------


class _Partial:
    """The file of the texts so far: one a line, after a line on which rows they are.

    Attributes:
      numbers: of the texts in it.
    """

    def __init__(
        self, path: pathlib.Path, known: Mapping[str, Any], total: int, writer: Writer
    ) -> None:
        self._path, self._file = path, open_plain(path)
        self._total, self._writer = total, writer
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise BadInputError(
                f"another process is writing rows into {path.parent}: wait for it"
            ) from None
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)  # a line that was cut by a kill
        if not path.stat().st_size:
            self._file.write(json.dumps(known) + "\n")
        if path.read_bytes().split(b"\n", 1)[0] != json.dumps(known).encode():
            self._file.close()
            raise BadInputError(
                f"{path.parent} holds the beginning of other rows, of another model or with other "
                "settings: give the command that began them, or another folder"
            )
        try:
            self.numbers = set(self.read())
        except BadInputError:
            self._file.close()
            raise

    def add(self, text: Sampled, rows: list[dict[str, Any]]) -> None:
        """Appends a text."""
        counts = {"redraws": text.redraws, "tokens": len(text.tokens)}
        self._file.write(json.dumps({"number": text.number, "rows": rows, **counts}) + "\n")

    def read(self) -> dict[int, dict[str, Any]]:
        """The texts by number."""
        found = {}
        try:
            for line in self._path.read_text(encoding="utf-8").split("\n")[1:-1]:
                one = json.loads(line)
                json.dumps(one, ensure_ascii=False).encode()  # half a character is no text
                number, *counts = (one[name] for name in ("number", "redraws", "tokens"))
                whole = all(type(x) is int and x >= 0 for x in (number, *counts))
                if not whole or number >= self._total:
                    raise ValueError
                if not self._writer.may_hold(number, one["rows"]):
                    raise ValueError
                found[number] = one
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
            raise BadInputError(
                f"{self._path} holds what this command does not write: remove {self._path.parent}, "
                "and give the command again"
            ) from None
        return found

    def close(self, remove: bool = False) -> None:
        """Releases the file."""
        if remove:
            self._path.unlink(missing_ok=True)
        self._file.close()


def _part_of(target: pathlib.Path) -> pathlib.Path:
    return target.with_name(f".{target.name}.part")


def _check_folder(target: pathlib.Path) -> None:
    """Refuses a file of rows whose folder holds anything else."""
    if target.suffix not in (".jsonl", ".parquet") or target.name.startswith("."):
        raise BadInputError(f"--out is {target}: give a new file, NAME.jsonl or NAME.parquet")
    if one_line(target.name) != target.name or "`" in target.name:
        raise BadInputError(
            f"--out is {one_line(str(target))}: give a name of visible letters, as the folder's "
            "card quotes it"
        )
    folder, part = target.parent, _part_of(target)
    # Of a command that was killed: what it wrote, and what it was about to write.
    mine = (part.name, target.name, CARD, NAME) if part.exists() else ()
    there = list(folder.iterdir()) if folder.is_dir() else []
    begun = tuple(f".{name}." for name in mine)
    cut = [path for path in there if path.name.startswith(begun) and path.suffix == ".tmp"]
    if others := sorted(path.name for path in there if path.name not in mine and path not in cut):
        raise BadInputError(
            f"{folder} already holds {others[0]!r}, but synthetic rows get a folder of their own, "
            "all of which their guarantee is about: give a file in a new one"
        )
    for path in cut:
        path.unlink()
    for parent in target.parents:
        if parent.exists() and not parent.is_dir():
            raise BadInputError(f"--out is {target}, but {parent} is a file: give another folder")


@contextlib.contextmanager
def _partial(
    target: pathlib.Path, known: Mapping[str, Any], total: int, writer: Writer
) -> Iterator[_Partial]:
    """The texts so far of a file that is to be written, in a folder of its own."""
    _check_folder(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = _Partial(_part_of(target), known, total, writer)
    try:
        yield part
    except BaseException:
        part.close()
        raise
    part.close(remove=True)


def _write_rows(
    path: pathlib.Path, rows: Sequence[dict[str, Any]], template: RowTemplate | None
) -> None:
    if path.suffix == ".jsonl":
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(path, "".join(lines))
        return
    schema = None
    if template is not None:
        types = {"person": pa.int64()} if template.rows > 1 else {}
        for column in template.columns:
            number = pa.float64() if column.decimals else pa.int64()
            types[column.name] = pa.string() if column.range is None else number
        schema = pa.schema(types)
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.Table.from_pylist(list(rows), schema), sink)
    write_atomically(path, sink.getvalue().to_pybytes())
