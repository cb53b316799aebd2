"""The bound holds in bfloat16 where the positions of a unit nearly cancel."""

import jax.numpy as jnp
import numpy as np
import pytest

from dpfl_jax.clipping import bounded_grad


@pytest.mark.privacy
@pytest.mark.parametrize("method", [None, "gram", "direct", "keep"])
@pytest.mark.parametrize("strategy", ["auto", "ghost"])
def test_nearly_cancelling_positions_stay_within_the_clip_norm(strategy, method):
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
        bounded = bounded_grad(loss, clip_norm=clip_norm, strategy=strategy, norm_method=method)(
            params, batch
        )
        assert float(jnp.linalg.norm(bounded.sum["w"])) <= clip_norm * (1 + 1e-4)
        # The norm reported is the gradient's own, not the larger one that was bounded.
        assert float(bounded.norms[0]) == pytest.approx(norm, rel=2e-2)


@pytest.mark.privacy
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("method", ["gram", "direct"])
def test_reduced_float32_products_are_allowed_for(platform, method):
    """On hardware that rounds float32 operands, weights leave room where positions cancel."""
    rng = np.random.default_rng(1)
    x, d = rng.normal(size=8), rng.normal(size=4)
    batch = {
        "x": jnp.asarray(np.stack([x, x])[None], jnp.float32),
        "d": jnp.asarray(np.stack([d, -0.99 * d])[None], jnp.float32),
    }
    params = {"w": jnp.zeros((8, 4))}

    def loss(p, example):
        return jnp.sum((example["x"] @ p["w"]) * example["d"])

    def weight(platform):
        bounded = bounded_grad(
            loss, clip_norm=1e-3, strategy="ghost", norm_method=method, platform=platform
        )
        return float(bounded(params, batch).weights[0])

    absolute = 1.99 * np.linalg.norm(x) * np.linalg.norm(d)
    relative = {"gpu": 2.0**-10, "tpu": 2.0**-7}[platform]
    own = 0.01 * np.linalg.norm(x) * np.linalg.norm(d)
    assert weight("cpu") == pytest.approx(1e-3 / own, rel=1e-3)
    assert weight(platform) == pytest.approx(1e-3 / (own + relative * absolute), rel=1e-3)
