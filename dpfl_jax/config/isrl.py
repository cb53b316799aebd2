"""Sections of an ISRL-DP configuration: convex learning over silos that trust nobody else.

A configuration with an ``isrl`` section is one. What a theorem can give (rounds, steps, batches,
smoothing, noise) may be left out; what could only be known from private data is an input with a
stated default, and the report lists where every number came from.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import Field, model_validator

from dpfl_jax.config.base import NAME, EvaluatedTrain, LedgerSection, Positive, RunSection, Section
from dpfl_jax.config.execution import BlockExecution
from dpfl_jax.data import SourceConfig


@dataclasses.dataclass(frozen=True)
class IsrlDataConfig(SourceConfig):
    """Records and silos.

    Attributes:
      silos: N.
      partition: iid (at random), sorted (by label or target: as different as can be), natural (the
        data's own silos), or pairs (ten digits: an even and an odd one in a silo; 5 or 25 silos).
      test_fraction: of each silo, held out.
      public_fraction: where data.scale does not declare what brings numbers to order 1: this share
        of all records is declared public: they set the scale of features and target, and are
        neither trained on nor evaluated.
      max_norm: each record's features (with their constant) are scaled down to this norm.
      max_target: each record's target (regression, scaled) is clipped to this.
    """

    source: str = "digits"
    silos: Annotated[int, Field(gt=0)] = 5
    partition: Literal["iid", "sorted", "natural", "pairs"] = "iid"
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    public_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    max_norm: Annotated[float, Field(gt=0)] = 4.0
    max_target: Annotated[float, Field(gt=0)] = 3.0


class IsrlModelConfig(Section):
    """The loss of a linear model.

    Attributes:
      loss: logistic or hinge (two classes), softmax (classes), squared or absolute (a number).
        hinge and absolute are not smooth: their Moreau envelope is trained.
      regularization: mu of mu/2 |w|^2; its gradient depends on no record, the server adds it.
      radius: of the ball W about 0, half the diameter D of the theorems.
      smoothing: beta of the envelope; default by theorem.
    """

    loss: Literal["logistic", "hinge", "softmax", "squared", "absolute"] = "logistic"
    regularization: float = Field(0.0, ge=0)
    radius: Positive = 5.0
    smoothing: float | None = Field(None, gt=0)


class IsrlSection(Section):
    """The algorithm and its numbers; what is left out follows from a theorem.

    Attributes:
      algorithm: minibatch_sgd, accelerated, or multi_stage (needs model.regularization).
      sampling: poisson, full, or disjoint (one-pass).
      noise: exact (drawn and added in integers) or float (float32).
      rounds: R.
      batch_fraction: K_i / n_i, the same in all silos.
      clip_norm: of a record's gradient; default the loss's own bound.
      step_size: of minibatch_sgd.
      average_last: minibatch_sgd returns the mean of its last iterates; default by theorem.
      available: M, silos that answer in a round, or {m: probability}, the law of M_r; default all.
      most_rounds: a silo that has answered so often stays silent; its noise is for so many rounds.
      distance: D_0 >= |w_0 - w*|; default the radius.
      phi: standard deviation of a record's gradient in its silo; default the clip norm.
      upsilon: heterogeneity of the silos' gradients; default the clip norm if some silos are
        absent, else it does not matter.
      gap: Delta >= F(w_0) - F*, for multi_stage; default clip norm times D.
      stage_constant: scales the 128/3 of multi_stage, which is very conservative.
      silo_weights: p_i, summing to 1; default equal.
    """

    algorithm: Literal["minibatch_sgd", "accelerated", "multi_stage"] = "minibatch_sgd"
    sampling: Literal["poisson", "full", "disjoint"] = "poisson"
    noise: Literal["exact", "float"] = "exact"
    rounds: int | None = Field(None, gt=0)
    batch_fraction: float | None = Field(None, gt=0, le=1)
    clip_norm: Positive | None = None
    step_size: float | None = Field(None, gt=0)
    average_last: int | None = Field(None, gt=0)
    available: int | dict[int, float] | None = None
    most_rounds: int | None = Field(None, gt=0)
    distance: float | None = Field(None, gt=0)
    phi: float | None = Field(None, gt=0)
    upsilon: float | None = Field(None, ge=0)
    gap: float | None = Field(None, gt=0)
    stage_constant: float = Field(1.0, gt=0)
    silo_weights: tuple[float, ...] | None = None


class IsrlPrivacyConfig(LedgerSection):
    """What each silo grants each of its records, against everybody else; and a ledger.

    Attributes:
      epsilon: one number, one for each silo, or null for a baseline without privacy.
      delta: likewise; default 1 / n_i^2.
    """

    epsilon: float | tuple[float, ...] | None = 3.0
    delta: float | tuple[float, ...] | None = None


class IsrlTrainConfig(EvaluatedTrain):
    """How rounds run; see ``EvaluatedTrain``, too.

    Attributes:
      checkpoint_every: blocks between checkpoints.
      keep_checkpoints: how many are kept.
    """

    checkpoint_every: int = Field(2, gt=0)
    keep_checkpoints: int = Field(2, gt=0)


class IsrlEvalConfig(Section):
    """Held-out evaluation.

    Attributes:
      baseline: at the end, also train without privacy, with what theory gives then, and show its
        held-out losses beside the private ones. The guarantee does not cover them.
    """

    baseline: bool = False


class IsrlConfig(RunSection):
    """A whole ISRL-DP run; see ``RunSection``."""

    name: str = Field("isrl-run", pattern=NAME)
    data: IsrlDataConfig = IsrlDataConfig()
    model: IsrlModelConfig = IsrlModelConfig()
    isrl: IsrlSection
    privacy: IsrlPrivacyConfig = IsrlPrivacyConfig()
    train: IsrlTrainConfig = IsrlTrainConfig()
    execution: BlockExecution = BlockExecution()
    eval: IsrlEvalConfig = IsrlEvalConfig()

    @model_validator(mode="after")
    def _check(self) -> IsrlConfig:
        section, model, silos = self.isrl, self.model, self.data.silos
        if section.algorithm == "multi_stage" and not model.regularization:
            raise ValueError(
                "isrl.algorithm=multi_stage needs a strongly convex loss: set "
                "model.regularization above 0, or use accelerated"
            )
        if section.algorithm != "minibatch_sgd":
            for name in ("step_size", "average_last"):
                if getattr(section, name) is not None:
                    raise ValueError(
                        f"isrl.{name} is an option of minibatch_sgd, not of {section.algorithm}: "
                        "remove it"
                    )
        if section.sampling == "full" and section.batch_fraction not in (None, 1.0):
            raise ValueError("isrl.sampling=full takes all records: remove isrl.batch_fraction")
        if self.model.smoothing is not None and model.loss not in ("hinge", "absolute"):
            raise ValueError("model.smoothing is for the losses hinge and absolute: remove it")
        for name, value in (
            ("privacy.epsilon", self.privacy.epsilon),
            ("privacy.delta", self.privacy.delta),
            ("isrl.silo_weights", section.silo_weights),
        ):
            if isinstance(value, tuple) and len(value) != silos:
                raise ValueError(
                    f"{name} has {len(value)} numbers for {silos} silos: give one for each"
                )
        if section.silo_weights is not None and (
            min(section.silo_weights) < 0 or abs(sum(section.silo_weights) - 1) > 1e-6
        ):
            raise ValueError("isrl.silo_weights must be 0 or more and sum to 1")
        return self
