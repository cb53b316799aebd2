"""Formulas as printed in papers, for comparison only: no guarantee uses them.

Where a printed formula is not a valid bound, its docstring says "NOT A BOUND" and a test shows the
violation.

Examples:
  >>> from dpfl_jax import accounting
  >>> from dpfl_jax.accounting import closed_forms
  >>> example = accounting.events.gaussian(8.0, steps=1)
  >>> round(closed_forms.black_box_epsilon(example, group_size=4, delta=1e-5), 2)
  2.19
  >>> round(closed_forms.minibatch_noise(rounds=35, silo_size=1238, epsilon=3.0, delta=1e-6), 4)
  0.4151
  >>> closed_forms.poisson_gaussian([2, 4], 0.1, 1.0).round(4).tolist()
  [0.017, 0.0587]
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, get_args

import dp_accounting
import numpy as np
from scipy import optimize, special

from dpfl_jax.accounting import renyi
from dpfl_jax.accounting.accountant import check_delta
from dpfl_jax.accounting.accountant import delta as delta_of
from dpfl_jax.accounting.accountant import epsilon as epsilon_of
from dpfl_jax.errors import BadInputError, at_least, one_of

# ---- group privacy by the generic lemma ("black box"): from one example to a user of G examples --
# Everything is in log space: the lemma multiplies delta by about e^(G epsilon), so it needs
# example-level deltas far below what a floating-point number holds.

Form = Literal["geometric", "marathe", "vadhan"]


def log_delta_factor(epsilon: Any, size: int, form: Form = "geometric") -> Any:
    """Returns log(group delta / example delta) of the lemma that turns eps into size * eps.

    Args:
      epsilon: example-level epsilon, > 0; a float, or float64 [n], which gives float64 [n].
      size: G >= 1.
      form: "geometric" sum_{i<G} e^(i eps) = (e^(G eps) - 1) / (e^eps - 1) (Marathe et al.,
        appendix; the tightest); "marathe" G e^((G-1) eps) (their Theorem 3.2); "vadhan"
        G e^(G eps) (Vadhan 2017, Lemma 2.2). Each is at least as large as the one before it.
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
    """Returns the user-level epsilon that follows from example-level accounting by the lemma.

    It is the smallest G * e on the example-level curve e -> delta(e) with
    factor(e, G) * delta(e) <= delta: valid, but looser than the mixture-of-Gaussians event.

    Args:
      example_event: what the whole run does to one example (add-or-remove).
      group_size: G, the largest number of examples of one user.
      delta: user-level target.
      form: see :func:`log_delta_factor`.
      accountant: "rdp" (log space, reaches any delta) or "pld" (tighter where delta is not tiny).

    Returns:
      Epsilon, or ``inf`` where the lemma gives no finite guarantee.
    """
    delta = check_delta(delta)
    if accountant == "rdp":
        divergences = renyi.renyi_divergences(example_event)

        def log_deltas(points: np.ndarray) -> np.ndarray:
            return renyi.log_delta_from_renyi(divergences, renyi.ORDERS, points)

        points = np.geomspace(1e-4, 3000.0, 4001)
        points = np.concatenate([points, np.geomspace(3000.0, 1e12, 2001)[1:]])  # huge, but finite
    else:
        least = epsilon_of(example_event, delta)
        if math.isinf(least):
            return math.inf

        def log_deltas(points: np.ndarray) -> np.ndarray:
            deltas = [delta_of(example_event, float(e)) for e in points]
            return np.log(np.maximum(deltas, 1e-320))

        # Search between the example-level epsilon and the Renyi answer, which is an upper bound.
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


# ---- Lowy and Razaviyayn 2023 (ICLR), "Private federated learning without a trusted server" ------
# L is the per-example gradient bound, K the local minibatch, n the records of a silo, R the rounds.
# Noise is the standard deviation on the *mean* gradient divided by L. The accountant's noise
# multiplier, which refers to the sum, is K times as large.


def minibatch_noise(rounds: int, silo_size: int, epsilon: float, delta: float) -> float:
    """Returns sigma / L of Theorem D.1 / F.1, valid but very loose.

    (sigma / L)^2 = 256 R ln(2.5 R / d) ln(2 / d) / (n^2 e^2). At n = 1,238, R = 35 and epsilon 1 it
    spends 0.0254 to 0.0285 with K = 443 draws with replacement. It needs epsilon <= 2 ln(2/delta)
    and K >= e n / (4 sqrt(2 R ln(2 / d))).
    """
    _require(epsilon <= 2 * math.log(2 / delta), "epsilon <= 2 ln(2/delta)")
    square = 256 * rounds * math.log(2.5 * rounds / delta) * math.log(2 / delta)
    return math.sqrt(square) / (silo_size * epsilon)


def one_pass_noise(batch_size: float, epsilon: float, delta: float) -> float:
    """Returns sigma / L of Theorem E.1, valid: its square is 32 ln(1.25 / d) / (e^2 K^2)."""
    _require(epsilon <= 8 * math.log(1 / delta), "epsilon <= 8 ln(1/delta)")
    return math.sqrt(32 * math.log(1.25 / delta)) / (epsilon * batch_size)


def experiment_noise(rounds: int, silo_size: int, epsilon: float, delta: float) -> float:
    """Returns sigma / L of Appendix I: its square is 8 ln(1/d) R / (n^2 e^2). NOT A BOUND.

    The paper justifies it by an asymptotic theorem. At epsilon 12 and 18 it spends 12.5 and 20.3 of
    Poisson batches; with replacement at least 33 and 81, for gradients as large as L. With R K for
    R, as in local SGD, it spends 329 at epsilon 3 if steps are composed one by one.
    """
    return math.sqrt(8 * math.log(1 / delta) * rounds) / (silo_size * epsilon)


def user_level_guarantee(silo_size: int, epsilon: float, delta: float) -> tuple[float, float]:
    """Returns the whole silo's (n e0, n e^((n-1) e0) d0), given record-level (e0, d0)."""
    grown = (silo_size - 1) * epsilon
    factor = math.exp(grown) if grown < 700 else math.inf
    return silo_size * epsilon, silo_size * factor * delta


def shuffled_epsilon(epsilon: float, silos: int, silo_size: int, delta: float) -> float:
    """Returns epsilon of one shuffled round of (epsilon, .)-DP silos: Theorem D.5, eq. (21).

    Raises:
      BadInputError: epsilon is above ln(N / (16 ln(2/delta))) / n, where the theorem ends.
    """
    limit = silos / (16 * math.log(2 / delta))
    _require(
        limit > 1 and epsilon <= math.log(limit) / silo_size,
        "epsilon <= ln(N / (16 ln(2/delta))) / n",
    )
    grown = math.exp(silo_size * epsilon)
    inner = 8 * math.sqrt(grown * math.log(4 / delta) / silos) + 8 * grown / silos
    return math.log1p(math.tanh(epsilon / 2) * inner)


def shuffled_delta(
    epsilon: float, silos: int, silo_size: int, delta: float, silo_delta: float
) -> float:
    """Returns delta + 2 N n e^((n-1) e) silo_delta, the delta of Theorem D.5."""
    return delta + 2 * silos * silo_size * math.exp((silo_size - 1) * epsilon) * silo_delta


def _require(condition: bool, words: str) -> None:
    if not condition:
        raise BadInputError(f"this formula holds only if {words}: use the numerical accountant")


# ---- Liu et al. 2024 (CCS), "Cross-silo federated learning with record-level personalized DP" ----

# The 76 integer orders of the authors' code: unique int(1.07^i + 1).
AUTHORS_ORDERS = np.unique(
    (1.07 ** np.arange(math.floor(math.log(1000, 1.07)) + 1) + 1).astype(int)
)


def poisson_gaussian(orders: Sequence[int] | np.ndarray, prob: float, sigma: float) -> np.ndarray:
    """Returns the exact Renyi divergences of a Poisson-sampled Gaussian (Lemma 9), float64 [n].

    log sum_k C(a,k) (1-q)^(a-k) q^k e^(k (k-1) / (2 sigma^2)) / (a-1) at the integer orders a >= 2;
    a / (2 sigma^2) at q = 1.
    """
    wanted = tuple(int(order) for order in np.asarray(orders, dtype=int))
    if min(wanted, default=2) < 2:
        raise BadInputError("Lemma 9 holds only at integer orders: let all orders be at least 2")
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
    """Log of C(a, k), float64 [orders, largest + 1] (-inf where k > a), and the row of all k."""
    a, k = np.asarray(orders, dtype=float)[:, None], np.arange(max(orders) + 1.0)[None, :]
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = special.gammaln(a + 1) - special.gammaln(k + 1) - special.gammaln(a - k + 1)
    return np.where(k <= a, logs, -np.inf), k


def two_stage(
    orders: np.ndarray, prob: float, sigma: float, local_steps: int, participation: float
) -> np.ndarray:
    """Returns Renyi divergences of one round at integer orders, float64 [n] (Lemmas 4 and 2)."""
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
    """Returns epsilon of a record after all rounds, and the order that gives it (Theorem 3).

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
    # Cached, because the bisections for many budgets evaluate the same points.
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
    """Returns a budget's sampling rate by bisection (Boenisch et al. 2023, IDP-SGD Sample).

    It is certified, and too small by at most ``tolerance``, relatively; 0 if 1e-5 costs too much.
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
    """The fitted curve epsilon(q) ~ e^(a q + b) + c of Algorithm 2 (SCF). NOT A BOUND.

    The least-squares fit ignores small budgets: at epsilon 0.1 the returned rate costs up to 27 %
    more than the budget. ``mechanisms`` must certify every rate (``events.two_stage`` and
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
        """Returns the paper's F(epsilon), clamped to [0, 1]; 0 where F is undefined."""
        if epsilon >= self.top:
            return 1.0
        if epsilon <= self.c:
            return 0.0
        return min(max((math.log(epsilon - self.c) - self.b) / self.a, 0.0), 1.0)


def authors_rates() -> np.ndarray:
    """Returns the sampling rates that the authors' code fits on: about 190 points in (0, 1]."""
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
    """Fits Algorithm 2's exponential to epsilon(q) at ``rates`` (float [n]) by least squares.

    Raises:
      BadInputError: the fit does not converge.
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
        with warnings.catch_warnings():  # they concern the covariance, which is unused
            warnings.simplefilter("ignore", optimize.OptimizeWarning)
            (a, b, c), _ = optimize.curve_fit(model, points, values, maxfev=5000)
    except RuntimeError:
        raise BadInputError(
            f"no exponential was found that fits epsilon as a function of the sampling rate (noise "
            f"multiplier {sigma:g}, {rounds} rounds of {local_steps} steps): set privacy.policy to "
            "certified or bisection, which need no fit"
        ) from None
    residual = values - model(points, a, b, c)
    r_squared = 1 - float(residual @ residual) / float(np.sum((values - values.mean()) ** 2))
    top = epsilon_two_stage(
        1.0, sigma, local_steps, rounds, participation, delta, conversion=conversion
    )[0]
    return CurveFit(float(a), float(b), float(c), r_squared, top)
