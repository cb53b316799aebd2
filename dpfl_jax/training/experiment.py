"""A configuration made into a run: data, model, pre-training, mechanism, training, report."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh
from rich.console import Console

from dpfl_jax import accounting
from dpfl_jax.config import RunConfig, config_fingerprint, config_to_dict
from dpfl_jax.config.schema import MechanismConfig
from dpfl_jax.data import DataConfig, Dataset, Store, limit_store, load_dataset, load_tokenizer
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import ELS, ULS, Mechanism, NonPrivate, Population
from dpfl_jax.models import LanguageModel, UnigramModel, transformer_config
from dpfl_jax.models.checkpoint import describe
from dpfl_jax.run import processes
from dpfl_jax.run.directory import FINISHED, RunDirectory
from dpfl_jax.run.mesh import make_mesh
from dpfl_jax.training.evaluate import summarize
from dpfl_jax.training.loop import FitResult, fit
from dpfl_jax.training.personalize import Personalization, check_users, personalize
from dpfl_jax.training.pretrain import Pretrained, begin_from
from dpfl_jax.training.report import (
    BASE_CAVEAT,
    EVALUATION_CAVEAT,
    PRIVATE_METRICS_CAVEAT,
    TUNING_CAVEAT,
    WITHIN_USER_CAVEAT,
    build_report,
    with_perplexity,
    write_report,
)
from dpfl_jax.training.start import (
    build_model,
    check_trainable,
    data_section,
    make_optimizer,
    starting_params,
    trained_by_name,
)

LoadData = Callable[[DataConfig], Dataset]


def build_mechanism(config: MechanismConfig) -> Mechanism:
    """The mechanism of a config, not yet calibrated."""
    common: dict[str, Any] = {
        "clip_norm": config.clip_norm,
        "clipping": config.clipping,
        "noise_multiplier": config.noise_multiplier,
    }
    if config.kind == "els":
        return ELS(
            group_size=config.els.group_size,
            batch_size=config.compute_budget,
            sampling_prob=config.sampling_prob,
            **common,
        )
    if config.kind == "uls":
        group_size = config.uls.group_size
        return ULS(
            group_size=group_size,
            cohort_size=config.compute_budget / group_size,
            sampling_prob=config.sampling_prob,
            **common,
        )
    return NonPrivate(batch_size=config.compute_budget)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything a run needs, checked, before anything is written.

    Attributes:
      config: the configuration.
      data: the data set, split.
      held_out: the users that are evaluated.
      mechanism: calibrated.
      population: what it samples from.
      delta: of the guarantee.
      model: the transformer.
      optimizer: of the private phase.
    """

    config: RunConfig
    data: Dataset
    held_out: Store | None
    mechanism: Mechanism
    population: Population
    delta: float
    model: LanguageModel
    optimizer: Any


def prepare(config: RunConfig, console: Console, load: LoadData = load_dataset) -> Prepared:
    """Reads the data and builds everything that the configuration describes.

    Args:
      config: the configuration.
      console: for people.
      load: reads the data (a sweep keeps them from one run to the next).

    Raises:
      BadInputError: anything wrong with the configuration or the data.
    """
    mechanism = build_mechanism(config.mechanism)
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    data, model = read_data(config, console, load)
    population = mechanism.population(data.train.user_offsets)
    with console.status("calibrating noise"):
        mechanism, delta = calibrated(config, mechanism, population)
    held_out: Store | None = getattr(data, config.eval.split)
    if held_out is not None:
        held_out = limit_store(held_out, config.eval.max_users, config.eval.max_examples_per_user)
    if config.eval.personalize:
        if held_out is None:
            raise BadInputError(
                f"eval.personalize needs held-out users, but there is no {config.eval.split} part: "
                f"set data.{config.eval.split}_fraction, or eval.personalize to false"
            )
        check_users(held_out)
    return Prepared(config, data, held_out, mechanism, population, delta, model, optimizer)


def read_data(
    config: RunConfig, console: Console, load: LoadData = load_dataset
) -> tuple[Dataset, LanguageModel]:
    """Reads the data of a configuration; returns them and the model that fits them.

    Raises:
      BadInputError: anything wrong with the sections data, model or pretrain.
    """
    if config.pretrain is not None:
        make_optimizer(config.pretrain.optimizer, config.pretrain.steps)
    if config.model.checkpoint is None:
        transformer_config(config.model.size)
    with console.status("reading data"):
        data = load(data_section(config))
    if config.pretrain is not None and data.public is None:
        raise BadInputError(
            f"pretrain needs a public corpus, but data.source={config.data.source} has none: "
            "remove the pretrain section, or name one as data.public"
        )
    if data.tokenizer is None:
        raise BadInputError(
            f"data.source={config.data.source} holds no token sequences, and a language model "
            "needs them: give text, or a store built from text"
        )
    model = build_model(config, data.train.schema.vocab_size, data.tokenizer.bos_id)
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
    ledger = config.privacy.ledger
    if ledger is not None and not os.path.isabs(ledger):  # load_config makes it absolute
        raise BadInputError(
            f"privacy.ledger is the relative path {ledger!r}, but this configuration was read from "
            "no file that it could be relative to: give the full path"
        )
    kept = config_to_dict(config)
    kept.pop("processes", None)  # where a run computes is no part of it
    identity = (kept, config_fingerprint(config), config.seed)
    processes.check_same({"configuration": identity[1]})
    processes.primary_first(lambda: RunDirectory.check(run_dir, identity[1]))
    prepared = processes.together(lambda: prepare(config, console, load))
    facts: dict[str, Any] = {
        "data": prepared.data.train.fingerprint,
        "noise_multiplier": prepared.mechanism.noise_multiplier,
        "delta": prepared.delta,
    }
    if config.model.checkpoint is not None:
        facts["base"] = describe(config.model.checkpoint)
        facts["checkpoint"] = facts["base"]["digest"]
    directory = _open_directory(run_dir, identity, facts)

    def check_checkpoint() -> None:
        if directory.facts.get("checkpoint") != facts.get("checkpoint"):
            raise BadInputError(
                f"the checkpoint {config.model.checkpoint} is not the one that the run in "
                f"{directory.path} began with: bring it back, or start another run"
            )

    # A resumed run goes on with the noise it began with, whatever calibration would say today.
    mechanism = dataclasses.replace(
        prepared.mechanism, noise_multiplier=directory.facts["noise_multiplier"]
    )
    prepared = dataclasses.replace(prepared, mechanism=mechanism, delta=directory.facts["delta"])
    try:
        processes.together(check_checkpoint)
        return _run(prepared, directory, console)
    finally:
        directory.close()


def _open_directory(
    run_dir: str | os.PathLike[str], identity: tuple[Any, ...], facts: dict[str, Any]
) -> RunDirectory:
    """Process 0 opens (and locks) the directory, the others read the same one."""
    content, fingerprint, seed = identity
    mine = processes.primary_first(lambda: RunDirectory(run_dir, content, fingerprint, seed, facts))
    introduction = processes.broadcast(None if mine is None else mine.introduction())
    return processes.together(lambda: mine or RunDirectory.join(introduction, facts))


def _run(prepared: Prepared, directory: RunDirectory, console: Console) -> dict[str, Any]:
    config, data, mechanism = prepared.config, prepared.data, prepared.mechanism
    mesh = make_mesh(**config.mesh.axes)
    verb = "resuming" if directory.resumed else "starting"
    console.print(f"{verb} [bold]{config.name}[/bold] in {directory.path}")
    console.print(data.description)
    facts = model_facts(config, prepared.model)
    console.print(
        f"transformer {facts.get('checkpoint', facts.get('size'))}: {facts['parameters']:,} "
        f"parameters, {facts['trained']:,} of them trained"
    )
    if mechanism.private:
        console.print(
            f"{mechanism.kind.upper()} with noise multiplier {mechanism.noise_multiplier:.5g}, "
            f"delta {prepared.delta:.3g}, {config.train.steps} steps"
        )
    ledger = processes.primary_first(lambda: _reserve(prepared, directory, console))
    params, pretrained = starting_params(config, data, prepared.model, mesh, console)
    if pretrained is not None:
        begin_from(pretrained, directory, needed=facts["trained"] < facts["parameters"])
    result = fit(
        loss_fn=prepared.model.loss,
        params=params,
        data=data.train,
        mechanism=mechanism,
        optimizer=prepared.optimizer,
        steps=config.train.steps,
        trainable=trained_by_name(config.model, prepared.model.config),
        delta=prepared.delta,
        validation=prepared.held_out,
        microbatch_size=config.train.microbatch_size,
        mesh=mesh,
        strategy=config.train.strategy,
        group_buckets=config.train.group_buckets,
        examples_at_once=config.train.examples_at_once,
        split_users=config.mesh.split_users,
        run_dir=directory,
        checkpoint_every=config.train.checkpoint_every,
        keep_checkpoints=config.train.keep_checkpoints,
        eval_every=config.train.eval_every,
        eval_batch_size=config.eval.batch_size,
        log_every=config.train.log_every,
        caveats=run_caveats(config, mechanism),
        console=console,
    )
    personal = _personalized(prepared, result, mesh)
    if not directory.writes:
        status = FINISHED if result.interrupted is None else "interrupted"
        return {"status": status, "steps": result.steps, "run_dir": str(directory.path)}
    report = _report(prepared, pretrained, result, directory.facts)
    if personal is not None:
        report["personalization"] = dataclasses.asdict(personal)
    report["run_dir"] = str(directory.path)
    if ledger is not None and result.interrupted is None:
        ledger.commit(directory.run_id)
    write_report(directory.path, report, result.metrics)
    return report


def _reserve(
    prepared: Prepared, directory: RunDirectory, console: Console
) -> accounting.Ledger | None:
    """Charges the whole run to the ledger before its first step, if the config names one."""
    privacy, mechanism = prepared.config.privacy, prepared.mechanism
    if privacy.ledger is None:
        return None
    ledger = accounting.Ledger(privacy.ledger)
    assert privacy.account is not None  # the config is validated
    account = accounting.Account(dataset=privacy.account)
    reservation = ledger.reserve(
        account,
        directory.run_id,
        mechanism.event(prepared.population, prepared.config.train.steps),
        prepared.delta,
        privacy.budget,
    )
    left = "" if reservation.left is None else f", {reservation.left:.4g} left"
    lines = [f"a new ledger was made at {ledger.path}"] * reservation.new_ledger
    lines.append(
        f"ledger {ledger.path}, account {privacy.account}: epsilon {reservation.before:.4g} spent "
        f"before this run, {reservation.after:.4g} with it{left} (delta {prepared.delta:.3g})"
    )
    console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
    return ledger


def calibrated(
    config: RunConfig, mechanism: Mechanism, population: Population
) -> tuple[Mechanism, float]:
    """The mechanism with its noise multiplier, and delta."""
    if population.num_units == 0:
        raise BadInputError("the training set has no usable example: check the data section")
    delta = config.privacy.delta
    delta = population.default_delta() if delta is None else delta
    mechanism.sampling_probability(population)
    if mechanism.private and mechanism.noise_multiplier is None:
        assert config.privacy.epsilon is not None
        mechanism = mechanism.calibrate(
            population, config.train.steps, config.privacy.epsilon, delta
        )
    return mechanism, delta


def evaluation_caveat(config: RunConfig) -> str:
    """Whose data held-out losses are computed from."""
    return EVALUATION_CAVEAT if config.data.split == "by_user" else WITHIN_USER_CAVEAT


def run_caveats(config: RunConfig, mechanism: Mechanism) -> tuple[str, ...]:
    """What a reader of the guarantee must know about this run."""
    if not mechanism.private:
        return (evaluation_caveat(config),)
    caveats = [PRIVATE_METRICS_CAVEAT, evaluation_caveat(config), TUNING_CAVEAT]
    if config.model.checkpoint is not None:
        caveats.append(BASE_CAVEAT)
    if config.data.max_users is not None:
        caveats.append(
            "data.max_users keeps a fixed number of users, so that adding a person to the raw data "
            "can displace another: the guarantee is for adding or removing one of the users kept"
        )
    if config.privacy.delta is None:
        caveats.append(
            "delta is (number of training examples) ** -1.1 as in Charles et al. 2024; the unit is "
            "a user, and there are fewer users than examples: set privacy.delta for a stricter one"
        )
    return tuple(caveats)


def _personalized(prepared: Prepared, result: FitResult, mesh: Mesh) -> Personalization | None:
    """Tuned to each held-out user, if asked for; by all processes together, as all hold a part."""
    config = prepared.config
    if not config.eval.personalize or prepared.held_out is None or result.final is None:
        return None
    return personalize(
        prepared.model.loss,
        result.params,
        prepared.held_out,
        trainable=trained_by_name(config.model, prepared.model.config),
        mesh=mesh,
    )


def _report(
    prepared: Prepared, pretrained: Pretrained | None, result: FitResult, facts: dict[str, Any]
) -> dict[str, Any]:
    config, data, population = prepared.config, prepared.data, prepared.population
    baselines = {}
    if data.public is not None and prepared.held_out is not None:
        unigram = UnigramModel.fit(data.public, data.public.schema.vocab_size)
        losses = unigram.losses(prepared.held_out)
        evaluation = summarize(losses, prepared.held_out.user_offsets)
        baselines["unigram model of the public corpus"] = evaluation.to_json()
    report = build_report(
        result,
        name=config.name,
        finished_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        baselines=baselines,
        model={
            **model_facts(config, prepared.model),
            **{name: facts[name] for name in ("base",) if name in facts},
        },
        data={
            "description": data.description,
            "keyed_digest": facts["data"],
            "users": population.num_users,
            "examples": population.num_examples,
        },
        mechanism={"kind": prepared.mechanism.kind, **dataclasses.asdict(prepared.mechanism)},
        pretrain=None
        if pretrained is None
        else {"path": str(pretrained.path), "cached": pretrained.cached},
    )
    report["eval"] = {name: with_perplexity(value) for name, value in report["eval"].items()}
    return report


# ---- dry run -------------------------------------------------------------------------------


def dry_run(config: RunConfig, console: Console) -> dict[str, Any]:
    """Validates and prices a configuration: parameters, tokens, noise, epsilon. Trains nothing.

    With a ``population`` section no data are read.
    """
    if config.population is None:
        prepared = prepare(config, console)
        mechanism, population, delta = prepared.mechanism, prepared.population, prepared.delta
        model, source = prepared.model, prepared.data.description
    else:
        mechanism = build_mechanism(config.mechanism)
        make_optimizer(config.optimizer, config.train.steps)
        if config.pretrain is not None:
            make_optimizer(config.pretrain.optimizer, config.pretrain.steps)
        population = _declared_population(config, mechanism)
        model = _declared_model(config)
        mechanism, delta = calibrated(config, mechanism, population)
        source = "declared in the config"
    guarantee = mechanism.guarantee(
        population, config.train.steps, delta, run_caveats(config, mechanism)
    )
    steps, budget, seq_len = (
        config.train.steps,
        config.mechanism.compute_budget,
        config.data.seq_len,
    )
    pretraining = config.pretrain
    return {
        "status": "dry-run",
        "name": config.name,
        "population": {**dataclasses.asdict(population), "source": source},
        "parameters": model.num_params,
        "trained_parameters": check_trainable(config.model, model),
        "steps": steps,
        "examples_per_step": budget,
        "tokens": budget * seq_len * steps,
        "pretrain_tokens": 0
        if pretraining is None
        else pretraining.steps * pretraining.batch_size * seq_len,
        "training_flops": 6.0 * model.num_params * budget * seq_len * steps,
        "sampling_prob": mechanism.sampling_probability(population),
        "noise_multiplier": mechanism.noise_multiplier,
        "noise_on_mean": mechanism.noise.stddev / mechanism.divisor,
        "epsilon": guarantee.epsilon if math.isfinite(guarantee.epsilon) else None,
        "delta": delta,
        "privacy": guarantee.to_json(),
        "guarantee": str(guarantee),
    }


def model_facts(config: RunConfig, model: LanguageModel) -> dict[str, Any]:
    """What a report says of the model."""
    section = config.model
    name = {"size": section.size}
    if section.checkpoint is not None:
        name = {"checkpoint": section.checkpoint}
    trained = check_trainable(section, model)
    return {**name, "parameters": model.num_params, "trained": trained}


def _declared_model(config: RunConfig) -> LanguageModel:
    if config.model.checkpoint is not None:
        return build_model(config, 1)
    if "vocab_size" in config.model.overrides:  # the tokeniser's file need not be here
        return build_model(config, config.model.overrides["vocab_size"], bos_id=1)
    tokenizer = load_tokenizer(data_section(config).tokenizer)
    return build_model(config, tokenizer.vocab_size, tokenizer.bos_id)


def _declared_population(config: RunConfig, mechanism: Mechanism) -> Population:
    declared = config.population
    assert declared is not None
    units = declared.num_examples
    if isinstance(mechanism, ULS):
        units = declared.num_users
    if isinstance(mechanism, ELS):
        if declared.num_limited_examples is None:
            raise BadInputError(
                "population.num_limited_examples is not set: pricing ELS needs the number of "
                f"examples left with at most {mechanism.group_size} per user"
            )
        units = declared.num_limited_examples
    return Population(declared.num_users, declared.num_examples, units)
