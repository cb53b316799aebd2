"""The stacked LSTM of LEAF for Shakespeare (Caldas et al. 2018): next character of a window."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.functional import Classifier


class _Layer(nn.Module):
    """One LSTM layer (Hochreiter & Schmidhuber 1997): [L, inputs] -> [L, hidden]."""

    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # The inputs' part of the gates is one product over all times; the loop has the state's.
        inputs = nn.Dense(4 * self.hidden, name="input")(x)
        shape = (self.hidden, 4 * self.hidden)
        kernel = self.param("state", nn.initializers.orthogonal(), shape)

        def step(carry: tuple[jax.Array, jax.Array], z: jax.Array) -> tuple:
            h, c = carry
            i, f, g, o = jnp.split(z + h @ kernel, 4)
            # Remembering is the default: forget bias 1 (Jozefowicz et al. 2015), as in LEAF.
            c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros_like(inputs[0, : self.hidden])
        return jax.lax.scan(step, (start, start), inputs)[1]


class _Net(nn.Module):
    vocab_size: int
    embed_dim: int
    hidden: int
    num_layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        init = nn.initializers.normal(0.1)
        table = self.param("embedding", init, (self.vocab_size, self.embed_dim))
        x = jnp.take(table, tokens, axis=0, mode="fill")  # NaN for an id out of range
        for i in range(self.num_layers):
            x = _Layer(self.hidden, name=f"lstm_{i}")(x)
        return nn.Dense(self.vocab_size, name="head")(x[-1])


class StackedLSTM(Classifier):
    """``x`` int [window], characters; ``label`` int, the character that follows.

    The defaults are LEAF's: 817,872 parameters (one bias per gate).
    """

    def __init__(
        self,
        vocab_size: int = 80,
        window: int = 80,
        embed_dim: int = 8,
        hidden: int = 256,
        num_layers: int = 2,
    ) -> None:
        """Builds the model.

        Raises:
          BadInputError: a size below 1.
        """
        sizes = {
            "vocab_size": vocab_size,
            "window": window,
            "embed_dim": embed_dim,
            "hidden": hidden,
            "num_layers": num_layers,
        }
        for name, size in sizes.items():
            if size < 1:
                raise BadInputError(f"model: {name} is {size}, but it must be at least 1")
        super().__init__(_Net(vocab_size, embed_dim, hidden, num_layers), (window,), jnp.int32)
