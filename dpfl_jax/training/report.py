"""What a run leaves for people: report.json, report.md and a PNG of the losses."""

from __future__ import annotations

import json
import math
import pathlib
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np

from dpfl_jax import __version__
from dpfl_jax.run.directory import FINISHED, write_atomically
from dpfl_jax.training.loop import FitResult

PRIVATE_METRICS_CAVEAT = (
    "what metrics.jsonl and report.json hold under `outside_guarantee`, all timings and rates, and "
    "the training-loss curve of loss.png are computed from private data without noise: do not "
    "publish them"
)
EVALUATION_CAVEAT = (
    "held-out losses are computed without noise on users who are not in the training set: the "
    "guarantee does not cover those users"
)
WITHIN_USER_CAVEAT = (
    "held-out losses are computed without noise on examples set aside from the training users "
    "themselves: they are outside the guarantee, and the model's choice by them would be too"
)
BASE_CAVEAT = (
    "the checkpoint that training started from is taken as public: nobody whose data it was made "
    "of is protected by this guarantee, whether or not they are users here too"
)
TUNING_CAVEAT = (
    "if the clip norm, the learning rate or other settings were chosen by trying them on these "
    "private data, those trials are not in this epsilon"
)


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


def build_report(result: FitResult, **sections: Any) -> dict[str, Any]:
    """Returns the content of report.json.

    Args:
      result: of ``fit``.
      **sections: further top-level entries (model, data, pretrain, baselines, ...).
    """
    evaluation = {
        name: value.to_json()
        for name, value in (("initial", result.initial), ("final", result.final))
        if value is not None
    }
    last_raw = [row["outside_guarantee"] for row in result.metrics if "outside_guarantee" in row]
    return {
        "status": FINISHED if result.interrupted is None else "interrupted",
        "steps": result.steps,
        "privacy": result.guarantee.to_json(),
        "guarantee": str(result.guarantee),
        "eval": evaluation,
        "throughput": {
            "examples_per_s": _rate(result.examples, result.seconds),
            "tokens_per_s": _rate(result.tokens, result.seconds),
        },
        "clipping": result.clipping,
        "outside_guarantee": {
            "nonfinite_units": sum(raw["nonfinite_units"] for raw in last_raw),
            "final_train_loss": last_raw[-1]["train_loss"] if last_raw else None,
        },
        **sections,
        "environment": environment(),
    }


def _rate(amount: int, seconds: float) -> float | None:
    return round(amount / seconds, 1) if seconds > 0 else None


def write_report(
    directory: pathlib.Path, report: dict[str, Any], metrics: Sequence[dict[str, Any]]
) -> None:
    """Writes report.md, loss.png and, last, report.json (whose status ends the run)."""
    plot_losses(directory / "loss.png", metrics, report)
    write_atomically(directory / "report.md", render_markdown(report))
    write_atomically(directory / "report.json", json.dumps(report, indent=2, default=str) + "\n")


def with_perplexity(evaluation: dict[str, Any]) -> dict[str, Any]:
    """An evaluation of a language model (losses in nats per token) with perplexities."""
    return {
        **evaluation,
        "perplexity": _exp(evaluation["loss"]),
        "perplexity_by_user": _exp(evaluation["loss_by_user"]),
    }


def _exp(loss: float) -> float | None:
    return math.exp(loss) if loss < 700 else None  # NaN and overflow have no perplexity


def render_markdown(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [f"# {report.get('name', 'run')}: {report['status']} after {report['steps']} steps", ""]
    lines += ["## Guarantee", "", report["guarantee"], ""]
    evaluation = report["eval"]
    if evaluation:
        spoken = any("perplexity" in value for value in evaluation.values())
        more = " perplexity |" if spoken else ""
        lines += ["## Held-out users", "", "| | loss by example | loss by user | users |" + more]
        lines += ["|---|---|---|---|" + "---|" * spoken]
        names = {"initial": "before private training", "final": "after private training"}
        for name, value in evaluation.items():
            lines.append(
                f"| {names[name]} | {value['loss']:.4f} | {value['loss_by_user']:.4f} "
                f"| {value['users']} |" + (f" {_short(value['perplexity'])} |" if spoken else "")
            )
        for name, value in report.get("baselines", {}).items():
            lines.append(f"| {name} | {value['loss']:.4f} | {value['loss_by_user']:.4f} | |")
        lines.append("")
    if clipping := report.get("clipping"):
        lines += ["## Clipping", ""]
        lines += [f"- {clipping[k]}" for k in ("summary", "warning") if clipping[k]] + [""]
    for title in (
        "personalization",
        "model",
        "data",
        "mechanism",
        "pretrain",
        "throughput",
        "environment",
    ):
        section = report.get(title)
        if section:
            lines += [f"## {title.capitalize()}", ""]
            lines += [f"- {key}: {_short(value)}" for key, value in section.items()] + [""]
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def plot_losses(
    path: pathlib.Path, metrics: Sequence[dict[str, Any]], report: dict[str, Any]
) -> None:
    """Draws training loss (marked as outside the guarantee), held-out loss and epsilon."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    rows = [r for r in metrics if "outside_guarantee" in r]
    train = [(r["step"], r["outside_guarantee"]["train_loss"]) for r in rows]
    train = [(s, loss) for s, loss in train if loss is not None]
    if train:
        steps, losses = np.array(train).T
        axes.plot(steps, losses, color="0.7", lw=1, label="training (outside the guarantee)")
    held_out = [(r["step"], r["eval"]["loss"]) for r in metrics if "eval" in r]
    if held_out:
        steps, losses = np.array(held_out).T
        axes.plot(steps, losses, "o-", color="C0", label="held-out users")
    for i, (name, value) in enumerate(report.get("baselines", {}).items()):
        axes.axhline(value["loss"], color=f"C{i + 2}", ls=":", label=name)
    axes.set_xlabel("private step")
    axes.set_ylabel("loss (nats per token)")
    spent = [(r["step"], r["epsilon_spent"]) for r in rows if r["epsilon_spent"] is not None]
    if spent:
        other = axes.twinx()
        steps, epsilons = np.array(spent).T
        other.step(steps, epsilons, color="C1", lw=1, where="post", label="epsilon spent")
        other.set_ylabel("epsilon spent (upper bound)", color="C1")
        other.set_ylim(0)
    axes.legend(loc="best", fontsize=8)
    axes.set_title(report.get("name", "run"))
    figure.savefig(path, dpi=130)
    plt.close(figure)
