"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290) of a language model.

The reference is the model before the first step, a constant: the base of a model with adapters, or
a frozen copy of the parameters that are trained.
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
    """Adds the reference of a ``PreferenceModel`` to ``params`` before the first step.

    Args:
      params: of the model; adapters' B are zero.
      trained: which are trained, by name; None: all.

    Returns:
      ``params``, with a copy of the trained ones under ``"reference"`` (``not_reference`` then
      tells them apart); adapters need no copy.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.models import with_reference
      >>> sorted(with_reference({"w": jnp.ones(2)}))
      ['reference', 'w']
    """
    chosen = {
        name: value
        for name, value in flat_paths(params).items()
        if not is_adapter(name) and (trained is None or trained(name))
    }
    return {**params, REFERENCE: nested(chosen)} if chosen else params


def not_reference(name: str) -> bool:
    """Whether a parameter is not of the reference; a run's ``trainable`` must ask it.

    Examples:
      >>> from dpfl_jax.models import not_reference
      >>> not_reference("blocks/mlp/up/kernel"), not_reference("reference/blocks/mlp/up/kernel")
      (True, False)
    """
    return not name.startswith(f"{REFERENCE}/")


class PreferenceModel(LanguageModel):
    """A transformer that learns which of two answers was chosen.

    Attributes:
      beta: the cost of leaving the reference.

    Examples:
      >>> from dpfl_jax.models import PreferenceModel, transformer_config
      >>> PreferenceModel(transformer_config("tiny", vocab_size=259), beta=0.1).beta
      0.1
    """

    def __init__(self, config: TransformerConfig, beta: float = 0.1) -> None:
        super().__init__(config)
        self.beta = beta
        self._base = LanguageModel(dataclasses.replace(config, lora=None))

    def loss(
        self, params: PyTree, example: dict[str, jax.Array], rng: jax.Array | None = None
    ) -> jax.Array:
        """-log sigmoid(beta (margin of the model - margin of the reference)) of ONE pair.

        A margin is log p(chosen answer) - log p(rejected answer), summed over their tokens.

        Args:
          params: of ``with_reference``.
          example: ``tokens`` int32 [2, length], the chosen sequence first, and ``mask`` bool [2,
            length], True for the answers' tokens.
          rng: unused (there is no dropout).

        Returns:
          float32 scalar; log 2 where the model is the reference.
        """
        del rng
        model_params = {name: value for name, value in params.items() if name != REFERENCE}
        reference = flat_paths(params.get(REFERENCE, {}))
        base_params = nested({**flat_paths(without_adapters(model_params)), **reference})
        margin = _margin(self, model_params, example)
        reference_margin = jax.lax.stop_gradient(_margin(self._base, base_params, example))
        return jax.nn.softplus(-self.beta * (margin - reference_margin))

    def right(self, losses: jax.Array) -> jax.Array:
        """Whether margins are above the reference's, by losses: 1, 0, or 1/2 where equal."""
        return 0.5 + 0.5 * jnp.sign(jnp.log(jnp.float32(2.0)) - losses)


def _margin(model: LanguageModel, params: PyTree, example: dict[str, jax.Array]) -> jax.Array:
    def log_likelihood(row: int) -> jax.Array:
        losses = model._apply(params, example["tokens"][row], losses=True)
        return -jnp.where(example["mask"][row], losses, 0.0).sum()

    return log_likelihood(0) - log_likelihood(1)
