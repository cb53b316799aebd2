"""``fit``: central training by a plan, whose mechanism samples, adds noise and accounts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax
from rich.console import Console

from dpfl_jax import accounting
from dpfl_jax.clipping import Trainable
from dpfl_jax.config.schema import AuditConfig
from dpfl_jax.data.owners import grouped_by_owner_set, owner_ids
from dpfl_jax.data.packing import lengths_warning
from dpfl_jax.data.store import Readable, check_labels, expect_store, scale_warning
from dpfl_jax.errors import BadInputError, expect, room_on_disk
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.models import LanguageModel
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import processes
from dpfl_jax.run.algorithm import RunResult
from dpfl_jax.run.console import default_console
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.driver import Hooks, LoopConfig, drive
from dpfl_jax.run.pipeline import open_directory, save_report, warn_of_advisories
from dpfl_jax.run.public_inputs import not_people
from dpfl_jax.run.report import PACKING_CAVEAT, PRIVATE_METRICS_CAVEAT, TUNING_CAVEAT
from dpfl_jax.training.canaries import WithCanaries
from dpfl_jax.training.central import Central
from dpfl_jax.training.evaluate import Evaluation, Evaluator
from dpfl_jax.training.filtered import Filtered
from dpfl_jax.training.modules import functional, named_loss, number_of_classes, of_arrays

PyTree = Any
VALIDATION_CAVEAT = (
    "losses on validation are computed without noise: the guarantee covers nobody's examples there"
)
KNOWN_CAVEAT = (
    "people in validation are trained on, too: losses on validation are computed without noise on "
    "their examples there, which the guarantee does not cover, and tell nothing of how the model "
    "does on people it has not seen"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitResult(RunResult):
    """What ``fit`` returns.

    Attributes:
      guarantee: what holds for everything the run has released.
      initial: evaluation before the first step, if there was validation data.
      final: evaluation after the last step; None if the run was interrupted.

    Examples:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import optax
      >>> import dpfl_jax as dpfl
      >>> store = dpfl.from_arrays({"x": np.ones((64, 1), "float32")}, users=np.arange(64))
      >>> mechanism = dpfl.uls(group_size=1, cohort_size=16)
      >>> plan = mechanism.plan(store, steps=3, epsilon=8.0, delta=1e-3)
      >>> def loss(params, example):
      ...     return jnp.sum(example["x"] * params)
      >>> result = dpfl.fit(loss, jnp.zeros(1), plan, optax.sgd(0.1))
      >>> result.params.shape, len(result.metrics)
      ((1,), 3)
    """

    guarantee: accounting.Guarantee
    initial: Evaluation | None
    final: Evaluation | None


def algorithm_of(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    plan: Plan,
    optimizer: optax.GradientTransformation,
    trainable: Trainable = None,
) -> Central:
    """Makes the algorithm that takes the steps of a plan; arguments as in ``fit``."""
    kind = Filtered if plan.mechanism.budget is not None else Central
    return kind(loss_fn, params, plan, optimizer, trainable)


@room_on_disk()
def fit(
    loss_fn: Callable[..., jax.Array] | str,
    params: PyTree,
    plan: Plan,
    optimizer: optax.GradientTransformation,
    *,
    model: Any = None,
    trainable: Trainable = None,
    validation: Readable | None = None,
    run_dir: str | os.PathLike[str] | RunDirectory | None = None,
    key: RootKey | None = None,
    audit: AuditConfig | None = None,
    loop: LoopConfig | None = None,
    hooks: Hooks | None = None,
    console: Console | None = None,
) -> FitResult:
    """Trains ``params`` as a plan says.

    Args:
      loss_fn: ``(params, example) -> float32 scalar`` for one example. If it also takes ``rng`` (or
        ``key``), with default None, it gets a different key for each example of each training step,
        and None in evaluation. Or ``"classification"``, ``"regression"``, ``"causal_lm"`` of a
        model (``modules.named_loss``).
      params: pytree of arrays, not modified; already split over the plan's mesh if no device should
        ever hold all of one. Or a Flax NNX or Equinox module: the loss is called with the module,
        and the result's ``params`` is the trained module.
      plan: mechanism, data, steps and guarantee: ``uls(...).plan(data, steps=..., epsilon=...)``.
      optimizer: any Optax transformation.
      model: for a loss by name, if ``params`` is not a module: a Linen module, a Haiku transform,
        or a function ``(params, x)``.
      trainable: which parameters are trained: a function of their name (``blocks/mlp/up/kernel``),
        or a tree of bools that is a prefix of the parameters; default all. Only these have
        gradients, norms, noise, optimiser state and checkpoints.
      validation: held-out users, evaluated before, during and after training.
      run_dir: where to log, to checkpoint and to report; an unfinished run there is resumed.
      key: root key of sampling and noise; default a fresh secret one (or the run directory's).
        Under one secret key, runs that differ in anything (data, mechanism, steps, delta, loss,
        optimiser, first parameters, execution, devices) draw independently; the same run draws the
        same noise again.
      audit: adds canaries to the run; fills the result's ``audit``, and audit.json in ``run_dir``.
      loop: how often the run logs, evaluates and saves.
      hooks: callbacks.
      console: where progress is shown; default a terminal or notebook, if there is one
        (``rich.console.Console(quiet=True)``: nowhere).

    Raises:
      BadInputError: unusable arguments, or a run directory that holds something else.
      clipping.SelfCheckError: the sum on this mesh, or the strategy's norms, disagree with plain
        per-unit gradients, or units mix; no step was taken.

    Examples:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import optax
      >>> import dpfl_jax as dpfl
      >>> x = np.linspace(-1, 1, 64, dtype="float32")[:, None]
      >>> store = dpfl.from_arrays({"x": x, "label": 2 * x[:, 0]}, users=np.arange(64))
      >>> mechanism = dpfl.uls(group_size=1, cohort_size=16)
      >>> plan = mechanism.plan(store, steps=3, epsilon=8.0, delta=1e-3)
      >>> def loss(params, example):
      ...     return (example["x"] @ params - example["label"]) ** 2
      >>> result = dpfl.fit(loss, jnp.zeros(1), plan, optax.sgd(0.1))
      >>> result.steps, result.guarantee.epsilon <= 8.0
      (3, True)
    """
    _check_arguments(plan, key, run_dir, loop, hooks, audit, validation)
    loss = named_loss(loss_fn, params, model) if isinstance(loss_fn, str) else loss_fn
    expect(loss, Callable, "loss_fn", "a function (params, example), or a loss by name")  # type: ignore[arg-type]
    _refuse_two_beginnings(loss, plan.data)
    arrays, rebuild, is_module = functional(params)
    if is_module:
        loss = of_arrays(loss, rebuild)
    evaluate = None
    if validation is not None:
        evaluate = Evaluator(loss, plan.mesh).of(grouped_by_owner_set(validation))
    algorithm = algorithm_of(loss, arrays, plan, optimizer, trainable)
    if _has_labels(plan.data):
        classes = number_of_classes(loss_fn, params, model, plan.example)
        if classes is not None:
            for store in filter(None, (plan.data, validation)):
                check_labels(store, classes)
    console = console or default_console()
    caveats: tuple[str, ...] = ()
    if plan.mechanism.private:
        known = validation is not None and _known(plan.data, validation)
        caveats = _caveats(plan, validation, known)
        if validation is not None and loop is not None and loop.chooses:
            _refuse_shared(plan.data, validation)
        slow = lengths_warning(plan.data) if plan.execution.packing else None
        warnings = (not_people(plan.data, "user"), scale_warning(plan.data), slow)
        _warn(console, *warnings, KNOWN_CAVEAT if known else None)
    if plan.bounding is not None and console is not None:
        console.print(str(plan.bounding), highlight=False)
    with _directory(run_dir, plan, key, audit, loop or LoopConfig()) as directory:
        if directory is not None and directory is not run_dir and plan.mechanism.private:
            stated = lambda: plan.statement(plan.guarantee(), plan.steps)  # noqa: E731
            caveats += warn_of_advisories(directory, stated, console)
        if directory is not None:
            caveats = directory.keep_caveats(caveats)
        if audit is not None:
            key = key or processes.fresh_key() if directory is None else directory.root_key
            algorithm = WithCanaries(algorithm, audit, key.child("audit"))
        result = train(
            algorithm,
            caveats=caveats,
            run_dir=directory,
            key=key,
            evaluate=evaluate,
            loop=loop,
            hooks=hooks,
            console=console,
        )
        if console is not None:
            summary = result.guarantee.summary()
            console.print(summary, style="bold", highlight=False, soft_wrap=True)
        if directory is not None and directory is not run_dir and directory.writes:
            _leave_report(directory, plan, result, loss_fn)
    chosen = result.best
    if chosen is not None and (read := chosen.params) is not None:
        chosen = dataclasses.replace(chosen, params=lambda: rebuild(read()))
    return dataclasses.replace(result, params=rebuild(result.params), best=chosen)


def train(algorithm: Central, *, caveats: tuple[str, ...] = (), **options: Any) -> FitResult:
    """Runs an algorithm of central training.

    Args:
      algorithm: what to run.
      caveats: further caveats of the guarantee.
      **options: passed to ``run.driver.drive``.
    """
    result = drive(algorithm, **options)
    initial, final = result.evaluation(0), result.last
    return FitResult(
        **{field.name: getattr(result, field.name) for field in dataclasses.fields(result)},
        guarantee=algorithm.guarantee(result.accounted, (*caveats, *result.caveats)),
        initial=None if initial is None else Evaluation(**initial),
        final=None if final is None else Evaluation(**final),
    )


@contextlib.contextmanager
def _directory(
    run_dir: str | os.PathLike[str] | RunDirectory | None,
    plan: Plan,
    key: RootKey | None,
    audit: AuditConfig | None,
    loop: LoopConfig,
) -> Iterator[RunDirectory | None]:
    """Opens the run directory of a path, and closes it; an open one is passed on."""
    if run_dir is None or isinstance(run_dir, RunDirectory):
        yield run_dir
        return
    content = plan.stated | ({} if audit is None else {"audit": audit.model_dump()})
    if loop.average != "none":
        content |= {"average": loop.average, "ema_decay": loop.ema_decay}
    directory = open_directory(run_dir, content, key, {"data": plan.data_digest})
    try:
        yield directory
    finally:
        directory.close()


def _leave_report(directory: RunDirectory, plan: Plan, result: FitResult, loss_fn: Any) -> None:
    population, task = plan.population, getattr(plan.data, "task", None)
    outside = {}
    if plan.bounding is not None:
        outside["contribution_bounding"] = plan.bounding.to_json()
    save_report(
        directory,
        directory.path.name,
        result,
        plan.statement(result.guarantee, result.accounted),
        outside_guarantee=outside,
        mechanism=plan.stated["mechanism"],
        data={"users": population.num_users, "examples": population.num_examples},
        task=None if task is None else dataclasses.asdict(task),
        loss=loss_fn if isinstance(loss_fn, str) else None,
    )


def _check_arguments(
    plan: Any, key: Any, run_dir: Any, loop: Any, hooks: Any, audit: Any, validation: Any
) -> None:
    """Raises BadInputError if an argument of ``fit`` has the wrong type."""
    expect(plan, Plan, "plan", "what mechanism.plan(data, steps=..., epsilon=...) returns")
    for value, kind, name, wanted in (
        (key, RootKey, "key", "a RootKey, as RootKey.generate() makes"),
        (run_dir, (str, os.PathLike, RunDirectory), "run_dir", "the path of a folder"),
        (loop, LoopConfig, "loop", "a dpfl_jax.LoopConfig(...)"),
        (hooks, Hooks, "hooks", "dpfl_jax.Hooks(on_step=...)"),
        (audit, AuditConfig, "audit", "a dpfl_jax.AuditConfig(canaries=500)"),
    ):
        if value is not None:
            expect(value, kind, name, wanted)
    if validation is not None:
        expect_store(validation, "validation")
    if audit is not None and plan.execution.packing:
        raise BadInputError(
            "canaries are not packed: set execution.packing to 0, or leave out audit.canaries"
        )


def _refuse_two_beginnings(loss: Any, data: Readable) -> None:
    language, schema = getattr(loss, "__self__", None), getattr(data, "schema", None)
    begins = isinstance(language, LanguageModel) and language.config.bos_id is not None
    if begins and schema is not None and schema.kind == "answers":
        raise BadInputError(
            "the data's sequences hold their beginning, and the model would prepend another: "
            "make it of dataclasses.replace(config, bos_id=None)"
        )


def _has_labels(data: Readable) -> bool:
    schema = getattr(data, "schema", None)
    return schema is not None and {"x", "label"} <= {field.name for field in schema.fields}


def _caveats(plan: Plan, validation: Readable | None, known: bool) -> tuple[str, ...]:
    """Caveats of a private run; ``known``: whether people in validation are trained on, too."""
    held_out = () if validation is None else (KNOWN_CAVEAT if known else VALIDATION_CAVEAT,)
    packed = (PACKING_CAVEAT,) if plan.execution.packing else ()
    return (PRIVATE_METRICS_CAVEAT, *packed, *held_out, TUNING_CAVEAT)


def _warn(console: Console | None, *warnings: str | None) -> None:
    for text in filter(None, warnings):
        if console is not None:
            console.print(f"warning: {text}", markup=False, highlight=False)


def _known(data: Any, validation: Any) -> bool:
    stores = (grouped_by_owner_set(data), grouped_by_owner_set(validation))
    named = all(hasattr(s, "user_ids") and hasattr(s, "num_users") for s in stores)
    return named and not owner_ids(data).isdisjoint(owner_ids(validation))


def _refuse_shared(data: Any, validation: Any) -> None:
    """Refuses to choose a checkpoint by users who are trained on: a choice has no noise."""
    both = owner_ids(data) & owner_ids(validation)
    if both:
        raise BadInputError(
            f"{len(both)} users of validation are trained on, too, and keep_best and patience "
            "would choose by their examples, which the guarantee does not cover: hold out other "
            "people, or give others other ids"
        )
