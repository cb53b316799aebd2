"""Chooses a strategy by estimated time, within a memory limit, and explains the choice."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import jax

from dpfl_jax.clipping.cost import Machine
from dpfl_jax.clipping.flops import jaxpr_flops
from dpfl_jax.clipping.peak import peak_bytes
from dpfl_jax.clipping.problem import Problem
from dpfl_jax.clipping.taps.engine import COPIES, LeafReport, solve_ghost, trace_loss
from dpfl_jax.clipping.taps.trace import Plan, analyse

# Copies are much where they take more than this share of everything else, and this many bytes.
_MUCH, _SMALL = 0.1, 2.0**20


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What ``auto`` chose and why.

    Attributes:
      strategy: ``"ghost"``, ``"scan"`` or ``"vmap"``.
      microbatch_size: units at a time; None for all.
      reason: why, in words.
      leaves: for ``ghost``, one report a parameter; empty otherwise.
      arithmetic: for ``ghost``, its products over those of the gradient without privacy, counted.
    """

    strategy: str
    microbatch_size: int | None
    reason: str
    leaves: tuple[LeafReport, ...] = ()
    arithmetic: float | None = None

    @property
    def summary(self) -> str:
        """How the norms of how many parameters are computed, in one line."""
        if self.strategy != "ghost":
            size = "" if self.microbatch_size is None else f", {self.microbatch_size} at a time"
            return f"norms of all parameters from the gradient of each unit ({self.strategy}{size})"
        copied = sum(r.method == COPIES for r in self.leaves)
        booked = f"{len(self.leaves) - copied} of {len(self.leaves)} parameters by book-keeping"
        if copied:
            booked += f", of {copied} from a copy for each unit"
        times = self.arithmetic
        cost = "" if times is None else f"; {times:.2f} times the arithmetic without privacy"
        return f"norms of {booked}{cost}"

    def fallback(self, units: int) -> str | None:
        """What copies of parameters cost in memory, where it is much; None where it is not.

        Vectors (biases, scales) are left out: their copies are as large as activations at most.

        Args:
          units: in the batch.
        """
        at_once = min(units, self.microbatch_size or units)
        copied = [r for r in self.leaves if r.method == COPIES and len(r.shape) > 1]
        extra = at_once * sum(r.recorded for r in copied)
        held = sum(4.0 * math.prod(r.shape) for r in self.leaves)
        held += at_once * sum(r.recorded for r in self.leaves if r not in copied)
        if extra <= max(_SMALL, _MUCH * held):
            return None
        largest = max(copied, key=lambda r: r.recorded)
        name = f"the parameter {largest.name!r} {largest.shape} is"
        if len(copied) > 1:
            name = f"{len(copied)} parameters, {largest.name!r} {largest.shape} the largest, are"
        return (
            f"{name} copied for each unit ({largest.reason}): that takes {extra / 2**20:.3g} MiB "
            f"beside {held / 2**20:.3g} MiB for the parameters and what book-keeping holds "
            f"(estimates): write the loss with plain products, or set strategy to 'scan'"
        )

    def to_json(self, units: int) -> dict[str, Any]:
        """For a report; ``units`` as in ``fallback``."""
        return {
            "summary": self.summary,
            "strategy": self.strategy,
            "units_at_once": min(units, self.microbatch_size or units),
            "norms": dict(collections.Counter(r.method for r in self.leaves)),
            "arithmetic": self.arithmetic,
            "warning": self.fallback(units),
        }

    def __str__(self) -> str:
        """A table."""
        size = "" if self.microbatch_size is None else f", {self.microbatch_size} units at a time"
        lines = [f"{self.strategy}{size}: {self.reason}"]
        width = max((len(r.name) for r in self.leaves), default=0)
        lines.extend(
            f"  {r.name:<{width}}  {r.shape!s:<18}  {r.method:<15}  "
            f"{r.uses or '-'} use{'' if r.uses == 1 else 's'}  {r.reason}"
            for r in self.leaves
        )
        return "\n".join(lines)


def book_kept(
    problem: Problem, machine: Machine, norm_method: Any, chosen: Explanation
) -> Explanation:
    """``chosen`` with what book-keeping does to each parameter, and what its products cost."""
    traced, found = _traced(problem, machine, norm_method)

    def plain(leaves: Any, units: Any) -> Any:
        return jax.grad(lambda p: jax.vmap(problem.loss, (None, 0))(p, units)[0].sum())(leaves)

    without = jaxpr_flops(jax.make_jaxpr(plain)(problem.leaves, problem.units).jaxpr, 1)
    times = jaxpr_flops(traced.jaxpr, 1) / without if without else None
    return dataclasses.replace(chosen, leaves=found, arithmetic=times)


def _traced(
    problem: Problem, machine: Machine, norm_method: Any
) -> tuple[Any, tuple[LeafReport, ...]]:
    """The program of book-keeping, and a report for each parameter."""
    reports: list[LeafReport] = []

    names = ("leaves", "units", "real", "weight", "bound")

    def ghost(arrays: dict[str, Any]) -> Any:
        inner = dataclasses.replace(problem, **arrays)
        return solve_ghost(inner, machine, norm_method, reports.append).sums

    traced = jax.make_jaxpr(ghost)({name: getattr(problem, name) for name in names})
    return traced, tuple(reports)


# How often a scan moves all gradients beyond the gradient without privacy, where it takes a single
# turn: read for the norm. (By the compiler's count (libtpu, one unit of 1,024 tokens) it then moves
# as much memory in all as book-keeping does.)
_SINGLE_TURN = 1.0
# Fewer rows make products slower and cores wait more often: the share of the time of all products
# that one unit at a time costs, half of it two, and so on. (Measured on two cores: with four units
# instead of eight, transformers took 3 to 4 % more CPU time, and 7 to 10 % longer.)
_FEW = 0.25
# Of the same, which microbatches must save over all units at once: some operations are slower in
# a loop (XLA's CPU compiler takes twice as long for a convolution).
_WORTH = 0.03


def decide(problem: Problem, machine: Machine, memory_limit: float | None) -> Explanation:
    """Picks the strategy of least estimated time among those that fit.

    Args:
      problem: what is to be solved.
      machine: speeds.
      memory_limit: bytes that book-keeping may take; None: the device's, if it says so.
    """
    traced, found = _traced(problem, machine, None)
    n, parts = problem.num_units, problem.parts
    size = 4.0 * sum(p.size for p in problem.leaves)
    per_unit = sum(r.seconds for r in found)
    held = max(0.0, peak_bytes(traced.jaxpr) - size) / n  # without the sum
    limit = _device_limit() if memory_limit is None else memory_limit

    # One unit at a time: each gradient is written, read for its norm and added to the sum, and the
    # parameters are read again in both passes. Of one unit a device they are read once, as ever.
    scan = machine.seconds(0.0, (_SINGLE_TURN if n == parts else machine.scan_traffic) * size)
    remat = _recomputes(analyse(trace_loss(problem)[0].jaxpr, len(problem.leaves)).plan)
    too_large = limit is not None and size > limit
    sizes = [n]  # microbatches that every device has an equal part of
    while sizes[-1] > parts:
        sizes.append(-(-sizes[-1] // (2 * parts)) * parts)
    fitting = [u for u in sizes if limit is None or u * held <= limit * parts] or sizes[-1:]

    def adding(units: int) -> float:  # less than all add the sum up once for each microbatch
        return 0.0 if units == n else machine.seconds(0.0, 3.0 * size / units)

    def memory(units: int) -> float:  # temporary, and the sum so far beside it
        return units * held / parts + (0.0 if units == n else 2.0 * size)

    products = machine.seconds(jaxpr_flops(traced.jaxpr, 1), 0.0)

    def beyond(units: int) -> float:  # a unit's time for memory, for adding up, and for few rows
        few = _FEW * products / units  # of one device, where each has its part of them
        return (machine.holding(memory(units)) + few) / n + adding(units)

    units = min(fitting, key=beyond)
    if n * (beyond(fitting[0]) - beyond(units)) < _WORTH * products:
        units = fitting[0]
    book = per_unit + adding(units)
    numbers = (
        f"book-keeping costs {book * 1e6:.0f} us a unit over the non-private gradient and holds "
        f"{n / parts * held / 1e6:.1f} MB, a scan over units {scan * 1e6:.0f} us (estimates)"
    )
    if too_large:
        reason = f"a scan would hold a gradient of {size / 1e9:.1f} GB on each device; {numbers}"
        return Explanation("ghost", None if units == n else units, reason, found)
    if remat and scan < 4 * book:
        return Explanation(
            "scan", parts, f"the loss recomputes activations to save memory; {numbers}"
        )
    if scan < book:
        return Explanation("scan", parts, numbers)
    return Explanation("ghost", None if units == n else units, numbers, found)


def _device_limit() -> float | None:
    stats = jax.local_devices()[0].memory_stats()
    return None if not stats or "bytes_limit" not in stats else 0.5 * stats["bytes_limit"]


def _recomputes(plan: Plan) -> bool:
    """Whether parameters are used inside `jax.checkpoint`, as in a network of such blocks."""
    return any(
        (inner.recomputed and bool(inner.all_sites())) or _recomputes(inner)
        for inner in plan.inner.values()
    )
