"""Remote silos: the runs of ``federation``, with each silo in its own process.

A silo holds its records, root key, policy, ledger and log. It samples, clips and adds noise itself,
and sends the message that the simulation would release with the same keys. The protocol (``silo``,
``server``) does not depend on a transport; ``apps`` and ``node`` run it over Flower (extra
``flower``). ``mod`` protects a client of your own Flower app.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dpfl_jax.errors import extra

if TYPE_CHECKING:
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
    "mod",
]
# Imported on first use, as a Flower app is started anew for each message.
_HOMES = {
    "run_study": "server",
    "SiloClient": "silo",
    "Policy": "silo_folder",
    "StudyPlan": "study",
    "RefusedError": "silo_folder",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"dpfl_jax.flower.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'dpfl_jax.flower' has no attribute {name!r}")


def mod(
    folder: str | None = None,
    *,
    epsilon: float,
    delta: float,
    rounds: int,
    clip_norm: float,
    unit: str = "silo",
) -> Callable[..., Any]:
    """Returns a Flower client mod: it clips what the client's app returns, and adds noise.

    The client answers training alone, up to a number of rounds; other messages are refused. The
    server sees the noised arrays, and 1 as the number of examples. What it configures changes none
    of the settings.

    Args:
      folder: the client's folder (``PrivateClient``), an absolute path, if ``dpfl-folder`` of the
        client's ``flower-supernode --node-config`` names none; each client needs its own.
      epsilon: epsilon of all rounds together, as for ``dpfl_jax.federation.PrivateClient``.
      delta: delta of all rounds together.
      rounds: most updates that the client sends, ever.
      clip_norm: L2 norm to which an update is clipped.
      unit: what the client is, and what is protected: "silo" or "device".

    Raises:
      BadInputError: Flower is not installed.

    Examples:
      >>> from flwr.clientapp import ClientApp
      >>> import dpfl_jax.flower
      >>> private = dpfl_jax.flower.mod(epsilon=8.0, delta=1e-5, rounds=3, clip_norm=1.0)
      >>> app = ClientApp(mods=[private])
    """
    with extra("flower", "a Flower client mod"):
        from dpfl_jax.flower.client_mod import client_mod
    budget = {"epsilon": epsilon, "delta": delta, "rounds": rounds, "clip_norm": clip_norm}
    return client_mod(folder, {**budget, "unit": unit})
