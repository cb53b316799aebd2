"""Noise beside signal of central training (``run.balance``).

A step moves along (bounded sum + noise) / M. A bounded sum of M units has norm M C at most, its
noise standard deviation sigma C in each of d coordinates; over T steps, in units of the learning
rate:

    signal  at most  T C                          gradients at C, aligned
    noise   about    sqrt(T d) sigma C / M        a random walk
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from dpfl_jax.config import RunConfig
from dpfl_jax.mechanisms import Calibrated, Mechanism, Population
from dpfl_jax.run.balance import Balance, Knobs, advice, doubled


def balance_of_steps(calibrated: Calibrated, dim: int) -> Balance | None:
    """The balance of a mechanism with its noise; None if there is none, or it is taken back.

    Args:
      calibrated: the mechanism with its noise.
      dim: d, number of parameters that are trained.
    """
    mechanism = calibrated.mechanism
    if not mechanism.private or mechanism.noise.is_correlated:
        return None
    noise = math.sqrt(dim) * calibrated.noise_stddev / mechanism.participation.divisor
    return Balance(noise, mechanism.rule.sensitivity, calibrated.steps, "step")


def advice_on_steps(
    config: RunConfig,
    calibrated: Calibrated,
    count: Callable[[Mechanism], Population],
    dim: int,
) -> list[str]:
    """Sentences to print before training; none where ``balance_of_steps`` is None.

    Args:
      config: of the run.
      calibrated: the mechanism with its noise.
      count: public numbers of the data, as another mechanism sees them.
      dim: number of parameters that are trained.
    """
    balance = balance_of_steps(calibrated, dim)
    if balance is None:
        return []
    return advice(balance, _knobs(config, count, calibrated.delta, dim))


def _knobs(
    config: RunConfig, count: Callable[[Mechanism], Population], delta: float, dim: int
) -> Knobs:
    """What may be changed where noise swamps signal, and what it would do."""
    given, privacy, steps = config.mechanism, config.privacy, config.train.steps

    def would(changes: dict[str, Any], epsilon: float | None, steps: int) -> Callable[[], Balance]:
        def ask() -> Balance:
            who: Any = given.participation
            changed = dataclasses.replace(given, participation=dataclasses.replace(who, **changes))
            found = changed.calibrate(
                count(changed),
                steps,
                epsilon=epsilon,
                noise_multiplier=privacy.noise_multiplier,
                delta=delta,
            )
            balance = balance_of_steps(found, dim)
            assert balance is not None  # the same kind
            return balance

        return ask

    def of_mechanism(name: str, values: Sequence[Any]) -> tuple[str, list[Any]]:
        tried = [(value, would({name: value}, privacy.epsilon, steps)) for value in values]
        return f"mechanism.{name}", tried

    for name in ("cohort_size", "batch_size"):
        if (size := getattr(given.participation, name, None)) is not None:
            yield of_mechanism(name, doubled(size, count(given).num_units))
    if given.participation.unit_examples is None and (cap := given.group_size) > 1:
        yield of_mechanism("group_size", [c for c in (cap // 2, cap // 4, 1) if 0 < c < cap])
    if privacy.epsilon is not None:
        epsilons = doubled(privacy.epsilon, math.inf, 4)
        yield "privacy.epsilon", [(value, would({}, value, steps)) for value in epsilons]
    more = [int(value) for value in doubled(steps, 1e6, 3)]
    yield "train.steps", [(value, would({}, privacy.epsilon, value)) for value in more]
