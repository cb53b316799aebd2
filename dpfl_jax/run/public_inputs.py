"""What a guarantee is about: who a unit is, what was taken as public, which other runs it counts.

A guarantee protects what is in the training data, and nothing else that enters a run. No program
can check whether the rest is public, so the guarantee lists all of it by name.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dpfl_jax.accounting import Guarantee
from dpfl_jax.data.load import FEW
from dpfl_jax.data.store import unit_key_of
from dpfl_jax.task import Task

OTHER_RUNS_CAVEAT = (
    "other runs on these people are not counted: what several runs spend adds up, and no ledger "
    "(privacy.ledger) was charged for this one"
)
_MOST_NAMES = 40
_DATE = re.compile(r"(\d{4}[-/.]\d\d?[-/.]\d\d?|\d\d?[-/.]\d\d?[-/.]\d{4})([T ]\d.*)?")
# Fields of mechanisms that bound what a unit contributes, as a guarantee names them.
_BOUNDS = {
    "clip_norm": "clip norm: {:g}",
    "group_size": "group size: {} examples of a user",
    "sets_per_user": "group size: {} sets of owners of a user",
    "max_records_per_subject": "group size: {} records of a subject in a silo",
}


def about(
    guarantee: Guarantee, unit_key: str, public_inputs: tuple[str, ...], account: str | None = None
) -> Guarantee:
    """Returns the guarantee with its unit, its public inputs, and the other runs that it counts.

    Args:
      guarantee: the guarantee of the mechanism that ran.
      unit_key: what makes a unit (``Store.unit_key``).
      public_inputs: as ``public_inputs`` lists them.
      account: the account of the ledger that was charged; None without a ledger.
    """
    if not guarantee.private:
        return guarantee
    counted = OTHER_RUNS_CAVEAT
    if account is not None:
        counted = (
            "its epsilon is that of this run alone: runs of this unit and adjacency add up in the "
            f"account {account!r} of the ledger"
        )
    caveats = [c for c in guarantee.caveats if c not in (OTHER_RUNS_CAVEAT, counted)]
    return dataclasses.replace(
        guarantee, unit_key=unit_key, public_inputs=public_inputs, caveats=(*caveats, counted)
    )


def public_inputs(
    counts: str,
    bounds: Mapping[str, Any] | None = None,
    config: Any = None,
    task: Task | None = None,
    *,
    checkpoint: str | None = None,
    more: Iterable[str] = (),
    remote: bool = False,
) -> tuple[str, ...]:
    """Lists all that enters a run and is assumed to be public, each as "name: value".

    Args:
      counts: the numbers of units that sampling depends on, in words.
      bounds: bounds on what a unit contributes, by field of the mechanism.
      config: the run's configuration; None: the caller made data, loss and parameters.
      task: what is learned.
      checkpoint: digest of the checkpoint that training starts from.
      more: further entries.
      remote: whether the silos hold the data, and the code that reads them.
    """
    result = [*more, *of_the_mechanism(bounds, counts)]
    if config is None:
        start = "first parameters, and what loss and data were made with: as the caller gave them"
        return (start, *result)
    first = _of_the_model(config, checkpoint)
    return (*first, *_of_the_data(config.data, task, remote), *result)


def of_the_mechanism(
    bounds: Mapping[str, Any] | None = None, counts: str | None = None
) -> tuple[str, ...]:
    """Lists the entries of ``public_inputs`` that follow from the mechanism and its counts."""
    given = ((bounds or {}).get(name) for name in _BOUNDS)
    result = [words.format(b) for b, words in zip(given, _BOUNDS.values()) if b is not None]
    return tuple(result) if counts is None else (f"counts: {counts}", *result)


def _of_the_model(config: Any, checkpoint: str | None) -> Iterator[str]:
    model, seed = config.model, config.init_seed
    if config.variant == "isrl":
        yield "first parameters: 0"
    elif (base := model.checkpoint) is not None:
        digest = "" if checkpoint is None else f" ({checkpoint[:16]})"
        yield f"initial checkpoint: {_name(base)}{digest}"
        if model.lora is not None:
            yield f"first adapters: drawn with init_seed={seed}"
    else:
        built = "" if model.module is None else f"by {model.module}, "
        yield f"first parameters: {built}drawn with init_seed={seed}"
    if config.pretrain is not None:
        yield f"pre-training corpus: data.public={_name(config.data.public)}"


def _of_the_data(data: Any, task: Task | None, remote: bool) -> Iterator[str]:
    task = task or Task("tokens")
    source = "the silos" if remote else f"data.source={data.source}"
    if task.kind in ("tokens", "preferences"):
        tokenizer = (
            "that of the checkpoint" if data.tokenizer == "checkpoint" else _name(data.tokenizer)
        )
        yield f"tokenizer: {tokenizer}"
    elif task.vocab_size:
        yield f"vocabulary: {task.vocab_size} ids of {source}"
    if data.chat_template is not None:
        yield f"chat template: {_name(data.chat_template)}"
    if data.scale:
        yield f"scaling constants: data.scale of {', '.join(data.scale)}"
    elif task.kind in ("classes", "regression") and (share := _scaled_by(data, task)) is not None:
        yield f"scaling constants: {share or source}"
    if task.classes:
        named = next((n for n in ("classes", "categories") if getattr(data, n)), None)
        yield f"class list: {task.classes}, of {source if named is None else f'data.{named}'}"
    if data.template is not None:
        yield f"template of rows: {data.template}"
    for name, what in (
        ("categories", "words of columns"),
        ("ranges", "ranges of columns"),
        ("missing", "columns with gaps"),
        ("dates", "columns of dates"),
    ):
        if given := getattr(data, name):
            yield f"{what}: data.{name} of {', '.join(given)}"
    if task.table is not None and not remote:
        names = [n if n.isprintable() and n.strip() else repr(n) for n in task.table.inputs]
        if len(names) > _MOST_NAMES:
            names = [*names[:_MOST_NAMES], f"... {names[-1]} ({len(names)} columns)"]
        yield f"input columns: {', '.join(names)}; target: {task.table.target}"
    elif task.kind in ("classes", "regression"):
        yield f"input columns: those of {source}"
    if data.silo_column is not None and not remote:
        yield f"silo names: column {data.silo_column}"


def _scaled_by(data: Any, task: Task) -> str | None:
    """Which records set the scale; "" if the source has constants, None if nothing is scaled."""
    if task.scaled:
        return ""
    share = data.public_fraction
    return None if share is None else f"from data.public_fraction={share:g} of the records"


def _name(path: str) -> str:
    """A file's name without its folder, which may be private; other names as they are."""
    return path if ":" in path else pathlib.PurePath(path).name or path


def not_people(store: Any, unit: str) -> str | None:
    """Returns a warning, for the terminal only, if units do not look like people.

    It is written to no file, as the number of rows of a unit is private.
    """
    offsets = getattr(store, "user_offsets", None) if not hasattr(store, "owners") else None
    if offsets is None:
        return None
    units, rows = len(offsets) - 1, int(offsets[-1])
    key = unit_key_of(store) or "id"
    whose = "name the column that says who each row belongs to (data.user_column)"
    ids = store.user_ids(range(min(units, FEW))) if hasattr(store, "user_ids") else []
    if ids and all(map(_DATE.fullmatch, ids)):
        return (
            f"every {unit} is a date (a {unit}: {key}), so that the guarantee protects what was "
            f"on one day, and not a person: {whose}"
        )
    if rows == units:
        return (
            f"every {unit} has one row (a {unit}: {key}), so that the guarantee protects single "
            f"rows: if a person may have several, {whose}"
        )
    if units <= FEW and rows > FEW * units:
        return (
            f"there are {units} {unit}s of many rows each (a {unit}: {key}), and all rows of one "
            f"are hidden together, which takes much noise: if they are not people, {whose}"
        )
    return None
