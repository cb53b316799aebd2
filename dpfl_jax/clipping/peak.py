"""How much temporary memory a program holds at its fullest, estimated from its jaxpr."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import Literal

from dpfl_jax.clipping.isolation import inner_jaxprs

# What the compiler reads where it is needed instead of storing it.
_FREE = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "copy_p",
        "expand_dims",
        "iota",
        "name",
        "pcast",
        "pvary",
        "reduce_precision",
        "reshape",
        "squeeze",
        "transpose",
    }
)


def peak_bytes(jaxpr: Any) -> float:
    """Bytes of the intermediate values that are alive at once, at most.

    Arguments are not counted, results are. Values are taken to be stored in the order of the
    equations, each until its last use.

    Args:
      jaxpr: an open jaxpr.
    """
    owner: dict[Any, Any] = {}  # of what is read in another form, the value that is stored

    def stored(v: Any) -> Any:
        return owner.get(v, v)

    last: dict[Any, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        read = [v for v in eqn.invars if not isinstance(v, Literal)]
        if eqn.primitive.name in _FREE and len(eqn.outvars) == 1 and len(read) <= 1:
            owner[eqn.outvars[0]] = stored(read[0]) if read else None
        for v in read:
            last[stored(v)] = i
    for v in jaxpr.outvars:
        if not isinstance(v, Literal):
            last[stored(v)] = len(jaxpr.eqns)
    ending: dict[int, list[Any]] = {}
    for v, i in last.items():
        ending.setdefault(i, []).append(v)

    held: dict[Any, float] = {}
    alive = most = 0.0
    for i, eqn in enumerate(jaxpr.eqns):
        made = {v: _bytes(v) for v in eqn.outvars if v not in owner}
        within = max((peak_bytes(j) for j in inner_jaxprs(eqn.params.values())), default=0.0)
        if eqn.primitive.name != "scan":  # the results of what is called are among its values
            within = max(0.0, within - sum(made.values()))
        most = max(most, alive + sum(made.values()) + within)
        held |= {v: size for v, size in made.items() if last.get(v, i) > i}
        for v in ending.get(i, ()):
            held.pop(v, None)
        alive = sum(held.values())
    return most


def _bytes(v: Any) -> float:
    dtype = getattr(v.aval, "dtype", None)
    return float(math.prod(v.aval.shape) * getattr(dtype, "itemsize", 0))
