"""The mesh of devices a run lives on, and how parameters and units are split over it.

Four axes, each of any length: ``data`` (units split, parameters copied), ``fsdp`` (units and
parameters split), ``tensor`` (parameters split, every device sees all units of its row) and
``sequence`` (each example's positions split). What is trained, and the guarantee, are the same on
every mesh.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dpfl_jax.clipping.result import leaf_name
from dpfl_jax.errors import BadInputError

PyTree = Any

DATA_AXIS, FSDP_AXIS, TENSOR_AXIS, SEQUENCE_AXIS = "data", "fsdp", "tensor", "sequence"

# Layers whose product is summed over the tensor axis take it on their inputs; all others on their
# outputs, so that one reduction is needed for two layers (Shoeybi et al. 2019, "Megatron-LM").
_TENSOR_ON_INPUTS = ("out", "down", "embedding")


def data_parallel_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A one-axis mesh (``"data"``) over ``devices`` (default: all of them).

    Those of one process are neighbours, so that each reads whole stretches of a row.

    Examples:
      >>> import jax
      >>> from dpfl_jax.training import data_parallel_mesh
      >>> data_parallel_mesh(jax.devices()[:1]).axis_names
      ('data',)
    """
    found = jax.devices() if devices is None else devices
    chosen = np.array(sorted(found, key=lambda device: device.process_index))
    return Mesh(chosen, (DATA_AXIS,), axis_types=(AxisType.Auto,))


def make_mesh(
    data: int | None = None,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
    sequence: int = 1,
) -> Mesh:
    """A mesh over all devices.

    Args:
      data: copies of the (split) parameters; None: as many as there are devices for.
      fsdp: parts of parameters, optimiser state, sums and noise.
      tensor: parts of each layer's products.
      devices: default all.
      sequence: parts of each example's positions.

    Returns:
      The one-axis data mesh if nothing else is asked for, else one with axes data, fsdp, tensor,
      and sequence if that is asked for.

    Raises:
      BadInputError: the devices do not divide up.
    """
    chosen = list(jax.devices() if devices is None else devices)
    parts = fsdp * tensor * sequence
    if data is None:
        data = max(1, len(chosen) // parts)
    if data * parts != len(chosen):
        raise BadInputError(
            f"mesh: data {data} x fsdp {fsdp} x tensor {tensor} x sequence {sequence} are "
            f"{data * parts} devices, but there are {len(chosen)}: change the mesh section"
        )
    if parts == 1:
        return data_parallel_mesh(chosen)
    shape = {DATA_AXIS: data, FSDP_AXIS: fsdp, TENSOR_AXIS: tensor}
    shape |= {SEQUENCE_AXIS: sequence} if sequence > 1 else {}
    # An axis may be a part of a side of the slice (fsdp 2 of a 4 x 4), which is not the default.
    grid = mesh_utils.create_device_mesh(
        tuple(shape.values()), chosen, allow_split_physical_axes=True
    )
    return Mesh(grid, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def place(tree: PyTree, shardings: PyTree, copy: bool = True) -> PyTree:
    """Puts arrays where they belong, on this process's devices and on others'.

    Args:
      tree: pytree of arrays: the same ones in every process, or already global.
      shardings: NamedShardings: one for all arrays, or a pytree like ``tree``.
      copy: whether the result must be independent of ``tree`` even where that is in place.
    """

    def one(x: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            if not copy and x.sharding.is_equivalent_to(sharding, x.ndim):
                return x
            return jax.jit(jnp.copy, out_shardings=sharding)(x)
        if sharding.is_fully_addressable:
            return jax.device_put(jnp.array(x, copy=True) if copy else x, sharding)
        host = np.asarray(x)  # every process has it whole, and ships its devices' parts
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, tree, jax.tree.broadcast(shardings, tree))


def splits_parameters(mesh: Mesh) -> bool:
    """Whether parameters or positions are split, not only units."""
    return any(mesh.shape.get(axis, 1) > 1 for axis in (FSDP_AXIS, TENSOR_AXIS, SEQUENCE_AXIS))


def unit_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes over which the units of a row are split."""
    return tuple(axis for axis in (DATA_AXIS, FSDP_AXIS) if axis in mesh.axis_names)


def unit_parts(mesh: Mesh) -> int:
    """Into how many parts a row of units is split."""
    return math.prod(mesh.shape[axis] for axis in unit_axes(mesh))


def parameter_shardings(params: PyTree, mesh: Mesh, whole: Collection[str] = ()) -> PyTree:
    """How each parameter is split: a pytree of NamedShardings like ``params``.

    Matrices (and stacks of them: the last two axes) are split over ``tensor`` on their outputs, or
    on their inputs if their name says that they close a block or embed, and over ``fsdp`` on the
    other side; an axis that does not divide stays whole. Vectors are copied: they are small.

    Args:
      params: pytree of arrays or ShapeDtypeStructs.
      mesh: from ``make_mesh``.
      whole: names (``blocks/up/kernel``) of parameters that are copied all the same
        (``jaxprs.convolution_kernels``).
    """

    def one(path: Any, x: Any) -> NamedSharding:
        return parameter_sharding(leaf_name(path), tuple(x.shape), mesh, whole)

    return jax.tree_util.tree_map_with_path(one, params)


def parameter_sharding(
    name: str, shape: tuple[int, ...], mesh: Mesh, whole: Collection[str] = ()
) -> NamedSharding:
    """How one parameter is split, by its name and shape."""
    return replicated(mesh) if name in whole else NamedSharding(mesh, _spec(name, shape, mesh))


def _spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    if not splits_parameters(mesh) or len(shape) < 2 or min(shape[-2:]) == 1:
        return PartitionSpec()
    if "scale" in name or "bias" in name:
        return PartitionSpec()  # vectors of stacked layers
    axes: list[str | None] = [None] * len(shape)
    inputs, outputs = len(shape) - 2, len(shape) - 1
    inward = any(part in name for part in _TENSOR_ON_INPUTS)
    # The rank of an adapter is short: its product is whole where it is needed.
    rank = outputs if "lora_a" in name else inputs if "lora_b" in name else None
    for axis, at in (
        (TENSOR_AXIS, inputs if inward else outputs),
        (FSDP_AXIS, outputs if inward else inputs),
    ):
        if at != rank and mesh.shape[axis] > 1 and shape[at] % mesh.shape[axis] == 0:
            axes[at] = axis
    while axes and axes[-1] is None:
        axes.pop()  # as the compiler writes it: another spelling would compile the step again
    return PartitionSpec(*axes)


def state_shardings(
    params: PyTree, opt_state: PyTree, mesh: Mesh, whole: Collection[str] = ()
) -> PyTree:
    """How an optimiser's state is split: what has a parameter's shape, as that parameter.

    So is a stack of such arrays (a window of past steps), which is not split along its first axis.

    Args:
      params: pytree of arrays or ShapeDtypeStructs.
      opt_state: ``jax.eval_shape(optimizer.init, params)``.
      mesh: from ``make_mesh``.
      whole: as in ``parameter_shardings``.
    """
    # By the end of the path, so that it works for any optimiser: `mu/blocks/up/kernel` is like
    # `blocks/up/kernel`. Anything else (counters, factored moments) is copied.
    known = {
        tuple(map(str, path)): (tuple(x.shape), sharding)
        for (path, x), sharding in zip(
            jax.tree_util.tree_flatten_with_path(params)[0],
            jax.tree.leaves(parameter_shardings(params, mesh, whole)),
            strict=True,
        )
    }

    def one(path: Any, x: Any) -> NamedSharding:
        steps = tuple(map(str, path))
        for start in range(len(steps) + 1):
            shape, sharding = known.get(steps[start:], (None, None))
            if sharding is not None and shape == tuple(x.shape):
                return sharding
            if sharding is not None and shape == tuple(x.shape[1:]) and sharding.spec:
                return NamedSharding(mesh, PartitionSpec(None, *sharding.spec))
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(one, opt_state)
