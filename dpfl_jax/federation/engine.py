"""A round of a federation: the silos' compiled local steps, and the server rule.

    release(params, opt_states, chunk) -> Released, opt_states, StepStats

Silos are an array axis. ``shard_map`` splits a chunk of silos [silos, ...] over devices. Within a
device, ``scan`` loops over groups of silos, and ``vmap`` processes the ``width`` silos of a group
at once. Sizes, noise, clip norms, divisors and numbers of steps are arrays, so that silos that
differ in these share one program.

Noise is added inside the silo at every local step, before its optimiser sees the gradient. Only
``Released`` leaves a silo, which is made from parameters after noised steps. ``StepStats`` is
computed from private data without noise, and is never passed to the server rule. The server rule
sees only averages of noised updates, so that it is post-processing, and costs no privacy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from dpfl_jax.clipping import accumulate
from dpfl_jax.clipping.result import StepStats
from dpfl_jax.federation.mechanisms import SiloMechanism
from dpfl_jax.mesh import DATA_AXIS, sum_over_devices
from dpfl_jax.noise import compiler_options
from dpfl_jax.varying import vary, varying_axes

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """The work of some silos in one round: S silos, T local steps, M microbatches of B units.

    Attributes:
      units: pytree of arrays [S, T, M, B, ...].
      mask: bool [S, T, M, B], False for padding.
      unit_weight: float32 [S, T, M, B], factors on clipped gradients.
      microbatches: int32 [S, T], number of microbatches that hold units.
      active: bool [S, T], False for steps that a silo does not take.
      noise_key: uint32 [S, T, 8], each used once.
      stddev: float32 [S, T], standard deviation of the noise on the sum.
      divisor: float32 [S, T], what the noised sum is divided by.
      clip_norm: float32 [S], clip norm of each silo.
      weight: float32 [S], public weight in the server's average; 0 for padding silos.
    """

    units: PyTree
    mask: jax.Array
    unit_weight: jax.Array
    microbatches: jax.Array
    active: jax.Array
    noise_key: jax.Array
    stddev: jax.Array
    divisor: jax.Array
    clip_norm: jax.Array
    weight: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Released:
    """The sum of what leaves the silos of a chunk. A silo is usable if its update is finite.

    Attributes:
      update: float32 pytree, sum over usable silos of weight times (end minus start).
      weight: float32 scalar, sum of the usable silos' weights.
      silos: int32 scalar, number of usable silos.
      dropped: int32 scalar, number of other silos, which is a function of noised values.
    """

    update: PyTree
    weight: jax.Array
    silos: jax.Array
    dropped: jax.Array


_PER_STEP = ("units", "mask", "unit_weight", "active", "noise_key", "stddev", "divisor")


def clipped_sum(
    mechanism: SiloMechanism, loss_fn: Callable[..., jax.Array], **options: Any
) -> Callable[..., tuple[PyTree, StepStats]]:
    """Returns the function that computes a silo's sum at a local step, before noise.

    It is ``(params, units [M, B, ...], mask [M, B], weight [M, B], microbatches, clip_norm)
    -> (sum, StepStats)``.
    """
    clipped_grad = mechanism.clipped_grad(loss_fn, **options)

    def summed(
        params: PyTree,
        units: PyTree,
        mask: jax.Array,
        weight: jax.Array,
        microbatches: jax.Array,
        clip_norm: jax.Array,
    ) -> tuple[PyTree, StepStats]:
        def one(row: tuple[PyTree, jax.Array], mask: jax.Array) -> tuple[PyTree, StepStats]:
            bounded = clipped_grad(params, row[0], mask, row[1], clip_norm)
            return bounded.sum, StepStats.of(bounded, mask, clip_norm)

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        nothing = vary((zeros, StepStats.zero()), varying_axes(mask))
        return accumulate.over_microbatches(one, nothing, (units, weight), mask, microbatches)

    return summed


def make_release(
    mechanism: SiloMechanism,
    loss_fn: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    width: int = 1,
    keep_state: bool = False,
    **options: Any,
) -> Callable[..., tuple[Released, PyTree, StepStats]]:
    """Returns the compiled ``(params, opt_states, chunk) -> (Released, opt_states, stats)``.

    The chunk's number of silos must be a multiple of devices times width. opt_states has a leading
    silo axis.

    Args:
      mechanism: mechanism of any silo; silos differ only in numbers.
      loss_fn: ``(params, record) -> scalar``.
      optimizer: Optax optimiser of the local steps. It sees only noised gradients, and gets the
        standard deviation of their noise as ``noise_stddev``.
      mesh: devices; silos are split over its ``"data"`` axis.
      width: number of silos that a device processes at once, by ``vmap``. 1 is the fastest on a
        CPU, where XLA's convolutions with a batch of kernels are slow.
      keep_state: whether a silo keeps its optimiser's state between rounds. If not, ``opt_states``
        is None, and every round starts with a new state.
      **options: options of ``SiloMechanism.clipped_grad``.
    """
    summed = clipped_sum(mechanism, loss_fn, **options)
    local_optimizer = optax.with_extra_args_support(optimizer)

    def one_silo(
        start: PyTree, opt_state: PyTree, silo: Chunk, microbatches: jax.Array
    ) -> tuple[PyTree, PyTree, StepStats, jax.Array]:
        def local_step(carry: tuple[PyTree, PyTree], x: Any) -> tuple[Any, StepStats]:
            params, state = carry
            step, rows = x
            total, stats = summed(
                params, step["units"], step["mask"], step["unit_weight"], rows, silo.clip_norm
            )
            sensitivity = mechanism.rule(silo.clip_norm).sensitivity
            # proof: noise-4
            noise = mechanism.noise.transform(step["stddev"], sensitivity, step["divisor"])
            key = step["noise_key"]
            gradient, _ = noise.update(total, noise.init(params), params, noise_key=key)
            stddev = step["stddev"] / step["divisor"]
            updates, new_state = local_optimizer.update(
                gradient, state, params, noise_stddev=stddev
            )
            new = (optax.apply_updates(params, updates), new_state)
            kept = jax.tree.map(lambda a, b: jnp.where(step["active"], a, b), new, (params, state))
            return kept, stats

        steps = {name: getattr(silo, name) for name in _PER_STEP}
        (end, new_state), stats = jax.lax.scan(
            local_step, (start, opt_state), (steps, microbatches)
        )
        update = jax.tree.map(lambda b, a: (b - a).astype(jnp.float32), end, start)
        finite = jnp.array(True)
        for leaf in jax.tree.leaves(update):
            finite &= jnp.isfinite(leaf).all()
        if keep_state:  # resets the state of a silo that diverged
            fresh = optimizer.init(start)
            new_state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new_state, fresh)
        return update, new_state, jax.tree.map(lambda x: x.sum(), stats), finite

    many = jax.vmap(one_silo, in_axes=(None, 0, 0, None))

    def group_of_silos(carry: Released, x: tuple[Chunk, PyTree], start: PyTree) -> Any:
        chunk, states = x
        if not keep_state:
            states = vary(_stacked(optimizer.init(start), width), varying_axes(start))
        # One number of microbatches for the whole group, so that vmap does not batch the loop.
        rows = chunk.microbatches.max(axis=0)
        if width == 1:
            state, silo = jax.tree.map(lambda a: a[0], (states, chunk))
            out = one_silo(start, state, silo, rows)
            update, states, stats, finite = jax.tree.map(lambda a: a[None], out)
        else:
            update, states, stats, finite = many(start, states, chunk, rows)
        weight = jnp.where(finite, chunk.weight, 0.0)

        def add(total: jax.Array, u: jax.Array) -> jax.Array:
            clean = jnp.where(finite.reshape(-1, *[1] * (u.ndim - 1)), u, 0.0)
            return total + jnp.tensordot(weight, clean, axes=1, precision="highest")

        real = chunk.weight > 0
        carry = Released(
            update=jax.tree.map(add, carry.update, update),
            weight=carry.weight + weight.sum(),
            silos=carry.silos + (real & finite).sum(dtype=jnp.int32),
            dropped=carry.dropped + (real & ~finite).sum(dtype=jnp.int32),
        )
        kept = states if keep_state else None
        return carry, (kept, jax.tree.map(lambda s: s.sum(), stats))

    def on_device(params: PyTree, states: PyTree, chunk: Chunk) -> tuple[Released, Any, StepStats]:
        axes = frozenset({DATA_AXIS})
        params = vary(params, axes)
        nothing = Released(
            update=jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            weight=jnp.zeros(()),
            silos=jnp.zeros((), jnp.int32),
            dropped=jnp.zeros((), jnp.int32),
        )

        def split(a: jax.Array) -> jax.Array:
            return a.reshape(a.shape[0] // width, width, *a.shape[1:])

        released, (new_states, stats) = jax.lax.scan(
            lambda carry, x: group_of_silos(carry, x, params),
            vary(nothing, axes),
            (jax.tree.map(split, chunk), jax.tree.map(split, states)),
        )
        new_states = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), new_states)
        stats = jax.tree.map(lambda s: s.sum(), stats)
        return sum_over_devices(released), new_states, sum_over_devices(stats)

    silo_axis = PartitionSpec(DATA_AXIS)
    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(PartitionSpec(), silo_axis, silo_axis),
            out_specs=(PartitionSpec(), silo_axis, PartitionSpec()),
            axis_names={DATA_AXIS},
        ),
        compiler_options=compiler_options(mesh),
    )


def mean_update(released: Released) -> PyTree:
    """Returns the weighted mean over the usable silos; zero if there is none."""
    weight = jnp.where(released.weight > 0, released.weight, 1.0)
    return jax.tree.map(lambda u: u / weight, released.update)


def _stacked(tree: PyTree, width: int) -> PyTree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (width, *jnp.shape(x))), tree)


class ServerRule(Protocol):
    """How a server updates its state (a pytree) with the mean of the silos' updates.

    All methods are pure functions.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.federation import OptimizerServer, ServerRule
      >>> rule: ServerRule = OptimizerServer()
      >>> print(rule.broadcast(rule.init({"w": jnp.ones(1)}))["w"])
      [1.]
    """

    def init(self, params: PyTree) -> PyTree:
        """Returns the state before the first round."""

    def broadcast(self, state: PyTree) -> PyTree:
        """Returns the parameters from which the silos start a round."""

    def apply(self, state: PyTree, update: PyTree, round_index: jax.Array) -> PyTree:
        """Returns the state after a round.

        Args:
          state: state before the round.
          update: float32 pytree, weighted mean of the silos' updates (parameters at the end minus
            those at the start); zero if no silo was usable.
          round_index: int32 scalar, from 0.
        """

    def model(self, state: PyTree) -> PyTree:
        """Returns the parameters that are evaluated and published."""


@dataclasses.dataclass(frozen=True)
class OptimizerServer(ServerRule):
    """An Optax optimiser that takes minus the mean update for a gradient.

    Source: Reddi et al. 2021, "FedOpt". With ``optax.sgd(1.0)``, the default, the model is the
    average of the silos' parameters.

    Attributes:
      optimizer: Optax optimiser of the server.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from dpfl_jax.federation import OptimizerServer
      >>> server = OptimizerServer(optax.sgd(1.0))
      >>> state = server.init({"w": jnp.zeros(1)})
      >>> state = server.apply(state, {"w": jnp.array([0.5])}, jnp.int32(0))
      >>> print(server.model(state)["w"])
      [0.5]
    """

    optimizer: optax.GradientTransformation = dataclasses.field(
        default_factory=lambda: optax.sgd(1.0)
    )

    def init(self, params: PyTree) -> PyTree:
        return {"params": params, "opt_state": self.optimizer.init(params)}

    def broadcast(self, state: PyTree) -> PyTree:
        return state["params"]

    def apply(self, state: PyTree, update: PyTree, round_index: jax.Array) -> PyTree:
        del round_index
        params = state["params"]
        gradient = jax.tree.map(lambda u, p: (-u).astype(jnp.asarray(p).dtype), update, params)
        updates, opt_state = self.optimizer.update(gradient, state["opt_state"], params)
        return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}

    def model(self, state: PyTree) -> PyTree:
        return state["params"]
