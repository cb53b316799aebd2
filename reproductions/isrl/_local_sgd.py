"""ISRL-DP local SGD (Appendix I), the paper's baseline: K noisy steps of one record in a silo."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE, closed_forms, events
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl.algorithms import Oracle
from dpfl_jax.federation.isrl.message import Loss, SiloData, loss_name
from dpfl_jax.federation.isrl.privacy import Budget
from dpfl_jax.federation.isrl.schedule import derived_keys, words_of
from dpfl_jax.run.state import mixed
from reproductions.isrl._published import Arm, Published, message_of


def make_local_oracle(
    loss: Loss,
    data: SiloData,
    *,
    local_steps: int,
    step_size: jax.Array | float,
    clip_norm: jax.Array | float,
    stddev: jax.Array,
) -> Oracle:
    """Returns ``oracle(w, round)``: the mean over silos of the sum of K noisy local gradients.

    Minibatch SGD with the same step size then averages where the silos' local steps end.

    Args:
      loss: of one record.
      data: the silos.
      local_steps: K.
      step_size: of the local steps, and of the server's.
      clip_norm: bound of a record's gradient, scalar or [N].
      stddev: float [N], of the noise in each local step.
    """
    silos = data.num_silos
    # One record, uniformly: a batch of fixed size without replacement, and accounted as such.
    message = message_of(loss, Published(), 1)
    clip_norms = jnp.broadcast_to(jnp.asarray(clip_norm, jnp.float32), (silos,))
    rank, turn, one = jnp.zeros(data.capacity, jnp.int32), jnp.zeros((), jnp.int32), jnp.ones(())
    name_silo = functools.partial(words_of, "local", f"{local_steps}", step_size)
    words = jax.vmap(name_silo)(data.examples, data.sizes, clip_norms, stddev)

    def sent(w: jax.Array, examples: Any, size: Any, clip: Any, std: Any, keys: Any) -> jax.Array:
        def step(v: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            pair = derived_keys(keys, jnp.zeros(4, jnp.uint32) + t.astype(jnp.uint32))
            gradient = message(v, examples, size, rank, turn, one, clip, std, pair)
            return v - step_size * gradient, gradient

        return jax.lax.scan(step, w, jnp.arange(local_steps))[1].sum(0)

    every = jax.vmap(sent, in_axes=(None, 0, 0, 0, 0, 0))

    def oracle(w: jax.Array, row: Any) -> jax.Array:
        keys = jax.vmap(derived_keys)(row["keys"], mixed(words, words_of(loss_name(loss, w, data))))
        sums = every(w, data.examples, data.sizes, clip_norms, stddev, keys)
        answered = row["present"].sum()
        total = jnp.tensordot(row["present"] * 1.0, sums, axes=1, precision="highest")
        return total / jnp.maximum(answered, 1)

    return oracle


def local_sgd_noise(
    budget: Budget, silo_size: int, local_steps: int, rounds: int, *, arm: Arm = "sound"
) -> tuple[float, float]:
    """Noise multiplier of each step of local SGD, and the epsilon that all steps spend.

    A step takes one record uniformly (fixed size, replace-one) and all R K steps compose, as if
    each were released. ``as_published`` (Appendix I) may, by this bound, spend hundreds of times
    its budget.

    Args:
      budget: of each record.
      silo_size: n.
      local_steps: K.
      rounds: R.
      arm: ``"sound"`` or ``"as_published"``.
    """
    steps = rounds * local_steps

    def event(z: float) -> Any:
        return events.fixed_size(z, silo_size, 1, steps)

    if arm == "sound":
        noise = accounting.calibrate_noise_multiplier(
            event, budget.epsilon, budget.delta, relation=REPLACE
        )
    elif arm == "as_published":
        noise = closed_forms.experiment_noise(steps, silo_size, budget.epsilon, budget.delta)
    else:
        raise BadInputError("the paper has no closed form for local SGD: sound or as_published")
    return noise, accounting.epsilon(event(noise), budget.delta, relation=REPLACE)
