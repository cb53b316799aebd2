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

    Devices of one process are neighbours, so that each process reads contiguous parts of a row.

    Examples:
      >>> import jax
      >>> from dpfl_jax.training import data_parallel_mesh
      >>> data_parallel_mesh(jax.devices()[:1]).axis_names
      ('data',)
    """
    available = jax.devices() if devices is None else devices
    chosen = np.array(sorted(available, key=lambda device: device.process_index))
    return Mesh(chosen, (DATA_AXIS,), axis_types=(AxisType.Auto,))


def make_mesh(
    data: int | None = None,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
    sequence: int = 1,
) -> Mesh:
    """Makes a mesh of all devices.

    Args:
      data: number of copies of the (split) parameters; None: as many as there are devices for.
      fsdp: number of parts that parameters, optimiser state, sums and noise are split into.
      tensor: number of parts of each layer's matrix products.
      devices: the devices; default all.
      sequence: number of parts of each example's positions.

    Returns:
      A mesh with the axis data if all others are 1, else with data, fsdp, tensor and, if it is
      above 1, sequence. Of several TPU slices, each holds whole copies of the parameters: only data
      goes over the network between them.

    Raises:
      BadInputError: the product of the axes is not the number of devices, or a copy of the
        parameters would not lie within one slice.
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
    slices = num_slices(chosen)
    if data % slices:
        raise BadInputError(
            f"mesh: data is {data}, but the devices are {slices} slices, and only copies of the "
            f"parameters may be in different slices: lower fsdp x tensor x sequence, {parts}, to "
            f"the {len(chosen) // slices} devices of a slice, or a divisor of it"
        )
    within = (data // slices, *list(shape.values())[1:])
    # An axis may be part of a side of a TPU slice (fsdp 2 on a 4 x 4): JAX refuses by default.
    if slices > 1:
        grid = mesh_utils.create_hybrid_device_mesh(
            within, (slices, *[1] * (len(shape) - 1)), chosen, allow_split_physical_axes=True
        )
    else:
        grid = mesh_utils.create_device_mesh(within, chosen, allow_split_physical_axes=True)
    return Mesh(grid, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def num_slices(devices: Sequence[jax.Device]) -> int:
    """The number of TPU slices that the devices belong to, between which the network is slow."""
    # Not of GPUs, where each host counts as a slice for JAX.
    return len({getattr(d, "slice_index", 0) for d in devices if d.platform == "tpu"}) or 1


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays of which every device holds a full copy."""
    return NamedSharding(mesh, PartitionSpec())


def place(tree: PyTree, shardings: PyTree, copy: bool = True) -> PyTree:
    """Puts arrays on the devices that their shardings name, also those of other processes.

    Args:
      tree: pytree of arrays: the same ones in every process, or already global.
      shardings: NamedShardings: one for all arrays, or a pytree like ``tree``.
      copy: whether to copy arrays that are in place already; else the result may share them.
    """

    def one(x: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            if not copy and x.sharding.is_equivalent_to(sharding, x.ndim):
                return x
            return jax.jit(jnp.copy, out_shardings=sharding)(x)
        if sharding.is_fully_addressable:
            return jax.device_put(jnp.array(x, copy=True) if copy else x, sharding)
        host = np.asarray(x)  # every process has all of it, and sends parts to its devices
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, tree, jax.tree.broadcast(shardings, tree))


def sum_over_devices(tree: PyTree, axis: str = DATA_AXIS) -> PyTree:
    """Sums over an axis of the mesh, inside ``shard_map``; on CPUs in the order of the devices.

    XLA's ``psum`` on CPUs has another order if the same devices belong to several processes, and
    the last bits of floats differ. As much is sent here: each device sums an equal part of each
    array, and all get the results. On TPUs and GPUs it is ``psum``, whose order follows the
    interconnect, and which uses it better.

    Args:
      tree: pytree of arrays that vary over ``axis``.
      axis: name of the axis.

    Returns:
      The sums: a pytree like ``tree``, the same on all devices of the axis.
    """
    devices = jax.lax.axis_size(axis)

    def in_order(x: jax.Array) -> jax.Array:
        parts = jnp.pad(x.reshape(-1), (0, -x.size % devices)).reshape(devices, -1)
        part = jax.lax.all_to_all(parts, axis, 0, 0).sum(axis=0, dtype=x.dtype)
        whole = jax.lax.all_gather(part, axis, tiled=True, to="invarying")
        return whole[: x.size].reshape(x.shape)

    return jax.lax.platform_dependent(
        tree,
        cpu=lambda tree: jax.tree.map(in_order, tree),
        default=lambda tree: jax.lax.psum(tree, axis),
    )


def splits_parameters(mesh: Mesh) -> bool:
    """Whether parameters or positions are split, not only units."""
    return any(mesh.shape.get(axis, 1) > 1 for axis in (FSDP_AXIS, TENSOR_AXIS, SEQUENCE_AXIS))


def unit_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes over which the units of a row are split."""
    return tuple(axis for axis in (DATA_AXIS, FSDP_AXIS) if axis in mesh.axis_names)


def unit_parts(mesh: Mesh) -> int:
    """The number of parts that a row of units is split into."""
    return math.prod(mesh.shape[axis] for axis in unit_axes(mesh))


def parameter_shardings(params: PyTree, mesh: Mesh, whole: Collection[str] = ()) -> PyTree:
    """How each parameter is split: a pytree of NamedShardings like ``params``.

    Matrices (and stacks of them: the last two axes) are split over ``tensor`` on their outputs, or
    on their inputs if their name says that they close a block or embed, and over ``fsdp`` on the
    other side; an axis that does not divide is not split. Vectors are copied: they are small.

    Args:
      params: pytree of arrays or ShapeDtypeStructs.
      mesh: from ``make_mesh``.
      whole: names (``blocks/up/kernel``) of parameters to copy instead
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
    # The rank of an adapter is too short to split.
    rank = outputs if "lora_a" in name else inputs if "lora_b" in name else None
    for axis, at in (
        (TENSOR_AXIS, inputs if inward else outputs),
        (FSDP_AXIS, outputs if inward else inputs),
    ):
        if at != rank and mesh.shape[axis] > 1 and shape[at] % mesh.shape[axis] == 0:
            axes[at] = axis
    while axes and axes[-1] is None:
        axes.pop()  # the compiler's spelling: another one would compile the step again
    return PartitionSpec(*axes)


def state_shardings(
    params: PyTree, opt_state: PyTree, mesh: Mesh, whole: Collection[str] = ()
) -> PyTree:
    """How an optimiser's state is split: NamedShardings like ``opt_state``.

    What has a parameter's name and shape is split like the parameter; so is a stack of such arrays
    (a window of past steps), but not along its first axis. All else is copied.

    Args:
      params: pytree of arrays or ShapeDtypeStructs.
      opt_state: ``jax.eval_shape(optimizer.init, params)``.
      mesh: from ``make_mesh``.
      whole: as in ``parameter_shardings``.
    """
    # Matched by the end of the path, which works for any optimiser: `mu/blocks/up/kernel` is split
    # like `blocks/up/kernel`.
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
