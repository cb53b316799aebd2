"""The model of a finished run, read from its directory: for export and sampling."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
import yaml
from jax.sharding import Mesh

from dpfl_jax.clipping import split
from dpfl_jax.config import RunConfig, validate_config
from dpfl_jax.config.kinds import CENTRAL
from dpfl_jax.data import load_tokenizer
from dpfl_jax.data.tokenizers import Tokenizer
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Population
from dpfl_jax.mesh import make_mesh, parameter_shardings, replicated
from dpfl_jax.models import LanguageModel, with_reference
from dpfl_jax.models.checkpoint import fingerprint
from dpfl_jax.models.checkpoint.load import flat_paths, nested
from dpfl_jax.models.lora import merge, without_adapters
from dpfl_jax.run.checkpoint import Checkpoints, load_params
from dpfl_jax.run.content import content_digest
from dpfl_jax.run.directory import FINISHED
from dpfl_jax.run.state import TrainState, shardings_of
from dpfl_jax.training.canaries import around
from dpfl_jax.training.filtered import no_spending
from dpfl_jax.training.start import (
    base_from_checkpoint,
    build_transformer,
    data_section,
    make_optimizer,
    trained_by_name,
)

PyTree = Any


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """What a run ended with, or its best checkpoint.

    Attributes:
      config: of the run.
      model: without adapters.
      params: with the run's adapters merged.
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
    mesh: Mesh | None = None,
    dtype: str | None = None,
    which: Literal["last", "best"] = "last",
) -> TrainedModel:
    """Reads the model that a finished run left.

    Args:
      run: run directory.
      mesh: where the parameters go; default the first device.
      dtype: of projections that adapters are merged into; default the frozen parameters'.
      which: checkpoint, the last or the one with the lowest held-out loss.

    Raises:
      BadInputError: no finished run of a language model, or its base is not there any more.
    """
    directory = pathlib.Path(run)
    config, report = _read(directory)
    step = report["steps"] if which == "last" else report["best_step"]
    if step is None:
        raise BadInputError(
            f"the run in {directory} kept no best checkpoint: train with train.keep_best=true and "
            "train.eval_every, or take the last"
        )
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    tokenizer = load_tokenizer(data_section(config).tokenizer)
    model = build_transformer(config, tokenizer.vocab_size, tokenizer.bos_id)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    trainable = trained_by_name(config.model, model)
    if config.model.dpo is not None:  # the checkpoint has a place for it
        shapes = with_reference(shapes, trainable)
    like, frozen = split(shapes, trainable)
    chosen = flat_paths(_checkpoint(directory, config, report, step, like, mesh))
    if jax.tree.leaves(frozen):
        chosen = {**flat_paths(_base(config, report, model, mesh)), **chosen}
    params = merge(nested(chosen), model.config.lora, dtype or config.model.frozen_dtype)
    plain = LanguageModel(dataclasses.replace(model.config, lora=None))
    return TrainedModel(config, plain, params, tokenizer, report, step)


def _read(directory: pathlib.Path) -> tuple[RunConfig, dict[str, Any]]:
    if not (directory / "config.yaml").exists():
        raise BadInputError(f"{directory} is not a run directory: it has no config.yaml")
    report_file = directory / "report.json"
    report = json.loads(report_file.read_text()) if report_file.exists() else {}
    if report.get("status") != FINISHED:
        raise BadInputError(
            f"the run in {directory} is not finished: go on with `dpfl train` and its --run-dir"
        )
    known = yaml.safe_load((directory / "config.yaml").read_text())
    config = validate_config(known["config"], str(directory / "config.yaml"))
    if not isinstance(config, RunConfig):
        raise BadInputError(f"the run in {directory} is federated: its model cannot be exported")
    path = config.model.checkpoint
    if path is not None and fingerprint(path) != known["facts"].get("checkpoint"):
        raise BadInputError(
            f"the checkpoint {path} is not the one that the run in {directory} began with"
        )
    return config, report


def _checkpoint(
    directory: pathlib.Path,
    config: RunConfig,
    report: dict[str, Any],
    step: int,
    like: PyTree,
    mesh: Mesh,
) -> PyTree:
    """The trained parameters after ``step`` steps, which the report names."""
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    if config.audit is not None:
        like, optimizer = around(like, optimizer, config.audit, config.train.steps)
    ran = CENTRAL.parse(CENTRAL.dump(config.mechanism) | report["mechanism"])
    noise = jax.eval_shape(ran.noise_transform().init, like).memory
    state = TrainState(
        params=like,
        opt_state=jax.eval_shape(optimizer.init, like),
        step=jax.ShapeDtypeStruct((), jnp.int32),  # type: ignore[arg-type]
        noise=noise,
    )
    state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        state,
        shardings_of(like, optimizer, mesh, noise=noise),
    )
    people = report["data"]
    if ran.filter(Population(people["users"], people["examples"], people["users"])) is not None:
        hidden = no_spending(people["users"])
        place = replicated(mesh)
        units = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=place)
        state = dataclasses.replace(state, units=units)
    checkpoints = Checkpoints(directory / "checkpoints", config.train.keep_checkpoints)
    try:
        kept = checkpoints.steps()
        if step not in kept:
            raise BadInputError(
                f"the checkpoints in {directory} are of steps {kept}, but its report tells of "
                f"{step} steps: the guarantee would not be that of this model; bring it back"
            )
        params = checkpoints.read(state, step)[0].params
        return params if config.audit is None else params["model"]
    finally:
        checkpoints.close()


def _base(config: RunConfig, report: dict[str, Any], model: LanguageModel, mesh: Mesh) -> PyTree:
    """All parameters but adapters, as they were before the private phase."""
    if config.model.checkpoint is not None:
        return base_from_checkpoint(config, model, mesh)
    shapes = without_adapters(jax.eval_shape(model.init, jax.random.key(0)))
    if config.pretrain is None:
        return model.init(jax.random.key(config.init_seed))
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
    return base
