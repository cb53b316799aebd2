"""Lower bounds on epsilon from trials of attacks. It imports no data and no training."""

from dpfl_jax.audit.proof import Audit, audit
from dpfl_jax.audit.trials import Trials

__all__ = [
    "audit",
    "Audit",
    "Trials",
]
