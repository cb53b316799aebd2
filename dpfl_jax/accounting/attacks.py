"""What an adversary can find out about one unit: bounds on the success of attacks.

Everything follows from delta as a function of epsilon. Take an attack that guesses from the release
whether a unit took part, with false positive rate a. Its true positive rate is at most
``delta(eps) + e^eps a`` for every eps (Wasserman and Zhou 2010; Dong, Roth and Su 2022, "Gaussian
Differential Privacy", proposition 2.12). Any set of eps gives a bound, a fine grid the best one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import special

from dpfl_jax.accounting.accountant import (
    ADD_OR_REMOVE,
    FINE,
    REPLACE,
    check_delta,
    delta_curve,
    epsilon,
)
from dpfl_jax.accounting.events import check_prob
from dpfl_jax.errors import BadInputError, at_least

_POINTS = 600
# The curve ends at this delta; it is a bound wherever it ends.
_LEAST = 1e-9
_LARGEST_MU = 1000.0
FALSE_ALARMS = (1e-3, 1e-2, 0.05)


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What the release of a run can reveal about one unit: upper bounds for every attack.

    Attributes:
      epsilons: float [n], increasing from 0.
      deltas: float [n], upper bounds on delta at ``epsilons``.
      delta: delta of the guarantee.
      relation: what the attacker distinguishes: with and without the unit, or two values of it.

    Examples:
      >>> from dpfl_jax import accounting
      >>> meaning = accounting.meaning(accounting.events.gaussian(2.0, steps=1), delta=1e-5)
      >>> round(meaning.advantage, 2), round(meaning.posterior(0.5), 2)
      (0.2, 0.86)
    """

    epsilons: np.ndarray
    deltas: np.ndarray
    delta: float
    relation: NeighboringRelation = ADD_OR_REMOVE

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Returns the largest true positive rate of any attack with this false positive rate.

        Raises:
          BadInputError: the rate is not between 0 and 1.
        """
        a = check_prob(false_positive_rate, "rate of false alarms")
        return float(self.power(np.array([a]))[0])

    def power(self, false_positive_rates: np.ndarray) -> np.ndarray:
        """Returns ``true_positive_rate`` at many false positive rates, float [n]."""
        a, e, d = false_positive_rates, self.epsilons[:, None], self.deltas[:, None]
        with np.errstate(over="ignore"):
            rates = np.minimum(d + np.exp(e) * a, 1.0 - np.exp(-e) * (1.0 - d - a))
        return np.clip(rates.min(axis=0), a, 1.0)

    @property
    def advantage(self) -> float:
        """The largest difference between an attack's true and false positive rates."""
        return float(self.deltas[0])

    def guessing(self, candidates: int) -> float:
        """Returns the largest probability of picking a unit's record among equally likely ones.

        A guess without the release is right with probability 1 / ``candidates``, which serves as
        the false positive rate (Kaissis et al. 2023, "Bounding data reconstruction attacks with the
        hypothesis testing interpretation of differential privacy").

        Raises:
          BadInputError: there are fewer than 2 candidates.
        """
        at_least("the number of candidates", candidates, 2)
        return self.true_positive_rate(1.0 / candidates)

    def posterior(self, prior: float, but_for: float = 1e-3) -> float:
        """Returns an upper bound on the belief that the unit took part, after seeing the release.

        Args:
          prior: probability that the attacker gave it before, in [0, 1].
          but_for: probability, over the run's noise, with which the belief may exceed the bound.
        """
        p = check_prob(prior, "belief")
        # P(loss > t) (1 - e^(eps - t)) <= delta(eps) for every t > eps.
        inside = self.deltas < but_for
        if not inside.any() or p in (0.0, 1.0):
            return 1.0 if p > 0 else 0.0
        e, d = self.epsilons[inside], self.deltas[inside]
        loss = float((e - np.log1p(-d / but_for)).min())
        return float(special.expit(special.logit(p) + loss))

    @functools.cached_property
    def mu(self) -> float:
        """The least mu for mu-Gaussian differential privacy, except with probability delta.

        No attack then beats the best test of N(0, 1) against N(mu, 1), except with probability
        delta. Unlike (epsilon, delta), it can be compared across mechanisms (Gomez et al. 2025).
        """
        e, d = self.epsilons, self.deltas
        # Between two epsilons delta is at most its value at the first, which the Gaussian's delta
        # must therefore reach at the second.
        keep = d[:-1] >= self.delta
        if not keep.any():
            return 0.0
        at, wanted = e[1:][keep], d[:-1][keep]
        low, high = np.zeros(at.size), np.full(at.size, _LARGEST_MU)
        for _ in range(70):
            middle = (low + high) / 2
            enough = _gaussian_delta(at, middle) >= wanted
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return float(high.max()) if high.max() < _LARGEST_MU else math.inf

    def sentences(self) -> list[str]:
        """Returns the bounds as sentences for people who do not know differential privacy."""
        most, first = self.true_positive_rate, FALSE_ALARMS[0]
        if self.relation == REPLACE:
            what, question = "it was this record and not that one", "which of two records it was"
            attack = (
                f"An attacker who tells one record from another with {_share(first)} false alarms "
                f"recognises it in at most {_share(most(first))} of cases"
            )
        else:
            what, question = "somebody took part", "whether somebody took part"
            attack = (
                f"An attacker who wrongly accuses {_share(first)} of those who took no part finds "
                f"at most {_share(most(first))} of those who did"
            )
        rest = "; ".join(f"at {_share(a)}: {_share(most(a))}" for a in FALSE_ALARMS[1:])
        after = ", ".join(_share(self.posterior(p)) for p in (0.1, 0.5, 0.9))
        lines = [
            f"{attack} ({rest}).",
            "The share that an attacker accuses rightly exceeds the share accused wrongly by at "
            f"most {_share(self.advantage)}.",
            f"An attacker who was 10 % (50 %, 90 %) sure that {what} is at most {after} sure after "
            "seeing the result, except in one run in a thousand.",
            "If one of 10 (100; 10,000) equally likely records was used, an attacker picks the "
            f"right one with a probability of at most {_share(self.guessing(10))} "
            f"({_share(self.guessing(100))}; {_share(self.guessing(10_000))}).",
        ]
        if math.isfinite(self.mu):
            mu = f"{math.ceil(1000 * self.mu) / 1000:g}"
            lines.append(
                f"Except with probability delta this is {mu}-Gaussian differential privacy: "
                f"telling {question} is as hard as telling a draw from N(0, 1) from a draw from "
                f"N({mu}, 1)."
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Returns the bounds and the curve as JSON values."""
        return {
            "advantage": self.advantage,
            "gaussian_mu": self.mu if math.isfinite(self.mu) else None,
            "true_positive_rate": {str(a): self.true_positive_rate(a) for a in FALSE_ALARMS},
            "guessing_one_of": {str(k): self.guessing(k) for k in (2, 10, 100, 10_000)},
            "belief_afterwards_but_for_0.001": {
                str(p): self.posterior(p) for p in (0.01, 0.1, 0.5, 0.9)
            },
            "epsilons": self.epsilons.tolist(),
            "deltas": self.deltas.tolist(),
        }


def meaning(
    event: dp_accounting.DpEvent,
    delta: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
) -> Meaning:
    """Returns what an adversary can find out about one unit from an event.

    Args:
      event: what the run does to the unit.
      delta: delta of the guarantee, in (0, 1).
      relation: adjacency.

    Raises:
      BadInputError: the event gives no guarantee at this delta.

    Examples:
      >>> from dpfl_jax import accounting
      >>> event = accounting.events.uls(1.0, 0.01, steps=1000)
      >>> meaning = accounting.meaning(event, delta=1e-5)
      >>> round(meaning.true_positive_rate(0.01), 3)  # at 1 % false alarms
      0.029
    """
    return meaning_of_cases([[event]], delta, relation=relation)


def meaning_of_cases(
    cases: Sequence[Sequence[dp_accounting.DpEvent]],
    delta: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    resolution: float = FINE,
) -> Meaning:
    """Returns what an adversary can find out about any one unit of a run.

    Args:
      cases: bounds on what the run does to a unit. Each inner list bounds a unit's cost by its most
        expensive event; the cheapest list counts.
      delta: delta of the guarantee, in (0, 1).
      relation: adjacency.
      resolution: as for ``accounting.epsilon``.

    Raises:
      BadInputError: there is no guarantee at this delta.
    """
    delta = check_delta(delta)
    options: dict[str, Any] = {"relation": relation, "resolution": resolution}

    def least(price: Callable[[dp_accounting.DpEvent], Any]) -> Any:
        return np.min([np.max([price(event) for event in case], axis=0) for case in cases], axis=0)

    known = float(least(lambda event: epsilon(event, delta, **options)))
    if not math.isfinite(known):
        raise BadInputError(
            "there is no guarantee at this delta, so no attack can be bounded: raise the noise "
            "multiplier"
        )
    reach = float(least(lambda event: epsilon(event, min(delta, _LEAST), **options)))
    reach = max(reach if math.isfinite(reach) else known, 1e-9)
    grid = np.union1d(np.linspace(0.0, reach, _POINTS), [known])
    deltas = least(lambda event: delta_curve(event, grid, **options))
    return Meaning(grid, deltas, delta, relation)


def meaning_of_bound(
    epsilon: float, delta: float, relation: NeighboringRelation = ADD_OR_REMOVE
) -> Meaning:
    """Returns the looser bounds that follow from epsilon and delta alone (Kairouz et al. 2015).

    Args:
      epsilon: finite, at least 0.
      delta: in (0, 1).
      relation: adjacency.
    """
    at = np.linspace(0.0, max(epsilon, 1e-9), _POINTS)
    # With probability delta everything is revealed, else randomised response.
    rest = -np.expm1(at - at[-1]) / (1.0 + np.exp(-at[-1]))
    return Meaning(at, delta + (1.0 - delta) * rest, delta, relation)


def plot_attacks(axes: Any, meaning: Meaning) -> None:
    """Plots the largest true positive rate over the false positive rate on Matplotlib axes.

    Examples:
      >>> from matplotlib.figure import Figure
      >>> from dpfl_jax import accounting
      >>> axes = Figure().subplots()
      >>> meaning = accounting.meaning(accounting.events.gaussian(2.0, steps=1), delta=1e-5)
      >>> accounting.plot_attacks(axes, meaning)
      >>> len(axes.lines) > 0
      True
    """
    x = np.geomspace(1e-4, 1.0, 200)
    y = [meaning.true_positive_rate(a) for a in x]
    axes.fill_between(x, x, y, alpha=0.25, lw=0)
    axes.plot(x, y, label="no attack finds more")
    axes.plot(x, x, "k:", lw=1, label="guessing without looking")
    replaced = meaning.relation == REPLACE
    said = "{} wrong claims: {} right" if replaced else "{} falsely accused: {} found"
    # The numbers are in the legend, because labels next to the points would overlap.
    for a, marker in zip(FALSE_ALARMS, "osD"):
        right = meaning.true_positive_rate(a)
        label = said.format(_share(a), _share(right))
        axes.plot(a, right, marker, color="C0", ms=5, label=label)
    axes.set(
        xscale="log",
        xlim=(1e-4, 1),
        ylim=(0, 1),
        xlabel="it was another, and the attack claims it was this one"
        if replaced
        else "accused although they took no part",
        ylabel="it was this one, and the attack says so (at most)"
        if replaced
        else "found of those who took part (at most)",
    )
    ticks = [1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    axes.set_xticks(ticks, [_share(a) for a in ticks])
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.legend(loc="best", fontsize=8)


def _gaussian_delta(at: np.ndarray, mu: np.ndarray) -> np.ndarray:
    """Delta of N(0, 1) against N(mu, 1) at epsilons ``at`` (Balle and Wang 2018)."""
    log_second = at + special.log_ndtr(-at / mu - mu / 2)
    return special.ndtr(-at / mu + mu / 2) - np.exp(log_second)


def _share(value: float) -> str:
    """The value in per cent, rounded up."""
    percent = 100.0 * value
    if percent <= 0:
        return "0 %"
    digits = 2 - math.floor(math.log10(percent if percent < 90 else max(100 - percent, 1e-3)))
    up = math.ceil(round(percent * 10.0**digits, 6)) / 10.0**digits
    return f"{min(up, 100.0):.12g} %"
