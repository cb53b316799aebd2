"""Results of a clipped gradient, statistics of a step, and helpers for arrays of units."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClippedGradResult:
    """The sum of clipped unit gradients, with values of single units.

    Values of single units have no noise and are as secret as the data. ``sum`` becomes private only
    with noise scaled to the rule's sensitivity.

    Attributes:
      sum: like the parameters, float32; None where a parameter is not trainable.
      norms: float32 [n], gradient norms before clipping; 0 for padding and non-finite units.
      weights: float32 [n], the factors of the gradients; [n, groups] for rules that clip groups of
        parameters separately; 0 for padding and non-finite units.
      losses: float32 [n]; 0 for padding.
      nonfinite: bool [n], whether a unit's gradient held a NaN or an infinity (or its squared norm
        overflows float32) and was replaced by zero. If each parameter is clipped separately
        (PerLayer), only the parameters that are not finite are replaced.
      aux: the auxiliary outputs of the loss, stacked [n, ...]; None without ``has_aux``.
      leaf_norms: like the parameters, float32 [n]: the norms of each parameter's gradients; None
        where a parameter is not trainable.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import clipped_grad
      >>> grad = clipped_grad(lambda w, x: jnp.sum(w * x), clip_norm=1.0)
      >>> result = grad(jnp.ones(2), jnp.array([[4.0, 0.0], [0.0, jnp.nan]]))
      >>> print(result.weights, result.nonfinite)
      [0.25 0.  ] [False  True]
    """

    sum: PyTree
    norms: jax.Array
    weights: jax.Array
    losses: jax.Array
    nonfinite: jax.Array
    aux: PyTree = None
    leaf_norms: PyTree = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepStats:
    """Sums over the units of one step, computed from private data without noise.

    Attributes (float32 scalars):
      units: number of units drawn.
      loss: sum of unit losses.
      clipped: number of units whose gradient norm was above the clip norm.
      norm: sum of unit gradient norms.
      nonfinite: number of units whose loss or gradient had a NaN or infinity. Such a gradient was
        replaced by zero, and such a unit counts in no other sum except ``units``.
      clip_norm: clip norm of this step, if it adapts; it follows from releases, and is public.
      leaf_norms: float32 [trained parameters], sums over units of the norms of each parameter's
        gradients, for the check before the first step; None where they were not asked for.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import StepStats
      >>> stats = StepStats(*map(jnp.float32, [4.0, 6.0, 1.0, 8.0, 0.0]))
      >>> float(stats.loss / stats.units)  # the mean loss, which is not private
      1.5
    """

    units: jax.Array
    loss: jax.Array
    clipped: jax.Array
    norm: jax.Array
    nonfinite: jax.Array
    clip_norm: jax.Array | None = None
    leaf_norms: jax.Array | None = None

    @classmethod
    def of(
        cls, result: ClippedGradResult, mask: jax.Array, bound: Any, leaf_norms: bool = False
    ) -> StepStats:
        """Returns the sums over the units of a clipped gradient's result.

        Args:
          result: what the clipped gradient returned.
          mask: bool, int or float [n], the units that count.
          bound: the clip norm.
          leaf_norms: whether norms of single parameters' gradients are added up, too.
        """
        real = mask.astype(bool)
        finite = real & ~result.nonfinite & jnp.isfinite(result.losses)

        def total(x: Any) -> jax.Array:
            return jnp.where(finite, x, 0).astype(jnp.float32).sum()

        return cls(
            units=real.astype(jnp.float32).sum(),
            loss=total(result.losses),
            clipped=total(result.norms > bound),
            norm=total(result.norms),
            nonfinite=(real & ~finite).astype(jnp.float32).sum(),
            leaf_norms=jnp.stack([total(x) for x in jax.tree.leaves(result.leaf_norms)])
            if leaf_norms
            else None,
        )

    @classmethod
    def zero(cls, *shape: int) -> StepStats:
        """Returns the sums over no units, each float32 of ``shape``."""
        return cls(*[jnp.zeros(shape, jnp.float32)] * 5)

    def row(self, private: bool) -> dict[str, Any]:
        """Returns a row of metrics; quantities of clipping are None unless ``private``."""
        units, finite = float(self.units), float(self.units - self.nonfinite)
        adapting = {} if self.clip_norm is None else {"clip_norm": float(self.clip_norm)}
        return {
            "units": int(units),
            "train_loss": float(self.loss) / finite if finite else None,
            "fraction_clipped": float(self.clipped) / finite if finite and private else None,
            "mean_norm": float(self.norm) / finite if finite and private else None,
            "nonfinite_units": int(self.nonfinite),
            **adapting,
        }


def leaf_name(path: tuple[Any, ...]) -> str:
    """Returns a parameter's name, such as ``layers/mlp/kernel``, from its JAX key path."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "params"


def pinned(x: jax.Array) -> jax.Array:
    """Returns ``x`` such that all its uses see equal values, even in less than float32.

    XLA may skip a rounding to bfloat16 or float16 for one use and not for another, so that the norm
    would not be the norm of what is summed. It never skips ``reduce_precision``. Types other than
    bfloat16 become float32, because rounding to them again may change values.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize >= 4:
        return x
    rounded = jax.lax.reduce_precision(x.astype(jnp.float32), 8, jnp.finfo(x.dtype).nmant)
    return rounded.astype(x.dtype) if x.dtype == jnp.bfloat16 else rounded


def real_units(mask: jax.Array) -> jax.Array:
    """Returns which units a mask (bool, int or float [n]) counts, bool [n]: not zero, not NaN."""
    mask = jnp.asarray(mask)
    return (mask != 0) & (mask == mask)


def unit_where(keep: jax.Array, x: jax.Array, axis: int = 0) -> jax.Array:
    """Returns ``x`` with the units outside ``keep`` set to exactly zero, NaNs included.

    Args:
      keep: bool [n].
      x: array whose axis ``axis`` is the unit axis.
      axis: position of the unit axis.
    """
    shape = [1] * x.ndim
    shape[axis] = keep.shape[0]
    return jnp.where(keep.reshape(shape), x, jnp.zeros((), x.dtype))
