"""What an attack on the released updates proves about epsilon, from below."""

from dpfl_jax.auditing.proof import Audit, audit
from dpfl_jax.auditing.trials import Trials

__all__ = ["Audit", "Trials", "audit"]
