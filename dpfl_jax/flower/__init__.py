"""Remote silos: the runs of ``federation`` with each silo in another process.

A silo holds its records, root key, policy, ledger and log. It samples, clips and adds noise itself;
what leaves it is the message that the simulation would have released for the same keys. The
protocol (``silo``, ``server``) knows no transport; ``apps`` and ``node`` bring it to Flower (extra
``flower``).
"""

from dpfl_jax.flower.server import run_study
from dpfl_jax.flower.silo import SiloClient
from dpfl_jax.flower.silo_folder import Policy, RefusedError
from dpfl_jax.flower.study import StudyPlan

__all__ = [
    "run_study",
    "SiloClient",
    "Policy",
    "StudyPlan",
    "RefusedError",
]
