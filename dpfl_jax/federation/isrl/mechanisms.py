"""The algorithms of silos that trust no server, as mechanisms of a configuration.

What a theorem can give (rounds, steps, batches, smoothing, noise) may be left out; what could only
be known from private data is an input with a stated default, and the report lists where every
number came from.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dpfl_jax.accounting import NoiseLaw
from dpfl_jax.config.execution import Positive
from dpfl_jax.config.kinds import ISRL, Named
from dpfl_jax.errors import BadInputError

_Positive = Annotated[float, Field(gt=0)]
_Count = Annotated[int, Field(gt=0)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class IsrlMechanism(Named, abc.ABC, kinds=ISRL):
    """What the algorithms take; what is left out follows from a theorem.

    Attributes:
      sampling: poisson, full, or disjoint (one-pass).
      arithmetic: of the noise, exact (drawn and added in integers) or float (float32).
      batch_fraction: K_i / n_i, the same in all silos.
      clip_norm: of a record's gradient; default the loss's own bound.
      most_rounds: a silo that has answered so often stays silent; its noise is for so many rounds.
      distance: D_0 >= |w_0 - w*|; default the radius.
      phi: standard deviation of a record's gradient in its silo; default the clip norm.
      upsilon: heterogeneity of the silos' gradients; default the clip norm if some silos are
        absent, else it does not matter.
      gap: Delta >= F(w_0) - F*, for strongly convex losses; default clip norm times D.
    """

    sampling: Literal["poisson", "full", "disjoint"] = "poisson"
    arithmetic: NoiseLaw = "exact"
    batch_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    clip_norm: Positive | None = None
    most_rounds: _Count | None = None
    distance: _Positive | None = None
    phi: _Positive | None = None
    upsilon: Annotated[float, Field(ge=0)] | None = None
    gap: _Positive | None = None

    def __post_init__(self) -> None:
        """Checks the types, and that full batches have no fraction."""
        super().__post_init__()
        if self.sampling == "full" and self.batch_fraction not in (None, 1.0):
            raise BadInputError(
                "mechanism.sampling=full takes all records: remove mechanism.batch_fraction"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinibatchSGD(IsrlMechanism):
    """Noisy minibatch SGD (``minibatch_sgd``).

    Attributes:
      step_size: default by theorem.
      average_last: the mean of so many last iterates is returned; default by theorem.
    """

    kind: ClassVar[str] = "minibatch_sgd"

    step_size: _Positive | None = None
    average_last: _Count | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerated(IsrlMechanism):
    """Accelerated noisy minibatch SGD (``accelerated``), all numbers by theorem."""

    kind: ClassVar[str] = "accelerated"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiStage(IsrlMechanism):
    """Multi-stage accelerated SGD (``multi_stage``); needs ``model.regularization``.

    Attributes:
      stage_constant: scales the 128/3 of the stage lengths, which is very conservative.
    """

    kind: ClassVar[str] = "multi_stage"

    stage_constant: _Positive = 1.0
