"""The sections of a run's configuration, typed and validated.

One YAML file holds them all (see ``load.load_config``); any key can be overridden on the command
line. Defaults are what a private run should have; nothing here reads data.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dpfl_jax.config.base import (
    EvaluatedTrain,
    Positive,
    RunSection,
    Section,
    Seed,
    TargetSection,
    check_target,
)
from dpfl_jax.config.execution import Execution
from dpfl_jax.config.kinds import CENTRAL
from dpfl_jax.data import DataConfig
from dpfl_jax.task import ModelKind


class OptimizerConfig(Section):
    """Any optimiser of Optax, with a learning-rate schedule.

    Attributes:
      name: name of a function in ``optax``, e.g. adamw, adafactor, sgd.
      learning_rate: peak (or constant) learning rate.
      schedule: constant, linear (to 0) or cosine (to 0).
      warmup_steps: linear warm-up from 0.
      options: further keyword arguments of the optimiser.
    """

    name: str = "adam"
    learning_rate: Positive = 1e-3
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    options: dict[str, Any] = Field(default_factory=dict)


class LoraConfig(Section):
    """Low-rank adapters beside projections.

    Attributes:
      rank: of an adapter.
      alpha: scale of an adapter times rank.
      targets: shell patterns of the projections that get one, e.g. "*/attention/*" or
        "*/mlp/down".
    """

    rank: int = Field(8, ge=1)
    alpha: float = Field(16.0, gt=0)
    targets: tuple[str, ...] = Field(("*/attention/*",), min_length=1)


class DpoConfig(Section):
    """Direct preference optimisation of pairs (Rafailov et al. 2023).

    Attributes:
      beta: how dear it is to leave the model that training started from.
    """

    beta: Positive = 0.1


class NamedModel(Section):
    """A model by its kind, or one of your own.

    Attributes:
      kind: transformer (tokens), lstm (windows of characters), mlp, cnn, small_cnn, logistic
        (classes), mlp (numbers); linear is linear regression of numbers and logistic regression of
        classes, and what a central run on a table has if nothing is said.
      module: a model of your own in the place of a kind: ``package.module:build``, a function
        (task, key, **options) that returns it (docs/guides/models.md).
      options: arguments of the kind's class, or of the function.
    """

    kind: ModelKind = "mlp"
    module: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def what(self) -> str:
        """The key that says which model, and its value."""
        return "=".join(*self.told.items())

    @property
    def told(self) -> dict[str, str]:
        """The same, as a report tells it."""
        return {"kind": self.kind} if self.module is None else {"module": self.module}

    @model_validator(mode="after")
    def _check_one(self) -> NamedModel:
        if self.module is not None and self.kind != type(self).model_fields["kind"].default:
            raise ValueError("both model.kind and model.module are set: keep one")
        return self


class ModelConfig(NamedModel):
    """The model, and which of its parameters are trained privately; see ``NamedModel``, too.

    Attributes:
      kind: only the transformer takes size, checkpoint, overrides, lora, last_layers and dpo, and
        no options.
      size: a named size; not beside a checkpoint.
      checkpoint: directory in the Hugging Face layout (config.json and safetensors files) of a
        GPT-2, Llama or Gemma model, taken as public; ``hf:org/name``, in the local Hugging Face
        cache; or ``bundled:quickstart``, a small one that comes with the package.
      overrides: fields of TransformerConfig; beside a checkpoint dtype, remat and scan_layers.
      lora: adapters; null for none.
      trainable: all, lora, biases, last_layers, or shell patterns of parameter names; default lora
        if there are adapters, else all. The others are never differentiated, noised or updated.
      last_layers: blocks that ``trainable: last_layers`` trains (with the last norm).
      frozen_dtype: of parameters of a checkpoint that are not trained.
      dpo: the loss of data that are preference pairs (``data.chosen_column``).
    """

    kind: ModelKind = "transformer"
    size: str = "tiny"
    checkpoint: str | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)
    lora: LoraConfig | None = None
    trainable: Literal["all", "lora", "biases", "last_layers"] | tuple[str, ...] | None = None
    last_layers: int = Field(1, ge=1)
    frozen_dtype: Literal["float32", "bfloat16"] = "float32"
    dpo: DpoConfig | None = None

    @property
    def is_transformer(self) -> bool:
        """Whether the model is the library's transformer."""
        return self.module is None and self.kind == "transformer"

    @model_validator(mode="after")
    def _check_choice(self) -> ModelConfig:
        own = ("size", "checkpoint", "overrides", "lora", "last_layers", "dpo")
        for name in ("options",) if self.is_transformer else own:
            default = ModelConfig.model_fields[name].get_default(call_default_factory=True)
            if getattr(self, name) != default:
                raise ValueError(
                    f"model.{name} does not go with model.{self.what}: remove it "
                    f"(transformers take {', '.join(own)}, other kinds options)"
                )
        if not self.is_transformer and self.trainable in ("lora", "last_layers"):
            raise ValueError(f"model.trainable={self.trainable} is for model.kind=transformer")
        if self.checkpoint is not None and "size" in self.model_fields_set and self.size != "tiny":
            raise ValueError("both model.size and model.checkpoint are set: keep one")
        if self.trainable == "lora" and self.lora is None:
            raise ValueError("model.trainable=lora needs model.lora, e.g. model.lora.rank=8")
        if self.trainable == ():
            raise ValueError("model.trainable is empty: nothing would be trained; name something")
        if self.lora is not None and self.trainable in ("biases", "last_layers"):
            raise ValueError(
                "model.lora adds adapters, but model.trainable leaves them untrained: remove one"
            )
        return self


class PretrainConfig(Section):
    """Non-private training on the public corpus, before the private phase.

    Attributes:
      steps: optimiser steps.
      batch_size: examples per step, shuffled (no privacy, so no Poisson).
      optimizer: its own optimiser.
      cache_dir: where finished checkpoints are kept by content; default the user's cache folder.
    """

    steps: int = Field(gt=0)
    batch_size: int = Field(64, gt=0)
    optimizer: OptimizerConfig = OptimizerConfig(
        name="adamw", learning_rate=3e-3, schedule="cosine"
    )
    cache_dir: str | None = None


class PrivacyConfig(TargetSection):
    """The target, and the budget it is charged to; see ``TargetSection``, too.

    Attributes:
      epsilon: target; the noise multiplier is calibrated to it.
      delta: default (number of training examples) ** -1.1, as in Charles et al. 2024.
    """

    delta: float | None = None


class PopulationConfig(Section):
    """Summary statistics of a data set that is not here, for ``--dry-run``.

    Attributes:
      num_users: users that training samples from.
      num_examples: their examples, before any limit.
      limited_examples: by group size, examples left with at most so many of a user (for ELS).
    """

    num_users: int = Field(gt=0)
    num_examples: int = Field(gt=0)
    limited_examples: dict[int, int] = Field(default_factory=dict)


class TrainConfig(EvaluatedTrain):
    """How the private phase runs; see ``EvaluatedTrain``, too.

    Attributes:
      steps: number of steps T.
      checkpoint_every: steps between checkpoints.
      keep_checkpoints: how many checkpoints are kept.
      log_every: steps between lines of metrics.jsonl.
    """

    steps: int = Field(gt=0)
    checkpoint_every: int = Field(50, gt=0)
    keep_checkpoints: int = Field(2, gt=0)
    log_every: int = Field(1, gt=0)


class EvalConfig(Section):
    """Held-out evaluation.

    Attributes:
      batch_size: examples per device and evaluation batch.
      max_users: at most this many held-out users (a choice fixed by their ids); None for all.
      max_examples_per_user: only the first examples of each; None for all.
      split: which held-out users, validation (while tuning) or test (for the report).
      personalize: at the end, also tune a copy of the trained parameters for each held-out user on
        half of their examples and score the other half (Charles et al. 2024, Appendix G.2).
      baseline: at the end, also train without privacy, at the same compute, and show its held-out
        losses beside the private ones. The guarantee does not cover them.
      prompt: what the language model goes on with, before and after training, in the report.
    """

    batch_size: int = Field(64, gt=0)
    max_users: int | None = Field(None, gt=0)
    max_examples_per_user: int | None = Field(None, gt=0)
    split: Literal["validation", "test"] = "validation"
    personalize: bool = False
    baseline: bool = False
    prompt: str | None = None


class AuditConfig(Section):
    """Canaries: users who are nobody, in or out by coins, for an attack on the run (audit.json).

    The guarantee for people is the same with them (docs/theory/README.md).

    Attributes:
      canaries: with designed gradients, which every release is attacked by. They cost computing
        alone: the model is the same without them.
      texts: with rare strings, which the final model is attacked by (language models). They cost
        quality: the model learns from those that are in.
      confidence: of what is proved.
    """

    canaries: int = Field(500, ge=0)
    texts: int = Field(0, ge=0)
    confidence: float = Field(0.95, ge=0.5, lt=1)

    @model_validator(mode="after")
    def _check_numbers(self) -> AuditConfig:
        for name, number in (("canaries", self.canaries), ("texts", self.texts)):
            if 0 < number < 100:
                raise ValueError(f"audit.{name} is {number}, but fewer than 100 prove nothing")
        if not self.canaries + self.texts:
            raise ValueError("audit has no canaries: set audit.canaries=500, or remove it")
        return self


class SweepConfig(Section):
    """The grid of ``dpfl sweep``; ``dpfl train`` takes no notice of it.

    Attributes:
      grid: values by axis (kind, budget, epsilon, group_size, cohort_size, clip_norm,
        learning_rate, steps, or section.key).
      tune: axes whose best value is taken at every combination of the others.
      repeats: runs of each cell.
    """

    grid: dict[str, list[Any]]
    tune: list[str] = Field(default_factory=list)
    repeats: int = Field(1, ge=1)


class RunConfig(RunSection):
    """A whole run; see ``RunSection``, too.

    Attributes:
      init_seed: seed of the initial parameters (public; they carry no privacy).
      mechanism: ``kind`` (els, uls, none, or ``package.module:Class``), and its fields.
    """

    init_seed: Seed = 0
    data: DataConfig
    population: PopulationConfig | None = None
    model: ModelConfig = ModelConfig()
    pretrain: PretrainConfig | None = None
    mechanism: Annotated[Any, CENTRAL]
    privacy: PrivacyConfig = PrivacyConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    execution: Execution = Execution()
    eval: EvalConfig = EvalConfig()
    sweep: SweepConfig | None = None
    audit: AuditConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _follow_task(cls, raw: Any) -> Any:
        """A table is learned by a linear model, unless another is named."""
        data = raw.get("data") if isinstance(raw, dict) else None
        table = isinstance(data, dict) and data.get("target_column") is not None
        return {"model": {"kind": "linear"}, **raw} if table else raw

    @model_validator(mode="after")
    def _check_privacy(self) -> RunConfig:
        privacy, mechanism = self.privacy, self.mechanism
        if privacy.epsilon is not None and not privacy.epsilon > 0:
            raise ValueError(
                f"privacy.epsilon is {privacy.epsilon:g}, but it must be above 0: for a run "
                "without privacy set mechanism.kind=none"
            )
        if privacy.delta is not None and not 0 < privacy.delta < 1:
            raise ValueError(
                f"privacy.delta is {privacy.delta:g}, but it must lie strictly between 0 and 1"
            )
        check_target(privacy, mechanism.private)
        if self.pretrain is not None and not self.model.is_transformer:
            raise ValueError(
                f"pretrain is for model.kind=transformer, not model.{self.model.what}: remove it"
            )
        if self.pretrain is not None and self.model.checkpoint is not None:
            raise ValueError(
                "both pretrain and model.checkpoint are set: the private phase starts from one"
            )
        if self.audit is not None and not mechanism.private:
            raise ValueError("audit attacks a guarantee, but mechanism.kind=none gives none")
        execution = self.execution
        for name, asked in (
            ("execution.examples_at_once", execution.examples_at_once is not None),
            ("execution.split_users", execution.split_users),
        ):
            if asked and mechanism.participation.unit_examples is None:
                raise ValueError(f"{name} is for users with several examples (mechanism.kind=uls)")
            if asked and execution.strategy == "ghost":
                raise ValueError(
                    f"{name} forms users' gradients, which execution.strategy=ghost does not: "
                    "leave out one of the two"
                )
        return self
