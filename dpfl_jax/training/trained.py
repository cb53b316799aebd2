"""The model of a finished run, read from its directory: for export and sampling."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dpfl_jax.accounting import digests
from dpfl_jax.accounting.statement import NAME, Statement, read, read_report
from dpfl_jax.config import RunConfig, validate_config
from dpfl_jax.config.load import read_sections
from dpfl_jax.data import load_tokenizer
from dpfl_jax.data.tokenizers import Tokenizer
from dpfl_jax.errors import BadInputError
from dpfl_jax.mesh import make_mesh, parameter_shardings
from dpfl_jax.models import LanguageModel, not_reference
from dpfl_jax.models.checkpoint import fingerprint
from dpfl_jax.models.params import flat_paths, merge, nested, without_adapters
from dpfl_jax.run.checkpoint import Checkpoints, load_params, released
from dpfl_jax.run.content import content_digest
from dpfl_jax.run.directory import finished_report
from dpfl_jax.training.start import (
    base_from_checkpoint,
    build_transformer,
    data_section,
    with_adapters,
)

PyTree = Any


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """What a run ended with, or its best checkpoint.

    Attributes:
      config: of the run.
      model: without adapters, if they were merged.
      params: likewise.
      tokenizer: of its data.
      report: content of report.json.
      step: of the checkpoint.
    """

    config: RunConfig
    model: LanguageModel
    params: PyTree
    tokenizer: Tokenizer
    report: dict[str, Any]
    step: int


def load_trained(
    run: str | os.PathLike[str],
    dtype: str | None = None,
    which: Literal["last", "best"] = "last",
    merged: bool = True,
) -> TrainedModel:
    """Reads the language model that a finished run left.

    Args:
      run: run directory.
      dtype: of projections that adapters are merged into; default the frozen parameters'.
      which: checkpoint, the last or the one with the lowest held-out loss.
      merged: whether adapters become part of the projections beside them.

    Raises:
      BadInputError: no finished run of a language model, or its base is not there any more.
    """
    directory = pathlib.Path(run)
    kept = read_run(directory, which)
    config, report, step = kept.config, kept.report, kept.step
    if config is None or config.variant != "central":
        raise BadInputError(
            f"the run in {directory} is no central run of a language model: `dpfl export` writes "
            "any run's parameters"
        )
    path = config.model.checkpoint
    if path is not None and fingerprint(path) != kept.facts.get("checkpoint"):
        raise BadInputError(
            f"the checkpoint {path} is not the one that the run in {directory} began with"
        )
    tokenizer = load_tokenizer(data_section(config).tokenizer)
    model = build_transformer(config, tokenizer.vocab_size, tokenizer.bos_id)
    chosen = flat_paths(kept.released)
    if set(chosen) < set(flat_paths(jax.eval_shape(model.init, jax.random.key(0)))):
        chosen = {**flat_paths(_base(config, report, model)), **chosen}
    chosen = {name: jnp.asarray(x) for name, x in chosen.items() if not_reference(name)}
    if not merged:
        return TrainedModel(config, model, nested(chosen), tokenizer, report, step)
    params = merge(nested(chosen), model.config.lora, dtype or config.model.frozen_dtype)
    plain = LanguageModel(dataclasses.replace(model.config, lora=None))
    return TrainedModel(config, plain, params, tokenizer, report, step)


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """What the directory of a finished run says, of any system.

    Attributes:
      config: None of a run by ``fit``, which has none.
      facts: what it was started with beyond it.
      report: content of report.json.
      step: of the checkpoint.
      stated: content of guarantee.json.
      released: parameters, on the host; None where one was not trained.
    """

    config: Any
    facts: dict[str, Any]
    report: dict[str, Any]
    step: int
    stated: Statement
    released: PyTree


def read_run(directory: pathlib.Path, which: Literal["last", "best"] = "last") -> FinishedRun:
    """Reads what a finished run says of itself; arguments as of ``load_trained``.

    Raises:
      BadInputError: it is none, is not finished, or has no such checkpoint.
    """
    if not (directory / "config.yaml").is_file():
        raise BadInputError(f"{directory} is not a run directory: it has no config.yaml")
    report = finished_report(directory)
    if report is None:
        raise BadInputError(
            f"the run in {directory} is not finished: go on with `dpfl train` and its --run-dir"
        )
    stated = read(directory / NAME)
    _, unlike = read_report(directory, stated)
    if unlike:
        raise BadInputError(f"{unlike}: bring it back")
    _refuse_changed(directory, stated, digests.CONFIG)
    known = read_sections(directory / "config.yaml")
    told = known["config"]
    config = validate_config(told, str(directory / "config.yaml")) if "data" in told else None
    step = report["steps"] if which == "last" else report["best_step"]
    if step is None:
        raise BadInputError(
            f"the run in {directory} kept no best checkpoint: train with train.keep_best=true and "
            "train.eval_every, or take the last"
        )
    checkpoints = Checkpoints(directory / "checkpoints", 1)
    kept = checkpoints.steps()
    checkpoints.close()
    if step not in kept:
        raise BadInputError(
            f"the checkpoints in {directory} are of steps {kept}, but its report tells of "
            f"{step} steps: the guarantee would not be that of this model; bring it back"
        )
    _refuse_changed(directory, stated, digests.checkpoint(step))
    params = released(checkpoints.directory, step)
    if told.get("audit") is not None:  # canaries are beside it
        params = params["model"]
    return FinishedRun(config, known["facts"], report, step, stated, params)


def _refuse_changed(directory: pathlib.Path, stated: Statement, name: str) -> None:
    """Raises BadInputError unless a file of a run is the one that its guarantee was written for."""
    if stated.digests is None:  # of a release that had none
        return
    if changed := digests.compare(directory, stated.digests.run, [name]).changed:
        raise BadInputError(f"{changed[0]}: bring it back")


def _base(config: RunConfig, report: dict[str, Any], model: LanguageModel) -> PyTree:
    """All parameters as they were before the private phase; adapters, too."""
    key, mesh = jax.random.key(config.init_seed), make_mesh(devices=jax.devices()[:1])
    if config.model.checkpoint is not None:
        return with_adapters(base_from_checkpoint(config, model, mesh), model, key, mesh)
    if config.pretrain is None:
        return model.init(key)
    shapes = without_adapters(jax.eval_shape(model.init, key))
    like = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        parameter_shardings(shapes, mesh),
    )
    path = pathlib.Path(report["pretrain"]["path"])
    if not path.exists():
        raise BadInputError(f"the pre-trained checkpoint {path} of this run is not there any more")
    base = load_params(path, like)
    known = report["model"].get("base")
    if known is not None and content_digest(base) != known["digest"]:
        raise BadInputError(
            f"the pre-trained checkpoint {path} is not the one that this run began with: bring it "
            "back"
        )
    return with_adapters(base, model, key, mesh)
