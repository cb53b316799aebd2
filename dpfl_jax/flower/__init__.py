"""Remote silos: the runs of ``federation``, with each silo in its own process.

A silo holds its records, root key, policy, ledger and log. It samples, clips and adds noise itself,
and sends the message that the simulation would release with the same keys. The protocol (``silo``,
``server``) does not depend on a transport; ``apps`` and ``node`` run it over Flower (extra
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
