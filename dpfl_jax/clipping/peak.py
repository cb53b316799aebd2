"""What a program takes, estimated from its jaxpr: temporary memory at its fullest, and products."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import Literal

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
        within = max((peak_bytes(j) for j in _inside(eqn)), default=0.0)
        if eqn.primitive.name != "scan":  # the results of what is called are among its values
            within = max(0.0, within - sum(made.values()))
        most = max(most, alive + sum(made.values()) + within)
        held |= {v: size for v, size in made.items() if last.get(v, i) > i}
        for v in ending.get(i, ()):
            held.pop(v, None)
        alive = sum(held.values())
    return most


def product_flops(jaxpr: Any) -> float:
    """Operations of all products of matrices and convolutions; of a loop without a length, once.

    Args:
      jaxpr: an open jaxpr.
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            ((contracted, _), _), left = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
            inner = math.prod(left[axis] for axis in contracted)
            total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * inner
        elif eqn.primitive.name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
            size = math.prod(eqn.outvars[0].aval.shape)
            total += 2.0 * size * math.prod(kernel) / max(1, outputs)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(map(product_flops, _inside(eqn)))
    return total


def _bytes(v: Any) -> float:
    dtype = getattr(v.aval, "dtype", None)
    return float(math.prod(v.aval.shape) * getattr(dtype, "itemsize", 0))


def _inside(eqn: Any) -> list[Any]:
    """The open jaxprs that an equation runs."""
    found = []
    for value in eqn.params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(x, "jaxpr", x)
            if hasattr(inner, "eqns"):
                found.append(inner)
    return found
