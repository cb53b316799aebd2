"""Mechanisms: one algorithm, one small file, read like the paper's pseudo-code.

A mechanism owns its sampler, bounded gradient, noise and event; see ``base.Mechanism``.
"""

from dpfl_jax.mechanisms.allocation import Allocation
from dpfl_jax.mechanisms.banded_inverse import BandedInverse
from dpfl_jax.mechanisms.bandmf import BandMF
from dpfl_jax.mechanisms.base import Mechanism, Population, mean_of_examples
from dpfl_jax.mechanisms.blt import BLT
from dpfl_jax.mechanisms.els import ELS
from dpfl_jax.mechanisms.individual import Individual
from dpfl_jax.mechanisms.individual_els import IndividualELS
from dpfl_jax.mechanisms.non_private import NonPrivate
from dpfl_jax.mechanisms.owner_sets import OwnerSets
from dpfl_jax.mechanisms.truncated import Truncated
from dpfl_jax.mechanisms.uls import ULS

__all__ = [
    "BLT",
    "ELS",
    "ULS",
    "Allocation",
    "BandMF",
    "BandedInverse",
    "Individual",
    "IndividualELS",
    "Mechanism",
    "NonPrivate",
    "OwnerSets",
    "Population",
    "Truncated",
    "mean_of_examples",
]
