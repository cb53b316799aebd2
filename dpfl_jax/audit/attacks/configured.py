"""What a configuration claims, as trials of its mechanism."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console

from dpfl_jax.audit.attacks import simulate
from dpfl_jax.audit.trials import Trials
from dpfl_jax.config import RunConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.pipeline import prepare

_NOTHING = "this configuration promises nothing, so that there is nothing to audit: choose a "


def trials_of(config: Any, key: RootKey, console: Console, trials: int) -> list[Trials]:
    """Simulates the mechanism of a configuration, whose data are read for their public numbers.

    Args:
      config: of any kind.
      key: of the audit alone.
      console: for people.
      trials: of each claim, at least. One of a mechanism that hides a whole silo takes a silo, and
        as many times fewer are taken.

    Returns:
      One entry; with personal budgets one of the smallest, one of the largest.

    Raises:
      BadInputError: it has no guarantee, or one that no audit knows.
    """
    if config.variant == "isrl":
        return [_messages(config, key, console, trials)]
    if config.variant == "silos":
        return _silos(config, key, console, trials)
    if not config.mechanism.private:
        raise BadInputError(_NOTHING + "private mechanism.kind")
    ready: Any = prepare(config, console)
    with console.status("attacking"):
        return [simulate.central(ready.calibrated, key, trials=trials)]


def _silos(config: RunConfig, key: RootKey, console: Console, trials: int) -> list[Trials]:
    ready: Any = prepare(config, console)
    federation = ready.federation
    if not federation.mechanism.private:
        raise BadInputError(_NOTHING + "private mechanism.kind")
    reach = 1
    if federation.mechanism.privacy_unit != "record":
        reach = min(federation.max_silos_per_subject, federation.silos_per_round)
    # Those that cost most, as in federation.accountant.worst_cases.
    members = sorted(
        (federation.silos[i] for i in federation.participants.tolist()),
        key=lambda p: (
            -p.mechanism.participation.sampling_prob_of(p.facts),
            p.sigma,
            -p.local_steps,
        ),
    )[:reach]
    rates: list[tuple[float | None, float | None]] = [(None, None)]
    if ready.personal is not None:
        ready.personal.check_rates(ready.data)
        drawn = ready.personal.assignment.rates
        ends = float(drawn[drawn > 0].min()), float(drawn.max())
        rates = [ends, ends[::-1]]
    if federation.mechanism.participation.one_unit:
        trials = max(200, trials // 10)
    found = []
    with console.status("attacking"):
        for rate, other in rates:
            given = (members, federation.rounds, ready.delta, key.child(f"rate {rate}"))
            cohort = federation.cohort if rate is not None else None
            found.append(
                simulate.silos(*given, trials=trials, rate=rate, other=other, cohort=cohort)
            )
    return found


def _messages(config: RunConfig, key: RootKey, console: Console, trials: int) -> Trials:
    ready: Any = prepare(config, console)
    parameters = ready.parameters
    if not parameters.noise:
        raise BadInputError(_NOTHING + "budget")
    worst = int(np.argmax([z.epsilon for z in parameters.noise]))
    with console.status("attacking"):
        return simulate.messages(
            parameters.noise[worst],
            key,
            clip_norm=float(parameters.clip_norms[worst]),
            trials=trials,
        )
