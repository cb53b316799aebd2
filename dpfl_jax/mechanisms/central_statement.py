"""What central training states in guarantee.json, once more from the file."""

from __future__ import annotations

import dataclasses
from typing import Any

from dpfl_jax.accounting.statement import Statement
from dpfl_jax.mechanisms.presets import is_earlier, parse_calibrated
from dpfl_jax.run.public_inputs import of_the_mechanism


def restate(basis: dict[str, Any]) -> Statement:
    """What a run with this basis would state.

    Raises:
      BadInputError: no mechanism has it.
    """
    made = parse_calibrated(basis, basis["delta"])
    known = of_the_mechanism(made.mechanism.bounds, made.population.description)
    stated = made.statement(dataclasses.replace(made.guarantee(), public_inputs=known))
    if not is_earlier(basis["mechanism"]):
        return stated
    return stated.model_copy(update={"basis": {**stated.basis, "mechanism": basis["mechanism"]}})
