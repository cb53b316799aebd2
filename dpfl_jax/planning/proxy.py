"""Proxy runs: short trainings with noise of a given size, which the scaling law is fitted to.

**Nothing is accounted: run them on public data only.** Privacy affects training only through the
noise on the averaged gradient, so that small runs predict large runs with the same noise (McKenna
et al. 2025, arXiv 2501.18914, section 3).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from scipy.stats import qmc

from dpfl_jax.clipping import join, split
from dpfl_jax.config import RunConfig, config_fingerprint, load_config
from dpfl_jax.data import limit_store
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mechanisms.plan.batches import example_loss, step_arguments
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import make_mesh, place, replicated
from dpfl_jax.noise import Noise, transformation
from dpfl_jax.planning.candidates import at_budget, draws_examples, plain
from dpfl_jax.planning.planner import Planner
from dpfl_jax.randomness import RootKey, key_argument
from dpfl_jax.training.central_run import read_data
from dpfl_jax.training.evaluate import Evaluator
from dpfl_jax.training.optimizers import make_optimizer
from dpfl_jax.training.start import starting_params, trained_by_name


@dataclasses.dataclass(frozen=True)
class Trial:
    """The settings of one proxy run.

    Attributes:
      kind: kind of a plain candidate (``planning.candidates``).
      group_size: group size G.
      size: expected examples or users per step.
      steps: number of steps T.
      ratio: noise-to-batch ratio: standard deviation of the noise on the averaged gradient, over
        the sensitivity of the sum (the clip norm; 1 if clipping is normalized).
      rate: factor on the configuration's learning rate.
      seed: public seed of sampling and noise.
    """

    kind: str
    group_size: int
    size: int
    steps: int
    ratio: float
    rate: float = 1.0
    seed: int = 0


class Proxy:
    """Trains and evaluates trials of one configuration; each program is compiled once."""

    def __init__(self, config: RunConfig, largest: int) -> None:
        """Reads the data and the starting parameters.

        Args:
          config: says data, model, clipping, optimiser and execution. Trials say the sizes of the
            mechanism, noise and steps.
          largest: expected size of the largest trial, for buffers.

        Raises:
          BadInputError: no data are held out, or parameters are to be split over devices.
        """
        self.config, self.largest = config, largest
        quiet = Console(quiet=True)
        self.data, self.model = read_data(config, quiet)
        held_out = getattr(self.data, config.eval.split)
        if held_out is None:
            raise BadInputError(
                "proxy runs compare held-out losses, but nothing is held out: set "
                "data.validation_fraction"
            )
        self.mesh = make_mesh(**config.execution.mesh.axes)
        params, _ = starting_params(config, self.data, self.model, self.mesh, quiet)
        self.trainable = trained_by_name(config.model, self.model)
        self.trained, self.frozen = place(split(params, self.trainable), replicated(self.mesh))
        held_out = limit_store(held_out, config.eval.max_users, config.eval.max_examples_per_user)
        evaluator = Evaluator(self.model.loss, self.mesh, config.eval.batch_size)
        self._loss = lambda trained: evaluator(join(trained, self.frozen), held_out).loss
        self._sums: dict[tuple[str, int], Callable[..., Any]] = {}

    @functools.cached_property
    def initial(self) -> float:
        """Held-out loss before the first step."""
        return self._loss(self.trained)

    @functools.lru_cache(maxsize=64)  # noqa: B019  (one proxy a process)
    def _update(self, steps: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        optimizer = make_optimizer(self.config.optimizer, steps)
        noise_aware = optax.with_extra_args_support(optimizer)

        @jax.jit
        def update(state: Any, total: Any, divisor: Any, ratio: Any, rate: Any, key: Any) -> Any:
            params, memory = state
            # Normalized clipping has sensitivity 1, whatever the clip norm.
            most = self.config.mechanism.rule.sensitivity
            noise = transformation(Noise(ratio * most * divisor, most, law="float"), divisor)
            gradient, _ = noise.update(total, noise.init(params), params, noise_key=key)
            updates, memory = noise_aware.update(
                gradient, memory, params, noise_stddev=ratio * most
            )
            updates = jax.tree.map(lambda u: (rate * u).astype(u.dtype), updates)
            return optax.apply_updates(params, updates), memory

        return optimizer.init, update

    def _sum(self, mechanism: Any) -> Callable[..., Any]:
        key = (mechanism.kind, mechanism.group_size)
        if key not in self._sums:
            how = self.config.execution
            self._sums[key] = jax.jit(
                clipped_sum_over_microbatches(
                    mechanism,
                    example_loss(self.model.loss, self.data.train),
                    self.mesh,
                    strategy=how.strategy,
                    trainable=self.trainable,
                    **how.cut,
                )
            )
        return self._sums[key]

    def run(self, trial: Trial, evaluate: bool = True) -> dict[str, Any]:
        """Trains once.

        Returns:
          The trial's fields, with ``loss`` (None if it is not finite), ``cpu_seconds`` of training,
          and the counts ``units``, ``examples``, ``tokens`` and ``rows``.
        """
        each = 1 if draws_examples(trial.kind) else trial.group_size
        mechanism: Any = at_budget(
            self.config.mechanism, trial.kind, float(trial.size * each), trial.group_size
        )
        how = self.config.execution.unpacked
        # A microbatch of large users has fewer of them.
        how = how.model_copy(update={"microbatch_size": max(1, how.microbatch_size // each)})
        population = mechanism.participation.population_of(self.data.train)
        calibrated = mechanism.calibrate(  # its noise is not used: see _update
            population, trial.steps, noise_multiplier=1.0, delta=1e-5
        )
        plan = Plan(calibrated, self.data.train, how, self.mesh)
        key = RootKey.from_seed(trial.seed)
        random = key_argument(self.model.loss)
        pipeline = plan.pipeline(plan.sampler(key), key if random else None)
        most = self.largest + 8 * math.sqrt(self.largest)
        shape = (max(1, math.ceil(most / pipeline.row)),) * len(pipeline.group_sizes or (1,))
        pipeline = dataclasses.replace(pipeline, capacities=shape)
        init, update = self._update(trial.steps)
        summed, state = self._sum(mechanism), (self.trained, init(self.trained))
        numbers = [
            jnp.float32(x) for x in (mechanism.participation.divisor, trial.ratio, trial.rate)
        ]
        started, units, examples, tokens, rows = time.process_time(), 0, 0, 0, 0
        for batch in pipeline.iterate(0, trial.steps):
            arguments = step_arguments(mechanism, batch)
            total, _ = summed(state[0], *arguments, self.frozen)
            state = update(state, total, *numbers, plan.noise_key(key, batch.step))
            units, examples = units + batch.num_units, examples + batch.num_examples
            tokens += batch.num_tokens
            rows += sum(bucket.num_rows for bucket in batch.buckets)
        jax.block_until_ready(state)
        used = time.process_time() - started
        loss = self._loss(state[0]) if evaluate else math.nan
        return {
            **dataclasses.asdict(trial),
            "loss": loss if math.isfinite(loss) else None,
            "cpu_seconds": used,
            "units": units,
            "examples": examples,
            "tokens": tokens,
            "rows": rows,
        }


# ---- many trials, kept as they finish ---------------------------------------------------------


def design(
    planner: Planner, budget: int, runs: int, rates: Sequence[float] = (1.0,)
) -> list[Trial]:
    """Returns trials that span what the planner may choose.

    The trials for fewer ``runs`` are the first of those for more. They have between an eighth of
    the planner's steps and all, between a quarter of the budget and all of it (the first two have
    all of both), and noise between that of epsilon 64 and that of epsilon 1/2; every eighth trial
    has no noise.

    Args:
      planner: planner for the proxy's users, with the largest number of steps.
      budget: most gradient evaluations per step.
      runs: number of trials.
      rates: factors to try on the configuration's learning rate.
    """
    steps, norms = planner.steps, planner.sensitivities
    groups = [g for g in (1, 4, 16) if g in norms.user and 16 * g <= budget] or [1]
    middle = planner.users.groups()[len(planner.users.groups()) // 2]
    arms = [(plain(False), group) for group in groups] + [(plain(True), middle)]

    def noise(epsilon: float, least: float) -> float:
        other = Planner(planner.users, norms, epsilon=epsilon, delta=planner.delta, steps=steps)
        return least * other.recommend(budget, example_groups=[]).best.noise

    low, high = noise(64.0, 0.5), noise(0.5, 2.0)
    points = qmc.Sobol(5, seed=0).random_base2(max(1, math.ceil(math.log2(max(2, runs)))))
    trials = []
    for i, (a, b, c, d, e) in enumerate(points[:runs].tolist()):
        if i < 2:  # the two largest runs, one without noise: nearest to the run that is planned
            a, b, c = 1.0, 1.0, 0.5
        kind, group = arms[int(d * len(arms))]
        gradients = max(8 * group, round(budget * 4.0 ** (b - 1)))
        examples = draws_examples(kind)
        size = gradients if examples else gradients // group
        most = planner.users.left(group) if examples else planner.users.num_users
        total = 0.0 if i % 8 == 0 else low * (high / low) ** c
        trials.append(
            Trial(
                kind,
                group,
                min(size, most),
                max(2, round(steps * 8.0 ** (a - 1))),
                float(f"{total / norms.norm(kind, group):.4g}"),
                rates[int(e * len(rates))],
                seed=i,
            )
        )
    return trials


def run_trials(
    config: str | os.PathLike[str],
    overrides: Sequence[str],
    trials: Sequence[Trial],
    file: pathlib.Path,
    *,
    jobs: int = 1,
    allow_code: bool = False,
    done: Callable[[int, dict[str, Any]], None] = lambda count, row: None,
) -> list[dict[str, Any]]:
    """Runs the trials that the file does not have yet, and appends each as it finishes.

    Args:
      config: YAML file of a central run.
      overrides: changes to its keys, as ``key=value``.
      trials: trials to run.
      file: JSONL file, one trial a line; rows of other configurations are kept, but not returned.
      jobs: number of processes.
      allow_code: whether the configuration may name code (``load_config``).
      done: called with the number of finished trials and the last one's row.

    Returns:
      The rows of ``trials``, in their order, with ``"config"`` (a fingerprint) and ``"initial"``.
    """
    loaded: Any = load_config(config, [*overrides, "sweep=null"], allow_code)
    name = config_fingerprint(loaded)
    fields = [field.name for field in dataclasses.fields(Trial)]
    kept: dict[Trial, dict[str, Any]] = {}
    lines = file.read_text().splitlines() if file.exists() else []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # a line that was cut off while it was written
            continue
        if row.get("config") == name:
            kept[Trial(**{field: row[field] for field in fields})] = row
    left = [trial for trial in dict.fromkeys(trials) if trial not in kept]
    largest = max((trial.size for trial in trials), default=1)
    # Trials that share a compiled program go to one process; the longest are started first.
    left.sort(key=lambda t: (t.kind, t.group_size, -t.steps * t.size))
    work = functools.partial(_one, os.fspath(config), tuple(overrides), allow_code, largest)

    def keep(trial: Trial, row: dict[str, Any]) -> None:
        row = kept[trial] = {"config": name, **row}
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")
        done(len(trials) - len(left) + sum(t in kept for t in left), row)

    jobs = min(jobs, len(left))
    if jobs <= 1:
        for trial in left:
            keep(trial, work(trial))
        return [kept[trial] for trial in trials]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        futures = {pool.submit(work, trial): trial for trial in left}
        for future in concurrent.futures.as_completed(futures):
            keep(futures[future], future.result())
    return [kept[trial] for trial in trials]


@functools.lru_cache(maxsize=1)
def _proxy(config: str, overrides: tuple[str, ...], allow_code: bool, largest: int) -> Proxy:
    loaded = load_config(config, [*overrides, "sweep=null"], allow_code)
    return Proxy(loaded, largest)


def _one(
    config: str, overrides: tuple[str, ...], allow_code: bool, largest: int, trial: Trial
) -> dict[str, Any]:
    proxy = _proxy(config, overrides, allow_code, largest)
    return {**proxy.run(trial), "initial": proxy.initial}
