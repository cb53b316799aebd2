"""Epsilon of a user by the mixture of Gaussians and by black-box group privacy (Figure 1)."""

from __future__ import annotations

import math
from typing import Any

from dpfl_jax import accounting
from dpfl_jax.accounting import events
from dpfl_jax.accounting.closed_forms import black_box_epsilon
from reproductions._plots import columns, panel, ticks
from reproductions.registry import Claim, Outcome, Settings

TITLE = "epsilon of a user over the group size: mixture of Gaussians against black box"
SOURCE = "Charles et al. 2024, section 2, Figure 1: T = 2000, p = 0.01, delta = 1e-6"

STEPS, PROB, DELTA = 2000, 1e-2, 1e-6
SIGMAS = (0.5, 1.0, 2.0, 4.0, 8.0)
GROUPS = (1, 2, 4, 8, 16, 32)
USELESS = 10_000  # an epsilon above which an accountant is said to have diverged


def mixture(sigma: float, group: int) -> float:
    """Theorem 1: tight for one user of ``group`` examples."""
    return accounting.epsilon(events.els(sigma, PROB, group, STEPS), DELTA)


def black_box(sigma: float, group: int) -> float:
    """The generic lemma on example-level accounting: by losses or Renyi, what is less."""
    event = events.poisson(sigma, PROB, STEPS)
    return min(black_box_epsilon(event, group, DELTA, accountant=by) for by in ("pld", "rdp"))


def run(settings: Settings) -> Outcome:
    """Computes both curves."""
    sigmas, groups = ((1.0, 4.0), GROUPS[:5]) if settings.quick else (SIGMAS, GROUPS)
    rows: list[dict[str, Any]] = []
    for sigma in sigmas:
        with settings.console.status(f"sigma {sigma:g}"):
            rows += [
                {
                    "sigma": sigma,
                    "group_size": group,
                    "mixture": mixture(sigma, group),
                    "black_box": black_box(sigma, group),
                }
                for group in groups
            ]
    file = settings.out / "userlevel-figure-1.png"
    _draw(rows, groups, file)
    notes = [
        "the paper names sigma 0.5 and 1 only, and does not print its black box: here the tightest "
        "form of the lemma on one example's accounting, by privacy-loss distributions or (in log "
        "space) by Renyi divergences, whichever is less"
    ]
    return Outcome(_claims(rows, sigmas, groups), [file], rows, notes)


def _claims(
    rows: list[dict[str, Any]], sigmas: tuple[float, ...], groups: tuple[int, ...]
) -> list[Claim]:
    below = [r["mixture"] < r["black_box"] for r in rows if r["group_size"] > 1]
    at = {(r["sigma"], r["group_size"]): r for r in rows}
    most = groups[-1]
    # A log-log slope of 1 is linear; doubling the group squares an exponential.
    doubled = math.log(most / groups[0])
    slopes = {
        s: math.log(at[s, most]["mixture"] / at[s, groups[0]]["mixture"]) / doubled for s in sigmas
    }
    claims = [
        Claim(
            "the mixture's epsilon is below the black box's for every group of more than one",
            f"{sum(below)} of {len(below)}",
            f"{len(below)} of {len(below)}",
            all(below),
            source="paper",
        ),
        Claim(
            "in some settings the mixture's epsilon grows near-linearly in the group size",
            ", ".join(f"sigma {s:g}: {slope:.2f}" for s, slope in slopes.items()),
            "log-log slopes, some within 0.15 of 1",
            any(abs(slope - 1) <= 0.15 for slope in slopes.values()),
            f"from G = {groups[0]} to {most}",
            source="paper",
        ),
    ]
    for sigma in sigmas:
        black = [at[sigma, g]["black_box"] for g in groups]
        finite = [at[sigma, g] for g in groups if math.isfinite(at[sigma, g]["black_box"])]
        if len(finite) > 1:
            before, last = finite[-2:]
            grown = [last[kind] / before[kind] for kind in ("black_box", "mixture")]
            claims.append(
                Claim(
                    f"at sigma {sigma:g} the black box grows faster than the mixture",
                    [round(ratio, 2) for ratio in grown],
                    "the first is larger",
                    grown[0] > grown[1],
                    f"from G = {before['group_size']} to {last['group_size']}: both epsilons over "
                    "what they were; the paper: exponentially",
                    source="ours",
                )
            )
        if sigma <= 1:
            first = next((g for g, value in zip(groups, black) if value > USELESS), None)
            claims.append(
                Claim(
                    f"at sigma {sigma:g} the black box diverges for large groups",
                    f"{max(black):.3g} at G = {most}",
                    f"above {USELESS:,}",
                    first is not None,
                    f"above it from G = {first} on; finite, by Renyi orders up to 4,000"
                    if first
                    else "",
                    source="paper",
                )
            )
    return claims


def _draw(rows: list[dict[str, Any]], groups: tuple[int, ...], file: Any) -> None:
    with panel(file) as ax:
        for k, sigma in enumerate(sorted({r["sigma"] for r in rows})):
            part = [r for r in rows if r["sigma"] == sigma]
            style: dict[str, Any] = {"color": f"C{k}", "marker": "o", "markersize": 4}
            ax.plot(
                *columns(part, "group_size", "mixture"), label=f"mixture, σ = {sigma:g}", **style
            )
            some = [r for r in part if math.isfinite(r["black_box"])]
            label = f"black box, σ = {sigma:g}"
            ax.plot(*columns(some, "group_size", "black_box"), "--", label=label, **style)
        ticks(ax, groups, base=2)
        ax.set(yscale="log", xlabel="group size G", ylabel="epsilon of a user")
