"""The sentence about what a federated run guarantees."""

from __future__ import annotations

import math

from dpfl_jax import accounting
from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.federation.accountant import federated_epsilon, subject_epsilon
from dpfl_jax.federation.federation import Federation

ASSUMPTIONS = (
    "every silo knows the subject of each of its records; identities are not linked across silos",
    "which silos take part, the numbers of records and subjects of every silo and in all, those of "
    "records before and after the cap per subject, the sampling probabilities, caps, clip norms, "
    "noise, rounds, local steps, weights and cohorts are public constants, held when a unit is "
    "added or removed",
    "silos that follow the protocol are honest about their own sampling and noise; the server and "
    "the other silos may be curious",
    "the root keys of the silos are secret",
)


def federated_guarantee(
    federation: Federation,
    delta: float,
    rounds: int,
    caveats: tuple[str, ...] = (),
    num_subjects: int | None = None,
) -> accounting.Guarantee:
    """What ``rounds`` rounds of a calibrated federation guarantee.

    Args:
      federation: with its noise.
      delta: in (0, 1).
      rounds: rounds run.
      caveats: further ones.
      num_subjects: in all silos together; default the fewest that the silos' numbers allow.
    """
    mechanism = federation.mechanism
    sizes = sorted(federation.silos[i].sigma for i in federation.participants.tolist())
    steps = sorted(federation.silos[i].local_steps for i in federation.participants.tolist())
    epsilon = federated_epsilon(federation, delta, rounds)
    if not mechanism.private:
        caveats = ("this run is not private: it is a baseline", *caveats)
    reach = federation.max_silos_per_subject
    cap = max(p.mechanism.participation.max_records_per_subject for p in federation.silos)
    unit = mechanism.privacy_unit
    assumptions: tuple[str, ...] = ASSUMPTIONS
    if mechanism.private:
        sums = federation.silos[0].noised_sums(rounds, unit)
        assumptions = (*sums.cell.assumptions, *ASSUMPTIONS)
    if unit == "subject":
        assumptions = (
            f"no subject has records in more than {reach} of the {len(federation.silos)} silos "
            "(no silo can check this alone; where all silos are simulated in one place it was "
            "checked)",
            f"no subject has more than {cap} records in a silo (the silo enforces it by a rule "
            "that looks at one subject at a time)",
            *assumptions,
        )
    if unit == "record" and mechanism.private:
        subject = subject_epsilon(federation, delta, rounds)
        caveats = (
            f"it protects single records: for a subject of up to {cap} records in each of up to "
            f"{reach} silos the same run has epsilon {rounded_up(subject, 4)}",
            "a record is one of those in a silo after the spread over silos and the cap: in the "
            "data before, a record inserted between others of its subject can move those too",
            *caveats,
        )
    # A unit may be in so many silos, each of which adds noise at every local step.
    summed = rounds * steps[-1] * (1 if unit == "record" else reach)
    assumptions += accounting.noise_assumptions(mechanism.noise.arithmetic, epsilon, delta, summed)
    if mechanism.private:
        units = num_subjects or federation.least_subjects
        if unit == "record":
            units = sum(plan.facts.num_records for plan in federation.silos)
        caveats = (*accounting.delta_caveats(delta, units, f"{unit}s"), *caveats)
    members = len(federation.participants)
    noise = f"{sizes[0]:.5g}" if sizes[0] == sizes[-1] else f"{sizes[0]:.5g} to {sizes[-1]:.5g}"
    taken = f"{steps[0]}" if steps[0] == steps[-1] else f"{steps[0]} to {steps[-1]}"
    probs = sorted(
        p.mechanism.participation.sampling_prob_of(p.facts)
        for p in federation.silos
        if p.facts.num_records
    )
    between = f"{probs[0]:.4g}" if probs[0] == probs[-1] else f"{probs[0]:.4g} to {probs[-1]:.4g}"
    cohort = "all silos"
    if federation.cohort is not None:
        cohort = federation.cohort.describe(f"{len(federation.silos)} silos", "silo")
    return accounting.Guarantee(
        unit=unit,
        adjacency={
            "subject": "add-or-remove one subject, with all its records in all silos",
            "record": "add-or-remove one record of one silo",
            "none": "none",
        }[unit],
        trust="silo-local",
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=sizes[0],
        steps=rounds * steps[-1],
        accountant="none"
        if not mechanism.private
        else "PLD; each silo's events composed over "
        + ("one silo (a record is in one)" if unit == "record" else f"at most {reach} silos"),
        sampling=f"{mechanism.kind}: in each of {members} silos Poisson sampling of "
        f"{mechanism.participation.drawn} with "
        f"probability {between}, {taken} local steps in each of {rounds} rounds of {cohort}; noise "
        f"multiplier {noise}, added inside the silo at every step",
        assumptions=assumptions if mechanism.private else (),
        caveats=caveats,
        status="upper bound" if math.isfinite(epsilon) else "none",
        released="every update that a silo sends and every global model",
    )
