"""User-partitioned data: stores, tokenisers, loaders, splits. Knows nothing of privacy mechanisms.

A *store* holds examples user by user with random access (``store``), in memory or on disk. Loaders
turn files into stores (``load``), and the embedded default corpus needs no files at all.
"""

from dpfl_jax.data.chunking import store_from_documents
from dpfl_jax.data.load import DataConfig, Dataset, load_dataset
from dpfl_jax.data.schema import Field, Schema
from dpfl_jax.data.splits import limit_store, split_by_user, split_within_users
from dpfl_jax.data.store import ArrayStore, Store, UserView
from dpfl_jax.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "ArrayStore",
    "ByteTokenizer",
    "DataConfig",
    "Dataset",
    "Field",
    "Schema",
    "Store",
    "Tokenizer",
    "UserView",
    "limit_store",
    "load_dataset",
    "load_tokenizer",
    "split_by_user",
    "split_within_users",
    "store_from_documents",
]
