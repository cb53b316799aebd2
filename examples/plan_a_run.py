"""What will privacy cost? Prices every way to spend a compute budget, without any data."""

from __future__ import annotations

import dpfl_jax as dpfl
from dpfl_jax.planning import Planner, Recommendation, Sensitivities, UserStatistics

# Public numbers: 100,000 people, 3 million examples, fewer if each keeps at most G.
LEFT = {1: 100_000, 4: 370_000, 16: 1_200_000}


def main(budget: int = 4096, epsilon: float = 4.0) -> Recommendation:
    """Prints the options, best first, and makes the best one's mechanism."""
    planner = Planner(
        UserStatistics(100_000, limited=LEFT),
        Sensitivities.assumed(0.25, list(LEFT)),  # norms fall as G^-0.25: examples are a bit alike
        epsilon=epsilon,
        delta=1e-6,
        steps=1000,
    )
    plan = planner.recommend(budget)
    print("algorithm  group  size  noise multiplier  noise of the average gradient")
    for o in sorted(plan.options, key=lambda option: option.noise):
        print(f"{o.kind:9s}{o.group_size:7d}{o.size:6d}{o.noise_multiplier:18.3f}{o.noise:12.5f}")
    best = plan.best
    if best.kind == "els":
        mechanism = dpfl.els(group_size=best.group_size, batch_size=best.size)
    else:
        mechanism = dpfl.uls(group_size=best.group_size, cohort_size=best.size)
    print(f"{plan.reason}\n{mechanism}")
    return plan


if __name__ == "__main__":
    main()
