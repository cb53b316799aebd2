"""The presets that a planner compares, and how each spends a compute budget.

A new preset is compared once it has an entry in ``CANDIDATES``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from dpfl_jax.config.kinds import CENTRAL, options
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.mechanism import Mechanism
from dpfl_jax.mechanisms.participation import Population

# Options of presets of all kinds.
_USER_UPDATE = ("user_learning_rate", "user_batch_size", "user_epochs")
_ENOUGH = 1.1  # more users do not pay if they lower the noise by less than a tenth
_COMMON = ("clip_norm", "clipping", "clip", "arithmetic", *_USER_UPDATE)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A preset as a way to spend a compute budget.

    Attributes:
      name: name to show.
      is_plain: whether it is Poisson sampling with independent noise. Scaling laws are fitted to
        plain candidates, and questions (``dpfl plan --ask``) are about them. One plain candidate
        draws examples, one draws users.
      bands: numbers of bands to try; () if it has no bands, or only its default number.
      is_slow: whether a calibration takes seconds.
      sentence: what to say if it wins. Its fields are ``period`` (steps between two steps of a
        unit), ``bands``, ``noise_multiplier`` and ``error`` (error of prefix sums, relative to
        independent noise).
    """

    name: str
    is_plain: bool = False
    bands: tuple[int, ...] = ()
    is_slow: bool = False
    sentence: str = ""


_IN_TURNS = (
    "Its users take part in every {period}th step, without amplification by sampling. So it needs "
    "a noise multiplier of {noise_multiplier:.3g}, but all but {error:.0%} of this noise cancels "
    "in sums of gradients"
)
CANDIDATES = {
    "els": Candidate("ELS", is_plain=True),
    "uls": Candidate("ULS", is_plain=True),
    "bandmf": Candidate(
        "BandMF",
        bands=(2, 4, 8, 16, 32),  # more seldom pay for their 8 (b - 1) bytes a trained parameter
        sentence="Its {bands} groups of users take turns. So it needs a noise multiplier of "
        "{noise_multiplier:.3g}, but correlated noise leaves only {error:.0%} of what independent "
        "noise would leave in sums of gradients",
    ),
    "blt": Candidate("BLT", sentence=_IN_TURNS),
    "banded_inverse": Candidate("banded inverse", sentence=_IN_TURNS),
    "allocation": Candidate(
        "allocation",
        is_slow=True,
        sentence="Every user takes part in exactly one of every {period} steps",
    ),
}
# Presets whose events have Renyi divergences, which the accounting of private sweeps needs.
RENYI_KINDS = "uls, els or bandmf"


@functools.cache
def draws_examples(kind: str) -> bool:
    """Returns whether the units of a preset are single examples."""
    return "batch_size" in options(CENTRAL[kind])


def plain(examples: bool) -> str:
    """Returns the kind of the plain candidate that draws examples, or that draws users."""
    kinds = (kind for kind, candidate in CANDIDATES.items() if candidate.is_plain)
    return next(kind for kind in kinds if draws_examples(kind) == examples)


def at_budget(
    chosen: Mechanism | None, kind: str, budget: float, group_size: int, **more: Any
) -> Mechanism:
    """Returns a mechanism of a kind that spends a compute budget.

    Args:
      chosen: mechanism to copy options from: those that all kinds have, and if it is of the same
        kind, all but sizes. None: the defaults.
      kind: kind of the returned mechanism.
      budget: expected gradient evaluations per step.
      group_size: group size, for kinds that have one.
      **more: further options; those that the kind does not have are ignored.

    Raises:
      BadInputError: ``chosen`` is no preset, or the sizes do not fit.
    """
    known, section = options(CENTRAL[kind]), {} if chosen is None else chosen.to_section()
    if chosen is not None and "kind" not in section:
        raise BadInputError(
            "the mechanism is given part by part, so that it cannot be made in other sizes: name "
            "a preset (mechanism.kind)"
        )
    sizes = {
        "group_size": group_size,
        "batch_size": budget,
        "cohort_size": budget / group_size,
    }
    kept = known if kind == section.get("kind") else _COMMON
    made = {name: section[name] for name in kept if name in section and name in known}
    made |= {name: value for name, value in (sizes | more).items() if name in known}
    mechanism: Mechanism = CENTRAL.parse({"kind": kind, **made})
    return mechanism


def sufficient_cohort(
    mechanism: Mechanism, users: Population, steps: int, most: int, **target: float | None
) -> int:
    """Returns the smallest cohort whose noise is within a tenth of the least, or the largest.

    The largest is ``most``, or half of the users if they are fewer.

    The noise on the mean gradient falls with the cohort: at first almost in proportion, and hardly
    any more once the noise multiplier grows as fast as the cohort. Where that is depends on the
    number of users, the steps and the guarantee.

    Args:
      mechanism: ULS with any cohort size.
      users: those who are trained on.
      steps: number of steps.
      most: largest cohort that the compute budget pays for.
      **target: epsilon and delta, or noise_multiplier, as in ``Mechanism.calibrate``.

    Returns:
      A power of two.
    """

    def noise(cohort: int) -> float:
        drawn = dataclasses.replace(mechanism.participation, cohort_size=cohort)  # type: ignore[call-arg]
        sized = dataclasses.replace(mechanism, participation=drawn)
        return float(sized.calibrate(users, steps, **target).noise_on_gradients[0])

    cohort = 2 ** int(math.log2(max(1, min(most, users.num_users // 2))))
    enough = _ENOUGH * noise(users.num_users)
    while cohort > 1 and noise(cohort // 2) <= enough:
        cohort //= 2
    return cohort
