"""Noise as Optax transformations, which add it to a clipped sum and divide by the expected size.

    noise = transformation(Noise(stddev, sensitivity), divisor)
    state = noise.init(params)
    gradient, state = noise.update(total, state, params, noise_key=key)

The key of a step is an argument, used once, so that no state and no constant of a compiled program
holds it. Independent noise only counts its steps; noise that is correlated over steps keeps what it
needs in ``memory``.
"""

from __future__ import annotations

import dataclasses
import weakref
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
# Bounds on noise over sensitivity: above the first, exact noise could not hide its own grid; below
# the second, a few hundred units would reach its clamp.
MOST_NOISE = 1e6
_LEAST_NOISE = 1e-5


class NoiseState(NamedTuple):
    """The state of noise between steps.

    Attributes:
      step: int32 scalar, steps noised so far.
      memory: pytree of arrays, saved in checkpoints. Secrets in it must be kept like the root key,
        from which past noise can be drawn again; the guarantee must say so
        (``mechanisms/noise_strategies.py``).

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.noise import Noise, transformation
      >>> state = transformation(Noise(1.0, 1.0), divisor=8.0).init({"w": jnp.zeros(2)})
      >>> int(state.step), state.memory
      (0, ())
    """

    step: jax.Array
    memory: PyTree = ()


def continues_same_run(
    step: jax.Array, saved_run: jax.Array, key_tail: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns whether a noise key is for the state's next step, in the run that began the state.

    Another run, even of the same code, draws other users and other noise, which breaks what
    correlated noise assumes of both.

    Args:
      step: int32 scalar, steps that the state has seen.
      saved_run: uint32 [2], the run of the state; any value before its first step.
      key_tail: uint32 [3], the end of the noise key: its step, and two words that name its run.

    Returns:
      A bool scalar, and the run, uint32 [2].
    """
    run = jnp.where(step == 0, key_tail[1:], saved_run)
    return (key_tail[0] == step.astype(jnp.uint32)) & (run == key_tail[1:]).all(), run


@dataclasses.dataclass(frozen=True)
class Noise:
    """Independent Gaussian noise on every coordinate of a clipped sum: central, silo and ISRL.

    Attributes:
      stddev: standard deviation of the noise on the sum (noise multiplier x sensitivity); a number,
        or a scalar array whose value only the device knows. 0 means no noise.
      sensitivity: largest norm of what one privacy unit adds to the sum; a number or scalar array.
      law: ``"exact"``: on an integer grid, with 256-bit keys; ``"float"``: drawn and added in
        float32.
      rows: number of sums over which one unit's ``sensitivity`` extends (correlated noise).

    Examples:
      >>> import jax.numpy as jnp
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.noise import Noise
      >>> key = jnp.asarray(dpfl.RootKey.from_seed(0).words("example"))
      >>> noised = Noise(stddev=2.0, sensitivity=1.0).add(key, {"w": jnp.zeros(1000)})
      >>> 1.8 < float(noised["w"].std()) < 2.2
      True
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
        """Returns ``tree`` plus noise; the numbers do not depend on how arrays are sharded.

        Args:
          key: uint32 [8] (``RootKey.words``), used for this sum only.
          tree: pytree of float32 arrays.
          rest: pytree of float32 arrays, the part of the sum that float32 has no room for.
          earlier: keys of noise to be drawn again, and the share of each that is subtracted
            (``add_exact``).
        """
        # In lower precision noise would be rounded away with the sum.
        chex.assert_type(jax.tree.leaves(tree), jnp.float32)
        chex.assert_shape(key, (8,))
        chex.assert_type(key, jnp.uint32)  # another key would be another distribution
        known = isinstance(self.stddev, float | int | np.floating)
        if not known:
            return jax.lax.cond(  # do not draw noise that is not added
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
                f"sensitivity, but exact noise supports at most {most:g} times (in very large "
                "models): set a larger epsilon"
            )
        if over and self.stddev < _LEAST_NOISE * self.sensitivity:
            raise BadInputError(
                f"the noise is {self.stddev / self.sensitivity:.3g} times the sensitivity, but "
                f"exact noise needs at least {_LEAST_NOISE:g} times, as its grid ends at 3.4 "
                "million standard deviations: set mechanism.arithmetic=float"
            )
        return self._added(key, tree, rest, earlier)

    def _added(self, key: jax.Array, tree: PyTree, rest: Any, earlier: Any) -> PyTree:
        if self.law == "exact":
            return add_exact(key, tree, self.stddev, self.sensitivity, self.rows, rest, earlier)
        drawn = _drawn(key, tree)
        for again, part in () if earlier is None else zip(*earlier, strict=True):
            share = part.astype(jnp.float32) * 2.0**-16
            drawn = jax.tree.map(lambda z, y, f=share: z - f * y, drawn, _drawn(again, tree))
        tree = tree if rest is None else jax.tree.map(jnp.add, tree, rest)
        return jax.tree.map(lambda x, z: x + self.stddev * z, tree, drawn)


def _drawn(key: jax.Array, tree: PyTree) -> PyTree:
    threefry = jax.random.wrap_key_data(key[:2], impl="threefry2x32")
    return GaussianNoise(1.0).sample(threefry, tree)


def transformation(noise: Noise, divisor: float) -> optax.GradientTransformationExtraArgs:
    """Adds independent noise to the sum of each step, and divides by the expected number of units.

    Args:
      noise: the noise on the sum.
      divisor: expected number of units, a constant.

    Returns:
      ``init(params) -> NoiseState`` and ``update(sum, state, params=None, *, noise_key) ->
      (gradient, state)``, to be chained with any optimiser, and compiled with it or alone. The sum
      is float32; the gradient has the dtypes of ``params`` if they are given; noise_key is uint32
      [8] or longer, for this step only (``Plan.noise_key``). If ``refused``, a bool scalar, is
      True, the gradient is NaN (``refuse_key_reuse``).

    Examples:
      >>> import jax.numpy as jnp
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.noise import Noise, transformation
      >>> noise = transformation(Noise(stddev=0.0, sensitivity=1.0), divisor=8.0)
      >>> total = {"w": jnp.array([16.0])}
      >>> key = jnp.asarray(dpfl.RootKey.from_seed(0).words("example"))
      >>> mean, state = noise.update(total, noise.init(total), noise_key=key)
      >>> print(mean["w"])
      [2.]
    """

    def init(params: PyTree) -> NoiseState:
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
        noised = noise.add(noise_key[:8], total)
        if refused is not None:
            noised = jax.tree.map(lambda x: jnp.where(refused, jnp.nan, x), noised)
        return divided(noised, divisor, params), state._replace(step=state.step + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def divided(noised: PyTree, divisor: float, params: PyTree | None) -> PyTree:
    """Returns a noised sum over the expected size, in the dtypes of ``params`` if given."""
    return jax.tree.map(
        lambda g, p: None if g is None else (g / divisor).astype(p.dtype),
        noised,
        noised if params is None else params,
        is_leaf=lambda x: x is None,  # frozen parameters have no sum
    )


# Two releases under one noise key have one noise: their difference is that of the clipped sums.
ONE_RELEASE = (
    "it is for one release, and the difference of two would show the sums without noise: add the "
    "losses up to one, or make a plan of a step for each release and take a batch for each"
)


class KeyReuseState(NamedTuple):
    """The state of ``refuse_key_reuse`` between steps.

    Attributes:
      noise: the state of the noise itself.
      next: uint32 scalar, the step after the last released step.
      run: uint32 [2], the run of that step.
    """

    noise: PyTree
    next: jax.Array | np.ndarray
    run: jax.Array | np.ndarray


# Keys that were used for a release, by identity, because tracers have no value to compare, and one
# array may be given to two transformations.
_used: dict[int, weakref.ref[Any]] = {}


def refuse_key_reuse(
    noise: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Adds noise as ``noise`` does, and refuses a noise key that was used before.

    In ``fit`` each step has one release. A custom training loop may have two losses (a GAN) or take
    a second gradient at another point (SAM), and then use the key of its batch twice.

    Args:
      noise: a transformation whose ``noise_key`` ends with its step and two words that name its run
        (``Plan.noise_key``), and whose gradient is NaN where ``refused``.

    Returns:
      A transformation like ``noise``, with ``KeyReuseState``. If the state has released this step,
      or a later step, of the same run, the gradient is NaN under ``jit``, and BadInputError is
      raised outside ``jit``. BadInputError is also raised if one array (or one tracer) is given
      twice, and, outside ``jit``, if two arrays hold equal words. With a state from before the
      first release, reuse goes unnoticed if a key is given twice to a compiled function, by
      ``vmap``, ``scan`` or ``lax.map``, or as copies that a compiled function makes.

    Examples:
      >>> from dpfl_jax.noise import Noise, refuse_key_reuse, transformation
      >>> noise = refuse_key_reuse(transformation(Noise(1.0, 1.0), divisor=8.0))
      >>> sorted(noise._fields)
      ['init', 'update']
    """
    words: set[int] = set()  # per transformation, as a loop with a public seed may run again

    def init(params: PyTree) -> KeyReuseState:
        return KeyReuseState(noise.init(params), np.zeros((), np.uint32), np.zeros(2, np.uint32))

    def update(
        total: PyTree,
        state: KeyReuseState,
        params: PyTree | None = None,
        *,
        noise_key: jax.Array,
        **others: Any,
    ) -> tuple[PyTree, KeyReuseState]:
        step, run = noise_key[-3], noise_key[-2:]
        again = (step < state.next) & (run == state.run).all()
        known = not isinstance(again, jax.core.Tracer)
        value = None
        if not isinstance(noise_key, jax.core.Tracer):
            value = hash(np.asarray(noise_key).tobytes())
        used = _used.get(id(noise_key))
        same = (used is not None and used() is noise_key) or value in words
        if same or (known and bool(again)):
            which = "a noise key" if isinstance(step, jax.core.Tracer) else f"that of step {step}"
            raise BadInputError(f"noise.update: {which} is given a second time, but {ONE_RELEASE}")
        others = {**others, "noise_key": noise_key, "refused": again}
        gradient, inner = noise.update(total, state.noise, params, **others)
        if value is not None:
            words.add(value)
        name = id(noise_key)
        _used[name] = weakref.ref(noise_key, lambda _: _used.pop(name, None))
        return gradient, KeyReuseState(inner, step + np.uint32(1), run)

    return optax.GradientTransformationExtraArgs(init, update)
