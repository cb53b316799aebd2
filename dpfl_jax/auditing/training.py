"""A configuration trained under attack: canary users in a real run, and who took part in it.

Nothing that is trained here is kept or released: the runs are the attacks' own.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from scipy import stats

from dpfl_jax.config import RunConfig
from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError
from dpfl_jax.evidence.trials import LONG, Trials
from dpfl_jax.mechanisms import Mechanism, NonPrivate
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mesh import make_mesh
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.state import TrainState
from dpfl_jax.training.central import Central
from dpfl_jax.training.central_run import prepare
from dpfl_jax.training.evaluate import Evaluator
from dpfl_jax.training.start import starting_params, trained_by_name

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a store, by user, with a number beside each that says whether it is a canary.

    Attributes:
      store: where rows are read.
      positions: int64 [n]; -1 for a canary, which has no row.
      user_offsets: int64 [users + 1].
      canary: int32 [n], its number; -1 for a person's row. None: rows as the store has them.
    """

    store: Readable
    positions: np.ndarray
    user_offsets: np.ndarray
    canary: np.ndarray | None = None

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """The rows; a canary's is of ones, so that any loss of it is finite."""
        at = self.positions[positions]
        rows = self.store.read(np.maximum(at, 0))
        if self.canary is None:
            return rows
        absent = at < 0
        blank = {
            name: np.where(absent.reshape(-1, *[1] * (row.ndim - 1)), np.ones_like(row), row)
            for name, row in rows.items()
        }
        return blank | {"canary": self.canary[positions]}


def canary_run(
    config: Any, canaries: int, key: RootKey, console: Console
) -> tuple[Trials, dict[str, Any]]:
    """Trains a configuration with canary users; each is in or out by a fair coin of ``key``.

    A canary's gradient lies in a parameter that no loss of a person depends on, so that it moves no
    other, and is as long as clipping allows. Everything else is the run's: people, model, sampler,
    clipping, noise. The people's guarantee is that of the plan, whose population counts canaries.

    Args:
      config: of a central run.
      canaries: in or out.
      key: of coins, sampling and noise; no run's.
      console: for people.

    Returns:
      Trials of the canaries, and what they cost: JSON values.

    Raises:
      BadInputError: a configuration that this does not fit.
    """
    ready = _ready(config, console)
    store, mesh = ready.data.train, make_mesh(**config.execution.mesh.axes)
    group = ready.mechanism.unit_examples or getattr(ready.mechanism, "group_size", 1)
    inside = key.numpy("audit-coins").random(canaries) < 0.5
    offsets, who = np.asarray(store.user_offsets), np.flatnonzero(inside)
    more = offsets[-1] + group * np.arange(1, len(who) + 1)
    rows = Rows(
        store,
        np.concatenate([np.arange(offsets[-1]), np.full(len(who) * group, -1)]),
        np.concatenate([offsets, more]),
        np.concatenate([np.full(offsets[-1], -1), np.repeat(who, group)]).astype(np.int32),
    )
    # Calibrated again: there are more users now.
    mechanism = _again(config, rows)
    plan = Plan(mechanism, rows, config.train.steps, ready.delta, config.execution, mesh)
    params, _ = starting_params(config, ready.data, ready.model, mesh, console)
    model_loss, length = ready.model.loss, LONG * mechanism.clip_norm

    def loss(params: PyTree, example: PyTree) -> jax.Array:
        number = example["canary"]
        real = model_loss(params["model"], {k: v for k, v in example.items() if k != "canary"})
        own = params["canaries"] @ jax.nn.one_hot(number, canaries)
        return jnp.where(number < 0, real, length * own)

    start = {"model": params, "canaries": jnp.zeros(canaries)}
    optimizer = _recording(ready.optimizer, plan.steps)
    run = Central(loss, start, plan, optimizer)
    state, seconds = _taken(run, key.child("audit-run"), console, "with canaries")
    seen = np.asarray(state.opt_state["seen"]).T * (mechanism.divisor / mechanism.noise_stddev)
    trials = Trials(
        inside=inside,
        seen=seen,
        event=plan.event(),
        delta=plan.delta,
        name=f"{config.name}, {mechanism.kind}",
        how=f"one run of {plan.steps} steps with {canaries} canary users, {len(who)} of them in",
    )
    cost = {
        "canaries": canaries,
        "inside": len(who),
        "share_of_users": len(who) / (len(rows.user_offsets) - 1),
        "seconds": seconds,
        "noise_multiplier": mechanism.noise_multiplier,
        "noise_multiplier_without": ready.mechanism.noise_multiplier,
    }
    if ready.held_out is not None:
        losses = Evaluator(model_loss, mesh, config.eval.batch_size).of(ready.held_out)
        cost["held_out_loss"] = losses(state.params["model"])["loss"]
    return trials, cost


def user_inference(config: Any, key: RootKey, console: Console) -> dict[str, Any]:
    """Whether somebody who holds other texts of users can tell who took part.

    Half of the users take part, by fair coins, with half of their examples. The attacker knows the
    other half of everybody's, and ranks users by how much training lowered the loss of these
    (Kandpal et al. 2024, "User inference attacks on large language models").

    Args:
      config: of a central run; its people must have two examples or more to count.
      key: of coins, sampling and noise; no run's.
      console: for people.

    Returns:
      Area under the curve of the ranking, with privacy and without; JSON values.

    Raises:
      BadInputError: a configuration that this does not fit.
    """
    ready = _ready(config, console)
    store, mesh = ready.data.train, make_mesh(**config.execution.mesh.axes)
    offsets = np.asarray(store.user_offsets)
    several = np.flatnonzero(np.diff(offsets) >= 2)
    if len(several) < 40:
        raise BadInputError(f"{len(several)} users have two examples or more: too few to rank")
    inside = key.numpy("audit-coins").random(len(several)) < 0.5

    def halves(users: np.ndarray, first: int) -> Rows:
        """Every second row of each."""
        mine = [np.arange(offsets[u] + first, offsets[u + 1], 2) for u in users]
        ends = np.cumsum([0, *(len(m) for m in mine)])
        return Rows(store, np.concatenate(mine), ends)

    used, other = halves(several[inside], 0), halves(several, 1)
    private = _again(config, used)
    budget = min(private.compute_budget, float(used.user_offsets[-1]))
    params, _ = starting_params(config, ready.data, ready.model, mesh, console)
    trainable = trained_by_name(config.model, ready.model)
    evaluator = Evaluator(ready.model.loss, mesh, config.eval.batch_size)

    def by_user(params: PyTree) -> np.ndarray:
        losses, _ = evaluator.measure(params, other)
        return np.add.reduceat(losses, other.user_offsets[:-1]) / np.diff(other.user_offsets)

    before, found = by_user(params), {}
    execution = config.execution.model_copy(update={"examples_at_once": None, "split_users": False})
    named = {"with_privacy": private, "without_privacy": NonPrivate(batch_size=budget)}
    for name, mechanism in named.items():
        plan = Plan(mechanism, used, config.train.steps, ready.delta, execution, mesh)
        run = Central(ready.model.loss, params, plan, ready.optimizer, trainable)
        state, _ = _taken(run, key.child(name), console, name.replace("_", " "))
        gain = before - by_user(run.params(state))
        rank = stats.mannwhitneyu(gain[inside], gain[~inside])
        found[name] = float(rank.statistic / (inside.sum() * (~inside).sum()))
    sizes = (int(inside.sum()), int((~inside).sum()))
    # Standard deviation of the area where nothing can be told (Mann and Whitney 1947).
    chance = float(np.sqrt((sum(sizes) + 1) / (12.0 * sizes[0] * sizes[1])))
    return {"auc": found, "users_in": sizes[0], "users_out": sizes[1], "chance_deviation": chance}


def _ready(config: Any, console: Console) -> Any:
    if not isinstance(config, RunConfig) or not config.mechanism.private:
        raise BadInputError(
            "an audit of training needs a central configuration with a private mechanism; audit "
            "others with --simulate"
        )
    return prepare(config, console)


def _again(config: RunConfig, rows: Rows) -> Mechanism:
    """The configuration's mechanism with the noise that these users ask for."""
    mechanism, privacy = config.mechanism, config.privacy
    population = mechanism.population(rows.user_offsets)
    target = (privacy.epsilon, privacy.delta)
    return mechanism.calibrated(population, config.train.steps, *target)[0]


def _recording(optimizer: Any, steps: int) -> optax.GradientTransformation:
    """The optimiser of the model; what is released about canaries is kept, and moves nothing."""

    def init(params: PyTree) -> PyTree:
        seen = jnp.zeros((steps, params["canaries"].shape[0]))
        return {"model": optimizer.init(params["model"]), "seen": seen, "step": jnp.int32(0)}

    def update(gradient: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        own = None if params is None else params["model"]
        updates, model = optimizer.update(gradient["model"], state["model"], own)
        seen = state["seen"].at[state["step"]].set(gradient["canaries"])
        still = jnp.zeros_like(gradient["canaries"])
        now = {"model": model, "seen": seen, "step": state["step"] + 1}
        return {"model": updates, "canaries": still}, now

    return optax.GradientTransformation(init, update)


def _taken(run: Central, key: RootKey, console: Console, what: str) -> tuple[TrainState, float]:
    """All steps of a run, and the seconds they took after the first."""
    state, steps, start = run.init(), run.begin(key, 0), 0.0
    with console.status(f"training {what}"):
        for done, inputs in steps.inputs():
            state, _ = steps.step(state, inputs)
            if done == 1:
                jax.block_until_ready(state.params)
                start = time.perf_counter()
        jax.block_until_ready(state.params)
    return state, time.perf_counter() - start
