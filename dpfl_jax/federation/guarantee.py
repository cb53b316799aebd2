"""The guarantee of a federated run: in words, for guarantee.json, and restated for a check."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from dpfl_jax import accounting
from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.accounting.statement import Statement, whole_number
from dpfl_jax.config.kinds import SILOS
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.accountant import federated_epsilon, subject_epsilon, worst_cases
from dpfl_jax.federation.federation import Cohort, Federation, SiloPlan
from dpfl_jax.federation.mechanisms import SiloMechanism
from dpfl_jax.federation.participation import SiloFacts
from dpfl_jax.run.public_inputs import of_the_mechanism
from dpfl_jax.sampling import FixedSize, Poisson
from dpfl_jax.training.central_statement import renamed

# In guarantee files of earlier versions: former options, with the values that had a guarantee, and
# former names of keys.
_ONCE = {"sampling": "poisson", "denominator": "expected_batch"}
_ONCE_KEYS = {
    "max_items_per_subject": "max_records_per_subject",
    "order": "average",
    "unit": "protected",
}
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
    """Returns the guarantee of ``rounds`` rounds of a calibrated federation.

    Args:
      federation: the federation, with its noise.
      delta: in (0, 1).
      rounds: number of rounds that were run.
      caveats: caveats to add.
      num_subjects: number of subjects in all silos together; None: the fewest that the silos' sizes
        allow.

    Examples:
      >>> from dpfl_jax import federation as fed
      >>> facts = fed.SiloFacts(num_records=500, num_subjects=200)
      >>> mechanism = fed.local_item(sampling_prob=0.1)
      >>> silo = fed.SiloPlan(mechanism, facts, local_steps=1, noise_multiplier=1.0)
      >>> silos = fed.Federation((silo, silo), rounds=10, max_silos_per_subject=1)
      >>> guarantee = fed.federated_guarantee(silos, delta=1e-5, rounds=10)
      >>> guarantee.unit, guarantee.trust
      ('record', 'silo-local')
    """
    mechanism, unit = federation.mechanism, federation.mechanism.privacy_unit
    reach, silos = federation.max_silos_per_subject, len(federation.silos)
    cap = max(p.mechanism.participation.max_records_per_subject for p in federation.silos)
    members = federation.members
    sigmas = sorted(plan.sigma for plan in members)
    steps = sorted(plan.local_steps for plan in members)
    probs = sorted(p.mechanism.participation.sampling_prob_of(p.facts) for p in members)
    epsilon = federated_epsilon(federation, delta, rounds)
    assumptions: tuple[str, ...] = ()
    if not mechanism.private:
        caveats = ("this run is not private: it is a baseline", *caveats)
    else:
        cell = federation.silos[0].noised_sums(rounds, unit).cell
        assumptions = (*cell.assumptions, *ASSUMPTIONS)
        units = num_subjects or federation.least_subjects
        if unit == "subject":
            assumptions = (
                f"no subject has records in more than {reach} of the {silos} silos "
                "(no silo can check this alone; where all silos are simulated in one place it was "
                "checked)",
                f"no subject has more than {cap} records in a silo (the silo enforces it by a rule "
                "that looks at one subject at a time)",
                *assumptions,
            )
        else:
            units = sum(plan.facts.num_records for plan in federation.silos)
            subject = subject_epsilon(federation, delta, rounds)
            caveats = (
                f"it protects single records: for a subject of up to {cap} records in each of up "
                f"to {reach} silos the same run has epsilon {rounded_up(subject, 4)}",
                "a record is one of those in a silo after the spread over silos and the cap: in "
                "the data before, a record inserted between others of its subject can move those "
                "too",
                *caveats,
            )
        caveats = (*accounting.delta_caveats(delta, units, f"{unit}s"), *caveats)
        # How often noise is added to a unit's data: at every local step of each of its silos.
        summed = rounds * steps[-1] * (1 if unit == "record" else reach)
        assumptions += accounting.noise_assumptions(
            mechanism.noise.arithmetic, epsilon, delta, summed
        )
    cohort = "all silos"
    if federation.cohort is not None:
        cohort = federation.cohort.describe(f"{silos} silos", "silo")
    composed = "one silo (a record is in one)" if unit == "record" else f"at most {reach} silos"
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
        noise_multiplier=sigmas[0],
        steps=rounds * steps[-1],
        accountant=f"PLD; each silo's events composed over {composed}"
        if mechanism.private
        else "none",
        sampling=f"{mechanism.kind}: in each of {len(members)} silos Poisson sampling of "
        f"{mechanism.participation.drawn} with probability {_between(probs, '.4g')}, "
        f"{_between(steps, '')} local steps in each of {rounds} rounds of {cohort}; noise "
        f"multiplier {_between(sigmas, '.5g')}, added inside the silo at every step",
        assumptions=assumptions,
        caveats=caveats,
        status="upper bound" if math.isfinite(epsilon) else "none",
        released="every update that a silo sends and every global model",
    )


def _between(values: list[Any], digits: str) -> str:
    """Sorted numbers in words: the one number if all are equal, else the least and the largest."""
    low, high = format(values[0], digits), format(values[-1], digits)
    return low if values[0] == values[-1] else f"{low} to {high}"


def federated_statement(
    federation: Federation, rounds: int, num_subjects: int, guarantee: accounting.Guarantee
) -> Statement:
    """Returns the statement of ``rounds`` rounds of a federation, for guarantee.json.

    Args:
      federation: the federation, with its noise.
      rounds: number of rounds that are accounted.
      num_subjects: number of subjects in all silos together.
      guarantee: the guarantee of these rounds.
    """
    common, cohort = federation.silos[0].to_section(), federation.cohort

    def row(plan: SiloPlan) -> dict[str, Any]:
        section = plan.to_section()
        differs = {name: value for name, value in section.items() if value != common[name]}
        return {
            **dataclasses.asdict(plan.facts),
            "local_steps": plan.local_steps,
            **({"mechanism": differs} if differs else {}),
        }

    basis = {
        "system": "federated",
        "mechanism": common,
        "silos": [row(plan) for plan in federation.silos],
        "rounds": rounds,
        "max_silos_per_subject": federation.max_silos_per_subject,
        "silos_per_round": cohort.size if isinstance(cohort, FixedSize) else None,
        "participation_prob": cohort.sampling_prob if isinstance(cohort, Poisson) else None,
        "num_subjects": num_subjects,
        "delta": guarantee.delta,
    }
    return Statement.of(
        guarantee, basis, worst_cases(federation, rounds) if guarantee.private else []
    )


def restate(basis: dict[str, Any]) -> Statement:
    """Returns the statement of a federated run with this basis, for ``dpfl verify``.

    Raises:
      BadInputError: the basis does not describe a federated run.
    """

    def plan(row: dict[str, Any]) -> SiloPlan:
        mechanism, sigma = parse_known({**basis["mechanism"], **row.get("mechanism", {})})
        facts = SiloFacts(whole_number(row, "num_records"), whole_number(row, "num_subjects"))
        subjects, cap = facts.num_subjects, mechanism.participation.max_records_per_subject
        if not subjects <= facts.num_records <= cap * subjects:
            raise BadInputError(
                f"a silo of {subjects} subjects has {subjects} to {cap * subjects} records under "
                f"max_records_per_subject={cap}, but the file says {facts.num_records}"
            )
        steps = whole_number(row, "local_steps", 1)
        return SiloPlan(mechanism, facts, steps, noise_multiplier=sigma)

    silos = tuple(plan(row) for row in basis["silos"])
    cohort: Cohort | None = None
    if basis["silos_per_round"] is not None:
        cohort = FixedSize(basis["silos_per_round"])
    elif basis["participation_prob"] is not None:
        cohort = Poisson(basis["participation_prob"])
    rounds, delta = whole_number(basis, "rounds"), basis["delta"]
    reach = whole_number(basis, "max_silos_per_subject", 1)
    federation = Federation(silos, rounds, reach, cohort)
    subjects = whole_number(basis, "num_subjects", federation.least_subjects)
    guarantee = federated_guarantee(federation, delta, rounds, num_subjects=subjects)
    public = of_the_mechanism(federation.mechanism.bounds, f"{len(silos)} silos")
    guarantee = dataclasses.replace(guarantee, public_inputs=public)
    made = federated_statement(federation, rounds, subjects, guarantee)
    return as_written(made, basis)


def as_written(made: Statement, basis: dict[str, Any]) -> Statement:
    """Returns a restatement in which mechanisms are written as in ``basis``, by any version."""
    section = basis["mechanism"]
    if not isinstance(section.get("noise"), str) and renamed(section, _ONCE_KEYS) == section:
        return made
    written = {**made.basis, "mechanism": section}
    if isinstance(basis.get("silos"), list):
        rows = zip(made.basis["silos"], basis["silos"], strict=True)
        written["silos"] = [
            {**now, **({"mechanism": row["mechanism"]} if "mechanism" in row else {})}
            for now, row in rows
        ]
    return made.model_copy(update={"basis": written})


def parse_known(section: dict[str, Any]) -> tuple[SiloMechanism, float | None]:
    """Returns the mechanism and noise multiplier of a guarantee file, by any version.

    The first version wrote ``noise`` for ``arithmetic``.

    Args:
      section: section of the mechanism, with its noise multiplier.

    Raises:
      BadInputError: no mechanism has this section.
    """
    section = renamed(section, _ONCE_KEYS)
    if isinstance(section.get("noise"), str):
        section = {k: v for k, v in section.items() if k not in _ONCE or v != _ONCE[k]}
        section["arithmetic"] = section.pop("noise")
    bare = {name: value for name, value in section.items() if name != "noise_multiplier"}
    mechanism: SiloMechanism = SILOS.parse_known(bare)
    return mechanism, section.get("noise_multiplier")
