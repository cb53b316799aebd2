"""A digest of parameters: of their values, wherever they lie."""

import jax.numpy as jnp
import numpy as np

from dpfl_jax.mesh import make_mesh, parameter_shardings, place
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.state import content_digest, content_words


def parameters():
    rng = np.random.default_rng(0)
    return {
        "up": {"kernel": jnp.asarray(rng.normal(size=(2, 8, 12)), jnp.float32)},
        "low": jnp.asarray(rng.normal(size=(8, 4)), jnp.bfloat16),
        "step": jnp.arange(3),
    }


def test_it_is_the_same_for_every_layout():
    params = parameters()
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    placed = place(params, parameter_shardings(params, mesh))
    assert content_digest(placed) == content_digest(params)
    assert len(content_digest(params)) == 32


def test_it_tells_parameters_apart():
    params = parameters()
    kernel = params["up"]["kernel"]
    changes = {
        "last bit": jnp.nextafter(kernel, jnp.inf)
        .at[0]
        .set(kernel[0])
        .at[1, 1:]
        .set(kernel[1, 1:]),
        "sign of zero": kernel.at[0, 0, 0].set(-0.0),
        "zero": kernel.at[0, 0, 0].set(0.0),
        "two rows exchanged": kernel[:, jnp.array([1, 0, *range(2, 8)])],
        "another shape": kernel.reshape(2, 12, 8),
        "another type": kernel.view(jnp.int32),
    }
    found = [content_digest(params)]
    found += [content_digest(params | {"up": {"kernel": new}}) for new in changes.values()]
    found.append(content_digest(params | {"down": params["up"], "up": {}}))
    assert len(set(found)) == len(found)


def test_what_a_change_does_to_the_sums_is_known_to_who_has_the_key_alone():
    """Else changes that cancel are found in seconds (Wagner 2002), without the key."""
    rng = np.random.default_rng(0)
    one, other = (jnp.asarray(rng.normal(size=100), jnp.float32) for _ in range(2))
    keys = [RootKey.from_seed(seed) for seed in range(2)]
    assert len({content_digest({"w": one}, key) for key in (*keys, None)}) == 3
    moved = [
        np.asarray(content_words(one, key.words("content")))
        - np.asarray(content_words(other, key.words("content")))
        for key in keys
    ]
    assert (moved[0] != moved[1]).all()
