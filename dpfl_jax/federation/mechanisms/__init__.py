"""What a silo does at each local step: one algorithm, one small file."""

from dpfl_jax.federation.mechanisms.base import SiloDraw, SiloFacts, SiloMechanism
from dpfl_jax.federation.mechanisms.fed_avg import FedAvg
from dpfl_jax.federation.mechanisms.hi_grad_avg import HiGradAvgDP
from dpfl_jax.federation.mechanisms.local_group import LocalGroupDP
from dpfl_jax.federation.mechanisms.local_item import LocalItemDP
from dpfl_jax.federation.mechanisms.rpdp import RPDP
from dpfl_jax.federation.mechanisms.subject_sampling import SubjectULS
from dpfl_jax.federation.mechanisms.user_ldp import UserLDP

__all__ = [
    "RPDP",
    "FedAvg",
    "HiGradAvgDP",
    "LocalGroupDP",
    "LocalItemDP",
    "SiloDraw",
    "SiloFacts",
    "SiloMechanism",
    "SubjectULS",
    "UserLDP",
]
