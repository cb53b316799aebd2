"""How the reproductions draw."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure


@contextlib.contextmanager
def panel(
    file: pathlib.Path, *grid: int, size: tuple[float, float] = (6, 4), **options: Any
) -> Iterator[Any]:
    """Gives axes to draw on, and writes the figure afterwards.

    Args:
      file: the PNG.
      *grid: rows and columns of axes; none: one pair of axes.
      size: width and height in inches.
      **options: of ``Figure.subplots``.
    """
    figure = Figure(figsize=size, layout="constrained")
    yield figure.subplots(*grid, **options)
    figure.savefig(file, dpi=150)


def columns(rows: Sequence[dict[str, Any]], *names: str) -> list[list[Any]]:
    """The values of all rows under each name."""
    return [[row[name] for row in rows] for name in names]
