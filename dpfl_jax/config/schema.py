"""The sections of a run's configuration, typed and validated.

One YAML file holds all sections (see ``load.load_config``); any key can be overridden on the
command line. Defaults suit a private run; nothing here reads data. Each section has the keys of all
kinds of runs: ``variants`` says which go with which kind of mechanism, and which defaults differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    GetPydanticSchema,
    PlainSerializer,
    PlainValidator,
    model_serializer,
    model_validator,
)

from dpfl_jax.config import variants
from dpfl_jax.config.execution import (
    NAME,
    Execution,
    MetricsSection,
    Positive,
    ProcessesConfig,
    Section,
    Seed,
    check,
    exclude,
)
from dpfl_jax.config.kinds import Kinds
from dpfl_jax.config.variants import Variant, variant_of
from dpfl_jax.data import DataConfig
from dpfl_jax.task import ModelKind

NO_CHOICE_WITHIN_USERS = (
    "train.keep_best and train.patience would choose by examples of the people who are trained on, "
    "which their guarantee does not cover: hold out other people (data.split=by_user)"
)
# Any for a type checker: only silos that trust no server may have a tuple, or no rounds.
_OneOrEach = Annotated[
    Any, GetPydanticSchema(lambda _, schema_of: schema_of(float | tuple[float, ...] | None))
]
_Rounds = Annotated[
    Any, GetPydanticSchema(lambda _, schema_of: schema_of(Annotated[int, Field(gt=0)] | None))
]


def numbers(value: float | tuple[float, ...] | None) -> tuple[float, ...]:
    """One number, one for each silo, or None, as a tuple."""
    return () if value is None else value if isinstance(value, tuple) else (value,)


def check_each(key: str, value: Any, silos: int) -> None:
    """Raises ValueError unless a tuple has a number for each silo."""
    check(
        not isinstance(value, tuple) or len(value) == silos,
        f"{key} has {len(numbers(value))} numbers for {silos} silos: give one for each",
    )


def check_target(privacy: PrivacyConfig, private: bool) -> None:
    """Raises ValueError unless a private mechanism has either a target or noise."""
    epsilon, noise = privacy.epsilon, privacy.noise_multiplier
    check(
        epsilon is None or epsilon > 0,
        f"privacy.epsilon is {epsilon}, but it must be above 0: for a run without privacy set "
        "mechanism.kind=none (of silos: fed_avg)",
    )
    check(
        not private or epsilon is not None or noise is not None,
        "neither privacy.epsilon nor privacy.noise_multiplier is set: give the target epsilon, or "
        "the noise",
    )
    check(
        not private or epsilon is None or noise is None,
        "both privacy.epsilon and privacy.noise_multiplier are set: keep one, the other follows "
        "from it",
    )


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
    """Low-rank adapters of projections.

    Attributes:
      rank: rank of an adapter.
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
      beta: weight of the KL divergence to the model that training started from.
    """

    beta: Positive = 0.1


class AugmentationConfig(Section):
    """Copies of each image that a step averages the loss over (``training.augmented``).

    Attributes:
      copies: number K of copies; a step takes K times as long.
      shift: largest random shift in pixels, up or down and left or right.
      flip: whether half of the copies are mirrored from left to right.
    """

    copies: int = Field(4, ge=1)
    shift: int = Field(0, ge=0)
    flip: bool = False

    @model_validator(mode="after")
    def _check(self) -> AugmentationConfig:
        check(
            self.shift or self.flip,
            "model.augmentation changes nothing: set its shift or its flip, or remove it",
        )
        return self


class ModelConfig(Section):
    """The model, and which of its parameters are trained privately.

    Attributes:
      kind: transformer (tokens), lstm (windows of characters), mlp, cnn, small_cnn, logistic
        (classes), mlp (numbers); linear is linear regression for numbers and logistic regression
        for classes. Default transformer; mlp for silos that train; linear for a central table. Only
        the transformer takes size, checkpoint, overrides, lora, last_layers and dpo, and it takes
        no options.
      module: your own model instead of a kind: ``package.module:build``, a function
        (task, key, **options) that returns it (docs/guides/models.md).
      options: arguments of the kind's class, or of the function.
      size: a named size; not with a checkpoint.
      checkpoint: directory in the Hugging Face layout (config.json and safetensors files) of a
        GPT-2, Llama or Gemma model, taken as public; ``hf:org/name``, in the local Hugging Face
        cache; or ``bundled:quickstart``, a small one that comes with the package.
      overrides: fields of TransformerConfig; with a checkpoint only dtype, remat and scan_layers.
      lora: adapters; null for none.
      trainable: all, lora, biases, last_layers, or shell patterns of parameter names; default lora
        if there are adapters, else all. The others are never differentiated, noised or updated.
      last_layers: blocks that ``trainable: last_layers`` trains (with the last norm).
      frozen_dtype: dtype of parameters of a checkpoint that are not trained.
      dpo: the loss for preference pairs (``data.chosen_column``).
      augmentation: augmentation of images in training; it only costs computing.
      loss: loss of the linear models of silos that trust no server: logistic or hinge (two
        classes), softmax (classes), squared or absolute (a number). hinge and absolute are not
        smooth: their Moreau envelope is trained.
      regularization: mu of mu/2 |w|^2; its gradient depends on no record, the server adds it.
      radius: radius of the ball W about 0, half the diameter D of the theorems.
      smoothing: beta of the envelope; default by theorem.
    """

    kind: ModelKind = "transformer"
    module: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    size: str = "tiny"
    checkpoint: str | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)
    lora: LoraConfig | None = None
    trainable: Literal["all", "lora", "biases", "last_layers"] | tuple[str, ...] | None = None
    last_layers: int = Field(1, ge=1)
    frozen_dtype: Literal["float32", "bfloat16"] = "float32"
    dpo: DpoConfig | None = None
    augmentation: AugmentationConfig | None = None
    loss: Literal["logistic", "hinge", "softmax", "squared", "absolute"] = "logistic"
    regularization: float = Field(0.0, ge=0)
    radius: Positive = 5.0
    smoothing: float | None = Field(None, gt=0)

    @property
    def what(self) -> str:
        """The key that says which model, and its value."""
        return "=".join(*self.identity.items())

    @property
    def identity(self) -> dict[str, str]:
        """The kind or module of the model, as a report shows it."""
        return {"kind": self.kind} if self.module is None else {"module": self.module}

    @property
    def is_transformer(self) -> bool:
        """Whether the model is the library's transformer."""
        return self.module is None and self.kind == "transformer"

    @model_validator(mode="after")
    def _check_choice(self) -> ModelConfig:
        check(
            self.module is None or self.kind == "transformer",
            "both model.kind and model.module are set: keep one",
        )
        check(
            self.is_transformer or self.trainable not in ("lora", "last_layers"),
            f"model.trainable={self.trainable} is for model.kind=transformer",
        )
        sized = "size" in self.model_fields_set and self.size != "tiny"
        exclude(model__size=self.size if sized else None, model__checkpoint=self.checkpoint)
        check(
            self.trainable != "lora" or self.lora,
            "model.trainable=lora needs model.lora, e.g. model.lora.rank=8",
        )
        check(
            self.trainable != (),
            "model.trainable is empty: nothing would be trained; name something",
        )
        check(
            self.lora is None or self.trainable not in ("biases", "last_layers"),
            "model.lora adds adapters, but model.trainable leaves them untrained: remove one",
        )
        check(
            self.smoothing is None or self.loss in ("hinge", "absolute"),
            "model.smoothing is for the losses hinge and absolute: remove it",
        )
        return self


class PretrainConfig(Section):
    """Non-private training on the public corpus, before the private phase.

    Attributes:
      steps: optimiser steps.
      batch_size: examples per step, shuffled (no privacy, so no Poisson).
      optimizer: the optimiser of pre-training.
      cache_dir: where finished checkpoints are kept by content; default the user's cache folder.
    """

    steps: int = Field(gt=0)
    batch_size: int = Field(64, gt=0)
    optimizer: OptimizerConfig = OptimizerConfig(
        name="adamw", learning_rate=3e-3, schedule="cosine"
    )
    cache_dir: str | None = None


class BudgetConfig(Section):
    """A personal epsilon for each record (mechanism.kind=rpdp; Liu et al. 2024, section 7.1).

    Attributes:
      kind: three_levels, mix_gauss, pareto, constant (the first of levels), or column.
      levels: epsilons of the levels, means of the mixture.
      shares: shares of the levels or components.
      stds: standard deviations of the mixture; the authors' code has 0.05, 0.1, 0.5.
      shape: shape of the Pareto distribution; the authors' code has a lomax one of shape 4.
      pareto: classical, or lomax (shifted to start at 0).
      bounds: smallest and largest budget of mixture and Pareto.
      column: a field of the data, or of the CSV file ``path``.
      path: CSV file with a column ``record`` (the record's id) and the column of budgets.
      declared: typical budgets, public, if the real ones come from a column.
      seed: seed of drawn budgets; public.
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
      silos: number of silos N. Default 16, or 5 if they trust no server.
      partition: uniform, natural (the silos of the data), power (skewed by alpha), confined (a
        subject in one silo) or labels (each silo holds half of the classes); if silos trust no
        server uniform, natural, sorted (by label or target: as different as can be) or pairs (ten
        digits: an even and an odd one in a silo; 5 or 25 silos).
      alpha: exponent of the power law; 1 is uniform.
      partition_seed: seed of who is in which silo; public.
      rounds: number of rounds R; if silos trust no server, default by theorem.
      local_steps: number T of steps of a silo in a round.
      silos_per_round: number M of silos drawn in each round; default all.
      silos_law: {m: probability} of the number of silos that answer in a round, instead of a fixed
        number.
      participation_prob: probability of each silo in each round, instead of a fixed number.
      max_silos_per_subject: most silos J that hold records of a subject; default all silos (1 if
        confined).
      local_optimizer: optimiser of the silos.
      local_state: reset at every round, or keep.
      server_optimizer: optimiser of the server, which gets minus the mean update; sgd with rate 1
        is plain averaging.
      weights: public weights of the silos; default equal. Where silos trust no server, p_i,
        summing to 1.
    """

    silos: int = Field(16, gt=0)
    partition: Literal["uniform", "power", "confined", "natural", "labels", "sorted", "pairs"] = (
        "uniform"
    )
    alpha: float = Field(1.0, ge=1)
    partition_seed: Seed = 0
    rounds: _Rounds = None
    local_steps: int = Field(1, gt=0)
    silos_per_round: int | None = Field(None, gt=0)
    silos_law: dict[int, float] | None = None
    participation_prob: float | None = Field(None, gt=0, le=1)
    max_silos_per_subject: int | None = Field(None, gt=0)
    local_optimizer: OptimizerConfig = OptimizerConfig(name="sgd", learning_rate=0.5)
    local_state: Literal["reset", "keep"] = "reset"
    server_optimizer: OptimizerConfig = OptimizerConfig(name="sgd", learning_rate=1.0)
    weights: tuple[float, ...] | None = None

    @property
    def answering(self) -> int | dict[int, float] | None:
        """How many silos answer in a round: a number, its distribution, or None for all."""
        return self.silos_law if self.silos_law is not None else self.silos_per_round

    @model_validator(mode="after")
    def _check(self) -> FederationConfig:
        exclude(
            federation__participation_prob=self.participation_prob,
            federation__silos_per_round=self.silos_per_round,
            federation__silos_law=self.silos_law,
        )
        check_each("federation.weights", self.weights, self.silos)
        for name in ("silos_per_round", "max_silos_per_subject"):
            value = getattr(self, name)
            check(
                value is None or value <= self.silos,
                f"federation.{name} is {value}, but there are {self.silos} silos",
            )
        return self


class PrivacyConfig(Section):
    """The target, and the budget it is charged to.

    Attributes:
      epsilon: target; the noise multiplier is calibrated to it. It is the epsilon of a user; of a
        subject over the whole federation (local_item: of a record; rpdp: the public cap, a record
        with that budget is always sampled); or of each record, by its silo that trusts no server:
        one number or one for each silo (default 3), or null for a baseline without privacy.
      delta: target; default (number of training examples, or subjects) ** -1.1, as in Charles et
        al. 2024. Silos that trust no server have 1 / n_i^2 by default, and may have one each.
      noise_multiplier: sigma, instead of a target; the noise on the sum has stddev sigma times the
        largest contribution.
      budgets: rpdp: the budgets of the records.
      policy: rpdp: how rates follow from budgets; certified, curve_fit or bisection (personal),
        minimum, dropout or uniform (baselines: one rate).
      unreachable: rpdp: what to do with a budget that no sampling rate keeps: error or exclude.
      ledger: file (.jsonl) that records what the people of a data set have spent over all runs;
        relative to the folder of the configuration file.
      account: name of the people in the ledger. Give one name to all versions of a data set that
        hold the same people.
      budget: largest epsilon (at the run's delta) the ledger may reach; beyond it a run is refused.
        The first run fixes it for all, also if later runs are chosen by what earlier ones showed.
    """

    epsilon: _OneOrEach = None
    delta: _OneOrEach = None
    noise_multiplier: float | None = Field(None, ge=0, le=1e6)
    budgets: BudgetConfig = BudgetConfig()
    policy: Literal["certified", "curve_fit", "bisection", "minimum", "dropout", "uniform"] = (
        "certified"
    )
    unreachable: Literal["error", "exclude"] = "error"
    ledger: str | None = None
    account: str | None = Field(None, pattern=r"^[\w .,:@+-]+$")
    budget: float | None = None

    @model_validator(mode="after")
    def _check(self) -> PrivacyConfig:
        for delta in numbers(self.delta):
            check(
                0 < delta < 1,
                f"privacy.delta is {delta:g}, but it must lie strictly between 0 and 1",
            )
        check(
            self.budget is None or self.ledger is not None,
            "privacy.budget needs privacy.ledger, the file it is charged to",
        )
        # It is appended to, so it must not be a file that another program reads by itself.
        check(
            self.ledger is None or self.ledger.endswith(".jsonl"),
            f"privacy.ledger is {self.ledger!r}, but a ledger is a file NAME.jsonl",
        )
        check(
            self.ledger is None or self.account is not None,
            "privacy.ledger needs privacy.account: one name for these people, the same in every "
            "run on them, however their data are split",
        )
        return self


class PopulationConfig(Section):
    """Summary statistics of a data set that is elsewhere, for ``--dry-run``.

    Attributes:
      num_users: users that training samples from.
      num_examples: their examples, before any limit.
      limited_examples: by group size, the number of examples if each user has at most so many
        (for ELS).
    """

    num_users: int = Field(gt=0)
    num_examples: int = Field(gt=0)
    limited_examples: dict[int, int] = Field(default_factory=dict)


class TrainConfig(Section):
    """How the private phase runs.

    Nobody who is held out is covered by the guarantee.

    Attributes:
      steps: number of steps T (silos have federation.rounds).
      eval_every: steps (rounds, blocks) between evaluations on held-out data; 0 for before and
        after only.
      keep_best: keep the checkpoint with the lowest held-out loss, too.
      patience: stop after so many evaluations in a row without a lower held-out loss. Epsilon stays
        that of all steps. null never stops.
      checkpoint_every: steps between checkpoints. Default 50; 5 rounds if silos train, 2 blocks if
        they trust no server.
      keep_checkpoints: how many checkpoints are kept.
      log_every: steps between lines of metrics.jsonl.
      average: none; ema, an exponential moving average of the iterates over about the last tenth of
        the steps, until ``ema_decay`` limits it; or tail, their mean over the second half of the
        steps. The average is then the model that is evaluated and exported; the last iterate is
        also evaluated. It costs no privacy, and one more copy of the trained parameters.
      ema_decay: largest weight of the old average in an ema after a step.
    """

    steps: int = Field(0, gt=0)
    eval_every: int = Field(0, ge=0)
    keep_best: bool = False
    patience: int | None = Field(None, gt=0)
    checkpoint_every: int = Field(50, gt=0)
    keep_checkpoints: int = Field(2, gt=0)
    log_every: int = Field(1, gt=0)
    average: Literal["none", "ema", "tail"] = "none"
    ema_decay: float = Field(0.9999, ge=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        check(
            self.eval_every or not self.chooses,
            "keep_best and patience look at evaluations: set train.eval_every",
        )
        return self

    @property
    def chooses(self) -> bool:
        """Whether held-out loss decides when to stop or which checkpoint is best."""
        return self.keep_best or self.patience is not None


class EvalConfig(Section):
    """Held-out evaluation.

    Attributes:
      batch_size: examples per device and evaluation batch. Default 64, or 256 if silos train.
      max_users: at most this many held-out users, or subjects (a choice fixed by their ids); None
        for all.
      max_examples_per_user: only the first examples of each; None for all.
      split: which held-out users, validation (while tuning) or test (for the report).
      personalize: at the end, also tune a copy of the trained parameters for each held-out user on
        half of their examples and score the other half (Charles et al. 2024, Appendix G.2).
      baseline: at the end, also train without privacy, at the same compute, and show its held-out
        losses next to the private ones. The guarantee does not cover them.
      prompt: text that the language model continues, before and after training, in the report.
    """

    batch_size: int = Field(64, gt=0)
    max_users: int | None = Field(None, gt=0)
    max_examples_per_user: int | None = Field(None, gt=0)
    split: Literal["validation", "test"] = "validation"
    personalize: bool = False
    baseline: bool = False
    prompt: str | None = None


class AuditConfig(Section):
    """Canaries: artificial users, in or out by coins, for an attack on the run (audit.json).

    The guarantee for people is the same with them (docs/theory/README.md).

    Attributes:
      canaries: number of canaries with designed gradients, for an attack on every release. They
        only cost computing: the model is the same without them.
      texts: number of canaries with rare strings, for an attack on the final model (language
        models). They cost quality: the model learns from those that are in.
      confidence: confidence of what is proved.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> dpfl.AuditConfig(canaries=200).confidence
      0.95
    """

    canaries: int = Field(500, ge=0)
    texts: int = Field(0, ge=0)
    confidence: float = Field(0.95, ge=0.5, lt=1)

    @model_validator(mode="after")
    def _check_numbers(self) -> AuditConfig:
        for name, number in (("canaries", self.canaries), ("texts", self.texts)):
            check(
                not 0 < number < 100, f"audit.{name} is {number}, but fewer than 100 prove nothing"
            )
        check(
            self.canaries + self.texts,
            "audit has no canaries: set audit.canaries=500, or remove it",
        )
        return self


class SweepConfig(Section):
    """The grid of ``dpfl sweep``; ``dpfl train`` ignores it.

    Attributes:
      grid: values by axis (kind, budget, epsilon, group_size, cohort_size, clip_norm,
        learning_rate, steps, or section.key).
      tune: axes whose best value is taken at every combination of the others.
      repeats: runs of each cell.
    """

    grid: dict[str, list[Any]]
    tune: list[str] = Field(default_factory=list)
    repeats: int = Field(1, ge=1)


class RunConfig(Section):
    """A whole run: central, over silos that train locally, or over silos that trust no server.

    Attributes:
      name: name of the run directory.
      seed: seed of all sampling and noise. None draws the root key from the operating system and
        keeps it secret (the default); an integer makes the run reproducible and its noise known to
        all who read the configuration, which the report then says.
      init_seed: seed of the initial parameters (public; they carry no privacy).
      mechanism: ``kind`` and its fields, or the parts: ``participation``, ``clip``, ``noise``.

    Examples:
      >>> from dpfl_jax.config import load_config
      >>> config = load_config("configs/quickstart.yaml")
      >>> config.mechanism.kind, config.variant
      ('uls', 'central')
    """

    name: str = Field("run", pattern=NAME)
    seed: int | None = None
    init_seed: Seed = 0
    data: DataConfig = DataConfig()
    population: PopulationConfig | None = None
    federation: FederationConfig = FederationConfig()
    model: ModelConfig = ModelConfig()
    pretrain: PretrainConfig | None = None
    mechanism: Annotated[Any, PlainValidator(variants.parse_mechanism), PlainSerializer(Kinds.dump)]
    privacy: PrivacyConfig = PrivacyConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    execution: Execution = Execution()
    eval: EvalConfig = EvalConfig()
    sweep: SweepConfig | None = None
    audit: AuditConfig | None = None
    processes: ProcessesConfig = ProcessesConfig()
    metrics: MetricsSection = MetricsSection()

    @property
    def variant(self) -> Variant:
        """The kind of run, which follows from the mechanism."""
        return variant_of(self.mechanism)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, raw: Any) -> Any:
        named = isinstance(raw, Mapping) and "mechanism" in raw
        return variants.complete(raw) if named else raw

    @model_serializer(mode="wrap")
    def _keys_of_variant(self, plain: Any) -> dict[str, Any]:
        return variants.keys_of_variant(plain(self), self.variant)

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        for key in variants.REQUIRED[self.variant]:
            section, _, name = key.partition(".")
            given = name or section
            inside = getattr(self, section) if name else self
            check(given in inside.model_fields_set, f"the key {key!r} is missing")
        privacy = self.privacy
        check(
            privacy.ledger is None or self.seed is None,
            "privacy.ledger adds up independent runs, but seed makes sampling and noise known and "
            "the same in every run with it: leave seed unset",
        )
        if self.variant == "isrl":
            self._check_isrl()
            return self
        for name in ("epsilon", "delta"):
            check(
                not isinstance(getattr(privacy, name), tuple),
                f"privacy.{name} holds several numbers, but only silos that trust no server have "
                "their own: give one",
            )
        check_target(privacy, self.mechanism.private)
        if self.variant == "silos":
            if not self.mechanism.participation.personal:
                for name in ("budgets", "policy", "unreachable"):
                    check(
                        name not in privacy.model_fields_set
                        or getattr(privacy, name) == PrivacyConfig.model_fields[name].default,
                        f"privacy.{name} is for records with personal budgets "
                        f"(mechanism.kind=rpdp), but mechanism.kind is {self.mechanism.kind}: "
                        "remove it, or take rpdp",
                    )
            check(
                not (self.train.chooses and self.data.split == "within_user")
                or not self.mechanism.private,
                NO_CHOICE_WITHIN_USERS,
            )
        else:
            self._check_central()
        return self

    def _check_central(self) -> None:
        mechanism, execution, model = self.mechanism, self.execution, self.model
        of_transformers = ("size", "checkpoint", "overrides", "lora", "last_layers", "dpo")
        defaults = ModelConfig.model_construct()
        for name in ("options", "augmentation") if model.is_transformer else of_transformers:
            check(
                getattr(model, name) == getattr(defaults, name),
                f"model.{name} does not go with model.{model.what}: remove it "
                f"(transformers take {', '.join(of_transformers)}, other kinds options and "
                "augmentation)",
            )
        check(
            self.pretrain is None or model.is_transformer,
            f"pretrain is for model.kind=transformer, not model.{model.what}: remove it",
        )
        check(
            self.pretrain is None or model.checkpoint is None,
            "both pretrain and model.checkpoint are set: the private phase starts from one",
        )
        check(
            self.audit is None or mechanism.private,
            "audit attacks a guarantee, but mechanism.kind=none gives none",
        )
        for name, asked in (
            ("execution.examples_at_once", execution.examples_at_once is not None),
            ("execution.split_users", execution.split_users),
        ):
            check(
                not asked or mechanism.participation.unit_examples is not None,
                f"{name} is for users with several examples (mechanism.kind=uls)",
            )
            check(
                not asked or execution.strategy != "ghost",
                f"{name} forms users' gradients, which execution.strategy=ghost does not: leave "
                "out one of the two",
            )

    def _check_isrl(self) -> None:
        federation, privacy = self.federation, self.privacy
        check(
            self.mechanism.kind != "multi_stage" or self.model.regularization,
            "mechanism.kind=multi_stage needs a strongly convex loss: set model.regularization "
            "above 0, or use accelerated",
        )
        check_each("privacy.epsilon", privacy.epsilon, federation.silos)
        check_each("privacy.delta", privacy.delta, federation.silos)
        weights = federation.weights
        check(
            weights is None or (min(weights) >= 0 and abs(sum(weights) - 1) <= 1e-6),
            "federation.weights must be 0 or more and sum to 1",
        )
