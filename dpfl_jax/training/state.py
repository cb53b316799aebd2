"""The state of a training run that lives on devices, and the mesh it lives on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

PyTree = Any

DATA_AXIS = "data"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a step changes.

    Attributes:
      params: pytree of parameters.
      opt_state: state of the Optax optimiser; it has only ever seen noised gradients.
      step: int32 scalar, the number of steps taken.
    """

    params: PyTree
    opt_state: PyTree
    step: jax.Array


def data_parallel_mesh(devices: list[jax.Device] | None = None) -> Mesh:
    """A one-axis mesh (``"data"``) over ``devices`` (default: all of them)."""
    chosen = np.array(jax.devices() if devices is None else devices)
    return Mesh(chosen, (DATA_AXIS,), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def hardware(mesh: Mesh) -> str:
    """What the steps of a run are computed with: the same string rounds the same way."""
    device = mesh.devices.flat[0]
    return f"{mesh.size} x {device.platform} ({device.device_kind}), jax {jax.__version__}"


def init_state(params: PyTree, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Returns the state before the first step, replicated over ``mesh``.

    The parameters are copied: the step donates its state, and the caller's arrays must live on.
    """
    sharding = replicated(mesh)
    params = jax.tree.map(lambda p: jax.device_put(jnp.array(p, copy=True), sharding), params)
    opt_state = jax.jit(optimizer.init, out_shardings=sharding)(params)
    step = jax.device_put(jnp.zeros((), jnp.int32), sharding)
    return TrainState(params=params, opt_state=opt_state, step=step)
