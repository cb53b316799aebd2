"""What a planner weighs: presets, how each spends a compute budget, and what is said of it.

A new preset is weighed once it has an entry in ``CANDIDATES``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from dpfl_jax.config.kinds import CENTRAL, options
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.mechanism import Mechanism

# What mechanisms of all kinds take.
_USER_UPDATE = ("user_learning_rate", "user_batch_size", "user_epochs")
_COMMON = ("clip_norm", "clipping", "clip", "arithmetic", *_USER_UPDATE)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A preset as a way to spend a compute budget.

    Attributes:
      name: for people.
      is_plain: whether it is Poisson sampling with independent noise: scaling laws of the loss are
        fitted to these, and questions (``dpfl plan --ask``) are about them. There is one of
        examples and one of users.
      bands: numbers of bands that are tried; () if it has no bands, or its default ones.
      is_slow: whether a calibration takes seconds.
      sentence: of a winner; fields are ``period`` (steps between two of a unit), ``bands``,
        ``noise_multiplier`` and ``error`` (of prefix sums, relative to independent noise).
    """

    name: str
    is_plain: bool = False
    bands: tuple[int, ...] = ()
    is_slow: bool = False
    sentence: str = ""


_IN_TURNS = (
    "Its users take part in every {period}th step, and nothing is gained by sampling: a noise "
    "multiplier of {noise_multiplier:.3g}, of which all but {error:.0%} cancels in sums of "
    "gradients"
)
CANDIDATES = {
    "els": Candidate("ELS", is_plain=True),
    "uls": Candidate("ULS", is_plain=True),
    "bandmf": Candidate(
        "BandMF",
        bands=(2, 4, 8, 16, 32),  # more are seldom worth 8 (b - 1) bytes a trained parameter
        sentence="Its {bands} groups of users take turns: that needs a noise multiplier of "
        "{noise_multiplier:.3g}, but later steps take back all but {error:.0%} of what independent "
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
# Presets whose events have Renyi divergences, by which the best of several runs is accounted.
RENYI_KINDS = "uls, els or bandmf"


@functools.cache
def draws_examples(kind: str) -> bool:
    """Whether units of a preset are single examples."""
    return "batch_size" in options(CENTRAL[kind])


def plain(examples: bool) -> str:
    """The plain candidate of examples, or of users."""
    found = (kind for kind, candidate in CANDIDATES.items() if candidate.is_plain)
    return next(kind for kind in found if draws_examples(kind) == examples)


def at_budget(
    chosen: Mechanism | None, kind: str, budget: float, group_size: int, **more: Any
) -> Mechanism:
    """A mechanism at a compute budget.

    Args:
      chosen: what all mechanisms have is taken from it; of its own kind all else, too.
      kind: of the one that is made.
      budget: expected gradient evaluations a step.
      group_size: for kinds that have one.
      **more: options of its own; those that it does not have are left out.

    Raises:
      BadInputError: ``chosen`` is no preset, or the sizes do not fit.
    """
    known, section = options(CENTRAL[kind]), {} if chosen is None else chosen.to_section()
    if chosen is not None and "kind" not in section:
        raise BadInputError(
            "the mechanism is spelled out part by part, of which no other size can be made: name a "
            "preset (mechanism.kind)"
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
