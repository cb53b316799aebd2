"""What a silo's operators have signed off: nothing beyond it is computed for anybody."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from pydantic import Field

from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.config.base import Section
from dpfl_jax.errors import BadInputError

# Of a round's records: arrays have one shape for all silos, by what the plan says of others, too.
_MOST_BYTES = 4 << 30


class RefusedError(BadInputError):
    """A silo does not do what it was asked to do.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.flower import RefusedError
      >>> issubclass(RefusedError, dpfl.BadInputError)
      True
    """


def check_memory(arrays: float) -> None:
    """Raises RefusedError where a plan's arrays would take too many bytes."""
    if arrays > _MOST_BYTES:
        raise RefusedError(
            f"with the sizes that the plan says silos have, a round would take {arrays:.3g} bytes "
            f"of memory here, but {_MOST_BYTES:.3g} is the most: take smaller batches or fewer "
            "local steps"
        )


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a plan asks of a silo, as the silo itself computes it.

    Attributes:
      mechanism: its kind.
      rounds: R.
      noise_multiplier: least of the silo's steps.
      epsilon: of one of the silo's people (``Policy.unit``), at the policy's delta.
      unit: whom that is for.
    """

    mechanism: str
    rounds: int
    noise_multiplier: float
    epsilon: float
    unit: str


class Policy(Section):
    """Limits; each is checked against what the silo itself computes from the plan.

    Attributes:
      epsilon: largest of one run, for one of the silo's people. Personal budgets (rPDP) hold per
        run, too: a person's add up over runs, and total_epsilon counts each run's epsilon alone.
      delta: at which epsilon is computed.
      unit: who these people are: subject (with all records here and in other silos), or record.
      total_epsilon: largest of all runs together, by the silo's ledger, also if a run is chosen by
        what earlier ones showed. The first run fixes it, and a larger one later is what holds for
        all. null: no limit but an earlier one, so that a server may begin one run after the other.
      least_noise_multiplier: of a step.
      most_rounds: of a run.
      mechanisms: kinds that are allowed (mechanism.kind).

    Examples:
      >>> from dpfl_jax.flower import Policy
      >>> policy = Policy(
      ...     epsilon=4.0, delta=1e-5, total_epsilon=8.0,
      ...     least_noise_multiplier=0.5, most_rounds=100, mechanisms=("hi_grad_avg",),
      ... )
      >>> policy.unit
      'subject'
    """

    epsilon: float = Field(gt=0, lt=math.inf)
    delta: float = Field(gt=0, lt=1)
    unit: Literal["subject", "record"] = "subject"
    total_epsilon: float | None = Field(gt=0)
    least_noise_multiplier: float = Field(gt=0)
    most_rounds: int = Field(gt=0)
    mechanisms: tuple[str, ...] = Field(min_length=1)

    def check(self, asked: Asked) -> None:
        """Raises RefusedError, in one sentence, unless all of it is allowed."""
        if asked.mechanism not in self.mechanisms:
            raise RefusedError(
                f"the plan is of mechanism {asked.mechanism}, but policy.mechanisms allows "
                f"{', '.join(self.mechanisms)}"
            )
        if asked.rounds > self.most_rounds:
            raise RefusedError(
                f"the plan has {asked.rounds} rounds, but policy.most_rounds is {self.most_rounds}"
            )
        if not asked.noise_multiplier >= self.least_noise_multiplier:
            raise RefusedError(
                f"the plan has noise multiplier {asked.noise_multiplier:.6g}, but "
                f"policy.least_noise_multiplier is {self.least_noise_multiplier:g}"
            )
        if not asked.epsilon <= self.epsilon:
            known = f"epsilon {rounded_up(asked.epsilon, 6)}"
            shown = "no guarantee" if math.isinf(asked.epsilon) else known
            raise RefusedError(
                f"the plan gives a {asked.unit} {shown} at delta {self.delta:g}, but "
                f"policy.epsilon is {self.epsilon:g}"
            )
