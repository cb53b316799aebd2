"""What synthetic rows are good for, and whether they are copies: a report that stays private.

Everything in it compares the rows with those of real people, without noise: no guarantee covers it.
A classifier that learns from synthetic rows, from real ones, or from rows that the model wrote
before private training, is tested on people who are held out. Overlaps with training texts say
little alone (everybody says "good morrow to you"): beside them stand those with as many held-out
texts, from which nothing can have been copied.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import pathlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dpfl_jax.accounting import digests
from dpfl_jax.data.templates import RowTemplate
from dpfl_jax.errors import BadInputError
from dpfl_jax.files import save_figure
from dpfl_jax.run.directory import write_atomically
from dpfl_jax.run.report import as_text

NAME, PICTURE = digests.PRIVATE_REPORT, "not_to_be_published.png"
OVERLAPS = (4, 8, 16, 32)  # words in a row
_BINS = 10
_WORD = re.compile(r"\w+|[^\w\s]")
Row = Mapping[str, Any]
Rows = Sequence[Row]


@dataclasses.dataclass(frozen=True)
class RealRows:
    """Rows of real people, in the form of synthetic ones.

    Attributes:
      train: rows of those who were trained on.
      held_out: rows of those who were not, each with whose it is.

    Raises:
      BadInputError: nobody is held out.
    """

    train: Rows
    held_out: Sequence[tuple[str, Row]]

    def __post_init__(self) -> None:
        if not self.held_out:
            raise BadInputError(
                "a report compares with people who are held out, and the run held out nobody: "
                "leave out --report, or train with data.validation_fraction"
            )


class Features:
    """The words of a row that a classifier counts: of texts, of categories, of binned numbers."""

    def __init__(self, template: RowTemplate | None, label: str | None) -> None:
        self._columns = {} if template is None else {c.name: c for c in template.columns}
        self._label = label

    def __call__(self, row: Row) -> list[str]:
        found: list[str] = []
        for name, value in row.items():
            column = self._columns.get(name)
            if name in (self._label, "person"):
                continue
            if column is not None and column.range is not None and value is not None:
                value = f"bin {bin_of(value, column.range)}"
            elif column is None or column.is_text:
                words = _WORD.findall(str(value))
                found += [*words, *map(" ".join, itertools.pairwise(words))]
                continue
            found.append(f"{name}={value}")
        return found


def bin_of(value: float, bounds: tuple[float, float]) -> int:
    """The number of the tenth of a range that a value lies in."""
    low, high = bounds
    return min(int(_BINS * (value - low) / ((high - low) or 1)), _BINS - 1)


def classifier(
    rows: Rows, label: str, words: Sequence[str], features: Features
) -> Callable[[Row], str]:
    """Multinomial naive Bayes with add-one smoothing: the likeliest label of a row."""
    counts = {word: collections.Counter[str]() for word in words}
    prior = collections.Counter(row[label] for row in rows)
    for row in rows:
        counts[row[label]].update(features(row))
    known = set().union(*counts.values())
    totals = {word: math.log(counts[word].total() + len(known) + 1) for word in words}

    def likeliest(row: Row) -> str:
        found = [word for word in features(row) if word in known]

        def score(word: str) -> float:
            own = sum(math.log(counts[word][one] + 1) for one in found)
            return math.log(prior[word] + 1) + own - len(found) * totals[word]

        return max(words, key=score)

    return likeliest


def accuracy(
    predict: Callable[[Row], str], label: str, people: Sequence[tuple[str, Row]]
) -> tuple[float, float]:
    """Mean over rows, and half of its 95 % interval, for which people are independent."""
    right: dict[str, list[bool]] = collections.defaultdict(list)
    for person, row in people:
        right[person].append(predict(row) == row[label])
    mean = sum(map(sum, right.values())) / len(people)
    deviations = [sum(own) - mean * len(own) for own in right.values()]
    return mean, 1.96 * math.sqrt(sum(d * d for d in deviations)) / len(people)


def divergence(first: collections.Counter[Any], second: collections.Counter[Any]) -> float:
    """Jensen-Shannon divergence of two counts, from 0 (equal shares) to 1 (nothing in common)."""
    terms, a, b = [], max(first.total(), 1), max(second.total(), 1)
    for key in first.keys() | second.keys():
        p, q = first[key] / a, second[key] / b
        middle = (p + q) / 2
        terms += [0.5 * x * math.log2(x / middle) for x in (p, q) if x]
    return math.fsum(terms)  # whatever the order of a set


def shared_runs(texts: Sequence[str], sources: Sequence[str], size: int) -> tuple[float, int]:
    """How many texts share ``size`` words in a row with a source.

    Returns:
      Their share of all texts, and the most texts that share one and the same run.
    """
    known = {gram for source in sources for gram in _grams(_WORD.findall(source), size)}
    found = [{*_grams(_WORD.findall(text), size)} & known for text in texts]
    most = collections.Counter(gram for grams in found for gram in grams).most_common(1)
    return sum(map(bool, found)) / max(len(texts), 1), most[0][1] if most else 0


def _grams(words: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(size)))


def write_report(
    folder: pathlib.Path,
    rows: Rows,
    real: RealRows,
    before: Rows,
    template: RowTemplate | None,
) -> dict[str, Any]:
    """Writes the report, and returns its numbers.

    Args:
      folder: for the report alone.
      rows: synthetic rows.
      real: rows of real people.
      before: rows that the model wrote before private training; may be empty.
      template: of the rows; None for texts.
    """
    held_out = [row for _, row in real.held_out]
    label = None if template is None else template.columns[0]
    numbers: dict[str, Any] = {"rows": len(rows)}
    lines = [
        "# NOT TO BE PUBLISHED",
        "",
        "Every number here was computed from real people's rows without noise. No guarantee covers "
        "it, and choosing by it what is published (rows, seeds, settings) is not covered, either.",
        "",
    ]
    if template is not None and label is not None and label.words and len(template.columns) > 1:
        numbers["accuracy"] = _accuracies(rows, real, before, template)
        lines += _table(
            f"A classifier of {label.name}, tested on {len(held_out):,} rows of people held out",
            ["learnt from", "accuracy", "95 %"],
            [[k, f"{m:.3f}", f"+-{w:.3f}"] for k, (m, w) in numbers["accuracy"].items()],
        )
    sides = {"synthetic": rows, "training": real.train, "held out": held_out}
    if template is not None:
        numbers["columns"] = _columns(sides, template)
        lines += _table(
            "Distance to the columns of people held out, 0 to 1",
            ["column", "synthetic", "training"],
            [[n, f"{a:.4f}", f"{b:.4f}"] for n, (a, b) in numbers["columns"].items()],
        )
    text = next(
        (n for n in (rows[0] if rows else {}) if template is None
         or any(c.name == n and c.is_text for c in template.columns)), None,
    )  # fmt: skip
    if text is not None:
        texts = {side: [str(row[text] or "") for row in of] for side, of in sides.items()}
        numbers |= _texts(texts)
        lines += _table(
            f"Texts ({text})",
            ["", *texts],
            [[k, *(f"{x:.4g}" for x in v.values())] for k, v in numbers["texts"].items()],
        )
        lines += _table(
            "Copies: synthetic rows that have so many words in a row from a real text",
            ["words", *next(iter(numbers["copies"].values()))],
            [[n, *(f"{x:.4g}" for x in v.values())] for n, v in numbers["copies"].items()],
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PICTURE).unlink(missing_ok=True)  # a link to another file
    _draw(folder / PICTURE, numbers)
    write_atomically(folder / NAME, "\n".join([*lines, f"![]({PICTURE})", ""]))
    return numbers


def _accuracies(
    rows: Rows, real: RealRows, before: Rows, template: RowTemplate
) -> dict[str, tuple[float, float]]:
    column = template.columns[0]
    features = Features(template, column.name)

    def labelled(rows: Rows) -> Rows:
        return [row for row in rows if row[column.name] is not None]

    tested = [(person, row) for person, row in real.held_out if row[column.name] is not None]
    sources = {"synthetic rows": rows, "rows of those trained on": real.train}
    sources |= {"rows of the model before training": before} if before else {}
    found = {
        name: accuracy(
            classifier(labelled(of), column.name, column.words, features), column.name, tested
        )
        for name, of in sources.items()
    }
    common = collections.Counter(row[column.name] for _, row in tested).most_common(1)[0][0]
    return found | {"nothing (the commonest label)": accuracy(
        lambda _: common, column.name, tested
    )}  # fmt: skip


def _columns(sides: Mapping[str, Rows], template: RowTemplate) -> dict[str, tuple[float, float]]:
    """Divergences of each column that is no text, and of each pair of them, to held-out rows."""

    def held(row: Row, column: Any) -> Any:
        value = row[column.name]
        return value if column.range is None or value is None else bin_of(value, column.range)

    chosen = [column for column in template.columns if not column.is_text]
    groups = [(c,) for c in chosen] + [(a, b) for i, a in enumerate(chosen) for b in chosen[:i]]
    result = {}
    for group in groups:
        counts = {
            side: collections.Counter(tuple(held(row, c) for c in group) for row in of)
            for side, of in sides.items()
        }
        result[" x ".join(column.name for column in group)] = (
            divergence(counts["synthetic"], counts["held out"]),
            divergence(counts["training"], counts["held out"]),
        )
    return result


def _texts(texts: Mapping[str, list[str]]) -> dict[str, Any]:
    """Lengths, variety and n-grams of equally many texts; and runs shared with real ones."""
    size = min(map(len, texts.values()))
    some = {side: random.Random(0).sample(of, size) for side, of in texts.items()}
    words = {side: [_WORD.findall(text) for text in of] for side, of in some.items()}
    facts: dict[str, dict[str, float]] = {
        "median words": {s: float(np.median([len(w) for w in of])) for s, of in words.items()}
    }
    for n in (1, 2, 3):
        counts = {
            side: collections.Counter(gram for one in of for gram in _grams(one, n))
            for side, of in words.items()
        }
        facts[f"distinct {n}-grams of all"] = {
            side: len(count) / max(count.total(), 1) for side, count in counts.items()
        }
        if n < 3:
            facts[f"divergence of {n}-grams from held out"] = {
                side: divergence(count, counts["held out"]) for side, count in counts.items()
            }
    known, others, made = texts["training"], texts["held out"], texts["synthetic"]
    compared = min(len(known), len(others))
    some_known, some_others = (random.Random(1).sample(of, compared) for of in (known, others))
    copies = {}
    for words_in_a_row in OVERLAPS:
        share, most = shared_runs(made, known, words_in_a_row)
        copies[words_in_a_row] = {
            "share, of those trained on": share,
            f"of {compared:,} texts of theirs": shared_runs(made, some_known, words_in_a_row)[0],
            f"of {compared:,} held out": shared_runs(made, some_others, words_in_a_row)[0],
            "most rows with one run of theirs": most,
        }
    return {"texts": facts, "copies": copies}


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [f"| {' | '.join(as_text(cell) for cell in row)} |" for row in (head, *rows)]
    return [f"## {as_text(title)}", "", lines[0], "|---" * len(head) + "|", *lines[1:], ""]


def _draw(path: pathlib.Path, numbers: Mapping[str, Any]) -> None:
    from matplotlib.figure import Figure  # not pyplot, whose backend is the notebook's

    panels = [name for name in ("accuracy", "columns", "copies") if name in numbers]
    figure = Figure(figsize=(1 + 4 * len(panels), 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        found = numbers[name]
        places = np.arange(len(found))
        if name == "accuracy":
            means, widths = np.array(list(found.values())).T
            axes.barh(places, means, xerr=widths, color="#1f5fbf")
            axes.set(title="accuracy on people held out", xlim=(0, 1))
            axes.set_yticks(places, [*found])
        elif name == "columns":
            for side, shift, color in (("synthetic", -0.2, "#1f5fbf"), ("training", 0.2, "0.6")):
                values = [pair[side == "training"] for pair in found.values()]
                axes.barh(places + shift, values, 0.4, label=side, color=color)
            axes.set(title="distance of columns")
            axes.set_yticks(places, [*found])
            axes.legend()
        else:
            _, *compared, _ = zip(*(values.values() for values in found.values()))
            for shares, side in zip(compared, ("trained on", "held out")):
                axes.plot([*found], shares, "o-", label=side)
            axes.set(title="rows with a run of words of", xlabel="words in a row", ylim=(0, None))
            axes.legend()
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("NOT TO BE PUBLISHED: computed from people's rows without noise", fontsize=9)
    save_figure(figure, path, 110)
