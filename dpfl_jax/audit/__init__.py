"""What trials of attacks prove about epsilon, from below; knows no data and no training."""

from dpfl_jax.audit.proof import Audit, audit
from dpfl_jax.audit.trials import Trials

__all__ = [
    "audit",
    "Audit",
    "Trials",
]
