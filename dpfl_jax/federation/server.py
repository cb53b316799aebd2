"""What the server does with the average of the silos' noised updates.

A rule sees nothing else: it is post-processing, and costs no privacy.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

PyTree = Any


class ServerRule(Protocol):
    """Pure functions of the server's state (a pytree).

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.federation import OptimizerServer, ServerRule
      >>> rule: ServerRule = OptimizerServer()
      >>> print(rule.broadcast(rule.init({"w": jnp.ones(1)}))["w"])
      [1.]
    """

    def init(self, params: PyTree) -> PyTree:
        """The state before the first round."""

    def broadcast(self, state: PyTree) -> PyTree:
        """The parameters that the silos start a round from."""

    def apply(self, state: PyTree, update: PyTree, round_index: jax.Array) -> PyTree:
        """The state after a round.

        Args:
          state: before the round.
          update: weighted mean of what the silos released (end minus start of their parameters),
            float32; zero if no silo's update was usable.
          round_index: int32 scalar, from 0.
        """

    def model(self, state: PyTree) -> PyTree:
        """The parameters that are evaluated and published."""


@dataclasses.dataclass(frozen=True)
class OptimizerServer:
    """Any Optax optimiser, on minus the mean update (Reddi et al. 2021, "FedOpt").

    With ``optax.sgd(1.0)``, the default, this is the average of the silos' parameters.

    Attributes:
      optimizer: of the server.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from dpfl_jax.federation import OptimizerServer
      >>> server = OptimizerServer(optax.sgd(1.0))
      >>> state = server.init({"w": jnp.zeros(1)})
      >>> state = server.apply(state, {"w": jnp.array([0.5])}, jnp.int32(0))
      >>> print(server.model(state)["w"])
      [0.5]
    """

    optimizer: optax.GradientTransformation = dataclasses.field(
        default_factory=lambda: optax.sgd(1.0)
    )

    def init(self, params: PyTree) -> PyTree:
        """The parameters, and the optimiser's state for them."""
        return {"params": params, "opt_state": self.optimizer.init(params)}

    def broadcast(self, state: PyTree) -> PyTree:
        """The parameters of the state, from which silos start a round."""
        return state["params"]

    def apply(self, state: PyTree, update: PyTree, round_index: jax.Array) -> PyTree:
        """One step of the optimiser."""
        del round_index
        params = state["params"]
        gradient = jax.tree.map(lambda u, p: (-u).astype(jnp.asarray(p).dtype), update, params)
        updates, opt_state = self.optimizer.update(gradient, state["opt_state"], params)
        return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}

    def model(self, state: PyTree) -> PyTree:
        """The parameters of the state: the last model."""
        return state["params"]
