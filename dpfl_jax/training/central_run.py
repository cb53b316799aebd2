"""A configuration made into a run: data, model, pre-training, mechanism, training, report."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from rich.console import Console

from dpfl_jax.accounting import Guarantee
from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.accounting.statement import Statement
from dpfl_jax.config import RunConfig
from dpfl_jax.config.base import NO_CHOICE_WITHIN_USERS
from dpfl_jax.config.kinds import CENTRAL
from dpfl_jax.data import DataConfig, Dataset, Store, limit_store, load_dataset, load_tokenizer
from dpfl_jax.data.keys import key_name
from dpfl_jax.data.owners import Bounding, bounding_of, grouped_by_owner_set, shared_store
from dpfl_jax.data.store import scale_warning, unit_key_of
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Calibrated, Mechanism, Population
from dpfl_jax.mechanisms.calibrated import SHARED_ADJACENCY
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mesh import make_mesh
from dpfl_jax.models import LanguageModel, PreferenceModel, UnigramModel, transformer_config
from dpfl_jax.models.checkpoint import describe
from dpfl_jax.run.beside import BASELINE_CAVEAT, show_beside, without_privacy
from dpfl_jax.run.content import content_digest
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.driver import Pace, RunResult
from dpfl_jax.run.prepared import Charge, MakeReport, Prepared, run_prepared
from dpfl_jax.run.public_inputs import about, not_people, public_inputs
from dpfl_jax.run.report import PRIVATE_METRICS_CAVEAT, TUNING_CAVEAT, build_report
from dpfl_jax.training.beside import check_prompt, plain, samples
from dpfl_jax.training.canaries import WithCanaries, check_fit
from dpfl_jax.training.central import FitResult, algorithm_of, train
from dpfl_jax.training.central_balance import advice_on_steps, balance_of_steps
from dpfl_jax.training.evaluate import Evaluator, summarize
from dpfl_jax.training.personalize import Personalization, check_users, personalize
from dpfl_jax.training.pretrain import Pretrained, begin_from
from dpfl_jax.training.start import (
    build_model,
    build_transformer,
    check_trainable,
    data_section,
    make_optimizer,
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
LoadData = Callable[[DataConfig], Dataset]


@dataclasses.dataclass(frozen=True)
class CentralRun(Prepared):
    """Everything a run needs, checked, before anything is written.

    Attributes:
      config: the configuration.
      data: the data set, split.
      held_out: the users that are evaluated.
      calibrated: the mechanism with its noise.
      model: of the data's task.
      optimizer: of the private phase.
    """

    config: RunConfig
    data: Dataset
    held_out: Store | None
    calibrated: Calibrated
    model: Any
    optimizer: Any

    def facts(self) -> dict[str, Any]:
        """Data, noise, delta, checkpoint."""
        facts: dict[str, Any] = {
            "data": self.data.train.fingerprint,
            "mechanism": self.calibrated.to_section(),
            "delta": self.delta,
        }
        if self.base is not None:
            facts |= {"base": self.base, "checkpoint": self.base["digest"]}
        if self.data.public is not None:
            facts["public"] = self.data.public.fingerprint
        return facts

    @property
    def mechanism(self) -> Mechanism:
        """Fitted to the number of steps."""
        return self.calibrated.mechanism

    @property
    def population(self) -> Population:
        """What it samples from."""
        return self.calibrated.population

    @property
    def delta(self) -> float:
        """Of the guarantee."""
        return self.calibrated.delta

    @property
    def bounding(self) -> Bounding | None:
        """What was left out of data whose examples have several owners; None of other data."""
        return bounding_of(self.data.train)

    @functools.cached_property
    def base(self) -> dict[str, Any] | None:
        """What identifies the checkpoint, all of which is read for it; None if there is none."""
        path = self.config.model.checkpoint
        return None if path is None else describe(path)

    def going_on(self, directory: RunDirectory) -> CentralRun:
        """With the noise and delta that the run began with, from the same checkpoint."""
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

    @property
    def unit_key(self) -> str:
        """What makes a user."""
        return unit_key_of(self.data.train)

    @property
    def public_inputs(self) -> tuple[str, ...]:
        """Checkpoint, corpus, tokenizer, columns, bounds, counts."""
        if not self.mechanism.private:
            return ()
        digest = None if self.base is None else self.base["digest"]
        return public_inputs(
            self.population.description,
            self.mechanism.bounds,
            self.config,
            self.data.task,
            checkpoint=digest,
        )

    def headline(self) -> list[str]:
        """Data, model, mechanism."""
        facts = model_facts(self.config, self.model)
        lines = [
            self.data.description,
            f"{facts.get('module', facts.get('kind'))} "
            f"{facts.get('checkpoint', facts.get('size', ''))}".rstrip()
            + f": {facts['parameters']:,} parameters, {facts['trained']:,} of them trained",
        ]
        if self.bounding is not None:
            lines.append(str(self.bounding))
        if self.mechanism.private:
            lines.append(
                f"{self.mechanism.kind.upper()} with noise multiplier "
                f"{self.calibrated.noise_multiplier:.5g}, delta {rounded_up(self.delta, 3)}, "
                f"{self.config.train.steps} steps"
            )
        return [*lines, *self.warnings(), *self.advice()]

    def warnings(self) -> list[str]:
        """That users do not look like people, if so."""
        found = []
        if self.mechanism.private and self.config.data.max_examples_per_user != 1:
            found.append(not_people(self.data.train, "user"))
        if self.mechanism.private:
            found.append(scale_warning(self.data.train))
        return [f"warning: {text}" for text in found if text is not None]

    def advice(self) -> list[str]:
        """Noise beside signal (``central_balance``)."""
        trained = check_trainable(self.config.model, self.model)
        return advice_on_steps(self.config, self.calibrated, self.count, trained)

    def count(self, other: Mechanism) -> Population:
        """What another mechanism would sample from."""
        return other.participation.count(other.bounded(self.data.train))

    def charge(self) -> Charge:
        """All steps, to the users."""
        event = self.calibrated.event()
        if self.population.shared:
            return Charge(event, self.delta, self.unit_key, adjacency=SHARED_ADJACENCY)
        return Charge(event, self.delta, self.unit_key)

    def train(
        self, directory: RunDirectory, console: Console, charge: Callable[[str], Any]
    ) -> tuple[RunResult, MakeReport]:
        """Pre-trains if asked to, and fits."""
        config, mesh = self.config, make_mesh(**self.config.execution.mesh.axes)
        params, pretrained = starting_params(config, self.data, self.model, mesh, console)
        if pretrained is not None:
            facts = model_facts(config, self.model)
            begin_from(pretrained, directory, needed=facts["trained"] < facts["parameters"])
        plan = Plan(self.calibrated, self.data.train, config.execution, mesh)
        trainable = trained_by_name(config.model, self.model)
        evaluate = None
        if self.held_out is not None:
            predict = self.model.predict if self.data.task.kind == "classes" else None
            right = self.model.right if isinstance(self.model, PreferenceModel) else None
            classes = self.data.task.classes
            evaluator = Evaluator(
                self.model.loss, mesh, config.eval.batch_size, predict, right, classes
            )
            evaluate = evaluator.of(self.held_out)
        algorithm = algorithm_of(self.model.loss, params, plan, self.optimizer, trainable)
        if config.model.module is not None and jax.tree.leaves(algorithm.frozen):
            # Whoever exports it builds it anew.
            directory.note("base", {"digest": content_digest(params)})
        pace, run = Pace.of(config), algorithm
        if config.audit is not None:
            run = WithCanaries(algorithm, config.audit, directory.root_key.child("audit"))
        result = train(
            run,
            caveats=run_caveats(config, self.mechanism, self.data.known),
            run_dir=directory,
            evaluate=evaluate,
            pace=pace,
            charge=charge,
            console=console,
        )
        personal = _personalized(self, result, mesh)
        baseline = None
        if _beside(config, self.mechanism) and evaluate is not None and result.final is not None:
            key, held = directory.root_key.child("baseline"), evaluate
            baseline = without_privacy(lambda: plain(algorithm, key, held, pace, console), console)

        def report() -> tuple[dict[str, Any], Statement]:
            made = _report(self, pretrained, result, directory.facts)
            if personal is not None:
                made["personalization"] = dataclasses.asdict(personal)
            show_beside(made, baseline, with_perplexity)
            if config.eval.prompt is not None and result.final is not None:
                named = {"before": params, "after": result.params}
                made["samples"] = samples(
                    self.model, self.data.tokenizer, config.eval.prompt, named
                )
            stated = plan.statement(result.guarantee, result.accounted)
            if result.audit is not None:
                made["audit"] = result.audit.write(directory.path, stated)
            return made, stated

        return result, report


def prepare(config: RunConfig, console: Console, load: LoadData = load_dataset) -> CentralRun:
    """Reads the data and builds everything that the configuration describes.

    Args:
      config: the configuration.
      console: for people.
      load: reads the data (a sweep keeps them from one run to the next).

    Raises:
      BadInputError: anything wrong with the configuration or the data.
    """
    mechanism = config.mechanism
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    data, model = read_data(config, console, load)
    data = dataclasses.replace(data, train=mechanism.bounded(data.train))
    population = mechanism.participation.count(data.train)
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
    model = build_model(config, data)
    check_trainable(config.model, model)
    return data, model


def run_experiment(
    config: RunConfig,
    run_dir: str | os.PathLike[str],
    console: Console,
    load: LoadData = load_dataset,
) -> dict[str, Any]:
    """Runs (or resumes) a configuration and returns its report.

    Args:
      config: the configuration.
      run_dir: where the run lives.
      console: for people.
      load: reads the data.

    Raises:
      BadInputError: anything wrong with config, data or run directory; nothing is overwritten.
    """
    return run_prepared(config, run_dir, console, lambda: prepare(config, console, load))


def calibrate(
    config: RunConfig, population: Population, optimizer: optax.GradientTransformation
) -> Calibrated:
    """The configuration's mechanism with its noise, for a population."""
    privacy = config.privacy
    return config.mechanism.calibrate(
        population,
        config.train.steps,
        epsilon=privacy.epsilon,
        noise_multiplier=privacy.noise_multiplier,
        delta=privacy.delta,
        optimizer=optimizer,
    )


def _shared(config: RunConfig, known: bool) -> bool:
    """Whether the people evaluated are those trained on; ``known`` as of ``Dataset``."""
    return config.data.split == "within_user" or (known and config.eval.split == "test")


def _beside(config: RunConfig, mechanism: Mechanism) -> bool:
    """Whether a run without privacy is shown beside this one, which has some."""
    return config.eval.baseline and mechanism.private


def run_caveats(config: RunConfig, mechanism: Mechanism, known: bool = False) -> tuple[str, ...]:
    """What a reader of the guarantee must know about this run; ``known`` as of ``Dataset``."""
    evaluation = WITHIN_USER_CAVEAT if _shared(config, known) else EVALUATION_CAVEAT
    if not mechanism.private:
        return (evaluation,)
    caveats = [PRIVATE_METRICS_CAVEAT, evaluation, TUNING_CAVEAT]
    if config.model.checkpoint is not None:
        caveats.append(BASE_CAVEAT)
    if config.pretrain is not None:
        caveats.append(CORPUS_CAVEAT)
    caveats += [*config.data.caveats(), *config.metrics.caveats()]
    if _beside(config, mechanism):
        caveats.append(BASELINE_CAVEAT)
    if config.privacy.delta is None:
        caveats.append(
            "delta is (number of training examples) ** -1.1 as in Charles et al. 2024; the unit is "
            "a user, and there are not as many users as examples: set privacy.delta for another"
        )
    return tuple(caveats)


def _personalized(prepared: CentralRun, result: FitResult, mesh: Mesh) -> Personalization | None:
    """Tuned to each held-out user, if asked for; by all processes together, as all hold a part."""
    config = prepared.config
    if not config.eval.personalize or prepared.held_out is None or result.final is None:
        return None
    return personalize(
        prepared.model.loss,
        result.params,
        prepared.held_out,
        trainable=trained_by_name(config.model, prepared.model),
        mesh=mesh,
    )


def _report(
    prepared: CentralRun, pretrained: Pretrained | None, result: FitResult, facts: dict[str, Any]
) -> dict[str, Any]:
    config, data, population = prepared.config, prepared.data, prepared.population
    baselines = {}
    if data.public is not None and prepared.held_out is not None and data.task.kind == "tokens":
        unigram = UnigramModel.fit(data.public, data.public.schema.vocab_size)
        losses = unigram.losses(prepared.held_out)
        evaluation = summarize(losses, prepared.held_out.user_offsets)
        baselines["unigram model of the public corpus"] = evaluation.to_json()
    held_out = {}
    if prepared.held_out is not None:
        held_out["held_out"] = f"{config.eval.split} part: {data.rules[config.eval.split]}"
    report = build_report(
        config.name,
        result,
        result.guarantee,
        baselines=baselines,
        model={
            **model_facts(config, prepared.model),
            **{name: facts[name] for name in ("base",) if name in facts},
        },
        data={
            "description": data.description,
            **held_out,
            "users": population.num_users,
            "examples": population.num_examples,
        },
        task=dataclasses.asdict(data.task),
        mechanism=prepared.mechanism.to_json(),
        pretrain=None
        if pretrained is None
        else {"path": str(pretrained.path), "cached": pretrained.cached},
    )
    if prepared.bounding is not None:
        report["outside_guarantee"]["contribution_bounding"] = prepared.bounding.to_json()
    if data.task.kind == "tokens":
        report["eval"] = {name: with_perplexity(value) for name, value in report["eval"].items()}
    return report


def with_perplexity(evaluation: dict[str, Any]) -> dict[str, Any]:
    """An evaluation of a language model (losses in nats per token) with perplexities."""
    return {
        **evaluation,
        "perplexity": _exp(evaluation["loss"]),
        "perplexity_by_user": _exp(evaluation["loss_by_user"]),
    }


def _exp(loss: float) -> float | None:
    return math.exp(loss) if loss < 700 else None  # NaN and overflow have no perplexity


# ---- dry run -------------------------------------------------------------------------------


def dry_run(config: RunConfig, console: Console) -> dict[str, Any]:
    """Validates and prices a configuration: parameters, tokens, noise, epsilon. Trains nothing.

    With a ``population`` section no data are read.
    """
    if config.population is None:
        prepared = prepare(config, console)
        mechanism, calibrated = prepared.mechanism, prepared.calibrated
        population = prepared.population
        known, count, stated = prepared.data.known, prepared.count, prepared.about
        for line in prepared.warnings():
            console.print(line)
        model, source = prepared.model, prepared.data.description
        text = prepared.data.tokenizer is not None
        seq_len = math.prod(prepared.data.task.input_shape) if text else 1
    else:
        mechanism = config.mechanism
        optimizer = make_optimizer(config.optimizer, config.train.steps)
        if config.pretrain is not None:
            make_optimizer(config.pretrain.optimizer, config.pretrain.steps)
        declared = config.population

        def count(other: Mechanism) -> Population:
            found = other.participation.declared_population(
                declared.num_users, declared.num_examples, declared.limited_examples
            )
            other.participation.check_population(found)
            return found

        population = count(mechanism)
        model = _declared_model(config)
        calibrated = calibrate(config, population, optimizer)
        mechanism = calibrated.mechanism
        source, seq_len, known = "declared in the config", config.data.seq_len, False

        def stated(guarantee: Guarantee) -> Guarantee:
            inputs = public_inputs(population.description, mechanism.bounds, config)
            key, privacy = key_name(config.data.user_column), config.privacy
            return about(guarantee, key, inputs, privacy.account if privacy.ledger else None)

        seq_len *= 1 if config.model.dpo is None else 2
    caveats = run_caveats(config, mechanism, known)
    guarantee = stated(calibrated.guarantee(caveats=caveats))
    steps, budget = config.train.steps, mechanism.compute_budget
    computed = budget * mechanism.update.passes * seq_len * steps
    pretraining, trained = config.pretrain, check_trainable(config.model, model)
    for line in advice_on_steps(config, calibrated, count, trained):
        console.print(line, highlight=False)
    balance = balance_of_steps(calibrated, trained)
    return {
        "status": "dry-run",
        "name": config.name,
        "population": {**population.to_json(), "source": source},
        "parameters": model.num_params,
        "trained_parameters": trained,
        "steps": steps,
        "examples_per_step": budget,
        "tokens": computed,
        "pretrain_tokens": 0
        if pretraining is None
        else pretraining.steps * pretraining.batch_size * config.data.seq_len,
        # The reference of pairs is evaluated, too.
        "training_flops": (6.0 if config.model.dpo is None else 8.0) * model.num_params * computed,
        "sampling_prob": calibrated.scheme.sampling_prob,
        "noise_multiplier": calibrated.noise_multiplier,
        "noise_on_mean": calibrated.noise_stddev / mechanism.participation.divisor,
        "noise_over_signal": None if balance is None else balance.to_json(),
        "epsilon": guarantee.epsilon if math.isfinite(guarantee.epsilon) else None,
        "delta": calibrated.delta,
        "privacy": guarantee.to_json(),
        "guarantee": str(guarantee),
        "meaning": calibrated.statement(guarantee).in_words(),
    }


def model_facts(config: RunConfig, model: Any) -> dict[str, Any]:
    """What a report says of the model."""
    section = config.model
    name: dict[str, Any] = dict(section.told)
    if section.checkpoint is not None:
        name["checkpoint"] = section.checkpoint
    elif section.is_transformer:
        name["size"] = section.size
    trained = check_trainable(section, model)
    return {**name, "parameters": model.num_params, "trained": trained}


def _declared_model(config: RunConfig) -> LanguageModel:
    if config.model.checkpoint is not None:
        return build_transformer(config, 1, None)
    if "vocab_size" in config.model.overrides:  # the tokeniser's file need not be here
        return build_transformer(config, config.model.overrides["vocab_size"], bos_id=1)
    tokenizer = load_tokenizer(data_section(config).tokenizer)
    return build_transformer(config, tokenizer.vocab_size, tokenizer.bos_id)
