"""Sequence packing: several short examples in one row of tokens, and rows of a few lengths.

A unit's examples are laid one after another into as few rows as hold them. Each token says which
example it belongs to; attention, beginning-of-sequence token and positions start anew with each
example (``Transformer``). The sampler decides which examples a unit has; packing changes nothing.

Rows come in a few shapes, one compiled program each. They are chosen from the lengths of some
examples, and a unit's lengths decide its shape: time and memory reveal something about lengths, as
they do about the number of units.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpfl_jax.data.schema import ends
from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError
from dpfl_jax.sampling import Draw

SAMPLE_UNITS = 1024  # number of units whose lengths decide the shapes
_MIN_SAVING = 0.01  # share of all tokens that another shape must save
_SHORTEST = 16  # smallest number of tokens in a row
_MIN_ROWS = 4  # rows of a shape that a step should fill, as the last is half empty on average


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows of tokens for one unit.

    Attributes:
      rows: rows of one unit.
      length: tokens of a row.
      units: units computed at once, over all devices; 0: as many as of any other shape.
    """

    rows: int
    length: int
    units: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all rows, padding included."""
        return self.rows * self.length


def example_lengths(store: Any, positions: np.ndarray) -> np.ndarray:
    """Tokens of the examples at ``positions`` (-1: none), up to the last that is predicted.

    They come from the store's index if it has one, else from the examples.
    """
    real = positions >= 0
    lengths = np.zeros(positions.shape, np.int64)
    if hasattr(store, "lengths"):
        lengths[real] = store.lengths(positions[real])
    else:
        lengths[real] = ends(store.read(positions[real])["mask"])
    return lengths


def lengths_warning(store: Any) -> str | None:
    """Returns a warning if packing has to read examples for their lengths, in every process."""
    if getattr(store, "has_lengths", True):
        return None
    return (
        "the store was built before it kept the lengths of its examples, so that every process "
        "reads every example of a step to pack them: build it again (dpfl data build)"
    )


def first_fit(
    lengths: np.ndarray, real: np.ndarray, shape: Shape
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lays each unit's examples, the longest first, into the first row with room.

    ``lengths`` are int and ``real`` bool [units, examples] (False: padding). Returns int [units,
    examples]: the row of each example (-1: no room, or padding), and where it starts; and bool
    [units]: whether all examples have room.
    """
    units = np.arange(len(lengths))
    free = np.full((len(lengths), shape.rows), shape.length)
    row, start = np.full(lengths.shape, -1), np.zeros(lengths.shape, np.int64)
    order = np.argsort(np.where(real, -lengths, 1), axis=1, kind="stable")
    for k in range(lengths.shape[1]):
        which = order[:, k]
        needed = lengths[units, which]
        first = (free >= needed[:, None]).argmax(axis=1)
        fits = real[units, which] & (free[units, first] >= needed)
        u, e, r = units[fits], which[fits], first[fits]
        row[u, e], start[u, e] = r, shape.length - free[u, r]
        free[u, r] -= needed[fits]
    return row, start, ((row >= 0) | ~real).all(axis=1)


def choose_shapes(
    store: Readable,
    group_size: int | None,
    units: float,
    row: int,
    parts: int = 1,
    most_shapes: int = 8,
) -> tuple[tuple[Shape, ...], tuple[float, ...]]:
    """Chooses shapes that waste few tokens, for units like those of the store.

    Args:
      store: shapes are chosen by the lengths of 1,024 of its units, the same in every process.
      group_size: most examples of a unit; None: a unit is one example.
      units: expected number of units in a step.
      row: units computed at once if they have the usual number of tokens; fewer of larger ones. On
        average half of them are missing from the last row of each shape.
      parts: number of devices; the units computed at once are a multiple of it.
      most_shapes: most shapes, at least 1.

    Returns:
      The shapes, the cheapest first (the last holds every unit), and the share of the sampled units
      in each.
    """
    positions = _sample_positions(np.asarray(store.user_offsets), group_size)
    lengths, real = example_lengths(store, positions), positions >= 0
    seq_len = store.read(positions[:1, 0])["tokens"].shape[-1]
    usual = row * max(1.0, lengths.sum(axis=1).mean())

    def shape(rows: int, length: int) -> Shape:
        at_once = min(row, int(usual / (rows * length))) // parts * parts
        return Shape(rows, length, max(parts, at_once))

    most = shape(group_size or 1, seq_len)
    candidates, costs = [most], [np.full(len(lengths), float(most.tokens))]
    for length in _candidate_lengths(seq_len, group_size):
        row_of, _, fits = first_fit(lengths, real, Shape(most.rows, length))
        needed = np.where(fits, row_of.max(axis=1) + 1, np.iinfo(int).max)
        for rows in _candidate_rows(most.rows):
            if rows * length < most.tokens:
                candidates.append(shape(rows, length))
                costs.append(np.where(needed <= rows, float(rows * length), np.inf))
    table, chosen = np.stack(costs), [0]

    def shares_and_units(which: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Share of the units in each shape, and units at once: at most a quarter of a step's."""
        shares = np.bincount(table[which].argmin(axis=0), minlength=len(which)) / len(lengths)
        few = (units * shares / _MIN_ROWS).astype(int) // parts * parts
        most = [candidates[c].units for c in which]
        return shares, np.minimum(most, np.maximum(few, parts))

    def total(which: list[int]) -> float:
        """Tokens of a step, padding units included."""
        shares, at_once = shares_and_units(which)
        sizes = np.array([candidates[c].tokens for c in which])
        padding = np.minimum((at_once - 1) / 2, units * shares)
        return float((sizes * (units * shares + padding)).sum())

    while len(chosen) < most_shapes:
        best = min(range(len(candidates)), key=lambda c: total([*chosen, c]))
        if total([*chosen, best]) > (1 - _MIN_SAVING) * total(chosen):
            break
        chosen.append(best)
    # Drop shapes that others made superfluous, but keep the one that holds every unit.
    used = set(table[chosen].argmin(axis=0))
    chosen = [c for i, c in enumerate(chosen) if i in used or c == 0]
    chosen.sort(key=lambda c: (c == 0, candidates[c].tokens))
    shares, at_once = shares_and_units(chosen)
    shapes = zip((candidates[c] for c in chosen), at_once)
    return (
        tuple(dataclasses.replace(shape, units=int(n)) for shape, n in shapes),
        tuple(float(share) for share in shares),
    )


def split_by_shape(draw: Draw, lengths: np.ndarray, shapes: Sequence[Shape]) -> list[Draw]:
    """Splits a draw (positions [n] or [n, group_size]) by the first shape that holds a unit.

    Raises:
      BadInputError: an example is longer than a row of the last shape.
    """
    real = _grouped(draw.positions) >= 0
    which = np.full(len(real), -1)
    for i, shape in enumerate(shapes):
        left = np.flatnonzero(which < 0)
        fits = first_fit(_grouped(lengths)[left], real[left], shape)[2]
        which[left[fits]] = i
    if (which < 0).any():
        raise BadInputError(f"an example has more than the {shapes[-1].length} tokens of a row")
    return [Draw(draw.units[which == i], draw.positions[which == i]) for i in range(len(shapes))]


def pack_units(
    store: Readable, positions: np.ndarray, shape: Shape, grouped: bool, partial: bool = False
) -> tuple[dict[str, np.ndarray], np.ndarray | None, np.ndarray | None, int]:
    """Reads units and lays their examples into rows.

    Args:
      store: a store of token sequences.
      positions: int [units, examples], -1 for padding.
      shape: shape of the rows.
      grouped: whether a unit has several rows.
      partial: whether to truncate, and leave out what has no room (for checks before training).

    Returns:
      ``tokens`` (as narrow as the vocabulary allows), ``segments`` (0: no token; uint16 or uint32)
      and ``mask`` bool, [units, rows, length], or [units, length]; bool [units, rows], which rows
      are used; int32 [units], examples of each unit; the number of real tokens.
    """
    real = positions >= 0
    read = store.read(positions[real])
    lengths = np.zeros(positions.shape, np.int64)
    lengths[real] = ends(read["mask"])
    lengths = np.minimum(lengths, shape.length) if partial else lengths
    row, start, complete = first_fit(lengths, real, shape)
    kept = row >= 0
    if not (partial or complete.all()):
        raise BadInputError(
            "the store's examples are longer than its index says: build it again (dpfl data build)"
        )
    read = {name: array[kept[real]] for name, array in read.items()}
    unit, number = np.nonzero(kept)
    size = lengths[kept]
    # For every token: its example, its place in the example, and its destination.
    example = np.repeat(np.arange(len(size)), size)
    place = np.arange(len(example)) - np.repeat(np.cumsum(size) - size, size)
    destination = (unit * shape.rows + row[kept]) * shape.length + start[kept]
    destination = destination[example] + place
    out_shape = (len(positions), shape.rows, shape.length)
    vocab_size = getattr(getattr(store, "schema", None), "vocab_size", None) or 2**31
    tokens = np.zeros(out_shape, np.uint16 if vocab_size <= 2**16 else np.int32)
    segment_dtype = np.uint16 if positions.shape[1] < 2**16 else np.uint32
    segments, mask = np.zeros(out_shape, segment_dtype), np.zeros(out_shape, bool)
    tokens.reshape(-1)[destination] = read["tokens"][example, place]
    segments.reshape(-1)[destination] = (number + 1)[example]
    mask.reshape(-1)[destination] = read["mask"][example, place]
    arrays = {"tokens": tokens, "segments": segments, "mask": mask}
    if not grouped:
        return {n: a[:, 0] for n, a in arrays.items()}, None, None, int(mask.sum())
    used = np.zeros(out_shape[:2], bool)
    used[unit, row[kept]] = True
    return arrays, used, kept.sum(axis=1, dtype=np.int32), int(mask.sum())


def _grouped(positions: np.ndarray) -> np.ndarray:
    return positions[:, None] if positions.ndim == 1 else positions


def _sample_positions(offsets: np.ndarray, group_size: int | None) -> np.ndarray:
    """Positions of a sample of units, [units, group_size], the same for the same store."""
    rng = np.random.default_rng(0)
    if group_size is None:
        count = int(offsets[-1] - offsets[0])
        return offsets[0] + np.sort(rng.choice(count, min(SAMPLE_UNITS, count), False))[:, None]
    users = np.flatnonzero(np.diff(offsets))
    users = users[np.sort(rng.choice(len(users), min(SAMPLE_UNITS, len(users)), False))]
    positions = np.full((len(users), group_size), -1, np.int64)
    for unit, low, high in zip(positions, offsets[users], offsets[users + 1]):
        chosen = rng.choice(high - low, min(group_size, high - low), replace=False)
        unit[: len(chosen)] = low + chosen
    return positions


def _candidate_lengths(seq_len: int, group_size: int | None) -> list[int]:
    """Candidate lengths: four in each octave, and up to twice the longest example."""
    lengths = {seq_len}
    for octave in range(seq_len.bit_length()):
        for part in (1.0, 0.875, 0.75, 0.625):
            lengths.add(int(-(-seq_len * part // 2**octave)))
    if group_size is not None:
        lengths |= {seq_len * 5 // 4, seq_len * 3 // 2, 2 * seq_len}
    return sorted(length for length in lengths if length >= min(_SHORTEST, seq_len))


def _candidate_rows(most: int) -> list[int]:
    """Candidate numbers of rows: 1 to 8, then in steps of about an eighth."""
    candidates, rows = [], 1
    while rows < most:
        candidates.append(rows)
        rows += max(1, 1 << (rows.bit_length() - 4)) if rows >= 8 else 1
    return [*candidates, most]
