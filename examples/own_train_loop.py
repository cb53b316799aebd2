"""A train loop of one's own, with user-level privacy: public names only.

``dpfl.fit`` is this loop with a run directory, checkpoints, evaluation and a report around it: with
the same seed (``RootKey.from_seed``) it ends with the same parameters, bit for bit. A secret key is
for one run alone, and a batch for one release: a GAN's second loss takes a batch of its own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpfl_jax as dpfl


def loss_fn(params: Any, example: Any) -> jax.Array:
    """Of one example: squared error of a linear model."""
    return 0.5 * (example["x"] @ params["w"] + params["b"] - example["y"]) ** 2


def make_data(num_users: int = 400) -> dpfl.ArrayStore:
    """Users with one to six examples each, which follow one line."""
    rng, slope = np.random.default_rng(0), np.array([1.0, -2.0, 0.5], np.float32)

    def examples(count: int) -> dict[str, np.ndarray]:
        x = rng.normal(size=(count, 3)).astype(np.float32)
        return {"x": x, "y": x @ slope + 0.1 * rng.normal(size=count).astype(np.float32)}

    return dpfl.ArrayStore.from_users((f"user {u}", examples(1 + u % 6)) for u in range(num_users))


def make_plan() -> dpfl.Plan:
    """Up to four examples of each user of a cohort, for 60 steps at epsilon 8."""
    mechanism = dpfl.uls(group_size=4, cohort_size=100, clip_norm=1.0)
    return mechanism.plan(make_data(), steps=60, epsilon=8.0, delta=1e-4)


def train(plan: dpfl.Plan, params: Any, optimizer: optax.GradientTransformation, key: Any) -> Any:
    """Trains ``params`` as the plan says; ``key``, a ``RootKey``, is used for nothing else."""
    grad, noise = plan.clipped_grad(loss_fn), plan.noise()
    states = noise.init(params), optimizer.init(params)

    @jax.jit
    def update(total: Any, noise_key: Any, states: Any, params: Any) -> Any:
        # Noised and divided; the key is an argument, so that no compiled program holds it.
        g, noise_state = noise.update(total, states[0], params, noise_key=noise_key)
        updates, opt_state = optimizer.update(g, states[1], params)
        return optax.apply_updates(params, updates), (noise_state, opt_state)

    for batch in plan.batches(key):
        params, states = update(grad(params, batch).sum, batch.noise_key, states, params)
    return params


if __name__ == "__main__":
    plan, key = make_plan(), dpfl.RootKey.generate()
    print(train(plan, {"w": jnp.zeros(3), "b": jnp.zeros(())}, optax.adam(0.1), key))
    print(plan.guarantee())
