"""The state of a training run that lives on devices."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from dpfl_jax.mesh import (
    parameter_shardings,
    place,
    replicated,
    splits_parameters,
    state_shardings,
)

PyTree = Any
# Flags of XLA that change no number.
_OF_THE_HOST = ("--xla_force_host_platform_device_count", "--xla_cpu_collective_call", "--xla_dump")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a step changes.

    Attributes:
      params: pytree of parameters.
      opt_state: state of the Optax optimiser; it has only ever seen noised gradients.
      step: int32 scalar, the number of steps taken.
      noise: what correlated noise keeps between steps (``noise.NoiseState.memory``).
      units: what is known of each unit between steps, unreadable without the run's key.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.training import TrainState
      >>> state = TrainState(params={"w": jnp.zeros(2)}, opt_state=(), step=jnp.int32(0))
      >>> int(state.step)
      0
    """

    params: PyTree
    opt_state: PyTree
    step: jax.Array
    noise: PyTree = ()
    units: PyTree = ()


def hardware(mesh: Mesh) -> str:
    """What the steps of a run are computed with; CPUs of two makes may round apart all the same."""
    device = mesh.devices.flat[0]
    layout = ""
    if splits_parameters(mesh):
        layout = " as " + ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    processes = len({d.process_index for d in mesh.devices.flat})
    if processes > 1:
        layout += f" in {processes} processes"
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_OF_THE_HOST)]
    precision = jax.config.jax_default_matmul_precision
    more = [*sorted(flags), *([f"matmul precision {precision}"] if precision else [])]
    made_of = f"{mesh.size} x {device.platform} ({device.device_kind}){layout}"
    return ", ".join([made_of, f"jax {jax.__version__}", *more])


def init_state(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    whole: Collection[str] = (),
    noise: PyTree = (),
) -> TrainState:
    """Returns the state before the first step, split over ``mesh`` as its axes say.

    The parameters are copied: the step donates its state, and the caller's arrays must live on.
    """
    places = shardings_of(params, optimizer, mesh, whole, noise)
    params = place(params, places.params)
    opt_state = jax.jit(optimizer.init, out_shardings=places.opt_state)(params)
    step = place(jnp.zeros((), jnp.int32), places.step)
    return TrainState(params, opt_state, step, place(noise, places.noise))


def shardings_of(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    whole: Collection[str] = (),
    noise: PyTree = (),
) -> TrainState:
    """Returns the NamedSharding of each array of a state.

    Args:
      params: pytree of arrays or ShapeDtypeStructs.
      optimizer: the optimiser whose state it is.
      mesh: from ``mesh.make_mesh``.
      whole: as in ``mesh.parameter_shardings``.
      noise: what the noise keeps between steps.
    """
    opt_state = jax.eval_shape(optimizer.init, params)
    return TrainState(
        params=parameter_shardings(params, mesh, whole),
        opt_state=state_shardings(params, opt_state, mesh, whole),
        step=replicated(mesh),  # type: ignore[arg-type]
        noise=state_shardings(params, noise, mesh, whole),
    )
