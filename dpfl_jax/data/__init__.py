"""User-partitioned data: stores, tokenisers, loaders, splits. Knows nothing of privacy mechanisms.

A *store* holds examples user by user with random access, in memory or on disk (``store``). Loaders
turn files into stores (``load``); the default corpus needs no files; ``sets`` has named data sets.
"""

from dpfl_jax.data.documents import store_from_documents
from dpfl_jax.data.features import scattering
from dpfl_jax.data.in_memory import (
    from_arrays,
    from_grain,
    from_huggingface,
    from_pandas,
    from_rows,
    from_texts,
)
from dpfl_jax.data.load import (
    Dataset,
    LoadedExamples,
    limit_store,
    load_dataset,
    load_examples,
    split_by_user,
    split_within_users,
)
from dpfl_jax.data.schema import Field, Schema
from dpfl_jax.data.sections import DataConfig, SourceConfig
from dpfl_jax.data.sets import DataSource
from dpfl_jax.data.store import ArrayStore, Store, UserView
from dpfl_jax.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer, prompt_ids

__all__ = [
    "from_arrays",
    "from_texts",
    "from_rows",
    "from_pandas",
    "from_huggingface",
    "from_grain",
    "store_from_documents",
    "scattering",
    "load_dataset",
    "load_examples",
    "DataConfig",
    "SourceConfig",
    "Dataset",
    "LoadedExamples",
    "DataSource",
    "Store",
    "ArrayStore",
    "UserView",
    "Schema",
    "Field",
    "split_by_user",
    "split_within_users",
    "limit_store",
    "Tokenizer",
    "ByteTokenizer",
    "load_tokenizer",
    "prompt_ids",
]
