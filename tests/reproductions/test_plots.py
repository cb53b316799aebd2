"""Pictures of reproductions: nothing lies on anything else, and bands are intervals over seeds."""

import itertools
import re

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from scipy import stats

from reproductions._plots import band, panel, reported, ticks
from reproductions.runner import ROOT


def boxes(axes):
    canvas = FigureCanvasAgg(axes.figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    labels = [t for t in axes.get_xticklabels(which="both") if t.get_text()]
    return [label.get_window_extent(renderer) for label in labels], renderer


@pytest.mark.parametrize("values", [(4, 16, 64), (0.25, 0.5, 1, 2), (200, 400, 800, 1600)])
def test_tick_labels_of_a_logarithmic_axis_do_not_overlap(values, tmp_path):
    with panel(tmp_path / "a.png", 1, 4, size=(14, 3.4)) as axes:
        for ax in axes:
            ax.loglog(values, values, "o-", label="a line")
    found, _ = boxes(axes[0])
    assert len(found) == len(values)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(found, 2))


@pytest.mark.parametrize("alike", [True, False])
def test_legends_stand_beside_the_data(alike, tmp_path):
    with panel(tmp_path / "a.png", 1, 2, size=(9, 4)) as axes:
        for k, ax in enumerate(axes):
            for name in ("a long name of a line", "another"):
                ax.plot([1, 2], [1, 2], label=name if alike else f"{name} {k}")
            reported(ax, [1, 2], [2, 1])
    figure = axes[0].figure
    _, renderer = boxes(axes[0])
    legends = [*figure.legends, *(ax.get_legend() for ax in axes if ax.get_legend())]
    assert len(legends) == (1 if alike else 2)
    for legend, ax in itertools.product(legends, axes):
        assert not legend.get_window_extent(renderer).overlaps(ax.get_window_extent(renderer))


def test_a_band_is_the_interval_of_the_mean(tmp_path):
    seeds = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 9.0]])
    with panel(tmp_path / "a.png") as ax:
        band(ax, [1, 2], seeds)
        ticks(ax, [1, 2])
    corners = ax.collections[0].get_paths()[0].vertices[:, 1]
    low, high = stats.t.interval(0.95, 2, seeds.mean(1), stats.sem(seeds, axis=1))
    assert corners.min() == pytest.approx(low.min())
    assert corners.max() == pytest.approx(high.max())


def test_no_bars_on_a_logarithmic_axis_and_no_legend_of_ones_own():
    for file in sorted((ROOT / "reproductions").rglob("*.py")):
        text = file.read_text()
        if file.name != "_plots.py":
            assert ".legend(" not in text, file
            for drawn in re.findall(r"^def _?draw.*?(?=^\S|\Z)", text, re.M | re.S):
                assert not (".bar(" in drawn and "log" in drawn), file
