"""The claim and what an attack achieved, in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scipy import stats

from dpfl_jax.accounting import plot_attacks
from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.evidence.proof import Audit

_SEVERAL = 10  # false alarms: rates of fewer are chance


def plot_audits(audits: Sequence[Audit]) -> Any:
    """Draws each claim's trade-off curve, and the attack's rates with what is sure of them.

    Returns:
      A figure of Matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * len(audits), 4.2), layout="constrained")
    axes = figure.subplots(1, len(audits), squeeze=False)
    for ax, found in zip(axes[0], audits, strict=True):
        plot_attacks(ax, found.curve)
        false, out, right, inside = found.alarms
        points = found.points[found.points[:, 0] * out >= _SEVERAL]
        ax.plot(points[:, 0], points[:, 1], color="#c2571a", lw=1.2, label="this attack")
        level = (1 - found.confidence) / 2
        low = stats.beta.ppf(level, right, inside - right + 1) if right else 0.0
        high = stats.beta.ppf(1 - level, false + 1, max(out - false, 1e-9))
        ax.errorbar(
            [max(false / out, 1e-4)],
            [right / inside],
            xerr=[[0], [max(high - max(false / out, 1e-4), 0)]],
            yerr=[[max(right / inside - low, 0)], [0]],
            fmt="o",
            ms=4,
            color="#c2571a",
            label="what the proof rests on",
        )
        verdict = "REFUTED" if found.exceeds else f"proved {found.proved:.3g}"
        claimed = rounded_up(found.claimed, 3)
        ax.set_title(f"{found.name}: epsilon {claimed} claimed, {verdict}", fontsize=10)
        ax.legend(loc="best", fontsize=8)
    return figure
