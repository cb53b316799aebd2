"""Shuffled noisy MB-SGD (Theorem 5.1): noise and guarantee; the algorithm is ``minibatch_sgd``.

The shuffler permutes the M reports of a round before the server averages them: the average is the
same, only the accounting differs. Each report is the noisy gradient of one record, drawn uniformly
(``MessageSpec("with_replacement")`` with K = 1).
"""

from __future__ import annotations

import math

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE, Guarantee, events
from dpfl_jax.accounting.closed_forms import isrl as closed
from dpfl_jax.errors import BadInputError


def shuffled_epsilon(
    noise_multiplier: float,
    *,
    rounds: int,
    cohort: int,
    silos: int,
    silo_size: int,
    delta: float,
) -> float:
    """Shuffle-DP epsilon: the smaller of two valid bounds.

    The chain of Theorem G.1 with numbers (``closed_forms.isrl.sdp_epsilon``), and the silo's own
    guarantee, of which shuffling is post-processing: with few silos, or many records in each, it
    is the better one.
    """
    chain = closed.sdp_epsilon(noise_multiplier, rounds, cohort, silos, silo_size, delta)
    # One record of n, exactly: where one is absent another takes its place (unlike under Poisson).
    own = accounting.epsilon(
        events.fixed_size(noise_multiplier, silo_size, 1, rounds), delta, relation=REPLACE
    )
    return min(chain, own)


def shuffled_noise(
    epsilon: float, delta: float, *, rounds: int, cohort: int, silos: int, silo_size: int
) -> float:
    """The noise multiplier (over L, of each report) that meets a shuffle-DP target.

    Raises:
      BadInputError: no noise up to 1e6 does.
    """

    def spent(z: float) -> float:
        return shuffled_epsilon(
            z, rounds=rounds, cohort=cohort, silos=silos, silo_size=silo_size, delta=delta
        )

    high = 0.5
    while spent(high) > epsilon:
        high *= 2
        if high > 1e6:
            raise BadInputError(
                f"no noise gives shuffle-DP epsilon {epsilon} at delta {delta}: raise one of them, "
                "or take fewer rounds"
            )
    low = high / 2
    while high - low > 1e-3 * high:
        middle = 0.5 * (low + high)
        if spent(middle) > epsilon:
            low = middle
        else:
            high = middle
    return high


def shuffled_guarantee(
    noise_multiplier: float,
    *,
    rounds: int,
    cohort: int,
    silos: int,
    silo_size: int,
    delta: float,
) -> Guarantee:
    """What the shuffled run guarantees to somebody who sees only what leaves the shuffler."""
    chain = closed.sdp_epsilon(noise_multiplier, rounds, cohort, silos, silo_size, delta)
    epsilon = shuffled_epsilon(
        noise_multiplier,
        rounds=rounds,
        cohort=cohort,
        silos=silos,
        silo_size=silo_size,
        delta=delta,
    )
    caveats = [
        "against a server that sees who sent what, only each silo's own guarantee holds",
        *accounting.delta_caveats(delta, silos * silo_size, "records"),
    ]
    if math.isinf(chain):
        caveats.append("too few silos for the shuffling theorem: shuffling adds nothing here")
    return Guarantee(
        unit="record",
        adjacency="replace one record",
        trust="shuffle",
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=noise_multiplier,
        steps=rounds,
        accountant="the smaller of: shuffling (Feldman et al. 2021, Theorem 3.8), subsampling and "
        "PLD composition; the silo's own guarantee by PLD",
        sampling=f"{cohort} of {silos} silos in secret, one record each, {rounds} rounds",
        assumptions=(
            "the shuffler is secure, nobody drops out, and who takes part is secret",
            "the number of silos and their sizes are public",
            "the root key is secret",
            accounting.IDEALISED,
        ),
        caveats=tuple(caveats),
        released="the mean of every round's shuffled reports, hence every model",
    )
