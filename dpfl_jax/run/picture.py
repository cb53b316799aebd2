"""One picture of a run: what it learnt, what that cost, and what a language model writes now."""

from __future__ import annotations

import pathlib
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpfl_jax.accounting import REPLACE, Guarantee, Meaning, plot_attacks
from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.run.directory import FINISHED

_PRIVATE, _OTHER, _SPENT = "#1f5fbf", "0.45", "#c2571a"
_COLUMNS, _LINES = 74, 6


def plot_curves(
    path: pathlib.Path, metrics: Sequence[Mapping[str, Any]], report: Mapping[str, Any]
) -> None:
    """Writes the picture of a run as PNG."""
    figure = draw(metrics, report)
    with warnings.catch_warnings():  # of letters that the font has not; a model may write any
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(path, dpi=110)


def plot_meaning(path: pathlib.Path, found: Meaning, guarantee: Guarantee) -> None:
    """Writes the picture of what attacks may find out as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 4.4), layout="constrained")
    axes = figure.subplots()
    plot_attacks(axes, found)
    axes.spines[["top", "right"]].set_visible(False)
    question = "Was a {} in the data?" if found.relation != REPLACE else "Which {} was it?"
    cost = guarantee.summary().split(" for each ")[0]
    axes.set_title(
        f"{question.format(guarantee.unit)} What no attack does better, seeing all that was "
        f"released\n({cost})",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


def draw(metrics: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> Any:
    """Draws held-out loss and accuracy, epsilon by step, and samples before and after.

    The training loss is drawn (and marked) only where nothing is held out.

    Args:
      metrics: rows of metrics.jsonl.
      report: content of report.json.

    Returns:
      A figure of matplotlib.
    """
    from matplotlib.figure import Figure  # not pyplot, whose backend is the notebook's

    evals = [(r["step"], r["eval"]) for r in metrics if "eval" in r]
    rows = [r for r in metrics if "outside_guarantee" in r]
    accuracy = [(s, e["accuracy"]) for s, e in evals if e.get("accuracy") is not None]
    samples = report.get("samples", {})
    # Silos that are elsewhere tell of no loss.
    learnt = bool(evals) or any(r["outside_guarantee"]["train_loss"] is not None for r in rows)
    columns = 1 + learnt + bool(accuracy)
    figure = Figure(figsize=(10, 4.9 if samples else 3.6), layout="constrained")
    grid = figure.add_gridspec(2 if samples else 1, 1, height_ratios=[5, 2][: 1 + bool(samples)])
    axes = (
        grid[0].subgridspec(1, columns, width_ratios=[3, 2, 2][:columns]).subplots(squeeze=False)[0]
    )
    if learnt:
        _loss(axes[0], evals, rows, report)
    spent = [(r["step"], r["epsilon_spent"]) for r in rows if r["epsilon_spent"] is not None]
    _spent(axes[-1], [(0, 0.0), *spent] if spent else [], report)
    if accuracy:
        axes[1].plot(*np.array(accuracy).T, "o-", color=_PRIVATE)
        axes[1].set(title="accuracy", xlabel="step", ylim=(0, 1))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(10)
    if samples:
        boxes = grid[1].subgridspec(1, len(samples)).subplots(squeeze=False)[0]
        for axis, (name, text) in zip(boxes, samples.items()):
            _sample(axis, name, text)
    people, unit = report.get("data", {}).get("users"), report["privacy"]["unit"]
    title = str(report["name"])
    if people and unit == "user":
        title += f": learnt from {people:,} people, each of them protected"
    figure.suptitle(title, fontsize=12)
    return figure


def _loss(
    axis: Any,
    evals: Sequence[tuple[int, Any]],
    rows: Sequence[Mapping[str, Any]],
    report: Mapping[str, Any],
) -> None:
    """Loss by step, every line with its name and last value beside its end."""
    axis.set(title="error on people never seen: lower is better", xlabel="step", ylabel="loss")
    private = report["privacy"]["unit"] != "none"
    lines = []
    beside = [
        (r["step"], r["loss"]) for r in report["outside_guarantee"].get("without_privacy", ())
    ]
    if evals:
        first = evals[0][1]["loss"]
        held_out = [(s, e["loss"]) for s, e in evals]
        lines.append(("with privacy" if private else "held out", held_out, _PRIVATE, "o-"))
        if beside:
            lines.append(("without privacy\n(comparison only)", beside, _OTHER, "o--"))
        lines.append(("before", [(held_out[0][0], first), (held_out[-1][0], first)], "0.6", ":"))
    else:
        axis.set(title="training loss (not to be published)")
        train = [(r["step"], r["outside_guarantee"]["train_loss"]) for r in rows]
        train = [(step, loss) for step, loss in train if loss is not None]
        lines += [("training", train, "0.6", "-")] if train else []
    for name, value in report.get("baselines", {}).items():
        if evals and not beside:
            ends = [(evals[0][0], value["loss"]), (evals[-1][0], value["loss"])]
            lines.append((textwrap.fill(name, 18), ends, "0.6", "--"))
    for _, points, color, style in lines:
        axis.plot(*np.array(points).T, style, color=color, lw=2, ms=4)
    if (chosen := report.get("best_step")) is not None:
        axis.axvline(chosen, color="0.6", ls="--", lw=1)
        axis.set_xlabel(f"step (dashed: the best checkpoint, {chosen})")
    low, high = axis.get_ylim()
    # Names next to each other would overlap: each keeps two lines' distance from the one below.
    at = -np.inf
    for name, points, color, _ in sorted(lines, key=lambda line: line[1][-1][1]):
        apart = (high - low) * (0.09 + 0.055 * (1 + name.count("\n")))
        at = max(points[-1][1], at + apart)
        axis.annotate(
            f"{points[-1][1]:.3g}  {name}",
            (1.02, at),
            xycoords=("axes fraction", "data"),
            va="center",
            color=color,
            fontsize=9,
        )


def _spent(axis: Any, points: Sequence[tuple[int, float]], report: Mapping[str, Any]) -> None:
    """Epsilon by step, an upper bound; and what is stated, where a rule stopped the run."""
    axis.set(title="privacy spent: epsilon, at most", xlabel="step")
    if not points:
        return
    steps, values = np.array(points).T
    axis.fill_between(steps, values, step="pre", color=_SPENT, alpha=0.15)
    axis.step(steps, values, where="pre", color=_SPENT, lw=2)
    stated, said = values[-1], f"{rounded_up(values[-1], 3)} in the end"
    if report["status"] == FINISHED and report["steps"] < report["planned_steps"]:
        stated = float(report["privacy"]["epsilon"])
        said = f"stated: {rounded_up(stated, 3)}, of all {report['planned_steps']} planned steps"
        axis.axhline(stated, color=_SPENT, ls="--", lw=1)
    axis.set_ylim(0, 1.25 * stated)
    axis.annotate(
        said,
        (steps[-1], stated),
        textcoords="offset points",
        xytext=(0, 6),
        ha="right",
        color=_SPENT,
        fontsize=9,
    )


def _sample(axis: Any, name: str, text: str) -> None:
    """What a model writes, in a box."""
    plain = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    lines = [
        piece for line in plain.splitlines() for piece in textwrap.wrap(line, _COLUMNS) or [""]
    ]
    axis.set_axis_off()
    axis.set_title(f"what it writes {name} training", loc="left", fontsize=10)
    axis.text(
        0.0,
        0.96,
        "\n".join(lines[:_LINES]),
        va="top",
        family="monospace",
        fontsize=7.5,
        parse_math=False,
        linespacing=1.35,
        transform=axis.transAxes,
    )
