"""The papers' data sets, read from files you already have; nothing is ever fetched.

Each module reads one family of formats and says, when a file is missing, what to put where.
"""

from dpfl_jax.data.sets.registry import SETS, load_set, set_source

__all__ = ["SETS", "load_set", "set_source"]
