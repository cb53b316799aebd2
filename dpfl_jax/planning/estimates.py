"""What the planner needs to know about data and model: group sizes, and typical gradient norms.

**These are computed without noise.** Use them on public data, or do not publish what follows from
them. The report says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.clipping import Trainable, clipped_grad
from dpfl_jax.data.inspect import private_quantile
from dpfl_jax.errors import BadInputError, at_least
from dpfl_jax.mechanisms.participation import mean_of_examples
from dpfl_jax.planning.candidates import draws_examples
from dpfl_jax.randomness import RootKey

PyTree = Any


def median_group_size(
    sizes: Sequence[int] | np.ndarray, rounding: Literal["none", "pow2_floor"] = "pow2_floor"
) -> int:
    """Returns the median number of examples per user, a good group size for ELS.

    Source: Charles et al. 2024, section 6.

    Args:
      sizes: int [n], number of examples of each user.
      rounding: ``"pow2_floor"`` (down to a power of two: 183 becomes 128) or ``"none"``.

    Raises:
      BadInputError: there are no users.

    Examples:
      >>> from dpfl_jax.planning import median_group_size
      >>> median_group_size([1, 90, 183, 200, 4000])
      128
    """
    if len(sizes) == 0:
        raise BadInputError("there are no users to take a median over")
    median = max(1, int(np.median(np.asarray(sizes))))
    return median if rounding == "none" else 2 ** int(math.log2(median))


def private_median_group_size(
    sizes: Sequence[int] | np.ndarray,
    epsilon: float,
    largest: int,
    rng: np.random.Generator,
    rounding: Literal["none", "pow2_floor"] = "pow2_floor",
) -> int:
    """Returns ``median_group_size`` with pure epsilon-DP for adding or removing a user.

    Args:
      sizes: int [n], number of examples of each user.
      epsilon: epsilon of this release, which adds to the run's epsilon.
      largest: public upper bound on the result.
      rng: secret randomness.
      rounding: see ``median_group_size``.

    Raises:
      BadInputError: epsilon or the bound is out of range.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.planning import private_median_group_size
      >>> rng = np.random.default_rng(0)  # secret in a real run
      >>> private_median_group_size(np.full(1000, 64), epsilon=1.0, largest=512, rng=rng)
      64
    """
    median = private_quantile(np.asarray(sizes), 0.5, epsilon, largest, rng)
    return median_group_size([median], rounding)


@dataclasses.dataclass(frozen=True)
class Sensitivities:
    """Typical gradient norms; a good clip norm is of about this size.

    Attributes:
      example: L_ELS, norm of one example's gradient.
      user: {G: L_ULS(G)}, norms of the mean gradient over up to G examples of one user.
      intervals: {G: (low, high)}, 90 % bootstrap intervals of ``user``.
      source: how the norms were obtained, in words.

    Examples:
      >>> from dpfl_jax.planning import Sensitivities
      >>> norms = Sensitivities(2.0, {1: 2.0, 4: 1.2}, intervals={}, source="a proxy")
      >>> norms.user[4]
      1.2
    """

    example: float
    user: dict[int, float]
    intervals: dict[int, tuple[float, float]]
    source: str

    @classmethod
    def assumed(cls, decay: float, groups: Sequence[int]) -> Sensitivities:
        """Returns L_ELS = 1 and L_ULS(G) = G^-decay for these group sizes.

        Decay is 0 if all gradients of a user are identical, and 1/2 if they are orthogonal.
        """
        at_least("the decay of gradient norms", decay, 0, most=1)
        norms = {int(g): float(g) ** -decay for g in groups}
        return cls(1.0, norms, {}, f"assumed: L_ULS(G) = L_ELS G^-{decay:g}")

    def norm(self, kind: str, group: int) -> float:
        """Returns the norm of a unit of a candidate: L_ELS if examples are drawn, else L_ULS(G)."""
        return self.example if draws_examples(kind) else self.at(group)

    def at(self, group: int) -> float:
        """Returns L_ULS(G), interpolated between known group sizes by a power law.

        Raises:
          BadInputError: ``group`` is below the least or above the largest known group size.
        """
        known = sorted(self.user)
        if group in self.user:
            return self.user[group]
        if not known or group > known[-1] or group < known[0]:
            raise BadInputError(
                f"gradient norms are not known for group size {group}: take a size between the "
                "least and the largest for which they are"
            )
        high = next(g for g in known if g > group)
        low = max(g for g in known if g < group)
        share = math.log(group / low) / math.log(high / low)
        return float(self.user[low] ** (1 - share) * self.user[high] ** share)


def estimate_sensitivities(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    store: Any,
    groups: Sequence[int],
    *,
    users: int = 128,
    batch: int = 8,
    trainable: Trainable = None,
) -> Sensitivities:
    """Returns median norms of per-example and per-user gradients, over a sample of users.

    The examples for each G are the first G in one random order per user, so that norms of two group
    sizes differ by little sampling noise.

    Args:
      loss_fn: ``(params, example) -> scalar``.
      params: the starting model.
      store: store with ``user_offsets`` and ``read``.
      groups: group sizes G.
      users: number of users to sample (the paper takes 128).
      batch: number of users processed at a time.
      trainable: which parameters are trained, as in ``fit``; norms are over these only.

    Examples:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.planning import estimate_sensitivities
      >>> store = dpfl.from_arrays({"x": np.ones((8, 1), "float32")}, users=np.arange(8) // 2)
      >>> def loss(params, example):
      ...     return jnp.sum(3.0 * example["x"] * params)
      >>> estimate_sensitivities(loss, jnp.zeros(1), store, groups=[1, 2]).example
      3.0
    """
    key = RootKey.from_seed(0)
    rng = key.numpy("planning-users")
    offsets = np.asarray(store.user_offsets)
    if len(offsets) < 2:
        raise BadInputError("there are no users to estimate gradient norms from")
    chosen = rng.permutation(len(offsets) - 1)[:users]
    orders = [
        offsets[u] + key.numpy("planning-order", int(u)).permutation(offsets[u + 1] - offsets[u])
        for u in chosen
    ]
    norms_of = jax.jit(lambda p, units: _norms(mean_of_examples(loss_fn), p, units, trainable))
    norms_by_group: dict[int, np.ndarray] = {}
    for group in sorted({1, *groups}):
        norms: list[float] = []
        for first in range(0, len(chosen), batch):
            part = orders[first : first + batch]
            taken = [order[:group] for order in part]
            mask = np.zeros((batch, group), bool)
            for row, positions in enumerate(taken):
                mask[row, : len(positions)] = True
            examples = store.read(np.concatenate(taken))

            def scatter(leaf: np.ndarray, mask: np.ndarray = mask) -> np.ndarray:
                full = np.zeros((*mask.shape, *leaf.shape[1:]), leaf.dtype)
                full[mask] = leaf
                return full

            units = {"examples": jax.tree.map(scatter, examples), "mask": mask}
            norms.extend(np.asarray(norms_of(params, units))[: len(part)].tolist())
        norms_by_group[group] = np.asarray(norms)
    resample = np.random.default_rng(0).integers(0, len(chosen), (500, len(chosen)))
    intervals = {}
    for group, values in norms_by_group.items():
        medians = np.median(values[resample], axis=1)
        low, high = np.quantile(medians, [0.05, 0.95])
        intervals[group] = (float(low), float(high))
    return Sensitivities(
        example=float(np.median(norms_by_group[1])),
        user={g: float(np.median(v)) for g, v in norms_by_group.items()},
        intervals=intervals,
        source=f"median gradient norms of {len(chosen)} users at the starting model, without noise",
    )


def _norms(
    loss_fn: Callable[..., jax.Array], params: PyTree, units: PyTree, trainable: Trainable
) -> jax.Array:
    real = jnp.asarray(units["mask"]).any(axis=1)
    bounded = clipped_grad(loss_fn, clip_norm=1e30, strategy="ghost", trainable=trainable)
    return bounded(params, units, mask=real).norms
