"""What ISRL-DP is compared with: a trusted server that adds noise once, and a silo all alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.federation.isrl.algorithms import Oracle
from dpfl_jax.federation.isrl.message import (
    Loss,
    MessageSpec,
    Sampling,
    SiloData,
    loss_name,
    make_oracle,
)
from dpfl_jax.federation.isrl.privacy import Budget, SiloNoise, silo_noise
from dpfl_jax.federation.isrl.schedule import derived_keys, words_of
from dpfl_jax.noise import GaussianNoise
from dpfl_jax.run.state import mixed


def central_noise(
    budget: Budget,
    sizes: Sequence[int],
    batches: Sequence[float],
    rounds: int,
    *,
    sampling: Sampling = "poisson",
) -> SiloNoise:
    """The noise of a trusted server, over the clip norm, on the sum over N silos of min K records.

    A record of silo i moves the mean of the silos' messages by at most 2 C / (N K_i): the smallest
    batch sets the noise, the largest rate the accounting.

    Args:
      budget: of every record, against whoever sees the models.
      sizes: n_i, public.
      batches: K_i.
      rounds: R.
      sampling: poisson, full or disjoint.
    """
    if sampling == "full":
        batches = [float(n) for n in sizes]
    rates = [k / n for k, n in zip(batches, sizes, strict=True)]
    at = max(range(len(rates)), key=rates.__getitem__)
    return silo_noise(budget, int(sizes[at]), batches[at], rounds, sampling=sampling)


def make_central_oracle(
    loss: Loss,
    spec: MessageSpec,
    data: SiloData,
    *,
    batch: jax.Array,
    clip_norm: float | jax.Array,
    noise_multiplier: float | jax.Array,
    rank: jax.Array | None = None,
) -> Oracle:
    """Returns ``oracle(w, round)``: the mean of all silos' clean messages, plus noise once.

    NOT ISRL-DP: the server sees every silo's clean gradient. Arguments as of ``make_oracle``;
    ``noise_multiplier`` is ``central_noise``'s.
    """
    silos = data.num_silos
    clean = make_oracle(
        loss,
        spec,
        data,
        batch=batch,
        clip_norm=clip_norm,
        stddev=jnp.zeros(silos),
        rank=rank,
    )
    largest = jnp.max(jnp.asarray(clip_norm, jnp.float32))
    words = words_of("central", repr(spec), data, batch, clip_norm, noise_multiplier)

    def oracle(w: jax.Array, row: Any) -> jax.Array:
        own = derived_keys(row["keys"][0, 1], mixed(words, words_of(loss_name(loss, w, data), w)))
        key = jax.random.wrap_key_data(own[:2], impl="threefry2x32")
        answered = jnp.maximum(row["present"].sum(), 1)
        scale = noise_multiplier * largest / (answered * batch.min())
        return clean(w, row) + scale * GaussianNoise(1.0).sample(key, w)

    return oracle


def alone(data: SiloData, silo: int) -> SiloData:
    """One silo's records as a federation of one: what it can learn without the others."""
    part = slice(silo, silo + 1)
    return SiloData(jax.tree.map(lambda x: x[part], data.examples), data.sizes[part])
