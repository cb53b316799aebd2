"""Convex federated learning without a trusted server (Lowy and Razaviyayn 2023), as pure JAX.

``message`` is what a silo sends: the only place where records are read and noise is added.
``schedule`` fixes, before the run, who answers, with which keys and which records. The algorithms
(``minibatch_sgd``, ``accelerated``, ``multi_stage``) see the silos through the mean of their
messages, the *oracle*; ``iterate`` runs them. ``theory`` has the paper's parameters of a
``Problem``, ``privacy`` the noise and the guarantee that goes with it, ``bounds`` what risk is
possible. Everything is a function of arrays: jit it, and vmap it over trials, step sizes and noise.
"""

from dpfl_jax.federation.isrl.accelerated import accelerated, step_weights
from dpfl_jax.federation.isrl.message import MessageSpec, SiloData, make_oracle
from dpfl_jax.federation.isrl.method import Method, iterate
from dpfl_jax.federation.isrl.minibatch_sgd import minibatch_sgd
from dpfl_jax.federation.isrl.multi_stage import Stage, multi_stage, stages
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
