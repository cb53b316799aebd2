"""Silos that are elsewhere: the runs of ``federation`` with every silo in a process of its own.

A silo holds its records, its root key, its policy, its ledger and a log. It draws, bounds and adds
noise itself; what leaves it is the message that the simulation would have released for the same
keys. The protocol (``silo``, ``server``) knows no transport; ``apps`` and ``node`` bring it to
Flower (extra ``flower``).
"""

from dpfl_jax.flower.plan import Plan
from dpfl_jax.flower.policy import Policy, RefusedError
from dpfl_jax.flower.server import run_study
from dpfl_jax.flower.silo import Silo

__all__ = [
    "run_study",
    "Silo",
    "Policy",
    "Plan",
    "RefusedError",
]
