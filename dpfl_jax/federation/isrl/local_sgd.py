"""ISRL-DP local SGD (Appendix I), the paper's baseline: K noisy steps of one record in a silo."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.federation.isrl.message import (
    Loss,
    MessageSpec,
    SiloData,
    loss_name,
    make_message,
)
from dpfl_jax.federation.isrl.minibatch_sgd import _averaged
from dpfl_jax.federation.isrl.schedule import own_rows


def local_sgd(
    loss: Loss,
    data: SiloData,
    rows: Any,
    start: jax.Array,
    step_sizes: jax.Array,
    log_weights: jax.Array,
    *,
    local_steps: int,
    clip_norm: jax.Array | float,
    stddev: jax.Array,
) -> jax.Array:
    """Rounds of: each silo takes K noisy steps from the global w, the server averages the ends.

    Args:
      loss: of one record.
      data: the silos.
      rows: rounds of a schedule.
      start: w_0.
      step_sizes: float [R].
      log_weights: float [R+1], of the global iterates (see ``minibatch_sgd``).
      local_steps: K.
      clip_norm: bound of a record's gradient, scalar or [N].
      stddev: float [N], of the noise in each local step.
    """
    silos = data.num_silos
    given = (start, step_sizes, log_weights, local_steps, clip_norm, stddev, data)
    rows = own_rows(rows, "local_sgd", loss_name(loss, start, data), given)
    # One record, uniformly: a batch of fixed size without replacement, and accounted as such.
    message = make_message(loss, MessageSpec("with_replacement"), 1)
    clips = jnp.broadcast_to(jnp.asarray(clip_norm, jnp.float32), (silos,))
    rank = jnp.zeros((data.capacity,), jnp.int32)

    def one_silo(
        w: jax.Array, eta: jax.Array, examples: Any, size: Any, clip: Any, std: Any, keys: Any
    ) -> jax.Array:
        def step(v: jax.Array, t: jax.Array) -> tuple[jax.Array, None]:
            own = [
                jax.random.fold_in(jax.random.wrap_key_data(k, impl="threefry2x32"), t)
                for k in (keys[0], keys[1])
            ]
            pair = jnp.stack([jax.random.key_data(k) for k in own])
            gradient = message(
                v, examples, size, rank, jnp.zeros((), jnp.int32), jnp.ones(()), clip, std, pair
            )
            return v - eta * gradient, None

        return jax.lax.scan(step, w, jnp.arange(local_steps))[0]

    every = jax.vmap(one_silo, in_axes=(None, None, 0, 0, 0, 0, 0))

    def one_round(carry: Any, x: Any) -> tuple[Any, None]:
        w, mean, log_total = carry
        row, eta, log_weight = x
        mean, log_total = _averaged(mean, log_total, w, log_weight)
        ends = every(w, eta, data.examples, data.sizes, clips, stddev, row["keys"])
        answered = row["present"].sum()
        moved = jnp.tensordot(row["present"] * 1.0, ends - w, axes=1, precision="highest")
        return (w + moved / jnp.maximum(answered, 1), mean, log_total), None

    carry = (start, start, jnp.asarray(-jnp.inf))
    (w, mean, log_total), _ = jax.lax.scan(one_round, carry, (rows, step_sizes, log_weights[:-1]))
    return _averaged(mean, log_total, w, log_weights[-1])[0]
