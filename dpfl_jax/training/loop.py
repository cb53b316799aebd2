"""``fit``: the loop around the private step. Sampling, noise and accounting are the mechanism's."""

from __future__ import annotations

import dataclasses
import hashlib
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console

from dpfl_jax import accounting
from dpfl_jax.clipping import Trainable, join, self_check, split
from dpfl_jax.data.example_keys import key_argument, with_any_key
from dpfl_jax.data.pipeline import StepBatch
from dpfl_jax.data.store import Readable, check_offsets, fingerprint_of
from dpfl_jax.errors import BadInputError, too_little_memory
from dpfl_jax.mechanisms import Mechanism, Population
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import processes
from dpfl_jax.run.checkpoint import Checkpoints
from dpfl_jax.run.content import content_digest
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.interrupt import StopRequest
from dpfl_jax.run.mesh import (
    FSDP_AXIS,
    data_parallel_mesh,
    parameter_shardings,
    place,
    splits_parameters,
)
from dpfl_jax.run.progress import StepProgress
from dpfl_jax.run.state import TrainState, hardware, init_state
from dpfl_jax.run.terms import Terms, begin, training_digest
from dpfl_jax.training import convolutions
from dpfl_jax.training.batches import (
    draw_digest,
    example_loss,
    step_arguments,
    training_pipeline,
    units_of,
)
from dpfl_jax.training.evaluate import Evaluation, Evaluator
from dpfl_jax.training.step import StepStats, make_train_step
from dpfl_jax.training.sum_check import check_sum
from dpfl_jax.training.sums import in_pieces

PyTree = Any
_MILESTONES = 20


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What a run returns.

    Attributes:
      params: parameters after the last step.
      steps: steps taken in all (also before a resume).
      guarantee: what holds for everything the run has released.
      initial: evaluation before the first step, if there was validation data.
      final: evaluation after the last step; None if the run was interrupted.
      metrics: the rows of metrics.jsonl.
      interrupted: name of the signal that stopped the run, or None.
      seconds: wall time of the steps taken in this process (without compilation).
      examples: examples processed in that time.
      tokens: real tokens processed in that time (0 if examples are not token sequences).
      clipping: how the norms of how many parameters were computed (``clipping.Explanation``), as
        plain JSON types; None if the run is not private.
    """

    params: PyTree
    steps: int
    guarantee: accounting.Guarantee
    initial: Evaluation | None
    final: Evaluation | None
    metrics: list[dict[str, Any]]
    interrupted: str | None
    seconds: float
    examples: int
    tokens: int
    clipping: dict[str, Any] | None = None


class SpentBudget:
    """An upper bound on epsilon after any number of steps, cheap enough for a progress bar.

    Epsilon is computed at a few milestones from one per-step loss distribution; between two of
    them the later one is shown, which is never too small.
    """

    def __init__(
        self, mechanism: Mechanism, population: Population, steps: int, delta: float
    ) -> None:
        self._milestones = np.unique(
            np.ceil(np.linspace(0, steps, _MILESTONES + 1)[1:]).astype(int)
        )
        self._epsilons = np.full(len(self._milestones), np.inf)
        if mechanism.private:
            curve = accounting.epsilon_curve(
                mechanism.event(population, 1), [int(m) for m in self._milestones], delta
            )
            # The curve is coarse; what all steps cost is known more finely.
            total = mechanism.guarantee(population, steps, delta).epsilon
            self._epsilons = np.minimum(curve, total)

    def __call__(self, step: int) -> float | None:
        """Epsilon after ``step`` steps; None if not private."""
        epsilon = 0.0
        if step > 0:
            epsilon = float(self._epsilons[int(np.searchsorted(self._milestones, step))])
        return epsilon if np.isfinite(epsilon) else None


def fit(
    *,
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    data: Readable,
    mechanism: Mechanism,
    optimizer: optax.GradientTransformation,
    steps: int,
    trainable: Trainable = None,
    epsilon: float | None = None,
    delta: float | None = None,
    key: RootKey | None = None,
    validation: Readable | None = None,
    microbatch_size: int = 16,
    mesh: Mesh | None = None,
    strategy: str = "auto",
    group_buckets: bool = False,
    examples_at_once: int | None = None,
    split_users: bool = False,
    run_dir: RunDirectory | None = None,
    checkpoint_every: int = 50,
    keep_checkpoints: int = 2,
    eval_every: int = 0,
    eval_batch_size: int = 64,
    log_every: int = 1,
    caveats: tuple[str, ...] = (),
    console: Console | None = None,
) -> FitResult:
    """Trains ``params`` with a mechanism.

    Args:
      loss_fn: ``(params, example) -> float32 scalar`` for one example. If it also takes ``rng`` (or
        ``key``), with default None, each example of each training step gets a key of its own there;
        evaluation is without.
      params: pytree of arrays, split over the mesh already if they should never be whole; not
        modified.
      data: a store: ``user_offsets`` and ``read(positions)``.
      mechanism: ELS, ULS, NonPrivate, ...; calibrated here if it has no noise multiplier.
      optimizer: any Optax transformation.
      steps: number of steps T.
      trainable: which parameters are trained: a function of their name (``blocks/mlp/up/kernel``),
        or a tree of bools that is a prefix of the parameters; default all. Only these have
        gradients, norms, noise, optimiser state and checkpoints.
      epsilon: target, if the mechanism has no noise multiplier.
      delta: default (number of examples) ** -1.1.
      key: root key of sampling and noise; default a fresh secret one (or the run directory's). Of
        a secret one, runs that differ in anything (data, mechanism, steps, delta, loss, optimiser,
        first parameters, strategy, devices) draw independently; the same run draws the same again.
      validation: held-out users, evaluated before, during and after.
      microbatch_size: units per device processed at once.
      mesh: default: data parallel over all devices.
      strategy: how bounded gradients are computed.
      group_buckets: process users with few examples in buffers with a smaller group axis, instead
        of padding them to the group size (ULS): less work, a longer compilation.
      examples_at_once: examples of a user that a device processes at once (ULS); the gradients of
        the rest are accumulated before the user's norm is taken. None: all.
      split_users: on a mesh with fsdp, share out each user's examples (ULS) to those devices,
        instead of one user a device.
      run_dir: where to log and checkpoint; an unfinished one is resumed.
      checkpoint_every: steps between checkpoints.
      keep_checkpoints: checkpoints kept.
      eval_every: steps between evaluations; 0 for before and after only.
      eval_batch_size: examples per device and evaluation batch.
      log_every: steps between rows of metrics.
      caveats: further sentences for the guarantee.
      console: where the progress bar goes; None for none.

    Returns:
      A FitResult.

    Raises:
      BadInputError: unusable arguments (see the mechanism, and ``accounting``).
      clipping.SelfCheckError: the sum on this mesh, or the strategy's norms, disagree with plain
        per-unit gradients, or units mix; no step was taken.
    """
    if steps < 1:
        raise BadInputError(f"the number of steps is {steps}, but at least 1 is needed")
    check_offsets(data.user_offsets)
    mesh = data_parallel_mesh() if mesh is None else mesh
    population = mechanism.population(data.user_offsets)
    if population.num_units == 0:
        raise BadInputError("the training set has no usable example: check the data section")
    delta = population.default_delta() if delta is None else delta
    mechanism.sampling_probability(population)
    if mechanism.private and mechanism.noise_multiplier is None:
        if epsilon is None:
            raise BadInputError("neither epsilon nor the mechanism's noise_multiplier is set")
        mechanism = mechanism.calibrate(population, steps, epsilon, delta)
    root = run_dir.root_key if run_dir is not None else key or processes.fresh_key()
    if root.public and mechanism.private:
        caveats = (*caveats, PUBLIC_KEY_CAVEAT)

    random = key_argument(loss_fn, needed_without=None if validation is None else "evaluation")
    evaluate = Evaluator(loss_fn, mesh, eval_batch_size)
    trained, frozen = split(params, trainable)
    example = jax.tree.map(lambda x: x[0], data.read(np.asarray(data.user_offsets)[:1]))
    traced = with_any_key(loss_fn, random)
    copied = convolutions.kernels(traced, params, example) if splits_parameters(mesh) else ()
    frozen = place(frozen, parameter_shardings(frozen, mesh, copied), copy=False)
    state = init_state(trained, optimizer, mesh, copied)

    def whole(state: TrainState) -> PyTree:
        return join(state.params, frozen)

    log = _Log(run_dir)
    checkpoints, resumed = None, None
    if run_dir is not None:
        checkpoints = Checkpoints(run_dir.path / "checkpoints", keep_checkpoints)
        resumed = checkpoints.resumed_step()
    computation = training_digest(traced, trained, frozen, example, optimizer)
    cut: dict[str, Any] = {"examples_at_once": examples_at_once, "split_users": split_users}
    key, terms = begin(
        _terms(mechanism, population, delta, steps, data, frozen, computation),
        root,
        run_dir,
        hardware(mesh),
        resumed,
        lambda: content_digest(state.params),
        [hardware(mesh), strategy, cut, group_buckets, microbatch_size],
    )
    if run_dir is not None and checkpoints is not None:
        if run_dir.computed_with(hardware(mesh))[1:]:
            caveats = (*caveats, MOVED_CAVEAT)
        if resumed is not None:
            state = checkpoints.restore(state, root, terms, resumed)
        log.start_at(int(state.step))
    start = int(state.step)
    if validation is not None and start == 0 and log.evaluation(0) is None:
        log.append({"step": 0, "eval": evaluate(whole(state), validation).to_json()})

    shipped_loss = example_loss(loss_fn, data)
    options: dict[str, Any] = {"strategy": strategy, "trainable": trainable}
    step_fn = make_train_step(
        mechanism, shipped_loss, optimizer, mesh, whole=copied, **options, **cut
    )
    sampler = mechanism.sampler(data.user_offsets, key)
    pipeline = training_pipeline(
        sampler, data, mesh, microbatch_size, group_buckets, key if random else None
    )
    processes.check_same(
        {
            "root key": root.fingerprint,
            "number of steps": [start, steps],
            "set of terms": terms,
            "mechanism": repr(mechanism),
            "draw": draw_digest(sampler, key, start),
            # Processes that cut a batch apart differently would count units twice, or never.
            "mesh": [list(mesh.shape.items()), [d.id for d in mesh.devices.flat]],
            "size of a microbatch": [microbatch_size, pipeline.row, repr(group_buckets)],
            "strategy": [strategy, cut],
            "set of trained parameters": [
                [jax.tree_util.keystr(path), list(leaf.shape)]
                for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
            ],
            "version of JAX or NumPy": [jax.__version__, np.__version__],
        }
    )
    pieces = in_pieces(mechanism, mesh, **cut)
    if mechanism.private and start < steps:
        with too_little_memory("the check before the first step", _smaller(mechanism)):
            check_sum(
                step_fn.sum,
                mechanism,
                shipped_loss,
                state.params,
                frozen,
                pipeline,
                sampler.group_size,
                trainable=trainable,
            )
            if strategy not in ("vmap", "scan") and not pieces:
                # Norms that no gradient was formed for; each shape of units has a plan of its own.
                bounded = mechanism.bounded_grad(shipped_loss, **options)
                for some in pipeline.first_units(2, sampler.group_size):
                    rows = jax.tree.map(lambda leaf: leaf[0], units_of(mechanism, some))
                    self_check(bounded, params, rows)
    clipping = None
    if mechanism.private:
        units = microbatch_size * (mesh.shape[FSDP_AXIS] if splits_parameters(mesh) else 1)
        bounded = mechanism.bounded_grad(shipped_loss, **options, **pieces)
        largest = pipeline.first_units(1, sampler.group_size)[-1]
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((units, *x.shape[2:]), x.dtype),
            units_of(mechanism, largest),
        )
        clipping = bounded.explain(params, shapes).to_json(units)
        for line in filter(None, (clipping["summary"], clipping["warning"])):
            if console is not None:
                console.print(line, highlight=False)
        if console is None and clipping["warning"]:
            warnings.warn(clipping["warning"], stacklevel=2)
    spent = SpentBudget(mechanism, population, steps, delta)
    meter = _Meter(pipeline.row)
    quiet = Console(quiet=True)
    with (
        StopRequest() as stop,
        StepProgress(console or quiet, "training", steps, start) as bar,
        too_little_memory("training", _smaller(mechanism)),
    ):
        done, stopping = start, None
        for batch in pipeline.iterate(start, steps):
            arguments = step_arguments(mechanism, batch)
            state, stats = step_fn(state, *arguments, key.jax("noise", batch.step), frozen)
            done = batch.step + 1
            meter.count(batch)
            last = done == steps
            logs, saves = done % log_every == 0 or last, done % checkpoint_every == 0 or last
            if logs or saves or not processes.many():  # else they would wait for each other
                stopping = meter.exchange(stop.requested)
            if logs:
                row = _row(done, stats, spent(done), mechanism.private)
                meter.measure(row)
                log.append(row)
                bar.update(done, _status(row))
            if validation is not None and eval_every and done % eval_every == 0 and not last:
                log.append({"step": done, "eval": evaluate(whole(state), validation).to_json()})
                meter.restart()
            if checkpoints is not None and (saves or stopping):
                checkpoints.save(state, root, {"epsilon": spent(done), "delta": delta}, terms)
                meter.restart()
            if stopping:
                break
    if checkpoints is not None:
        checkpoints.close()
    finished = done == steps
    if finished and validation is not None and log.evaluation(steps) is None:
        log.append({"step": steps, "eval": evaluate(whole(state), validation).to_json()})
    return FitResult(
        params=whole(state),
        steps=done,
        guarantee=mechanism.guarantee(population, max(done, 1), delta, caveats),
        initial=log.evaluation(0),
        final=log.evaluation(steps) if finished else None,
        metrics=log.rows,
        interrupted=None if finished else stopping,
        seconds=meter.seconds,
        examples=meter.examples,
        tokens=meter.tokens,
        clipping=clipping,
    )


PUBLIC_KEY_CAVEAT = (
    "sampling and noise come from a seed written in the configuration: the guarantee holds only "
    "against those who do not know it, and for one run alone, as two runs with one seed add the "
    "same noise (leave seed unset for a release)"
)


MOVED_CAVEAT = (
    "the run went on from a checkpoint, or from its start, on other hardware: steps taken twice "
    "used the same noise on sums that may differ in rounding, so metrics written between there and "
    "the interruption must not have been published"
)


def _terms(
    mechanism: Mechanism,
    population: Population,
    delta: float,
    steps: int,
    data: Readable,
    frozen: PyTree,
    computation: str,
) -> Terms:
    digest = hashlib.sha256(np.asarray(data.user_offsets, np.int64).tobytes())
    digest.update(fingerprint_of(data, int(data.user_offsets[-1])).encode())
    return Terms(
        stated={
            "mechanism": {"kind": mechanism.kind, **dataclasses.asdict(mechanism)},
            "population": dataclasses.asdict(population),
            "delta": delta,
            "steps": steps,
        },
        secret={
            "data": digest.hexdigest(),
            "frozen": content_digest(frozen),
            "computation": computation,
        },
    )


def _smaller(mechanism: Mechanism) -> str:
    """What takes less memory."""
    users = ", set train.examples_at_once" if mechanism.kind == "uls" else ""
    return (
        f"lower train.microbatch_size and eval.batch_size{users}, split parameters over devices "
        "(mesh.fsdp), or train adapters (model.lora)"
    )


def _row(step: int, stats: StepStats, epsilon: float | None, private: bool) -> dict[str, Any]:
    """One row of metrics. What is computed from private data without noise is set apart."""
    units, finite = float(stats.units), float(stats.units - stats.nonfinite)
    raw = {
        "units": int(units),
        "train_loss": float(stats.loss) / finite if finite else None,
        "fraction_clipped": float(stats.clipped) / finite if finite and private else None,
        "mean_norm": float(stats.norm) / finite if finite and private else None,
        "nonfinite_units": int(stats.nonfinite),
    }
    return {"step": step, "epsilon_spent": epsilon, "outside_guarantee": raw}


def _status(row: dict[str, Any]) -> str:
    raw = row["outside_guarantee"]
    parts = []
    if raw["train_loss"] is not None:
        parts.append(f"loss {raw['train_loss']:.3f}")
    if raw["fraction_clipped"] is not None:
        parts.append(f"clipped {raw['fraction_clipped']:.0%}")
    if raw["nonfinite_units"]:
        parts.append(f"[red]non-finite {raw['nonfinite_units']}[/red]")
    if row.get("tokens_per_s"):
        parts.append(f"{row['tokens_per_s']:,.0f} tok/s")
    if row["epsilon_spent"] is not None:
        parts.append(f"ε ≤ {row['epsilon_spent']:.2f}")
    return "  ".join(parts)


class _Meter:
    """Examples and tokens per second, compilation, evaluation and checkpoints left out."""

    def __init__(self, row: int) -> None:
        self.seconds = 0.0
        self.examples = 0
        self.tokens = 0
        self._row = row
        self._last: float | None = None
        self._pending = [0, 0, 0]
        self._columns = row
        self._seen_tokens = 0

    def restart(self) -> None:
        """Leaves out the time since the last measurement, and the steps in it."""
        self._last = time.perf_counter()
        self._pending = [0, 0, 0]

    def count(self, batch: StepBatch) -> None:
        """Counts one step."""
        for i, amount in enumerate((1, batch.num_examples, batch.num_tokens)):
            self._pending[i] += amount
        self._columns = batch.columns

    def exchange(self, stop: str | None) -> str | None:
        """Adds up what the processes read since the last measurement; all must call it.

        Args:
          stop: name of the signal that asks this process to stop, if one does.

        Returns:
          The name of a signal that asks any process to stop: all then stop at the same step.
        """
        tokens = self._pending[2]
        found = processes.gather_numbers(tokens, self._columns, getattr(signal, stop or "", 0))
        # Columns that several processes hold (tensor parallel over hosts) were counted by each.
        self._seen_tokens = round(found[:, 0].sum() * self._row / found[:, 1].sum())
        heard = int(found[:, 2].max())
        return signal.Signals(heard).name if heard else None

    def measure(self, row: dict[str, Any]) -> None:
        """Adds the steps since the last call to ``row`` (the first call, which compiles, not)."""
        if self._last is not None:
            steps, examples, _ = self._pending
            tokens = self._seen_tokens
            elapsed = time.perf_counter() - self._last
            self.seconds += elapsed
            self.examples += examples
            self.tokens += tokens
            # Together they give the exact number of tokens drawn: as private as the data.
            row["outside_guarantee"]["seconds_per_step"] = round(elapsed / steps, 6)
            row["outside_guarantee"]["tokens_per_s"] = round(tokens / elapsed, 1)
        self.restart()


class _Log:
    """Rows of metrics, in memory and (with a run directory) on disk."""

    def __init__(self, run_dir: RunDirectory | None) -> None:
        self._run_dir = run_dir
        self.rows: list[dict[str, Any]] = []

    def start_at(self, step: int) -> None:
        """Goes on from what the run's directory holds.

        Every process must decide alike what is still to be evaluated: process 0 tells them.
        """
        assert self._run_dir is not None
        self._run_dir.drop_metrics_after(step)
        if self._run_dir.writes:
            self.rows = self._run_dir.read_metrics()
        told = processes.broadcast([row for row in self.rows if "eval" in row])
        if not self._run_dir.writes:
            self.rows = told

    def append(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self._run_dir is not None:
            self._run_dir.append_metrics(row)

    def evaluation(self, step: int) -> Evaluation | None:
        for row in self.rows:
            if row["step"] == step and "eval" in row:
                return Evaluation(**row["eval"])
        return None
