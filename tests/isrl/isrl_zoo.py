"""Small silos and losses for the tests of ISRL-DP."""

import jax.numpy as jnp
import numpy as np

from dpfl_jax.federation.isrl import SiloData


def quadratic(w, example):
    """Mean estimation: 1/2 |w - x|^2."""
    return 0.5 * jnp.sum(jnp.square(w - example["x"]))


def logistic(w, example):
    """Labels 0 and 1."""
    score = example["x"] @ w
    return jnp.logaddexp(0.0, score) - example["y"] * score


def silos(sizes, dim=3, seed=0, shift=0.0):
    """Random silos of these sizes, padded with values that must not matter."""
    rng = np.random.default_rng(seed)
    n = max(sizes)
    x = rng.normal(size=(len(sizes), n, dim)) + shift * rng.normal(size=(len(sizes), 1, dim))
    y = (rng.random((len(sizes), n)) < 0.5).astype(float)
    padding = np.arange(n) >= np.asarray(sizes)[:, None]
    x[padding] = np.nan
    examples = {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.float32)}
    return SiloData(examples, jnp.asarray(sizes, jnp.int32))
