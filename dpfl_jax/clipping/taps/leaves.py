"""Squared norms and weighted sums of one parameter's gradients, over all its uses.

A unit's gradient is g = sum_k L_k R_k^T over K positions, with factors of widths a and b (module
``factors``), so that |g|^2 = sum_{k,m} <L_k, L_m> <R_k, R_m>. The cheapest method wins:

* ``gram``: that sum, from the K x K Gram matrices of both factors, in 2 K^2 (a + b) operations;
* ``direct``: form each unit's gradient in turn and keep only its norm, in 2 K a b operations;
* ``tiles``: the same by a kernel that writes no gradient (``kernel``);
* ``keep``: form each unit's gradient and keep it for the sum (``engine``), with no more operations
  than training without privacy, but a b numbers in memory for each unit of a microbatch;
* ``fused``: the same by a kernel that also computes the norm.

Rounding must never make a norm smaller than the norm of what is summed. The allowances that are
added to norms for that (``_bounds``, ``_order``, ``_absorbed``, ``rounding``) are proportional to
sum_k |L_k| |R_k|, which is at least |g|, and equal to it where positions do not cancel.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from dpfl_jax.clipping.cost import Machine
from dpfl_jax.clipping.per_unit import squared_norms, weighted_sum
from dpfl_jax.clipping.result import pinned
from dpfl_jax.clipping.taps import kernel
from dpfl_jax.clipping.taps.factors import (
    UNIT,
    Dense,
    Label,
    OneHot,
    Pair,
    Windows,
    einsum,
    formed,
    precision_of,
)
from dpfl_jax.clipping.taps.views import View
from dpfl_jax.varying import axes_of, vary

Method = Literal["gram", "direct", "tiles", "keep", "fused"]
METHODS: tuple[Method, ...] = ("gram", "direct", "tiles", "keep", "fused")
KEPT: tuple[Method, ...] = ("keep", "fused")  # hold each unit's gradient until it is summed

# A squared norm from Gram matrices is a sum of terms of both signs. Its rounding error is at most
# a few float32 epsilons of (sum_k |L_k| |R_k|)^2. A sum that has cancelled down to that size is
# unknown, and its largest possible value is taken: too much clipping, never too little.
_FLOOR = 32 * float(jnp.finfo(jnp.float32).eps)
# The weighted sum over K positions is accumulated in another order than the norm. The difference
# is random, of about eps/2 sqrt(K) sum_k |L_k| |R_k|; 128 times that, added in squares, leaves less
# than 1e-4 of the norm uncovered where positions cancel, and changes nothing where they do not.
_ORDER = 64 * float(jnp.finfo(jnp.float32).eps)
# Contributions of uses of different form are summed over all units separately, and then added. If
# the uses of one unit cancel, its weight may be large, and each use alone absorbs what others add
# in float32: with n units and K positions at most n K eps/2 of its size. So the norm is taken to be
# at least the size at which that is a 32nd of the bound.
_ABSORBED = 16 * float(jnp.finfo(jnp.float32).eps)
# The squares of vectors with smaller entries underflow, while their product with the other factor
# may be of any size: such positions are counted with a bound.
_UNDERFLOW = 1e-15
# The square of a smaller number may underflow.
_LOST = 2.0**-63
# Gram matrices are symmetric: from so many positions on they are cut into four parts, each of which
# is multiplied only by itself and the parts after it, ten of sixteen products. Narrower products
# would take as long on a TPU.
_LONG, _PARTS = 512, 4
# On a CPU, gradients may be this many times larger if a leaf's sum waits for no other norm.
_FREED_EARLY = 4.0


@dataclasses.dataclass(frozen=True)
class MethodChoice:
    """How one leaf's norm is computed, and what each method would cost.

    Attributes:
      method: the chosen method.
      reason: the reason in words.
      costs: for each possible method, estimated seconds in addition to the weighted sum.
      recorded: bytes of one unit's factors.
      kept: bytes of one unit's gradient as ``keep`` and ``fused`` hold it.
      narrow: whether it is bfloat16 there.
      freed: bytes of one unit's factors that are not stored if the backward pass itself forms the
        gradient; 0: it cannot.
    """

    method: Method
    reason: str
    costs: dict[Method, float]
    recorded: float
    kept: float
    narrow: bool = False
    freed: float = 0.0

    @property
    def formed_early(self) -> bool:
        """Whether a loop over layers should store the gradient, as it is smaller than factors."""
        can = self.method == "keep" and self.narrow and self.freed > 0.0
        return can and self.kept < self.recorded

    @property
    def extra(self) -> float:
        """Bytes by which one unit's kept gradient exceeds the factors stored otherwise."""
        return max(0.0, self.kept - (self.freed if self.formed_early else 0.0))

    def without_keeping(self) -> MethodChoice:
        """Returns the cheapest method that keeps no gradients, if there is one."""
        costs = {m: c for m, c in self.costs.items() if m not in KEPT}
        if self.method not in KEPT or not costs:
            return self
        method = min(costs, key=lambda m: costs[m])
        reason = f"{costs[method] * 1e6:.1f} us a unit (no memory left for {self.method})"
        return dataclasses.replace(self, method=method, reason=reason)

    @property
    def seconds_for_memory(self) -> float:
        """Seconds that keeping one unit's gradient saves, for each byte."""
        other = self.without_keeping().method
        return (self.costs[other] - self.costs[self.method]) / max(1.0, self.extra)


def _sizes(pair: Pair) -> dict[Label, int]:
    sizes = dict(zip(pair.right.labels, pair.right.array.shape))
    if isinstance(pair.left, OneHot):
        sizes |= dict(zip(pair.left.labels, pair.left.indices.shape))
        return sizes | {pair.left.hot: pair.left.size}
    return sizes | dict(zip(pair.left.labels, pair.left.shape))


def _left_coordinates(pair: Pair) -> tuple[Label, ...]:
    extra = (pair.left.hot,) if isinstance(pair.left, OneHot) else ()
    return tuple(x for x in (*pair.left.labels, *extra) if x in pair.coordinates)


def _right_coordinates(pair: Pair) -> tuple[Label, ...]:
    return tuple(x for x in pair.right.labels if x in pair.coordinates)


def _shared(pair: Pair) -> frozenset[Label]:
    return frozenset(_left_coordinates(pair)) & frozenset(_right_coordinates(pair))


def _form(pair: Pair) -> tuple[frozenset[Label], frozenset[Label], frozenset[Label]]:
    """Coordinates of only the left factor, only the right one (both without length 1), and both."""
    sizes, shared = _sizes(pair), _shared(pair)

    def unshared(labels: Sequence[Label]) -> frozenset[Label]:
        return frozenset(x for x in labels if x not in shared and sizes[x] != 1)

    return unshared(_left_coordinates(pair)), unshared(_right_coordinates(pair)), shared


def gram_possible(pairs: Sequence[Pair]) -> bool:
    """Returns whether Gram matrices can give the norm over all uses, including cross terms."""
    if not all(p.site.view.faithful for p in pairs):
        return False
    if len(pairs) == 1:
        return True
    return all(_comparable(p, q) for p, q in itertools.combinations(pairs, 2))


def _comparable(p: Pair, q: Pair) -> bool:
    """Whether the inner product of two uses' gradients is zero, or Gram matrices can give it."""
    if p.site.view.apart_from(q.site.view):
        return True
    (a, b, shared), (c, d, other) = _form(p), _form(q)
    one_hot = isinstance(p.left, OneHot) or isinstance(q.left, OneHot)
    return (
        p.site.view.cuts == q.site.view.cuts
        and shared == other
        and {a, b} == {c, d}
        and not (one_hot and shared)
    )


def choose(
    pairs: Sequence[Pair],
    size: int,
    machine: Machine,
    methods: Sequence[Method] = METHODS,
    *,
    is_per_leaf: bool = False,
    split: bool = False,
    parts: int = 1,
) -> MethodChoice:
    """Returns the cheapest method for the norm of one leaf.

    Args:
      pairs: the leaf's uses.
      size: number of entries of the leaf.
      machine: the device's speeds.
      methods: those to choose from; one that is not possible for this leaf does not count.
      is_per_leaf: whether the leaf's sum waits for no other leaf's norm.
      split: whether the compiler splits units over devices, or may: it cannot split the kernel.
      parts: the number of parts into which devices split the unit axis.
    """
    counted = []
    for p in pairs:
        sizes = _sizes(p)
        left, right, shared = (math.prod(sizes[x] for x in part) for part in _form(p))
        positions = math.prod(sizes[x] for x in p.positions)
        if isinstance(p.left, OneHot):
            left = 0
        of_all = set(p.positions).isdisjoint(p.right.labels)  # one gradient for all positions
        counted.append((positions, left, right, right / positions if of_all else right, shared))
    costs: dict[Method, float] = {}
    if gram_possible(pairs):
        costs["gram"] = 0.0
        for i, j in itertools.combinations_with_replacement(range(len(pairs)), 2):
            (k, a, _, b, s), m = counted[i], counted[j][0]
            met = (0.5 + 0.5 / _parts(pairs[i])[1] if i == j else 1.0) * k * m
            x, d = (_gram_rate(pairs[i], side, machine) for side in (pairs[i].left, pairs[i].right))
            costs["gram"] += 2.0 * s * met * (a / x + b / d)
            costs["gram"] += machine.seconds(0.0, 16.0 * s * met)
    flops = sum(2.0 * s * k * (b if a == 0 else a * b) for k, a, b, _, s in counted)
    costs["direct"] = machine.seconds(flops, 8.0 * size)
    recorded = unformed = 0.0
    for p, (k, a, _, b, s) in zip(pairs, counted):
        back = s * k * b * p.right.bits / 8.0
        data = 0.0 if isinstance(p.left, OneHot) else s * k * a * p.left.bits / 8.0
        recorded += data + back
        if isinstance(p.left, Windows) and machine.cache is not None:
            data = p.left.array.nbytes / _sizes(p)[UNIT]  # windows exist for a few units at a time
        unformed += data + back
    # Keeping also gives the weighted sum, so only memory traffic is extra: gradients are written,
    # read for the norm and read for the sum.
    narrow = kept_narrow(pairs, machine, parts)
    kept = (2.0 if narrow else 4.0) * size
    most = (machine.keep_factor or math.inf) * recorded * (_FREED_EARLY if is_per_leaf else 1.0)
    if kept <= most or methods == ("keep",):
        costs["keep"] = machine.seconds(0.0, 3.0 * kept)
    if not split and machine.kernel is not None and _for_kernel(pairs) is not None:
        (k, a, b, _, s) = counted[0]
        k, a, b = kernel.padded(k, a, b)
        product = 2.0 * s * k * a * b
        costs["tiles"] = product / machine.kernel
        if narrow:  # the kernel takes the place of XLA's product, which costs nothing extra
            slower = product * (1.0 / machine.kernel - 1.0 / machine.flops)
            costs["fused"] = slower + machine.seconds(0.0, 2.0 * kept)
    costs = {m: c for m, c in costs.items() if m in methods} or costs
    method = min(costs, key=lambda m: costs[m])
    others = ", ".join(f"{m} {c * 1e6:.1f} us" for m, c in costs.items() if m != method)
    reason = f"{costs[method] * 1e6:.1f} us a unit" + (f" ({others})" if others else "")
    if methods == (method,):
        reason = "asked for"
    elif "gram" in methods and "gram" not in costs:
        reason += "; its uses do not share coordinates, so no Gram matrices"
    held = recorded if method == "gram" else unformed
    return MethodChoice(method, reason, costs, held, kept, narrow)


def within_memory(
    choices: dict[int, MethodChoice], room: float | None, is_per_leaf: bool
) -> dict[int, MethodChoice]:
    """Returns the choices, of which those that gain least for their memory keep no gradients.

    Args:
      choices: for each leaf.
      room: bytes for one unit's gradients; None: as many as they take.
      is_per_leaf: whether gradients of one leaf are freed before those of the next are formed, but
        for those that the backward pass forms.
    """
    choices = dict(choices)
    keeping = [i for i, c in choices.items() if c.method in KEPT]
    keeping.sort(key=lambda i: choices[i].seconds_for_memory)
    held = {i: choices[i].extra for i in keeping}

    def with_it(i: int) -> float:
        """Bytes of kept gradients while that of leaf ``i`` is among them."""
        early = sum(x for k, x in held.items() if choices[k].formed_early)
        later = [x for k, x in held.items() if not choices[k].formed_early]
        if not is_per_leaf:
            return early + sum(later)
        return early + (max(later, default=0.0) if choices[i].formed_early else held[i])

    for i in keeping:
        if room is None or held[i] == 0.0 or with_it(i) <= room:
            continue
        choices[i] = choices[i].without_keeping()
        if choices[i].method not in KEPT:
            del held[i]
    return choices


def kept_narrow(pairs: Sequence[Pair], machine: Machine, parts: int) -> bool:
    """Whether kept gradients are bfloat16: where the loss computes all their products in it.

    Not on a CPU, whose products are float32, and whose cache holds kept gradients. Not where
    products are added up, either: a compiler would then hold the sum in float32. (Rows of a tied
    embedding are added in place.)
    """
    products, rows = _apart(pairs)
    sides = [side for p in products for side in (p.left, p.right)]
    return (
        machine.keep_factor is None
        and Kept(products, (), parts=parts).as_formed
        and (not rows or len(products) == 1)
        and all(not isinstance(x, OneHot) and x.array.dtype == jnp.bfloat16 for x in sides)
    )


def _for_kernel(pairs: Sequence[Pair]) -> tuple[jax.Array, jax.Array] | None:
    """The factors of a leaf's only use as ``kernel`` takes them; None if it cannot."""
    (pair, *more) = pairs
    left, right = pair.left, pair.right
    if more or not isinstance(left, Dense) or not pair.site.view.faithful:
        return None
    if left.array.dtype != jnp.bfloat16 or right.array.dtype != jnp.bfloat16:
        return None
    sizes = _sizes(pair)
    shared = tuple(x for x in pair.coordinates if x in _shared(pair))
    factors = []
    for side, own in ((left, _left_coordinates(pair)), (right, _right_coordinates(pair))):
        own = tuple(x for x in own if x not in shared)
        if set(side.labels) != {UNIT, *shared, *pair.positions, *own}:
            return None
        groups = (shared, (UNIT,), pair.positions, own)
        array = _aligned(side.array, side.labels, tuple(itertools.chain(*groups)))
        factors.append(array.reshape([math.prod(sizes[x] for x in group) for group in groups]))
    return None if factors[0].shape[2] > kernel.MOST_POSITIONS else (factors[0], factors[1])


def _gram_rate(pair: Pair, side: Dense | OneHot | Windows, machine: Machine) -> float:
    """FLOPs per second for a factor's Gram matrix."""
    narrow = isinstance(side, OneHot) or side.bits <= 16  # products do not round these
    exact = machine.rounding > 0.0 and not narrow and _reduced(pair)
    return machine.exact if exact else machine.gram


def product(pair: Pair, per_unit: bool, narrow: bool = False) -> jax.Array:
    """Returns the view's gradient: [n, *shape] per unit, or [*shape] summed over units.

    It is float32; if ``narrow``, the gradients of units are bfloat16 where both factors are.
    """
    lead: tuple[Label, ...] = (UNIT,) if per_unit else ()
    if isinstance(pair.left, OneHot):
        out = _scatter(pair, pair.left, lead)
    elif isinstance(pair.left, Windows) and not per_unit:
        out = _convolved(pair, pair.left)
    else:
        out = _contracted(pair, lead, narrow)
    return out.reshape(*out.shape[: len(lead)], *pair.shape)


def _contracted(pair: Pair, lead: tuple[Label, ...], narrow: bool = False) -> jax.Array:
    left = formed(pair.left)
    assert isinstance(left, Dense)
    # Of two operands, einsum puts the last one first.
    return einsum([pair.right, left], (*lead, *pair.coordinates), precision_of(pair.site), narrow)


def _convolved(pair: Pair, left: Windows) -> jax.Array:
    """The sum over units by JAX's gradient of the convolution, which forms no windows."""
    site, lead = pair.site, left.lead
    stacked = [i for i, sliced in enumerate(site.view.loops) if sliced]
    params = site.params | {"preferred_element_type": jnp.float32}

    def gradient(x: jax.Array, d: jax.Array) -> jax.Array:
        def convolve(kernel: jax.Array) -> jax.Array:
            def of(x: jax.Array) -> jax.Array:
                return site.primitive.bind(x, kernel, **params)

            for _ in range(lead - len(stacked)):
                of = jax.vmap(of)
            return of(x)

        kernel = jnp.zeros(pair.shape[len(stacked) :], jnp.float32)
        return jax.vjp(convolve, vary(kernel, axes_of(jax.typeof(x))))[1](d)[0]

    for outer in reversed(range(len(stacked))):
        gradient = jax.vmap(gradient, in_axes=stacked[outer] - outer)
    x, d = left.array, pair.right.array
    d = d.reshape(*d.shape[:lead], *site.out.shape)
    x, d = (vary(y.astype(jnp.float32), axes_of(jax.typeof(z))) for y, z in ((x, d), (d, x)))

    # Libraries of other devices choose algorithms with more rounding than a plain sum has.
    def contracted(x: jax.Array, d: jax.Array) -> jax.Array:
        right = dataclasses.replace(pair.right, array=d.reshape(pair.right.shape))
        out = _contracted(dataclasses.replace(pair, left=left.on(x), right=right), ())
        return out.reshape(pair.shape)

    return jax.lax.platform_dependent(x, d, cpu=gradient, tpu=gradient, default=contracted)


def _scatter(pair: Pair, left: OneHot, lead: tuple[Label, ...]) -> jax.Array:
    sizes = _sizes(pair)
    shared = tuple(x for x in left.labels if x in pair.coordinates)
    summed = tuple(x for x in left.labels if x not in shared and x not in lead)
    rest = tuple(x for x in pair.coordinates if x not in shared and x != left.hot)
    kept = (*lead, *shared)
    rows = math.prod(sizes[x] for x in kept)
    indices = _aligned(left.indices, left.labels, (*kept, *summed)).reshape(rows, -1)
    values = _aligned(pair.right.array, pair.right.labels, (*kept, *summed, *rest))
    values = jnp.broadcast_to(values, [sizes[x] for x in (*kept, *summed, *rest)])
    values = values.reshape(rows, indices.shape[1], -1).astype(jnp.float32)

    def one(index: jax.Array, value: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(value, index, left.size)

    out = one(indices[0], values[0])[None] if rows == 1 else jax.vmap(one)(indices, values)
    labels = (*kept, left.hot, *rest)
    out = out.reshape(*[sizes[x] for x in labels])
    return _aligned(out, labels, (*lead, *pair.coordinates))


def _aligned(array: jax.Array, labels: Sequence[Label], wanted: Sequence[Label]) -> jax.Array:
    """Transposes to the order of ``wanted``, with axes of length 1 for missing labels."""
    present = [x for x in wanted if x in labels]
    array = array.transpose([tuple(labels).index(x) for x in present])
    at = iter(array.shape)
    return array.reshape([next(at) if x in labels else 1 for x in wanted])


def unit_gradients(
    pairs: Sequence[Pair], leaf_shape: tuple[int, ...], narrow: bool = False
) -> jax.Array:
    """Returns per-unit gradients of the leaf [n, *leaf_shape]; float32, ``narrow``: bfloat16."""
    rest, looked_up = _apart(pairs)
    parts = _gradients_of_uses(rest, leaf_shape, narrow)
    total = sum(parts[1:], start=parts[0])
    # The gradients of a tied embedding's rows are added in place to the gradient of the head.
    for p in looked_up:
        total = _add_rows(p, total)
    return total


def _apart(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Uses whose gradients are formed (at least one), and lookups of rows to add to them."""
    looked_up = [p for p in pairs if isinstance(p.left, OneHot) and _is_of_rows(p, p.left)]
    rest = [p for p in pairs if not any(p is q for q in looked_up)]
    return (rest, looked_up) if rest else (looked_up[:1], looked_up[1:])


def _is_of_rows(pair: Pair, left: OneHot) -> bool:
    """Whether a lookup reads rows of the leaf itself."""
    return not pair.site.view.ops and not _shared(pair) and pair.coordinates[0] == left.hot


def _add_rows(pair: Pair, total: jax.Array) -> jax.Array:
    """Adds a lookup's gradients to those of the leaf, [n, *leaf shape]."""
    left, places, sizes = pair.left, pair.positions, _sizes(pair)
    assert isinstance(left, OneHot)
    axes = (UNIT, *places, *pair.coordinates[1:])
    index = _aligned(left.indices, left.labels, (UNIT, *places)).reshape(len(total), -1)
    values = _aligned(pair.right.array, pair.right.labels, axes)
    values = jnp.broadcast_to(values, [sizes[x] for x in axes])
    values = values.reshape(*index.shape, *total.shape[2:]).astype(jnp.float32)
    if total.dtype == jnp.bfloat16:
        return jax.vmap(_with_rows)(total, index, values)
    return jax.vmap(lambda t, i, v: t.at[i].add(v, mode="drop"))(total, index, values)


def _with_rows(total: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    """``total`` with float32 ``values`` added to its rows ``index``; each row is rounded once."""
    if not len(index):
        return total
    places = jnp.arange(len(index))
    first = jnp.argmax(index[:, None] == index[None], axis=1)  # where a place's row is met first
    rows = total[index].astype(jnp.float32) + jax.ops.segment_sum(values, first, len(index))
    once = jnp.where((first == places) & (index < len(total)), index, len(total) + places)
    return total.at[once].set(rows.astype(total.dtype), mode="drop", unique_indices=True)


def _gradients_of_uses(
    pairs: Sequence[Pair], leaf_shape: tuple[int, ...], narrow: bool = False
) -> list[jax.Array]:
    return [
        jax.vmap(lambda g, p=p: p.site.view.to_leaf(g, leaf_shape))(product(p, True, narrow))
        for p in pairs
    ]


def summed_gradient(
    pairs: Sequence[Pair], leaf_shape: tuple[int, ...], weights: jax.Array, keep: jax.Array
) -> jax.Array:
    """Returns the sum over units of weight times gradient, float32 [*leaf_shape]."""
    total = []
    for p in pairs:
        left, right = p.left, p.right
        if isinstance(left, OneHot):
            # No matrix product follows, so float32 costs nothing and nothing is rounded.
            right = Dense(right.array.astype(jnp.float32), right.labels).scaled(weights, keep)
        elif isinstance(left, Dense) and left.array.size < right.array.size:
            left, right = left.scaled(weights, keep), right.keep(keep)
        else:
            left, right = left.keep(keep), right.scaled(weights, keep)
        weighted = dataclasses.replace(p, left=left, right=right)
        total.append(p.site.view.to_leaf(product(weighted, per_unit=False), leaf_shape))
    return sum(total[1:], start=total[0])


def squared_norm(
    pairs: Sequence[Pair],
    leaf_shape: tuple[int, ...],
    method: Method,
    num_units: int,
    machine: Machine,
    shards: int = 1,
) -> jax.Array:
    """Returns squared norms of each unit's gradient that is not kept, float32 [n].

    ``direct`` takes one unit at a time from each of the ``shards`` parts of the unit axis.
    """
    if method == "gram":
        return _gram(pairs, machine)
    if method == "tiles":
        factors = _for_kernel(pairs)
        assert factors is not None
        squared = _rescaled(kernel.squares(*factors), pairs[0].scale)
        return squared + jnp.square(_order(pairs))

    def one(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        parts = _gradients_of_uses(
            [units_of(p, i, shards, 1, machine.cache is not None) for p in pairs], leaf_shape
        )
        whole = sum(parts[1:], start=parts[0])
        if len(parts) == 1:
            return (square := squared_norms([whole])[0]), 0.0 * square
        each = [jnp.sqrt(squared_norms([x])[0]) for x in parts]
        return squared_norms([whole])[0], sum(each[1:], start=each[0])

    squared, uses = jax.lax.map(one, jnp.arange(num_units // shards))
    squared = squared.T.reshape(num_units) + jnp.square(_order(pairs))
    if len(pairs) == 1:
        return squared
    return squared + jnp.square(_absorbed(pairs, num_units) * uses.T.reshape(num_units))


def _spread(pair: Pair) -> float:
    """The largest factor by which ``View.to_leaf`` may lengthen a gradient."""
    return 1.0 if pair.site.view.faithful else math.sqrt(math.prod(pair.shape))


def _order(pairs: Sequence[Pair]) -> jax.Array:
    """A generous bound [n] on how far the order of summation moves the gradient of a unit."""
    parts = []
    for p in pairs:
        sizes = _sizes(p)
        positions = math.prod(sizes[x] for x in p.positions)
        parts.append(_ORDER * math.sqrt(max(1, positions)) * _absolute(p))
    return sum(parts[1:], start=parts[0])


def _absorbed(pairs: Sequence[Pair], num_units: int) -> float:
    """The share of the sum of the uses' norms that the norm is taken to reach (``_ABSORBED``)."""
    positions = max(math.prod(_sizes(p)[x] for x in p.positions) for p in pairs)
    return min(1.0, _ABSORBED * num_units * positions)


def _absolute(pair: Pair) -> jax.Array:
    """An upper bound [n] on the sum over positions of |L| |R|, in units of the leaf's gradient."""
    absolute, hidden = _bounds(pair)
    return _spread(pair) * (absolute + hidden)


def rounding(pairs: Sequence[Pair], machine: Machine) -> jax.Array | None:
    """Returns a bound on each unit's error in ``summed_gradient``, divided by its weight; [n].

    Products in less than float32 round the weighted factors again. Where positions cancel, that is
    not small compared to the norm of their sum, so the norm must allow for it. None if nothing is
    rounded.
    """
    parts = [
        relative * _absolute(p) for p in pairs if (relative := _weights_rounding(p, machine)) > 0.0
    ]
    return sum(parts[1:], start=parts[0]) if parts else None


def _weights_rounding(pair: Pair, machine: Machine) -> float:
    if isinstance(pair.left, OneHot):
        return 0.0  # no matrix product follows
    scaled, other = pair.left, pair.right
    if isinstance(scaled, Windows) or scaled.array.size >= other.array.size:
        scaled, other = other, scaled
    weighted = 2.0**-8 if scaled.array.dtype == jnp.bfloat16 else 0.0
    if not _reduced(pair) or other.array.dtype == scaled.array.dtype == jnp.bfloat16:
        return weighted
    # Both the unweighted factor, whose norm was taken, and the weighted factor are rounded.
    return weighted + 2.0 * machine.rounding


def _reduced(pair: Pair) -> bool:
    """Whether a float32 product of this use may have less than float32 precision."""
    return precision_of(pair.site) in (None, jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH)


@dataclasses.dataclass(frozen=True)
class Kept:
    """How a leaf's gradients are formed and kept.

    Attributes:
      pairs: the leaf's uses.
      shape: shape of the leaf.
      narrow: whether gradients are rounded to bfloat16. Norms are those of the rounded numbers,
        and the sum is float32.
      fused: whether ``kernel`` forms them.
      parts: the number of parts into which devices split the unit axis.
    """

    pairs: Sequence[Pair]
    shape: tuple[int, ...]
    narrow: bool = False
    fused: bool = False
    parts: int = 1

    @functools.cached_property
    def as_formed(self) -> bool:
        """Whether each entry of the leaf is in at most one view, which are then not added up."""
        views = [p.site.view for p in self.pairs]
        return (
            self.parts == 1
            and not any(isinstance(p.left, OneHot) for p in self.pairs)
            and all(view.faithful for view in views)
            and all(a.apart_from(b) for a, b in itertools.combinations(views, 2))
        )

    def order(self, pair: Pair) -> tuple[Label, ...]:
        """Coordinates of a use's gradient in the order in which it is formed."""
        return _sides_order(pair) if self.fused else _fast_order(pair)


@dataclasses.dataclass(frozen=True)
class Early:
    """A leaf's gradients that the backward pass itself has formed, in bfloat16.

    Attributes:
      view: the leaf as its only use sees it.
      gradients: bfloat16 [lengths of the loops over its layers..., n, *view.shape].
      shape: shape of the leaf.
    """

    view: View
    gradients: jax.Array
    shape: tuple[int, ...]

    @property
    def of_units(self) -> jax.Array:
        """Per-unit gradients, bfloat16 [n, lengths of the loops..., *view.shape]."""
        return jnp.moveaxis(self.gradients, len(self.view.loops), 0)

    @property
    def squared(self) -> jax.Array:
        """Squared norms, float32 [n]."""
        return squared_norms([_scaled(self.of_units, self.view.scale)])[0]

    def summed(self, weights: jax.Array, keep: jax.Array) -> jax.Array:
        """Returns the sum over units of weight times gradient, float32 with the leaf's shape."""
        total = weighted_sum(self.of_units, weights, keep, parts=1)
        return self.view.to_leaf(total, self.shape)


def formed_gradients(kept: Kept) -> tuple[list[jax.Array], jax.Array]:
    """Returns per-unit gradients, which ``as_leaf`` puts in order, and squared norms, float32 [n].

    Uses of different entries stay separate, each with its axes in the order in which a product
    forms them fastest. If units are split over devices, the leaf's order is kept, because another
    order would be sent over devices once more.
    """
    pairs = kept.pairs
    if kept.fused:
        factors = _for_kernel(pairs)
        assert factors is not None
        gradient, squared = kernel.fused(*factors)
        sizes = _sizes(pairs[0])
        gradient = gradient.reshape(-1, *[sizes[x] for x in kept.order(pairs[0])])
        return [gradient], _rescaled(squared, pairs[0].scale)
    if kept.as_formed:
        gradients = [_fastest(p, kept.narrow) for p in pairs]
    else:
        gradients = [unit_gradients(pairs, kept.shape, kept.narrow)]
    if kept.narrow:
        gradients = [pinned(x) for x in gradients]
    if kept.parts > 1:  # keep the sharding of other axes, which flattening would undo
        return gradients, squared_norms(gradients)[0]
    squares = []
    for k, gradient in enumerate(gradients):
        scaled = _scaled(gradient, pairs[k].scale if kept.as_formed else 1.0)
        if kept.narrow:
            (square,) = squared_norms([scaled])
        else:
            flat = scaled.reshape(len(scaled), -1)
            square = jnp.einsum("nk,nk->n", flat, flat, precision=jax.lax.Precision.HIGHEST)
        squares.append(square)
    return gradients, sum(squares[1:], start=squares[0])


def _rescaled(squared: jax.Array, scale: float) -> jax.Array:
    """Squared norms of ``scale`` times the gradients; the square of a small scale may underflow."""
    return squared if abs(scale) == 1.0 else jnp.square(scale * jnp.sqrt(squared))


def _scaled(gradients: jax.Array, scale: float) -> jax.Array:
    """The leaf's gradients from a view's, whose own squares may underflow."""
    return gradients if abs(scale) == 1.0 else scale * gradients.astype(jnp.float32)


def as_leaf(kept: Kept, summed: Sequence[jax.Array]) -> jax.Array:
    """Returns the leaf's gradient, float32, made of sums of ``formed_gradients``."""
    if not kept.as_formed:
        return summed[0]
    leaves = []
    for pair, x in zip(kept.pairs, summed, strict=True):
        ordered = _aligned(x, kept.order(pair), pair.coordinates)
        leaves.append(pair.site.view.to_leaf(ordered.reshape(pair.shape), kept.shape))
    return sum(leaves[1:], start=leaves[0])


def formed_bytes(pairs: Sequence[Pair], windows: bool = False) -> float:
    """Returns the bytes of one unit's float32 gradient, with ``windows`` also of its windows."""
    total = 0.0
    for p in pairs:
        total += 4.0 * math.prod(p.shape)
        if windows and isinstance(p.left, Windows):
            total += math.prod(p.left.shape) * p.left.bits / 8.0 / _sizes(p)[UNIT]
    return total


def _sides_order(pair: Pair) -> tuple[Label, ...]:
    """Coordinates that both factors have, then those of the left one, then of the right one."""
    shared = _shared(pair)
    sides = (*_left_coordinates(pair), *_right_coordinates(pair))
    return (
        *(x for x in pair.coordinates if x in shared),
        *(x for x in sides if x not in shared),
    )


def _fast_order(pair: Pair) -> tuple[Label, ...]:
    """Coordinates of a use's gradient, in the order in which it is fastest to form and to sum.

    The first factor is transposed before the matrix product, at all positions. So it should be
    windows, which are formed that way, or else the narrower factor. But if the order is not the
    leaf's, the sum is transposed as well, which takes longer per number and outweighs the gain if
    there are few positions.
    """
    shared, sizes = _shared(pair), _sizes(pair)
    sides = [
        tuple(x for x in labels if x not in shared)
        for labels in (_left_coordinates(pair), _right_coordinates(pair))
    ]
    if not isinstance(pair.left, Windows):
        left, right = (math.prod(sizes[x] for x in labels) for labels in sides)
        positions = math.prod(sizes[x] for x in pair.positions)
        if positions * abs(left - right) <= 2 * left * right:
            return pair.coordinates
        if right < left:
            sides.reverse()
    return (*(x for x in pair.coordinates if x in shared), *sides[0], *sides[1])


def _fastest(pair: Pair, narrow: bool) -> jax.Array:
    order, left = _fast_order(pair), pair.left
    left = left.dense(positions_last=True) if isinstance(left, Windows) else left
    assert isinstance(left, Dense)
    sides = [left, pair.right]  # of two operands, einsum puts the last one first
    if order[-1:] and order[-1] in pair.right.labels:
        sides.reverse()
    return einsum(sides, (UNIT, *order), precision_of(pair.site), narrow)


def units_of(pair: Pair, i: jax.Array, shards: int, count: int, bits: bool) -> Pair:
    """Returns ``count`` units, from ``i * count`` on, of each of the parts of the unit axis.

    Args:
      pair: the factors of all units.
      i: index of the microbatch.
      shards: number of parts of the unit axis.
      count: number of units of each part.
      bits: as in ``pick``.
    """

    def some(x: jax.Array, labels: Sequence[Label]) -> jax.Array:
        return pick(x, tuple(labels).index(UNIT), i, shards, count, bits)

    return _map_factors(pair, some)


def _map_factors(pair: Pair, f: Callable[[jax.Array, Sequence[Label]], jax.Array]) -> Pair:
    """Applies ``f(array, labels)`` to the arrays of both factors."""
    left, right = pair.left, pair.right
    right = Dense(f(right.array, right.labels), right.labels)
    if isinstance(left, OneHot):
        left = dataclasses.replace(left, indices=f(left.indices, left.labels))
    else:
        left = dataclasses.replace(left, array=f(left.array, left.labels))
    return dataclasses.replace(pair, left=left, right=right)


def pick(
    array: jax.Array, axis: int, i: jax.Array, shards: int, count: int, bits: bool
) -> jax.Array:
    """Returns ``count`` entries, from ``i * count`` on, of each of the ``shards`` parts of an axis.

    With ``bits``, bfloat16 is picked as integers; otherwise a CPU picks from a float32 copy of the
    whole array. (A TPU would not fuse such a pick with a product.)
    """
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    rest = array.shape[axis] // (shards * count)
    split = array.reshape(*before, shards, rest, count, *after)
    narrow = bits and array.dtype == jnp.bfloat16
    if narrow:
        split = jax.lax.bitcast_convert_type(split, jnp.uint16)
    part = jax.lax.dynamic_index_in_dim(split, i, axis + 1, keepdims=False)
    if narrow:
        part = jax.lax.bitcast_convert_type(part, array.dtype)
    return part.reshape(*before, shards * count, *after)


def _gram(pairs: Sequence[Pair], machine: Machine) -> jax.Array:
    if len(pairs) == 1:
        joined = _joined(pairs[0], machine)
        if not _shared(joined) and all(_sizes(joined)[x] == 1 for x in joined.positions):
            return _of_one_position(joined)  # nothing cancels within one position
    pairs = [dataclasses.replace(p, left=formed(p.left)) for p in pairs]
    total: jax.Array | None = None
    each: list[jax.Array] = []
    for (i, p), (j, q) in itertools.combinations_with_replacement(enumerate(pairs), 2):
        if i != j and p.site.view.apart_from(q.site.view):
            continue
        factor = p.scale * q.scale * (1.0 if i == j else 2.0)
        signed = factor * (_self_product(p, machine) if i == j else _inner_product(p, q, machine))
        total = signed if total is None else total + signed
        if i == j:
            each.append(jnp.sqrt(_at_least_zero(signed)))
    assert total is not None
    bounds = [_bounds(p) for p in pairs]
    absolute = sum((x for x, _ in bounds[1:]), start=bounds[0][0])
    lost = sum((x for _, x in bounds[1:]), start=bounds[0][1])
    known = jnp.hypot(_at_least_zero(total), _FLOOR * absolute * absolute)
    squared = jnp.square(jnp.sqrt(known) + lost) + jnp.square(_order(pairs))
    if len(pairs) == 1:
        return squared
    uses = sum(each[1:], start=each[0])
    return squared + jnp.square(_absorbed(pairs, len(total)) * uses)


def _joined(pair: Pair, machine: Machine) -> Pair:
    """Turns a lookup with one gradient for all positions into a use with one position.

    If row r is looked up c_r times, |g|^2 = |d|^2 sum_r c_r^2 = |d|^2 sum_k c_{r(k)}: the left
    factor is the root of that sum.
    """
    left, right = pair.left, pair.right
    of_all = set(pair.positions).isdisjoint(right.labels)
    if not isinstance(left, OneHot) or not of_all or _shared(pair):
        return pair
    rows = _aligned(left.indices, left.labels, (UNIT, *pair.positions))
    rows = rows.reshape(len(rows), -1)
    if machine.cache is None:
        met = (rows[:, :, None] == rows[:, None]).sum(1, dtype=jnp.float32)
    else:  # fastest on a CPU: compare with the row shifted by i, so that each pair is met once
        count = rows.shape[1]
        twice = jnp.concatenate([rows, rows], axis=1)

        def one(i: jax.Array, met: jax.Array) -> jax.Array:
            same = jax.lax.dynamic_slice_in_dim(twice, i, count, axis=1) == rows
            return met + jnp.where(same, jnp.where(2 * i == count, 1.0, 2.0), 0.0)

        met = jax.lax.fori_loop(1, count // 2 + 1, one, 1.0 + 0.0 * rows, unroll=8)
    times = jnp.sqrt(jnp.where(rows < left.size, met, 0.0).sum(1))
    # Equal numbers are added one by one, so all roundings may have the same direction.
    times *= 1.0 + float(jnp.finfo(jnp.float32).eps) * rows.shape[1]
    return dataclasses.replace(pair, left=Dense(times[:, None], (UNIT, left.hot)), positions=())


def _at_least_zero(x: jax.Array) -> jax.Array:
    """``x``, with 0 for negative values (from rounding) and infinity for overflows of any sign."""
    return jnp.where(jnp.isfinite(x), jnp.maximum(x, 0.0), jnp.inf)


def _axes(pair: Pair) -> tuple[Label, ...]:
    """Labels of quantities that exist per position: units, shared coordinates, positions."""
    return (UNIT, *(x for x in pair.coordinates if x in _shared(pair)), *pair.positions)


def _over(
    x: jax.Array, labels: Sequence[Label], out: Sequence[Label], reduce: Callable[..., jax.Array]
) -> jax.Array:
    axes = tuple(i for i, label in enumerate(labels) if label not in out)
    return _aligned(reduce(x, axis=axes), [y for y in labels if y in out], out)


def _squares(pair: Pair) -> tuple[jax.Array, float, jax.Array, float]:
    """|L|^2 at each position and the number of squares that it sums, then both for R."""
    out = _axes(pair)

    def count(side: Dense | Windows) -> float:
        return float(math.prod(n for n, x in zip(side.shape, side.labels) if x not in out))

    right, most = _over(pair.right.squares(), pair.right.labels, out, jnp.sum), count(pair.right)
    if isinstance(pair.left, OneHot):  # the square of 1 does not underflow
        inside = (pair.left.indices < pair.left.size).astype(jnp.float32)
        return _aligned(inside, pair.left.labels, out), 0.0, right, most
    left = _over(pair.left.squares(), pair.left.labels, out, jnp.sum)
    return left, count(pair.left), right, most


def _is_nonzero(pair: Pair) -> jax.Array:
    """Where the right factor is not zero; at positions that the loss masks nothing underflows."""
    size = jnp.abs(pair.right.array.astype(jnp.float32))
    biggest = functools.partial(jnp.max, initial=0.0)
    return _over(size, pair.right.labels, _axes(pair), biggest) > 0


def _of_one_position(pair: Pair) -> jax.Array:
    """Squared norms [n] of units with one position, plus all squares that may have underflown."""
    left, lost, right, most = _squares(pair)
    x, d, scale = left + _LOST**2 * lost, right + _LOST**2 * most, abs(pair.scale)
    squared = x * d if scale == 1.0 else jnp.square(scale * jnp.sqrt(x) * jnp.sqrt(d))
    zero = (right == 0.0) & ~_is_nonzero(pair)  # NaN is not zero, so it stays visible
    return jnp.where(zero, 0.0 * left, squared).reshape(len(squared))


def _bounds(pair: Pair) -> tuple[jax.Array, jax.Array]:
    """The sum over positions of |L| |R|, and the part that underflow may hide; [n] each.

    If all squares of a left factor underflow, it is at most about 1e-19 times the right one's norm.
    """
    left, lost, right, most = _squares(pair)
    left, lost, right, most = jnp.sqrt(left), math.sqrt(lost), jnp.sqrt(right), math.sqrt(most)
    tiny = (left < _UNDERFLOW * lost) | (right < _UNDERFLOW * most)
    hidden = (left + _LOST * lost) * (right + _LOST * most)
    hidden = jnp.where(tiny & _is_nonzero(pair), hidden, 0.0)
    axes = tuple(range(1, left.ndim))
    scale = abs(pair.scale)
    return scale * (left * right).sum(axes), scale * hidden.sum(axes)


def _parts(pair: Pair) -> tuple[Label, int]:
    """The label of positions along which ``_self_product`` cuts, and the number of parts."""
    sizes = _sizes(pair)
    along = max(pair.positions, key=lambda x: sizes[x], default=None)
    long = along is not None and sizes[along] >= _LONG and sizes[along] % _PARTS == 0
    return along, _PARTS if long else 1


def _self_product(pair: Pair, machine: Machine) -> jax.Array:
    """The inner product [n] of a use's gradient with itself."""
    along, parts = _parts(pair)
    if parts == 1:
        return _inner_product(pair, pair, machine)
    step = _sizes(pair)[along] // parts
    cuts = [_cut(pair, along, step * i, step) for i in range(parts)]
    products = [_inner_product(cut, cut, machine) for cut in cuts]
    for i, cut in enumerate(cuts[:-1]):
        behind = _cut(pair, along, step * (i + 1), step * (parts - i - 1))
        products.append(2.0 * _inner_product(cut, behind, machine))
    return sum(products[1:], start=products[0])


def _cut(pair: Pair, along: Label, start: int, count: int) -> Pair:
    """``count`` positions of the axis ``along``, from ``start`` on."""

    def some(array: jax.Array, labels: Sequence[Label]) -> jax.Array:
        if along not in labels:
            return array
        return jax.lax.slice_in_dim(array, start, start + count, axis=tuple(labels).index(along))

    return _map_factors(pair, some)


def _inner_product(p: Pair, q: Pair, machine: Machine) -> jax.Array:
    """The inner product [n] of two uses' gradients.

    It is the sum over pairs of positions k and m of <L_k, L'_m> <R_k, R'_m>, or, if the factors of
    one use are exchanged (a tied embedding and head), of <L_k, R'_m> <R_k, L'_m>.
    """
    shared = tuple(x for x in p.coordinates if x in _shared(p))
    straight = _form(p)[0] == _form(q)[0]
    p_left, q_left = formed(p.left), formed(q.left)
    first = (p_left, q_left if straight else q.right)
    second = (p.right, q.right if straight else q_left)
    ours = p.positions
    theirs = tuple(("other", x) for x in q.positions)
    out = (UNIT, *shared, *ours, *theirs)
    rename: dict[Label, Label] = dict(zip(q.positions, theirs))
    # As terms of both signs cancel, rounded operands would lose a small norm. (Products of bfloat16
    # operands are exact at any precision.)
    exact = machine.rounding > 0.0 and _reduced(p)
    precision = jax.lax.Precision.HIGHEST if exact else precision_of(p.site)
    terms = _inner(*first, rename, out, precision) * _inner(*second, rename, out, precision)
    return terms.sum(tuple(range(1, terms.ndim)))


def _inner(
    x: Dense | OneHot,
    y: Dense | OneHot,
    rename: dict[Label, Label],
    out: tuple[Label, ...],
    precision: jax.lax.Precision | None,
) -> jax.Array:
    y = dataclasses.replace(y, labels=tuple(rename.get(label, label) for label in y.labels))
    if isinstance(x, Dense) and isinstance(y, Dense):
        present = [label for label in out if label in x.labels or label in y.labels]
        return _aligned(einsum([x, y], present, precision), present, out)
    if isinstance(x, OneHot) and isinstance(y, OneHot):
        ours, theirs = (_aligned(side.indices, side.labels, out) for side in (x, y))
        return ((ours == theirs) & (ours < x.size)).astype(jnp.float32)
    if isinstance(x, OneHot) and isinstance(y, Dense):
        hot, dense = x, y
    else:
        assert isinstance(x, Dense)
        assert isinstance(y, OneHot)
        hot, dense = y, x
    # <one-hot(i), row> = row[i]: look up the entries at the indices in every row.
    rows = tuple(label for label in dense.labels if label not in (UNIT, hot.hot) and label in out)
    places = tuple(label for label in hot.labels if label != UNIT)
    # Labels that only one side has belong to axes of length 1.
    one = [i for i, label in enumerate(dense.labels) if label not in (UNIT, hot.hot, *rows)]
    kept = tuple(label for i, label in enumerate(dense.labels) if i not in one)
    table = _aligned(dense.array.squeeze(one), kept, (UNIT, *rows, hot.hot))
    n, width = table.shape[0], hot.size
    sizes = [*table.shape[1:-1], *[hot.indices.shape[hot.labels.index(x)] for x in places]]
    table = table.reshape(n, -1, width)
    index = _aligned(hot.indices, hot.labels, (UNIT, *places)).reshape(n, 1, -1)
    entries = jnp.take_along_axis(
        table, jnp.broadcast_to(index, (n, table.shape[1], index.shape[2])), axis=2, mode="clip"
    )
    entries = entries.reshape(n, *sizes).astype(jnp.float32)
    inside = _aligned(hot.indices < hot.size, hot.labels, out)
    return jnp.where(inside, _aligned(entries, (UNIT, *rows, *places), out), 0.0)
