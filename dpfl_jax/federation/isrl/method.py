"""An algorithm one round at a time, and all its rounds over a schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from dpfl_jax.federation.isrl.schedule import own_rows
from dpfl_jax.run.terms import traced_parts

Oracle = Callable[[jax.Array, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Method:
    """An algorithm of the paper.

    Attributes:
      start: ``w_0 -> state``.
      step: ``(oracle, schedule row, state, per-round values) -> state``; the oracle is
        ``(w, row) -> mean noisy gradient``.
      output: ``(state, rounds taken) -> w``.
      values: pytree of arrays [R, ...].

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.federation import isrl
      >>> steps, weights = jnp.full(20, 0.5), jnp.zeros(21)
      >>> method: isrl.Method = isrl.minibatch_sgd(steps, weights, project=lambda w: w)
      >>> method.rounds
      20
    """

    start: Callable[[jax.Array], Any]
    step: Callable[[Oracle, Any, Any, Any], Any]
    output: Callable[[Any, int], jax.Array]
    values: Any

    @property
    def rounds(self) -> int:
        """R, the number of rounds."""
        return jax.tree.leaves(self.values)[0].shape[0]

    def scan(self, oracle: Oracle, state: Any, rows: Any, values: Any) -> Any:
        """The state after these rounds."""

        def one(state: Any, x: Any) -> tuple[Any, None]:
            return self.step(oracle, x[0], state, x[1]), None

        return jax.lax.scan(one, state, (rows, values))[0]


def iterate(method: Method, oracle: Oracle, rows: Any, start: jax.Array) -> jax.Array:
    """All rounds from w_0; returns the algorithm's output.

    Args:
      method: of R rounds.
      oracle: ``(w, row) -> mean noisy gradient``.
      rows: R rounds of a schedule. Their keys are made this use's own.
      start: w_0.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.federation import isrl
      >>> def oracle(w, row):  # the gradient of (w - 3)^2 / 2, without noise
      ...     return w - 3.0
      >>> steps = jnp.full(20, 0.5)
      >>> method = isrl.minibatch_sgd(steps, jnp.zeros(21), project=lambda w: w)
      >>> print(isrl.iterate(method, oracle, {"r": jnp.arange(20)}, jnp.zeros(1)).round(2))
      [2.71]
    """
    state = method.start(start)
    row, values = jax.tree.map(lambda x: x[0], (rows, method.values))
    use = traced_parts(lambda *given: method.step(oracle, *given), row, state, values)
    rows = own_rows(rows, start, method.values, *use)
    return method.output(method.scan(oracle, state, rows, method.values), method.rounds)
