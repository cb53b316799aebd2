"""Whether somebody who holds other texts of users can tell who took part.

Nothing that is trained here is kept or released: the runs are the attack's own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from rich.console import Console
from scipy import stats

from dpfl_jax.config import RunConfig
from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError, StoppedError
from dpfl_jax.mechanisms import NonPrivate
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mesh import make_mesh
from dpfl_jax.randomness import RootKey
from dpfl_jax.training.central import Central, train
from dpfl_jax.training.central_run import prepare
from dpfl_jax.training.evaluate import Evaluator
from dpfl_jax.training.start import starting_params, trained_by_name

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a store, by user.

    Attributes:
      store: where rows are read.
      positions: int64 [n].
      user_offsets: int64 [users + 1].
    """

    store: Readable
    positions: np.ndarray
    user_offsets: np.ndarray

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """The rows."""
        return self.store.read(self.positions[positions])


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
    if not isinstance(config, RunConfig) or not config.mechanism.private:
        raise BadInputError(
            "--user-inference needs a central configuration with a private mechanism: audit others "
            "with --simulate"
        )
    ready = prepare(config, console)
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
    # Calibrated again: there are fewer users now.
    population = config.mechanism.population(used.user_offsets)
    target = (config.privacy.epsilon, config.privacy.delta)
    private, _ = config.mechanism.calibrated(population, config.train.steps, *target)
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
        console.print(f"training {name.replace('_', ' ')}", highlight=False)
        result = train(run, key=key.child(name), console=console)
        if result.interrupted is not None:
            raise StoppedError("the audit was stopped, and keeps nothing")
        gain = before - by_user(result.params)
        rank = stats.mannwhitneyu(gain[inside], gain[~inside])
        found[name] = float(rank.statistic / (inside.sum() * (~inside).sum()))
    sizes = (int(inside.sum()), int((~inside).sum()))
    # Standard deviation of the area where nothing can be told (Mann and Whitney 1947).
    chance = float(np.sqrt((sum(sizes) + 1) / (12.0 * sizes[0] * sizes[1])))
    return {"auc": found, "users_in": sizes[0], "users_out": sizes[1], "chance_deviation": chance}
