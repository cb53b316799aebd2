"""Reads collectives out of the text of a compiled module."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_BYTES |= {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
_LINE = re.compile(rf"= (?P<shape>.*?) (?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?\(")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(
    r"(?:(?:body|condition|calls|to_apply)=%?|branch_computations=\{)((?<=\{)[\w.\-, %]+|[\w.\-]+)"
)
_ENDS = 'custom_call_target="AsyncCollectiveDone"'

Lines = dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective in a module.

    Attributes:
      kind: e.g. ``all-reduce``.
      in_loop: whether it runs in every iteration of a loop.
      count: instructions (one may carry many arrays).
      bytes: of all arrays of those instructions, per device.
    """

    kind: str
    in_loop: bool
    count: int
    bytes: int


def collectives(
    hlo: str, times: Callable[[Lines], Mapping[str, int]] | None = None
) -> list[Collective]:
    """Collectives of a module by kind and place.

    Args:
      hlo: its text.
      times: how often each computation runs, from the lines of all; default each counts once.
    """
    bodies: Lines = {}
    current = ""
    for line in hlo.splitlines():
        opened = _COMPUTATION.match(line)
        if opened:
            current = opened.group(1)
        bodies.setdefault(current, []).append(line)
    looped = _reached_from_loops(bodies)
    turns = {} if times is None else times(bodies)
    found: dict[tuple[str, bool], list[int]] = {}
    for name, lines in bodies.items():
        # One that runs beside products is written where it starts, where it goes on and where it
        # ends: it counts where it starts.
        if name.startswith("async_collective_fusion") or any(_ENDS in line for line in lines):
            continue
        for match in filter(None, map(_LINE.search, lines)):
            size = _size(match["shape"])
            if match["start"] and match["kind"] != "all-reduce":
                size //= 2  # the shape holds operands and results
            found.setdefault((match["kind"], name in looped), []).append(size * turns.get(name, 1))
    return [Collective(*key, len(sizes), sum(sizes)) for key, sizes in sorted(found.items())]


def callees(line: str) -> list[str]:
    """The computations that an instruction calls."""
    return [name.strip(" %") for group in _CALLED.findall(line) for name in group.split(",")]


def _size(shape: str) -> int:
    total = 0
    for kind, dims in _SHAPE.findall(shape):
        count = math.prod(int(dim) for dim in dims.split(",") if dim)
        total += count * _BYTES.get(kind, 4 if kind not in ("token",) else 0)
    return total


def _reached_from_loops(bodies: Lines) -> set[str]:
    calls = {name: {c for line in lines for c in callees(line)} for name, lines in bodies.items()}
    loops = [line for lines in bodies.values() for line in lines if " while(" in line]
    todo, seen = {name for line in loops for name in callees(line)}, set[str]()
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= calls.get(name, set()) - seen
    return seen
