"""The model that private training starts from (with pre-training), and what it trains of it.

The model is a checkpoint in the Hugging Face layout, or has one of the named sizes; its parameters
come from the checkpoint, from pre-training on the public corpus, or from the initial key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import fnmatch
import hashlib
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from dpfl_jax.buckets import located
from dpfl_jax.config import RunConfig, config_to_dict
from dpfl_jax.config.schema import ModelConfig
from dpfl_jax.data import DataConfig, Dataset, Store
from dpfl_jax.data.pipeline import local_columns, ship_columns
from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError
from dpfl_jax.files import default_cache_dir
from dpfl_jax.mesh import parameter_shardings, place, splits_parameters, unit_axes, unit_parts
from dpfl_jax.models import (
    LanguageModel,
    PreferenceModel,
    build_by_name,
    not_reference,
    transformer_config,
    with_reference,
)
from dpfl_jax.models.checkpoint import load_checkpoint, read_config, tokenizer_file
from dpfl_jax.models.params import flat_paths, is_adapter, nested
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import processes
from dpfl_jax.run.checkpoint import load_params, save_params
from dpfl_jax.run.console import StepProgress
from dpfl_jax.run.directory import RunDirectory, open_plain
from dpfl_jax.run.state import content_digest, shardings_of
from dpfl_jax.task import Task
from dpfl_jax.training.augmentation import with_augmentation
from dpfl_jax.training.modules import UserModel
from dpfl_jax.training.optimizers import make_optimizer

PyTree = Any
# A checkpoint defines the function; these fields only say how it is computed.
_COMPUTED = ("dtype", "remat", "scan_layers")


def build_model(config: RunConfig, task: Task, store: Store) -> Any:
    """Builds the model of a configuration, central or with silos.

    Args:
      config: the configuration.
      task: what is learned.
      store: the data; a model of ``model.module`` is tried on the first example.

    Raises:
      BadInputError: data and model do not fit, or a setting is unknown.
    """
    section = config.model
    if section.module is not None:
        own = UserModel(section, task, store, config.init_seed)
        return with_augmentation(own, section, task)
    pairs = task.kind == "preferences"
    if section.dpo is not None and not pairs:
        raise BadInputError(
            "model.dpo learns from preference pairs: set data.prompt_column, data.chosen_column "
            "and data.rejected_column, or leave it out"
        )
    has_size = config.variant == "central" and section.kind == "transformer"
    if not has_size or task.kind not in ("tokens", "preferences"):
        named = build_by_name(section.kind, task, section.options)
        return with_augmentation(named, section, task)
    if pairs and section.dpo is None:
        raise BadInputError("the data are preference pairs: set model.dpo.beta=0.1")
    model = build_transformer(config, task.vocab_size, task.bos_id)
    return model if section.dpo is None else PreferenceModel(model.config, section.dpo.beta)


def build_transformer(config: RunConfig, vocab_size: int, bos_id: int | None) -> LanguageModel:
    """Builds the transformer of a configuration.

    Args:
      config: the configuration.
      vocab_size: number of ids of the data's tokeniser.
      bos_id: id that starts a sequence of the data; None: none does.

    Raises:
      BadInputError: data and checkpoint do not fit, or a setting is unknown.
    """
    section = config.model
    if not section.is_transformer:
        raise BadInputError(
            f"model.{section.what} takes its shapes from the data: only transformers can be "
            "priced without them, compiled for a slice, or exported"
        )
    if "attention" in section.overrides:
        raise BadInputError(
            "model.overrides.attention is not a part of the model: set execution.attention"
        )
    more: dict[str, Any] = {"attention": config.execution.attention}
    if section.lora is not None:
        more["lora"] = config_to_dict(section.lora)
    if section.trainable == "last_layers":
        more["last_layers"] = section.last_layers
    if section.checkpoint is None:
        fields = {"vocab_size": vocab_size, "bos_id": bos_id, "max_seq_len": config.data.seq_len}
        return LanguageModel(transformer_config(section.size, **fields | section.overrides | more))
    for name in section.overrides:
        if name not in _COMPUTED:
            raise BadInputError(
                f"model.overrides.{name} is fixed by the checkpoint: only {', '.join(_COMPUTED)} "
                "can be set with model.checkpoint"
            )
    result = read_config(section.checkpoint)
    if vocab_size > result.vocab_size:
        raise BadInputError(
            f"the data's tokeniser has {vocab_size} ids, but the checkpoint {section.checkpoint} "
            f"only {result.vocab_size}: set data.tokenizer=checkpoint to use its own"
        )
    if config.data.seq_len > result.max_seq_len:
        raise BadInputError(
            f"data.seq_len is {config.data.seq_len}, but the checkpoint {section.checkpoint} takes "
            f"at most {result.max_seq_len} tokens"
        )
    return LanguageModel(dataclasses.replace(result, bos_id=bos_id, **section.overrides, **more))


def data_section(config: RunConfig) -> DataConfig:
    """The data section, with ``tokenizer=checkpoint`` replaced by the checkpoint's file."""
    if config.data.tokenizer != "checkpoint":
        return config.data
    if config.model.checkpoint is None:
        raise BadInputError("data.tokenizer=checkpoint needs model.checkpoint")
    return dataclasses.replace(config.data, tokenizer=str(tokenizer_file(config.model.checkpoint)))


def trained_by_name(section: ModelConfig, model: Any) -> Callable[[str], bool] | None:
    """Returns ``name -> whether that parameter is trained``; None if all are."""
    named = _named_trained(section, model)
    if section.dpo is None:
        return named
    return lambda name: not_reference(name) and (named is None or named(name))


def _named_trained(section: ModelConfig, model: Any) -> Callable[[str], bool] | None:
    choice = section.trainable or ("lora" if section.lora is not None else "all")
    if choice == "all":
        return None
    if choice == "lora":
        return is_adapter
    if choice == "biases":
        return lambda name: name.rpartition("/")[2] == "bias"
    if choice == "last_layers":
        layers = model.config.num_layers
        first = layers - section.last_layers
        last = {model.config.place_of_block(i)[0] for i in range(first, layers)}
        return lambda name: name.partition("/")[0] in {*last, "final_norm"}
    patterns = tuple(choice)
    return lambda name: any(fnmatch.fnmatchcase(name, p) for p in patterns)


def check_trainable(section: ModelConfig, model: Any) -> int:
    """Returns the number of trained parameters.

    Raises:
      BadInputError: no parameter is trained, or a pattern matches none.
    """
    shapes = flat_paths(jax.eval_shape(model.init, jax.random.key(0)))
    chosen = trained_by_name(section, model) or (lambda _: True)
    if isinstance(section.trainable, tuple):
        for pattern in section.trainable:
            if not fnmatch.filter(shapes, pattern):
                raise BadInputError(
                    f"model.trainable: no parameter is called {pattern!r}; they are called "
                    f"{', '.join(list(shapes)[:4])}, ..."
                )
    total = sum(x.size for name, x in shapes.items() if chosen(name))
    if section.lora is not None and not any(map(is_adapter, shapes)):
        raise BadInputError(
            f"model.lora.targets {list(section.lora.targets)} fit no projection: they are called, "
            "for example, blocks/attention/query and blocks/mlp/up"
        )
    if not total:
        raise BadInputError(f"model.trainable={section.trainable} leaves no parameter to train")
    return int(total)


def check_attention(config: RunConfig, mesh: Mesh) -> None:
    """Refuses ``execution.attention=fused`` on devices that have no such kernel.

    Raises:
      BadInputError: they have none.
    """
    if config.execution.attention != "fused":
        return
    platform = mesh.devices.flat[0].platform
    if platform not in ("gpu", "tpu"):
        raise BadInputError(
            "execution.attention=fused is a kernel of NVIDIA GPUs and of TPUs, but the platform "
            f"here is {platform}: take auto"
        )
    if platform == "tpu" and splits_parameters(mesh):
        raise BadInputError(
            "execution.attention=fused: a TPU's kernel cannot be split over devices, as "
            "execution.mesh asks with fsdp, tensor or sequence: take auto, or data alone"
        )


def starting_params(
    config: RunConfig, data: Dataset, model: Any, mesh: Mesh, console: Console
) -> tuple[PyTree, Pretrained | None]:
    """All parameters before the first private step, on ``mesh``; with DPO the reference's, too."""
    check_attention(config, mesh)
    params, pretrained = _base_params(config, data, model, mesh, console)
    if config.model.dpo is not None:
        params = with_reference(params, trained_by_name(config.model, model))
    return params, pretrained


def _base_params(
    config: RunConfig, data: Dataset, model: Any, mesh: Mesh, console: Console
) -> tuple[PyTree, Pretrained | None]:
    key = jax.random.key(config.init_seed)
    if config.model.checkpoint is not None:
        with console.status("reading the checkpoint"):
            base = base_from_checkpoint(config, model, mesh)
        return with_adapters(base, model, key, mesh), None
    section, public = config.pretrain, data.public
    if section is None or public is None:
        return initial_params(model, key, mesh), None
    plain = LanguageModel(dataclasses.replace(model.config, lora=None))
    # How attention is computed does not change what is pre-trained.
    shape = dataclasses.asdict(dataclasses.replace(plain.config, attention="auto"))
    pretrained = pretrain(
        loss_fn=plain.loss,
        params=initial_params(plain, key, mesh),
        public=public,
        optimizer=make_optimizer(section.optimizer, section.steps),
        steps=section.steps,
        batch_size=section.batch_size,
        seed=config.init_seed,
        identity={
            "model": shape,
            "corpus": public.fingerprint,
            "optimizer": config_to_dict(section.optimizer),
        },
        mesh=mesh,
        cache_dir=pathlib.Path(section.cache_dir) if section.cache_dir else None,
        console=console,
    )
    verb = "found" if pretrained.cached else "kept"
    console.print(f"pre-trained checkpoint {verb}: {pretrained.path}")
    return with_adapters(pretrained.params, model, key, mesh), pretrained


def initial_params(model: Any, key: jax.Array, mesh: Mesh) -> PyTree:
    """Initial parameters; on a mesh that splits them, no device ever holds all of one."""
    if not splits_parameters(mesh):
        return model.init(key)
    places = parameter_shardings(jax.eval_shape(model.init, key), mesh)
    return jax.jit(model.init, out_shardings=places)(key)


def base_from_checkpoint(config: RunConfig, model: LanguageModel, mesh: Mesh) -> PyTree:
    """Reads a checkpoint, each device its part; frozen parameters have ``frozen_dtype``."""
    assert config.model.checkpoint is not None
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    trained = trained_by_name(config.model, model) or (lambda _: True)
    low = config.model.frozen_dtype
    return load_checkpoint(
        config.model.checkpoint,
        model.config,
        shapes,
        parameter_shardings(shapes, mesh),
        dtype=lambda name: "float32" if trained(name) else low,
    )


def with_adapters(base: PyTree, model: LanguageModel, key: jax.Array, mesh: Mesh) -> PyTree:
    """``base`` with fresh adapters, if the model has any; nothing else is initialised."""
    if model.config.lora is None:
        return base

    def adapters(key: jax.Array) -> PyTree:
        return {k: v for k, v in flat_paths(model.init(key)).items() if is_adapter(k)}

    places = flat_paths(parameter_shardings(jax.eval_shape(model.init, key), mesh))
    wanted = {k: places[k] for k in jax.eval_shape(adapters, key)}
    fresh = jax.jit(adapters, out_shardings=wanted)(key)
    return nested({**flat_paths(base), **fresh})


# ---- pre-training --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A pre-trained checkpoint.

    Attributes:
      params: the parameters.
      path: where they are stored.
      cached: True if they were read from there, False if they were trained now.
    """

    params: PyTree
    path: pathlib.Path
    cached: bool

    @property
    def facts(self) -> dict[str, Any]:
        """Identifies it: ``name`` (of model, corpus and settings) and ``digest`` (of values)."""
        return {"name": self.path.name, "digest": content_digest(self.params)}


def pretrain(
    *,
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    public: Readable,
    optimizer: optax.GradientTransformation,
    steps: int,
    batch_size: int,
    seed: int,
    identity: dict[str, Any],
    mesh: Mesh,
    cache_dir: pathlib.Path | None = None,
    console: Console | None = None,
) -> Pretrained:
    """Trains on ``public``, or returns the cached result of the same training.

    Args:
      loss_fn: ``(params, example) -> scalar`` for one example.
      params: initial parameters.
      public: store of public examples; users do not matter here.
      optimizer: any Optax transformation.
      steps: optimiser steps.
      batch_size: examples per step, rounded up to a multiple of the devices.
      seed: seed of the shuffle (public).
      identity: plain JSON that identifies model, corpus and settings: the cache's key.
      mesh: from ``mesh.make_mesh``.
      cache_dir: default ``default_cache_dir()``.
      console: where the progress bar goes.

    Raises:
      BadInputError: the public corpus is empty.
    """
    identity = {**identity, "steps": steps, "batch_size": batch_size, "seed": seed, "format": 1}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = (cache_dir or default_cache_dir()) / "pretrained" / digest
    params = place(params, parameter_shardings(params, mesh))
    with _alone(path):
        if processes.broadcast(path.exists()):
            try:
                return Pretrained(load_params(path, params), path, cached=True)
            except (ValueError, OSError, KeyError):
                if processes.many():
                    raise BadInputError(
                        f"the pre-trained checkpoint {path} cannot be read by every process: put "
                        "pretrain.cache_dir on storage that all share, or remove it if damaged"
                    ) from None
                shutil.rmtree(path, ignore_errors=True)  # a damaged cache entry is made again
        first, stop = int(public.user_offsets[0]), int(public.user_offsets[-1])
        if stop <= first:
            raise BadInputError(
                "the public corpus is empty: remove the pretrain section, or add data"
            )

        parts = unit_parts(mesh)
        rows = -(-batch_size // parts) * parts
        sharding = NamedSharding(mesh, PartitionSpec(unit_axes(mesh)))
        mine = local_columns(sharding, rows, axis=0)

        def mean_loss(params: PyTree, batch: PyTree) -> jax.Array:
            return jax.vmap(loss_fn, in_axes=(None, 0))(params, batch).mean()

        @jax.jit
        def step(
            params: PyTree, opt_state: PyTree, batch: PyTree
        ) -> tuple[PyTree, PyTree, jax.Array]:
            loss, gradient = jax.value_and_grad(mean_loss)(params, batch)
            updates, opt_state = optimizer.update(gradient, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        opt_state = jax.jit(
            optimizer.init, out_shardings=shardings_of(params, optimizer, mesh).opt_state
        )(params)
        key = RootKey.from_seed(seed)
        started, tokens = time.perf_counter(), 0
        with StepProgress(console or Console(quiet=True), "pre-training (public)", steps) as bar:
            for i in range(steps):
                positions = _shuffled(key, first, stop, rows, i)
                batch = public.read(positions[mine])
                tokens += int(batch["mask"].sum()) if "mask" in batch else 0
                batch = ship_columns(batch, mine, rows, 0, sharding)
                params, opt_state, loss = step(params, opt_state, batch)
                rate = tokens * rows / len(mine) / (time.perf_counter() - started)
                bar.update(i + 1, f"loss {float(loss):.3f}  {rate:,.0f} tok/s")
        path.parent.mkdir(parents=True, exist_ok=True)
        save_params(path, params)
        if processes.is_primary():
            (path / "identity.json").write_text(json.dumps(identity, indent=2, sort_keys=True))
        return Pretrained(params, path, cached=False)


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[None]:
    """Lets one program at a time train a base; another one waits, and then reads the result.

    The processes of one run train it together, so they do not wait for each other.
    """
    if processes.many():
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_plain(path.with_suffix(".lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_pretrained(pretrained: Pretrained, directory: RunDirectory, needed: bool) -> None:
    """Notes the pre-trained base in the run's directory; a resumed run must have the same.

    Args:
      pretrained: the base.
      directory: the run's directory.
      needed: whether a part of the base stays frozen.

    Raises:
      BadInputError: the run began with another base. A base that was trained again may differ in
        rounding, and steps taken twice would add one noise to different sums; only if all
        parameters are in a checkpoint of the run does this not matter.
    """
    facts = pretrained.facts

    def check() -> None:
        known = directory.facts.get("base", facts)
        kept = any(p.name.isdigit() for p in located(directory.path / "checkpoints").glob("*"))
        if known["name"] != facts["name"] or (known != facts and (needed or not kept)):
            raise BadInputError(
                f"the pre-trained checkpoint {pretrained.path} is not the one that the run in "
                f"{directory.path} began with ({known['name']}): bring back the public corpus and "
                "the checkpoint, or start another run"
            )

    processes.on_primary(check)
    if "base" not in directory.facts:
        directory.note("base", facts)


def _shuffled(key: RootKey, first: int, stop: int, rows: int, step: int) -> np.ndarray:
    """Positions of one batch: epochs of a fresh permutation each, without replay."""
    size = stop - first
    wanted = np.arange(step * rows, (step + 1) * rows)
    positions = np.empty(rows, np.int64)
    for epoch in np.unique(wanted // size):
        inside = wanted // size == epoch
        order = key.numpy("pretrain-shuffle", int(epoch)).permutation(size)
        positions[inside] = first + order[wanted[inside] % size]
    return positions
