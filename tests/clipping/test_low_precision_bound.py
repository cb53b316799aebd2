"""The bound holds in bfloat16 where the positions of a unit nearly cancel."""

import jax.numpy as jnp
import numpy as np
import pytest

from dpfl_jax.clipping import bounded_grad


@pytest.mark.privacy
@pytest.mark.parametrize("strategy", ["auto", "ghost"])
def test_nearly_cancelling_positions_stay_within_the_clip_norm(strategy):
    """Gradients of two positions cancel to their last bits: rounding must not exceed the norm."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=8), jnp.bfloat16)
    d = jnp.asarray(rng.normal(size=4), jnp.bfloat16)
    inputs = jnp.stack([x, x])[None]
    outputs = jnp.stack([d, -d * jnp.asarray(1 - 2.0**-7, jnp.bfloat16)])[None]
    batch = {"x": inputs, "d": outputs}
    params = {"w": jnp.zeros((8, 4))}

    def loss(p, example):
        y = example["x"] @ p["w"].astype(jnp.bfloat16)
        return jnp.sum((y * example["d"]).astype(jnp.float32))

    norm = float(bounded_grad(loss, clip_norm=1.0, strategy="vmap")(params, batch).norms[0])
    assert norm > 0
    for part in np.linspace(0.3, 0.99, 24):
        clip_norm = float(part * norm)
        bounded = bounded_grad(loss, clip_norm=clip_norm, strategy=strategy)(params, batch)
        assert float(jnp.linalg.norm(bounded.sum["w"])) <= clip_norm * (1 + 1e-4)
