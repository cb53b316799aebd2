"""Mechanisms: values made of a participation, a clip rule and a noise strategy.

``mechanism`` has the general class. ``presets`` has the published mechanisms by name, each with
its pseudo-code.
"""

from dpfl_jax.mechanisms.calibrated import Calibrated
from dpfl_jax.mechanisms.mechanism import Mechanism
from dpfl_jax.mechanisms.noise_strategies import (
    Banded,
    BandedInverse,
    Buffered,
    Independent,
    NoiseStrategy,
    NoNoise,
)
from dpfl_jax.mechanisms.participation import (
    Examples,
    OwnerSets,
    Participation,
    Population,
    Users,
    mean_of_examples,
)
from dpfl_jax.mechanisms.presets import (
    allocation,
    banded_inverse,
    bandmf,
    blt,
    els,
    non_private,
    owner_sets,
    truncated,
    uls,
)
from dpfl_jax.mechanisms.user_update import Gradient, UserUpdate

__all__ = [
    "uls",
    "els",
    "bandmf",
    "blt",
    "banded_inverse",
    "allocation",
    "truncated",
    "owner_sets",
    "non_private",
    "Mechanism",
    "Population",
    "Calibrated",
    "Participation",
    "Users",
    "Examples",
    "OwnerSets",
    "NoiseStrategy",
    "Independent",
    "Banded",
    "Buffered",
    "BandedInverse",
    "NoNoise",
    "Gradient",
    "UserUpdate",
    "mean_of_examples",
]
