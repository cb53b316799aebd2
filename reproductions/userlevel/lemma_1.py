"""Conjecture 1 and Lemma 1: ELS needs at most K times ULS's noise at equal sampling."""

from __future__ import annotations

import itertools
from typing import Any

from dpfl_jax import accounting
from dpfl_jax.accounting import events
from reproductions._plots import columns, panel
from reproductions.registry import Claim, Outcome, Settings
from reproductions.userlevel._closed_forms import lemma_1_holds

TITLE = "Conjecture 1 and Lemma 1 over a grid"
SOURCE = "Charles et al. 2024, Conjecture 1 and Lemma 1 (Appendix C)"


DELTA = 1e-6
# epsilon, delta, T, p, K: close to delta = 1 - (1 - p)^T, from which on ULS needs no noise at all,
# as whether a user is sampled is no secret worth more than delta. ELS needs some.
LARGE_DELTA = (0.1, 0.09, 1, 0.1, 16)


def _noise(epsilon: float, steps: int, prob: float, size: int, delta: float = DELTA) -> float:
    return accounting.calibrate_noise_multiplier(
        lambda s: events.els(s, prob, size, steps), epsilon, delta
    )


def run(settings: Settings) -> Outcome:
    """Calibrates both at every point of the grid."""
    from rich.progress import track

    grid = list(
        itertools.product(
            (0.5, 2.0, 8.0),
            (10, 100, 1000),
            (1e-3, 1e-2, 1e-1, 0.5),
            (2, 8) if settings.quick else (2, 8, 32),
        )
    )
    rows: list[dict[str, Any]] = []
    for epsilon, steps, prob, size in track(grid, "Conjecture 1", console=settings.console):
        uls = _noise(epsilon, steps, prob, 1)
        els = _noise(epsilon, steps, prob, size)
        rows.append(
            {
                "epsilon": epsilon,
                "steps": steps,
                "prob": prob,
                "group_size": size,
                "ratio": els / (size * uls),
            }
        )
    worst = max(r["ratio"] for r in rows)
    orders = [
        (a, k, s, p)
        for a in (2, 4, 8, 16)
        for k in (2, 8, 32)
        for s in (0.5, 1.0, 4.0)
        for p in (0.001, 0.01, 0.1)
    ]
    held = [lemma_1_holds(a, s, k, p) for a, k, s, p in orders]
    claims = [
        Claim(
            f"Conjecture 1 at delta {DELTA:g}: sigma_ELS <= K sigma_ULS (largest ratio)",
            round(worst, 5),
            "<= 1",
            worst <= 1.0 + 2e-4,
            f"{len(rows)} points; within 0.02 % for the discretisation",
            source="paper",
        ),
        _counterexample(),
        Claim(
            "Lemma 1: one-sided Renyi divergences of one step, at integer orders",
            f"{sum(held)} of {len(held)}",
            f"{len(held)} of {len(held)}",
            all(held),
            source="paper",
        ),
    ]
    file = settings.out / "userlevel-lemma-1.png"
    _draw(rows, file)
    return Outcome(claims, [file], rows)


def _counterexample() -> Claim:
    """That the conjecture is false for a delta that nobody would choose."""
    epsilon, delta, steps, prob, size = LARGE_DELTA
    uls, els = (_noise(epsilon, steps, prob, group, delta) for group in (1, size))
    return Claim(
        "Conjecture 1, for all parameters: sigma_ELS <= K sigma_ULS",
        f"{els:.4g} and {size} * {uls:.4g}",
        "sigma_ELS <= K sigma_ULS",
        els <= size * uls,
        f"at epsilon {epsilon:g}, delta {delta:g}, p = {prob:g}, K = {size}, T = {steps}; the "
        "paper's deltas are far smaller",
        source="paper",
    )


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file) as ax:
        for size in sorted({r["group_size"] for r in rows}):
            part = [r for r in rows if r["group_size"] == size]
            ax.semilogx(*columns(part, "prob", "ratio"), "o", label=f"K = {size}")
        ax.axhline(1.0, color="black", linewidth=0.8)
        ax.set(xlabel="sampling probability", ylabel="sigma_ELS / (K sigma_ULS)")
