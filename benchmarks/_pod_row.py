"""One row of ``dpfl bench pods``, in a process of its own: the compiler keeps what it has taken.

What a loop sends is counted as often as the loop turns.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from typing import Any

from dpfl_jax.config import load_config
from dpfl_jax.errors import BadInputError
from dpfl_jax.training.slices import Lines, callees, collectives, measure, slice_mesh

_CONSTANT = re.compile(r"%([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_COMPARED = re.compile(r"ROOT .* compare\(.*%([\w.\-]+)\), direction=LT")
_TRIPS = re.compile(r'known_trip_count"?[:=]\s*\{"?n"?[:=]"?(\d+)')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")


def turns(bodies: Lines) -> dict[str, int]:
    """How often each computation runs: the product of the known lengths of the loops around it."""
    callers: dict[str, set[tuple[str, int]]] = {}
    for name, lines in bodies.items():
        for line in lines:
            count = _trips(line, bodies) if " while(" in line else 1
            for callee in callees(line):
                callers.setdefault(callee, set()).add((name, count))

    @functools.cache
    def of(name: str) -> int:
        return max((n * of(caller) for caller, n in callers.get(name, ())), default=1)

    return {name: of(name) for name in bodies}


def _trips(line: str, bodies: Lines) -> int:
    """How often a loop turns; 1 where the module does not say.

    Some compilers write it beside the loop; else its condition compares a counter from 0 with it.
    """
    if written := _TRIPS.search(line):
        return int(written[1])
    condition = _CONDITION.search(line)
    text = "\n".join(bodies.get(condition[1], [])) if condition else ""
    compared = _COMPARED.search(text)
    return int(dict(_CONSTANT.findall(text)).get(compared[1], 1)) if compared else 1


def main() -> None:
    """Reads what to compile from standard input, and writes the row."""
    asked = json.load(sys.stdin)
    topology, vocab = asked.pop("topology"), asked.pop("vocab")
    read = functools.partial(collectives, times=turns)
    try:
        config: Any = load_config(asked.pop("config"), asked.pop("overrides"))
        mesh = slice_mesh(topology, config.execution.mesh.axes)
        row = measure(config, vocab, topology, mesh, baseline=False, read=read, **asked)
    except BadInputError as error:
        sys.exit(f"error: {error}")
    sys.stdout.write("\n" + json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
