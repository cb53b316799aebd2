"""What a run leaves for people: report.json, report.md and, from ``picture``, curves.png."""

from __future__ import annotations

import datetime
import json
import math
import pathlib
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import jax

from dpfl_jax import __version__
from dpfl_jax.accounting import Guarantee, digests
from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.accounting.statement import NAME as STATEMENT
from dpfl_jax.accounting.statement import Statement
from dpfl_jax.run.directory import FINISHED, write_atomically
from dpfl_jax.run.driver import RunResult
from dpfl_jax.run.picture import plot_curves, plot_meaning

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


def summary(result: RunResult, guarantee: Guarantee) -> str:
    """A run in one line: the guarantee, and how it was enforced."""
    norms = [] if result.clipping is None else [result.clipping["summary"]]
    return "; ".join([guarantee.summary(), *norms])


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
      name: of the configuration.
      result: of the driver.
      guarantee: of the steps taken.
      outside_guarantee: what this kind of run adds to that entry.
      **sections: further top-level entries (model, data, mechanism, silos, ...).
    """
    chosen = result.best
    evaluation = {"initial": result.evaluation(0), "final": result.last}
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
        "summary": summary(result, guarantee),
        "privacy": guarantee.to_json(),
        "guarantee": str(guarantee),
        "eval": {name: value for name, value in evaluation.items() if value is not None},
        "throughput": {
            "examples_per_s": rate(result.examples),
            "tokens_per_s": rate(result.tokens),
        },
        "clipping": result.clipping,
        "outside_guarantee": {
            "nonfinite_units": sum(r.get("nonfinite_units", 0) for r in raw),
            "final_train_loss": raw[-1]["train_loss"] if raw else None,
            "real_token_fraction": round(result.tokens / max(result.places, 1), 4) or None,
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
    """Writes all that a run leaves and, last, report.json (whose status ends the run)."""
    statement = statement.tied(
        run=digests.of_run(directory, {report["steps"], report["best_step"]})
    )
    write_atomically(directory / STATEMENT, statement.dumps())
    if (meaning := statement.meaning()) is not None:
        report["meaning"] = meaning.sentences()
        plot_meaning(directory / "attacks.png", meaning, statement.privacy)
    plot_curves(directory / "curves.png", metrics, report)
    write_atomically(directory / "report.md", render_markdown(report))
    write_atomically(directory / "report.json", json.dumps(report, indent=2, default=str) + "\n")


def taken(report: dict[str, Any]) -> str:
    """How many steps, in words."""
    done, planned = report["steps"], report["planned_steps"]
    return str(done) if done == planned else f"{done} of {planned}"


def evaluated(report: dict[str, Any], key: str) -> str:
    """What an entry of ``eval`` in a report is, in words."""
    return {
        "initial": "before private training",
        "final": "after private training",
        "best": f"at the best checkpoint, of step {report['best_step']}",
    }[key]


def render_markdown(report: dict[str, Any]) -> str:
    """The report as Markdown; sections that it does not have are left out."""
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
        told = [*audited["summary"], *audited["cost"]["told"]]
        lines += ["## Audit", "", *_items(told), "", "![](audit.png)", ""]
    for name in _BULLETS:
        if section := report.get(name):
            told = [f"{key}: {_short(value, key)}" for key, value in section.items()]
            lines += [f"## {name.capitalize()}", "", *_items(told), ""]
    return "\n".join(lines)


def as_text(value: Any) -> str:
    """A line of Markdown that shows just this: no links, pictures, HTML, code or cells."""
    return re.sub(r"([\\`<|\[])", r"\\\1", " ".join(str(value).split()))


def _items(sentences: Sequence[str]) -> list[str]:
    return [f"- {as_text(sentence)}" for sentence in sentences]


def _table(title: str, rows: Sequence[dict[str, Any]] | None) -> list[str]:
    """Columns are those that hold something somewhere."""
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
