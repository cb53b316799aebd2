"""Events that dp-accounting has no name for; everything else is one of its own ``DpEvent`` classes.

Each is a frozen ``attrs`` class, as dp-accounting's are, so that events nest, compare and print.
"""

from __future__ import annotations

import attr
import dp_accounting


@attr.s(frozen=True, slots=True, auto_attribs=True)
class TwoStageSampledDpEvent(dp_accounting.DpEvent):
    """A silo takes part in a round with a probability; if it does, it runs several local steps.

    Whether it took part is visible to the adversary. Liu et al. 2024 (rPDP-FL), Lemma 2.

    Attributes:
      participation_probability: lambda, probability that the silo takes part in the round.
      event: one local step.
      local_steps: tau, local steps in a round.
    """

    participation_probability: float
    event: dp_accounting.DpEvent
    local_steps: int


@attr.s(frozen=True, slots=True, auto_attribs=True)
class FixedSizeGaussianDpEvent(dp_accounting.DpEvent):
    """A Gaussian sum over a uniformly random batch of fixed size, without replacement.

    Defined under replace-one adjacency only (the size of the data set is public).

    Attributes:
      dataset_size: units in the data set.
      batch_size: units in every batch.
      noise_multiplier: standard deviation over the clip norm C (not over the sensitivity 2C).
    """

    dataset_size: int
    batch_size: int
    noise_multiplier: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class AllocatedDpEvent(dp_accounting.DpEvent):
    """Gaussian sums in one of which, drawn uniformly, a unit takes part; add-or-remove.

    Attributes:
      event: of a step in which the unit takes part: a Gaussian.
      steps: t, among which the unit's is drawn.
      taken: r, the first of them that have been taken.
    """

    event: dp_accounting.DpEvent
    steps: int
    taken: int


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ApproximateDpEvent(dp_accounting.DpEvent):
    """Any step of which only (epsilon, delta)-DP is known; composes optimally (Kairouz et al.)."""

    epsilon: float
    delta: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class OneOfDpEvent(dp_accounting.DpEvent):
    """One of several, drawn without a look at the data, or another for each kind of unit.

    Attributes:
      events: what each does to a unit; a tuple, so that events are hashable.
    """

    events: tuple[dp_accounting.DpEvent, ...] = attr.ib(
        converter=tuple, validator=attr.validators.min_len(1)
    )


@attr.s(frozen=True, slots=True, auto_attribs=True)
class FilteredDpEvent(dp_accounting.DpEvent):
    """Steps of which each unit takes part in those alone that its own Renyi budget pays for.

    Feldman and Zrnic 2021: at this order, and at no larger one, a unit's divergence is at most that
    of ``event``, whatever the steps were and however many.

    Attributes:
      order: above 1.
      event: what costs a whole budget.
    """

    order: float
    event: dp_accounting.DpEvent
