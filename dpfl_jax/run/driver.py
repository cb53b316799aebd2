"""The loop of every run: takes an algorithm's steps, logs, evaluates and saves checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, get_args

import jax
import numpy as np
from rich.console import Console

from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.clipping.cost import peak_flops
from dpfl_jax.errors import BadInputError, at_least, one_of, probability, too_little_memory
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import average, processes
from dpfl_jax.run.algorithm import Algorithm, RunResult, StepOutput, Steps, evaluation_after
from dpfl_jax.run.checkpoint import (
    BEST_CAVEAT,
    Best,
    Checkpoints,
    KeepBest,
    exhausted,
    interrupted_caveat,
    shapes_of,
    stopped_caveat,
)
from dpfl_jax.run.console import StepProgress, StopRequest, phase
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.state import TrainState, content_digest
from dpfl_jax.run.terms import PUBLIC_KEY_CAVEAT, begin

PyTree = Any
Evaluate = Callable[[PyTree], dict[str, Any]]
_MILESTONES = 20
_CHECKING = "checking the first step against per-unit gradients"
# Training on labels outside the classes, or on NaN, would waste the whole budget.
_NO_LOSS = (
    "{} NaN or infinite, so the run stopped: look at the loss of single examples, and there for a "
    "label that is no class of the model (classes are whole numbers from 0, one output each), NaN "
    "among the inputs, inputs that are too large (scale them), or the logarithm or root of a "
    "negative number"
)
# Steps are noted before they are taken: slow ones one by one, quick ones about as often as this.
NOTED_EVERY_S = 1.0

MOVED_CAVEAT = (
    "the run was resumed from a checkpoint, or from its start, on other hardware or with another "
    "execution: steps taken twice used the same noise on sums that may differ in rounding, so "
    "metrics written between there and the interruption must not have been published"
)


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How often a run logs, evaluates and saves a checkpoint.

    Attributes:
      checkpoint_every: steps between checkpoints.
      keep_checkpoints: checkpoints kept.
      eval_every: steps between evaluations; 0 for before and after only.
      log_every: steps between rows of metrics.
      keep_best: whether the checkpoint with the lowest held-out loss is kept, too.
      patience: the run stops after so many evaluations in a row without a lower held-out loss.
      profile: number of iterations of the loop to trace (``Profile``).
      average: average of the iterates, none, ema or tail (``run.average``), which is then the model
        that is evaluated, chosen, returned and exported; the last iterate is also evaluated.
      ema_decay: weight of the old average in an ema after a step, once it is warmed up.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> dpfl.LoopConfig(eval_every=10, patience=3).checkpoint_every  # fit(..., loop=...)
      50
    """

    checkpoint_every: int = 50
    keep_checkpoints: int = 2
    eval_every: int = 0
    log_every: int = 1
    keep_best: bool = False
    patience: int | None = None
    profile: int = 0
    average: average.Average = "none"
    ema_decay: float = 0.9999

    def __post_init__(self) -> None:
        if self.chooses and not self.eval_every:
            raise BadInputError("keep_best and patience look at evaluations: set eval_every")
        for name in ("checkpoint_every", "keep_checkpoints", "log_every", "patience"):
            at_least(name, getattr(self, name), 1)
        one_of("average", self.average, get_args(average.Average))
        probability("ema_decay", self.ema_decay, one=False)

    @property
    def chooses(self) -> bool:
        """Whether held-out loss decides when to stop or which checkpoint is best."""
        return self.keep_best or self.patience is not None

    @classmethod
    def of(cls, config: Any, steps: int = 1) -> LoopConfig:
        """The settings of a configuration, whose intervals count blocks of ``steps`` steps."""
        section = config.train
        return cls(
            section.checkpoint_every * steps,
            section.keep_checkpoints,
            section.eval_every * steps,
            section.log_every,
            section.keep_best,
            section.patience,
            config.execution.profile,
            section.average,
            section.ema_decay,
        )


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Callbacks of a run; the guarantee does not cover what they do.

    Attributes:
      on_step: called with each row of metrics.
      on_evaluation: called with each row that holds an evaluation.
      on_checkpoint: called with the number of steps taken, once a checkpoint is written.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> losses = []
      >>> hooks = dpfl.Hooks(on_step=lambda row: losses.append(row["loss"]))  # for fit(hooks=...)
      >>> hooks.on_step({"loss": 2.0})
      >>> losses
      [2.0]
    """

    on_step: Callable[[dict[str, Any]], Any] | None = None
    on_evaluation: Callable[[dict[str, Any]], Any] | None = None
    on_checkpoint: Callable[[int], Any] | None = None


def drive(
    algorithm: Algorithm,
    *,
    key: RootKey | None = None,
    run_dir: RunDirectory | None = None,
    evaluate: Evaluate | None = None,
    loop: LoopConfig | None = None,
    charge: Callable[[str], Any] | None = None,
    console: Console | None = None,
    hooks: Hooks | None = None,
) -> RunResult:
    """Runs an algorithm from its start, or from its newest checkpoint, to its end.

    In this order: compares the run with what it began with, charges the ledger, restores the
    checkpoint, evaluates the start, checks the first step, and takes the steps.

    Args:
      algorithm: what to run.
      key: root key; default a fresh secret one (or the run directory's).
      run_dir: where to log and checkpoint; an unfinished one is resumed.
      evaluate: ``params -> dict`` with at least ``loss``; called before, during and after.
      loop: how often it logs, evaluates and keeps.
      charge: called before the first step, in process 0, with the fingerprint of the key of the
        run's draws, to charge a ledger: a run that draws anew on other hardware pays again.
      console: where the progress bar goes; None: there is no bar.
      hooks: callbacks.

    Raises:
      BadInputError: the run directory holds another run, or memory does not suffice.
      clipping.SelfCheckError: the algorithm's check before the first step failed.
    """
    loop = loop or LoopConfig()
    _check_options(loop, evaluate, run_dir)
    # Optax and the engine promote integers to floats, whatever callers forbid their own code.
    with jax.numpy_dtype_promotion("standard"):
        run = _Driven(algorithm, run_dir, evaluate, loop, console, hooks or Hooks())
        run.begin(key)
        run.pay(charge)
        run.restore()
        if run.done == 0:
            run.evaluate()
        run.check_first_step()
        run.take_steps()
        return run.result()


def _check_options(
    loop: LoopConfig, evaluate: Evaluate | None, run_dir: RunDirectory | None
) -> None:
    if loop.chooses and evaluate is None:
        raise BadInputError("keep_best and patience look at held-out loss: hold out some data")
    if loop.keep_best and run_dir is None:
        raise BadInputError("keep_best needs run_dir, where the best parameters are kept")
    if loop.profile and run_dir is None:
        raise BadInputError("profile needs run_dir, where the trace is written")


class _Driven:
    """A run of ``drive``, phase by phase.

    Attributes:
      state: after ``done`` steps, ``turns`` of the loop.
      ended: whether no step is left, or a rule has stopped the run.
      stopping: name of the signal that stops it.
    """

    root: RootKey
    key: RootKey
    terms: dict[str, Any]
    work: Steps
    clipping: dict[str, Any] | None = None
    choosing: KeepBest | None = None
    stopping: str | None = None

    def __init__(
        self,
        algorithm: Algorithm,
        run_dir: RunDirectory | None,
        evaluate: Evaluate | None,
        loop: LoopConfig,
        console: Console | None,
        hooks: Hooks,
    ) -> None:
        self.algorithm, self.run_dir, self.loop = algorithm, run_dir, loop
        self._evaluate, self.console = evaluate, console
        self.log, self.meter = _Log(run_dir, hooks), _Meter(algorithm)
        self.caveats: list[str] = []
        self.checkpoints: Checkpoints | None = None
        self.resumed: int | None = None
        if run_dir is not None:
            self.checkpoints = Checkpoints(run_dir.path / "checkpoints", loop.keep_checkpoints)
            self.resumed = self.checkpoints.resumed_step()
        self.released = _ReleasedSteps(run_dir, algorithm.steps, self.resumed or 0)
        self.done, self.turns, self.ended, self.has_checked_losses = 0, 0, False, False

    # ---- before the first step -------------------------------------------------------------

    def begin(self, key: RootKey | None) -> None:
        """Compares the run with what it began with, and derives the key of its draws."""
        algorithm, run_dir = self.algorithm, self.run_dir
        phase(self.console, "placing the parameters and taking their digest")
        self.root = run_dir.root_key if run_dir is not None else key or processes.fresh_key()
        if self.root.public and algorithm.private:
            self.caveats.append(PUBLIC_KEY_CAVEAT)
        self.state = algorithm.init()
        if self.averages:
            kept = average.started(self.state.params)
            self.state = dataclasses.replace(self.state, average=kept)
        self.key, self.terms = begin(
            algorithm.terms(),
            self.root,
            run_dir,
            algorithm.hardware if algorithm.can_reshard_on_resume else None,
            self.resumed,
            lambda: content_digest(self.state.params, self.root),
            algorithm.layout_fingerprint,
        )
        self.released.begin()

    def pay(self, charge: Callable[[str], Any] | None) -> None:
        """Charges a ledger, if there is one, for these draws."""
        if charge is not None:
            processes.on_primary(lambda: charge(self.key.fingerprint))

    def restore(self) -> None:
        """Restores the newest checkpoint, and the rows of metrics up to it."""
        algorithm, run_dir = self.algorithm, self.run_dir
        if run_dir is None or self.checkpoints is None:
            return
        if run_dir.computed_with(algorithm.hardware, algorithm.layout_fingerprint):
            self.caveats.append(MOVED_CAVEAT)
        if self.resumed is not None:
            phase(self.console, f"restoring the checkpoint of {algorithm.word} {self.resumed}")
            self.state = self.checkpoints.restore(self.state, self.root, self.terms, self.resumed)
        run_dir.begin_steps()
        self.done = int(self.state.step)
        self.has_checked_losses = self.done > 0
        self.log.start_at(self.done)
        if self.loop.keep_best:
            self.choosing = KeepBest(self.checkpoints, self.log.rows)

    def evaluate(self) -> None:
        if self._evaluate is None or evaluation_after(self.log.rows, self.done) is not None:
            return
        phase(self.console, f"evaluating held-out data after {self.algorithm.word} {self.done}")
        evaluation = self._evaluate(self.model(self.state))
        if self.done == 0 and not math.isfinite(evaluation["loss"]):
            before = "before the first step the mean loss of held-out examples is"
            raise BadInputError(_NO_LOSS.format(before))
        row = {"step": self.done, "eval": evaluation}
        if self.averages and self.done:
            row["last_iterate"] = self._evaluate(self.algorithm.params(self.state))
        self.log.append(row)

    @property
    def averages(self) -> bool:
        """Whether the model is an average of the iterates."""
        return self.loop.average != "none"

    def model(self, state: TrainState) -> PyTree:
        """The model of a state: the average of the iterates if the run keeps one, else the last."""
        if self.averages:
            params = average.as_params(state.average, state.params)
            state = dataclasses.replace(state, params=params)
        return self.algorithm.params(state)

    def check_first_step(self) -> None:
        """Checks that all processes agree and, if private, that the compiled sum is right."""
        algorithm, mesh, steps = self.algorithm, self.algorithm.mesh, self.algorithm.steps
        self.work = algorithm.begin(self.key, self.done)
        facts = {
            "root key": self.root.fingerprint,
            "number of steps": [self.done, steps],
            "set of terms": self.terms,
            "mesh": [list(mesh.shape.items()), [device.id for device in mesh.devices.flat]],
            "version of JAX or NumPy": [jax.__version__, np.__version__],
        }
        processes.check_same(facts | self.work.agreed())
        if algorithm.private:
            if self.done < steps:
                shown = (self.console or Console(quiet=True)).status(_CHECKING)
                what = "the check before the first step"
                with shown as line, too_little_memory(what, algorithm.memory_hint):
                    self.work.check(
                        self.state, functools.partial(_show_progress, self.console, line)
                    )
            phase(self.console, "finding out how gradients are clipped")
            self.clipping = self.work.clipping()
            if self.clipping is not None:
                _warn_of(self.clipping, self.console)
        self.ended = exhausted(self.log.rows, self.loop.patience)
        phase(self.console, "bounding epsilon after each part of the run")
        self.spent = Spent(algorithm)

    # ---- the steps -------------------------------------------------------------------------

    def take_steps(self) -> None:
        """Takes the remaining steps, until the last one, a signal, or a rule stops the run."""
        algorithm, log = self.algorithm, self.log
        with (
            StopRequest(elsewhere=processes.hear_sigterm()) as stop,
            StepProgress(
                self.console or Console(quiet=True), algorithm.word, algorithm.steps, self.done
            ) as bar,
            too_little_memory("training", algorithm.memory_hint),
            Profile(log.folder and log.folder / "profile", self.loop.profile) as trace,
            self.checkpoints or contextlib.nullcontext(),
        ):
            for after, inputs in () if self.ended else self.meter.waiting(self.work.inputs()):
                trace.before()
                self.released.before(after)
                output = self._step(inputs, after)
                trace.after(self.state)
                before, self.done = self.done, after
                self._after_step(output, before, stop, bar)
                if self.stopping or self.ended:
                    break
            if self.checkpoints is not None:
                self.checkpoints.open_all()
        self.released.end()
        self.ended |= self.done == algorithm.steps
        if self.ended:
            self.evaluate()

    def _step(self, inputs: Any, after: int) -> StepOutput:
        """Takes one step, and then updates the average of the iterates."""
        kept = self.state.average
        state, output = self.work.step(dataclasses.replace(self.state, average=()), inputs)
        if self.averages:
            loop, steps = self.loop, self.algorithm.steps
            weight = average.newest_weight(loop.average, loop.ema_decay, after, steps)
            kept = average.moved(kept, state.params, weight)
        self.state = dataclasses.replace(state, average=kept)
        return output

    def _after_step(
        self, output: StepOutput, before: int, stop: StopRequest, bar: StepProgress
    ) -> None:
        """Logs, evaluates and saves what is due after the steps since ``before``."""
        done, loop = self.done, self.loop
        self.meter.count(output, done - before)
        if not self.has_checked_losses:
            self.has_checked_losses = _check_losses(
                self.algorithm.row(output.stats)["outside_guarantee"]
            )
        last = done == self.algorithm.steps
        logs = last or _due(loop.log_every, before, done)
        saves = last or _due(loop.checkpoint_every, before, done)
        self.turns += 1
        agreed = processes.stops_after(self.turns)
        # Many processes wait for each other here.
        if logs or saves or agreed or not processes.many():
            self.stopping = self.meter.exchange(stop.requested) or ("SIGTERM" if agreed else None)
        if logs:
            row = {"step": done, "epsilon_spent": self._epsilon()}
            row |= self.algorithm.row(output.stats)
            self.meter.measure(row)
            self.log.append(row)
            bar.update(done, _status(row))
        if _due(loop.eval_every, before, done) and not last:
            self.evaluate()
            bar.begin(done)
            self.meter.restart()
            self.ended = exhausted(self.log.rows, loop.patience)
            if self.choosing is not None:
                saves |= self.choosing.update(self.log.rows, done)
        if saves or self.stopping or self.ended:
            self._save()

    def _epsilon(self) -> float | None:
        # A rule that looks at held-out loss does not fix the number of steps beforehand, so the
        # epsilon of all planned steps is stated.
        return self.spent(self.algorithm.steps if self.loop.chooses else self.released.most)

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        spent = {"epsilon": self._epsilon(), "delta": self.algorithm.delta}
        self.checkpoints.save(self.state, self.root, spent, self.terms)
        if self.log.hooks.on_checkpoint is not None:
            self.checkpoints.finish()
            self.log.hooks.on_checkpoint(self.done)
        self.meter.restart()

    # ---- after the last step ---------------------------------------------------------------

    def result(self) -> RunResult:
        """Returns the run's result, and writes what it keeps of single units to ``private/``."""
        algorithm, meter = self.algorithm, self.meter
        result = RunResult(
            params=self.model(self.state),
            steps=self.done,
            metrics=self.log.rows,
            interrupted=None if self.ended else self.stopping,
            caveats=(*self.caveats, *self._caveats_of_the_end()),
            seconds=meter.seconds,
            examples=meter.examples,
            tokens=meter.tokens,
            padded_tokens=meter.padded_tokens,
            goodput=meter.goodput,
            mfu=meter.mfu(meter.seconds, meter.examples, meter.tokens),
            planned=algorithm.steps,
            clipping=self.clipping,
            best=self._best(),
            private_state=algorithm.private_state(self.state),
            released=self.released.most,
        )
        if self.run_dir is not None and self.run_dir.writes:
            algorithm.write_private(self.run_dir, result)
        return dataclasses.replace(result, audit=algorithm.audited(result))

    def _caveats_of_the_end(self) -> Iterator[str]:
        done, steps, word = self.done, self.algorithm.steps, self.algorithm.word
        if not self.algorithm.private:
            return
        if done < steps:
            yield (
                stopped_caveat(done, steps, word)
                if self.ended
                else interrupted_caveat(done, self.released.most, steps, word)
            )
        if self.choosing is not None:
            yield BEST_CAVEAT

    def _best(self) -> Best | None:
        if self.choosing is None:
            return None
        self.choosing.update(self.log.rows, self.done)
        like, root, terms = shapes_of(self.state), self.root, self.terms
        return self.choosing.best(
            lambda kept, step: self.model(kept.restore(like, root, terms, step))
        )


def _due(every: int, before: int, done: int) -> bool:
    """Whether a multiple of ``every`` was passed; never if it is 0."""
    return bool(every) and done // every > before // every


class _ReleasedSteps:
    """Counts the steps that may have been released, also if the run is killed.

    What a step shows (a row of metrics, a model, a silo's message) stays shown if the run is killed
    and resumes from an earlier checkpoint. So a step is noted in the run's directory before it is
    taken. Quick steps are noted several at once, about one second's worth, since a synchronised
    write costs milliseconds. A run that stops between two steps notes how many it took, so that
    only a killed run pays for steps that were noted and not taken.

    Attributes:
      most: steps that may have been released until now.
    """

    def __init__(self, run_dir: RunDirectory | None, steps: int, done: int) -> None:
        self._run_dir, self._steps = run_dir, steps
        known = done if run_dir is None else run_dir.released
        self.most = steps if known is None else max(known, done)
        self._ahead, self._at, self._noted = 1, -math.inf, 0

    def begin(self) -> None:
        """Notes the steps that a resumed run had released."""
        self._note(self.most)

    def before(self, step: int) -> None:
        """Notes the steps up to ``step``, which are about to be taken."""
        if step > self._noted:
            quick = time.monotonic() - self._at < NOTED_EVERY_S
            self._ahead = 2 * self._ahead if quick else max(1, self._ahead // 2)
            self._note(min(step - 1 + self._ahead, self._steps))
            self._at = time.monotonic()
        self.most = max(self.most, step)

    def end(self) -> None:
        """Takes back the notes of steps that were not taken."""
        if self._noted != self.most:
            self._note(self.most)

    def _note(self, steps: int) -> None:
        self._noted = steps
        if self._run_dir is not None:
            self._run_dir.record_released(steps)


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
        """Returns a bound on epsilon after ``step`` steps; None if it is infinite."""
        if step == 0:
            return 0.0
        epsilon = float(self._epsilons[int(np.searchsorted(self._at, step))])
        return epsilon if math.isfinite(epsilon) else None


def _warn_of(clipping: dict[str, Any], console: Console | None) -> None:
    if console is not None and clipping["warning"]:
        console.print(clipping["warning"], highlight=False)
    elif clipping["warning"]:
        warnings.warn(clipping["warning"], stacklevel=5)


def _show_progress(console: Console | None, line: Any, part: str) -> None:
    if line is not None:
        line.update(f"{_CHECKING}: {part}")
    phase(console, f"{_CHECKING}: {part}")


def _check_losses(raw: dict[str, Any]) -> bool:
    """Whether a step had units; raises BadInputError if many have no loss or gradient.

    A single unit without a loss is left out and counted, but must not stop the run.
    """
    if raw.get("nonfinite_units", 0) > max(1, raw.get("units", 0) / 4):
        raise BadInputError(_NO_LOSS.format("of many units of the first step loss or gradient is"))
    return raw.get("units", 1) > 0


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
    """Measures examples and tokens per second, without compiling, evaluating and saving."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.seconds, self.examples, self.tokens, self.padded_tokens = 0.0, 0, 0, 0
        self._algorithm = algorithm
        self._began = time.perf_counter()
        self._last: float | None = None
        self._pending = [0, 0, 0, 0]
        self._waited = 0.0
        self._read = (1, 1)
        self._seen = (0, 0)
        self._slowest = (0, 0.0)

    @property
    def goodput(self) -> float | None:
        """Share of the time since this object was made that went into measured steps."""
        total = time.perf_counter() - self._began
        return round(self.seconds / total, 4) if self.seconds else None

    def mfu(self, seconds: float, examples: int, tokens: int) -> float | None:
        """Share of the devices' peak that non-private training would have needed."""
        peaks = (peak_flops(device.device_kind) for device in self._algorithm.mesh.devices.flat)
        peak = sum(known or math.nan for known in peaks)
        if not (seconds and peak > 0):
            return None
        return round(self._algorithm.flops(examples, tokens) / (seconds * peak), 4) or None

    def waiting(self, inputs: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Yields the inputs, and measures how long each was waited for."""
        while True:
            start = time.perf_counter()
            found = next(inputs, None)
            self._waited += time.perf_counter() - start
            if found is None:
                return
            yield found

    def restart(self) -> None:
        """Leaves out the time since the last measurement, and the steps in it."""
        self._last = time.perf_counter()
        self._pending = [0, 0, 0, 0]
        self._waited = 0.0

    def count(self, output: StepOutput, steps: int) -> None:
        """Adds ``steps`` steps that were taken in one call."""
        for i, amount in enumerate((steps, output.examples, output.tokens, output.padded_tokens)):
            self._pending[i] += amount
        self._read = output.read

    def exchange(self, stop: str | None) -> str | None:
        """Adds up what the processes read since the last measurement; all must call it.

        Args:
          stop: name of the signal that asks this process to stop, if one does.

        Returns:
          The name of a signal that asks any process to stop: all then stop at the same step.
        """
        columns, row = self._read
        waited = 1e6 * self._waited
        mine = (*self._pending[2:], columns, waited, getattr(signal, stop or "", 0))
        all_of_them = processes.gather([int(number) for number in mine])
        tokens, places, read, waits, signals = np.array(all_of_them, np.int64).T
        self._slowest = (int(waits.argmax()), 1e-6 * float(waits.max()))
        self._seen = (
            round(tokens.sum() * row / read.sum()),
            round(places.sum() * row / read.sum()),
        )
        heard = int(signals.max())
        return signal.Signals(heard).name if heard else None

    def measure(self, row: dict[str, Any]) -> None:
        """Writes the speed since the last call into ``row``; not at the first, which compiles."""
        if self._last is not None:
            steps, examples, *_ = self._pending
            tokens, places = self._seen
            elapsed = time.perf_counter() - self._last
            self.seconds += elapsed
            self.examples += examples
            self.tokens += tokens
            self.padded_tokens += places
            # These two give the exact number of tokens drawn, which is as private as the data.
            raw = row["outside_guarantee"]
            raw["seconds_per_step"] = round(elapsed / steps, 6)
            if tokens:
                raw["tokens_per_s"] = round(tokens / elapsed, 1)
            slowest, waited = self._slowest
            raw["input_wait"] = round(min(waited / elapsed, 1.0), 4)
            if processes.many():
                raw["slowest_input"] = slowest
            raw["goodput"] = self.goodput
            if utilisation := self.mfu(elapsed, examples, tokens):
                raw["mfu"] = utilisation
        self.restart()


class _Log:
    """Rows of metrics, in memory and (with a run directory) on disk."""

    def __init__(self, run_dir: RunDirectory | None, hooks: Hooks) -> None:
        self._run_dir, self.hooks = run_dir, hooks
        self.rows: list[dict[str, Any]] = []

    @property
    def folder(self) -> pathlib.Path | None:
        """The run's directory in the process that writes it, else None."""
        return self._run_dir.path if self._run_dir is not None and self._run_dir.writes else None

    def start_at(self, step: int) -> None:
        """Reads the rows up to ``step``; all processes get the evaluations of process 0."""
        assert self._run_dir is not None
        self._run_dir.drop_metrics_after(step)
        if self._run_dir.writes:
            self.rows = self._run_dir.read_metrics()
        evaluations = processes.broadcast([row for row in self.rows if "eval" in row])
        if not self._run_dir.writes:
            self.rows = evaluations

    def append(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self._run_dir is not None:
            self._run_dir.append_metrics(row)
        call = self.hooks.on_evaluation if "eval" in row else self.hooks.on_step
        if call is not None:
            call(row)


# ---- a trace of a few steps ----------------------------------------------------------------------
# xprof, TensorBoard and Perfetto open it.


class Profile:
    """Traces iterations of the loop after the first one, which compiles.

    A trace shows how long single steps took, and so how much was drawn for them: it is as private
    as the data (``report.PRIVATE_METRICS_CAVEAT``). Tracing changes no result.
    """

    def __init__(self, folder: pathlib.Path | None, turns: int) -> None:
        """Traces ``turns`` iterations into ``folder``, readable by its owner; None: nothing."""
        self._folder, self._left = folder, turns if folder is not None else 0
        self._running, self._compiled = False, False

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def before(self) -> None:
        """Must be called before each iteration."""
        if self._compiled and self._left and not self._running:
            assert self._folder is not None
            self._folder.mkdir(mode=0o700, exist_ok=True)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python would be most of the file
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._running = True
        self._compiled = True

    def after(self, state: Any) -> None:
        """Must be called after each iteration, with what it computed."""
        if self._running:
            self._left -= 1
            if not self._left:
                jax.block_until_ready(state)
                self._stop()

    def _stop(self) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
