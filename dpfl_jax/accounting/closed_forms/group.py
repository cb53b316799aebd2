"""Group privacy by the generic lemma ("black box"): from one example to a user of G examples.

Everything is in log space: the lemma multiplies delta by about e^(G epsilon), so it needs
example-level deltas far below what a floating-point number holds.

Examples:
  >>> from dpfl_jax import accounting
  >>> from dpfl_jax.accounting.closed_forms import group
  >>> example = accounting.events.gaussian(8.0, steps=1)
  >>> round(group.black_box_epsilon(example, group_size=4, delta=1e-5), 2)
  2.19
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import dp_accounting
import numpy as np

from dpfl_jax.accounting import accountant as tight
from dpfl_jax.accounting import renyi
from dpfl_jax.accounting.accountant import check_delta
from dpfl_jax.errors import at_least, one_of

Form = Literal["geometric", "marathe", "vadhan"]


def log_delta_factor(epsilon: Any, size: int, form: Form = "geometric") -> Any:
    """Log of (group delta / example delta) when (eps, delta) becomes (size * eps, factor * delta).

    Args:
      epsilon: example-level epsilon, > 0.
      size: G >= 1.
      form: "geometric" sum_{i<G} e^(i eps) = (e^(G eps) - 1) / (e^eps - 1) (Marathe et al.,
        appendix; the tightest); "marathe" G e^((G-1) eps) (their Theorem 3.2); "vadhan"
        G e^(G eps) (Vadhan 2017, Lemma 2.2). Each is at least the one before.
    """
    at_least("the group size", size, 1)
    one_of("form", form, get_args(Form))
    if form == "marathe":
        return math.log(size) + (size - 1) * epsilon
    if form == "vadhan":
        return math.log(size) + size * epsilon
    value = np.asarray(epsilon, dtype=float)
    safe = np.maximum(value, 1e-12)
    # log((e^(Ge) - 1) / (e^e - 1)) = (G-1) e + log((1 - e^(-Ge)) / (1 - e^(-e)))
    out = (size - 1) * safe + np.log(-np.expm1(-size * safe)) - np.log(-np.expm1(-safe))
    return float(out) if np.ndim(epsilon) == 0 else out


def black_box_epsilon(
    example_event: dp_accounting.DpEvent,
    group_size: int,
    delta: float,
    *,
    form: Form = "geometric",
    accountant: Literal["pld", "rdp"] = "rdp",
) -> float:
    """User-level epsilon by example-level accounting and the generic lemma.

    The smallest G * e over the example-level curve e -> delta(e) with
    factor(e, G) * delta(e) <= delta. Valid, and looser than the mixture-of-Gaussians event.

    Args:
      example_event: the run seen by ONE example (add-or-remove).
      group_size: G, most examples of a user.
      delta: user-level target.
      form: see :func:`log_delta_factor`.
      accountant: "rdp" (log space, reaches any delta) or "pld" (tighter where delta is not tiny).

    Returns:
      Epsilon; ``inf`` where the lemma gives no finite guarantee.
    """
    delta = check_delta(delta)
    if accountant == "rdp":
        divergences = renyi.renyi_divergences(example_event)

        def log_deltas(points: np.ndarray) -> np.ndarray:
            return renyi.log_delta_from_renyi(divergences, renyi.ORDERS, points)

        points = np.geomspace(1e-4, 3000.0, 4001)
    else:
        least = tight.epsilon(example_event, delta)
        if math.isinf(least):
            return math.inf

        def log_deltas(points: np.ndarray) -> np.ndarray:
            deltas = [tight.delta(example_event, float(e)) for e in points]
            return np.log(np.maximum(deltas, 1e-320))

        # The Renyi answer is an upper end; the example's own epsilon a lower one.
        bound = black_box_epsilon(example_event, group_size, delta, form=form) / group_size
        top = min(bound, 300.0)
        points = np.geomspace(max(min(least, top), 1e-6), max(top, 1e-6), 16)

    def excess(points: np.ndarray) -> np.ndarray:
        return log_deltas(points) + log_delta_factor(points, group_size, form) - math.log(delta)

    good = np.flatnonzero(excess(points) <= 0)
    if len(good) == 0:
        return math.inf
    if good[0] == 0:
        return float(group_size * points[0])
    low, high = points[good[0] - 1], points[good[0]]
    for _ in range(20 if accountant == "pld" else 40):
        middle = 0.5 * (low + high)
        if excess(np.array([middle]))[0] <= 0:
            high = middle
        else:
            low = middle
    return float(group_size * high)
