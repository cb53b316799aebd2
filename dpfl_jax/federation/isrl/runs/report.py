"""What an ISRL-DP run leaves for people: report.json, report.md and a PNG of its curves."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from dpfl_jax.federation.isrl import bounds
from dpfl_jax.federation.isrl.runs.parameters import Parameters
from dpfl_jax.federation.report import plot_curves
from dpfl_jax.run.directory import write_atomically


def possible_risk(parameters: Parameters) -> list[dict[str, Any]]:
    """Excess risk that the theorems allow (constants 1, no logarithms): known before training."""
    if parameters.noise is None:
        return []
    lipschitz = float(parameters.clip_norms.max())
    problem = dataclasses.replace(parameters.problem, lipschitz=lipschitz)
    rows = [
        ("this trust model, upper bound (Theorem 2.1)", bounds.upper(problem)),
        ("this trust model, lower bound (Theorem 2.2)", bounds.lower(problem)),
        ("a trusted server, convex lower bound", bounds.central(problem)),
    ]
    return [
        {"bound": name, "sampling": risk.statistical, "privacy": risk.private}
        for name, risk in rows
    ]


def write_isrl_report(
    directory: pathlib.Path, report: dict[str, Any], metrics: Sequence[dict[str, Any]]
) -> None:
    """Writes report.md, curves.png and, last, report.json (whose status ends the run)."""
    plot_curves(directory / "curves.png", metrics, report["name"])
    write_atomically(directory / "report.md", render_markdown(report))
    write_atomically(directory / "report.json", json.dumps(report, indent=2, default=str) + "\n")


def render_markdown(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [f"# {report['name']}: {report['status']} after {report['steps']} rounds"]
    lines += ["", "## Guarantee", "", report["guarantee"], ""]
    lines += _table(
        "The same run under other notions of privacy",
        ("notion", "trusted", "protects", "epsilon", "delta", "note"),
        report["relations"],
    )
    if report["eval"]:
        rows = [{"": name, **value} for name, value in report["eval"].items()]
        lines += _table("Held out", ("", "loss", "loss_by_silo", "worst_silo", "accuracy"), rows)
    lines += _table(
        "Excess risk that is possible (rates: constants 1, logarithms left out)",
        ("bound", "sampling", "privacy"),
        report["possible_risk"],
    )
    rows = [{"parameter": name, **value} for name, value in report["parameters"].items()]
    lines += _table("Parameters", ("parameter", "value", "from"), rows)
    columns = ("silo", "records", "batch", "noise_multiplier", "target_epsilon", "epsilon", "delta")
    shown = report["silos"] if len(report["silos"]) <= 32 else report["silos"][:16]
    lines += _table("Silos", columns, shown)
    if len(shown) < len(report["silos"]):
        lines += [f"{len(report['silos']) - len(shown)} more in report.json", ""]
    for title in ("model", "data", "mechanism", "participation", "throughput", "environment"):
        lines += [f"## {title.capitalize()}", ""]
        lines += [f"- {key}: {_short(value)}" for key, value in report[title].items()] + [""]
    return "\n".join(lines)


def _table(title: str, columns: Sequence[str], rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = [f"## {title}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(_short(row.get(c, "")) for c in columns) + " |")
    return [*lines, ""]


def _short(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) and math.isfinite(value) else str(value)
