"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290) of a language model.

The reference is the model before the first step, a constant: of a model with adapters its base
alone, and of one that is trained itself a frozen copy of what is trained, beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.models.config import TransformerConfig
from dpfl_jax.models.params import flat_paths, is_adapter, nested, without_adapters
from dpfl_jax.models.transformer import LanguageModel

PyTree = Any
REFERENCE = "reference"


def with_reference(params: PyTree, trained: Callable[[str], bool] | None = None) -> PyTree:
    """``params`` before the first step, beside the reference of a ``PreferenceModel``.

    Args:
      params: of the model; adapters' B are zero.
      trained: which are trained, by name; None: all.

    Returns:
      ``params``, with what is trained of them under ``"reference"`` (``not_reference`` is then to
      be asked of a name, too); adapters alone need no copy.
    """
    chosen = {
        name: value
        for name, value in flat_paths(params).items()
        if not is_adapter(name) and (trained is None or trained(name))
    }
    return {**params, REFERENCE: nested(chosen)} if chosen else params


def not_reference(name: str) -> bool:
    """Whether a parameter is the model's own: what ``trainable`` of a run must ask."""
    return not name.startswith(f"{REFERENCE}/")


class PreferenceModel(LanguageModel):
    """A transformer that learns which of two answers was chosen.

    Attributes:
      beta: how dear it is to leave the reference.
    """

    def __init__(self, config: TransformerConfig, beta: float = 0.1) -> None:
        """See the class."""
        super().__init__(config)
        self.beta = beta
        self._base = LanguageModel(dataclasses.replace(config, lora=None))

    def loss(
        self, params: PyTree, example: dict[str, jax.Array], rng: jax.Array | None = None
    ) -> jax.Array:
        """-log sigmoid(beta (margin of the model - margin of the reference)) of ONE pair.

        A margin is log p(chosen answer) - log p(rejected answer), of all their tokens together.

        Args:
          params: of ``with_reference``.
          example: ``tokens`` int32 [2, length], the chosen sequence first, and ``mask`` bool
            [2, length], True for the answers' tokens.
          rng: unused (there is no dropout).

        Returns:
          float32 scalar; log 2 where the model is the reference.
        """
        del rng
        own = {name: value for name, value in params.items() if name != REFERENCE}
        kept = flat_paths(params.get(REFERENCE, {}))
        first = nested({**flat_paths(without_adapters(own)), **kept})
        moved = _margin(self, own, example)
        still = jax.lax.stop_gradient(_margin(self._base, first, example))
        return jax.nn.softplus(-self.beta * (moved - still))

    def right(self, losses: jax.Array) -> jax.Array:
        """Whether margins are above the reference's, by losses: 1, 0, or 1/2 where equal."""
        return 0.5 + 0.5 * jnp.sign(jnp.log(jnp.float32(2.0)) - losses)


def _margin(model: LanguageModel, params: PyTree, example: dict[str, jax.Array]) -> jax.Array:
    def log_likelihood(row: int) -> jax.Array:
        losses = model._apply(params, example["tokens"][row], losses=True)
        return -jnp.where(example["mask"][row], losses, 0.0).sum()

    return log_likelihood(0) - log_likelihood(1)
