"""The strategy ``ghost``: one forward and one backward pass, no per-unit gradients.

Forward with taps and records; one backward pass to the taps only (no weight gradient is formed);
norms from records and taps; then the weighted sum, one ordinary product for each use.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.clipping.cost import Machine
from dpfl_jax.clipping.isolation import every_program
from dpfl_jax.clipping.per_unit import squared_norms, weighted_sum
from dpfl_jax.clipping.problem import Problem, Solution
from dpfl_jax.clipping.result import axes_of, pinned, unit_where, vary
from dpfl_jax.clipping.taps import kept, leaves
from dpfl_jax.clipping.taps.evaluate import Records, Tokens, evaluate
from dpfl_jax.clipping.taps.factors import Pair, factorise, formed, merge, same_form
from dpfl_jax.clipping.taps.trace import Analysis, Site, analyse

COPIES = "per-unit copies"
MIXED = "a convolution's kernel is computed, or has groups: XLA may mix units that are not finite"


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """How one parameter's gradient was bounded.

    Attributes:
      name: of the parameter.
      shape: of the parameter.
      method: ``gram``, ``direct``, ``keep`` (see ``leaves``) or ``per-unit copies``.
      uses: number of equations in which it meets data; 0 for copies.
      reason: why.
      seconds: estimated for one unit, beyond what training without privacy takes.
      recorded: bytes held for one unit: factors, and per-unit gradients that are kept.
    """

    name: str
    shape: tuple[int, ...]
    method: str
    uses: int
    reason: str
    seconds: float
    recorded: float


def trace_loss(problem: Problem) -> tuple[Any, Any]:
    """The closed jaxpr of the one-unit loss, and the tree of its outputs."""
    # One real unit, not its shape: the jaxpr must know over which mesh axes it varies.
    unit = jax.tree.map(lambda x: x[0], problem.units)
    tree: list[Any] = []

    def flat_loss(leaves: Any, unit: Any) -> list[Any]:
        out, structure = jax.tree.flatten(problem.loss(leaves, unit))
        tree.append(structure)
        return out

    return jax.make_jaxpr(flat_loss)(problem.leaves, unit), tree[-1]


def mixed_by_convolutions(problem: Problem, ghost: bool) -> bool:
    """Whether units must be taken one by one lest one that is not finite take others with it.

    A convolution whose kernel is another for each unit (it, or its gradient, is computed) is one
    with a group for each. XLA computes some of these on a CPU as one of all groups with all, times
    zero, and zero times NaN is NaN: one unit would then remove all others from the sum.

    Args:
      problem: whose loss is looked at.
      ghost: whether gradients of kernels that are parameters are formed by book-keeping.
    """
    jaxpr = trace_loss(problem)[0].jaxpr
    name = jax.lax.conv_general_dilated_p.name
    found = [e for p in every_program(jaxpr) for e in p.eqns if e.primitive.name == name]
    if not found:
        return False
    sites = analyse(jaxpr, len(problem.leaves)).plan.all_sites()
    grouped = any(
        e.params["feature_group_count"] * e.params["batch_group_count"] > 1 for e in found
    )
    return sum(s.primitive.name == name for s in sites) < len(found) or (grouped and not ghost)


def solve_ghost(
    problem: Problem,
    machine: Machine,
    force: str | None = None,
    report: Callable[[LeafReport], None] | None = None,
) -> Solution:
    """Bounded sums by book-keeping.

    Args:
      problem: what to solve.
      machine: by whose speeds ways are chosen.
      force: a method to use for every leaf that allows it.
      report: called with what was chosen for each leaf, while tracing.
    """
    closed, out_tree = trace_loss(problem)
    analysis = analyse(closed.jaxpr, len(problem.leaves))
    losses, aux, copies, records, gradients = _passes(problem, closed, out_tree, analysis)

    sites: dict[int, list[Site]] = {}
    for site in analysis.plan.all_sites():
        sites.setdefault(site.view.leaf, []).append(site)

    n = problem.num_units
    squared: dict[int, jax.Array] = {}
    rounded: list[jax.Array | None] = [None] * len(problem.leaves)
    finish: dict[int, Callable[[jax.Array, jax.Array], jax.Array]] = {}
    formed: dict[int, list[Pair]] = {}
    entries: dict[int, LeafReport] = {}
    for i, (name, leaf) in enumerate(zip(problem.names, problem.leaves)):
        shape, uses = tuple(leaf.shape), sites.get(i, [])
        if i in analysis.copied:
            squared[i] = squared_norms([copies[i]])[0]
            finish[i] = functools.partial(weighted_sum, copies[i], parts=problem.parts)
            seconds = machine.seconds(0.0, 12.0 * leaf.size)
            entry = LeafReport(name, shape, COPIES, 0, analysis.copied[i], seconds, 4.0 * leaf.size)
        elif not uses:
            axes = axes_of(jax.typeof(leaf))
            squared[i] = vary(jnp.zeros((n,), jnp.float32), axes)
            nothing = vary(jnp.zeros(shape, jnp.float32), axes)
            finish[i] = functools.partial(_nothing, nothing)
            entry = LeafReport(name, shape, "zero", 0, "the loss does not depend on it", 0.0, 0.0)
        else:
            pairs = _pairs(uses, records, gradients, lazy=problem.parts == 1)
            choice = leaves.choose(pairs, leaf.size, machine, force, problem.rule.apart)
            if choice.method == "keep":
                formed[i] = pairs
            else:
                squared[i] = leaves.squared_norm(
                    pairs, shape, choice.method, n, machine, problem.shards
                )
                rounded[i] = leaves.rounding(pairs, machine)
                finish[i] = functools.partial(leaves.summed_gradient, pairs, shape)
            seconds = choice.costs.get(choice.method, 0.0)
            entry = LeafReport(
                name, shape, choice.method, len(uses), choice.reason, seconds, choice.recorded
            )
        entries[i] = entry

    per_part = n // problem.shards
    at_once = per_part  # split over devices, their sums meet once
    if problem.parts == 1:
        at_once = kept.units_at_once(list(formed.values()), n, machine)
    if report is not None:
        for i, entry in entries.items():
            more = 4.0 * problem.leaves[i].size * at_once / per_part if i in formed else 0.0
            report(dataclasses.replace(entry, recorded=entry.recorded + more))

    decided, sums = kept.bounded(problem, squared, rounded, formed, at_once)
    sums |= {i: f(decided.weights[i], decided.keeps[i]) for i, f in finish.items()}
    return Solution(
        sums=[sums[i] for i in range(len(problem.leaves))],
        norms=decided.norms,
        leaf_norms=decided.leaf_norms,
        weights=decided.reported,
        losses=unit_where(problem.real, losses),
        nonfinite=decided.nonfinite,
        aux=aux,
    )


def _nothing(zero: jax.Array, weights: jax.Array, keep: jax.Array) -> jax.Array:
    del weights, keep
    return zero


def _passes(
    problem: Problem, closed: Any, out_tree: Any, analysis: Analysis
) -> tuple[jax.Array, Any, dict[int, jax.Array], dict[Any, jax.Array], Tokens]:
    """One pass forward and one back: losses, aux, copied leaves' gradients, records, taps'."""
    n, plan = problem.num_units, analysis.plan
    tokens: Tokens = {}
    depth_of: dict[int, int] = {}
    for site in plan.all_sites():
        lengths = site.lengths
        shape = (*lengths, n, *site.out.shape)
        tokens[site.index] = vary(jnp.zeros(shape, site.out.dtype), axes_of(site.out))
        depth_of[site.index] = len(lengths)
    copies = {
        i: jnp.broadcast_to(problem.leaves[i], (n, *problem.leaves[i].shape))
        for i in analysis.copied
    }

    def single(
        copied: dict[int, jax.Array], tokens: Tokens, unit: Any
    ) -> tuple[jax.Array, tuple[Any, Records]]:
        parameters = [copied.get(i, p) for i, p in enumerate(problem.leaves)]
        inputs = [*parameters, *jax.tree.leaves(unit)]
        outs, records = evaluate(plan, closed.jaxpr, closed.consts, inputs, tokens)
        loss, aux = jax.tree.unflatten(out_tree, outs)
        return loss, (aux, records)

    depths = {s: s for s in sorted(set(plan.all_records().values()))}
    batched = jax.vmap(single, in_axes=(0, depth_of, 0), out_axes=(0, (0, depths)))

    losses, backward, (aux, records) = jax.vjp(
        lambda copied, tokens: batched(copied, tokens, problem.units),
        copies,
        tokens,
        has_aux=True,
    )
    copied, gradients = backward(jnp.ones_like(losses))
    flat = {}
    for depth, group in records.items():
        for key, value in group.items():
            flat[key] = problem.place(pinned(value), depth)
    gradients = {
        key: problem.place(pinned(value), depth_of[key]) for key, value in gradients.items()
    }
    return losses, aux, {i: pinned(g) for i, g in copied.items()}, flat, gradients


def _pairs(
    sites: list[Site], records: dict[Any, jax.Array], gradients: Tokens, lazy: bool
) -> list[Pair]:
    """The factors of all uses of one leaf, like uses joined.

    Unless ``lazy``, windows are formed for all units: where XLA splits units over devices, it
    counts some gradients of grouped convolutions several times (and on one device is slow at them).
    """
    alike: list[list[Site]] = []
    for site in sites:
        for group in alike:
            if same_form(group[0], site):
                group.append(site)
                break
        else:
            alike.append([site])

    def pair(site: Site) -> Pair:
        made = factorise(site, [records[key] for key in site.operands], gradients[site.index])
        whole = lazy and site.params.get("feature_group_count", 1) == 1
        return made if whole else dataclasses.replace(made, left=formed(made.left))

    return [merge([pair(site) for site in group]) for group in alike]
