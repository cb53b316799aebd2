"""The report of a run: report.json, report.md, curves.png and attacks.png."""

from __future__ import annotations

import datetime
import json
import math
import pathlib
import platform
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np

from dpfl_jax import __version__, buckets
from dpfl_jax.accounting import REPLACE, Guarantee, Meaning, digests, plot_attacks
from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.accounting.statement import NAME as STATEMENT
from dpfl_jax.accounting.statement import Statement
from dpfl_jax.files import can_draw
from dpfl_jax.run.directory import FINISHED, write_atomically
from dpfl_jax.run.driver import RunResult

PRIVATE_METRICS_CAVEAT = (
    "what metrics.jsonl and report.json hold under `outside_guarantee`, all timings and rates "
    "(profile/), and any training loss in curves.png are computed from private data without noise: "
    "do not publish them"
)
PACKING_CAVEAT = (
    "texts are packed (execution.packing): the time, the memory and the compilations of steps tell "
    "who can observe them about the lengths of texts"
)
TUNING_CAVEAT = (
    "if the clip norm, the learning rates, the batch size or other settings were chosen by trying "
    "them on these private data, those trials are not in this epsilon"
)
_BULLETS = (
    "personalization",
    "model",
    "data",
    "mechanism",
    "selection",
    "participation",
    "pretrain",
    "throughput",
    "environment",
)
_MOST_SILOS = 32


def environment() -> dict[str, Any]:
    """Versions and devices, without anything that identifies the machine."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "dp-accounting", "numpy")
    device = jax.devices()[0]
    return {
        "dpfl_jax": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": f"{device.platform} ({device.device_kind})",
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        **{name: metadata.version(name) for name in packages},
    }


def build_report(
    name: str,
    result: RunResult,
    guarantee: Guarantee,
    *,
    outside_guarantee: Mapping[str, Any] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """Returns the content of report.json.

    Args:
      name: the configuration's name.
      result: what the driver returned.
      guarantee: the guarantee of the steps taken.
      outside_guarantee: what this kind of run adds to the entry of that name.
      **sections: further top-level entries (model, data, mechanism, silos, ...).
    """
    chosen = result.best
    evaluation = {
        "initial": result.evaluation(0),
        "final": result.last,
        "last_iterate": result.last_iterate,
    }
    if chosen is not None:
        evaluation["best"] = result.evaluation(chosen.step)
    raw = [row["outside_guarantee"] for row in result.metrics if "outside_guarantee" in row]

    def rate(amount: int) -> float | None:
        return round(amount / result.seconds, 1) if amount and result.seconds > 0 else None

    return {
        "status": FINISHED if result.interrupted is None else "interrupted",
        "name": name,
        "finished_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "steps": result.steps,
        "planned_steps": result.planned,
        "best_step": None if chosen is None else chosen.step,
        "summary": guarantee.summary(),
        "privacy": guarantee.to_json(),
        "guarantee": str(guarantee),
        "eval": {name: value for name, value in evaluation.items() if value is not None},
        "throughput": {
            "examples_per_s": rate(result.examples),
            "tokens_per_s": rate(result.tokens),
            "mfu": result.mfu,
            "goodput": result.goodput,
        },
        "clipping": result.clipping,
        "outside_guarantee": {
            "nonfinite_units": sum(r.get("nonfinite_units", 0) for r in raw),
            "final_train_loss": raw[-1]["train_loss"] if raw else None,
            "real_token_fraction": round(result.tokens / max(result.padded_tokens, 1), 4) or None,
            **(outside_guarantee or {}),
        },
        **sections,
        "environment": environment(),
    }


def write_report(
    directory: pathlib.Path,
    report: dict[str, Any],
    statement: Statement,
    metrics: Sequence[dict[str, Any]],
) -> None:
    """Writes all reports of a run; report.json, whose status marks it as finished, comes last."""
    statement = statement.tied(
        run=digests.of_run(directory, {report["steps"], report["best_step"]})
    )
    write_atomically(directory / STATEMENT, statement.dumps())
    if (meaning := statement.meaning()) is not None:
        report["meaning"] = meaning.sentences()
    text = render_markdown(report)
    if can_draw():
        if meaning is not None:
            plot_meaning(directory / "attacks.png", meaning, statement.privacy)
        plot_curves(directory / "curves.png", metrics, report)
    else:
        text = re.sub(r"!\[\]\(\w+\.png\)\n\n?", "", text)
    write_atomically(directory / "report.md", text)
    buckets.publish(directory)
    write_atomically(directory / "report.json", json.dumps(report, indent=2, default=str) + "\n")


def taken(report: dict[str, Any]) -> str:
    """The number of steps taken, in words: "80", or "80 of 100"."""
    done, planned = report["steps"], report["planned_steps"]
    return str(done) if done == planned else f"{done} of {planned}"


def evaluated(report: dict[str, Any], key: str) -> str:
    """When an entry of a report's ``eval`` was measured, in words."""
    averaged = ", averaged" if "last_iterate" in report["eval"] else ""
    return {
        "initial": "before private training",
        "final": f"after private training{averaged}",
        "last_iterate": "the last iterate, not averaged",
        "best": f"at the best checkpoint, of step {report['best_step']}",
    }[key]


def render_markdown(report: dict[str, Any]) -> str:
    """Returns the report as Markdown."""
    title = f"{report['name']}: {report['status']} after {taken(report)} steps"
    lines = [f"# {as_text(title)}", "", f"**{as_text(report['summary'])}**", ""]
    lines += ["## Guarantee", "", as_text(report["guarantee"]), ""]
    if listed := report["privacy"].get("public_inputs"):
        lines += ["## Assumed to be public, and not protected", "", *_items(listed), ""]
    if sentences := report.get("meaning"):
        lines += ["## What an attacker may find out, at most", ""]
        lines += [*_items(sentences), "", "![](attacks.png)", ""]
    lines += _table("The same run under other notions of privacy", report.get("relations"))
    shown = {evaluated(report, key): value for key, value in report["eval"].items()}
    rows = [{"": k, **v} for k, v in {**shown, **report.get("baselines", {})}.items()]
    lines += _table("Held out", rows)
    if clipping := report.get("clipping"):
        lines += ["## Clipping", ""]
        lines += [*_items([clipping[k] for k in ("summary", "warning") if clipping[k]]), ""]
    lines += _table(
        "Excess risk that is possible (rates: constants 1, logarithms left out)",
        report.get("possible_risk"),
    )
    for name, text in report.get("samples", {}).items():
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        lines += [f"## What the model writes {as_text(name)} training", "", fence, text, fence, ""]
    parameters = report.get("parameters", {}).items()
    lines += _table("Parameters", [{"parameter": k, **v} for k, v in parameters])
    silos = report.get("silos", [])
    most = len(silos) if len(silos) <= _MOST_SILOS else _MOST_SILOS // 2
    lines += _table("Silos", silos[:most])
    if most < len(silos):
        lines += [f"{len(silos) - most} more in report.json", ""]
    if audited := report.get("audit"):
        sentences = [*audited["summary"], *audited["cost"]["sentences"]]
        lines += ["## Audit", "", *_items(sentences), "", "![](audit.png)", ""]
    for name in _BULLETS:
        if section := report.get(name):
            sentences = [f"{key}: {_short(value, key)}" for key, value in section.items()]
            lines += [f"## {name.capitalize()}", "", *_items(sentences), ""]
    return "\n".join(lines)


def as_text(value: Any) -> str:
    """Escapes a value for one line of Markdown: no links, pictures, HTML, code or cells."""
    return re.sub(r"([\\`<|\[])", r"\\\1", " ".join(str(value).split()))


def _items(sentences: Sequence[str]) -> list[str]:
    return [f"- {as_text(sentence)}" for sentence in sentences]


def _table(title: str, rows: Sequence[dict[str, Any]] | None) -> list[str]:
    """A Markdown table; columns without any value are left out."""
    if not rows:
        return []
    known = dict.fromkeys(name for row in rows for name in row)
    columns = [c for c in known if any(row.get(c) is not None for row in rows)]
    cells = [[c.replace("_", " ") for c in columns]]
    cells += [[_short(row.get(c), c) for c in columns] for row in rows]
    head, *lines = (f"| {' | '.join(map(as_text, row))} |" for row in cells)
    return [f"## {title}", "", head, "|---" * len(columns) + "|", *lines, ""]


def _short(value: Any, name: str) -> str:
    if value is None:
        return ""
    if not (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    return rounded_up(value, 6) if "epsilon" in name or name == "delta" else f"{value:.6g}"


# ---- curves.png and attacks.png ------------------------------------------------------------------

_PRIVATE, _OTHER, _SPENT = "#1f5fbf", "0.45", "#c2571a"
_COLUMNS, _LINES = 74, 6


def plot_curves(
    path: pathlib.Path, metrics: Sequence[Mapping[str, Any]], report: Mapping[str, Any]
) -> None:
    """Writes the picture of a run as PNG."""
    figure = draw(metrics, report)
    with warnings.catch_warnings():  # about letters that the font lacks: a model may write any
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(path, dpi=110)


def plot_meaning(path: pathlib.Path, meaning: Meaning, guarantee: Guarantee) -> None:
    """Writes the picture of what attacks may find out as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 4.4), layout="constrained")
    axes = figure.subplots()
    plot_attacks(axes, meaning)
    axes.spines[["top", "right"]].set_visible(False)
    question = "Was a {} in the data?" if meaning.relation != REPLACE else "Which {} was it?"
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
      A Matplotlib figure.
    """
    from matplotlib.figure import Figure  # not pyplot, whose backend is the notebook's

    evals = [(r["step"], r["eval"]) for r in metrics if "eval" in r]
    rows = [r for r in metrics if "outside_guarantee" in r]
    accuracy = [(s, e["accuracy"]) for s, e in evals if e.get("accuracy") is not None]
    samples = report.get("samples", {})
    # Remote silos report no loss.
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
    """Loss by step; every line is labelled with its name and last value."""
    axis.set(title="error on people never seen: lower is better", xlabel="step", ylabel="loss")
    private = report["privacy"]["unit"] != "none"
    lines = []
    baseline = [
        (r["step"], r["loss"]) for r in report["outside_guarantee"].get("without_privacy", ())
    ]
    if evals:
        first = evals[0][1]["loss"]
        held_out = [(s, e["loss"]) for s, e in evals]
        lines.append(("with privacy" if private else "held out", held_out, _PRIVATE, "o-"))
        if baseline:
            lines.append(("without privacy\n(comparison only)", baseline, _OTHER, "o--"))
        lines.append(("before", [(held_out[0][0], first), (held_out[-1][0], first)], "0.6", ":"))
    else:
        axis.set(title="training loss (not to be published)")
        train = [(r["step"], r["outside_guarantee"]["train_loss"]) for r in rows]
        train = [(step, loss) for step, loss in train if loss is not None]
        lines += [("training", train, "0.6", "-")] if train else []
    for name, value in report.get("baselines", {}).items():
        if evals and not baseline:
            ends = [(evals[0][0], value["loss"]), (evals[-1][0], value["loss"])]
            lines.append((textwrap.fill(name, 18), ends, "0.6", "--"))
    for _, points, color, style in lines:
        axis.plot(*np.array(points).T, style, color=color, lw=2, ms=4)
    if (chosen := report.get("best_step")) is not None:
        axis.axvline(chosen, color="0.6", ls="--", lw=1)
        axis.set_xlabel(f"step (dashed: the best checkpoint, {chosen})")
    low, high = axis.get_ylim()
    # Labels of close values would overlap: each is kept above the one below it.
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
    """Epsilon by step, an upper bound; and the stated one, if a rule stopped the run early."""
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
