"""What runs with silos state in guarantee.json, and the same again from the file.

``federated``: the kind of mechanism, and of every silo what differs, its sizes and local steps.
``personal``: what all records share, and the rates of declared budgets; of no record its own.
``isrl``: noise, batch, size and rounds of every kind of silo.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, get_args

from dpfl_jax.accounting import Guarantee, NoiseLaw, events
from dpfl_jax.accounting.rates import TwoStage
from dpfl_jax.accounting.statement import Statement, whole_number
from dpfl_jax.config.kinds import SILOS
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.accountant import worst_cases
from dpfl_jax.federation.federation import Cohort, Federation, SiloPlan
from dpfl_jax.federation.guarantee import federated_guarantee
from dpfl_jax.federation.isrl.privacy import (
    Budget,
    Sampling,
    SiloNoise,
    at_one_delta,
    worst_guarantee,
)
from dpfl_jax.federation.mechanisms import PersonalRecords, SiloFacts, SiloMechanism
from dpfl_jax.federation.personal.personalise import Published, published_guarantee
from dpfl_jax.run.public_inputs import of_the_mechanism
from dpfl_jax.sampling import FixedSize, Poisson
from dpfl_jax.training.central_statement import renamed

# Options that there were, with the values that gave a guarantee: files say them.
_ONCE = {"sampling": "poisson", "denominator": "expected_batch"}
_ONCE_KEYS = {
    "max_items_per_subject": "max_records_per_subject",
    "order": "average",
    "unit": "protected",
}
_ONCE_OF_MESSAGES = {"arm": ("sound", "paper_closed_form")}


def is_earlier(section: dict[str, Any]) -> bool:
    """Whether an earlier version of this package wrote a section."""
    return isinstance(section.get("noise"), str) or renamed(section, _ONCE_KEYS) != section


def parse_known(section: dict[str, Any]) -> tuple[SiloMechanism, float | None]:
    """What somebody else says a silo did, with an earlier version of this package too.

    In the first of these ``arithmetic`` was ``noise``.

    Args:
      section: of the mechanism, with its noise multiplier.

    Raises:
      BadInputError: no mechanism has it.
    """
    section = renamed(section, _ONCE_KEYS)
    if isinstance(section.get("noise"), str):
        section = {k: v for k, v in section.items() if k not in _ONCE or v != _ONCE[k]}
        section["arithmetic"] = section.pop("noise")
    bare = {name: value for name, value in section.items() if name != "noise_multiplier"}
    mechanism: SiloMechanism = SILOS.parse_known(bare)
    return mechanism, section.get("noise_multiplier")


def federated_statement(
    federation: Federation, rounds: int, num_subjects: int, guarantee: Guarantee
) -> Statement:
    """States what ``rounds`` rounds of a federation guarantee.

    Args:
      federation: with its noise.
      rounds: accounted.
      num_subjects: in all silos together.
      guarantee: of these.
    """
    common, cohort = federation.silos[0].to_section(), federation.cohort
    basis = {
        "system": "federated",
        "mechanism": common,
        "silos": [_row(plan, common) for plan in federation.silos],
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


def _row(plan: SiloPlan, common: dict[str, Any]) -> dict[str, Any]:
    own = plan.to_section()
    differs = {name: value for name, value in own.items() if value != common[name]}
    return {
        **dataclasses.asdict(plan.facts),
        "local_steps": plan.local_steps,
        **({"mechanism": differs} if differs else {}),
    }


def _federated(basis: dict[str, Any]) -> Statement:
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
    known = of_the_mechanism(federation.mechanism.bounds, f"{len(silos)} silos")
    guarantee = dataclasses.replace(guarantee, public_inputs=known)
    return federated_statement(federation, rounds, subjects, guarantee)


def personal_statement(
    mechanism: SiloMechanism, public: Published, rounds: int, guarantee: Guarantee
) -> Statement:
    """States what ``rounds`` rounds guarantee: to all records, and to those of declared budgets.

    Args:
      mechanism: of any silo.
      public: what all records share.
      rounds: accounted.
      guarantee: of these.
    """
    setting, drawn = public.setting, mechanism.participation
    assert isinstance(drawn, PersonalRecords)
    alike = dataclasses.replace(drawn, expected_batch=None)  # silos differ in it
    rows, groups = [], []
    for budget, rate, stay in public.groups:
        stay = min(stay, rounds)
        rows.append([budget if math.isfinite(budget) else "inf", rate, stay])
        event = setting.event(rate, stay) if rate > 0 else events.repeated(setting.event(1.0), 0)
        groups.append((f"records of budget {budget:g}", event))
    basis = {
        "system": "personal",
        "mechanism": {
            **dataclasses.replace(mechanism, participation=alike).to_section(),
            "noise_multiplier": setting.noise_multiplier,
        },
        "setting": dataclasses.asdict(setting),
        "policy": public.policy,
        "num_records": public.records,
        "rounds": rounds,
        "groups_budget_rate_rounds": rows,
    }
    return Statement.of(guarantee, basis, [[setting.event(1.0, rounds)]], groups)


def _personal(basis: dict[str, Any]) -> Statement:
    mechanism, sigma = parse_known(basis["mechanism"])
    setting = TwoStage(**{**basis["setting"], "noise_multiplier": sigma})
    public = Published(
        setting,
        basis["policy"],
        whole_number(basis, "num_records", 1),
        tuple((float(b), rate, stay) for b, rate, stay in basis["groups_budget_rate_rounds"]),
        mechanism.noise.arithmetic,
    )
    rounds = whole_number(basis, "rounds", most=setting.rounds)
    if not all(0 <= rate <= 1 and 0 <= stay <= rounds for _, rate, stay in public.groups):
        raise BadInputError(
            "a rate of groups_budget_rate_rounds is no probability, or stays longer"
        )
    guarantee = dataclasses.replace(
        published_guarantee(public, rounds), public_inputs=of_the_mechanism(mechanism.bounds)
    )
    made = personal_statement(mechanism, public, rounds, guarantee)
    for (budget, _, _), group in zip(public.groups, made.groups):
        if group.epsilon > budget * 1.001:  # two discretisations of a long run differ by less
            raise BadInputError(f"{group.of} would spend {group.epsilon:.6g}")
    return made


def isrl_statement(noise: Sequence[SiloNoise], guarantee: Guarantee) -> Statement:
    """States what the messages of silos guarantee.

    Args:
      noise: of every silo, in the rounds accounted; none without privacy.
      guarantee: of these.
    """
    kinds = [dataclasses.asdict(z) for z in dict.fromkeys(noise)]
    basis = {"system": "isrl", "kinds_of_silos": kinds}
    every = list(dict.fromkeys(z.event for z in at_one_delta(noise))) if guarantee.private else []
    return Statement.of(guarantee, basis, [every])


def _isrl(basis: dict[str, Any]) -> Statement:
    noise, earlier = [], []
    for given in basis["kinds_of_silos"]:
        earlier.append({k: v for k, v in given.items() if v in _ONCE_OF_MESSAGES.get(k, ())})
        kind = {k: v for k, v in given.items() if k not in earlier[-1]}
        size, _ = whole_number(kind, "silo_size", 1), whole_number(kind, "rounds", 1)
        if not 0 < kind["batch"] <= size or kind["noise_multiplier"] <= 0:
            raise BadInputError(f"no silo has this batch and noise: {kind}")
        if unknown := kind.keys() - {field.name for field in dataclasses.fields(SiloNoise)}:
            raise BadInputError(f"no silo has {', '.join(sorted(unknown))}: {kind}")
        if kind["sampling"] not in get_args(Sampling):
            raise BadInputError(f"no silo has this sampling: {kind}")
        if kind.get("noise", "exact") not in get_args(NoiseLaw):
            raise BadInputError(f"no silo has this noise: {kind}")
        one = SiloNoise(**{**kind, "budget": Budget(**kind["budget"])})
        if one.epsilon > one.budget.epsilon * (1 + 1e-6):
            raise BadInputError(
                f"silos of {size} records would spend {one.epsilon:.7g} at delta "
                f"{one.budget.delta:g}, but kinds_of_silos says a budget of {one.budget.epsilon:g}"
            )
        noise.append(one)
    if not noise:
        raise BadInputError("kinds_of_silos is empty")
    made = isrl_statement(noise, worst_guarantee(noise))
    for each, old in zip(made.basis["kinds_of_silos"], earlier):
        each |= old
    return made


def restate(basis: dict[str, Any]) -> Statement:
    """What a run with this basis would state.

    Raises:
      BadInputError: no run has it.
    """
    made = {"federated": _federated, "personal": _personal, "isrl": _isrl}[basis["system"]](basis)
    if basis["system"] == "isrl" or not is_earlier(basis["mechanism"]):
        return made
    told = {**made.basis, "mechanism": basis["mechanism"]}
    if "silos" in told:
        rows = zip(told["silos"], basis["silos"], strict=True)
        told["silos"] = [
            {**now, **({"mechanism": row["mechanism"]} if "mechanism" in row else {})}
            for now, row in rows
        ]
    return made.model_copy(update={"basis": told})
