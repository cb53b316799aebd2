"""Clip rules: which factor a unit's gradient is multiplied by, given its norm.

A rule is a frozen dataclass, whose fields a configuration gives under the rule's ``kind``. It knows
its sensitivity, the largest norm of one unit's contribution, so that noise is scaled to exactly
what was summed.
"""

from __future__ import annotations

import abc
import dataclasses
import fnmatch
import glob
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.clipping.result import leaf_name
from dpfl_jax.errors import BadInputError, positive

PyTree = Any

# Squares of smaller norms underflow float32.
SMALLEST_CLIP_NORM = 1e-12


def _positive(what: str, value: float) -> float:
    """``value`` as a float, because squares and sums of other number types overflow or round."""
    if isinstance(value, jax.core.Tracer):  # checked on the device by ``_zero_unless_valid``
        return value
    kind = np.asarray(value).dtype
    if np.shape(value) != () or not any(
        jnp.issubdtype(kind, k) for k in (jnp.integer, jnp.floating)
    ):
        raise BadInputError(
            f"{what} must be one number, but it is a {type(value).__name__} (the rule "
            "PerGroup clips groups of parameters separately)"
        )
    positive(what, value)
    if value < SMALLEST_CLIP_NORM:
        raise BadInputError(
            f"{what} is {value}, but float32 loses the squares of norms below "
            f"{SMALLEST_CLIP_NORM}: scale the loss up"
        )
    return float(value)


def check_floats(clip: Any) -> None:
    """Converts the float fields to Python floats; raises BadInputError if one is not above 0."""
    for field in dataclasses.fields(clip):
        if field.type in (float, "float"):
            value = _positive(f"{type(clip).__name__}: {field.name}", getattr(clip, field.name))
            object.__setattr__(clip, field.name, value)


def _zero_unless_valid(weights: jax.Array, value: jax.Array | float) -> jax.Array:
    """``weights``, or zero where the clip norm (or other ``value``) is not finite or too small."""
    good = jnp.isfinite(value) & (value >= SMALLEST_CLIP_NORM)
    return jnp.where(good, weights, 0.0)


@dataclasses.dataclass(frozen=True)
class Rule(abc.ABC):
    """The base of all clip rules, whose float fields must be above 0.

    Attributes:
      kind: the rule's name in a configuration; rules made by mechanisms have no name.
      is_per_leaf: whether the weight of a leaf depends on the norm of that leaf alone.
      compensated: whether rounding errors of sums are always summed and added.

    Examples:
      >>> from dpfl_jax.clipping import Automatic, Flat
      >>> [(rule.kind, rule.sensitivity, rule.threshold) for rule in (Flat(0.5), Automatic())]
      [('flat', 0.5, 0.5), ('automatic', 1.0, None)]
    """

    kind: ClassVar[str]
    is_per_leaf: ClassVar[bool] = False
    compensated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_floats(self)

    @property
    @abc.abstractmethod
    def sensitivity(self) -> float:
        """Largest norm of one privacy unit's contribution, under add-or-remove adjacency."""

    @property
    def threshold(self) -> float | None:
        """The norm above which gradients are clipped; None if there is no such norm."""
        return self.sensitivity

    def of_units(self, batch: PyTree) -> tuple[PyTree, jax.Array | None]:
        """Returns the batch for the loss, and each unit's ``bound`` for rules that need one."""
        return batch, None

    def partition(self, names: Sequence[str]) -> list[int] | None:
        """Returns each leaf's group of parameters, or None if all leaves are one group."""
        return None

    @abc.abstractmethod
    def leaf_weights(
        self, squared: Sequence[jax.Array], names: Sequence[str], bound: jax.Array | None
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the units' weights for each leaf, given their squared norms.

        Args:
          squared: one float32 [n] per leaf, finite.
          names: the leaves' names.
          bound: float [n], each unit's bound (``of_units``); None for most rules.

        Returns:
          The weights to report ([n], or [n, groups] for rules with groups of parameters), and one
          float32 [n] per leaf.
        """


@dataclasses.dataclass(frozen=True)
class WholeGradientRule(Rule):
    """A rule with one weight for a unit's whole gradient."""

    @abc.abstractmethod
    def weights(self, norms: jax.Array, bound: jax.Array | None = None) -> jax.Array:
        """Returns the factor of each unit's gradient.

        Args:
          norms: float32 [n], finite and >= 0.
          bound: float [n], each unit's bound; None for most rules.

        Returns:
          float32 [n].
        """

    def leaf_weights(
        self, squared: Sequence[jax.Array], names: Sequence[str], bound: jax.Array | None
    ) -> tuple[jax.Array, list[jax.Array]]:
        weights = self.weights(jnp.sqrt(sum(squared, start=jnp.zeros(()))), bound)
        return weights, [weights] * len(squared)


@dataclasses.dataclass(frozen=True)
class NoClip(WholeGradientRule):
    """Does not clip, so that there is no bound: for baselines without privacy.

    Examples:
      >>> from dpfl_jax.clipping import NoClip
      >>> NoClip().sensitivity
      inf
    """

    kind: ClassVar[str] = "none"

    def weights(self, norms: jax.Array, bound: jax.Array | None = None) -> jax.Array:
        return jnp.ones_like(norms)

    @property
    def sensitivity(self) -> float:
        return math.inf


@dataclasses.dataclass(frozen=True)
class Flat(WholeGradientRule):
    """Clips to norm C, with the weight min(1, C/norm) (Abadi et al. 2016, Algorithm 1).

    Attributes:
      clip_norm: C > 0, in the units of the gradient.

    Examples:
      >>> from dpfl_jax.clipping import Flat
      >>> Flat(0.5).sensitivity
      0.5
    """

    kind: ClassVar[str] = "flat"

    clip_norm: float

    def weights(self, norms: jax.Array, bound: jax.Array | None = None) -> jax.Array:
        # proof: clip-1
        weights = jnp.where(norms > self.clip_norm, self.clip_norm / norms, 1.0)
        return _zero_unless_valid(weights, self.clip_norm)

    @property
    def sensitivity(self) -> float:
        return self.clip_norm


@dataclasses.dataclass(frozen=True)
class Normalized(WholeGradientRule):
    """Clips to norm C and divides by C, with the weight min(1/C, 1/norm).

    The best learning rate then does not scale with C (De et al. 2022, section 3.3).

    Attributes:
      clip_norm: C > 0.

    Examples:
      >>> from dpfl_jax.clipping import Normalized
      >>> Normalized(0.1).sensitivity  # contributions are divided by the clip norm
      1.0
    """

    kind: ClassVar[str] = "normalized"

    clip_norm: float

    def weights(self, norms: jax.Array, bound: jax.Array | None = None) -> jax.Array:
        return _zero_unless_valid(1.0 / jnp.maximum(norms, self.clip_norm), self.clip_norm)

    @property
    def sensitivity(self) -> float:
        return 1.0

    @property
    def threshold(self) -> float:
        return self.clip_norm


@dataclasses.dataclass(frozen=True)
class OwnBound(WholeGradientRule):
    """Clips each unit to a personal bound b <= C, the batch's entry ``"bound"``: min(1, b/norm).

    Attributes:
      clip_norm: C > 0.
      normalized: whether contributions are divided by C, as by ``Normalized``.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import OwnBound, clipped_grad
      >>> grad = clipped_grad(lambda w, unit: jnp.sum(w * unit["x"]), rule=OwnBound(1.0))
      >>> batch = {"x": jnp.array([[4.0, 0.0], [0.0, 4.0]]), "bound": jnp.array([1.0, 0.5])}
      >>> print(grad(jnp.ones(2), batch).sum)
      [1.  0.5]
    """

    clip_norm: float
    normalized: bool = False
    compensated: ClassVar[bool] = True  # b may be as small as the rounding error of a sum

    def of_units(self, batch: PyTree) -> tuple[PyTree, jax.Array | None]:
        if not isinstance(batch, dict) or "bound" not in batch:
            return batch, None
        return {name: x for name, x in batch.items() if name != "bound"}, batch["bound"]

    def weights(self, norms: jax.Array, bound: jax.Array | None = None) -> jax.Array:
        if bound is None:
            raise BadInputError(
                'OwnBound: the units have no bounds: give the batch an entry "bound", as fit does'
            )
        bound = jnp.minimum(bound, self.clip_norm)
        # proof: individual-sensitivity-1
        weights = jnp.where(norms > bound, bound / norms, 1.0)
        return _zero_unless_valid(weights / (self.clip_norm if self.normalized else 1.0), bound)

    @property
    def sensitivity(self) -> float:
        return 1.0 if self.normalized else self.clip_norm

    @property
    def threshold(self) -> float:
        return self.clip_norm


@dataclasses.dataclass(frozen=True)
class Automatic(WholeGradientRule):
    """Normalises by 1/(norm + gamma), without a threshold to tune (Bu et al. 2023, AUTO-S).

    Attributes:
      gamma: > 0; keeps differences in size between small gradients.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import Automatic, clipped_grad
      >>> grad = clipped_grad(lambda w, x: jnp.sum(w * x), rule=Automatic())
      >>> large = grad(jnp.ones(2), jnp.array([[400.0, 0.0]])).sum[0]
      >>> round(float(large), 3)  # 400 / (400 + gamma)
      1.0
    """

    kind: ClassVar[str] = "automatic"

    gamma: float = 0.01

    def weights(self, norms: jax.Array, bound: jax.Array | None = None) -> jax.Array:
        # proof: clip-5
        return _zero_unless_valid(1.0 / (norms + self.gamma), self.gamma)

    @property
    def sensitivity(self) -> float:
        return 1.0

    @property
    def threshold(self) -> None:
        return None  # every gradient is scaled, to nearly one norm


@dataclasses.dataclass(frozen=True)
class PerGroup(Rule):
    """Clips groups of parameters separately: group k to C_k (McMahan et al. 2018).

    Attributes:
      clip_norms: C_k by pattern (``{"embed": 0.1, "*": 1.0}``), or pairs of both. A parameter
        belongs to the first shell pattern (``"layers/*/kernel"``) that matches its name, or the
        name of a subtree that holds it. A pattern that matches no parameter still adds to the
        sensitivity. It is stored as pairs, because files need not keep the order of a mapping.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import PerGroup, clipped_grad
      >>> rule = PerGroup({"a": 3.0, "b": 4.0})
      >>> rule.sensitivity
      5.0
      >>> params = {"a": jnp.ones(1), "b": jnp.ones(1)}
      >>> grad = clipped_grad(lambda p, x: jnp.sum((p["a"] + p["b"]) * x), rule=rule)
      >>> print(grad(params, jnp.array([[10.0]])).sum["b"])
      [4.]
    """

    kind: ClassVar[str] = "per_group"

    clip_norms: Mapping[str, float] | tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        given = self.clip_norms
        pairs = tuple(given.items() if isinstance(given, Mapping) else given)
        if not pairs:
            raise BadInputError("PerGroup: clip_norms is empty: give at least one (pattern, C)")
        couples = all(isinstance(p, (tuple, list)) and len(p) == 2 for p in pairs)
        if not couples or not all(isinstance(pattern, str) for pattern, _ in pairs):
            raise BadInputError(
                "PerGroup: clip_norms must be pairs of a pattern and its C: "
                "(('layers/*', 0.5), ('*', 1.0))"
            )
        floats = tuple((p, _positive(f"PerGroup, pattern {p!r}: clip_norm", c)) for p, c in pairs)
        object.__setattr__(self, "clip_norms", floats)

    @property
    def _pairs(self) -> tuple[tuple[str, float], ...]:
        return self.clip_norms  # type: ignore[return-value]

    @classmethod
    def of_tree(cls, clip_norms: PyTree) -> PerGroup:
        """Returns the rule for a tree of clip norms that is a prefix of the parameters."""
        flat = jax.tree_util.tree_flatten_with_path(clip_norms)[0]
        return cls(tuple((glob.escape(leaf_name(path)), norm) for path, norm in flat))

    def partition(self, names: Sequence[str]) -> list[int]:
        """Returns the group of each parameter; raises BadInputError if no pattern matches one."""
        out = []
        for name in names:
            hits = [
                k
                for k, (pattern, _) in enumerate(self._pairs)
                if any(fnmatch.fnmatchcase(name, p) for p in (pattern, f"{pattern}/*"))
            ]
            if not hits:
                raise BadInputError(
                    f"PerGroup: no pattern matches the parameter {name!r}; add ('*', C) at the end"
                )
            out.append(hits[0])
        return out

    def leaf_weights(
        self, squared: Sequence[jax.Array], names: Sequence[str], bound: jax.Array | None
    ) -> tuple[jax.Array, list[jax.Array]]:
        # proof: clip-6
        groups = self.partition(names)
        columns = []
        for k, (_, clip_norm) in enumerate(self._pairs):
            total = sum((s for s, g in zip(squared, groups) if g == k), start=0.0 * squared[0])
            columns.append(Flat(clip_norm).weights(jnp.sqrt(total)))
        return jnp.stack(columns, axis=1), [columns[g] for g in groups]

    @property
    def sensitivity(self) -> float:
        return math.sqrt(sum(c * c for _, c in self._pairs))


@dataclasses.dataclass(frozen=True)
class PerLayer(Rule):
    """Clips every parameter leaf separately, to C / sqrt(number of leaves) (McMahan et al. 2018).

    No leaf waits for the norms of other leaves, so gradients that are formed for their norms can be
    added up right away, where that is estimated to be the fastest method.

    Attributes:
      clip_norm: C > 0, the norm of the whole contribution.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import PerLayer, clipped_grad
      >>> params = {"a": jnp.ones(1), "b": jnp.ones(1)}
      >>> grad = clipped_grad(lambda p, x: jnp.sum((p["a"] + p["b"]) * x), rule=PerLayer(1.0))
      >>> round(float(grad(params, jnp.array([[5.0]])).sum["a"][0]), 3)  # 1 / sqrt(2)
      0.707
    """

    kind: ClassVar[str] = "per_layer"
    is_per_leaf: ClassVar[bool] = True

    clip_norm: float

    def partition(self, names: Sequence[str]) -> list[int]:
        return list(range(len(names)))

    def leaf_weights(
        self, squared: Sequence[jax.Array], names: Sequence[str], bound: jax.Array | None
    ) -> tuple[jax.Array, list[jax.Array]]:
        # proof: clip-4
        share = Flat(self.clip_norm / math.sqrt(len(squared)))
        columns = [share.weights(jnp.sqrt(s)) for s in squared]
        return jnp.stack(columns, axis=1), columns

    @property
    def sensitivity(self) -> float:
        return self.clip_norm
