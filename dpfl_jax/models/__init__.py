"""Models as pure functions: ``init(key) -> params``, ``loss(params, example)`` for ONE example.

Parameters are plain nested dicts of float32 arrays. Nothing here knows of privacy.
"""

from dpfl_jax.models.config import SIZES, TransformerConfig, transformer_config
from dpfl_jax.models.language_model import LanguageModel
from dpfl_jax.models.unigram import UnigramModel

__all__ = ["SIZES", "LanguageModel", "TransformerConfig", "UnigramModel", "transformer_config"]
