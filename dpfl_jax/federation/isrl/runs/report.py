"""What an ISRL-DP run leaves for people: report.json, report.md and a PNG of its curves."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from dpfl_jax.config.isrl import IsrlConfig
from dpfl_jax.federation.isrl import bounds
from dpfl_jax.federation.isrl.arms import SiloNoise
from dpfl_jax.federation.isrl.runs.parameters import Parameters, effective_silos
from dpfl_jax.federation.isrl.runs.tasks import Task
from dpfl_jax.federation.report import plot_curves
from dpfl_jax.run.directory import write_atomically


def possible_risk(
    config: IsrlConfig, task: Task, parameters: Parameters, noise: list[SiloNoise]
) -> list[dict[str, Any]]:
    """Excess risk that the theorems allow (constants 1, no logarithms): known before training."""
    if not noise:
        return []
    n = min(z.silo_size for z in noise)
    silos = effective_silos(config.isrl.available, config.data.silos)
    epsilon, delta = min(z.budget.epsilon for z in noise), min(z.budget.delta for z in noise)
    lipschitz, mu = float(parameters.clip_norms.max()), config.model.regularization
    diameter, dim = 2 * config.model.radius, task.dim
    phi = float(parameters.sources["phi"][0])
    if mu:
        upper = bounds.iid_strongly_convex(lipschitz, mu, n, silos, dim, epsilon, delta)
        lower = bounds.lower_strongly_convex(phi, lipschitz, mu, diameter, n, silos, dim, epsilon)
    else:
        upper = bounds.iid_convex(lipschitz, diameter, n, silos, dim, epsilon, delta)
        lower = bounds.lower_convex(phi, lipschitz, diameter, n, silos, dim, epsilon)
    central = bounds.central_convex(phi, lipschitz, diameter, n, silos, dim, epsilon)
    rows = [
        ("this trust model, upper bound (Theorem 2.1)", upper),
        ("this trust model, lower bound (Theorem 2.2)", lower),
        ("a trusted server, convex lower bound", central),
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
