"""From budgets to sampling rates: the certified way, the paper's, and its baselines, by name.

certified   the largest rate that the tight accountant certifies for each budget (default).
curve_fit   Simulation-CurveFitting (Algorithm 2). Its rates overrun small budgets, so that records
            leave when the accountant says so: sound, at the price of their last rounds.
bisection   IDP-SGD Sample (Boenisch et al. 2023): bisection for each budget, Renyi accounting.
minimum     everybody at the rate of the smallest budget.
dropout     records below the mean budget are left out, the others get its rate.
uniform     everybody at the rate of the mean budget; records with less leave when theirs is used
            up.

What ``minimum``, ``dropout`` and ``uniform`` compare with (the smallest and the mean budget above
0) is taken from the public distribution of budgets, not from the secret list.

A record with a budget of 0 takes no part, whatever the policy.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import numpy as np

from dpfl_jax.accounting.closed_forms import rpdp
from dpfl_jax.accounting.rates import (
    TwoStage,
    Unreachable,
    certified_rates,
    check_budgets,
    fitted_rates,
    solver,
)
from dpfl_jax.errors import BadInputError

Policy = Literal["certified", "curve_fit", "bisection", "minimum", "dropout", "uniform"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


# An infinite budget counts as this much in a mean.
_MOST = 100.0


@dataclasses.dataclass(frozen=True, eq=False)
class Assignment:
    """Rates of records under a policy; nobody exceeds its budget.

    Attributes:
      policy: its name.
      rates: float64 [n].
      stay: int64 [n], rounds after which each record leaves.
      violations: records whose rate would overrun their budget if they stayed for all rounds.
      facts: what else is worth reporting.
    """

    policy: str
    rates: np.ndarray
    stay: np.ndarray
    violations: int
    facts: dict[str, Any]


def assign(
    policy: Policy,
    budgets: np.ndarray,
    public: np.ndarray,
    setting: TwoStage,
    unreachable: Unreachable = "error",
) -> Assignment:
    """Gives every record its rate.

    Args:
      policy: see the module.
      budgets: float [n], the records' epsilons.
      public: float [m], quantiles of the public distribution of budgets.
      setting: of the run.
      unreachable: what to do with budgets that no rate keeps (certified only).

    Raises:
      BadInputError: an unknown policy, a bad or unreachable budget.
    """
    budgets = check_budgets(budgets)
    facts: dict[str, Any] = {}
    public = public[public > 0]
    if not len(public) and policy in ("minimum", "dropout", "uniform"):
        raise BadInputError(
            f"all declared budgets are 0, so that privacy.policy={policy} has no rate: declare the "
            "budgets of those who take part"
        )
    if policy == "certified":
        rates = certified_rates(budgets, setting, unreachable).rates
    elif policy == "curve_fit":
        fitted = fitted_rates(budgets, setting, exact_up_to=64)
        rates, facts = fitted.rates, fitted.to_json()
    elif policy == "bisection":
        distinct, inverse = np.unique(budgets, return_inverse=True)
        form = setting.closed_form()
        rates = np.array([rpdp.binary_search_rate(float(b), *form) for b in distinct])[inverse]
    elif policy == "minimum":
        least = float(public.min())
        common = certified_rates(np.array([least]), setting, unreachable).rates[0]
        rates, facts = np.full(len(budgets), common), {"least_budget": least}
    elif policy in ("dropout", "uniform"):
        threshold = float(np.minimum(public, _MOST).mean())
        common = certified_rates(np.array([threshold]), setting, unreachable).rates[0]
        enough = budgets >= threshold
        rates = np.where(enough | (policy == "uniform"), common, 0.0)
        facts = {"mean_budget": threshold, "below_mean": int((~enough).sum())}
    else:
        raise BadInputError(f"the policy {policy!r} is not one of {', '.join(POLICIES)}")
    rates = np.where(budgets > 0, rates, 0.0)
    stay = solver(setting).rounds_within(rates, budgets)
    return Assignment(policy, rates, stay, int((stay < setting.rounds).sum()), facts)


def public_batch(
    policy: Policy, public: np.ndarray, setting: TwoStage, unreachable: Unreachable = "error"
) -> float:
    """Mean rate over the public distribution: the public batch size per record, in (0, 1]."""
    if policy in ("curve_fit", "bisection"):  # nearly the same, at less cost
        policy = "certified"
    mean = float(assign(policy, public, public, setting, unreachable).rates.mean())
    return max(mean, 1e-9)
