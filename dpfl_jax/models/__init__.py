"""What is trained: models as pure functions of their parameters. Knows nothing of privacy."""

from dpfl_jax.models.config import SIZES, TransformerConfig, transformer_config
from dpfl_jax.models.transformer import LanguageModel
from dpfl_jax.models.unigram import UnigramModel

__all__ = ["SIZES", "LanguageModel", "TransformerConfig", "UnigramModel", "transformer_config"]
