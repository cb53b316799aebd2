"""Compares mechanisms, caps and numbers of steps by noise over signal, without training.

The gradients that a silo computes, steps times records per step, stay as configured. Noise depends
only on the product of rounds and local steps (``Federation.balance``). Apart from that, fewer
rounds send less data, and more local steps let silos drift apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from dpfl_jax.config import RunConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.federated_run import FederatedRun, with_calibrated_noise
from dpfl_jax.federation.mechanisms import (
    PRESETS,
    SiloMechanism,
    hi_grad_avg,
    local_group,
    subject_uls,
    user_ldp,
)
from dpfl_jax.federation.participation import SiloFacts

Preset = Callable[..., SiloMechanism]
_STEP_FACTORS = (0.25, 0.5, 2.0, 4.0)  # factors on the configured steps


@dataclasses.dataclass(frozen=True)
class FederatedOption:
    """One way to spend the gradients of a federated run.

    Attributes:
      kind: kind of the mechanism.
      cap: most records of a person in a silo; for ``subject_uls``, in a step.
      rounds: number of rounds R.
      local_steps: local steps in a round.
      batch: expected records of a local step in a silo, if it has as many.
      noise_multiplier: largest noise multiplier of any silo.
      kept: share of the records that the cap keeps.
      ratio: noise over the largest possible signal, in the whole run.
      config: the configuration that runs it.
    """

    kind: str
    cap: int
    rounds: int
    local_steps: int
    batch: float
    noise_multiplier: float
    kept: float
    ratio: float
    config: RunConfig = dataclasses.field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Returns all fields except the configuration."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "config"]
        return {name: getattr(self, name) for name in names}


def federated_options(prepared: FederatedRun) -> Iterator[FederatedOption]:
    """Yields every mechanism that protects people, with several caps and the configured steps.

    Mechanisms for which no noise meets the target are left out.

    Args:
      prepared: a run of the configuration, on its data. Caps are at most the configured one.

    Raises:
      BadInputError: the configuration has no target, or personal budgets.
    """
    config = prepared.config
    cap = config.mechanism.participation.max_records_per_subject
    if config.privacy.epsilon is None:
        raise BadInputError("the target is not set: give --epsilon, or set privacy.epsilon")
    if config.mechanism.participation.personal:
        raise BadInputError(
            "mechanism.kind is rpdp, which protects records with personal budgets, but this "
            "compares mechanisms that protect people: set it to one of these"
        )
    yield from _options(
        prepared, user_ldp, cap, 1.0
    )  # hides all records of a step, whatever the cap
    for kind in (local_group, hi_grad_avg, subject_uls):
        for most in sorted({c for c in (1, cap // 4, cap // 2, cap) if c > 0}):
            yield from _options(prepared, kind, most, 1.0)


def other_steps(prepared: FederatedRun, choice: FederatedOption) -> Iterator[FederatedOption]:
    """Yields a choice with a quarter to four times the rounds, and batches smaller by as much."""
    for factor in _STEP_FACTORS:
        yield from _options(prepared, PRESETS[choice.kind], choice.cap, factor)


def by_reach(prepared: FederatedRun, choice: FederatedOption) -> dict[int, float]:
    """Returns noise over signal for ``max_silos_per_subject`` of 1, 2, 4, ..., its own value."""
    facts = _facts(prepared, PRESETS[choice.kind], choice.cap)
    most = prepared.federation.max_silos_per_subject
    ratios = {}
    for reach in sorted({*(2**k for k in range(most.bit_length())), most}):
        section = choice.config.federation.model_copy(update={"max_silos_per_subject": reach})
        config = choice.config.model_copy(update={"federation": section})
        federation, _ = with_calibrated_noise(config, facts)
        ratios[reach] = federation.balance(prepared.num_params).ratio
    return ratios


def _facts(prepared: FederatedRun, kind: Preset, cap: int) -> list[SiloFacts]:
    """Sizes of the silos under a smaller cap; the cap of ``subject_uls`` only holds in a step."""
    if kind is subject_uls:
        return [SiloFacts.of(silo) for silo in prepared.data.silos]
    counts = [silo.subject_offsets[1:] - silo.subject_offsets[:-1] for silo in prepared.data.silos]
    return [SiloFacts(int(each.clip(max=cap).sum()), len(each)) for each in counts]


def _options(
    prepared: FederatedRun, kind: Preset, cap: int, factor: float
) -> Iterator[FederatedOption]:
    config, old = prepared.config, prepared.config.mechanism
    facts = _facts(prepared, kind, cap)
    records = [old.participation.expected_records(p.facts) for p in prepared.federation.silos]
    batch = sum(records) / len(facts) / factor
    rounds = round(config.federation.rounds * factor)
    if rounds < 1 or batch < 1 or batch > max(known.num_records for known in facts):
        return
    values = {"batch_size": batch, "clip_norm": old.clip_norm, "arithmetic": old.noise.arithmetic}
    values["max_records_per_subject"] = old.participation.max_records_per_subject
    values["group_size" if kind is subject_uls else "max_records_per_subject"] = cap
    new = config.model_copy(
        update={
            "mechanism": kind(**values),
            "federation": config.federation.model_copy(update={"rounds": rounds}),
            "privacy": config.privacy.model_copy(update={"delta": prepared.delta}),
        }
    )
    try:
        federation, _ = with_calibrated_noise(new, facts)
    except BadInputError:  # no noise meets the target
        return
    whole = sum(silo.num_records for silo in prepared.data.silos)
    yield FederatedOption(
        kind.__name__,
        cap,
        rounds,
        config.federation.local_steps,
        batch,
        max(plan.sigma for plan in federation.members),
        sum(known.num_records for known in facts) / whole,
        federation.balance(prepared.num_params).ratio,
        new,
    )
