"""A sweep with one guarantee for all of it: the best of a random number of runs.

A sweep is a folder. ``private/`` holds its key, which decides the number of runs, their cells,
their keys and the noise of their scores. Until the sweep has finished, it also holds the runs.
``best/`` is the run that is released; the other runs are deleted. ``selection`` has the algorithm
and its guarantee.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
from typing import Any

import jax
from rich.console import Console

from dpfl_jax import accounting
from dpfl_jax.accounting import digests
from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.accounting.statement import NAME, Statement, read
from dpfl_jax.accounting.versions import this_version
from dpfl_jax.config import RunConfig, config_to_dict
from dpfl_jax.data import Store, load_dataset
from dpfl_jax.errors import BadInputError, StoppedError
from dpfl_jax.files import within
from dpfl_jax.planning.selection import RunCount, Selection
from dpfl_jax.planning.sweep import ALIASES, SIZES, Sweep, SweepCell
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import processes
from dpfl_jax.run.algorithm import RunResult
from dpfl_jax.run.directory import RunDirectory, finished_report, write_atomically
from dpfl_jax.run.pipeline import open_directory, run_experiment
from dpfl_jax.run.report import PRIVATE_METRICS_CAVEAT, TUNING_CAVEAT, render_markdown
from dpfl_jax.training.central_run import EVALUATION_CAVEAT, CentralRun, prepare
from dpfl_jax.training.evaluate import Evaluator

BEST = "best"
# Sections in which cells may differ; people, split and target are the same for all.
_SECTIONS = ("mechanism", "optimizer", "train", "model", "pretrain", "execution", "init_seed")
_LOSERS = (
    "deleted, and how many there were is secret; whoever saw how long the sweep took knows more "
    "than its guarantee covers"
)


@dataclasses.dataclass
class ScoredRun(CentralRun):
    """A run that is evaluated only by a noisy score, and states the guarantee of the sweep.

    Attributes:
      selection: the private selection that the run is a part of.
      people: the held-out people; ``held_out`` is None, so that their losses are not saved.
      values: the cell's value for each axis.
      charged: the ledger's account that the sweep is charged to; None without a ledger.
    """

    selection: Selection
    people: Store
    values: dict[str, Any]
    charged: str | None

    @property
    def account(self) -> str | None:
        return self.charged

    @property
    def public_inputs(self) -> tuple[str, ...]:
        held_out = f"people held out: {self.selection.held_out:,}"
        return (*super().public_inputs, "grid of the sweep", held_out)

    def caveats(self) -> tuple[str, ...]:
        """The caveats of a central run, without those that a private sweep does not need."""
        covered = (PRIVATE_METRICS_CAVEAT, EVALUATION_CAVEAT, TUNING_CAVEAT)
        return tuple(c for c in super().caveats() if c not in covered)

    def guarantee(self, steps: int, caveats: tuple[str, ...] = ()) -> accounting.Guarantee:
        """Returns the guarantee of the whole sweep, whatever ``steps`` is."""
        del steps
        return self.selection.guarantee(caveats)

    def statement(self, steps: int, guarantee: accounting.Guarantee) -> Statement:
        del steps
        return self.selection.statement().about(guarantee)

    def report(
        self, directory: RunDirectory, result: RunResult, guarantee: accounting.Guarantee
    ) -> dict[str, Any]:
        made = super().report(directory, result, guarantee)
        if result.interrupted is None:
            evaluator = Evaluator(self.model.loss, self.mesh, self.config.eval.batch_size)
            losses, _ = evaluator.measure(result.params, self.people)
            key, offsets = directory.root_key, self.people.user_offsets
            made["selection"] = {
                "cell": self.values,
                "noisy_score": self.selection.score(losses, offsets, key),
                "noise_of_scores": self.selection.score_stddev,
                "loss_bound": self.selection.bound,
                "held_out_users": self.selection.held_out,
                "expected_runs": self.selection.runs.mean,
                "other_runs": _LOSERS,
            }
        return made


@dataclasses.dataclass(frozen=True)
class PrivateSweep:
    """A sweep that releases the best of a random number of runs.

    Attributes:
      sweep: the grid, its folder and its base configuration.
      expected_runs: mean of the number of runs, which is drawn at random.
      loss_bound: the largest mean loss that counts for a held-out person, in nats. None: the loss
        of a uniform guess, log(number of tokens or classes).
      key: root key of a new sweep; None: a new secret key.
    """

    sweep: Sweep
    expected_runs: float = 10.0
    loss_bound: float | None = None
    key: RootKey | None = None

    def __post_init__(self) -> None:
        RunCount(self.expected_runs)

    def run(self, console: Console) -> dict[str, Any]:
        """Runs or resumes the sweep, and returns the report of the run that is released.

        Raises:
          BadInputError: a cell cannot be run, or uses what a private sweep does not support.
            Nothing was run then.
          LedgerError: the ledger refuses the sweep.
          StoppedError: interrupted; the same call resumes.
        """
        runs = [self._prepared(cell) for cell in self._cells]
        first = runs[0]
        selection = self._calibrated(runs)
        fingerprints = [*dict.fromkeys(run.train.fingerprint for run in runs)]
        fingerprints.append(first.people.fingerprint)
        for run in {run.config.model.checkpoint: run for run in runs}.values():
            facts = run.facts()  # other content must not get the same noise; files may move
            fingerprints += [facts[name] for name in ("checkpoint", "public") if name in facts]
        grid = {axis: list(values) for axis, values in self.sweep.axes.items()}
        asked = {"grid": grid, "expected_runs": self.expected_runs, "loss_bound": self.loss_bound}
        base = self.sweep.base
        directory = open_directory(
            self.sweep.directory,
            {**config_to_dict(base), "sweep": asked},
            self.key,
            {"data": ":".join(fingerprints), "selection": selection.to_json()},
        )
        try:
            # A resumed sweep keeps the noise that it began with, even if calibration has changed.
            selection = Selection.from_json(directory.facts["selection"])
            runs = [
                dataclasses.replace(
                    run, calibrated=selection.noised(run.calibrated), selection=selection
                )
                for run in runs
            ]
            for line in first.warnings():
                console.print(line)
            _refuse_another_version(directory)
            guarantee = first.about(selection.guarantee())
            console.print(f"{len(runs)} cells, {self.expected_runs:g} runs expected; the sweep:")
            console.print(guarantee.summary(), highlight=False)
            self._charge(selection, first.unit_key, directory, console)
            console.print(
                "the number of runs and their progress are secret: nothing is printed until the "
                "best run is found",
                highlight=False,
            )
            with console.status("training and choosing"):
                return self._release(directory, self._winner(directory, runs))
        finally:
            directory.close()

    def priced(self) -> tuple[accounting.Guarantee, int]:
        """Returns the guarantee of the sweep, and the number of its cells, without running it."""
        runs = [self._prepared(cell) for cell in self._cells]
        guarantee = self._calibrated(runs).guarantee(runs[0].caveats())
        return runs[0].about(guarantee), len(runs)

    # ---- before the first run --------------------------------------------------------------

    @functools.cached_property
    def _cells(self) -> list[SweepCell]:
        for axis in self.sweep.axes:
            name = ALIASES.get(axis, axis)
            if name not in SIZES and name.split(".")[0] not in _SECTIONS:
                raise BadInputError(
                    f"{axis} is an axis of a private sweep, but all its cells must have the same "
                    f"people and target: take only axes in the sections {', '.join(_SECTIONS)}"
                )
        return self.sweep.cells()

    @functools.cached_property
    def _load(self) -> Any:
        return functools.lru_cache(maxsize=1)(load_dataset)

    def _config(self, cell: SweepCell) -> RunConfig:
        """The configuration of a cell, without a ledger, as the sweep is charged as a whole."""
        config = self.sweep.cell_config(cell)
        _refuse(config)
        unset = {"ledger": None, "account": None, "budget": None}
        return config.model_copy(update={"privacy": config.privacy.model_copy(update=unset)})

    def _prepared(self, cell: SweepCell) -> ScoredRun:
        config = self._config(cell)
        try:
            made = prepare(config, Console(quiet=True), self._load)
        except BadInputError as error:
            values = ", ".join(f"{axis} {value}" for axis, value in cell.values.items())
            raise BadInputError(
                f"the cell {values} cannot be run: {error}; nothing was run or charged: change the "
                "grid"
            ) from error
        if made.held_out is None:
            raise BadInputError(
                "a private sweep is scored by held-out people, but no one is held out: set "
                "data.validation_fraction"
            )
        if config.data.split == "within_user" or (made.known and config.eval.split == "test"):
            raise BadInputError(
                "a private sweep is scored by people who are not trained on, but these held-out "
                "examples belong to people who are: set data.split=by_user and "
                "eval.split=validation"
            )
        if made.calibrated.population.shared:
            raise BadInputError(
                "some records have several owners, for whom a private sweep has no guarantee: "
                "name one owner of each record (data.user_column)"
            )
        fields = {f.name: getattr(made, f.name) for f in dataclasses.fields(made) if f.init}
        unset = Selection(
            (dataclasses.replace(made.calibrated, noise_multiplier=1.0),),
            RunCount(self.expected_runs),
            self._bound(made),
            made.held_out.num_users,
            made.calibrated.delta,
            score_noise=1.0,
        )
        fields |= {"held_out": None}
        privacy = self.sweep.base.privacy
        return ScoredRun(
            **fields,
            selection=unset,
            people=made.held_out,
            values=dict(cell.values),
            charged=None if privacy.ledger is None else privacy.account,
        )

    def _bound(self, made: CentralRun) -> float:
        if self.loss_bound is not None:
            return self.loss_bound
        task = made.task
        assert task is not None
        kinds = made.train.schema.vocab_size if task.kind == "tokens" else task.classes
        if not kinds or kinds < 2:
            raise BadInputError(
                "the loss of this task has no natural bound: give the largest mean loss that "
                "counts for one person, as a public number (--loss-bound 4)"
            )
        return math.log(kinds)

    def _calibrated(self, runs: list[ScoredRun]) -> Selection:
        first = runs[0].selection
        if any(run.selection.bound != first.bound for run in runs):
            raise BadInputError(
                "the cells' losses have different natural bounds (vocabularies or classes), but "
                "scores must share one: give the largest mean loss that counts for one person "
                "(--loss-bound 4)"
            )
        trained = {repr(run.selection.cells): run.selection.cells[0] for run in runs}
        return Selection.calibrated(
            list(trained.values()),
            first.runs,
            first.bound,
            first.held_out,
            epsilon=runs[0].config.privacy.epsilon or math.inf,
            delta=first.delta,
        )

    # ---- running ---------------------------------------------------------------------------

    def _charge(
        self, selection: Selection, unit_key: str, directory: RunDirectory, console: Console
    ) -> None:
        """Reserves the cost of the whole sweep in the ledger, before its first run.

        The reservation is never committed: this would reveal when the last run ended.
        """
        privacy = self.sweep.base.privacy
        if privacy.ledger is None or privacy.account is None:
            return
        spent = accounting.Ledger(privacy.ledger).reserve(
            accounting.Account(privacy.account, unit_key=unit_key),
            directory.run_id,
            selection.event,
            selection.delta,
            privacy.budget,
        )
        before, after = rounded_up(spent.before, 4), rounded_up(spent.after, 4)
        text = (
            f"ledger {privacy.ledger}, account {privacy.account}: epsilon {before} spent before "
            f"this sweep, {after} with all of it (delta {rounded_up(selection.delta, 3)})"
        )
        lines = "\n".join([text, *spent.notes])
        console.print(lines, soft_wrap=True, markup=False, highlight=False)

    def _winner(self, directory: RunDirectory, runs: list[ScoredRun]) -> pathlib.Path:
        """Runs all cells that are drawn; returns the folder of the best run."""
        root, private = directory.root_key, directory.path / "private"
        if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
            compiled = private / "compiled"
            _make_empty(compiled)  # never run compiled programs that came with the folder
            jax.config.update("jax_compilation_cache_dir", str(compiled))
        best = math.inf
        winner: pathlib.Path | None = None
        for number in range(runs[0].selection.runs.draw(root)):
            # proof: selection-cell-1
            cell = int(root.numpy("selection:cell", number).integers(len(runs)))
            key = root.child("selection:run", number)
            # The name does not reveal the number of the run.
            path = within(directory.path, f"private/runs/{key.derive('name').hex()[:16]}")
            report = finished_report(path)
            if report is None:
                run, quiet = functools.partial(runs.__getitem__, cell), Console(quiet=True)
                report = run_experiment(runs[cell].config, path, quiet, run, key)
            if report["status"] != "finished":
                raise StoppedError("the sweep was stopped; the same command resumes it")
            score = report["selection"]["noisy_score"]
            # proof: selection-best-1
            beaten: pathlib.Path | None = path
            if winner is None or score < best:
                beaten, best, winner = winner, score, path
            if beaten is not None:
                shutil.rmtree(beaten / "checkpoints", ignore_errors=True)
        assert winner is not None
        return winner

    def _release(self, directory: RunDirectory, winner: pathlib.Path) -> dict[str, Any]:
        """Copies what the guarantee covers, writes reports, and deletes all runs."""
        best, partial = directory.path / BEST, directory.path / "private" / BEST
        report = json.loads((winner / "report.json").read_text())
        for name in ("outside_guarantee", "throughput"):  # computed from private data without noise
            report[name] = {}
        # The time of the end would reveal how many runs there were.
        report |= {"finished_at": None, "run_dir": str(best)}
        for old in (best, partial):
            shutil.rmtree(old, ignore_errors=True)
        partial.mkdir()
        for name in ("checkpoints", "private"):
            shutil.copytree(winner / name, partial / name, copy_function=shutil.copy)
        shutil.copy(winner / "config.yaml", partial / "config.yaml")
        write_reports(partial, report, winner)
        _without_times(partial)
        partial.rename(best)
        write_reports(directory.path, report, winner)
        for name in ("runs", "compiled"):
            shutil.rmtree(directory.path / "private" / name, ignore_errors=True)
        return report


def _refuse_another_version(directory: RunDirectory) -> None:
    """Raises BadInputError if another version began the sweep, as versions date the runs."""
    first = directory.versions[0]
    directory.note("versions", [first])
    if first != this_version():
        raise BadInputError(
            f"the private sweep in {directory.path} was begun by dpfl_jax {first}, and a change of "
            f"version would reveal something about the secret number of runs: resume it with "
            f"{first}, or start another sweep"
        )


def _make_empty(folder: pathlib.Path) -> None:
    """Replaces what is at this path by an empty folder, without following links."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir()
    except OSError as error:
        raise BadInputError(f"{folder} cannot be emptied ({error.strerror}): remove it") from None


def _without_times(folder: pathlib.Path) -> None:
    """Removes the times at which a run was made from checkpoints, files and folders."""
    for file in folder.glob("checkpoints/*/_CHECKPOINT_METADATA"):
        metadata = json.loads(file.read_text())
        content = {k: 0 if "time" in k else v for k, v in metadata.items()}
        write_atomically(file, json.dumps(content))
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (0, 0))


def write_reports(folder: pathlib.Path, report: dict[str, Any], winner: pathlib.Path) -> None:
    """Writes the reports. report.json comes last, because it marks a finished run."""
    files = digests.of_run(folder, [report["steps"]])
    write_atomically(folder / NAME, read(winner / NAME).tied(run=files).dumps())
    if (winner / "attacks.png").exists():
        shutil.copyfile(winner / "attacks.png", folder / "attacks.png")
    write_atomically(folder / "report.md", render_markdown(report))
    write_atomically(folder / "report.json", json.dumps(report, indent=2) + "\n")


def _refuse(config: RunConfig) -> None:
    """Raises BadInputError for options that show held-out people or other runs without noise."""
    if processes.many():
        raise BadInputError("a private sweep runs in one process: set processes.mode=one")
    if not config.mechanism.private:
        raise BadInputError(
            f"mechanism.kind={config.mechanism.kind} has no privacy, so that the sweep would have "
            "none: choose a mechanism with noise"
        )
    if config.privacy.noise_multiplier is not None or config.privacy.epsilon is None:
        raise BadInputError(
            "a private sweep finds the noise of every cell for one target: set privacy.epsilon, "
            "and leave out privacy.noise_multiplier"
        )
    for wrong, what, change in (
        (config.train.chooses, "train.keep_best and train.patience choose", "leave them out"),
        (config.eval.baseline, "eval.baseline compares with a run", "set eval.baseline=false"),
        (config.eval.personalize, "eval.personalize tunes", "set eval.personalize=false"),
        (config.eval.prompt is not None, "eval.prompt shows a model", "leave it out"),
        (config.eval.max_users is not None, "eval.max_users hides some", "set eval.max_users=null"),
        (config.audit is not None, "audit looks at all that a run releases", "leave it out"),
        (bool(config.metrics.sinks), "metrics.sinks sends rows of every run", "leave it out"),
    ):
        if wrong:
            raise BadInputError(
                f"{what}, but a private sweep shows runs and held-out people only by a noisy "
                f"score: {change}"
            )
    if config.seed is not None:
        raise BadInputError(
            "seed makes the number of runs, their noise and the noise of their scores public: "
            "leave it unset for a private sweep"
        )
