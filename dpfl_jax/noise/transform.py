"""Noise as an Optax transformation: adds it to a clipped sum, and divides by the expected size.

    noise = transformation(Noise(stddev, sensitivity), divisor)
    state = noise.init(params)
    gradient, state = noise.update(total, state, params, noise_key=key)

The key of a step is an argument, used once: so it is in no state that could be kept, and no
constant of a compiled program. Noise that is drawn afresh at every step counts its steps alone;
noise that is correlated between steps keeps what it needs in ``memory``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpfl_jax.accounting import NoiseLaw
from dpfl_jax.errors import BadInputError
from dpfl_jax.noise.exact import add_exact
from dpfl_jax.noise.gaussian import GaussianNoise

PyTree = Any
MOST_NOISE = 1e6  # over the sensitivity; more, and exact noise could not hide its own grid
_LEAST_NOISE = 1e-5  # likewise; less, and a few hundred units would reach where exact noise clamps


class NoiseState(NamedTuple):
    """What noise knows between steps.

    Attributes:
      step: int32 scalar, steps noised so far.
      memory: pytree of arrays, in checkpoints. What is secret in it is so like the root key, from
        which past noise can be drawn again: the guarantee must say so
        (``mechanisms/noise_strategies.py``).
    """

    step: jax.Array
    memory: PyTree = ()


def goes_on(step: jax.Array, known: jax.Array, told: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether a state goes on as the run that it began with; and that run.

    Another run (of the same code on another machine, even) draws users and noise anew, so that
    what correlated noise assumes of both does not hold.

    Args:
      step: int32, steps that the state has seen.
      known: uint32 [2], the run that it knows; of any value before the first step.
      told: uint32 [3], at the end of a ``noise_key``: its step, and two words of its run.
    """
    known = jnp.where(step == 0, told[1:], known)
    return (told[0] == step.astype(jnp.uint32)) & (known == told[1:]).all(), known


@dataclasses.dataclass(frozen=True)
class Noise:
    """Independent Gaussian noise on every coordinate of a bounded sum: every system's.

    Attributes:
      stddev: of the noise on the sum (noise multiplier x sensitivity); a number, or an array known
        on the device alone. Where it is 0 there is no noise.
      sensitivity: largest norm of what one privacy unit adds to the sum; likewise.
      law: ``"exact"``: on an integer grid, with 256-bit keys; ``"float"``: float32 numbers, added
        in float32.
      rows: sums over which the ``sensitivity`` of one unit's part is spread (correlated noise).
    """

    stddev: Any
    sensitivity: Any
    law: NoiseLaw = "exact"
    rows: int = 1

    def add(
        self,
        key: jax.Array,
        tree: PyTree,
        rest: PyTree | None = None,
        earlier: tuple[jax.Array, jax.Array] | None = None,
    ) -> PyTree:
        """``tree`` plus noise: the same numbers for every layout.

        Args:
          key: uint32 [8] (``RootKey.words``), of this sum alone.
          tree: pytree of float32 arrays.
          rest: what is left of the sum where float32 has no room for it; likewise.
          earlier: noise that is drawn again, and parts of it that are taken back (``add_exact``).
        """
        # In lower precision noise would be rounded away with the sum.
        chex.assert_type(jax.tree.leaves(tree), jnp.float32)
        chex.assert_shape(key, (8,))
        chex.assert_type(key, jnp.uint32)  # another key would be another law of noise
        known = isinstance(self.stddev, float | int | np.floating)
        if not known:
            return jax.lax.cond(  # where there is none, none is drawn
                self.stddev == 0,
                lambda tree: tree if rest is None else jax.tree.map(jnp.add, tree, rest),
                lambda tree: self._added(key, tree, rest, earlier),
                tree,
            )
        if GaussianNoise(self.stddev).stddev == 0:
            return tree if rest is None else jax.tree.map(jnp.add, tree, rest)
        over = self.law == "exact" and isinstance(self.sensitivity, float | int | np.floating)
        most = MOST_NOISE / self.rows**0.5
        if over and not self.stddev <= most * self.sensitivity * (1 + 1e-6):
            raise BadInputError(
                f"the noise is {self.stddev / max(self.sensitivity, 1e-300):.3g} times the "
                f"sensitivity, but at most {most:g} times is hidden by exact noise in very "
                "large models: ask for a larger epsilon"
            )
        if over and self.stddev < _LEAST_NOISE * self.sensitivity:
            raise BadInputError(
                f"the noise is {self.stddev / self.sensitivity:.3g} times the sensitivity, but "
                f"exact noise needs {_LEAST_NOISE:g} times: its grid ends at 3.4 million standard "
                "deviations; set mechanism.arithmetic=float"
            )
        return self._added(key, tree, rest, earlier)

    def _added(self, key: jax.Array, tree: PyTree, rest: Any, earlier: Any) -> PyTree:
        if self.law == "exact":
            return add_exact(key, tree, self.stddev, self.sensitivity, self.rows, rest, earlier)
        drawn = _drawn(key, tree)
        for again, part in () if earlier is None else zip(*earlier, strict=True):
            taken = part.astype(jnp.float32) * 2.0**-16
            drawn = jax.tree.map(lambda z, y, f=taken: z - f * y, drawn, _drawn(again, tree))
        tree = tree if rest is None else jax.tree.map(jnp.add, tree, rest)
        return jax.tree.map(lambda x, z: x + self.stddev * z, tree, drawn)


def _drawn(key: jax.Array, tree: PyTree) -> PyTree:
    threefry = jax.random.wrap_key_data(key[:2], impl="threefry2x32")
    return GaussianNoise(1.0).sample(threefry, tree)


def transformation(noise: Noise, divisor: float) -> optax.GradientTransformationExtraArgs:
    """Independent noise at every step.

    Args:
      noise: on the sum.
      divisor: expected number of units, a constant.

    Returns:
      ``init(params) -> NoiseState`` and ``update(sum, state, params=None, *, noise_key) ->
      (gradient, state)``, to be chained with any optimiser, and compiled with it or alone. The sum
      is float32; the gradient has the dtypes of ``params`` if they are given; noise_key is uint32
      [8] or more, for this step alone (``Plan.noise_key``). Where ``refused``, a bool scalar, the
      gradient is NaN (``once``).
    """

    def init(params: PyTree) -> NoiseState:
        del params
        return NoiseState(jnp.zeros((), jnp.int32))

    def update(
        total: PyTree,
        state: NoiseState,
        params: PyTree | None = None,
        *,
        noise_key: jax.Array,
        refused: jax.Array | None = None,
        **others: Any,
    ) -> tuple[PyTree, NoiseState]:
        del others
        noised = noise.add(noise_key[:8], total)
        if refused is not None:
            noised = jax.tree.map(lambda x: jnp.where(refused, jnp.nan, x), noised)
        return divided(noised, divisor, params), state._replace(step=state.step + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def divided(noised: PyTree, divisor: float, params: PyTree | None) -> PyTree:
    """A noised sum over the expected size, in the dtypes of ``params`` if they are given."""
    return jax.tree.map(
        lambda g, p: None if g is None else (g / divisor).astype(p.dtype),
        noised,
        noised if params is None else params,
        is_leaf=lambda x: x is None,  # parameters that are not trained have no sum
    )
