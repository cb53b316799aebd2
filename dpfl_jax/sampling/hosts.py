"""Sharing a draw among hosts: every host computes the same draw and reads only its part.

A step's units fill rows of a global buffer [rows, row]: unit i lies in row i // row, column
i % row. Each host reads the columns of its own devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dpfl_jax.sampling.base import Draw


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a draw that one host reads.

    Attributes:
      slots: int64 [rows, columns], index into the draw's units; -1 where there is padding.
      positions: int64 [rows, columns] or [rows, columns, group_size], store positions; -1 for none.
    """

    slots: np.ndarray
    positions: np.ndarray


def share_of(
    draw: Draw, row: int, columns: Sequence[int] | np.ndarray, rows: int | None = None
) -> Share:
    """Returns the units of some columns of the global buffer.

    Args:
      draw: the whole draw (every host has it: it costs no reading).
      row: units per row over all hosts.
      columns: the columns of this host, increasing.
      rows: rows of the buffer; default as many as the draw fills.

    Raises:
      ValueError: if the columns lie outside the row or the draw does not fit.
    """
    needed = -(-draw.size // row)
    rows = needed if rows is None else rows
    chosen = np.asarray(columns, dtype=np.int64)
    if chosen.size and not (chosen[0] >= 0 and chosen[-1] < row and (np.diff(chosen) > 0).all()):
        raise ValueError(f"columns {columns} lie outside a row of {row}, or do not increase")
    if rows < needed:
        raise ValueError(f"{draw.size} units do not fit into {rows} rows of {row}")
    slots = np.arange(rows, dtype=np.int64)[:, None] * row + chosen
    real = slots < draw.size
    slots = np.where(real, slots, -1)
    positions = np.full((*slots.shape, *draw.positions.shape[1:]), -1, np.int64)
    positions[real] = draw.positions[slots[real]]
    return Share(slots, positions)
