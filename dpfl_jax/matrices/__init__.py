"""Strategy matrices of correlated noise: the best ones for a run, and their errors. No JAX.

``noise`` has the transformations that add such noise.
"""

from dpfl_jax.matrices.strategies import (
    Buffers,
    banded_strategy,
    best_banded,
    best_banded_inverse,
    best_buffered,
    buffered_column,
    buffered_error,
    buffered_strategy,
    inverse_bound,
    inverse_column,
    inverse_error,
    inverse_matrix,
    inverse_strategy,
    prefix_error,
)
from dpfl_jax.matrices.workload import PREFIX_SUMS, Workload

__all__ = [
    "Workload",
    "PREFIX_SUMS",
    "best_banded",
    "best_banded_inverse",
    "best_buffered",
    "banded_strategy",
    "prefix_error",
    "inverse_strategy",
    "inverse_matrix",
    "inverse_column",
    "inverse_bound",
    "inverse_error",
    "Buffers",
    "buffered_strategy",
    "buffered_column",
    "buffered_error",
]
