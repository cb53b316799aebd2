"""Rebuilds what central training states from the guarantee.json that it wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dpfl_jax.accounting.statement import Statement, whole_number
from dpfl_jax.config.kinds import CENTRAL
from dpfl_jax.errors import BadInputError, probability
from dpfl_jax.mechanisms.calibrated import Calibrated
from dpfl_jax.mechanisms.mechanism import Mechanism
from dpfl_jax.mechanisms.participation import Population
from dpfl_jax.run.public_inputs import of_the_mechanism

# Earlier names of keys and kinds in files that were written with them.
_ONCE = {
    "gives": "update",
    "local_learning_rate": "user_learning_rate",
    "local_batch_size": "user_batch_size",
    "local_epochs": "user_epochs",
    "order": "renyi_order",
    "prob": "sampling_prob",
    "strategy": "column",
    "taken": "fractions",
}
_ONCE_KINDS = {"local_update": "user_update", "renyi_filter": "individual"}


def renamed(
    section: Any, keys: Mapping[str, str] = _ONCE, kinds: Mapping[str, str] = _ONCE_KINDS
) -> Any:
    """Returns a section, and the sections in it, with today's names of keys and kinds.

    Args:
      section: a section that somebody else wrote.
      keys: earlier names of keys -> today's.
      kinds: earlier names of kinds -> today's.

    Raises:
      BadInputError: a key occurs twice, under two names.
    """
    if not isinstance(section, dict):
        return section
    result = {keys.get(name, name): renamed(value, keys, kinds) for name, value in section.items()}
    if len(result) < len(section):
        raise BadInputError(f"the section has a key twice, under two names: {sorted(section)}")
    if isinstance(kind := result.get("kind"), str):
        result["kind"] = kinds.get(kind, kind)
    return result


def is_earlier(section: dict[str, Any]) -> bool:
    """Whether an earlier version of this package wrote a section."""
    return isinstance(section.get("noise"), str) or renamed(section) != section


def parse_calibrated(stated: dict[str, Any], delta: float) -> Calibrated:
    """Reads the mechanism of a statement, also of an earlier version of this package.

    In the first version the clipping ``flat`` was called ``standard``, ``arithmetic`` was
    ``noise``, ``cap`` was ``cohort_cap``, and the ``period`` of allocation, blt and banded_inverse
    was one over ``sampling_prob``.

    Args:
      stated: ``mechanism`` (with its noise multiplier), ``population`` and ``steps``.
      delta: delta of the guarantee.

    Raises:
      BadInputError: no mechanism has these settings.
    """
    section = renamed(stated["mechanism"])
    if isinstance(section.get("noise"), str):
        if today := {"arithmetic", "cap", "period"} & {*section}:
            raise BadInputError(
                f"the section has {', '.join(sorted(today))} and `noise`, of an earlier version"
            )
        kind, noise = section.get("kind"), section.pop("noise")
        if kind == "none":
            section = {"kind": kind, "batch_size": section.get("batch_size")}
        else:
            section["arithmetic"] = noise
        if section.get("clipping") == "standard":
            section["clipping"] = "flat"
        if "cohort_cap" in section:
            section["cap"] = section.pop("cohort_cap")
        if kind in ("allocation", "blt", "banded_inverse"):
            prob = section.pop("sampling_prob", None)
            if prob is not None:
                probability("sampling_prob", prob, zero=False)
                section["period"] = round(1.0 / prob)
    noise_multiplier = section.pop("noise_multiplier", None)
    mechanism: Mechanism = CENTRAL.parse_known(section)
    population = Population(**stated["population"])
    mechanism.participation.check_population(population)
    if mechanism.private and not isinstance(noise_multiplier, int | float):
        raise BadInputError("the section mechanism has no noise_multiplier: it guarantees nothing")
    sigma = float(noise_multiplier) if mechanism.private else 0.0
    return Calibrated(mechanism, sigma, population, whole_number(stated, "steps"), delta)


def restate(basis: dict[str, Any]) -> Statement:
    """Computes the statement of a run with this basis.

    Raises:
      BadInputError: no mechanism has these settings.
    """
    made = parse_calibrated(basis, basis["delta"])
    known = of_the_mechanism(made.mechanism.bounds, made.population.description)
    stated = made.statement(dataclasses.replace(made.guarantee(), public_inputs=known))
    if not is_earlier(basis["mechanism"]):
        return stated
    return stated.model_copy(update={"basis": {**stated.basis, "mechanism": basis["mechanism"]}})
