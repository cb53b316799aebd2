"""One run under other notions of privacy: central, user-level, shuffle and local."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE, events
from dpfl_jax.accounting.closed_forms import isrl as closed
from dpfl_jax.accounting.event_types import ApproximateDpEvent
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl.privacy import SiloNoise


def relations(noise: SiloNoise, silos: int, shuffled: bool = True) -> list[dict[str, Any]]:
    """The same run under other notions of privacy (section 2 of the notes on trust).

    Args:
      noise: of every silo (alike).
      silos: N.
      shuffled: whether all silos are alike and answer in every round, as the theorem needs.

    Returns:
      Rows ``notion, trusted, protects, epsilon, delta, note``.
    """
    epsilon, delta = noise.epsilon, noise.budget.delta
    user_epsilon, user_delta = closed.user_level_guarantee(noise.silo_size, epsilon, delta)
    rows: list[dict[str, Any]] = [
        {
            "notion": "ISRL-DP",
            "trusted": "the record's own silo",
            "protects": "a record",
            "epsilon": epsilon,
            "delta": delta,
            "note": "what is guaranteed",
        },
        {
            "notion": "central DP",
            "trusted": "silos and server",
            "protects": "a record",
            "epsilon": epsilon,
            "delta": delta,
            "note": "implied; a server that adds noise once needs 1/sqrt(N) of it",
        },
        {
            "notion": "user-level DP",
            "trusted": "the server",
            "protects": "a silo's whole data",
            "epsilon": user_epsilon,
            "delta": min(user_delta, 1.0) if math.isfinite(user_delta) else 1.0,
            "note": "by group privacy; meaningful only for epsilon <= 1/n",
        },
    ]
    hidden = shuffled_view(noise, silos) if shuffled else math.inf
    helps = hidden < epsilon
    rows.append(
        {
            "notion": "shuffle DP",
            "trusted": "own silo and a shuffler",
            "protects": "a record",
            "epsilon": hidden if helps else epsilon,
            "delta": delta,
            "note": "each round shuffled, all silos alike and answering (Theorem D.5)"
            if helps
            else "implied; the shuffling theorem adds nothing here (it needs hundreds of silos, "
            "messages of epsilon below 1/n, and silos that are alike and all answer)",
        }
    )
    local = noise.silo_size == 1
    rows.append(
        {
            "notion": "local DP",
            "trusted": "nobody",
            "protects": "a record",
            "epsilon": epsilon if local else math.inf,
            "delta": delta if local else 1.0,
            "note": "the same notion if n = 1" if local else "none: the silo sees its records",
        }
    )
    return rows


def shuffled_view(noise: SiloNoise, silos: int) -> float:
    """Shuffle-DP epsilon, at the budget's delta, of a run whose rounds are shuffled; inf if none.

    Theorem D.5 on each round, whose silo randomiser is (e, e')-DP with e' so small that
    2 N n exp((n-1) e) e' is a quarter of the round's delta; then optimal composition over R rounds
    (one round, whichever, for disjoint batches). A silo's n records move together through the
    shuffler, hence exp(n e). Needs that all N silos answer, and are alike.

    Args:
      noise: of every silo.
      silos: N.
    """
    delta, n = noise.budget.delta, noise.silo_size
    rounds = 1 if noise.sampling == "disjoint" else noise.rounds
    one = dataclasses.replace(noise, rounds=1).event
    shuffle_delta = delta / (4 * rounds)
    limit = silos / (16 * math.log(2 / shuffle_delta))
    if limit <= 1:
        return math.inf
    # exp((n-1) e) is at most the theorem's own limit on exp(n e).
    silo_delta = shuffle_delta / (2 * silos * n * limit)
    try:
        own = accounting.epsilon(one, silo_delta, relation=REPLACE)
        hidden = closed.shuffled_epsilon(own, silos, n, shuffle_delta)
    except BadInputError:
        return math.inf
    per_round = closed.shuffled_delta(own, silos, n, shuffle_delta, silo_delta)
    if rounds == 1:
        return hidden
    step = ApproximateDpEvent(hidden, per_round)
    return accounting.epsilon(events.repeated(step, rounds), delta, relation=REPLACE)
