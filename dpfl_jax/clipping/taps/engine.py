"""The strategy ``ghost``: one forward and one backward pass without per-unit gradients.

The forward pass records the operands of every site. The backward pass goes only to the taps: it
gives the gradients of the sites' outputs, but no gradient of a parameter. Both together give the
norms, and then the weighted sum, by one ordinary product for each use.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.clipping import accumulate
from dpfl_jax.clipping.cost import Machine
from dpfl_jax.clipping.jaxprs import every_program
from dpfl_jax.clipping.per_unit import squared_norms, weighted_sum
from dpfl_jax.clipping.problem import ClippedSums, ClippingProblem, UnitWeights
from dpfl_jax.clipping.result import pinned
from dpfl_jax.clipping.taps import leaves
from dpfl_jax.clipping.taps.evaluate import Recorded, Tokens, evaluate
from dpfl_jax.clipping.taps.factors import Pair, factorise, formed, merge, same_form
from dpfl_jax.clipping.taps.trace import Site, TapPlan, analyse
from dpfl_jax.varying import axes_of, vary, varying_axes

COPIES = "per-unit copies"
MIXED = "a convolution's kernel is computed, or has groups: XLA may mix units that are not finite"


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """How the norm of one parameter's gradients is computed.

    Attributes:
      name: name of the parameter.
      shape: shape of the parameter.
      method: one of ``leaves.METHODS`` or ``per-unit copies``.
      uses: number of equations in which the parameter meets data; 0 for copies.
      reason: why this method was chosen.
      seconds: estimated extra time for one unit over training without privacy.
      recorded: bytes held for one unit: factors, and per-unit gradients that are kept.
      choice: the choice of a method, if there was one, with as much memory as it takes.
    """

    name: str
    shape: tuple[int, ...]
    method: str
    uses: int
    reason: str
    seconds: float
    recorded: float
    choice: leaves.MethodChoice | None = None


def trace_loss(problem: ClippingProblem) -> tuple[Any, Any]:
    """Returns the closed jaxpr of the one-unit loss, and the tree of its outputs."""
    # Trace with a concrete unit instead of its shape, to know over which mesh axes it varies.
    unit = jax.tree.map(lambda x: x[0], problem.units)
    tree: list[Any] = []

    def flat_loss(leaves: Any, unit: Any) -> list[Any]:
        out, structure = jax.tree.flatten(problem.loss(leaves, unit))
        tree.append(structure)
        return out

    return jax.make_jaxpr(flat_loss)(problem.leaves, unit), tree[-1]


def mixed_by_convolutions(problem: ClippingProblem, ghost: bool) -> bool:
    """Returns whether microbatches must be single units, to keep NaNs from spreading to others.

    Where the kernel of a convolution differs from unit to unit (it, or its gradient, is computed),
    ``vmap`` makes one convolution with a group for each unit. On a CPU, XLA computes some of these
    for every pair of groups, times zero, and zero times NaN is NaN: one unit would then remove all
    others from the sum.

    Args:
      problem: the call.
      ghost: whether book-keeping forms the gradients of kernels that are parameters.
    """
    jaxpr = trace_loss(problem)[0].jaxpr
    name = jax.lax.conv_general_dilated_p.name
    convolutions = [e for p in every_program(jaxpr) for e in p.eqns if e.primitive.name == name]
    if not convolutions:
        return False
    sites = analyse(jaxpr, len(problem.leaves)).plan.all_sites()
    grouped = any(
        e.params["feature_group_count"] * e.params["batch_group_count"] > 1 for e in convolutions
    )
    at_sites = sum(s.primitive.name == name for s in sites)
    return at_sites < len(convolutions) or (grouped and not ghost)


def solve_ghost(
    problem: ClippingProblem,
    machine: Machine,
    methods: Sequence[leaves.Method] | None = None,
    report: Callable[[LeafReport], None] | None = None,
    memory_limit: float | None = None,
) -> ClippedSums:
    """Returns clipped sums by book-keeping.

    Args:
      problem: the call.
      machine: the device's speeds, by which methods are chosen.
      methods: those to choose from, where a leaf allows one of them; None: all.
      report: called for each leaf, while tracing, with the method that is used.
      memory_limit: bytes of a device for what is recorded and kept; None: no limit. On a CPU, a few
        units' gradients are kept at a time, which take little memory.
    """
    closed, out_tree = trace_loss(problem)
    analysis = analyse(closed.jaxpr, len(problem.leaves))
    sites: dict[int, list[Site]] = {}
    for site in analysis.plan.all_sites():
        sites.setdefault(site.view.leaf, []).append(site)
    passes = functools.partial(_passes, problem, closed, out_tree, analysis.copied)
    choose = functools.partial(_choose, problem, sites, machine, methods, memory_limit)
    plan, early, choices = analysis.plan, frozenset[int](), None
    if machine.keep_factor is None and _single_products(sites):
        # Which gradients the backward pass itself forms must be known before it is traced.
        choices = _of_shapes(lambda: choose(passes(plan)))
        early = frozenset(i for i, (choice, _) in choices.items() if choice.formed_early)
    plan = plan.changed(early, pinned=machine.rounds_in_loops)
    passed = losses, aux, copies, _, gradients = passes(plan)
    if choices is None:
        choices = choose(passed)
    pairs_of = _pairs_of(problem, {i: x for i, x in sites.items() if i not in early}, passed)

    n = problem.num_units
    squared: dict[int, jax.Array] = {}
    rounded: list[jax.Array | None] = [None] * len(problem.leaves)
    summed: dict[int, Callable[[jax.Array, jax.Array], jax.Array]] = {}
    formed: dict[int, leaves.Kept] = {}
    entries: dict[int, LeafReport] = {}
    for i, (name, leaf) in enumerate(zip(problem.names, problem.leaves)):
        shape, uses = tuple(leaf.shape), sites.get(i, [])
        if i in analysis.copied:
            squared[i] = squared_norms([copies[i]])[0]
            summed[i] = functools.partial(weighted_sum, copies[i], parts=problem.parts)
            seconds = machine.seconds(0.0, 12.0 * leaf.size)
            entry = LeafReport(name, shape, COPIES, 0, analysis.copied[i], seconds, 4.0 * leaf.size)
        elif not uses:
            axes = axes_of(jax.typeof(leaf))
            squared[i] = vary(jnp.zeros((n,), jnp.float32), axes)
            zeros = vary(jnp.zeros(shape, jnp.float32), axes)
            summed[i] = functools.partial(lambda zeros, weights, keep: zeros, zeros)
            entry = LeafReport(name, shape, "zero", 0, "the loss does not depend on it", 0.0, 0.0)
        else:
            choice, cheapest = choices[i]
            seconds, held = choice.costs.get(choice.method, 0.0), choice.recorded
            if i in early:
                (site,), held = uses, choice.kept
                kept = leaves.Early(site.view, gradients[site.index], shape)
                squared[i], summed[i] = kept.squared, kept.summed
            elif choice.method in leaves.KEPT:
                fused = choice.method == "fused"
                formed[i] = leaves.Kept(pairs_of[i], shape, choice.narrow, fused, problem.parts)
            else:
                pairs = pairs_of[i]
                squared[i] = leaves.squared_norm(
                    pairs, shape, choice.method, n, machine, problem.shards
                )
                rounded[i] = leaves.rounding(pairs, machine)
                summed[i] = functools.partial(leaves.summed_gradient, pairs, shape)
            how = (choice.method, len(uses), choice.reason, seconds, held)
            entry = LeafReport(name, shape, *how, cheapest)
        entries[i] = entry

    per_part = n // problem.shards
    size = per_part  # with units split over devices, sums are added over devices only once
    if problem.parts == 1:
        size = microbatch_size([kept.pairs for kept in formed.values()], n, machine)
    if report is not None:
        for i, entry in entries.items():
            more = choices[i][0].kept * size / per_part if i in formed else 0.0
            report(dataclasses.replace(entry, recorded=entry.recorded + more))

    units, sums = clip_and_sum(problem, squared, rounded, formed, size)
    sums |= {i: f(units.weights[i], units.keeps[i]) for i, f in summed.items()}
    return problem.clipped_sums([sums[i] for i in range(len(sums))], units, losses, aux)


_Passed = tuple[jax.Array, Any, dict[int, jax.Array], dict[Any, jax.Array], Tokens]
# For each leaf, how its norm is computed, and how it would be with as much memory as that takes.
_Choices = dict[int, tuple[leaves.MethodChoice, leaves.MethodChoice]]


def _choose(
    problem: ClippingProblem,
    sites: Mapping[int, list[Site]],
    machine: Machine,
    methods: Sequence[leaves.Method] | None,
    memory_limit: float | None,
    passed: _Passed,
) -> _Choices:
    _, _, copies, records, gradients = passed
    per_leaf, n = problem.rule.is_per_leaf, problem.num_units
    cheapest = {
        i: leaves.choose(
            pairs,
            problem.leaves[i].size,
            machine,
            leaves.METHODS if methods is None else methods,
            is_per_leaf=per_leaf,
            split=_splits(problem, machine) or (methods is None and not _is_alone()),
            parts=problem.parts,
        )
        for i, pairs in _pairs_of(problem, sites, passed).items()
    }
    for i in _single_products(sites) if machine.keep_factor is None else ():
        freed = gradients[sites[i][0].index].nbytes / n
        cheapest[i] = dataclasses.replace(cheapest[i], freed=freed)
    chosen = cheapest
    if memory_limit is not None and machine.keep_factor is None:
        taken = sum(x.nbytes for x in jax.tree.leaves((records, gradients, copies))) / n
        room = memory_limit * problem.parts / n - taken
        chosen = leaves.within_memory(cheapest, room, per_leaf)
    return {i: (chosen[i], cheapest[i]) for i in cheapest}


def _of_shapes(choose: Callable[[], _Choices]) -> _Choices:
    """Runs ``choose`` on abstract arrays, as it depends on shapes and dtypes alone."""
    found: list[_Choices] = []
    jax.eval_shape(lambda: found.append(choose()))
    return found[0]


def _single_products(sites: Mapping[int, list[Site]]) -> list[int]:
    """Leaves whose only use is a bfloat16 product with a tap of its own; loops are over layers."""
    taps = collections.Counter(site.index for uses in sites.values() for site in uses)
    return [
        i
        for i, (site, *more) in sites.items()
        if not more
        and site.primitive is jax.lax.dot_general_p
        and taps[site.index] == 1
        and all(site.view.loops)
        and 0 not in site.view.shape
        and site.out.dtype == site.inputs[site.position].dtype == jnp.bfloat16
    ]


def _splits(problem: ClippingProblem, machine: Machine) -> bool:
    """Whether the compiler splits arrays over devices: it cannot split the kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    free = [size for name, size in mesh.shape.items() if name not in mesh.manual_axes]
    if machine.mosaic and mesh.manual_axes and free:
        return True
    return problem.sharding is not None or max(free, default=1) > 1


def _is_alone() -> bool:
    """Whether this is one device's program, and not one that the compiler may split."""
    return jax.device_count() == 1 or bool(jax.sharding.get_abstract_mesh().manual_axes)


def _passes(
    problem: ClippingProblem, closed: Any, out_tree: Any, copied: Iterable[int], plan: TapPlan
) -> _Passed:
    """Losses, auxiliary outputs, gradients of copied leaves, records, gradients at the taps."""
    n = problem.num_units
    tokens: Tokens = {}
    depth_of: dict[int, int] = {}
    for site in plan.all_sites():
        lengths = site.lengths
        shape = (*lengths, n, *(site.view.shape if site.early else site.out.shape))
        tokens[site.index] = vary(jnp.zeros(shape, site.out.dtype), axes_of(site.out))
        depth_of[site.index] = len(lengths)
    copies = {i: jnp.broadcast_to(problem.leaves[i], (n, *problem.leaves[i].shape)) for i in copied}

    def single(
        copied: dict[int, jax.Array], tokens: Tokens, unit: Any
    ) -> tuple[jax.Array, tuple[Any, Recorded]]:
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
    of_copies, gradients = backward(jnp.ones_like(losses))
    early = {site.index for site in plan.all_sites() if site.early}

    def settled(x: jax.Array, depth: int, done: bool = False) -> jax.Array:
        done |= plan.pinned and x.dtype == jnp.bfloat16
        return problem.place(x if done else pinned(x), depth)

    flat = {k: settled(x, depth) for depth, group in records.items() for k, x in group.items()}
    gradients = {k: settled(x, depth_of[k], k in early) for k, x in gradients.items()}
    return losses, aux, {i: pinned(g) for i, g in of_copies.items()}, flat, gradients


def _pairs_of(
    problem: ClippingProblem, sites: Mapping[int, list[Site]], passed: _Passed
) -> dict[int, list[Pair]]:
    """The factors of the uses of each leaf."""
    records, gradients = passed[3:]
    return {
        i: _pairs(uses, records, gradients, lazy=problem.parts == 1)
        for i, uses in sorted(sites.items())
    }


def _pairs(
    sites: list[Site], records: dict[Any, jax.Array], gradients: Tokens, lazy: bool
) -> list[Pair]:
    """The factors of all uses of one leaf; uses of equal form are merged.

    Unless ``lazy``, windows are formed for all units: if XLA splits units over devices, it counts
    some gradients of grouped convolutions several times (and on one device it is slow at them).
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


# ---- the method ``keep``: gradients are formed, clipped and added up a few units at a time -------
# A unit's gradient that was formed for its norm is kept for the sum, so that no product is computed
# twice. Only a few units' gradients exist at a time, so they take little memory, and stay in the
# cache between norm and sum.


def microbatch_size(uses: Sequence[Sequence[Pair]], units: int, machine: Machine) -> int:
    """Returns how many units' gradients exist at a time, a divisor of ``units``.

    Args:
      uses: the uses of each parameter whose gradients are formed.
      units: number of units in one part of the unit axis.
      machine: the device, whose cache should hold the gradients.
    """
    if machine.cache is None or not uses:
        return units
    gradients = sum(leaves.formed_bytes(pairs) for pairs in uses)
    most = machine.cache / max(1.0, *(leaves.formed_bytes(p, windows=True) for p in uses))
    if gradients > machine.cache:  # they do not fit in any case: add to the sums less often
        most = max(most, (machine.working_set or gradients) / gradients)
    return max(k for k in range(1, units + 1) if units % k == 0 and k <= max(1.0, most))


def clip_and_sum(
    problem: ClippingProblem,
    squared: Mapping[int, jax.Array],
    rounded: Sequence[jax.Array | None],
    formed: Mapping[int, leaves.Kept],
    size: int,
) -> tuple[UnitWeights, dict[int, jax.Array]]:
    """Computes the weights of all units, and sums the weighted gradients of formed leaves.

    Args:
      problem: the call, with the units of ``formed``.
      squared: squared norms [n] for each leaf whose gradients are not formed.
      rounded: as ``ClippingProblem.unit_weights`` takes it.
      formed: the leaves whose gradients are formed.
      size: number of units of each part of the unit axis at a time.

    Returns:
      The weights, and the sum for each leaf of ``formed``, float32 with the leaf's shape.
    """
    n, shards = problem.num_units, problem.shards
    steps = n // (shards * size)

    def some(i: jax.Array | None) -> tuple[UnitWeights, dict[int, list[jax.Array]]]:
        def pick(x: jax.Array) -> jax.Array:
            return x if i is None else leaves.pick(x, 0, i, shards, size, bits=True)

        gradients, squares = {}, {k: pick(x) for k, x in squared.items()}
        for k, kept in formed.items():
            if i is not None:  # only on a CPU
                pairs = [leaves.units_of(p, i, shards, size, bits=True) for p in kept.pairs]
                kept = dataclasses.replace(kept, pairs=pairs)
            gradients[k], squares[k] = leaves.formed_gradients(kept)
        every = (problem.real, problem.weight, problem.bound)
        real, weight, bound = jax.tree.map(pick, every)
        part = dataclasses.replace(problem, real=real, weight=weight, bound=bound)
        extra = [None if x is None else pick(x) for x in rounded]
        units = part.unit_weights([squares[k] for k in sorted(squares)], extra)
        return units, {
            k: [weighted_sum(x, units.weights[k], units.keeps[k], problem.parts) for x in uses]
            for k, uses in gradients.items()
        }

    if steps == 1:
        units, sums = some(None)
    else:
        like = jax.eval_shape(lambda: some(jnp.zeros((), jnp.int32))[1])
        axes = varying_axes(problem.leaves, problem.real, dict(squared))
        zeros = vary(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like), axes)
        compensated = problem.rule.compensated or accumulate.needs_compensation(n, steps)
        errors = accumulate.start(zeros, compensated)

        def body(carry: Any, i: jax.Array) -> tuple[Any, UnitWeights]:
            units, more = some(i)
            sums, errors = carry
            return accumulate.add(sums, errors, more), units

        total, parts = jax.lax.scan(body, (zeros, errors), jnp.arange(steps))
        sums = accumulate.finish(*total)
        units = jax.tree.map(functools.partial(_in_order, shards=shards), parts)
    return units, {k: leaves.as_leaf(formed[k], x) for k, x in sums.items()}


def _in_order(parts: jax.Array, shards: int) -> jax.Array:
    """Reorders [steps, shards * size, ...] to [n, ...]."""
    steps, count = parts.shape[:2]
    split = parts.reshape(steps, shards, count // shards, *parts.shape[2:]).swapaxes(0, 1)
    return split.reshape(steps * count, *parts.shape[2:])
