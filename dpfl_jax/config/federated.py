"""The sections of a federated run's configuration: one whose YAML has a ``federation`` section."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dpfl_jax.config.base import (
    NAME,
    NO_CHOICE_WITHIN_USERS,
    EvaluatedTrain,
    RunSection,
    Section,
    Seed,
    TargetSection,
    check_target,
)
from dpfl_jax.config.execution import RoundExecution
from dpfl_jax.config.kinds import SILOS
from dpfl_jax.config.schema import NamedModel, OptimizerConfig
from dpfl_jax.data import SourceConfig


@dataclasses.dataclass(frozen=True)
class FederatedDataConfig(SourceConfig):
    """Records with subjects: a user of the data is a subject.

    Attributes:
      validation_fraction: share held out for evaluation.
      split: by_user (held-out subjects are not in training) or within_user (the papers': known
        subjects, other records).
    """

    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    split: Literal["by_user", "within_user"] = "by_user"


class BudgetConfig(Section):
    """Each record's own epsilon (mechanism.kind=rpdp; Liu et al. 2024, section 7.1).

    Attributes:
      kind: three_levels, mix_gauss, pareto, constant (the first of levels), or column.
      levels: epsilons of the levels, means of the mixture.
      shares: of the levels or components.
      stds: of the mixture; the authors' code has 0.05, 0.1, 0.5.
      shape: of the Pareto distribution; the authors' code has a lomax one of shape 4.
      pareto: classical, or lomax (shifted to start at 0).
      bounds: least and largest budget of mixture and Pareto.
      column: a field of the data, or of the CSV file ``path``.
      path: CSV file with a column ``record`` (the record's id) and the column of budgets.
      declared: typical budgets, public, where the real ones come from a column.
      seed: of drawn budgets; public.
    """

    kind: Literal["three_levels", "mix_gauss", "pareto", "constant", "column"] = "three_levels"
    levels: tuple[float, ...] = Field((0.1, 1.0, 5.0), min_length=1)
    shares: tuple[float, ...] = (0.7, 0.2, 0.1)
    stds: tuple[float, ...] = (0.01, 0.05, 0.5)
    shape: float = Field(1.0, gt=0)
    pareto: Literal["classical", "lomax"] = "classical"
    bounds: tuple[float, float] = (0.1, 10.0)
    column: str = "epsilon"
    path: str | None = None
    declared: tuple[float, ...] | None = Field(None, min_length=1)
    seed: int = Field(0, ge=0)


class FederationConfig(Section):
    """Silos, rounds and optimisers.

    Attributes:
      silos: number of silos.
      partition: uniform, power (skewed by alpha), confined (a subject in one silo), natural (the
        data's own silos) or labels (each silo holds half of the classes).
      alpha: of the power law; 1 is uniform.
      partition_seed: chooses who is where; public.
      rounds: R.
      local_steps: T, steps of a silo in a round.
      silos_per_round: silos drawn in each round (fixed number); default all.
      participation_prob: of each silo in each round, instead of a fixed number.
      max_silos_per_subject: H; default all silos (1 if confined).
      local_optimizer: of the silos.
      local_state: reset at every round, or keep.
      server_optimizer: on minus the mean update; sgd with rate 1 is plain averaging.
      weights: public weights of the silos; default equal.
    """

    silos: int = Field(16, gt=0)
    partition: Literal["uniform", "power", "confined", "natural", "labels"] = "uniform"
    alpha: float = Field(1.0, ge=1)
    partition_seed: Seed = 0
    rounds: int = Field(gt=0)
    local_steps: int = Field(gt=0)
    silos_per_round: int | None = Field(None, gt=0)
    participation_prob: float | None = Field(None, gt=0, le=1)
    max_silos_per_subject: int | None = Field(None, gt=0)
    local_optimizer: OptimizerConfig = OptimizerConfig(name="sgd", learning_rate=0.5)
    local_state: Literal["reset", "keep"] = "reset"
    server_optimizer: OptimizerConfig = OptimizerConfig(name="sgd", learning_rate=1.0)
    weights: tuple[float, ...] | None = None


class FederatedPrivacyConfig(TargetSection):
    """The target, and the budget it is charged to; see ``TargetSection``, too.

    Attributes:
      epsilon: target for a subject (local_item: for a record) over the whole federation; rpdp: the
        public cap, a record of that budget is always sampled.
      delta: default (number of training subjects) ** -1.1.
      budgets: rpdp: of the records.
      policy: rpdp: how rates follow from budgets; certified, curve_fit or bisection (personal),
        minimum, dropout or uniform (baselines: one rate).
      unreachable: rpdp: what to do with a budget that no sampling rate keeps: error or exclude.
    """

    epsilon: float | None = Field(None, gt=0)
    delta: float | None = Field(None, gt=0, lt=1)
    budgets: BudgetConfig = BudgetConfig()
    policy: Literal["certified", "curve_fit", "bisection", "minimum", "dropout", "uniform"] = (
        "certified"
    )
    unreachable: Literal["error", "exclude"] = "error"


class FederatedTrainConfig(EvaluatedTrain):
    """How rounds run; see ``EvaluatedTrain``, too.

    Attributes:
      checkpoint_every: rounds between checkpoints.
      keep_checkpoints: how many are kept.
    """

    checkpoint_every: int = Field(5, gt=0)
    keep_checkpoints: int = Field(2, gt=0)


class FederatedEvalConfig(Section):
    """Held-out evaluation.

    Attributes:
      batch_size: records per device and batch.
      max_users: at most so many held-out subjects; None for all.
      max_examples_per_user: only the first records of each; None for all.
      baseline: at the end, also train without noise, and show its held-out losses beside the
        private ones. The guarantee does not cover them.
    """

    batch_size: int = Field(256, gt=0)
    max_users: int | None = Field(None, gt=0)
    max_examples_per_user: int | None = Field(None, gt=0)
    baseline: bool = False


class FederatedConfig(RunSection):
    """A whole federated run; see ``RunSection``, too.

    Attributes:
      init_seed: of the initial parameters.
      mechanism: what a silo does at a local step: ``kind`` (fed_avg, local_item, local_group,
        hi_grad_avg, user_ldp, subject_uls, rpdp, or ``package.module:function``), and its options;
        or its parts: ``participation``, ``clip``, ``noise``.
    """

    name: str = Field("federated-run", pattern=NAME)
    init_seed: Seed = 0
    data: FederatedDataConfig = FederatedDataConfig()
    federation: FederationConfig
    model: NamedModel = NamedModel()
    mechanism: Annotated[Any, SILOS]
    privacy: FederatedPrivacyConfig = FederatedPrivacyConfig()
    train: FederatedTrainConfig = FederatedTrainConfig()
    execution: RoundExecution = RoundExecution()
    eval: FederatedEvalConfig = FederatedEvalConfig()

    @model_validator(mode="after")
    def _check(self) -> FederatedConfig:
        mechanism, privacy = self.mechanism, self.privacy
        if self.train.chooses and self.data.split == "within_user" and mechanism.private:
            raise ValueError(NO_CHOICE_WITHIN_USERS)
        check_target(privacy, mechanism.private)
        federation = self.federation
        if federation.participation_prob is not None and federation.silos_per_round is not None:
            raise ValueError(
                "both federation.participation_prob and federation.silos_per_round are set: keep "
                "one of them"
            )
        if federation.weights is not None and len(federation.weights) != federation.silos:
            raise ValueError(
                f"federation.weights has {len(federation.weights)} numbers for "
                f"{federation.silos} silos: give one for each"
            )
        for name in ("silos_per_round", "max_silos_per_subject"):
            value = getattr(federation, name)
            if value is not None and value > federation.silos:
                raise ValueError(
                    f"federation.{name} is {value}, but there are {federation.silos} silos"
                )
        return self
