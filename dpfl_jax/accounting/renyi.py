"""Renyi (RDP) and zero-concentrated (zCDP) accounting, for comparison and for papers that use it.

The Renyi divergence of a mixture of Gaussians has no closed form at fractional orders, and
dp-accounting has the mixture only as a PLD. So it is computed by the trapezoidal rule, which
converges geometrically on these analytic, rapidly decaying integrands, in both directions.
"""

from __future__ import annotations

import functools
import math

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, rdp
from scipy import special

from dpfl_jax.accounting.event_types import FixedSizeGaussianDpEvent
from dpfl_jax.accounting.leaves import (
    AllocatedLeaf,
    BestLeaf,
    EventLeaf,
    FilteredLeaf,
    Flat,
    Leaf,
    MixtureLeaf,
    OneOfLeaf,
    RenyiLeaf,
    TwoStageLeaf,
    flatten,
)
from dpfl_jax.errors import BadInputError, require

ORDERS = np.unique(
    np.concatenate(
        [
            1 + np.geomspace(0.01, 1, 30),
            np.arange(20, 110) / 10,
            np.arange(11.0, 64.0),
            np.geomspace(64, 4000, 60),
        ]
    )
)
_MOST_POINTS = 400_000


def renyi_divergences(
    event: dp_accounting.DpEvent,
    orders: np.ndarray = ORDERS,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
) -> np.ndarray:
    """Returns the event's Renyi divergence at each order, the larger of both directions.

    Args:
      event: what the mechanism does to one unit.
      orders: float64 [n], all > 1.
      relation: adjacency.

    Returns:
      float64 [n], nats; ``inf`` where unknown or unbounded (a valid bound).
    """
    orders = np.asarray(orders, dtype=float)
    require((orders > 1).all(), "the smallest Renyi order", orders.min(), "above 1")
    flat = flatten(event, relation)
    if not flat.private:
        return np.full(len(orders), np.inf)
    return flat_divergences(flat, orders)


def flat_divergences(flat: Flat, orders: np.ndarray) -> np.ndarray:
    """Returns what :func:`renyi_divergences` does, given a flattened event that is private."""
    total = flat.gaussian * orders / 2.0
    for leaf, count in flat.leaves:
        total = total + count * _leaf_divergences(leaf, tuple(orders))
    return total


@functools.lru_cache(maxsize=512)
def _leaf_divergences(leaf: Leaf, orders: tuple[float, ...]) -> np.ndarray:
    array = np.asarray(orders)
    if isinstance(leaf, MixtureLeaf):
        return mixture_divergences(np.asarray(leaf.shifts), np.asarray(leaf.weights), array)
    if isinstance(leaf, TwoStageLeaf):
        inner = leaf.local_steps * _leaf_divergences(leaf.inner, orders)
        return amplified_by_participation(inner, leaf.probability, array)
    if isinstance(leaf, AllocatedLeaf):  # the bound against an adversary who knows the step
        return array / (2.0 * leaf.sigma**2)
    if isinstance(leaf, OneOfLeaf):
        # proof: selection-event-2
        return np.max([flat_divergences(part, array) for part in leaf.parts], axis=0)
    if isinstance(leaf, FilteredLeaf):  # divergences grow with the order
        # proof: individual-event-2
        most = flat_divergences(leaf.budget, np.array([leaf.order]))[0]
        return np.where(array <= leaf.order, most, np.inf)
    if isinstance(leaf, BestLeaf):
        return _best_of_several(leaf, array)
    assert isinstance(leaf, EventLeaf)
    event = leaf.event
    if isinstance(event, FixedSizeGaussianDpEvent):
        # dp-accounting does not double the sensitivity under replace-one: halve the noise here.
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            event.dataset_size,
            event.batch_size,
            dp_accounting.GaussianDpEvent(event.noise_multiplier / 2.0),
        )
        array = np.unique(np.floor(array[array >= 2.0]))
        accountant = rdp.RdpAccountant(list(array), NeighboringRelation.REPLACE_ONE)
        computed = accountant.compose(event)._rdp
        out = np.full(len(orders), np.inf)
        for i, order in enumerate(orders):
            # Divergences grow with the order: the next larger computed one is a bound.
            above = np.searchsorted(array, order)
            if above < len(array):
                out[i] = computed[above]
        return out
    relation = leaf.relation
    accountant = rdp.RdpAccountant(list(orders), relation)
    if relation == NeighboringRelation.REPLACE_ONE or not accountant.supports(event):
        raise BadInputError(
            f"{type(event).__name__} has no Renyi accountant under {relation.name} adjacency: use "
            "the PLD accountant (accountant='pld')"
        )
    return np.asarray(accountant.compose(event)._rdp)


def _best_of_several(leaf: BestLeaf, orders: np.ndarray) -> np.ndarray:
    """Papernot and Steinke 2022 (arXiv 2110.03620), Theorems 2 and 6, by dp-accounting's code."""
    inner, out = flat_divergences(leaf.inner, orders), np.full(len(orders), np.inf)
    known = np.isfinite(inner)
    if known.any():
        out[known] = rdp.rdp_privacy_accountant._compute_rdp_repeat_and_select(
            orders[known], inner[known], leaf.mean, leaf.shape
        )
    return out


def mixture_divergences(shifts: np.ndarray, weights: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Returns Renyi divergences of N(0, 1) and a mixture of N(shift, 1), the larger direction.

    Args:
      shifts: float64 [k], >= 0.
      weights: float64 [k], probabilities.
      orders: float64 [n], > 1.

    Returns:
      float64 [n]; ``inf`` at orders so high that the integral would need too many points.
    """
    # Fine enough for the nearest complex zeros of the mixture, at a distance of pi / gap.
    gaps = np.diff(np.sort(shifts))
    step = 0.1 / max(1.0, float(gaps.max(initial=0.0)))
    out = np.full(len(orders), np.inf)
    top = float(shifts.max())
    usable = np.flatnonzero((orders * top + 80.0) / step < _MOST_POINTS)
    if len(usable) == 0:
        return out
    first, last = -math.ceil(40.0 / step), math.ceil((40.0 + top * orders[usable].max()) / step)
    x = step * np.arange(first, last + 1)
    rows = max(1, 4_000_000 // len(shifts))
    constant = np.log(weights) - 0.5 * shifts**2
    loss = np.concatenate(
        [
            special.logsumexp(x[i : i + rows, None] * shifts + constant, axis=1)
            for i in range(0, len(x), rows)
        ]
    )
    log_phi = -0.5 * x**2 - 0.5 * math.log(2 * math.pi) + math.log(step)
    for i in usable:
        a = orders[i]
        # The rest of the integral is below e^-800 of it.
        reached = slice(math.ceil((40.0 + top * a) / step) + 1 - first)
        removed = _log_sum(log_phi[reached] + a * loss[reached])
        added = _log_sum(log_phi[reached] + (1.0 - a) * loss[reached])
        out[i] = max(removed, added, 0.0) / (a - 1.0) * (1 + 1e-12) + 1e-15
    return out


def _log_sum(logs: np.ndarray) -> float:
    """SciPy's logsumexp without its checks, which take longer than these sums."""
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


def amplified_by_participation(
    divergences: np.ndarray, probability: float, orders: np.ndarray
) -> np.ndarray:
    """Returns the divergences of a round that happens, visibly, with this probability.

    log(1 - lambda + lambda e^((a-1) rho)) / (a-1), float64 [n]: Lemma 2 of Liu et al. 2024.
    """
    if probability == 1.0:
        return divergences
    gap = orders - 1.0
    log_lambda = math.log(probability) if probability > 0 else -math.inf
    return np.logaddexp(math.log1p(-probability), log_lambda + gap * divergences) / gap


def epsilon_from_renyi(divergences: np.ndarray, orders: np.ndarray, delta: float) -> float:
    """Returns the smallest epsilon over the orders, converted as in Canonne et al. 2020."""
    finite = np.isfinite(divergences)
    if not np.any(finite):
        return math.inf
    value, _ = rdp.compute_epsilon(list(orders[finite]), list(divergences[finite]), delta)
    return float(max(value, 0.0))


def log_delta_from_renyi(
    divergences: np.ndarray, orders: np.ndarray, epsilons: np.ndarray
) -> np.ndarray:
    """Returns the log of the smallest delta over the orders at each epsilon, float64 [epsilons].

    ``epsilon_from_renyi`` solved for delta: (a-1) (rho - eps + log(1 - 1/a)) - log a.
    """
    finite = np.isfinite(divergences)
    a, rho = orders[finite][:, None], divergences[finite][:, None]
    values = (a - 1) * (rho - epsilons[None, :] + np.log1p(-1.0 / a)) - np.log(a)
    return np.minimum(values.min(axis=0), 0.0)


def zcdp(event: dp_accounting.DpEvent, relation: NeighboringRelation) -> float:
    """Returns rho of zCDP: sum of (largest sensitivity / sigma)^2 / 2, whatever the subsampling."""
    flat = flatten(event, relation)
    if not flat.private:
        return math.inf
    total = flat.gaussian / 2.0
    for leaf, count in flat.leaves:
        local = 1
        if isinstance(leaf, TwoStageLeaf):
            local = leaf.local_steps
            leaf = leaf.inner
        if isinstance(leaf, MixtureLeaf):
            total += count * local * max(leaf.shifts) ** 2 / 2.0
            continue
        if isinstance(leaf, AllocatedLeaf):
            total += count / (2.0 * leaf.sigma**2)
            continue
        if isinstance(leaf, RenyiLeaf):
            raise BadInputError(f"zCDP is not available for {leaf.name}: use accountant='rdp'")
        assert isinstance(leaf, EventLeaf)
        inner = getattr(leaf.event, "event", leaf.event)
        sigma = getattr(inner, "noise_multiplier", None)
        if sigma is None:
            raise BadInputError(
                f"zCDP is not available for {type(leaf.event).__name__}: use accountant='pld'"
            )
        total += count * local * (2.0 / sigma) ** 2 / 2.0
    return total


def epsilon_from_zcdp(rho: float, delta: float) -> float:
    """Returns epsilon of rho-zCDP, whose Renyi divergence is rho * a at every order a > 1."""
    if not math.isfinite(rho):
        return math.inf
    if rho == 0.0:
        return 0.0
    best = 1.0 + math.sqrt(math.log(1.0 / delta) / rho)
    orders = 1.0 + (best - 1.0) * np.geomspace(0.2, 5.0, 2001)
    return epsilon_from_renyi(rho * orders, orders, delta)
