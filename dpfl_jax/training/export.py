"""The model of a finished run: read from its directory, and exported with its guarantee."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import yaml

from dpfl_jax import __version__, buckets
from dpfl_jax.accounting import digests
from dpfl_jax.accounting.statement import NAME, Statement
from dpfl_jax.config import RunConfig, validate_config
from dpfl_jax.config.load import read_sections
from dpfl_jax.data import load_tokenizer
from dpfl_jax.data.tokenizers import Tokenizer
from dpfl_jax.errors import BadInputError, positive
from dpfl_jax.mesh import make_mesh, parameter_shardings
from dpfl_jax.models import LanguageModel, not_reference
from dpfl_jax.models.checkpoint import fingerprint, save_adapter, save_checkpoint
from dpfl_jax.models.checkpoint.families import family_of
from dpfl_jax.models.params import flat_paths, is_adapter, merge, nested, without_adapters
from dpfl_jax.run.checkpoint import Checkpoints, load_params, released
from dpfl_jax.run.directory import (
    finished_report,
    refuse_changed,
    stated_report,
    write_atomically,
)
from dpfl_jax.run.state import content_digest
from dpfl_jax.task import Task
from dpfl_jax.training.exported import filled, library_model, save_named
from dpfl_jax.training.modules import built, functional
from dpfl_jax.training.start import (
    base_from_checkpoint,
    build_transformer,
    data_section,
    trained_by_name,
    with_adapters,
)

PyTree = Any


def export(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    dtype: str = "float32",
    max_file_bytes: int = 5 * 10**9,
    which: Literal["last", "best"] = "last",
    adapter: bool = False,
    build: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Writes a run's model in the Hugging Face layout if it has one, with adapters merged.

    Any other model is written by the names of its parameters (``exported.load_exported``).

    Args:
      run: directory of a finished run, of any kind or of ``fit``.
      out: a directory that does not exist or is empty.
      dtype: dtype of the tensors, float32 or bfloat16.
      max_file_bytes: largest size of one file; larger models are split.
      which: the last checkpoint, or the one with the lowest held-out loss.
      adapter: whether to write only adapters, as ``peft`` reads them.
      build: the function that ``model.module`` named; needed if some of what it builds was not
        trained, as nothing is imported because a run's directory says so.

    Returns:
      out, layout, parameters, guarantee (in words) and privacy (its fields).

    Raises:
      BadInputError: the run is not finished, its base is gone, or it trained no adapters.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import optax
      >>> import dpfl_jax as dpfl
      >>> store = dpfl.from_arrays({"x": np.ones((64, 1), "float32")}, users=np.arange(64))
      >>> mechanism = dpfl.uls(group_size=1, cohort_size=16)
      >>> plan = mechanism.plan(store, steps=2, epsilon=8.0, delta=1e-3)
      >>> def loss(params, example):
      ...     return jnp.sum(example["x"] * params["w"])
      >>> folder, start = tempfile.mkdtemp(), {"w": jnp.zeros(1)}
      >>> result = dpfl.fit(loss, start, plan, optax.sgd(0.1), run_dir=f"{folder}/run")
      >>> written = dpfl.export(f"{folder}/run", f"{folder}/model")
      >>> sorted(written)
      ['guarantee', 'layout', 'out', 'parameters', 'privacy', 'step']
    """
    positive("max_file_bytes", max_file_bytes)
    with buckets.output(out) as place, _whole_or_nothing(place):
        kept = read_run(run, which)
        size: dict[str, Any] = {"dtype": dtype, "max_file_bytes": max_file_bytes}
        base = None
        is_central = kept.config is not None and kept.config.variant == "central"
        if is_central and kept.config.model.is_transformer:
            base = kept.config.model.checkpoint
            trained = language_model(kept, dtype, merged=not adapter)
            if adapter:
                target, layout = _adapter(trained, place, dtype), "peft"
                number = sum(x.size for n, x in flat_paths(trained.params).items() if is_adapter(n))
            else:
                target, layout = _transformer(place, trained.model, trained.params, base, size)
                number = trained.model.num_params
        elif adapter:
            raise BadInputError(f"the run in {kept.path} trained no adapters: leave out --adapter")
        else:
            target, layout, number = _other(kept, place, size, build)
        report = kept.report
        facts = dict(report.get("model", {}))
        if base is not None:
            facts["checkpoint"] = pathlib.Path(base).name  # its folder may be private
        facts_of_run = {
            "run": report["name"],
            "steps": report["steps"],
            "exported_step": kept.step,
            "finished_at": report["finished_at"],
            "model": facts,
            "dpfl_jax": __version__,
        }
        write_atomically(target / "run.json", json.dumps(facts_of_run, indent=2) + "\n")
        stated = kept.stated.tied(exported=digests.of_export(target, NAME))
        # After the digests are taken: its author goes on writing it.
        write_atomically(target / "README.md", _model_card(facts_of_run, stated, layout))
        write_atomically(target / NAME, stated.dumps())
    return {
        "out": buckets.as_given(str(target)),
        "layout": layout,
        "parameters": number,
        "step": kept.step,
        "guarantee": stated.text,
        "privacy": stated.privacy.to_json(),
    }


def _model_card(facts: dict[str, Any], stated: Statement, layout: str) -> str:
    """The README.md of an export, with the front matter of Hugging Face's model cards."""
    base = facts["model"].get("checkpoint")
    private = stated.privacy.private
    front: dict[str, Any] = {"tags": ["dpfl_jax", *(["differential-privacy"] if private else [])]}
    if layout != "named":
        library = "peft" if layout == "peft" else "transformers"
        front |= {"library_name": library, "pipeline_tag": "text-generation"}
    began = f", from the public checkpoint {base}" if base else ""
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {facts['run']}\n\n"
        f"Trained with{'' if private else 'out'} differential privacy{began}, in {facts['steps']} "
        f"steps, by dpfl_jax {facts['dpfl_jax']}.\n\n## What is guaranteed\n\n{stated.text}\n\n"
        "`guarantee.json` states this for programs, and is tied to the model's files by their "
        "digests: `dpfl verify FOLDER` recomputes it. `run.json` has the facts of the run.\n\n"
        "## Intended use, data, evaluation, limits\n\n"
        "To be written by whoever publishes the model. Losses on held-out people are not covered "
        "by the guarantee; scores on public tasks are.\n"
    )


@contextlib.contextmanager
def _whole_or_nothing(out: pathlib.Path) -> Iterator[None]:
    """Removes a partial export, as a model must not be left without its guarantee."""
    ours = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    try:
        yield
    except BaseException as error:
        for path in out.iterdir() if ours and out.is_dir() else ():
            path.unlink()
        if "No space left" in str(error):  # safetensors raises its own class
            raise BadInputError(
                f"the export to {out} was not written, as the disk is full: free space, and repeat "
                "the command"
            ) from error
        raise


def _adapter(trained: Any, out: Any, dtype: str) -> pathlib.Path:
    section, model = trained.config.model, trained.model
    if section.checkpoint is None:
        raise BadInputError(
            "adapters alone belong to a checkpoint in the Hugging Face layout, but the run began "
            "without model.checkpoint: leave out --adapter"
        )
    chosen = trained_by_name(section, model) or (lambda _: True)
    others = [n for n in flat_paths(trained.params) if chosen(n) and not is_adapter(n)]
    if section.lora is None or others:
        what = f"trained {others[0]}, too" if section.lora else "has none (model.lora)"
        raise BadInputError(f"adapters alone are not what this run made: it {what}")
    return save_adapter(out, model, trained.params, base=section.checkpoint, dtype=dtype)


def _transformer(
    out: Any, model: LanguageModel, params: PyTree, base: str | None, size: dict[str, Any]
) -> tuple[pathlib.Path, str]:
    if base is not None or family_of(model.config):
        return save_checkpoint(out, model.config, params, like=base, **size), "huggingface"
    structure = {"transformer": dataclasses.asdict(model.config)}
    return save_named(out, params, structure, **size)[0], "named"


def _other(
    kept: FinishedRun, out: Any, size: dict[str, Any], build: Callable[..., Any] | None
) -> tuple[pathlib.Path, str, int]:
    """Exports any run that is not central training of a language model."""
    params, config = kept.released, kept.config
    structure: dict[str, Any] = {}
    task_section = kept.report.get("task")
    if config is not None and config.variant == "isrl":  # one matrix
        scaled = {"scale": None, "target": None, "names": None, **kept.report.get("inputs", {})}
        linear = {**scaled, "max_norm": config.data.max_norm}
        structure = {"loss": config.model.loss, "task": task_section, "linear": linear}
    elif config is None:  # from `fit`
        structure = {"loss": kept.report.get("loss"), "task": task_section}
    else:
        section, task = config.model, Task.from_json(kept.report["task"])
        key = jax.random.key(config.init_seed)
        loss = "classification" if task.kind == "classes" else task.kind
        structure = {"task": task_section, "options": section.options, "loss": loss}
        if section.module is not None:
            structure["module"] = section.module
            digest = kept.report["model"].get("base", {}).get("digest")
            params = filled(params, lambda: _built(build, section, task, key, digest))
        else:
            structure["kind"] = section.kind
            model = library_model(structure, task)
            if isinstance(model, LanguageModel):
                return *_transformer(out, model, params, None, size), model.num_params
            params = filled(params, lambda: model.init(key))
    target, number = save_named(out, params, structure, **size)
    return target, "named", number


def _built(
    build: Callable[..., Any] | None, section: Any, task: Task, key: jax.Array, digest: str
) -> PyTree:
    """The initial parameters of ``model.module``, which hold those that were not trained."""
    if build is None:
        raise BadInputError(
            f"some of what {section.module} builds was not trained, and is not in the run: give "
            f"that function, if its code may run: --module {section.module} (export: build=)"
        )
    params = functional(built(build, section.module, task, section.options, key)[1]).params
    if content_digest(params) != digest:
        raise BadInputError(
            f"model.module={section.module} does not build what the run began with, and some of "
            "that was not trained: bring its code back"
        )
    return params


# ---- the model of a finished run -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """The language model of a run's last or best checkpoint.

    Attributes:
      config: the run's configuration.
      model: the model, without adapters if they were merged.
      params: its parameters.
      tokenizer: the tokeniser of its data.
      step: the step of the checkpoint.
    """

    config: RunConfig
    model: LanguageModel
    params: PyTree
    tokenizer: Tokenizer
    step: int


def load_trained(
    run: str | os.PathLike[str], which: Literal["last", "best"] = "last"
) -> TrainedModel:
    """Reads the language model of a finished run, with adapters merged.

    Args:
      run: run directory.
      which: the last checkpoint, or the one with the lowest held-out loss.

    Raises:
      BadInputError: it is not a finished run of a language model, or its base is gone.
    """
    return language_model(read_run(run, which))


def language_model(
    kept: FinishedRun, dtype: str | None = None, merged: bool = True
) -> TrainedModel:
    """Returns the language model of a run that was read.

    Args:
      kept: the run.
      dtype: dtype of projections that adapters are merged into; default the frozen parameters'.
      merged: whether adapters are merged into their projections.

    Raises:
      BadInputError: it is not a run of a language model, or its base is gone.
    """
    config = kept.config
    if config is None or config.variant != "central":
        raise BadInputError(
            f"the run in {kept.path} is not a central run of a language model: `dpfl export` "
            "writes any run's parameters"
        )
    path = config.model.checkpoint
    if path is not None and fingerprint(path) != kept.facts.get("checkpoint"):
        raise BadInputError(
            f"the checkpoint {path} is not the one that the run in {kept.path} began with"
        )
    tokenizer = load_tokenizer(data_section(config).tokenizer)
    model = build_transformer(config, tokenizer.vocab_size, tokenizer.bos_id)
    chosen = flat_paths(kept.released)
    if set(chosen) < set(flat_paths(jax.eval_shape(model.init, jax.random.key(0)))):
        chosen = {**flat_paths(base_params(config, kept.report, model)), **chosen}
    chosen = {name: jnp.asarray(x) for name, x in chosen.items() if not_reference(name)}
    if not merged:
        return TrainedModel(config, model, nested(chosen), tokenizer, kept.step)
    params = merge(nested(chosen), model.config.lora, dtype or config.model.frozen_dtype)
    plain = LanguageModel(dataclasses.replace(model.config, lora=None))
    return TrainedModel(config, plain, params, tokenizer, kept.step)


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """The content of the directory of a finished run of any kind.

    Attributes:
      path: the directory.
      config: the configuration; None for a run of ``fit``.
      facts: what was stored of the run besides the configuration.
      report: content of report.json.
      step: the step of the checkpoint.
      stated: content of guarantee.json.
      released: parameters on the host; None where one was not trained.
    """

    path: pathlib.Path
    config: Any
    facts: dict[str, Any]
    report: dict[str, Any]
    step: int
    stated: Statement
    released: PyTree


def read_run(run: str | os.PathLike[str], which: Literal["last", "best"] = "last") -> FinishedRun:
    """Reads the directory of a finished run, and the released parameters of a checkpoint.

    Raises:
      BadInputError: it is not a run, is not finished, or has no such checkpoint.
    """
    directory = buckets.folder(run)
    if not (directory / "config.yaml").is_file():
        raise BadInputError(f"{directory} is not a run directory: it has no config.yaml")
    report = finished_report(directory)
    if report is None:
        raise BadInputError(
            f"the run in {directory} is not finished: resume it with `dpfl train` and its --run-dir"
        )
    stated, _ = stated_report(directory)
    known = read_sections(directory / "config.yaml")
    section = known["config"]
    config = validate_config(section, str(directory / "config.yaml")) if "data" in section else None
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
            f"the checkpoints in {directory} are of steps {kept}, but its report states step "
            f"{step}: the guarantee would not be that of this model; bring it back"
        )
    refuse_changed(directory, stated, digests.checkpoint(step))
    params = released(checkpoints.directory, step)
    if section.get("audit") is not None:  # without the coordinates of canaries
        params = params["model"]
    return FinishedRun(directory, config, known["facts"], report, step, stated, params)


def base_params(config: RunConfig, report: dict[str, Any], model: LanguageModel) -> PyTree:
    """Returns all parameters before the private phase of a run, adapters included.

    Raises:
      BadInputError: what the run began with is gone, or was changed.
    """
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
        raise BadInputError(f"the pre-trained checkpoint {path} of this run is gone: bring it back")
    base = load_params(path, like)
    known = report["model"].get("base")
    if known is not None and content_digest(base) != known["digest"]:
        raise BadInputError(
            f"the pre-trained checkpoint {path} is not the one that this run began with: bring it "
            "back"
        )
    return with_adapters(base, model, key, mesh)
