"""What a federated run leaves for people: report.json, report.md and a PNG of its curves."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpfl_jax.run.directory import write_atomically

PRIVATE_METRICS_CAVEAT = (
    "what metrics.jsonl and report.json hold under `outside_guarantee`, all timings and rates, and "
    "the training-loss curve of curves.png are computed from private data without noise: do not "
    "publish them"
)
EVALUATION_CAVEAT = {
    "by_subject": "held-out figures are computed without noise on subjects who are not in the "
    "training set: the guarantee does not cover those subjects",
    "by_record": "held-out figures are computed without noise on other records of the training "
    "subjects: the guarantee does not cover them; do not publish them",
}
TUNING_CAVEAT = (
    "if the clip norm, the learning rates, the batch size or other settings were chosen by trying "
    "them on these private data, those trials are not in this epsilon"
)


def write_federated_report(
    directory: pathlib.Path, report: dict[str, Any], metrics: Sequence[dict[str, Any]]
) -> None:
    """Writes report.md, curves.png and, last, report.json (whose status ends the run)."""
    plot_curves(directory / "curves.png", metrics, report.get("name", "run"))
    write_atomically(directory / "report.md", render_markdown(report))
    write_atomically(directory / "report.json", json.dumps(report, indent=2, default=str) + "\n")


def render_markdown(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [f"# {report.get('name', 'run')}: {report['status']} after {report['steps']} rounds"]
    lines += ["", "## Guarantee", "", report["guarantee"], ""]
    lines += ["## Claimed and real", "", "| epsilon over the federation | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in claim_rows(report["claim"])]
    lines += ["", *[f"- {reason}" for reason in report["claim"]["why"]], ""]
    if report["eval"]:
        lines += ["## Held out", "", "| | loss by record | loss by subject | accuracy |"]
        lines += ["|---|---|---|---|"]
        for name, value in report["eval"].items():
            accuracy = value.get("accuracy")
            shown = "" if accuracy is None else f"{accuracy:.4f}"
            lines.append(
                f"| {name} | {value['loss']:.4f} | {value['loss_by_user']:.4f} | {shown} |"
            )
        lines.append("")
    silos = report["silos"]
    lines += ["## Silos", "", "| silo | records | local steps | noise | epsilon alone |"]
    lines += ["|---|---|---|---|---|"]
    shown_silos = silos if len(silos) <= 32 else silos[:16]
    for silo in shown_silos:
        lines.append(
            f"| {silo['silo']} | {silo['records']} | {silo['local_steps']} "
            f"| {_short(silo['noise_multiplier'])} | {_short(silo['epsilon_alone'])} |"
        )
    if len(shown_silos) < len(silos):
        lines.append(f"| ... | {len(silos) - len(shown_silos)} more in report.json | | | |")
    lines.append("")
    for title in ("model", "data", "mechanism", "throughput", "environment"):
        section = report.get(title)
        if section:
            lines += [f"## {title.capitalize()}", ""]
            lines += [f"- {key}: {_short(value)}" for key, value in section.items()] + [""]
    return "\n".join(lines)


def claim_rows(claim: dict[str, Any]) -> list[tuple[str, str]]:
    """Epsilons of a claim (as JSON), each with whose it is."""
    unit, real = claim["unit"], claim["real_epsilon"]
    if unit == "none":
        return [("nobody is protected", "inf")]
    rows = [
        (f"of a {unit}, claimed by the recipe {claim['recipe']}", claim["epsilon"]),
        (f"of a {unit}, of the mechanism as it runs", real),
    ]
    if claim["subject_epsilon"] is not None:
        rows.append(("of a subject with all its records, as it runs", claim["subject_epsilon"]))
    if claim["if_constant"] != real:
        constant = f"of a {unit}, if what follows the private batch were constant"
        rows.append((constant, claim["if_constant"]))
    return [(name, _short(value)) for name, value in rows]


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def plot_curves(path: pathlib.Path, metrics: Sequence[dict[str, Any]], title: str) -> None:
    """Draws held-out loss and accuracy, training loss (marked) and epsilon by round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    evals = [(r["step"], r["eval"]) for r in metrics if "eval" in r]
    rows = [r for r in metrics if "outside_guarantee" in r]
    has_accuracy = any(e.get("accuracy") is not None for _, e in evals)
    figure, axes = plt.subplots(
        1, 3 if has_accuracy else 2, figsize=(11, 3.6), layout="constrained"
    )
    train = [(r["step"], r["outside_guarantee"]["train_loss"]) for r in rows]
    train = [(s, loss) for s, loss in train if loss is not None]
    if train:
        axes[0].plot(*np.array(train).T, color="0.7", lw=1, label="training (not to be published)")
    if evals:
        axes[0].plot(*np.array([(s, e["loss"]) for s, e in evals]).T, "o-", label="held out")
    axes[0].set(xlabel="round", ylabel="loss")
    axes[0].legend(fontsize=8)
    spent = [(r["step"], r["epsilon_spent"]) for r in rows if r["epsilon_spent"] is not None]
    if spent:
        axes[-1].step(*np.array(spent).T, color="C1", where="post")
    axes[-1].set(xlabel="round", ylabel="epsilon spent (upper bound)", ylim=(0, None))
    if has_accuracy:
        axes[1].plot(*np.array([(s, e["accuracy"]) for s, e in evals]).T, "o-", color="C2")
        axes[1].set(xlabel="round", ylabel="held-out accuracy", ylim=(0, 1))
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)
