"""``fit``: central training. Sampling, noise and accounting are the mechanism's."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import optax
from rich.console import Console

from dpfl_jax import accounting
from dpfl_jax.audit.run_audit import RunAudit
from dpfl_jax.clipping import Trainable, convolutions, join, split
from dpfl_jax.clipping.result import StepStats
from dpfl_jax.config.schema import AuditConfig
from dpfl_jax.data.example_keys import key_argument, with_any_key
from dpfl_jax.data.labels import check_labels, far_from_order_1
from dpfl_jax.data.owners import by_set, people
from dpfl_jax.data.pipeline import StepBatch
from dpfl_jax.data.store import Readable, expect_store
from dpfl_jax.errors import BadInputError, expect, room_on_disk
from dpfl_jax.mechanisms.batches import check_packed_loss, draw_digest, step_arguments, units_of
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mechanisms.sums import in_pieces
from dpfl_jax.mesh import FSDP_AXIS, parameter_shardings, place, splits_parameters
from dpfl_jax.models import LanguageModel
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import processes
from dpfl_jax.run.algorithm import Algorithm, Steps, Taken
from dpfl_jax.run.content import content_digest
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.driver import Hooks, Pace, RunResult, drive
from dpfl_jax.run.prepared import open_directory
from dpfl_jax.run.progress import default_console
from dpfl_jax.run.public_inputs import not_people
from dpfl_jax.run.report import (
    PACKING_CAVEAT,
    PRIVATE_METRICS_CAVEAT,
    TUNING_CAVEAT,
    build_report,
    write_report,
)
from dpfl_jax.run.state import TrainState, init_state
from dpfl_jax.run.terms import Terms, training_digest
from dpfl_jax.training.evaluate import Evaluation, Evaluator
from dpfl_jax.training.modules import (
    check_one_example,
    functional,
    named_loss,
    number_of_classes,
    of_arrays,
)
from dpfl_jax.training.optimizers import check_optimizer
from dpfl_jax.training.step import TrainStep, make_train_step

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitResult(RunResult):
    """What ``fit`` returns.

    Attributes:
      guarantee: what holds for everything the run has released.
      initial: evaluation before the first step, if there was validation data.
      final: evaluation after the last step; None if the run was interrupted.
      audit: what an attack on it saw, if there were canaries and it was not interrupted.
    """

    guarantee: accounting.Guarantee
    initial: Evaluation | None
    final: Evaluation | None
    audit: RunAudit | None = None


class Central(Algorithm):
    """Steps of a mechanism over one data set, on any mesh."""

    def __init__(
        self,
        loss_fn: Callable[..., jax.Array],
        params: PyTree,
        plan: Plan,
        optimizer: optax.GradientTransformation,
        trainable: Trainable = None,
    ) -> None:
        """See ``fit``."""
        self.loss_fn, self.plan, self.data, self.mechanism = (
            loss_fn,
            plan,
            plan.data,
            plan.mechanism,
        )
        self.optimizer, self.steps, self.delta = optimizer, plan.steps, plan.delta
        self.mesh, self.trainable, self.given = plan.mesh, trainable, params
        self.private = plan.mechanism.private
        self.movable = not plan.mechanism.is_stateful(plan.population)
        self.random, self.shipped = plan.random(loss_fn), plan.shipped(loss_fn)
        if plan.execution.packing:
            check_packed_loss(loss_fn, plan.data, params)
        self.traced = with_any_key(loss_fn, key_argument(loss_fn))
        check_one_example(self.traced, params, plan.example)
        self.copied = (
            convolutions.kernels(self.traced, params, plan.example)
            if splits_parameters(self.mesh)
            else ()
        )
        self.trained, frozen = split(params, trainable)
        check_optimizer(optimizer, self.trained)
        places = parameter_shardings(frozen, self.mesh, self.copied)
        self.frozen = place(frozen, places, copy=False)
        how = plan.execution
        more = (how.strategy, how.cut, how.group_buckets, *([how.packing] if how.packing else []))
        self.layout = [self.hardware, *more, how.microbatch_size]
        users = ", set execution.examples_at_once" if self.mechanism.unit_examples else ""
        self.smaller = (
            f"lower execution.microbatch_size and eval.batch_size{users}, split parameters over "
            "devices (execution.mesh.fsdp), or train adapters (model.lora)"
        )

    def terms(self) -> Terms:
        """Mechanism, population, delta, steps; data, frozen parameters and computation."""
        return Terms(
            stated=self.plan.stated,
            secret={
                "data": self.plan.data_digest,
                "frozen": lambda root: content_digest(self.frozen, root),
                "computation": training_digest(
                    self.traced, self.trained, self.frozen, self.plan.example, self.optimizer
                ),
            },
        )

    def init(self) -> TrainState:
        """First parameters and optimiser state, split over the mesh."""
        noise = self.mechanism.noise_transform().init(self.trained)
        return init_state(self.trained, self.optimizer, self.mesh, self.copied, noise.memory)

    def params(self, state: TrainState) -> PyTree:
        """All parameters, frozen ones too."""
        return join(state.params, self.frozen)

    def row(self, stats: StepStats) -> dict[str, Any]:
        """A step's metrics."""
        return {"outside_guarantee": stats.row(self.private)}

    def epsilons(self, counts: Sequence[int]) -> Sequence[float]:
        """As the plan says."""
        return self.plan.epsilons(counts)

    def guarantee(self, steps: int, caveats: tuple[str, ...] = ()) -> accounting.Guarantee:
        """As the plan says, of the key of this run alone."""
        plan = self.plan
        made = plan.mechanism.guarantee(plan.population, steps, plan.delta, caveats)
        return plan.about(made)

    def begin(self, key: RootKey, start: int) -> CentralSteps:
        """The steps after the first ``start``."""
        return CentralSteps(self, key, start)

    def write_private(self, directory: RunDirectory, result: RunResult) -> None:
        """Writes under ``private/`` what is kept of a run: nothing (``filtered.Filtered``)."""
        del directory, result

    def audited(self, result: RunResult) -> RunAudit | None:
        """What an attack on a finished run saw (``canaries.WithCanaries``)."""
        del result
        return None


class CentralSteps(Steps):
    """Batches from a pipeline, through the compiled step."""

    def __init__(self, run: Central, key: RootKey, start: int) -> None:
        self.run, self.key, self.start = run, key, start
        how = run.plan.execution
        self.loss_fn = run.shipped
        self.options: dict[str, Any] = {"strategy": how.strategy, "trainable": run.trainable}
        self.compiled: TrainStep = make_train_step(
            run.mechanism,
            self.loss_fn,
            run.optimizer,
            run.mesh,
            whole=run.copied,
            **self.options,
            **how.cut,
        )
        self.sampler = run.plan.sampler(key)
        self.pipeline = run.plan.pipeline(self.sampler, key if run.random else None)
        self.pieces = in_pieces(run.mechanism, run.mesh, **how.cut)

    def agreed(self) -> dict[str, Any]:
        """Processes that cut a batch apart differently would count units twice, or never."""
        run, how = self.run, self.run.plan.execution
        return {
            "mechanism": repr(run.mechanism),
            "draw": draw_digest(self.sampler, self.key, self.start),
            "size of a microbatch": [
                how.microbatch_size,
                self.pipeline.row,
                repr(how.group_buckets),
                repr(self.pipeline.shapes),
            ],
            "strategy": [how.strategy, how.cut],
            "set of trained parameters": [
                [jax.tree_util.keystr(path), list(leaf.shape)]
                for path, leaf in jax.tree_util.tree_leaves_with_path(run.trained)
            ],
        }

    def check(self, state: TrainState, say: Callable[[str], object] = str) -> None:
        """Compares the compiled sum with one device, and the strategy's norms with plain ones."""
        run = self.run
        run.plan.check(
            self.compiled.sum,
            self.loss_fn,
            run.given,
            state.params,
            run.frozen,
            self.pipeline,
            self.sampler.group_size,
            run.trainable,
            say,
        )

    def clipping(self) -> dict[str, Any] | None:
        """How norms are computed, for the largest units."""
        run = self.run
        units = run.plan.execution.microbatch_size
        units *= run.mesh.shape[FSDP_AXIS] if splits_parameters(run.mesh) else 1
        bounded = run.mechanism.clipped_grad(self.loss_fn, **self.options, **self.pieces)
        largest = self.pipeline.first_units(1, self.sampler.group_size)[-1]
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((units, *x.shape[2:]), x.dtype),
            units_of(run.mechanism, largest),
        )
        return bounded.explain(run.given, shapes).to_json(units)

    def inputs(self) -> Iterator[tuple[int, StepBatch]]:
        """Batches, read ahead."""
        for batch in self.pipeline.iterate(self.start, self.run.steps):
            yield batch.step + 1, batch

    def step(self, state: TrainState, inputs: StepBatch) -> tuple[TrainState, Taken]:
        """Sum, noise, update."""
        run = self.run
        arguments = step_arguments(run.mechanism, inputs)
        noise_key = run.plan.noise_key(self.key, inputs.step)
        state, stats = self.compiled(state, *arguments, noise_key, run.frozen)
        read = (inputs.columns, self.pipeline.row)
        tokens = (inputs.num_tokens, inputs.num_places)
        return state, Taken(stats, inputs.num_examples, *tokens, read)


def algorithm_of(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    plan: Plan,
    optimizer: optax.GradientTransformation,
    trainable: Trainable = None,
) -> Central:
    """What takes the steps of a plan; arguments as of ``fit``."""
    kind: type[Central] = Central
    if plan.mechanism.own_budgets:
        from dpfl_jax.training.filtered import Filtered  # which is made of this

        kind = Filtered
    return kind(loss_fn, params, plan, optimizer, trainable)


VALIDATION_CAVEAT = (
    "losses on validation are computed without noise: the guarantee covers nobody's examples there"
)
KNOWN_CAVEAT = (
    "people in validation are trained on, too: losses on validation are computed without noise on "
    "their examples there, which the guarantee does not cover, and tell nothing of how the model "
    "does on people it has not seen"
)


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
    pace: Pace | None = None,
    hooks: Hooks | None = None,
    console: Console | None = None,
) -> FitResult:
    """Trains ``params`` as a plan says.

    Args:
      loss_fn: ``(params, example) -> float32 scalar`` for one example. If it also takes ``rng`` (or
        ``key``), with default None, each example of each training step gets a key of its own there;
        evaluation is without. Or ``"classification"``, ``"regression"``, ``"causal_lm"`` of a model
        (``modules.named_loss``).
      params: pytree of arrays, split over the plan's mesh already if they should never be whole;
        not modified. Or a Flax NNX or Equinox module: the loss is called with one, and the result's
        ``params`` is the trained one.
      plan: mechanism, data, steps and guarantee: ``uls(...).plan(data, steps=..., epsilon=...)``.
      optimizer: any Optax transformation.
      model: of a loss by name, where ``params`` is no module: a Linen module, a Haiku transform, or
        a function ``(params, x)``.
      trainable: which parameters are trained: a function of their name (``blocks/mlp/up/kernel``),
        or a tree of bools that is a prefix of the parameters; default all. Only these have
        gradients, norms, noise, optimiser state and checkpoints.
      validation: held-out users, evaluated before, during and after.
      run_dir: where to log, to checkpoint and to report; an unfinished run there goes on.
      key: root key of sampling and noise; default a fresh secret one (or the run directory's). Of
        a secret one, runs that differ in anything (data, mechanism, steps, delta, loss, optimiser,
        first parameters, execution, devices) draw independently; the same run draws the same again.
      audit: canaries in the run: the result's ``audit``, and audit.json in the run directory.
      pace: how often the run logs, evaluates and keeps.
      hooks: functions that are called on the way.
      console: where progress is shown; default a terminal or notebook, if there is one
        (``rich.console.Console(quiet=True)``: nowhere).

    Raises:
      BadInputError: unusable arguments, or a run directory that holds something else.
      clipping.SelfCheckError: the sum on this mesh, or the strategy's norms, disagree with plain
        per-unit gradients, or units mix; no step was taken.
    """
    expect(plan, Plan, "plan", "what mechanism.plan(data, steps=..., epsilon=...) returns")
    for value, kind, name, wanted in (
        (key, RootKey, "key", "a RootKey, as RootKey.generate() makes"),
        (run_dir, (str, os.PathLike, RunDirectory), "run_dir", "the path of a folder"),
        (pace, Pace, "pace", "a dpfl_jax.Pace(...)"),
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
    loss = named_loss(loss_fn, params, model) if isinstance(loss_fn, str) else loss_fn
    expect(loss, Callable, "loss_fn", "a function (params, example), or a loss by name")  # type: ignore[arg-type]
    language = getattr(loss, "__self__", None)
    schema = getattr(plan.data, "schema", None)
    begins = isinstance(language, LanguageModel) and language.config.bos_id is not None
    if begins and schema is not None and schema.kind == "answers":
        raise BadInputError(
            "the data's sequences hold their beginning, and the model would prepend another: "
            "make it of dataclasses.replace(config, bos_id=None)"
        )
    arrays, rebuild, is_module = functional(params)
    if is_module:
        loss = of_arrays(loss, rebuild)
    evaluate = None
    if validation is not None:
        evaluate = Evaluator(loss, plan.mesh).of(by_set(validation))
    algorithm = algorithm_of(loss, arrays, plan, optimizer, trainable)
    if schema is not None and {"x", "label"} <= {field.name for field in schema.fields}:
        classes = number_of_classes(loss_fn, params, model, plan.example)
        if classes is not None:
            for store in filter(None, (plan.data, validation)):
                check_labels(store, classes)
    console = console or default_console()
    if plan.bounding is not None and console is not None:
        console.print(str(plan.bounding), highlight=False)
    caveats: tuple[str, ...] = ()
    if plan.mechanism.private:
        if console is not None:
            for told in filter(None, (not_people(plan.data, "user"), far_from_order_1(plan.data))):
                console.print(f"warning: {told}", markup=False, highlight=False)
        held_out = () if validation is None else (VALIDATION_CAVEAT,)
        if validation is not None and _known(plan.data, validation):
            held_out = (KNOWN_CAVEAT,)
            if console is not None:
                console.print(f"warning: {KNOWN_CAVEAT}", markup=False, highlight=False)
        packed = (PACKING_CAVEAT,) if plan.execution.packing else ()
        caveats = (PRIVATE_METRICS_CAVEAT, *packed, *held_out, TUNING_CAVEAT)
        if validation is not None and pace is not None and pace.chooses:
            _refuse_shared(plan.data, validation)
    options: dict[str, Any] = {"evaluate": evaluate, "pace": pace, "hooks": hooks}
    options |= {"console": console, "caveats": caveats}
    own = None
    if run_dir is not None and not isinstance(run_dir, RunDirectory):
        content = plan.stated | ({} if audit is None else {"audit": audit.model_dump()})
        run_dir = own = open_directory(run_dir, content, key, {"data": plan.data_digest})
        key = None
    try:
        if audit is not None:
            from dpfl_jax.training.canaries import WithCanaries  # which is made of this

            key = None if run_dir is not None else key or processes.fresh_key()
            root = key or run_dir.root_key  # type: ignore[union-attr]
            algorithm = WithCanaries(algorithm, audit, root.child("audit"))
        result = train(algorithm, run_dir=run_dir, key=key, **options)
        if console is not None:
            told = result.guarantee.summary()
            console.print(told, style="bold", highlight=False, soft_wrap=True)
        if own is not None and own.writes:
            people, task = plan.population, getattr(plan.data, "task", None)
            report = build_report(
                own.path.name,
                result,
                result.guarantee,
                mechanism=plan.stated["mechanism"],
                data={"users": people.num_users, "examples": people.num_examples},
                task=None if task is None else dataclasses.asdict(task),
                loss=loss_fn if isinstance(loss_fn, str) else None,
            )
            stated = plan.statement(result.guarantee, result.accounted)
            if plan.bounding is not None:
                outside = report["outside_guarantee"]
                outside["contribution_bounding"] = plan.bounding.to_json()
            if result.audit is not None:
                report["audit"] = result.audit.write(own.path, stated)
            write_report(own.path, report, stated, result.metrics)
        chosen = result.best
        if chosen is not None and (read := chosen.params) is not None:
            chosen = dataclasses.replace(chosen, params=lambda: rebuild(read()))
        return dataclasses.replace(result, params=rebuild(result.params), best=chosen)
    finally:
        if own is not None:
            own.close()


def _known(data: Any, validation: Any) -> bool:
    """Whether somebody in validation is trained on, too, as far as stores name people."""
    stores = (by_set(data), by_set(validation))
    named = all(hasattr(s, "user_ids") and hasattr(s, "num_users") for s in stores)
    return named and not people(data).isdisjoint(people(validation))


def _refuse_shared(data: Any, validation: Any) -> None:
    """Nobody may be trained on and choose a checkpoint, too: no noise is added to a choice."""
    both = people(data) & people(validation)
    if both:
        raise BadInputError(
            f"{len(both)} users of validation are trained on, too, and keep_best and patience "
            "would choose by their examples, which the guarantee does not cover: hold out other "
            "people, or give others other ids"
        )


def train(algorithm: Central, *, caveats: tuple[str, ...] = (), **options: Any) -> FitResult:
    """Takes the steps of central training.

    Args:
      algorithm: what is run.
      caveats: further sentences for the guarantee.
      **options: of ``run.driver.drive``.
    """
    key_argument(
        algorithm.loss_fn,
        needed_without=None if options.get("evaluate") is None else "evaluation",
    )
    result = drive(algorithm, **options)
    run_dir = options.get("run_dir")
    if run_dir is not None and run_dir.writes:
        algorithm.write_private(run_dir, result)
    initial, final = result.evaluation(0), result.last
    return FitResult(
        **{field.name: getattr(result, field.name) for field in dataclasses.fields(result)},
        guarantee=algorithm.guarantee(result.accounted, (*caveats, *result.caveats)),
        initial=None if initial is None else Evaluation(**initial),
        final=None if final is None else Evaluation(**final),
        audit=algorithm.audited(result),
    )
