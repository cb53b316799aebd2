"""Figures of ``dpfl plan`` and ``dpfl sweep``."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpfl_jax.errors import extra
from dpfl_jax.files import save_figure
from dpfl_jax.planning.candidates import CANDIDATES, draws_examples, plain

with extra("plots", "a picture"):
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle


def draw_heat_map(planner: Any, plan: Any, file: pathlib.Path) -> None:
    """Draws the noise of ULS over group and cohort size, with the budget and the best option."""
    groups = sorted(planner.sensitivities.user)
    top = int(math.log2(min(planner.users.num_users, 4 * plan.budget)))
    cohorts = [2**k for k in range(max(0, top - 5), top + 1)]
    noise = {(o.group_size, o.size): o.noise for o in planner.heat_map(cohorts)}
    # The recommendation gets a row on top: it may be another mechanism, or a cohort not shown.
    best, rows = plan.best, [[noise[g, m] for m in cohorts] for g in groups]
    image = np.array([*rows, [best.noise] * len(cohorts)])
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    ax = figure.subplots()
    norm = LogNorm(image.min(), image.max())
    shown = ax.imshow(image, origin="lower", cmap="viridis_r", aspect="auto", norm=norm)

    def write(column: float, row: int, text: str, **more: Any) -> None:
        dark = norm(image[row, 0 if row == len(groups) else int(column)]) > 0.5
        color = "white" if dark else "black"
        ax.text(column, row, text, ha="center", va="center", color=color, fontsize=8, **more)

    for i, g in enumerate(groups):
        for j, m in enumerate(cohorts):
            write(j, i, f"{image[i, j]:.2g}")
            if g * m == plan.budget:
                ax.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, linewidth=2))
    size = f"group size {best.group_size}, {best.size} a step: noise {best.noise:.3g}"
    write(
        (len(cohorts) - 1) / 2, len(groups), f"{CANDIDATES[best.kind].name}, {size}", weight="bold"
    )
    ax.axhline(len(groups) - 0.5, color="white", linewidth=4)
    ax.set_xticks(range(len(cohorts)), [str(m) for m in cohorts])
    ax.set_yticks(range(len(groups) + 1), [*map(str, groups), "recommended"])
    ax.set(xlabel="cohort size M", ylabel="group size G")
    drawn = (o for o in plan.options if draws_examples(o.kind))
    rival = min(drawn, key=lambda o: o.noise, default=None)
    name = CANDIDATES[plain(examples=False)].name
    title = f"{name}: noise on the averaged gradient; outlined: budget {plan.budget}"
    if rival is not None:
        name = CANDIDATES[rival.kind].name
        title += f"\n{name} at that budget: {rival.noise:.3g} (G = {rival.group_size})"
    ax.set_title(title, fontsize=9)
    figure.colorbar(shown, label="noise on the averaged gradient")
    save_figure(figure, file)


def draw_law(law: Any, file: pathlib.Path) -> None:
    """Draws a law with its runs: loss over noise for four numbers of steps, and fitted losses."""
    figure = Figure(figsize=(10, 4.2))
    left, right = figure.subplots(1, 2)
    steps = np.array([row["steps"] for row in law.rows])
    size = float(np.median([row["size"] for row in law.rows]))
    ratios = [row["ratio"] for row in law.rows if row["ratio"] > 0]
    grid = np.geomspace(min(ratios), max(ratios), 60)
    norm = law.sensitivities
    of_an_example = {"kind": plain(examples=True), "group_size": 1}
    span = math.log(steps.max() / steps.min())

    def colour(t: float) -> Any:
        return colormaps["viridis"](0.9 * math.log(t / steps.min()) / span)

    for t in np.unique(np.geomspace(steps.min(), steps.max(), 4).round()):
        cells = [{**of_an_example, "size": size, "steps": t, "ratio": r} for r in grid]
        fit = law.predict(cells)
        left.plot(grid, [f["loss"] for f in fit], color=colour(t), label=f"{t:.0f} steps")
        low, high = ([f[k] for f in fit] for k in ("low", "high"))
        left.fill_between(grid, low, high, color=colour(t), alpha=0.15, linewidth=0)
    marks = {plain(examples=True): "o", plain(examples=False): "s"}
    for row in law.rows:
        at = max(row["ratio"], min(ratios)) * norm.norm(row["kind"], row["group_size"])
        left.plot(
            at / norm.example, row["loss"], marks[row["kind"]], color=colour(row["steps"]), ms=5
        )
    left.axhline(law.about["initial"], color="grey", linestyle=":", label="before training")
    left.set(xscale="log", xlabel="noise-to-batch ratio (of an example)", ylabel="held-out loss")
    left.set_title(f"law at batch {size:.0f}; dots: runs (square: users)", fontsize=9)
    left.legend(fontsize=7)
    measured = np.array([row["loss"] for row in law.rows])
    fit = law.predict(law.rows)
    value = np.array([f["loss"] for f in fit])
    bars = np.abs(np.array([[f["low"], f["high"]] for f in fit]).T - value)
    right.errorbar(measured, value, bars, fmt="o", ms=4, elinewidth=1, alpha=0.8)
    ends = [measured.min(), measured.max()]
    right.plot(ends, ends, color="grey", linewidth=1)
    right.set(xlabel="measured loss", ylabel="fitted loss")
    right.set_title("PUBLIC data, noise not accounted for", fontsize=9)
    figure.tight_layout()
    save_figure(figure, file)


def draw_answer(answer: dict[str, Any], title: str, file: pathlib.Path) -> None:
    """Draws the curves of an answer, with their bands."""
    figure = Figure(figsize=(7, 4.5))
    ax = figure.subplots()
    for label, points in answer["series"].items():
        points = [p for p in points if p["cell"] is not None]
        x = [p["x"] for p in points]
        (line,) = ax.plot(x, [p["score"] for p in points], "o-", label=label)
        low, high = ([p[k] for p in points] for k in ("low", "high"))
        ax.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    for i, (label, value) in enumerate(answer["lines"].items()):
        ax.axhline(value, color="grey", linestyle=[":", "--"][i % 2], label=label)
    ax.set(xscale="log", xlabel=answer["x"], ylabel=answer["y"])
    ticks = [p["x"] for p in next(iter(answer["series"].values()))]
    ax.set_xticks(ticks, [f"{x:,.4g}" for x in ticks])
    ax.minorticks_off()
    if answer["y"].startswith("noise"):
        ax.set_yscale("log")
    ax.set_title(title, fontsize=10)
    ax.legend(fontsize=8)
    figure.tight_layout()
    save_figure(figure, file)


def draw_caps(options: list[Any], file: pathlib.Path) -> None:
    """Draws noise over signal against the cap on records, a line for each mechanism."""
    figure = Figure(figsize=(7, 4.2))
    ax = figure.subplots()
    for kind in sorted({option.kind for option in options}):
        same = sorted((c for c in options if c.kind == kind), key=lambda c: c.cap)
        ax.plot([c.cap for c in same], [c.ratio for c in same], "o-", label=kind)
    ax.axhline(1.0, color="0.5", linestyle=":", linewidth=1, label="noise = signal")
    # Mechanisms whose cap holds per step keep all records: show the least share.
    caps = {o.cap: min(c.kept for c in options if c.cap == o.cap) for o in options}
    ax.set(xscale="log", yscale="log", xlabel="cap (share of the records that it keeps)")
    ax.set_ylabel("noise over the largest signal (lower is better)")
    ax.set_xticks(list(caps), [f"{cap}\n({kept:.0%})" for cap, kept in caps.items()])
    ax.minorticks_off()
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    save_figure(figure, file)


def draw_sweep(best: Sequence[Mapping[str, Any]], axes: Sequence[str], file: pathlib.Path) -> None:
    """Draws the best loss over the axes that are not tuned.

    The axes ``group_size`` and ``cohort_size`` alone make a heat map. Otherwise the first numeric
    axis is x, with a line for every combination of the others, and a band if there are repeats.
    """
    figure = Figure(figsize=(6.5, 4.5))
    ax = figure.subplots()
    plane = ("group_size", "cohort_size")
    if set(axes) == set(plane):
        groups, cohorts = (sorted({row[axis] for row in best}) for axis in plane)
        image = np.full((len(groups), len(cohorts)), np.nan)
        for row in best:
            place = groups.index(row["group_size"]), cohorts.index(row["cohort_size"])
            image[place] = row["loss"]
            box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1.5}
            ax.text(*place[::-1], f"{row['loss']:.3f}", ha="center", va="center", size=7, bbox=box)
        shown = ax.imshow(image, origin="lower", cmap="viridis_r", aspect="auto")
        ax.set_xticks(range(len(cohorts)), [str(m) for m in cohorts])
        ax.set_yticks(range(len(groups)), [str(g) for g in groups])
        ax.set(xlabel="cohort size M", ylabel="group size G")
        figure.colorbar(shown, label="held-out loss")
    elif best:
        numeric = [a for a in axes if isinstance(best[0][a], int | float)]
        x_axis = next((a for a in numeric if len({row[a] for row in best}) > 1), axes[0])
        others = [a for a in axes if a != x_axis]
        for key in sorted({tuple(row[a] for a in others) for row in best}, key=str):
            part = [row for row in best if tuple(row[a] for a in others) == key]
            part.sort(key=lambda row: row[x_axis])
            x = [row[x_axis] for row in part]
            label = ", ".join(f"{a} {v}" for a, v in zip(others, key)) or None
            (line,) = ax.plot(x, [row["loss"] for row in part], "o-", label=label)
            if all(row["low"] is not None for row in part):
                low, high = ([row[k] for row in part] for k in ("low", "high"))
                ax.fill_between(x, low, high, alpha=0.2, color=line.get_color())
        if x_axis in numeric and min(row[x_axis] for row in best) > 0:
            ax.set_xscale("log")
        ax.set(xlabel=x_axis, ylabel="held-out loss")
        if others:
            ax.legend(fontsize=7)
    if any(row["seed"] is not None for row in best):
        ax.set_title("sampling and noise from public seeds", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
