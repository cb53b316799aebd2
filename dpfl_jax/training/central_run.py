"""Central training from a configuration: data, model, pre-training, mechanism and report.

Noise over signal (``run.pipeline``): a step moves along (clipped sum + noise) / M. A clipped sum
of M units has norm M C at most, its noise standard deviation sigma C in each of d coordinates; over
T steps, in units of the learning rate:

    signal  at most  T C                          gradients at C, aligned
    noise   about    sqrt(T d) sigma C / M        a random walk
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax
from rich.console import Console

from dpfl_jax.accounting import Guarantee
from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.accounting.statement import Statement
from dpfl_jax.config import RunConfig
from dpfl_jax.config.kinds import CENTRAL
from dpfl_jax.config.schema import NO_CHOICE_WITHIN_USERS
from dpfl_jax.data import DataConfig, Dataset, Store, limit_store, load_dataset, load_tokenizer
from dpfl_jax.data.keys import key_name
from dpfl_jax.data.owners import Bounding, bounding_of, grouped_by_owner_set, shared_store
from dpfl_jax.data.packing import lengths_warning
from dpfl_jax.data.store import scale_warning, unit_key_of
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Calibrated, Mechanism, Population
from dpfl_jax.mechanisms.calibrated import SHARED_ADJACENCY
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mesh import make_mesh
from dpfl_jax.models import LanguageModel, UnigramModel, transformer_config
from dpfl_jax.models.checkpoint import describe
from dpfl_jax.run.algorithm import RunResult
from dpfl_jax.run.console import phase
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.driver import Evaluate
from dpfl_jax.run.pipeline import Balance, Charge, Knob, Run, doubled, knob
from dpfl_jax.run.public_inputs import not_people, public_inputs
from dpfl_jax.run.report import PACKING_CAVEAT
from dpfl_jax.run.state import content_digest
from dpfl_jax.task import Task
from dpfl_jax.training.canaries import WithCanaries, check_fit
from dpfl_jax.training.central import Central
from dpfl_jax.training.evaluate import (
    Evaluator,
    check_prompt,
    check_users,
    personalize,
    samples,
    summarize,
)
from dpfl_jax.training.fitting import algorithm_of
from dpfl_jax.training.optimizers import make_optimizer
from dpfl_jax.training.start import (
    Pretrained,
    build_model,
    build_transformer,
    check_pretrained,
    check_trainable,
    data_section,
    starting_params,
    trained_by_name,
)

EVALUATION_CAVEAT = (
    "held-out losses are computed without noise on users who are not in the training set: the "
    "guarantee does not cover those users"
)
WITHIN_USER_CAVEAT = (
    "held-out losses are computed without noise on examples set aside from the training users "
    "themselves: they are outside the guarantee, and the model's choice by them would be too"
)
BASE_CAVEAT = (
    "the checkpoint that training started from is taken as public: nobody whose data it was made "
    "of is protected by this guarantee, whether or not they are users here too"
)
CORPUS_CAVEAT = (
    "the corpus of pre-training (data.public) is taken as public: nobody whose texts are in it is "
    "protected by this guarantee, whether or not they are users here too"
)
_OWN_DELTA_CAVEAT = (
    "delta is (number of training examples) ** -1.1 as in Charles et al. 2024; the unit is a user, "
    "and there are not as many users as examples: set privacy.delta for another"
)
LoadData = Callable[[DataConfig], Dataset]


@dataclasses.dataclass
class CentralRun(Run):
    """Central training, ready to run; a declared population can only be priced.

    Attributes:
      config: the configuration.
      data: the data set, split; None if the population is declared.
      held_out: the users to evaluate.
      calibrated: the mechanism with its noise.
      model: the model of the data's task.
      optimizer: the optimiser of the private phase.
      params: the parameters that training starts from, once ``algorithm`` was called.
      pretrained: their pre-training, once ``algorithm`` was called; None without pre-training.
    """

    config: RunConfig
    data: Dataset | None
    held_out: Store | None
    calibrated: Calibrated
    model: Any
    optimizer: Any
    params: Any = dataclasses.field(default=None, init=False)
    pretrained: Pretrained | None = dataclasses.field(default=None, init=False)

    @property
    def task(self) -> Task | None:  # type: ignore[override]
        """What is learned; None if no data were read."""
        return None if self.data is None else self.data.task

    @property
    def train(self) -> Store:
        """The training data; only if they were read."""
        assert self.data is not None
        return self.data.train

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism, fitted to the number of steps."""
        return self.calibrated.mechanism

    @property
    def known(self) -> bool:
        """Whether those in the test part are trained on, too (``Dataset.known``)."""
        return self.data is not None and self.data.known

    @property
    def steps(self) -> int:
        return self.calibrated.steps

    @property
    def private(self) -> bool:
        return self.calibrated.private

    @functools.cached_property
    def mesh(self) -> Any:
        """The mesh of the configuration."""
        return make_mesh(**self.config.execution.mesh.axes)

    def algorithm(self, directory: RunDirectory, console: Console) -> Central:
        """Pre-trains if asked to; canaries take part if they are configured."""
        config, model = self.config, self.model
        assert self.data is not None
        phase(console, "making the first parameters")
        self.params, self.pretrained = starting_params(config, self.data, model, self.mesh, console)
        if self.pretrained is not None:
            needed = self.trained_parameters < model.num_params
            check_pretrained(self.pretrained, directory, needed=needed)
        plan = Plan(self.calibrated, self.train, config.execution, self.mesh)
        trainable = trained_by_name(config.model, model)
        phase(console, "tracing the loss of one example")
        made = algorithm_of(model.loss, self.params, plan, self.optimizer, trainable)
        if config.model.module is not None and jax.tree.leaves(made.frozen):
            # An export builds it again, and compares it with this digest.
            directory.note("base", {"digest": content_digest(self.params)})
        if config.audit is not None:
            return WithCanaries(made, config.audit, directory.root_key.child("audit"))
        return made

    def without_privacy(self, algorithm: Any) -> Central:
        return algorithm.without_privacy()

    def evaluator(self) -> Evaluate | None:
        if self.held_out is None or self.task is None:
            return None
        size, cuts = self.config.eval.batch_size, self.config.execution.packing > 0
        return Evaluator.of_model(self.model, self.task, self.mesh, size, cuts).of(self.held_out)

    def after_steps(self, algorithm: Any, result: RunResult) -> dict[str, Any]:
        """A copy of the model tuned to each held-out user, if asked for."""
        del algorithm
        if not self.config.eval.personalize or self.held_out is None or result.last is None:
            return {}
        personalization = personalize(
            self.model.loss,
            result.params,
            self.held_out,
            trainable=trained_by_name(self.config.model, self.model),
            mesh=self.mesh,
        )
        return {"personalization": dataclasses.asdict(personalization)}

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "data": self.train.fingerprint,
            "mechanism": self.calibrated.to_section(),
            "delta": self.calibrated.delta,
        }
        if self.base is not None:
            facts |= {"base": self.base, "checkpoint": self.base["digest"]}
        if self.data is not None and self.data.public is not None:
            facts["public"] = self.data.public.fingerprint
        return facts

    @functools.cached_property
    def base(self) -> dict[str, Any] | None:
        """What identifies the checkpoint (it reads all of it); None without a checkpoint."""
        path = self.config.model.checkpoint
        return None if path is None else describe(path)

    def resume_from(self, directory: RunDirectory) -> CentralRun:
        if directory.facts.get("checkpoint") != (self.base or {}).get("digest"):
            raise BadInputError(
                f"the checkpoint {self.config.model.checkpoint} is not the one that the run in "
                f"{directory.path} began with: bring it back, or start another run"
            )
        known = directory.facts.get("public")
        if known is not None and known != self.facts().get("public"):
            raise BadInputError(
                f"the corpus data.public={self.config.data.public} is not the one that the run in "
                f"{directory.path} began with: bring it back, or start another run"
            )
        section = dict(directory.facts.get("mechanism", {}))
        if not section:
            raise BadInputError(
                f"the run in {directory.path} was begun by an earlier version, which kept no "
                "mechanism with its noise: start another run"
            )
        began = dataclasses.replace(
            self.calibrated,
            noise_multiplier=section.pop("noise_multiplier", 0.0),
            mechanism=CENTRAL.parse(section),
            delta=directory.facts["delta"],
        )
        return dataclasses.replace(self, calibrated=began)

    def guarantee(self, steps: int, caveats: tuple[str, ...] = ()) -> Guarantee:
        return self.calibrated.guarantee(steps, caveats)

    def statement(self, steps: int, guarantee: Guarantee) -> Statement:
        return self.calibrated.statement(guarantee, steps)

    def charge(self) -> Charge:
        charge = Charge(self.calibrated.event(), self.calibrated.delta, self.unit_key)
        if self.calibrated.population.shared:
            return dataclasses.replace(charge, adjacency=SHARED_ADJACENCY)
        return charge

    @property
    def unit_key(self) -> str:
        if self.data is None:
            return key_name(self.config.data.user_column)
        return unit_key_of(self.train)

    @property
    def public_inputs(self) -> tuple[str, ...]:
        if not self.private:
            return ()
        known = self.data is not None and self.base is not None
        return public_inputs(
            self.calibrated.population.description,
            self.mechanism.bounds,
            self.config,
            self.task,
            checkpoint=self.base["digest"] if known and self.base is not None else None,
        )

    @property
    def evaluation_caveat(self) -> str:  # type: ignore[override]
        """Depends on whether the evaluated users are trained on, too."""
        return WITHIN_USER_CAVEAT if _shared(self.config, self.known) else EVALUATION_CAVEAT

    def own_caveats(self) -> tuple[str, ...]:
        config = self.config
        result = (
            (config.model.checkpoint is not None, BASE_CAVEAT),
            (config.pretrain is not None, CORPUS_CAVEAT),
            (config.privacy.delta is None, _OWN_DELTA_CAVEAT),
            (config.execution.packing, PACKING_CAVEAT),
        )
        return tuple(caveat for applies, caveat in result if applies)

    @functools.cached_property
    def trained_parameters(self) -> int:
        """The number of trained parameters."""
        return check_trainable(self.config.model, self.model)

    def balance(self, config: Any = None) -> Balance | None:
        calibrated = self.calibrated
        if config is not None:
            population = self.count(config.mechanism)
            calibrated = calibrate(config, population, delta=calibrated.delta)
        return balance_of_steps(calibrated, self.trained_parameters)

    def knobs(self) -> Iterator[Knob]:
        config, given, epsilon = self.config, self.config.mechanism, self.config.privacy.epsilon
        for name in ("cohort_size", "batch_size"):
            if (size := getattr(given.participation, name, None)) is not None:
                most = self.count(given).num_units
                yield knob(config, f"mechanism.{name}", doubled(size, most))
        if given.participation.unit_examples is None and (cap := given.group_size) > 1:
            smaller = [c for c in (cap // 2, cap // 4, 1) if 0 < c < cap]
            yield knob(config, "mechanism.group_size", smaller)
        if epsilon is not None:
            yield knob(config, "privacy.epsilon", doubled(epsilon, math.inf, 4))
        yield knob(config, "train.steps", [int(value) for value in doubled(self.steps, 1e6, 3)])

    def count(self, other: Mechanism) -> Population:
        """The population that another mechanism would sample from."""
        if self.data is None:
            return _declared_population(self.config, other)
        return other.participation.population_of(other.bounded(self.train))

    @property
    def bounding(self) -> Bounding | None:
        """What was left out of data whose examples have several owners; None for other data."""
        return None if self.data is None else bounding_of(self.train)

    @property
    def model_facts(self) -> dict[str, Any]:
        """The report's section on the model."""
        section = self.config.model
        name: dict[str, Any] = dict(section.identity)
        if section.checkpoint is not None:
            name["checkpoint"] = section.checkpoint
        elif section.is_transformer:
            name["size"] = section.size
        return {**name, "parameters": self.model.num_params, "trained": self.trained_parameters}

    def headline(self) -> list[str]:
        facts, bounding = self.model_facts, self.bounding
        assert self.data is not None
        lines = [
            self.data.description,
            f"{facts.get('module', facts.get('kind'))} "
            f"{facts.get('checkpoint', facts.get('size', ''))}".rstrip()
            + f": {facts['parameters']:,} parameters, {facts['trained']:,} of them trained",
        ]
        if bounding is not None:
            lines.append(str(bounding))
        if self._evaluated:
            lines.append(f"evaluated: {self._evaluated}")
        if self.private:
            lines.append(
                f"{self.mechanism.kind.upper()} with noise multiplier "
                f"{self.calibrated.noise_multiplier:.5g}, "
                f"delta {rounded_up(self.calibrated.delta, 3)}, "
                f"{self.steps} steps"
            )
        return lines

    @functools.cached_property
    def _evaluated(self) -> str:
        """How much of the held-out part is evaluated, if not all of it; else ""."""
        if self.held_out is None:
            return ""
        counts = f"{self.held_out.num_users:,} users, {self.held_out.num_examples:,} examples"
        whole = grouped_by_owner_set(getattr(self.data, self.config.eval.split))
        if whole.num_examples == self.held_out.num_examples:
            return ""
        return f"{counts}, of {whole.num_users:,} users, {whole.num_examples:,} examples"

    def warnings(self) -> list[str]:
        """Warns if users do not look like people, or columns are far from order 1."""
        if not self.private or self.data is None:
            return []
        packed = self.config.execution.packing
        result = [scale_warning(self.train), lengths_warning(self.train) if packed else None]
        if self.config.data.max_examples_per_user != 1:
            result.insert(0, not_people(self.train, "user"))
        return [f"warning: {text}" for text in result if text is not None]

    def describe(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        """Adds perplexities to the losses of language models, which are in nats per token."""
        if self.task is None or self.task.kind != "tokens":
            return evaluation
        return {
            **evaluation,
            "perplexity": _exp(evaluation["loss"]),
            "perplexity_by_user": _exp(evaluation["loss_by_user"]),
        }

    @property
    def mechanism_facts(self) -> dict[str, Any]:
        return self.calibrated.to_section()

    def price(self) -> dict[str, Any]:
        config, mechanism, steps = self.config, self.mechanism, self.steps
        is_dpo, pretraining = config.model.dpo is not None, config.pretrain
        if self.data is None:
            source, seq_len = "declared in the config", config.data.seq_len * (1 + is_dpo)
        else:
            source, text = self.data.description, self.data.tokenizer is not None
            seq_len = math.prod(self.data.task.input_shape) if text else 1
        computed = mechanism.compute_budget * mechanism.update.passes * seq_len * steps
        return {
            "population": {**self.calibrated.population.to_json(), "source": source},
            "parameters": self.model.num_params,
            "trained_parameters": self.trained_parameters,
            "steps": steps,
            "examples_per_step": mechanism.compute_budget,
            "tokens": computed,
            "pretrain_tokens": 0
            if pretraining is None
            else pretraining.steps * pretraining.batch_size * config.data.seq_len,
            # With preference pairs the reference model is evaluated, too.
            "training_flops": (8.0 if is_dpo else 6.0) * self.model.num_params * computed,
            "sampling_prob": self.calibrated.scheme.draw_prob,
            "noise_multiplier": self.calibrated.noise_multiplier,
            "noise_on_mean": self.calibrated.noise_stddev / mechanism.participation.divisor,
        }

    def report(
        self, directory: RunDirectory, result: RunResult, guarantee: Guarantee
    ) -> dict[str, Any]:
        config, data, population = self.config, self.data, self.calibrated.population
        assert data is not None
        baselines, written, held_out = {}, {}, {}
        if data.public is not None and self.held_out is not None and data.task.kind == "tokens":
            unigram = UnigramModel.fit(data.public, data.public.schema.vocab_size)
            losses = unigram.losses(self.held_out)
            evaluation = summarize(losses, self.held_out.user_offsets)
            baselines["unigram model of the public corpus"] = dataclasses.asdict(evaluation)
        if config.eval.prompt is not None and result.last is not None:
            named = {"before": self.params, "after": result.params}
            written["samples"] = samples(self.model, data.tokenizer, config.eval.prompt, named)
        if self.held_out is not None:
            rule = data.rules[config.eval.split]
            held_out["held_out"] = "; evaluated: ".join(
                filter(None, [f"{config.eval.split} part: {rule}", self._evaluated])
            )
        outside = {}
        if self.bounding is not None:
            outside["contribution_bounding"] = self.bounding.to_json()
        base, pretrained = directory.facts.get("base"), self.pretrained
        return {
            **written,
            "baselines": baselines,
            "model": {**self.model_facts, **({} if base is None else {"base": base})},
            "data": {
                "description": data.description,
                **held_out,
                "users": population.num_users,
                "examples": population.num_examples,
            },
            "pretrain": None
            if pretrained is None
            else {"path": str(pretrained.path), "cached": pretrained.cached},
            "outside_guarantee": outside,
        }


def balance_of_steps(calibrated: Calibrated, dim: int) -> Balance | None:
    """Noise over signal of a mechanism; None without noise, and for correlated noise.

    Args:
      calibrated: the mechanism with its noise.
      dim: d, the number of trained parameters.
    """
    mechanism = calibrated.mechanism
    if not mechanism.private or mechanism.noise.is_correlated:
        return None
    noise = math.sqrt(dim) * calibrated.noise_stddev / mechanism.participation.divisor
    return Balance(noise, mechanism.rule.sensitivity, calibrated.steps, "step")


def prepare(config: RunConfig, console: Console, load: LoadData = load_dataset) -> CentralRun:
    """Reads the data and builds everything that the configuration describes.

    Args:
      config: the configuration.
      console: prints for people.
      load: reads the data (a sweep keeps them from one run to the next).

    Raises:
      BadInputError: anything wrong with the configuration or the data.
    """
    mechanism = config.mechanism
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    data, model = read_data(config, console, load)
    data = dataclasses.replace(data, train=mechanism.bounded(data.train))
    population = mechanism.participation.population_of(data.train)
    with console.status("calibrating noise"):
        calibrated = calibrate(config, population, optimizer)
    held_out: Store | None = grouped_by_owner_set(getattr(data, config.eval.split))
    if held_out is not None:
        held_out = limit_store(held_out, config.eval.max_users, config.eval.max_examples_per_user)
    if held_out is None:
        for what, wanted in (
            ("eval.personalize", config.eval.personalize),
            ("train.keep_best or train.patience", config.train.chooses),
            ("eval.baseline", config.eval.baseline),
        ):
            if wanted:
                raise BadInputError(
                    f"{what} needs held-out users, but there is no {config.eval.split} part: set "
                    f"data.{config.eval.split}_fraction, or leave it out"
                )
    elif config.eval.personalize:
        if shared_store(held_out) is not None:
            raise BadInputError(
                "eval.personalize tunes a copy for each held-out user, but records of the data "
                "have several owners: leave it out"
            )
        check_users(held_out)
    if config.audit is not None:
        check_fit(calibrated, data.train, config.audit)
    if config.train.chooses and mechanism.private and _shared(config, data.known):
        raise BadInputError(NO_CHOICE_WITHIN_USERS)
    if config.eval.prompt is not None:
        check_prompt(config.eval.prompt, model, data.tokenizer)
    return CentralRun(config, data, held_out, calibrated, model, optimizer)


def read_data(
    config: RunConfig, console: Console, load: LoadData = load_dataset
) -> tuple[Dataset, Any]:
    """Reads the data of a configuration; returns them and the model that fits them.

    Raises:
      BadInputError: anything wrong with the sections data, model or pretrain.
    """
    if config.pretrain is not None:
        make_optimizer(config.pretrain.optimizer, config.pretrain.steps)
    if config.model.is_transformer and config.model.checkpoint is None:
        transformer_config(config.model.size)
    with console.status("reading data"):
        data = load(data_section(config))
    if config.pretrain is not None and data.public is None:
        raise BadInputError(
            f"pretrain needs a public corpus, but data.source={config.data.source} has none: "
            "remove the pretrain section, or name one as data.public"
        )
    model = build_model(config, data.task, data.train)
    check_trainable(config.model, model)
    return data, model


def declared(config: RunConfig) -> CentralRun:
    """Makes a run, to be priced only, on a declared population; no data are read.

    Raises:
      BadInputError: anything wrong with the configuration.
    """
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    if config.pretrain is not None:
        make_optimizer(config.pretrain.optimizer, config.pretrain.steps)
    population, model = _declared_population(config, config.mechanism), _declared_model(config)
    calibrated = calibrate(config, population, optimizer)
    return CentralRun(config, None, None, calibrated, model, optimizer)


def _declared_population(config: RunConfig, mechanism: Mechanism) -> Population:
    section = config.population
    assert section is not None
    result = mechanism.participation.declared_population(
        section.num_users, section.num_examples, section.limited_examples
    )
    mechanism.participation.check_population(result)
    return result


def calibrate(
    config: RunConfig,
    population: Population,
    optimizer: optax.GradientTransformation | None = None,
    delta: float | None = None,
) -> Calibrated:
    """Calibrates a configuration's mechanism for a population; ``delta`` overrides its delta."""
    privacy = config.privacy
    return config.mechanism.calibrate(
        population,
        config.train.steps,
        epsilon=privacy.epsilon,
        noise_multiplier=privacy.noise_multiplier,
        delta=privacy.delta if delta is None else delta,
        optimizer=optimizer,
    )


def _shared(config: RunConfig, known: bool) -> bool:
    """Whether the evaluated people are trained on, too; ``known`` as in ``Dataset``."""
    return config.data.split == "within_user" or (known and config.eval.split == "test")


def _exp(loss: float) -> float | None:
    return math.exp(loss) if loss < 700 else None  # NaN and overflow have no perplexity


def _declared_model(config: RunConfig) -> LanguageModel:
    if config.model.checkpoint is not None:
        return build_transformer(config, 1, None)
    if "vocab_size" in config.model.overrides:  # then the tokeniser's file is not needed
        return build_transformer(config, config.model.overrides["vocab_size"], bos_id=1)
    tokenizer = load_tokenizer(data_section(config).tokenizer)
    return build_transformer(config, tokenizer.vocab_size, tokenizer.bos_id)
