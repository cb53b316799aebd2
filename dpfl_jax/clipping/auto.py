"""The choice of a strategy by estimated time, within a memory limit, with an explanation."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.clipping import cost
from dpfl_jax.clipping.cost import Machine
from dpfl_jax.clipping.jaxprs import jaxpr_flops, peak_bytes
from dpfl_jax.clipping.problem import ClippingProblem
from dpfl_jax.clipping.taps.engine import COPIES, LeafReport, solve_ghost, trace_loss
from dpfl_jax.clipping.taps.trace import TapPlan, analyse

# Copies are reported if they take more than this share of all other memory, and this many bytes.
_LARGE, _SMALL = 0.1, 2.0**20


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The choice of ``auto`` and the reason for it.

    Attributes:
      strategy: ``"ghost"``, ``"scan"`` or ``"vmap"``.
      microbatch_size: units in a microbatch; None for all units.
      reason: the reason in words.
      leaves: for ``ghost``, one report per parameter; otherwise empty.
      arithmetic: for ``ghost``, the FLOPs of its products over the FLOPs of products in the
        gradient without privacy.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import clipped_grad
      >>> grad = clipped_grad(lambda w, x: jnp.sum(w * x), clip_norm=1.0, strategy="vmap")
      >>> grad.explain(jnp.ones(2), jnp.ones((3, 2))).strategy
      'vmap'
    """

    strategy: str
    microbatch_size: int | None
    reason: str
    leaves: tuple[LeafReport, ...] = ()
    arithmetic: float | None = None

    @property
    def summary(self) -> str:
        """One line that says how gradients are clipped, and at what cost."""
        if self.strategy != "ghost":
            size = "" if self.microbatch_size is None else f", {self.microbatch_size} at a time"
            return f"the gradient of each unit is formed and clipped ({self.strategy}{size})"
        copied = sum(r.method == COPIES for r in self.leaves)
        booked = f"{len(self.leaves) - copied} of {len(self.leaves)} parameters by book-keeping"
        if copied:
            booked += f", of {copied} from a copy for each unit"
        times = self.arithmetic
        cost = "" if times is None else f"; {times:.2f} times the arithmetic without privacy"
        return f"ghost clipping: norms of {booked}{cost}"

    def fallback(self, units: int) -> str | None:
        """Returns a warning if per-unit copies of parameters take much memory, else None.

        Vectors (biases, scales) do not count, as their copies are no larger than activations.

        Args:
          units: number of units in the batch.
        """
        size = min(units, self.microbatch_size or units)
        copied = [r for r in self.leaves if r.method == COPIES and len(r.shape) > 1]
        extra = size * sum(r.recorded for r in copied)
        held = sum(4.0 * math.prod(r.shape) for r in self.leaves)
        held += size * sum(r.recorded for r in self.leaves if r not in copied)
        if extra <= max(_SMALL, _LARGE * held):
            return None
        largest = max(copied, key=lambda r: r.recorded)
        name = f"the parameter {largest.name!r} {largest.shape} is"
        if len(copied) > 1:
            name = f"{len(copied)} parameters, {largest.name!r} {largest.shape} the largest, are"
        return (
            f"{name} copied for each unit ({largest.reason}): that takes {extra / 2**20:.3g} MiB "
            f"in addition to {held / 2**20:.3g} MiB for the parameters and book-keeping "
            f"(estimates): write the loss with plain products, or set strategy to 'scan'"
        )

    def to_json(self, units: int) -> dict[str, Any]:
        """Returns JSON values for a report; ``units`` is the number of units in the batch."""
        return {
            "summary": self.summary,
            "strategy": self.strategy,
            "units_at_once": min(units, self.microbatch_size or units),
            "norms": dict(collections.Counter(r.method for r in self.leaves)),
            "arithmetic": self.arithmetic,
            "warning": self.fallback(units),
        }

    def __str__(self) -> str:
        size = "" if self.microbatch_size is None else f", {self.microbatch_size} units at a time"
        lines = [f"{self.strategy}{size}: {self.reason}"]
        width = max((len(r.name) for r in self.leaves), default=0)
        lines.extend(
            f"  {r.name:<{width}}  {r.shape!s:<18}  {r.method:<15}  "
            f"{r.uses or '-'} use{'' if r.uses == 1 else 's'}  {r.reason}"
            for r in self.leaves
        )
        return "\n".join(lines)


def with_leaf_reports(
    problem: ClippingProblem, machine: Machine, norm_method: Any, chosen: Explanation
) -> Explanation:
    """Returns ``chosen`` with book-keeping's report on each parameter and its relative FLOPs."""
    traced, reports = _traced(problem, machine, norm_method)

    def plain(leaves: Any, units: Any) -> Any:
        return jax.grad(lambda p: jax.vmap(problem.loss, (None, 0))(p, units)[0].sum())(leaves)

    without = jaxpr_flops(jax.make_jaxpr(plain)(problem.leaves, problem.units).jaxpr, 1)
    times = jaxpr_flops(traced.jaxpr, 1) / without if without else None
    return dataclasses.replace(chosen, leaves=reports, arithmetic=times)


def _traced(
    problem: ClippingProblem, machine: Machine, norm_method: Any
) -> tuple[Any, tuple[LeafReport, ...]]:
    """The closed jaxpr of book-keeping, and its report on each parameter."""
    reports: list[LeafReport] = []

    names = ("leaves", "units", "real", "weight", "bound")

    def ghost(arrays: dict[str, Any]) -> Any:
        inner = dataclasses.replace(problem, **arrays)
        return solve_ghost(inner, machine, norm_method, reports.append).sums

    traced = jax.make_jaxpr(ghost)({name: getattr(problem, name) for name in names})
    return traced, tuple(reports)


# How often a scan of one iteration moves all gradients, in addition to the gradient without
# privacy: once, for the norm. (By the count of libtpu's compiler, with one unit of 1,024 tokens, it
# then moves as much memory in all as book-keeping does.)
_SINGLE_TURN = 1.0
# The share of the time of all products that microbatches of one unit cost in addition, because
# products of fewer rows are slower and cores wait more often; with two units it is half of that,
# and so on. (Measured on two cores: with four units instead of eight, transformers took 3 to 4 %
# more CPU time, and 7 to 10 % longer.)
_FEW_ROWS = 0.25
# The share of the time of all products that microbatches must save to be chosen, because some
# operations are slower in a loop (on a CPU, XLA's convolutions take twice as long).
_WORTH = 0.03


def decide(problem: ClippingProblem, machine: Machine, memory_limit: float | None) -> Explanation:
    """Returns the strategy with the least estimated time among those that fit into memory.

    Args:
      problem: the call.
      machine: the device's speeds.
      memory_limit: bytes that book-keeping may take; None: half the device's memory, if known.
    """
    traced, reports = _traced(problem, machine, None)
    n, parts = problem.num_units, problem.parts
    size = 4.0 * sum(p.size for p in problem.leaves)
    per_unit = sum(r.seconds for r in reports)
    held = max(0.0, peak_bytes(traced.jaxpr) - size) / n  # bytes per unit, without the sum
    limit = cost.memory_limit() if memory_limit is None else memory_limit

    # With microbatches of one unit, each gradient is written, read for its norm and added to the
    # sum, and both passes read the parameters again; with one unit per device they are read once.
    scan = machine.seconds(0.0, (_SINGLE_TURN if n == parts else machine.scan_traffic) * size)
    remat = _recomputes(analyse(trace_loss(problem)[0].jaxpr, len(problem.leaves)).plan)
    too_large = limit is not None and size > limit
    sizes = [n]  # microbatch sizes that devices can share equally
    while sizes[-1] > parts:
        sizes.append(-(-sizes[-1] // (2 * parts)) * parts)
    fitting = [u for u in sizes if limit is None or u * held <= limit * parts] or sizes[-1:]

    def adding(units: int) -> float:  # seconds per unit for adding to the sum in each microbatch
        return 0.0 if units == n else machine.seconds(0.0, 3.0 * size / units)

    def memory(units: int) -> float:  # bytes, including the sum so far
        return units * held / parts + (0.0 if units == n else 2.0 * size)

    products = machine.seconds(jaxpr_flops(traced.jaxpr, 1), 0.0)
    sent = _sent(problem)

    def sending(units: int) -> float:  # seconds per unit of a device
        return machine.sending(sent) * parts / units

    def beyond(units: int) -> float:  # seconds per unit for memory, adding up, and few rows
        few = _FEW_ROWS * products / units  # on one device, which has its part of the units
        return (machine.holding(memory(units)) + few) / n + adding(units) + sending(units)

    units = min(fitting, key=beyond)
    if n * (beyond(fitting[0]) - beyond(units)) < _WORTH * products:
        units = fitting[0]
    book = per_unit + adding(units) + sending(units)
    scan += sending(parts)
    numbers = (
        f"book-keeping costs {book * 1e6:.0f} us a unit over the non-private gradient and holds "
        f"{n / parts * held / 1e6:.1f} MB, a scan over units {scan * 1e6:.0f} us (estimates)"
    )
    if too_large:
        reason = f"a scan would hold a gradient of {size / 1e9:.1f} GB on each device; {numbers}"
        return Explanation("ghost", None if units == n else units, reason, reports)
    if remat and scan < 4 * book:
        return Explanation(
            "scan", parts, f"the loss recomputes activations to save memory; {numbers}"
        )
    if scan < book:
        return Explanation("scan", parts, numbers)
    return Explanation("ghost", None if units == n else units, numbers, reports)


def _sent(problem: ClippingProblem) -> float:
    """Bytes that a device sends for a microbatch if parameters are split over ``fsdp``.

    All parameters are gathered for the forward and for the backward pass, most often in half
    precision. The float32 sum is scattered if the units are split, too.
    """
    if problem.sharding is None or problem.sharding.mesh.shape.get("fsdp", 1) == 1:
        return 0.0
    trained = sum(p.size for p in problem.leaves)
    frozen = sum(x.size for x in trace_loss(problem)[0].consts if jnp.ndim(x) > 1)
    return 4.0 * (trained + frozen) + (4.0 * trained if problem.parts > 1 else 0.0)


def _recomputes(plan: TapPlan) -> bool:
    """Whether parameters are used inside ``jax.checkpoint``, as in networks that save memory."""
    return any(
        (inner.recomputed and bool(inner.all_sites())) or _recomputes(inner)
        for inner in plan.inner.values()
    )
