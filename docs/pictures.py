"""The pictures of concepts.md: ``python docs/pictures.py`` writes them into docs/pictures/."""

from __future__ import annotations

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch

from dpfl_jax import accounting
from dpfl_jax.accounting import events

INK, GREY, LIGHT = "#222222", "#9a9a9a", "#e6e6e6"
PEOPLE = ["#3b6fb6", "#d1813a", "#4c9a5b", "#8a63a8"]
PROTECTED = "#c2293b"
plt.rcParams.update({"font.size": 11, "text.color": INK, "axes.labelcolor": INK})


def _bare(ax: Axes, title: str, below: str = "") -> None:
    ax.set_xticks([])
    ax.set_yticks([])
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_title(title, fontsize=13, fontweight="bold", pad=8)
    ax.set_xlabel(below, fontsize=10.5, labelpad=6)


def units() -> Figure:
    """Five privacy units: which records may come or go without being noticed."""
    fig, axes = plt.subplots(1, 5, figsize=(13, 3.7))
    names = [
        ("example", "one row"),
        ("user", "all rows of a person"),
        ("subject", "all rows of a person,\nin every hospital"),
        ("record", "one row, with an epsilon\nof its own (bigger: stricter)"),
        ("silo's record", "one row, from everybody\noutside its hospital"),
    ]
    rows = [3, 2, 4, 3]  # records of the four people
    for ax, (name, below) in zip(axes, names):
        _bare(ax, name, below)
        ax.set(xlim=(-0.7, 4.4), ylim=(-0.8, 3.8), aspect="equal")
        silos = name in ("subject", "silo's record")
        if silos:
            for left in (-0.55, 2.15):
                box = FancyBboxPatch(
                    (left, -0.55), 2.1, 4.1, boxstyle="round,pad=0.05", fc="#f6f6f6", ec=GREY
                )
                ax.add_patch(box)
        rng = np.random.default_rng(2)
        for person, count in enumerate(rows):
            for i in range(count):
                x, y = i * 1.05 + (0.55 if silos and i > 1 else 0), 3 - person
                ringed = {
                    "example": (person, i) == (1, 0),
                    "user": person == 2,
                    "subject": person == 2,
                    "record": (person, i) == (2, 1),
                    "silo's record": (person, i) == (0, 1),
                }[name]
                size = 0.27
                if name == "record":
                    size = rng.choice([0.16, 0.24, 0.34])
                ax.add_patch(Circle((x, y), size, fc=PEOPLE[person], ec="none"))
                if ringed:
                    ax.add_patch(Circle((x, y), size + 0.14, fc="none", ec=PROTECTED, lw=2.5))
        if name == "silo's record":
            ax.plot([1.85] * 2, [-0.75, 3.75], color=PROTECTED, lw=3)
    fig.suptitle(
        "A dot is a row, a colour a person. With or without what is ringed in red,"
        " the trained model is nearly the same.",
        y=0.97,
    )
    fig.tight_layout(rect=(0, 0, 1, 1.0))
    return fig


def sampling() -> Figure:
    """Who takes part in each step: by coin, by person or by row, or in a fixed order."""
    rng = np.random.default_rng(11)
    people, steps = [4, 2, 5, 3], 12
    owner = np.repeat(np.arange(4), people)
    start = np.cumsum([0, *people])
    n = len(owner)
    by_user = np.zeros((n, steps), bool)
    for step in range(steps):
        for person in np.flatnonzero(rng.random(4) < 0.22):
            group = start[person] + rng.permutation(people[person])[:2]
            by_user[group, step] = True
    by_row = rng.random((n, steps)) < 0.18
    kept = np.concatenate([start[p] + np.arange(min(2, people[p])) for p in range(4)])
    by_row[np.setdiff1d(np.arange(n), kept)] = False
    order = rng.permutation(n)
    shuffled = np.zeros((n, steps), bool)
    for i, row in enumerate(np.tile(order, 3)[: 3 * steps]):
        shuffled[row, i // 3] = True
    panels = [
        (
            by_user,
            "user-level sampling (ULS)",
            "a coin for each person in each step;\nthen up to 2 of their rows",
        ),
        (
            by_row,
            "example-level sampling (ELS)",
            "at most 2 rows of a person (others: pale);\na coin for each row in each step",
        ),
        (shuffled, "shuffled batches", "everybody's turn comes for sure:\nno coin to hide behind"),
    ]
    fig, axes = plt.subplots(1, 3, figsize=(13, 4.7))
    for ax, (took, title, below) in zip(axes, panels):
        _bare(ax, title, below)
        ax.set(xlim=(-1.9, steps), ylim=(n + 0.1, -1.2))
        for row in range(n):
            left_out = title.startswith("example") and row not in kept
            for step in range(steps):
                colour = PEOPLE[owner[row]] if took[row, step] else LIGHT
                ax.add_patch(
                    plt.Rectangle(
                        (step + 0.08, row + 0.08),
                        0.84,
                        0.84,
                        fc=colour,
                        alpha=0.35 if left_out else 1,
                    )
                )
        for person in range(4):
            ax.text(
                -0.3, start[person] + people[person] / 2, f"person {person + 1}",
                ha="right", va="center", rotation=90, fontsize=7.5, color=PEOPLE[person],
            )  # fmt: skip
            ax.plot(
                [-0.15] * 2,
                [start[person] + 0.1, start[person + 1] - 0.1],
                color=PEOPLE[person],
                lw=3,
            )
        ax.text(steps / 2, -0.35, "steps of training  →", ha="center", fontsize=9.5)
    fig.tight_layout()
    return fig


def clipping() -> Figure:
    """Each gradient is shortened to the circle, then noise wider than the circle is added."""
    rng = np.random.default_rng(3)
    angles = np.array([0.3, 1.0, 1.7, 2.6])
    lengths = np.array([0.7, 2.6, 0.9, 1.7])
    arrows = np.stack([lengths * np.cos(angles), lengths * np.sin(angles)], 1)
    bounded = arrows / np.maximum(1.0, lengths)[:, None]
    fig, axes = plt.subplots(1, 3, figsize=(13, 4.6))
    titles = [
        ("1. each person pulls", "an arrow is a person's gradient;\nlong ones would be noticed"),
        ("2. clip", "none longer than the clip norm (circle):\nnobody moves the sum by more"),
        (
            "3. add noise",
            "all that is seen is one dot: with the orange\nperson (black), or without (orange)?",
        ),
    ]  # fmt: skip
    for ax, (title, below) in zip(axes, titles):
        _bare(ax, title, below)
        ax.set_aspect("equal")

    def arrow(ax: Axes, xy: np.ndarray, colour: str, width: float = 2.6) -> None:
        ax.annotate(
            "", xy=xy, xytext=(0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "lw": width}
        )

    for ax, what in zip(axes[:2], (arrows, bounded)):
        ax.add_patch(Circle((0, 0), 1, fc="#fafafa", ec=GREY, ls="--", lw=1.6))
        for xy, colour in zip(what, PEOPLE):
            arrow(ax, xy, colour)
        ax.set(xlim=(-2.1, 2.1), ylim=(-1.2, 2.7))
    for cut, xy, colour in zip(bounded, arrows, PEOPLE):
        axes[1].plot([cut[0], xy[0]], [cut[1], xy[1]], ":", color=colour)
    ax = axes[2]
    total, without = bounded.sum(0), bounded.sum(0) - bounded[1]
    for mean, colour in ((without, PEOPLE[1]), (total, INK)):
        dots = mean[:, None] + 1.5 * rng.normal(size=(2, 500))
        ax.scatter(*dots, s=6, color=colour, alpha=0.35, lw=0)
        arrow(ax, mean, colour, 3)
    ax.set(xlim=(-4.8, 5), ylim=(-2.6, 6.4))
    fig.tight_layout()
    return fig


def budget() -> Figure:
    """What an attacker can tell apart, and how epsilon grows with the steps."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(13, 4.4))
    x = np.linspace(-4, 5, 400)
    for centre, colour, name in ((0.0, PEOPLE[0], "without me"), (0.7, PEOPLE[1], "with me")):
        y = np.exp(-((x - centre) ** 2) / 2)
        left.plot(x, y, color=colour, lw=2.5)
        left.fill_between(x, y, color=colour, alpha=0.15)
        at = -2.2 if centre == 0 else 2.7
        left.text(at, 0.62, name, color=colour, fontsize=12, ha="center", fontweight="bold")
    _bare(
        left,
        "what an attacker sees of one training",
        "they may see any one point: which curve is it from?",
    )
    left.set_ylim(0, 1.12)
    steps = np.unique(np.round(np.geomspace(1, 1000, 24)).astype(int))
    runs = [
        (
            "everybody in every step",
            events.uls(noise_multiplier=4.0, sampling_prob=1.0, steps=1),
            INK,
        ),
        (
            "a coin: each person in 1 of 20 steps",
            events.uls(noise_multiplier=4.0, sampling_prob=0.05, steps=1),
            PROTECTED,
        ),
    ]
    for name, event, colour in runs:
        curve = [accounting.epsilon(_repeated(event, int(t)), 1e-6) for t in steps]
        right.plot(steps, curve, color=colour, lw=2.5)
        said = f"{name}: {curve[-1]:.1f}"
        right.text(960, curve[-1] + 1.2, said, color=colour, ha="right", fontsize=11)
    right.set(
        xlabel="steps of training", ylabel="epsilon (delta 1e-6)", ylim=(0, 78), xlim=(0, 1000)
    )
    right.set_title(
        "what it has cost, so far (noise 4 times the clip norm)",
        fontsize=13,
        fontweight="bold",
        pad=8,
    )
    for side in ("top", "right"):
        right.spines[side].set_visible(False)
    fig.tight_layout()
    return fig


def _repeated(event: object, steps: int) -> object:
    from dp_accounting import dp_event

    return dp_event.SelfComposedDpEvent(event, steps)


def main(folder: pathlib.Path) -> None:
    """Writes all pictures."""
    folder.mkdir(exist_ok=True)
    for draw in (units, sampling, clipping, budget):
        fig = draw()
        fig.savefig(folder / f"{draw.__name__}.png", dpi=110, metadata={"Software": None})
        plt.close(fig)


if __name__ == "__main__":
    main(pathlib.Path(__file__).with_name("pictures"))
