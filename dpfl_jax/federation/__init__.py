"""Federated rounds: local steps of a mechanism in each silo, then a server rule.

``data`` and ``partition`` say which silo holds which records. ``participation`` and ``mechanisms``
say what a silo does at a local step. ``engine`` is the compiled round, ``rounds`` ships its
batches, and ``federated`` runs all of it. ``accountant`` and ``guarantee`` say what it costs.
"""

from dpfl_jax.federation.accountant import calibrate_federation, federated_epsilon
from dpfl_jax.federation.client import PrivateClient
from dpfl_jax.federation.data import ArrayRecords, FederatedData
from dpfl_jax.federation.engine import OptimizerServer, ServerRule
from dpfl_jax.federation.federated import run_rounds
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.guarantee import federated_guarantee
from dpfl_jax.federation.mechanisms import (
    SiloMechanism,
    fed_avg,
    hi_grad_avg,
    local_group,
    local_item,
    rpdp,
    subject_uls,
    user_ldp,
)
from dpfl_jax.federation.participation import (
    PersonalRecords,
    Records,
    SiloFacts,
    Subjects,
    WholeBatch,
)
from dpfl_jax.federation.partition import assign_to_silos, cap_per_subject

__all__ = [
    "hi_grad_avg",
    "local_group",
    "subject_uls",
    "user_ldp",
    "local_item",
    "rpdp",
    "fed_avg",
    "SiloMechanism",
    "Records",
    "Subjects",
    "WholeBatch",
    "PersonalRecords",
    "SiloFacts",
    "Federation",
    "SiloPlan",
    "calibrate_federation",
    "federated_epsilon",
    "federated_guarantee",
    "run_rounds",
    "FederatedData",
    "ArrayRecords",
    "assign_to_silos",
    "cap_per_subject",
    "PrivateClient",
    "ServerRule",
    "OptimizerServer",
]
