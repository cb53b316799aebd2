"""What central training states in guarantee.json, and the same again from the file."""

from __future__ import annotations

import dataclasses
from typing import Any

from dpfl_jax.accounting import Guarantee
from dpfl_jax.accounting.statement import Statement, whole_number
from dpfl_jax.mechanisms import Mechanism, Population
from dpfl_jax.mechanisms.presets import is_earlier, parse_known
from dpfl_jax.run.public_inputs import of_the_mechanism


def central_statement(
    mechanism: Mechanism, population: Population, steps: int, guarantee: Guarantee
) -> Statement:
    """States what ``steps`` steps guarantee.

    Args:
      mechanism: with its noise.
      population: the public numbers of the data.
      steps: accounted.
      guarantee: of these.
    """
    basis = {
        "system": "central",
        "mechanism": mechanism.to_section(),
        "population": population.to_json(),
        "steps": steps,
        "delta": guarantee.delta,
    }
    return Statement.of(guarantee, basis, [[mechanism.event(population, steps)]])


def restate(basis: dict[str, Any]) -> Statement:
    """What a run with this basis would state.

    Raises:
      BadInputError: no mechanism has it.
    """
    mechanism = parse_known(basis["mechanism"])
    population, steps = Population(**basis["population"]), whole_number(basis, "steps")
    mechanism.check_population(population)
    guarantee = dataclasses.replace(
        mechanism.guarantee(population, steps, basis["delta"]),
        public_inputs=of_the_mechanism(mechanism.bounds, population.description),
    )
    made = central_statement(mechanism, population, steps, guarantee)
    if not is_earlier(basis["mechanism"]):
        return made
    return made.model_copy(update={"basis": {**made.basis, "mechanism": basis["mechanism"]}})
