"""Rounds over silos: local steps of a mechanism in each silo, then a server's rule.

``data`` and ``partition`` say who holds what, ``mechanisms`` what a silo does at a local step,
``engine`` is the compiled round, ``rounds`` ships its batches, ``server`` averages,
``federated`` runs it all; ``accountant`` and ``guarantee`` say what it costs.
"""

from dpfl_jax.federation.accountant import calibrate_federation, federated_epsilon
from dpfl_jax.federation.data import ArrayRecords, FederatedData
from dpfl_jax.federation.federated import run_rounds
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.guarantee import federated_guarantee
from dpfl_jax.federation.mechanisms import (
    RPDP,
    FedAvg,
    HiGradAvgDP,
    LocalGroupDP,
    LocalItemDP,
    SiloFacts,
    SubjectULS,
    UserLDP,
)
from dpfl_jax.federation.partition import assign_to_silos, cap_per_subject
from dpfl_jax.federation.server import OptimizerServer, ServerRule

__all__ = [
    "RPDP",
    "ArrayRecords",
    "FedAvg",
    "FederatedData",
    "Federation",
    "HiGradAvgDP",
    "LocalGroupDP",
    "LocalItemDP",
    "OptimizerServer",
    "ServerRule",
    "SiloFacts",
    "SiloPlan",
    "SubjectULS",
    "UserLDP",
    "assign_to_silos",
    "calibrate_federation",
    "cap_per_subject",
    "federated_epsilon",
    "federated_guarantee",
    "run_rounds",
]
