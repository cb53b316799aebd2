"""The only loop: takes an algorithm's steps, keeps, logs and evaluates them, and ends the run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console

from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.errors import BadInputError, too_little_memory
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import processes
from dpfl_jax.run.algorithm import Algorithm, Taken
from dpfl_jax.run.checkpoint import Checkpoints, shapes_of
from dpfl_jax.run.choice import (
    BEST_CAVEAT,
    Best,
    KeepBest,
    exhausted,
    interrupted_caveat,
    stopped_caveat,
)
from dpfl_jax.run.content import content_digest
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.interrupt import StopRequest
from dpfl_jax.run.profile import Profile
from dpfl_jax.run.progress import RunConsole, StepProgress
from dpfl_jax.run.terms import PUBLIC_KEY_CAVEAT, begin

PyTree = Any
Evaluate = Callable[[PyTree], dict[str, Any]]
_MILESTONES = 20
_CHECKING = "checking the first step against plain gradients of single units"
# A label that is no class, NaN among inputs, ...: trained on, they would cost the whole budget.
_NO_LOSS = (
    "{} NaN or infinite, so the run stopped: look at the loss of single examples, and there for a "
    "label that is no class of the model (classes are whole numbers from 0, one output each), NaN "
    "among the inputs, inputs that are too large (scale them), or the logarithm or root of a "
    "negative number"
)
# Steps are noted before they are taken: one by one if they are slow, else about as often as this.
NOTED_EVERY_S = 1.0

MOVED_CAVEAT = (
    "the run went on from a checkpoint, or from its start, on other hardware or with another "
    "execution: steps taken twice used the same noise on sums that may differ in rounding, so "
    "metrics written between there and the interruption must not have been published"
)


@dataclasses.dataclass(frozen=True)
class Pace:
    """How often a run looks up from its steps.

    Attributes:
      checkpoint_every: steps between checkpoints.
      keep_checkpoints: checkpoints kept.
      eval_every: steps between evaluations; 0 for before and after only.
      log_every: steps between rows of metrics.
      keep_best: the checkpoint with the lowest held-out loss is kept, too.
      patience: the run stops once so many evaluations in a row found no lower held-out loss.
      profile: turns of the loop that are traced (``profile.Profile``).
    """

    checkpoint_every: int = 50
    keep_checkpoints: int = 2
    eval_every: int = 0
    log_every: int = 1
    keep_best: bool = False
    patience: int | None = None
    profile: int = 0

    def __post_init__(self) -> None:
        """Validates."""
        if self.patience is not None and self.patience < 1:
            raise BadInputError(f"patience is {self.patience}, but it must be at least 1")
        if self.chooses and not self.eval_every:
            raise BadInputError("keep_best and patience look at evaluations: set eval_every")
        for name in ("checkpoint_every", "keep_checkpoints", "log_every"):
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} is {getattr(self, name)}, but it must be at least 1")

    @property
    def chooses(self) -> bool:
        """Whether held-out loss decides anything."""
        return self.keep_best or self.patience is not None

    @classmethod
    def of(cls, config: Any, steps: int = 1) -> Pace:
        """What a configuration says, whose numbers are of so many steps each."""
        section = config.train
        return cls(
            section.checkpoint_every * steps,
            section.keep_checkpoints,
            section.eval_every * steps,
            getattr(section, "log_every", 1),
            section.keep_best,
            section.patience,
            config.execution.profile,
        )


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Functions of the user that are called on the way; what they do is not in the guarantee.

    Attributes:
      on_step: called with each row of metrics.
      on_evaluation: called with each row that holds an evaluation.
      on_checkpoint: called with the number of steps that a checkpoint was written after.
    """

    on_step: Callable[[dict[str, Any]], Any] | None = None
    on_evaluation: Callable[[dict[str, Any]], Any] | None = None
    on_checkpoint: Callable[[int], Any] | None = None


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run returns.

    Attributes:
      params: the model after the last step.
      steps: taken in all (also before a resume).
      metrics: the rows of metrics.jsonl.
      interrupted: name of the signal that stopped the run, or None.
      caveats: what the run itself adds to the guarantee's.
      seconds: wall time of the steps taken in this process (without compilation).
      examples: processed in that time.
      tokens: real tokens processed in that time (0 if examples are not token sequences).
      places: for tokens, real or not, that were computed on in that time.
      planned: steps that it would have taken.
      clipping: how the norms of how many parameters were computed; None if the run is not private.
      best: the checkpoint with the lowest held-out loss, if that was kept.
      seen: what is kept beside the model (``Algorithm.seen``). Private.
      asked: steps that may have been released, also by a process that was killed.
    """

    params: PyTree
    steps: int
    metrics: list[dict[str, Any]]
    interrupted: str | None
    caveats: tuple[str, ...]
    seconds: float
    examples: int
    tokens: int
    planned: int
    clipping: dict[str, Any] | None = None
    best: Best | None = None
    seen: Any = dataclasses.field(default=None, repr=False)
    places: int = 0
    asked: int = 0

    @property
    def accounted(self) -> int:
        """Steps that the guarantee is for: all of them, if a rule decided when to stop.

        A step that was released before the run was killed stays released, whether or not the run
        took it again.
        """
        return self.planned if self.interrupted is None else max(self.steps, self.asked, 1)

    @property
    def last(self) -> dict[str, Any] | None:
        """The evaluation at the end; None if the run was interrupted."""
        return self.evaluation(self.steps) if self.interrupted is None else None

    def evaluation(self, step: int) -> dict[str, Any] | None:
        """The evaluation logged after ``step`` steps, if there is one."""
        return _evaluation(self.metrics, step)


def _promotes(function: Callable[..., RunResult]) -> Callable[..., RunResult]:
    """Optax and the engine promote integers to floats, whatever callers forbid their own code."""

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> RunResult:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **options)

    return wrapped


@_promotes
def drive(
    algorithm: Algorithm,
    *,
    key: RootKey | None = None,
    run_dir: RunDirectory | None = None,
    evaluate: Evaluate | None = None,
    pace: Pace | None = None,
    charge: Callable[[str], Any] | None = None,
    console: Console | None = None,
    hooks: Hooks | None = None,
) -> RunResult:
    """Takes an algorithm's steps.

    Args:
      algorithm: what is run.
      key: root key; default a fresh secret one (or the run directory's).
      run_dir: where to log and checkpoint; an unfinished one is resumed.
      evaluate: ``params -> dict`` with at least ``loss``; called before, during and after.
      pace: how often it logs, evaluates and keeps.
      charge: called before the first step with a name of the run's draws, to pay for them (in the
        process that writes): a run that moves and draws anew pays again.
      console: where the progress bar goes; None for none.
      hooks: called on the way.

    Raises:
      BadInputError: the run directory holds another run, or memory does not suffice.
      clipping.SelfCheckError: the algorithm's check before the first step failed.
    """
    steps, pace = algorithm.steps, pace or Pace()
    if pace.chooses and evaluate is None:
        raise BadInputError("keep_best and patience look at held-out loss: hold somebody out")
    if pace.keep_best and run_dir is None:
        raise BadInputError("keep_best needs run_dir, where the best parameters are kept")
    if pace.profile and run_dir is None:
        raise BadInputError("profile needs run_dir, where the trace is written")
    root = run_dir.root_key if run_dir is not None else key or processes.fresh_key()
    caveats = (PUBLIC_KEY_CAVEAT,) if root.public and algorithm.private else ()
    state = algorithm.init()
    log = _Log(run_dir, hooks or Hooks())
    checkpoints, resumed = None, None
    if run_dir is not None:
        checkpoints = Checkpoints(run_dir.path / "checkpoints", pace.keep_checkpoints)
        resumed = checkpoints.resumed_step()
    key, terms = begin(
        algorithm.terms(),
        root,
        run_dir,
        algorithm.hardware if algorithm.movable else None,
        resumed,
        lambda: content_digest(state.params, root),
        algorithm.layout,
    )
    asked = _Asked(run_dir, steps, resumed or 0)
    if charge is not None:
        processes.on_primary(lambda: charge(key.fingerprint))
    if run_dir is not None and checkpoints is not None:
        if run_dir.computed_with(algorithm.hardware, algorithm.layout):
            caveats = (*caveats, MOVED_CAVEAT)
        if resumed is not None:
            state = checkpoints.restore(state, root, terms, resumed)
        log.start_at(int(state.step))
    choosing = None
    if pace.keep_best and checkpoints is not None:
        choosing = KeepBest(checkpoints, log.rows)
    start = int(state.step)

    def evaluated(done: int) -> None:
        if evaluate is not None and _evaluation(log.rows, done) is None:
            found = evaluate(algorithm.params(state))
            if done == 0 and not math.isfinite(found["loss"]):
                before = "before the first step the mean loss of held-out examples is"
                raise BadInputError(_NO_LOSS.format(before))
            log.append({"step": done, "eval": found})

    if start == 0:
        evaluated(0)
    work = algorithm.begin(key, start)
    mesh = algorithm.mesh
    facts = {
        "root key": root.fingerprint,
        "number of steps": [start, steps],
        "set of terms": terms,
        "mesh": [list(mesh.shape.items()), [device.id for device in mesh.devices.flat]],
        "version of JAX or NumPy": [jax.__version__, np.__version__],
    }
    processes.check_same(facts | work.agreed())
    clipping = None
    if algorithm.private:
        if start < steps:
            shown = (console or Console(quiet=True)).status(_CHECKING)
            smaller = algorithm.smaller
            with shown as line, too_little_memory("the check before the first step", smaller):
                work.check(state, functools.partial(_say, console, line))
        clipping = work.clipping()
        if clipping is not None:
            _tell(clipping, console)
    ended = exhausted(log.rows, pace.patience)
    spent, meter, seen = Spent(algorithm), _Meter(), start > 0

    def costs() -> float | None:
        # What a rule chooses or stops at is no number of steps that was fixed beforehand.
        return spent(steps if pace.chooses else asked.most)

    with (
        StopRequest() as stop,
        StepProgress(console or Console(quiet=True), algorithm.word, steps, start) as bar,
        too_little_memory("training", algorithm.smaller),
        Profile(log.folder and log.folder / "profile", pace.profile) as trace,
        checkpoints or contextlib.nullcontext(),
    ):
        done, stopping = start, None
        for after, inputs in () if ended else work.inputs():
            trace.before()
            asked.before(after)
            state, taken = work.step(state, inputs)
            trace.after(state)
            before, done = done, after
            meter.count(taken, done - before)
            if not seen:
                seen = _check_losses(algorithm.row(taken.stats)["outside_guarantee"])
            last = done == steps
            logs = last or _due(pace.log_every, before, done)
            saves = last or _due(pace.checkpoint_every, before, done)
            if logs or saves or not processes.many():  # else they would wait for each other
                stopping = meter.exchange(stop.requested)
            if logs:
                row = {"step": done, "epsilon_spent": costs(), **algorithm.row(taken.stats)}
                meter.measure(row)
                log.append(row)
                bar.update(done, _status(row))
            if _due(pace.eval_every, before, done) and not last:
                evaluated(done)
                meter.restart()
                ended = exhausted(log.rows, pace.patience)
                if choosing is not None:
                    saves |= choosing.look(log.rows, done)
            if checkpoints is not None and (saves or stopping or ended):
                told = {"epsilon": costs(), "delta": algorithm.delta}
                checkpoints.save(state, root, told, terms)
                if log.hooks.on_checkpoint is not None:
                    checkpoints.finish()
                    log.hooks.on_checkpoint(done)
                meter.restart()
            if stopping or ended:
                break
        if checkpoints is not None:
            checkpoints.open_all()
    asked.end()
    ended |= done == steps
    if ended:
        evaluated(done)
    if algorithm.private:
        if done < steps and ended:
            caveats = (*caveats, stopped_caveat(done, steps, algorithm.word))
        elif done < steps:
            caveats = (*caveats, interrupted_caveat(done, asked.most, steps, algorithm.word))
        if choosing is not None:
            caveats = (*caveats, BEST_CAVEAT)
    chosen, like = None, shapes_of(state)
    if choosing is not None:
        choosing.look(log.rows, done)
        chosen = choosing.found(
            lambda kept, step: algorithm.params(kept.restore(like, root, terms, step))
        )
    return RunResult(
        params=algorithm.params(state),
        steps=done,
        metrics=log.rows,
        interrupted=None if ended else stopping,
        caveats=caveats,
        seconds=meter.seconds,
        examples=meter.examples,
        tokens=meter.tokens,
        places=meter.places,
        planned=steps,
        clipping=clipping,
        best=chosen,
        seen=algorithm.seen(state),
        asked=asked.most,
    )


def _due(every: int, before: int, done: int) -> bool:
    """Whether a multiple of ``every`` was passed; never if it is 0."""
    return bool(every) and done // every > before // every


class _Asked:
    """How many steps may have been released; a kill forgets none of them.

    What a step shows (a row of metrics, a model, a silo's message) stays shown if the run is killed
    and resumes from an earlier checkpoint. So a step is noted in the run's directory before it is
    taken. Quick steps are noted several at once, about as many as one second takes, since a write
    that is on the disk costs milliseconds. A run that stops between two steps notes what it took,
    so that only a kill pays for steps that were noted and not taken.

    Attributes:
      most: steps that may have been released until now.
    """

    def __init__(self, run_dir: RunDirectory | None, steps: int, done: int) -> None:
        self._run_dir, self._steps = run_dir, steps
        known = done if run_dir is None else run_dir.asked
        self.most = steps if known is None else max(known, done)
        self._ahead, self._at = 1, -math.inf
        self._note(self.most)

    def before(self, step: int) -> None:
        """The steps up to ``step`` will be taken."""
        if step > self._noted:
            quick = time.monotonic() - self._at < NOTED_EVERY_S
            self._ahead = 2 * self._ahead if quick else max(1, self._ahead // 2)
            self._note(min(step - 1 + self._ahead, self._steps))
            self._at = time.monotonic()
        self.most = max(self.most, step)

    def end(self) -> None:
        """No step is under way."""
        if self._noted != self.most:
            self._note(self.most)

    def _note(self, steps: int) -> None:
        self._noted = steps
        if self._run_dir is not None:
            self._run_dir.ask(steps)


class Spent:
    """An upper bound on epsilon after any number of steps, cheap enough for a progress bar.

    Epsilon is computed at a few milestones; between two of them the later one is shown, which is
    never too small.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        points = np.linspace(0, algorithm.steps, _MILESTONES + 1)[1:]
        self._at = np.unique(np.ceil(points).astype(int))
        self._epsilons = np.asarray(algorithm.epsilons(self._at.tolist()), np.float64)

    def __call__(self, step: int) -> float | None:
        """Epsilon after ``step`` steps; None if there is none."""
        if step == 0:
            return 0.0
        epsilon = float(self._epsilons[int(np.searchsorted(self._at, step))])
        return epsilon if math.isfinite(epsilon) else None


def _tell(clipping: dict[str, Any], console: Console | None) -> None:
    if console is not None and clipping["warning"]:
        console.print(clipping["warning"], highlight=False)
    elif clipping["warning"]:
        warnings.warn(clipping["warning"], stacklevel=3)


def _say(console: Console | None, line: Any, part: str) -> None:
    """Shows which part of the check is being done."""
    if line is not None:
        line.update(f"{_CHECKING}: {part}")
    elif isinstance(console, RunConsole):
        console.begin(f"{_CHECKING}: {part}")


def _check_losses(found: dict[str, Any]) -> bool:
    """Whether a step had units; raises BadInputError if many have no loss or gradient.

    A single one, which is left out and counted, must not decide whether others are trained on.
    """
    if found.get("nonfinite_units", 0) > max(1, found.get("units", 0) / 4):
        raise BadInputError(_NO_LOSS.format("of many units of the first step loss or gradient is"))
    return found.get("units", 1) > 0


def _status(row: dict[str, Any]) -> str:
    raw = row["outside_guarantee"]
    parts = [f"{row['silos']} silos"] if "silos" in row else []
    if row.get("dropped_silos"):
        parts.append(f"dropped {row['dropped_silos']}")
    if raw["train_loss"] is not None:
        parts.append(f"loss {raw['train_loss']:.4g}")
    if raw.get("fraction_clipped") is not None:
        parts.append(f"clipped {raw['fraction_clipped']:.0%}")
    if raw.get("nonfinite_units"):
        parts.append(f"non-finite {raw['nonfinite_units']}")
    if raw.get("tokens_per_s"):
        parts.append(f"{raw['tokens_per_s']:,.0f} tok/s")
    if row["epsilon_spent"] is not None:
        parts.append(f"ε ≤ {rounded_up(row['epsilon_spent'], 3)}")
    return "  ".join(parts)


class _Meter:
    """Examples and tokens per second, compilation, evaluation and checkpoints left out."""

    def __init__(self) -> None:
        self.seconds, self.examples, self.tokens, self.places = 0.0, 0, 0, 0
        self._last: float | None = None
        self._pending = [0, 0, 0, 0]
        self._read = (1, 1)
        self._seen = (0, 0)

    def restart(self) -> None:
        """Leaves out the time since the last measurement, and the steps in it."""
        self._last = time.perf_counter()
        self._pending = [0, 0, 0, 0]

    def count(self, taken: Taken, steps: int) -> None:
        """Counts what was taken at once."""
        for i, amount in enumerate((steps, taken.examples, taken.tokens, taken.places)):
            self._pending[i] += amount
        self._read = taken.read

    def exchange(self, stop: str | None) -> str | None:
        """Adds up what the processes read since the last measurement; all must call it.

        Args:
          stop: name of the signal that asks this process to stop, if one does.

        Returns:
          The name of a signal that asks any process to stop: all then stop at the same step.
        """
        columns, row = self._read
        mine = (*self._pending[2:], columns, getattr(signal, stop or "", 0))
        all_of_them = processes.gather([int(number) for number in mine])
        tokens, places, read, signals = np.array(all_of_them, np.int64).T
        self._seen = (
            round(tokens.sum() * row / read.sum()),
            round(places.sum() * row / read.sum()),
        )
        heard = int(signals.max())
        return signal.Signals(heard).name if heard else None

    def measure(self, row: dict[str, Any]) -> None:
        """Adds the steps since the last call to ``row`` (the first call, which compiles, not)."""
        if self._last is not None:
            steps, examples, *_ = self._pending
            tokens, places = self._seen
            elapsed = time.perf_counter() - self._last
            self.seconds += elapsed
            self.examples += examples
            self.tokens += tokens
            self.places += places
            # Together they give the exact number of tokens drawn: as private as the data.
            row["outside_guarantee"]["seconds_per_step"] = round(elapsed / steps, 6)
            if tokens:
                row["outside_guarantee"]["tokens_per_s"] = round(tokens / elapsed, 1)
        self.restart()


class _Log:
    """Rows of metrics, in memory and (with a run directory) on disk."""

    def __init__(self, run_dir: RunDirectory | None, hooks: Hooks) -> None:
        self._run_dir, self.hooks = run_dir, hooks
        self.rows: list[dict[str, Any]] = []

    @property
    def folder(self) -> pathlib.Path | None:
        """Where this process writes, if it does."""
        return self._run_dir.path if self._run_dir is not None and self._run_dir.writes else None

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
        call = self.hooks.on_evaluation if "eval" in row else self.hooks.on_step
        if call is not None:
            call(row)


def _evaluation(rows: list[dict[str, Any]], step: int) -> dict[str, Any] | None:
    return next((r["eval"] for r in rows if r["step"] == step and "eval" in r), None)
