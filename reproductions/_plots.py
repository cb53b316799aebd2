"""How the reproductions draw: one style, so that a reader learns it once.

Lines are means; a band is the 95 % interval of the mean over seeds (Student's t). What a paper
itself reports is a black cross. Legends stand beside the axes, never on the data.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import (
    AutoLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)
from numpy.typing import ArrayLike
from scipy import stats


@contextlib.contextmanager
def panel(
    file: pathlib.Path, *grid: int, size: tuple[float, float] = (6, 4), **options: Any
) -> Iterator[Any]:
    """Gives axes to draw on, and writes the figure afterwards.

    Args:
      file: the PNG.
      *grid: rows and columns of axes; none: one pair of axes.
      size: width and height in inches; legends come on top of it.
      **options: of ``Figure.subplots``.
    """
    figure = Figure(figsize=size, layout="constrained")
    with matplotlib.rc_context({"lines.markersize": 4}):
        yield figure.subplots(*grid, **options)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, which="major", color="0.92", linewidth=0.7)
        axes.set_axisbelow(True)
        _ticks(axes)
    _legends(figure)
    figure.savefig(file, dpi=150)


def _ticks(axes: Any) -> None:
    """No two labels on one another: on a logarithmic x axis only what was run, if it is little.

    Where only whole numbers were run (rounds, steps), no others.
    """
    if isinstance(axes.xaxis.get_major_locator(), AutoLocator):
        at = [np.asarray(line.get_xdata(), float) for line in axes.get_lines()]
        if all((x == np.round(x)).all() for x in at if len(x) > 2):
            axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    if axes.get_xscale() == "log" and not isinstance(axes.xaxis.get_minor_locator(), NullLocator):
        lines = [np.asarray(line.get_xdata(), float) for line in axes.get_lines()]
        run = sorted({float(x) for line in lines if len(line) > 2 for x in line})
        if 0 < len(run) <= 8:
            ticks(axes, run)
        axes.xaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log" and low > 0:
        axes.yaxis.set_minor_formatter(NullFormatter())
        if high < 300 * low:  # powers of ten alone would be one label, or none
            few = high < 4 * low
            axes.yaxis.set_major_locator(MaxNLocator(6) if few else LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def _legends(figure: Figure) -> None:
    """One at the right if no two axes disagree, else one below each."""
    named = []
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        named.append(dict(zip(labels, handles, strict=True)))
    most = max(named, key=len)
    if all(set(known) <= set(most) for known in named):
        if most:
            width, height = figure.get_size_inches()
            figure.set_size_inches(width + 0.08 * max(map(len, most)) + 0.6, height)
            how: Any = {"loc": "outside right upper", "fontsize": 8, "frameon": False}
            figure.legend(list(most.values()), list(most), **how)
        return
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.1 * max(map(len, named)) + 0.3)
    for axes, known in zip(figure.axes, named, strict=True):
        if known:
            axes.legend(
                list(known.values()),
                list(known),
                loc="upper center",
                bbox_to_anchor=(0.5, -0.2),
                ncols=2,
                fontsize=8,
                frameon=False,
            )


def band(axes: Any, x: ArrayLike, by_seed: Sequence[ArrayLike], **style: Any) -> None:
    """A line of means over seeds, and the interval of the mean where there are two at least.

    Args:
      axes: where.
      x: of each point.
      by_seed: the values of each point's seeds.
      **style: of the line.
    """
    values = [np.asarray(v, float) for v in by_seed]
    mean = np.array([v.mean() for v in values])
    if len(mean) == 1:  # one interval beside the other
        taken = {float(line.get_xdata()[0]) for line in axes.lines if len(line.get_xdata()) == 1}
        x = np.asarray(x, float)
        while float(x[0]) in taken:
            x = np.where(x == 0, 0.04, 1.04 * x)
    (line,) = axes.plot(x, mean, **{"marker": "o"} | style)
    if all(len(v) > 1 for v in values):
        half = [stats.t.ppf(0.975, len(v) - 1) * v.std(ddof=1) / np.sqrt(len(v)) for v in values]
        if len(mean) == 1:
            axes.errorbar(x, mean, half, color=line.get_color(), capsize=3)
        axes.fill_between(x, mean - half, mean + half, color=line.get_color(), alpha=0.15, lw=0)


def reported(axes: Any, x: Sequence[float], y: Sequence[float], label: str = "the paper") -> None:
    """What a paper reports."""
    axes.plot(x, y, "x", color="black", markersize=7, markeredgewidth=1.6, label=label, zorder=5)


def ticks(axes: Any, values: Sequence[float], base: int = 10) -> None:
    """A logarithmic x axis whose ticks are the values that were run, and no others."""
    axes.set_xscale("log", base=base)
    axes.set_xticks(list(values), [f"{v:g}" for v in values])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def columns(rows: Sequence[dict[str, Any]], *names: str) -> list[list[Any]]:
    """The values of all rows under each name."""
    return [[row[name] for row in rows] for name in names]
