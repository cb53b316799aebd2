"""``ClippingProblem``: one call of a clipped gradient, flattened, as every strategy takes it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dpfl_jax.clipping.result import leaf_name, pinned, unit_where
from dpfl_jax.clipping.rules import Rule
from dpfl_jax.errors import BadInputError
from dpfl_jax.varying import vary, varying_axes

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ClippingProblem:
    """One call of a clipped gradient, flattened: what a strategy has to solve.

    Attributes:
      loss: ``(leaves, unit) -> (float32 scalar, aux)`` for ONE unit.
      leaves: trainable floating-point parameters, which vary over every mesh axis of the units.
      names: their names, e.g. ``"layers/mlp/kernel"``.
      units: pytree of arrays [n, ...].
      real: bool [n]; False for padding.
      weight: bool, int or float [n], a factor of each unit's clipped gradient; None: 1.
      bound: float [n], each unit's clip norm; None for most rules.
      rule: the clip rule.
      sharding: how the unit axis is split under automatic sharding; None: the compiler chooses.
      pieces: cuts a unit into pieces whose losses add up to the unit's, see ``clipped_grad``;
        None: a unit's gradient is formed at once.
      gradient_sharding: ``(name, shape) -> NamedSharding``, how a unit's gradient is split over
        devices while it is accumulated; None: the compiler chooses.
      weights_fn: turns squared norms into the units' weights, in place of ``unit_weights``.
    """

    loss: Callable[[Sequence[jax.Array], PyTree], tuple[jax.Array, PyTree]]
    leaves: list[jax.Array]
    names: list[str]
    units: PyTree
    real: jax.Array
    weight: jax.Array | None
    bound: jax.Array | None
    rule: Rule
    sharding: NamedSharding | None = None
    pieces: Callable[[PyTree], PyTree] | None = None
    gradient_sharding: Callable[[str, tuple[int, ...]], NamedSharding] | None = None
    weights_fn: Callable[[Sequence[jax.Array]], UnitWeights] | None = None

    def every_gradient(self) -> tuple[tuple[jax.Array, PyTree], Sequence[jax.Array]]:
        """Returns losses, auxiliary outputs and gradients of all units: leaves [n, ...]."""
        whole = jax.value_and_grad(self.loss, has_aux=True)
        # Values with a sharding constraint in the loss stay on the devices that hold the unit.
        units = functools.partial(jax.vmap, in_axes=(None, 0), spmd_axis_name=self._unit_axes())
        if self.pieces is None:
            values, gradients = units(whole)(self.leaves, self.units)
            return values, [pinned(g) for g in gradients]
        examples, keys = self.units
        pieces = jax.tree.map(self.place, jax.vmap(self.pieces)(examples))
        count: Any = jax.tree.leaves(pieces)[0].shape[1]
        exists = pieces.pop("there", None) if isinstance(pieces, dict) else None
        # With several units, each takes all pieces, because how many one takes must not depend on
        # another (a custom backward pass of the loss may give an absent record a gradient).
        if exists is not None and self.num_units == 1:
            count = jnp.where(exists[0], jnp.arange(count) + 1, 0).max()

        def one(leaves: Sequence[jax.Array], unit: PyTree) -> Any:
            pieces, key = unit

            def body(i: jax.Array, carry: Any) -> Any:
                piece = jax.tree.map(lambda x: x[i], pieces)
                (value, _), gradient = whole(leaves, (piece, key))
                total, sums = carry
                more = [a + g.astype(jnp.float32) for a, g in zip(sums, gradient, strict=True)]
                return total + value, self._split(more)

            zeros = [jnp.zeros(p.shape, jnp.float32) for p in leaves]
            start = vary((jnp.zeros(()), self._split(zeros)), varying_axes(leaves, pieces))
            value, gradient = jax.lax.fori_loop(0, count, body, start)
            return (value, None), gradient

        return units(one)(self.leaves, (pieces, keys))

    def _split(self, gradient: list[jax.Array]) -> list[jax.Array]:
        if self.gradient_sharding is None:
            return gradient
        return [
            jax.lax.with_sharding_constraint(g, self.gradient_sharding(name, g.shape))
            for name, g in zip(self.names, gradient, strict=True)
        ]

    @property
    def num_units(self) -> int:
        """Number of units, including padding."""
        return self.real.shape[0]

    @property
    def parts(self) -> int:
        """Number of parts into which ``sharding`` splits the unit axis."""
        names = self._unit_axes()
        if self.sharding is None or names is None or names is PartitionSpec.UNCONSTRAINED:
            return 1
        names = (names,) if isinstance(names, str) else tuple(names)
        return math.prod(self.sharding.mesh.shape[name] for name in names)

    @property
    def shards(self) -> int:
        """``parts`` if they have equal sizes, else 1."""
        return self.parts if self.num_units % self.parts == 0 else 1

    def _unit_axes(self) -> Any:
        if self.sharding is None or not len(self.sharding.spec):
            return None
        return self.sharding.spec[0]

    def place(self, x: jax.Array, axis: int = 0) -> jax.Array:
        """Returns ``x``, with the unit axis ``axis``, kept on the devices that hold the units."""
        if self.sharding is None:
            return x
        free = PartitionSpec.UNCONSTRAINED
        axes: list[Any] = [free] * x.ndim
        axes[axis] = self._unit_axes()
        spec = PartitionSpec(*axes)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.sharding.mesh, spec))

    def unit_weights(
        self, squared: Sequence[jax.Array], rounded: Sequence[jax.Array | None] | None = None
    ) -> UnitWeights:
        """Returns the units' weights, given squared norms per leaf.

        Args:
          squared: the leaves' squared norms, float32 [n] each, before masking.
          rounded: for each leaf, a bound [n] on the distance (divided by the weight) between what
            is summed and the gradient whose norm was taken; None: 0. It is added to the norm before
            the rule is applied, so that the bound holds for what is summed.
        """
        if self.weights_fn is not None:
            return self.weights_fn(squared)
        zeros = jnp.zeros((self.num_units,), jnp.float32)
        total = sum(squared, start=zeros)
        bounds = list(squared)
        for i, more in enumerate(rounded or ()):
            if more is not None:
                bounds[i] = jnp.square(jnp.sqrt(squared[i]) + more)
        # proof: clip-2
        finite = jnp.isfinite(sum(bounds, start=zeros))  # then the smaller total is finite, too
        keep = self.real & finite
        keeps = [keep] * len(bounds)
        if self.rule.is_per_leaf:
            keeps = [self.real & jnp.isfinite(s) for s in bounds]
        safe = [unit_where(k, s) for k, s in zip(keeps, bounds)]
        reported, weights = self.rule.leaf_weights(safe, self.names, self.bound)
        if self.weight is not None:
            weight = self.weight.astype(jnp.float32)
            # proof: clip-3
            share = jnp.where(weight > 0, jnp.minimum(weight, 1.0), 0.0)
            weights = [w * share for w in weights]
            reported = reported * share.reshape(-1, *[1] * (reported.ndim - 1))
        weights = [unit_where(k, w.astype(jnp.float32)) for k, w in zip(keeps, weights)]
        reported = unit_where(keep, reported.astype(jnp.float32))
        return UnitWeights(
            norms=jnp.sqrt(unit_where(keep, total)),
            leaf_norms=[jnp.sqrt(unit_where(k, s)) for k, s in zip(keeps, squared)],
            reported=jnp.stack(weights, axis=1) if self.rule.is_per_leaf else reported,
            weights=weights,
            keeps=keeps,
            nonfinite=self.real & ~finite,
        )

    def clipped_sums(
        self, sums: list[jax.Array], units: UnitWeights, losses: jax.Array, aux: PyTree
    ) -> ClippedSums:
        """Returns the result of a strategy that has summed units' gradients with these weights."""
        losses = unit_where(self.real, losses)
        seen = (units.norms, units.leaf_norms, units.reported, losses, units.nonfinite)
        return ClippedSums(sums, *seen, aux)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UnitWeights:
    """The weights that the rule gives units, and fields of ``ClippedGradResult``.

    Attributes:
      reported: ``weights`` of the result.
      weights: float32 [n], one per leaf.
      keeps: bool [n], one per leaf; False where a unit adds exactly zero.
    """

    norms: jax.Array
    leaf_norms: list[jax.Array]
    reported: jax.Array
    weights: list[jax.Array]
    keeps: list[jax.Array]
    nonfinite: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClippedSums:
    """The result of a strategy: ``ClippedGradResult`` with flat lists of leaves."""

    sums: list[jax.Array]
    norms: jax.Array
    leaf_norms: list[jax.Array]
    weights: jax.Array
    losses: jax.Array
    nonfinite: jax.Array
    aux: PyTree


def as_arrays(what: str, tree: PyTree) -> PyTree:
    """Returns ``tree`` with numbers and NumPy arrays converted to JAX arrays.

    Args:
      what: name of the argument, for messages.
      tree: pytree of arrays and numbers.

    Raises:
      BadInputError: a leaf is neither an array nor a number.
    """

    def one(path: tuple[Any, ...], x: Any) -> jax.Array:
        try:
            return jnp.asarray(x)
        except (TypeError, ValueError) as error:
            kind = f"an array of {x.dtype}" if hasattr(x, "dtype") else f"a {type(x).__name__}"
            raise BadInputError(
                f"clipped_grad: the entry {leaf_name(path)!r} of {what} must be an array of "
                f"numbers, but it is {kind}: remove it, and let the loss close over it"
            ) from error

    return jax.tree_util.tree_map_with_path(one, tree)


def count_units(batch: PyTree) -> int:
    """Returns the length of the leading axis that all arrays of a batch share.

    Raises:
      BadInputError: the batch has no arrays, or their leading axes differ.
    """
    shapes = [jnp.shape(x) for x in jax.tree.leaves(batch)]
    if not shapes:
        raise BadInputError("clipped_grad: the batch holds no arrays")
    lengths = {s[0] if s else None for s in shapes}
    if len(lengths) != 1 or None in lengths:
        raise BadInputError(
            "clipped_grad: every array of the batch needs the same leading unit axis, "
            f"but their shapes are {shapes}"
        )
    return int(shapes[0][0])
