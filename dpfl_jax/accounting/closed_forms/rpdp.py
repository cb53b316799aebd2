"""Liu et al. 2024 (CCS), "Cross-silo federated learning with record-level personalized DP".

Examples:
  >>> from dpfl_jax.accounting.closed_forms import rpdp
  >>> rpdp.poisson_gaussian([2, 4], 0.1, 1.0).round(4).tolist()
  [0.017, 0.0587]
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from scipy import optimize, special

from dpfl_jax.accounting import renyi
from dpfl_jax.errors import BadInputError

# The 76 integer orders of the authors' code: unique int(1.07^i + 1).
AUTHORS_ORDERS = np.unique(
    (1.07 ** np.arange(math.floor(math.log(1000, 1.07)) + 1) + 1).astype(int)
)


def poisson_gaussian(orders: Sequence[int] | np.ndarray, prob: float, sigma: float) -> np.ndarray:
    """Lemma 9: Renyi divergences of a Poisson-sampled Gaussian at integer orders, exactly.

    log sum_k C(a,k) (1-q)^(a-k) q^k e^(k (k-1) / (2 sigma^2)) / (a-1); a / (2 sigma^2) at q = 1.
    """
    wanted = tuple(int(order) for order in np.asarray(orders, dtype=int))
    if min(wanted, default=2) < 2:
        raise BadInputError("Lemma 9 holds at integer orders from 2 on")
    array = np.asarray(wanted, dtype=float)
    if prob >= 1.0:
        return array / (2 * sigma**2)
    if prob == 0.0:
        return np.zeros(len(wanted))
    binomial, k = _log_binomials(wanted)
    terms = binomial + k * (math.log(prob) - math.log1p(-prob) + (k - 1) / (2 * sigma**2))
    logs = special.logsumexp(terms, axis=1) + array * math.log1p(-prob)
    return np.maximum(logs, 0.0) / (array - 1)


@functools.lru_cache(maxsize=16)
def _log_binomials(orders: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Log of C(a, k), float64 [orders, largest + 1] (-inf for k > a), and all k."""
    a, k = np.asarray(orders, dtype=float)[:, None], np.arange(max(orders) + 1.0)[None, :]
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = special.gammaln(a + 1) - special.gammaln(k + 1) - special.gammaln(a - k + 1)
    return np.where(k <= a, logs, -np.inf), k


def two_stage(
    orders: np.ndarray, prob: float, sigma: float, local_steps: int, participation: float
) -> np.ndarray:
    """Lemma 2 on Lemma 4: one round, at integer orders."""
    inner = local_steps * poisson_gaussian(orders, prob, sigma)
    return renyi.amplified_by_participation(inner, participation, np.asarray(orders, dtype=float))


Adversary = Literal["clients", "server"]
Conversion = Literal["mironov", "balle"]


def epsilon_two_stage(
    prob: float,
    sigma: float,
    local_steps: int,
    rounds: int,
    participation: float,
    delta: float,
    *,
    adversary: Adversary = "clients",
    conversion: Conversion = "balle",
    orders: np.ndarray = AUTHORS_ORDERS,
) -> tuple[float, int]:
    """Theorem 3: epsilon of a record after all rounds, and the best order.

    Args:
      prob: q, the record's sampling rate.
      sigma: noise multiplier.
      local_steps: tau.
      rounds: T.
      participation: lambda.
      delta: in (0, 1).
      adversary: "clients" (Type II): T rho_{tau,lambda}. "server" (Type I): lambda T rho_tau, which
        is NOT A BOUND: by Jensen it is below the divergence of what the server sees.
      conversion: "mironov" (C1, printed) or "balle" (C2, the authors' code and dp-accounting).
      orders: integers >= 2.
    """
    orders = np.asarray(orders)
    if adversary == "server":
        total = participation * rounds * local_steps * poisson_gaussian(orders, prob, sigma)
    else:
        total = rounds * two_stage(orders, prob, sigma, local_steps, participation)
    if conversion == "mironov":
        values = total + math.log(1 / delta) / (orders - 1)
    else:
        values = total + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    best = int(np.argmin(values))
    return max(float(values[best]), 0.0), int(orders[best])


@functools.lru_cache(maxsize=1 << 16)
def _epsilon_of(*setting: Any) -> float:
    # Cached, as the searches of many budgets halve the same intervals.
    return epsilon_two_stage(*setting)[0]


def binary_search_rate(
    epsilon: float,
    sigma: float,
    local_steps: int,
    rounds: int,
    participation: float,
    delta: float,
    *,
    tolerance: float = 1e-3,
) -> float:
    """IDP-SGD Sample (Boenisch et al. 2023, Algorithm 2): the rate of one budget, by bisection.

    Returns the certified end of [1e-5, 1], when the ends differ by less than ``tolerance`` of the
    upper one; 0 if not even 1e-5 fits.
    """

    def cost(rate: float) -> float:
        return _epsilon_of(rate, sigma, local_steps, rounds, participation, delta)

    low, high = 1e-5, 1.0
    if cost(low) > epsilon:
        return 0.0
    while low / high < 1 - tolerance:
        middle = 0.5 * (low + high)
        if cost(middle) < epsilon:
            low = middle
        else:
            high = middle
    return low


@dataclasses.dataclass(frozen=True)
class CurveFit:
    """Algorithm 2 (SCF): epsilon(q) ~ e^(a q + b) + c, inverted. NOT A BOUND.

    The least-squares fit ignores small budgets: at epsilon = 0.1 the returned rate costs up to 27 %
    more than asked for. ``mechanisms`` must certify every rate (``events.two_stage`` and
    ``calibrate_sampling_prob``).

    Attributes:
      a, b, c: fitted parameters; r_squared: goodness of fit; top: epsilon at q = 1.
    """

    a: float
    b: float
    c: float
    r_squared: float
    top: float

    def rate(self, epsilon: float) -> float:
        """F(epsilon), clamped to [0, 1]; 0 where the printed F is undefined."""
        if epsilon >= self.top:
            return 1.0
        if epsilon <= self.c:
            return 0.0
        return min(max((math.log(epsilon - self.c) - self.b) / self.a, 0.0), 1.0)


def authors_rates() -> np.ndarray:
    """The sampling rates the authors' code fits on: about 190 points of (0, 1]."""
    fine = np.concatenate([np.arange(0, 1, 0.01), np.arange(0, 0.1, 0.001), [1.0]])
    rates = np.unique(fine.astype(np.float32)).astype(float)
    return rates[rates > 1e-5]


def fit_curve(
    sigma: float,
    local_steps: int,
    rounds: int,
    participation: float,
    delta: float,
    *,
    rates: np.ndarray | None = None,
    conversion: Conversion = "balle",
) -> CurveFit:
    """Algorithm 2: samples epsilon(q) and fits the exponential by least squares.

    Raises:
      BadInputError: there is no fit.
    """
    points = authors_rates() if rates is None else np.asarray(rates, dtype=float)
    values = np.array(
        [
            epsilon_two_stage(
                q, sigma, local_steps, rounds, participation, delta, conversion=conversion
            )[0]
            for q in points
        ]
    )

    def model(q: np.ndarray, a: float, b: float, c: float) -> np.ndarray:
        return np.exp(np.clip(a * q + b, -700, 700)) + c

    try:
        with warnings.catch_warnings():  # about the covariance, which is unused
            warnings.simplefilter("ignore", optimize.OptimizeWarning)
            (a, b, c), _ = optimize.curve_fit(model, points, values, maxfev=5000)
    except RuntimeError:
        raise BadInputError(
            f"no exponential was found that follows epsilon along sampling rates (noise multiplier "
            f"{sigma:g}, {rounds} rounds of {local_steps} steps): set privacy.policy to certified "
            "or bisection, which fit none"
        ) from None
    residual = values - model(points, a, b, c)
    r_squared = 1 - float(residual @ residual) / float(np.sum((values - values.mean()) ** 2))
    top = epsilon_two_stage(
        1.0, sigma, local_steps, rounds, participation, delta, conversion=conversion
    )[0]
    return CurveFit(float(a), float(b), float(c), r_squared, top)
