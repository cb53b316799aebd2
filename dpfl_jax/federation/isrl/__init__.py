"""Convex federated learning without a trusted server (Lowy and Razaviyayn 2023), as pure JAX.

``message`` computes what a silo sends, and is the only place where records are read and noise is
added. ``schedule`` decides before the run which silos answer in which round, with which keys and
records. ``algorithms`` see only the mean of the silos' messages, the *oracle*; ``iterate`` runs
them. ``theory`` has the paper's parameters and bounds for a ``Problem``, and ``privacy`` has noise
and guarantee. All of these are functions of arrays, which you can jit, and vmap over trials, step
sizes and noise. ``isrl_run`` makes a run from a configuration, with ``silos``, ``losses``,
``parameters`` and ``rounds``.
"""

from dpfl_jax.federation.isrl.algorithms import (
    Method,
    Stage,
    accelerated,
    iterate,
    minibatch_sgd,
    multi_stage,
    stages,
    step_weights,
)
from dpfl_jax.federation.isrl.message import MessageSpec, SiloData, make_oracle
from dpfl_jax.federation.isrl.privacy import Budget, SiloNoise, silo_guarantee, silo_noise
from dpfl_jax.federation.isrl.schedule import Schedule, make_schedule
from dpfl_jax.federation.isrl.theory import Problem

__all__ = [
    "minibatch_sgd",
    "accelerated",
    "step_weights",
    "multi_stage",
    "stages",
    "Stage",
    "Method",
    "iterate",
    "make_oracle",
    "MessageSpec",
    "SiloData",
    "make_schedule",
    "Schedule",
    "Problem",
    "Budget",
    "silo_noise",
    "SiloNoise",
    "silo_guarantee",
]
