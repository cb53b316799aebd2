"""Reads collectives out of the text of a compiled module."""

from __future__ import annotations

import dataclasses
import re

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
_CONSTANT = re.compile(r"%([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_COMPARED = re.compile(r"ROOT .* compare\(.*%([\w.\-]+)\), direction=LT")
_TRIPS = re.compile(r'known_trip_count"?[:=]\s*\{"?n"?[:=]"?(\d+)')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective in a module.

    Attributes:
      kind: e.g. ``all-reduce``.
      in_loop: whether it runs in every iteration of a loop.
      count: instructions (one may carry many arrays).
      bytes: of all arrays of those instructions, per device.
      executed_bytes: the same, each times how often it runs in one turn of the loops whose length
        is not known (those over microbatches).
      largest: bytes of the largest instruction.
    """

    kind: str
    in_loop: bool
    count: int
    bytes: int
    executed_bytes: int
    largest: int


def collectives(hlo: str) -> list[Collective]:
    """Collectives of a module by kind and place."""
    bodies: dict[str, list[str]] = {}
    current = ""
    for line in hlo.splitlines():
        opened = _COMPUTATION.match(line)
        if opened:
            current = opened.group(1)
        bodies.setdefault(current, []).append(line)
    looped = _reached_from_loops(bodies)
    turns = _turns(bodies)
    found: dict[tuple[str, bool], list[tuple[int, int]]] = {}
    for name, lines in bodies.items():
        # One that runs beside products is written where it starts, where it goes on and where it
        # ends: it counts where it starts.
        if name.startswith("async_collective_fusion") or any(_ENDS in line for line in lines):
            continue
        for line in lines:
            match = _LINE.search(line)
            if match:
                size = _size(match.group("shape"))
                if match.group("start") and match.group("kind") != "all-reduce":
                    size //= 2  # the shape holds operands and results
                key = (match.group("kind"), name in looped)
                found.setdefault(key, []).append((size, turns.get(name, 1)))
    return [
        Collective(
            kind,
            in_loop,
            len(sizes),
            sum(size for size, _ in sizes),
            sum(size * times for size, times in sizes),
            max(size for size, _ in sizes),
        )
        for (kind, in_loop), sizes in sorted(found.items())
    ]


def _size(shape: str) -> int:
    total = 0
    for kind, dims in _SHAPE.findall(shape):
        count = 1
        for dim in dims.split(","):
            count *= int(dim) if dim else 1
        total += count * _BYTES.get(kind, 4 if kind not in ("token",) else 0)
    return total


def _turns(bodies: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs: the product of the known lengths of the loops around it."""
    called: dict[str, set[tuple[str, int]]] = {}
    for name, lines in bodies.items():
        for line in lines:
            count = _trips(line, bodies) if " while(" in line else 1
            for group in _CALLED.findall(line):
                for callee in group.split(","):
                    called.setdefault(callee.strip(" %"), set()).add((name, count))
    known: dict[str, int] = {}

    def turns(name: str) -> int:
        if name not in known:
            known[name] = 1  # what calls itself is not expected
            known[name] = max((n * turns(caller) for caller, n in called.get(name, ())), default=1)
        return known[name]

    return {name: turns(name) for name in bodies}


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
    """How often a loop turns; 1 where the module does not say.

    Some compilers write it beside the loop; else its condition compares a counter from 0 with it.
    """
    written = _TRIPS.search(line)
    if written:
        return int(written[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    lines = bodies.get(condition[1], []) if condition else []
    constants: dict[str, str] = {}
    for text in lines:
        constants |= dict(_CONSTANT.findall(text))
    for text in lines:
        compared = _COMPARED.search(text)
        if compared and compared[1] in constants:
            return int(constants[compared[1]])
    return 1


def _reached_from_loops(bodies: dict[str, list[str]]) -> set[str]:
    calls = {
        name: {
            callee.strip(" %")
            for line in lines
            for group in _CALLED.findall(line)
            for callee in group.split(",")
        }
        for name, lines in bodies.items()
    }
    todo = {
        callee
        for lines in bodies.values()
        for line in lines
        if " while(" in line
        for callee in re.findall(r"(?:body|condition)=%?([\w.\-]+)", line)
    }
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= calls.get(name, set()) - seen
    return seen
