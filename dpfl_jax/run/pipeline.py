"""From a configuration to a run and its report: load, plan, check, run, report.

The code is the same for every kind of run. What differs from kind to kind is a ``Run``.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console

from dpfl_jax import accounting
from dpfl_jax.accounting import Guarantee, advisories
from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.accounting.statement import Statement
from dpfl_jax.accounting.versions import this_version
from dpfl_jax.buckets import address
from dpfl_jax.config import config_fingerprint, config_to_dict
from dpfl_jax.errors import BadInputError
from dpfl_jax.files import default_cache_dir
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import processes
from dpfl_jax.run.algorithm import Algorithm
from dpfl_jax.run.directory import FINISHED, RunDirectory
from dpfl_jax.run.driver import Evaluate, LoopConfig, RunResult, drive
from dpfl_jax.run.public_inputs import about
from dpfl_jax.run.report import PRIVATE_METRICS_CAVEAT, TUNING_CAVEAT, build_report, write_report
from dpfl_jax.run.sinks import sink_of
from dpfl_jax.run.terms import PUBLIC_KEY_CAVEAT
from dpfl_jax.task import Task

# The module that prepares each kind of run. They import this module, and a command imports only the
# one it needs, so that it starts in a second.
_KINDS = {
    "central": "dpfl_jax.training.central_run",
    "silos": "dpfl_jax.federation.federated_run",
    "isrl": "dpfl_jax.federation.isrl.isrl_run",
}


@dataclasses.dataclass(frozen=True)
class Charge:
    """What a whole run costs one unit, for a ledger.

    Attributes:
      event: accounting event of the whole run.
      delta: delta of the account.
      unit_key: what makes a unit: only costs with equal keys add up. For records it is a row,
        whoever owns it.
      unit: the privacy unit.
      adjacency: as in ``Guarantee``.
    """

    event: Any
    delta: float
    unit_key: str
    unit: str = "user"
    adjacency: str = "add-or-remove one user"

    def account(self, name: str) -> accounting.Account:
        """The account of this name in a ledger."""
        return accounting.Account(name, self.unit, self.adjacency, self.unit_key)


class Run(abc.ABC):
    """A configuration whose data are read and whose noise is set, before anything is written.

    Attributes:
      config: the configuration.
      task: what is learned.
      evaluation_caveat: what a reader must know of the held-out figures.
    """

    config: Any
    task: Task | None
    evaluation_caveat: str

    # ---- what runs -------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def steps(self) -> int:
        """How many steps, or rounds, the run has."""

    @property
    @abc.abstractmethod
    def private(self) -> bool:
        """Whether the run has a guarantee."""

    @property
    def loop(self) -> LoopConfig:
        """How often the run logs, evaluates and saves."""
        return LoopConfig.of(self.config)

    @abc.abstractmethod
    def algorithm(self, directory: RunDirectory, console: Console) -> Algorithm:
        """Makes the algorithm of the run in ``directory``; all processes must call it."""

    @abc.abstractmethod
    def without_privacy(self, algorithm: Algorithm) -> Algorithm:
        """Makes the baseline: ``algorithm`` without privacy."""

    @abc.abstractmethod
    def evaluator(self) -> Evaluate | None:
        """Returns ``params -> dict`` of held-out metrics; None if nothing is held out."""

    def after_steps(self, algorithm: Algorithm, result: RunResult) -> dict[str, Any]:
        """Called by all processes after the last step; returns more sections of the report."""
        del algorithm, result
        return {}

    # ---- what a run resumes with -----------------------------------------------------------

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """What is stored of the run: on resume ``data`` must be equal, noise and delta are kept."""

    @abc.abstractmethod
    def resume_from(self, directory: RunDirectory) -> Run:
        """Returns the run with the noise that it began with instead of newly calibrated noise.

        Raises:
          BadInputError: something has changed since the run began; the sentence names it.
        """

    def check_directory(self, path: str | os.PathLike[str]) -> None:
        """Raises BadInputError, and names the difference, if the run in ``path`` is another."""
        del path

    # ---- what it guarantees ----------------------------------------------------------------

    @abc.abstractmethod
    def guarantee(self, steps: int, caveats: tuple[str, ...] = ()) -> Guarantee:
        """The guarantee of the first ``steps`` steps."""

    @abc.abstractmethod
    def statement(self, steps: int, guarantee: Guarantee) -> Statement:
        """The content of guarantee.json for the first ``steps`` steps."""

    @abc.abstractmethod
    def charge(self) -> Charge:
        """What a ledger is charged before the first step."""

    @property
    @abc.abstractmethod
    def unit_key(self) -> str:
        """What makes a unit: the column or key of the data."""

    @property
    @abc.abstractmethod
    def public_inputs(self) -> tuple[str, ...]:
        """All inputs assumed to be public (``public_inputs.public_inputs``); () without privacy."""

    @property
    def account(self) -> str | None:
        """The account of the ledger that is charged; None without a ledger."""
        privacy = self.config.privacy
        return None if privacy.ledger is None else privacy.account

    def about(self, guarantee: Guarantee) -> Guarantee:
        """Adds to ``guarantee`` what it is about (``public_inputs.about``), unless not private."""
        return about(guarantee, self.unit_key, self.public_inputs, self.account)

    @property
    def has_baseline(self) -> bool:
        """Whether the baseline without privacy is trained after this private run."""
        return self.private and self.config.eval.baseline

    def own_caveats(self) -> tuple[str, ...]:
        """Caveats that only this kind of run has."""
        return ()

    def caveats(self) -> tuple[str, ...]:
        """The caveats of the guarantee that are known before the run begins."""
        if not self.private:
            return (self.evaluation_caveat,)
        config = self.config
        return (
            PRIVATE_METRICS_CAVEAT,
            self.evaluation_caveat,
            TUNING_CAVEAT,
            *self.own_caveats(),
            *config.data.caveats(),
            *config.metrics.caveats(),
            *([BASELINE_CAVEAT] if self.has_baseline else []),
        )

    # ---- noise and signal ------------------------------------------------------------------

    @abc.abstractmethod
    def balance(self, config: Any = None) -> Balance | None:
        """Noise over signal; None where they are not comparable.

        Args:
          config: another configuration, for which noise is calibrated on the run's public counts.

        Raises:
          BadInputError: no noise meets the target.
        """

    @abc.abstractmethod
    def knobs(self) -> Knobs:
        """The settings that may be changed if noise swamps signal."""

    def advice(self) -> list[str]:
        """Sentences to print before training: noise over signal, and what would lower it."""
        balance = self.balance() if self.private else None
        return [] if balance is None else advice(balance, self.knobs(), self.balance)

    # ---- words -----------------------------------------------------------------------------

    @abc.abstractmethod
    def headline(self) -> list[str]:
        """Describes the run in a few lines for people."""

    def warnings(self) -> list[str]:
        """What people should look at before training."""
        return []

    def describe(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        """An evaluation as the report shows it."""
        return evaluation

    @property
    @abc.abstractmethod
    def mechanism_facts(self) -> dict[str, Any]:
        """What a report says of the mechanism: plain JSON."""

    @abc.abstractmethod
    def price(self) -> dict[str, Any]:
        """The entries of a dry run's answer that only this kind of run has."""

    @abc.abstractmethod
    def report(
        self, directory: RunDirectory, result: RunResult, guarantee: Guarantee
    ) -> dict[str, Any]:
        """The sections of report.json that only this kind of run has (``report.build_report``)."""


def prepare(config: Any, console: Console) -> Run:
    """Reads the data of a configuration and sets its noise.

    Raises:
      BadInputError: anything wrong with the configuration or the data.
    """
    return importlib.import_module(_KINDS[config.variant]).prepare(config, console)


def run_experiment(
    config: Any,
    run_dir: str | os.PathLike[str],
    console: Console,
    prepared: Callable[[], Run] | None = None,
    key: RootKey | None = None,
) -> dict[str, Any]:
    """Runs (or resumes) a configuration and returns its report.

    Args:
      config: the configuration.
      run_dir: directory of the run.
      console: prints for people.
      prepared: reads the data and calibrates; default ``prepare``.
      key: root key of a new run whose configuration has no seed; None: a secret one.

    Raises:
      BadInputError: anything wrong with config, data or run directory; nothing is overwritten.
    """
    content = _content(config)
    processes.check_same({"configuration": config_fingerprint(config)})
    processes.on_primary(lambda: RunDirectory.check(run_dir, content))
    openers = [sink_of(name) for name in config.metrics.sinks]

    def ready() -> Run:
        run = prepare(config, console) if prepared is None else prepared()
        run.check_directory(run_dir)
        return run

    run = processes.on_all_hosts(ready)
    key = key if config.seed is None else RootKey.from_seed(config.seed)
    if config.privacy.ledger is not None and key is not None and key.public:
        raise BadInputError(
            "privacy.ledger adds up independent runs, but the key is public, so that all runs with "
            "it draw the same: leave key out, or privacy.ledger"
        )
    directory = open_directory(run_dir, content, key, run.facts())
    sinks: tuple[Any, ...] = ()
    try:
        run = processes.on_all_hosts(lambda: run.resume_from(directory))
        warned = warn_of_advisories(
            directory, lambda: run.statement(run.steps, run.guarantee(run.steps)), console
        )
        directory.keep_caveats((*run.caveats(), *warned))
        _introduce(run, directory, console)
        if directory.writes:
            everything = config.metrics.not_private
            directory.listeners = sinks = tuple(o(directory.path, everything) for o in openers)
        return _run(run, directory, console)
    finally:
        for sink in sinks:
            sink.close()
        directory.close()


def dry_run(config: Any, console: Console) -> dict[str, Any]:
    """Validates and prices a configuration: parameters, noise, epsilon. Trains nothing.

    With a ``population`` section no data are read.
    """
    if config.population is None:
        run = prepare(config, console)
    else:
        run = importlib.import_module(_KINDS[config.variant]).declared(config)
    public = (PUBLIC_KEY_CAVEAT,) if config.seed is not None and run.private else ()
    guarantee = run.about(run.guarantee(run.steps, (*run.caveats(), *public)))
    for line in [*run.warnings(), *run.advice()]:
        console.print(line, highlight=False)
    balance = run.balance()
    return {
        "status": "dry-run",
        "name": config.name,
        **run.price(),
        "noise_over_signal": None if balance is None else balance.to_json(),
        "epsilon": guarantee.epsilon if math.isfinite(guarantee.epsilon) else None,
        "delta": guarantee.delta,
        "privacy": guarantee.to_json(),
        "guarantee": str(guarantee),
        "meaning": run.statement(run.steps, guarantee).in_words(),
    }


def keep_programs() -> None:
    """Keeps compiled programs, also small ones, in the cache folder, or in that which JAX has.

    Not in the run's folder, which may come from somebody else: programs in the cache are executed.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(default_cache_dir() / "compiled"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def open_directory(
    run_dir: str | os.PathLike[str],
    content: Mapping[str, Any],
    key: RootKey | None,
    facts: Mapping[str, Any],
) -> RunDirectory:
    """Opens (and locks) the directory of a run in process 0; the others read it.

    Args:
      run_dir: directory of the run.
      content: the configuration as plain JSON, kept as config.yaml.
      key: root key of a new run; None: a secret one.
      facts: as ``RunDirectory`` takes them.

    Raises:
      BadInputError: the directory holds something else, or a run with another key.
    """
    mine = processes.on_primary(lambda: RunDirectory(run_dir, content, key, facts))
    introduction = processes.broadcast(None if mine is None else mine.introduction())
    return processes.on_all_hosts(lambda: mine or RunDirectory.join(introduction, facts))


def warn_of_advisories(
    directory: RunDirectory, stated: Callable[[], Statement], console: Console | None
) -> tuple[str, ...]:
    """Warns of advisories that apply to a resumed run; returns a caveat for them, or ().

    Args:
      directory: the run's directory.
      stated: returns the statement of the whole run; called if another version took earlier steps.
      console: prints for people.
    """
    versions = directory.versions
    if not directory.resumed or versions == [this_version()]:
        return ()
    met = advisories.met(stated().made_by(versions), advisories.known())
    if console is not None:
        for one in met:
            console.print(f"warning: {one}", markup=False, highlight=False)
    return (advisories.caveat(met),) if met else ()


def save_report(
    directory: RunDirectory,
    name: str,
    result: RunResult,
    statement: Statement,
    describe: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    baseline: list[dict[str, Any]] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """Writes all reports of a run, and returns the content of report.json.

    Args:
      directory: the run's directory.
      name: the run's name.
      result: what the driver returned.
      statement: the statement on the accounted steps.
      describe: turns an evaluation into what the report shows.
      baseline: evaluations of the baseline without privacy.
      **sections: further sections, as in ``report.build_report``.
    """
    statement = statement.made_by(directory.facts.get("versions", ()))
    report = build_report(name, result, statement.privacy, **sections)
    report["run_dir"] = directory.address
    report["data"]["keyed_digest"] = directory.facts["data"]
    report["eval"] = {name: describe(value) for name, value in report["eval"].items()}
    if baseline is not None:
        report["outside_guarantee"]["without_privacy"] = baseline
        report.setdefault("baselines", {})[WITHOUT_PRIVACY] = describe(baseline[-1])
    if result.audit is not None:
        report["audit"] = result.audit.write(directory.path, statement)
    write_report(directory.path, report, statement, result.metrics)
    return report


def _content(config: Any) -> dict[str, Any]:
    ledger = config.privacy.ledger
    # load_config makes it absolute
    if ledger is not None and not os.path.isabs(ledger) and address(ledger) is None:
        raise BadInputError(
            f"privacy.ledger is the relative path {ledger!r}, but this configuration was not read "
            "from a file that it could be relative to: give the full path"
        )
    content = config_to_dict(config)
    content.pop("processes")  # where a run computes is not part of what it is
    return content


def _introduce(run: Run, directory: RunDirectory, console: Console) -> None:
    verb = "resuming" if directory.resumed else "starting"
    console.print(f"{verb} {run.config.name} in {directory.address}")
    for line in [*run.headline(), *run.warnings(), *run.advice()]:
        console.print(line)
    if inputs := run.public_inputs:
        listed = "; ".join(inputs)
        console.print(f"assumed to be public, and not protected: {listed}", markup=False)


def _run(run: Run, directory: RunDirectory, console: Console) -> dict[str, Any]:
    bill, loop, evaluate = _Bill(run, directory, console), run.loop, run.evaluator()
    algorithm = run.algorithm(directory, console)
    result = drive(
        algorithm, run_dir=directory, evaluate=evaluate, loop=loop, charge=bill.pay, console=console
    )
    more = run.after_steps(algorithm, result)
    baseline = None
    if run.has_baseline and evaluate is not None and result.last is not None:
        key = directory.root_key.child("baseline")
        baseline = train_baseline(
            lambda: run.without_privacy(algorithm), key, evaluate, loop, console
        )
    if not directory.writes:
        status = FINISHED if result.interrupted is None else "interrupted"
        return {"status": status, "steps": result.steps, "run_dir": directory.address}
    caveats = (*directory.facts["caveats"], *result.caveats)
    guarantee = run.about(run.guarantee(result.accounted, caveats))
    sections = run.report(directory, result, guarantee)
    if result.interrupted is None:
        bill.commit()
    return save_report(
        directory,
        run.config.name,
        result,
        run.statement(result.accounted, guarantee),
        run.describe,
        baseline,
        task=None if run.task is None else dataclasses.asdict(run.task),
        mechanism=run.mechanism_facts,
        **sections,
        **more,
    )


class _Bill:
    """Charges the whole run to the ledger before its first step, if the config names one."""

    def __init__(self, run: Run, directory: RunDirectory, console: Console) -> None:
        self._run, self._run_id, self._console = run, directory.run_id, console
        path = run.config.privacy.ledger
        self._ledger = None if path is None else accounting.Ledger(path)
        self._paid = ""

    def pay(self, draws: str) -> None:
        """Charges the run under its id and the fingerprint of its draws."""
        if self._ledger is None:
            return
        privacy, charge = self._run.config.privacy, self._run.charge()
        account = charge.account(privacy.account)
        self._paid = f"{self._run_id}:{draws}"
        entry = self._ledger.reserve(
            account, self._paid, charge.event, charge.delta, privacy.budget
        )
        # What is left is rounded down.
        left = "" if entry.left is None else f", {-float(rounded_up(-entry.left, 4)):.4g} left"
        before, after = rounded_up(entry.before, 4), rounded_up(entry.after, 4)
        delta = rounded_up(charge.delta, 3)
        lines = [f"a new ledger was made at {self._ledger.path}"] * entry.new_ledger
        lines.append(
            f"ledger {self._ledger.path}, account {privacy.account}: epsilon "
            f"{before} spent before this run, {after} with it{left} (delta {delta})"
        )
        lines += entry.notes
        self._console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)

    def commit(self) -> None:
        if self._ledger is not None and self._paid:
            self._ledger.commit(self._paid)


# ---- the baseline --------------------------------------------------------------------------------

WITHOUT_PRIVACY = "the same without privacy, for comparison only"
BASELINE_CAVEAT = (
    "the run without privacy (eval.baseline) is for comparison only: its losses in "
    "report.json, report.md and curves.png are NOT covered by this guarantee; set eval.baseline to "
    "false where the data are private and the report is to be published"
)

Evaluations = list[dict[str, Any]]


def train_baseline(
    algorithm: Callable[[], Algorithm],
    key: RootKey,
    evaluate: Evaluate,
    loop: LoopConfig,
    console: Console,
) -> Evaluations | None:
    """Trains the baseline without privacy, and keeps no model.

    Args:
      algorithm: makes the algorithm without privacy.
      key: root key for this training only.
      evaluate: the evaluation of the private run.
      loop: the settings of the private run; best checkpoint, patience and profile are ignored.
      console: prints for people.

    Returns:
      Evaluations, each with its ``step``, first and last included; None if it did not finish.
    """
    console.print("the same without privacy, for comparison", highlight=False)
    loop = dataclasses.replace(loop, keep_best=False, patience=None, profile=0)
    try:
        result = drive(algorithm(), key=key, evaluate=evaluate, loop=loop, console=console)
    except BadInputError as error:  # the private run is finished, and must be reported
        console.print(f"warning: there is no comparison: {error}")
        return None
    if result.interrupted is not None:
        return None
    return [{"step": row["step"], **row["eval"]} for row in result.metrics if "eval" in row]


# ---- noise over signal ---------------------------------------------------------------------------
# It is computed before training, together with the settings that would lower it.


# Noise over signal that advice must reach. Gradients are never all at the clip norm and aligned:
# with configs/subject/digits.yaml the held-out loss, 2.40 before training, is 3.20 after a run at
# 0.75 (privacy.epsilon=0.8), 1.56 at 0.43 and 1.08 at 0.24.
_ENOUGH = 0.5
# (key to change, [(value, function that returns the configuration with it), ...] in order).
Knob = tuple[str, list[tuple[Any, Callable[[], Any]]]]
Knobs = Iterable[Knob]


@dataclasses.dataclass(frozen=True)
class Balance:
    """Expected size of the noise, and the largest of the signal, in units of the learning rate.

    Attributes:
      noise: norm of the noise on a round's averaged update.
      signal: largest possible norm of a round's averaged update.
      rounds: number of rounds.
      called: word for a round ("step" in central training).
    """

    noise: float
    signal: float
    rounds: int
    called: str = "round"

    @property
    def ratio(self) -> float:
        """Noise over signal of the whole run; above 1 noise swamps signal."""
        if not self.noise:
            return 0.0
        return self.noise / (self.signal * math.sqrt(self.rounds))

    def to_json(self) -> dict[str, float]:
        """Noise over signal of one round and of the run, as plain JSON."""
        result = {self.called: self.noise / self.signal, "run": self.ratio}
        return {f"over_a_{name}": float(f"{value:.4g}") for name, value in result.items()}

    def __str__(self) -> str:
        return (
            f"noise over signal (the largest possible update): about "
            f"{self.noise / self.signal:.3g} in a {self.called}, {self.ratio:.3g} over all "
            f"{self.rounds} {self.called}s"
        )


def advice(
    balance: Balance, knobs: Knobs, balance_of: Callable[[Any], Balance | None]
) -> list[str]:
    """Returns sentences to print: the balance, and what to change if noise swamps signal.

    Args:
      balance: the balance of the configuration.
      knobs: settings to try; read only if noise swamps signal.
      balance_of: computes the balance of another configuration.
    """
    if balance.ratio <= 1.0:
        return [str(balance)]
    enough, tried = [], []
    for key, values in knobs:
        tried += [key] if values else []
        for value, changed in values:
            try:
                would_be = balance_of(changed())
            except BadInputError:  # no such mechanism, or no noise that meets the target
                continue
            if would_be is not None and would_be.ratio <= _ENOUGH:
                enough.append(f"{key}={value} ({would_be.ratio:.2g})")
                break
    better = (
        f"one of these would do (in brackets, noise over signal then): {', '.join(enough)}"
        if enough
        else "no single change of these would do: "
        f"{', '.join(tried)}; take a smaller model, or more people"
    )
    return [f"warning: noise swamps signal: {balance}; {better}"]


def knob(config: Any, key: str, values: Sequence[Any]) -> Knob:
    """Makes a ``Knob`` of a key; ``mechanism.NAME`` (not isrl) is a field of its participation."""
    section, *_, name = key.split(".")

    def changed(value: Any) -> Any:
        old = getattr(config, section)
        if section == "mechanism" and config.variant != "isrl":
            drawn = dataclasses.replace(old.participation, **{name: value})
            new = dataclasses.replace(old, participation=drawn)
        elif section == "mechanism":
            new = dataclasses.replace(old, **{name: value})
        else:
            new = old.model_copy(update={name: value})
        return config.model_copy(update={section: new})

    return key, [(value, functools.partial(changed, value)) for value in values]


def doubled(start: float, most: float, times: int = 6) -> list[float]:
    """Returns 2, 4, ... times ``start``, up to ``most``, rounded to three digits."""
    result = [float(f"{start * 2**k:.3g}") for k in range(1, times + 1)]
    return [*dict.fromkeys(min(value, most) for value in result)]
