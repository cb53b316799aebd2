"""Models as pure functions of their parameters. This package knows nothing of privacy."""

from dpfl_jax.models.by_name import build_by_name
from dpfl_jax.models.config import SIZES, TransformerConfig, transformer_config
from dpfl_jax.models.small import (
    MLP,
    Classifier,
    FunctionalModel,
    LeafCNN,
    LinearRegression,
    LogisticRegression,
    RegressionMLP,
    SmallCNN,
    StackedLSTM,
)
from dpfl_jax.models.transformer import (
    LanguageModel,
    PreferenceModel,
    not_reference,
    with_reference,
)
from dpfl_jax.models.unigram import UnigramModel

__all__ = [
    "LanguageModel",
    "TransformerConfig",
    "transformer_config",
    "SIZES",
    "PreferenceModel",
    "with_reference",
    "not_reference",
    "UnigramModel",
    "FunctionalModel",
    "Classifier",
    "MLP",
    "SmallCNN",
    "LeafCNN",
    "StackedLSTM",
    "LogisticRegression",
    "LinearRegression",
    "RegressionMLP",
    "build_by_name",
]
