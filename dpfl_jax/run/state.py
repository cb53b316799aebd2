"""The state of a training run that lives on devices, and a digest of what it holds."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpfl_jax.mesh import parameter_shardings, place, replicated, splits_parameters, state_shardings
from dpfl_jax.randomness import RootKey

PyTree = Any
# Flags of XLA that change no result.
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
      units: what is kept of each unit between steps, encrypted under the run's key.
      average: average of the iterates, if the run keeps one (``run.average``).

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
    average: PyTree = ()


def hardware(mesh: Mesh) -> str:
    """Describes devices, layout and versions; CPUs of two makes may still round differently."""
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
    """Returns the state before the first step, split over the axes of ``mesh``.

    The parameters are copied: steps donate the state, and the caller keeps the arrays.
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


# ---- a digest of parameters ----------------------------------------------------------------------
# It depends on values only, not on how they are sharded. A seal uses a secret key: with a public
# one, other parameters with the same sums can be constructed in seconds (Wagner 2002, "A
# Generalized Birthday Problem").

_PUBLIC = np.frombuffer(hashlib.sha256(b"dpfl_jax content").digest(), np.uint32)
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def content_digest(params: PyTree, key: RootKey | None = None) -> str:
    """Returns a digest of parameters, without gathering any of them on one device.

    Each device mixes the bits of its part with their positions; the sums (of integers, which have
    no rounding) are the same for every layout and number of processes. All processes must call it.

    Args:
      params: pytree of arrays.
      key: only who has it can construct parameters with a given digest. None: anybody can.

    Returns:
      32 hexadecimal digits.
    """
    result = hashlib.sha256()
    words = _PUBLIC if key is None else key.words("content")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        sums = [int(x) for x in np.asarray(_summed(leaf, words))]
        name = jax.tree_util.keystr(path)
        result.update(json.dumps([name, list(leaf.shape), str(leaf.dtype), sums]).encode())
    return result.hexdigest()[:32]


def _summed(leaf: Any, key: np.ndarray) -> jax.Array:
    place = getattr(leaf, "sharding", None)
    whole = NamedSharding(place.mesh, PartitionSpec()) if isinstance(place, NamedSharding) else None
    return jax.jit(content_words, out_shardings=whole)(leaf, key)


def content_words(leaf: jax.Array, key: jax.Array | np.ndarray = _PUBLIC) -> jax.Array:
    """uint32 [4]: sums of an array's bits, mixed with their positions and a key, uint32 [8]."""
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    elif jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    elif jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    elif jax.dtypes.itemsize_bits(leaf.dtype) < 8:
        leaf = leaf.astype(jnp.float32)  # exact
    bits = jax.lax.bitcast_convert_type(leaf, _UNSIGNED[leaf.dtype.itemsize]).astype(jnp.uint32)
    position = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):  # eight bytes are two words
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(
            jnp.uint32, bits.shape, axis
        )
    # How a changed bit changes a sum depends on its position and on secret words.
    sums = [
        jnp.sum(_mix(_mix(bits ^ _mix(_mix(position ^ a) + b)) ^ b), dtype=jnp.uint32)
        for a, b in zip(key[:4], key[4:], strict=True)
    ]
    return jnp.stack(sums)


def mixed(words: jax.Array, more: jax.Array) -> jax.Array:
    """uint32 [4] that depends on both arguments and on their order."""
    return _mix(_mix(words) + more + jnp.uint32(0x9E3779B9))


def _mix(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3 (Appleby, public domain): a bijection of 32 bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
