"""The clipped sum over a step's units: a loop over microbatches, then one reduction over ``data``.

If only units are split over devices, each device sums its own share (``shard_map``). If parameters
are split, too, the compiler places everything, and each data-parallel part keeps its own sum, so
that there is still only one reduction over ``data``, after the loop. The sum over ``fsdp`` is taken
for every microbatch, so that a device holds a part of it; or after the loop, too, where a device
has memory for all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpfl_jax.clipping import Flat, accumulate, join
from dpfl_jax.clipping.adaptive import CountedSum
from dpfl_jax.clipping.cost import memory_limit
from dpfl_jax.clipping.jaxprs import convolution_kernels
from dpfl_jax.clipping.result import StepStats, leaf_name
from dpfl_jax.errors import BadInputError
from dpfl_jax.mesh import (
    DATA_AXIS,
    FSDP_AXIS,
    SEQUENCE_AXIS,
    parameter_sharding,
    parameter_shardings,
    replicated,
    splits_parameters,
    sum_over_devices,
)
from dpfl_jax.models.transformer import constrain_activations

if TYPE_CHECKING:
    from dpfl_jax.mechanisms.mechanism import Mechanism

PyTree = Any
SumFn = Callable[..., tuple[PyTree, StepStats]]


def clipped_sum_over_microbatches(
    mechanism: Mechanism,
    loss_fn: Callable[..., jax.Array],
    mesh: Mesh,
    *,
    whole: Collection[str] | None = None,
    **options: Any,
) -> SumFn:
    """Returns ``(params, units, mask, num_microbatches, frozen, clip_norm) -> (sum, stats)``.

    ``params`` and ``frozen`` are the two parts of ``clipping.split`` (frozen may be left out). The
    sum, before noise, has the structure of ``params``. If the clip norm adapts, the sum is a
    ``CountedSum``, and ``clip_norm`` is the clip norm of this step (None: of the first step).

    Args:
      mechanism: the mechanism, which clips the gradients.
      loss_fn: ``(params, example) -> scalar`` for one example.
      mesh: from ``mesh.make_mesh``; the rows of ``units`` are split over its unit axes.
      whole: parameters that are not split, as in ``mesh.parameter_shardings``. None: all may be;
        tracing then fails if the mesh splits the kernel of a convolution.
      **options: passed to ``Mechanism.clipped_grad``; ``trainable`` as the parameters were split.
        ``split_users`` splits the examples of each user over the ``fsdp`` devices, each of which
        computes a part of the user's gradient; ``examples_at_once`` then counts the examples of one
        device. ``sum_over_fsdp`` is as in ``Execution``.
    """
    cut = microbatched(
        mechanism,
        mesh,
        options.pop("examples_at_once", None),
        options.pop("split_users", False),
        whole or (),
    )
    options |= cut
    sum_over_fsdp = options.pop("sum_over_fsdp", "auto")
    if splits_parameters(mesh):
        loss_fn = _in_place(loss_fn if whole is not None else _kernels_whole(loss_fn, mesh), mesh)
        summed = _compiler_placed(mechanism, loss_fn, mesh, whole or (), options, sum_over_fsdp)
    else:
        summed = _shard_mapped(mechanism, loss_fn, mesh, options)

    def total(
        params: PyTree,
        units: PyTree,
        mask: Any,
        num_microbatches: Any,
        frozen: PyTree = None,
        clip_norm: Any = None,
    ) -> tuple[PyTree, StepStats]:
        return summed(params, units, mask, num_microbatches, frozen, clip_norm)

    return total


def _no_stats(params: PyTree, *shape: int) -> StepStats:
    leaves = jnp.zeros((*shape, len(jax.tree.leaves(params))), jnp.float32)
    return dataclasses.replace(StepStats.zero(*shape), leaf_norms=leaves)


def unit_norms(
    mechanism: Mechanism, loss_fn: Callable[..., jax.Array], mesh: Mesh, **options: Any
) -> Callable[..., jax.Array]:
    """Returns ``(params, units, mask, frozen) -> float32 [rows, row]``: norms before clipping.

    Units are processed one after the other, so that a norm depends only on the unit and the model,
    to the last bit. In a batch, rounding would depend on the unit's place in the row.

    Args:
      mechanism: the mechanism that the units belong to.
      loss_fn: ``(params, example) -> scalar`` for one example.
      mesh: from ``mesh.make_mesh``, without axes that split parameters.
      **options: passed to ``Mechanism.clipped_grad``.

    Returns:
      Norms; infinite if a gradient is not finite, 0 where there is no unit.
    """
    clipped_grad = mechanism.clipped_grad(loss_fn, **options)
    rows, anything = PartitionSpec(None, DATA_AXIS), Flat(mechanism.clip_norm)

    def local(params: PyTree, units: PyTree, mask: jax.Array, frozen: PyTree) -> jax.Array:
        def alone(unit: tuple[PyTree, jax.Array]) -> jax.Array:
            example, there = jax.tree.map(lambda x: x[None], unit)
            bounded = clipped_grad(join(params, frozen), example, mask=there, rule=anything)
            return jnp.where(bounded.nonfinite, jnp.inf, bounded.norms)[0]

        every = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (units, mask))
        # proof: individual-bound-5
        return jax.lax.map(alone, every).reshape(mask.shape)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), rows, rows, PartitionSpec()),
        out_specs=rows,
        axis_names={DATA_AXIS},
    )


def microbatched(
    mechanism: Mechanism,
    mesh: Mesh,
    examples_at_once: int | None,
    split_users: bool,
    whole: Collection[str] = (),
) -> dict[str, Any]:
    """Returns options for ``Mechanism.clipped_grad`` to process units in microbatches; {} if not.

    Args:
      mechanism: the mechanism that the units belong to.
      mesh: from ``mesh.make_mesh``; if it does not split parameters, it does not split users.
      examples_at_once: number of a unit's examples that one device processes at once; None: all.
      split_users: whether the ``fsdp`` devices share each unit's examples.
      whole: parameters that are not split, as in ``mesh.parameter_shardings``.
    """
    if not (split_users and splits_parameters(mesh)):
        return {} if examples_at_once is None else {"examples_at_once": examples_at_once}
    parts = mesh.shape[FSDP_AXIS]
    if examples_at_once is None:
        examples_at_once = -(-(mechanism.participation.unit_examples or 1) // parts)
    return {
        "examples_at_once": examples_at_once * parts,
        "example_sharding": NamedSharding(mesh, PartitionSpec(FSDP_AXIS)),
        "gradient_sharding": functools.partial(parameter_sharding, mesh=mesh, whole=whole),
    }


def _kernels_whole(loss_fn: Callable[..., jax.Array], mesh: Mesh) -> Callable[..., jax.Array]:
    """The loss, which raises if the mesh splits a convolution's kernel: XLA may mix units then."""

    def loss(params: PyTree, example: PyTree, **kwargs: Any) -> jax.Array:
        places = {
            leaf_name(path): parameter_sharding(leaf_name(path), jnp.shape(x), mesh)
            for path, x in jax.tree_util.tree_leaves_with_path(params)
        }
        kernels = convolution_kernels(functools.partial(loss_fn, **kwargs), params, example)
        split = sorted(name for name in kernels if not places[name].is_fully_replicated)
        if split:
            raise BadInputError(
                f"the mesh splits {', '.join(split)} over devices, but XLA mixes units if the "
                "kernel of a convolution is split: keep these parameters whole on all devices, "
                "with whole=clipping.jaxprs.convolution_kernels(loss_fn, params, example) here and "
                "in mesh.parameter_shardings"
            )
        return loss_fn(params, example, **kwargs)

    return loss


def _in_place(loss_fn: Callable[..., jax.Array], mesh: Mesh) -> Callable[..., jax.Array]:
    """The loss, with activations placed with their example, wherever the parameters are.

    Positions, the first axis of a language model's activations, are split over ``sequence``. The
    loss raises BadInputError if there are no positions to split.
    """
    sequence = mesh.shape.get(SEQUENCE_AXIS, 1)

    def loss(params: PyTree, example: PyTree, **kwargs: Any) -> jax.Array:
        split = sequence == 1

        def pin(x: jax.Array) -> jax.Array:
            nonlocal split
            # ``vmap`` adds the axes of examples and units.
            axes: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
            if sequence > 1 and x.shape[0] % sequence == 0:
                axes[0], split = SEQUENCE_AXIS, True
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

        with constrain_activations(pin):
            value = loss_fn(params, example, **kwargs)
        if not split:
            raise BadInputError(
                f"execution.mesh.sequence={sequence} splits the positions of a language model into "
                f"equal parts: set data.seq_len to a multiple of it, or for another model set "
                "execution.mesh.sequence to 1"
            )
        return value

    return loss


def _shard_mapped(
    mechanism: Mechanism, loss_fn: Callable[..., jax.Array], mesh: Mesh, options: dict[str, Any]
) -> SumFn:
    """The sum if every device has all parameters."""
    summed = mechanism.sum_fn(mechanism.clipped_grad(loss_fn, **options))
    rows = PartitionSpec(None, DATA_AXIS)

    def local(
        params: PyTree,
        units: PyTree,
        mask: Any,
        num_microbatches: Any,
        frozen: PyTree,
        clip_norm: Any,
    ) -> tuple[PyTree, StepStats]:
        # Without this cast, the gradient with respect to replicated parameters is summed over
        # devices *before* clipping, and the sensitivity becomes the number of devices.
        params = jax.tree.map(lambda p: jax.lax.pcast(p, DATA_AXIS, to="varying"), params)

        def one(row: PyTree, mask: jax.Array) -> tuple[PyTree, StepStats]:
            bounded = summed(clip_norm, join(params, frozen), row, mask=mask)
            above = jnp.float32(mechanism.clip_norm) if clip_norm is None else clip_norm
            own = mechanism.rule.of_units(row)[1]
            above = above if own is None else own
            return bounded.sum, StepStats.of(bounded, mask, above, leaf_norms=True)

        carry = (mechanism.zero_sum(params), _no_stats(params))
        carry = jax.tree.map(lambda x: jax.lax.pcast(x, DATA_AXIS, to="varying"), carry)
        total = accumulate.over_microbatches(
            one, carry, units, mask, num_microbatches, compensated=mechanism.rule.compensated
        )
        return sum_over_devices(total)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), rows, rows, *[PartitionSpec()] * 3),
        out_specs=PartitionSpec(),
        axis_names={DATA_AXIS},
    )


def _compiler_placed(
    mechanism: Mechanism,
    loss_fn: Callable[..., jax.Array],
    mesh: Mesh,
    whole: Collection[str],
    options: dict[str, Any],
    sum_over_fsdp: str,
) -> SumFn:
    """The sum if parameters are split; units [row, ...] become [parts, row / parts, ...].

    Each part has a sum of its own. The parts are those of ``data``, or of ``data`` and ``fsdp``.
    """
    together = "example_sharding" in options  # all devices process one user at a time

    def bounded(axis: str | None) -> Any:
        inner = NamedSharding(mesh, PartitionSpec(axis))
        return mechanism.sum_fn(mechanism.clipped_grad(loss_fn, unit_sharding=inner, **options))

    # Before the first call, so that what the mechanism cannot do is refused here.
    spread = bounded(None if together else FSDP_AXIS)

    def total(
        params: PyTree,
        units: PyTree,
        mask: Any,
        num_microbatches: Any,
        frozen: PyTree,
        clip_norm: Any,
    ) -> tuple[PyTree, StepStats]:
        places = parameter_shardings(params, mesh, whole)
        once = not together and _sums_once(sum_over_fsdp, params, mesh, options)
        lead = (DATA_AXIS, FSDP_AXIS) if once else (DATA_AXIS,)
        parts = math.prod(mesh.shape[axis] for axis in lead)
        outer = NamedSharding(mesh, PartitionSpec(lead, None if together or once else FSDP_AXIS))
        summed = bounded(None) if once else spread

        def placed(tree: PyTree, *lead: tuple[str, ...]) -> PyTree:
            def one(x: jax.Array, place: NamedSharding) -> jax.Array:
                rest = [None if lead and axis in lead[0] else axis for axis in place.spec]
                spec = PartitionSpec(*lead, *rest)
                return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

            if isinstance(tree, CountedSum):
                return tree._replace(gradient=jax.tree.map(one, tree.gradient, places))
            return jax.tree.map(one, tree, places)

        def part(row: PyTree, mask: jax.Array) -> tuple[PyTree, StepStats]:
            bounded = summed(clip_norm, join(params, frozen), row, mask=mask)
            above = mechanism.clip_norm if clip_norm is None else clip_norm
            return bounded.sum, StepStats.of(bounded, mask, above, leaf_norms=True)

        def one(row: PyTree, mask: jax.Array) -> tuple[PyTree, StepStats]:
            def split(x: jax.Array) -> jax.Array:
                x = x.reshape(parts, x.shape[0] // parts, *x.shape[1:])
                return jax.lax.with_sharding_constraint(x, outer)

            every = jax.vmap(part, spmd_axis_name=lead)
            sums, stats = every(jax.tree.map(split, row), split(mask))
            return placed(sums, lead), stats

        sums, stats = mechanism.zero_sum(params, parts), _no_stats(params, parts)
        carry = accumulate.over_microbatches(
            one,
            (placed(sums, lead), stats),
            units,
            mask,
            num_microbatches,
            compensated=mechanism.rule.compensated,
            parts=parts,
        )
        sums, stats = carry
        if once:  # first within a copy of the parameters: less is then sent between copies

            def over_fsdp(x: jax.Array) -> jax.Array:
                return x.reshape(mesh.shape[DATA_AXIS], -1, *x.shape[1:]).sum(axis=1)

            sums = placed(jax.tree.map(over_fsdp, sums), (DATA_AXIS,))
        sums, stats = jax.tree.map(lambda x: x.sum(axis=0), (sums, stats))
        return placed(sums), jax.lax.with_sharding_constraint(stats, replicated(mesh))

    return total


def _sums_once(sum_over_fsdp: str, params: PyTree, mesh: Mesh, options: dict[str, Any]) -> bool:
    """Whether the sum over ``fsdp`` is taken after the loop over microbatches.

    Each device then holds all of its sum so far, and of the microbatch's, instead of a part.
    """
    if sum_over_fsdp != "auto" or mesh.shape[FSDP_AXIS] == 1:
        return sum_over_fsdp == "step"
    limit = options.get("memory_limit") or memory_limit()
    more = 8.0 * sum(x.size for x in jax.tree.leaves(params)) * (1 - 1 / mesh.shape[FSDP_AXIS])
    return limit is not None and more <= limit / 2  # a quarter of the device
