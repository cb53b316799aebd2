"""The README.md of synthetic rows, in the format of dataset cards, with their guarantee."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import yaml

from dpfl_jax import __version__
from dpfl_jax.accounting.statement import Statement
from dpfl_jax.data.templates import RowTemplate
from dpfl_jax.run.report import as_text

CARD = "README.md"


@dataclasses.dataclass(frozen=True)
class Made:
    """How rows were made, as a card says it.

    Attributes:
      report: the report of the run.
      settings: how tokens were drawn.
      rows: the rows.
      labels: number of rows of each label that was asked for; {} if the model chose.
      redraws: how often a part of a row was drawn again.
      given_up: rows that could never be read back, and were left out.
      template: of the rows; None for other texts.
    """

    report: Mapping[str, Any]
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    labels: Mapping[str, int]
    redraws: int
    given_up: int
    template: RowTemplate | None


def card(name: str, stated: Statement, made: Made) -> str:
    """Returns the card of the file ``name``; everything in it follows from public facts and rows.

    Args:
      name: of the file.
      stated: its guarantee.
      made: how it was made.
    """
    privacy, rows = stated.privacy, made.rows
    head = {
        "pretty_name": f"Synthetic rows of {made.report['name']}",
        "tags": ["synthetic", "differential-privacy"],
        "configs": [{"config_name": "default", "data_files": name}],
    }
    lines = ["---", yaml.safe_dump(head, sort_keys=False, allow_unicode=True).strip(), "---", ""]
    lines += [f"# Synthetic rows of {as_text(made.report['name'])}", ""]
    lines += [f"**{as_text(privacy.summary())}**", ""]
    origin = (
        "A language model wrote them all: what they tell of anybody is bounded by its guarantee"
        if privacy.private
        else "A language model that was trained WITHOUT privacy wrote them: any row may be a copy "
        "of somebody's"
    )
    lines += [f"{len(rows):,} rows in `{name}`. {origin}.", ""]
    lines += ["## Guarantee", "", as_text(stated.text), ""]
    lines += [f"- {as_text(sentence)}" for sentence in stated.in_words() or ()]
    lines += [
        "",
        "`dpfl verify .` checks this guarantee, and that the rows are those that it is about. What "
        "is computed from these rows alone is covered, too, whatever it is.",
        "",
    ]
    lines += ["## Columns", "", *_columns(made), ""]
    model = made.report.get("model", {})
    base = model.get("checkpoint")
    what = [
        f"model: {model.get('parameters', 0):,} parameters, {made.report['steps']} steps"
        + ("" if base is None else f", from {pathlib.Path(base).name}"),
        "drawn with " + ", ".join(f"{k} {v}" for k, v in made.settings.items() if v is not None),
        f"drawn again, because it did not fit the columns: {made.redraws} times; rows left out "
        f"because they never fitted: {made.given_up}",
        f"written by dpfl_jax {__version__}",
    ]
    if made.labels:
        asked = ", ".join(f"{label} {count}" for label, count in made.labels.items())
        what.insert(1, f"labels that were asked for: {asked}")
    lines += ["## How they were made", "", *(f"- {as_text(line)}" for line in what), ""]
    return "\n".join(lines)


def _columns(made: Made) -> list[str]:
    """A table of the columns: what each may hold, and what it holds in these rows."""
    declared = {} if made.template is None else {c.name: c for c in made.template.columns}
    lines = ["| column | may hold | in these rows |", "|---|---|---|"]
    for name in made.rows[0] if made.rows else ():
        held = [row[name] for row in made.rows if row[name] is not None]
        column = declared.get(name)
        if column is not None and column.words:
            shares = collections.Counter(held)
            may = ", ".join(column.words)
            has = ", ".join(
                f"{word} {shares[word] / max(len(held), 1):.1%}" for word in column.words[:20]
            )
        elif column is not None and column.range is not None:
            low, high = column.range
            may = f"{low} to {high}, {column.decimals} decimals"
            has = f"median {np.median(held):g}" if held else ""
        elif name == "person":
            may, has = "number of a synthetic person", f"{len(set(held)):,} persons"
        else:
            lengths = [len(str(value)) for value in held] or [0]
            may, has = "text", f"median length {np.median(lengths):g} characters"
        lines.append(f"| {as_text(name)} | {as_text(may)} | {as_text(has)} |")
    return lines
