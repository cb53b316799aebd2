"""The noise of Liu et al. 2024, as their code looks for it."""

from __future__ import annotations

from dpfl_jax.accounting import closed_forms


def noise_for_cap(
    largest_epsilon: float, local_steps: int, rounds: int, participation: float, delta: float
) -> float:
    """The authors' sigma: a record at the public cap is always sampled (q = 1).

    Their search: double from 20 while the cap is exceeded, then bisect [0, that] until epsilon is
    within 0.01 below the cap. Reproduces their values to the last digit.
    """

    def cost(sigma: float) -> float:
        return closed_forms.epsilon_two_stage(
            1.0, sigma, local_steps, rounds, participation, delta
        )[0]

    low, high = 0.0, 20.0
    while cost(high) > largest_epsilon:
        low, high = high, 2 * high
    while largest_epsilon - cost(high) > 0.01:
        middle = 0.5 * (low + high)
        if cost(middle) < largest_epsilon:
            high = middle
        else:
            low = middle
    return high
