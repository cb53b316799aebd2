"""Private estimation of a mean from users' examples, many trials and settings at once.

Charles et al. 2024, section 4: mu ~ N(0, I_32); each of 256 users has a mean of its own,
N(mu, sigma1^2 I), and 16 examples N(mu_u, sigma2^2 I). The loss of an example is half the squared
distance, so that the gradient of a group is theta minus the group's mean.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax import accounting
from dpfl_jax.accounting import events
from dpfl_jax.noise import GaussianNoise
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import poisson_indices
from reproductions._seeds import of

DIM, USERS, PER_USER, STEPS, DELTA = 32, 256, 16, 256, 1e-6
SIGMA_1 = 1.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """One point of a panel; sigma_2 is a standard deviation (the paper's text says variance)."""

    epsilon: float = 1.0
    budget: int = 64
    sigma_2: float = 1.0


@dataclasses.dataclass(frozen=True)
class Arm:
    """ELS or ULS with a group size."""

    kind: str
    group_size: int

    def units(self, budget: int) -> int:
        """Expected units a step at a compute budget; 0 if it cannot be spent."""
        if self.kind == "els":
            return budget if budget <= USERS * self.group_size else 0
        size = budget // self.group_size
        return size if 1 <= size <= USERS else 0

    @property
    def name(self) -> str:
        """As in legends."""
        return f"{self.kind.upper()} G={self.group_size}"


@functools.cache
def noise_multiplier(arm: Arm, budget: int, epsilon: float) -> float:
    """Calibrated for all steps at (epsilon, 1e-6)."""
    size = arm.units(budget)
    if arm.kind == "uls":
        return accounting.calibrate_noise_multiplier(
            lambda s: events.uls(s, size / USERS, STEPS), epsilon, DELTA
        )
    prob = size / (USERS * arm.group_size)
    return accounting.calibrate_noise_multiplier(
        lambda s: events.els(s, prob, arm.group_size, STEPS), epsilon, DELTA
    )


def problems(trials: int, seed: int, sigma_2: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns mu [trials, dim] and examples [trials, users, per user, dim]; float32.

    The same trials for every arm; only the spread within users changes with ``sigma_2``.
    """
    rng = np.random.default_rng(of(seed))
    mu = rng.normal(size=(trials, DIM)).astype(np.float32)
    users = mu[:, None] + SIGMA_1 * rng.normal(size=(trials, USERS, DIM)).astype(np.float32)
    spread = rng.normal(size=(trials, USERS, PER_USER, DIM)).astype(np.float32)
    return mu, users[:, :, None] + np.float32(sigma_2) * spread


def draws(arm: Arm, size: int, trials: int, seed: int) -> np.ndarray:
    """Examples of every unit of every step: int32 [steps, trials, capacity, group], -1 for none.

    True Poisson sampling: over users (each brings ``group`` of its examples, chosen afresh without
    replacement), or over the examples left by a choice of ``group_size`` a user made once.
    """
    key = RootKey.from_seed(of(seed))
    group = arm.group_size if arm.kind == "uls" else 1
    rng = np.random.default_rng(of(seed) + 1)
    kept = rng.permuted(np.tile(np.arange(PER_USER), (trials, USERS, 1)), axis=2)
    drawn: list[np.ndarray] = []
    for step in range(STEPS):
        for trial in range(trials):
            source = key.numpy("mean-estimation", step, trial)
            if arm.kind == "uls":
                users = poisson_indices(source, USERS, size / USERS)
                order = source.random((len(users), PER_USER)).argsort(axis=1)[:, :group]
                drawn.append(users[:, None] * PER_USER + order)
            else:
                chosen = poisson_indices(
                    source, USERS * arm.group_size, size / (USERS * arm.group_size)
                )
                user, place = chosen // arm.group_size, chosen % arm.group_size
                drawn.append((user * PER_USER + kept[trial, user, place])[:, None])
    capacity = max(len(d) for d in drawn)
    out = np.full((STEPS * trials, capacity, group), -1, np.int32)
    for row, d in zip(out, drawn):
        row[: len(d)] = d
    return out.reshape(STEPS, trials, capacity, group)


@functools.partial(jax.jit, static_argnames=("unit_count",))
def final_errors(
    mu: jax.Array,
    examples: jax.Array,
    drawn: jax.Array,
    key: jax.Array,
    rates: jax.Array,
    clip_norms: jax.Array,
    sigma: jax.Array,
    unit_count: int,
) -> jax.Array:
    """Squared error of the last iterate, float32 [trials, pairs].

    Args:
      mu: [trials, dim].
      examples: [trials, users, per user, dim].
      drawn: int32 [steps, trials, capacity, group].
      key: of the noise.
      rates: learning rates [pairs].
      clip_norms: [pairs].
      sigma: noise multiplier.
      unit_count: expected units a step, the divisor.
    """
    trials = mu.shape[0]
    flat = examples.reshape(trials, -1, DIM)

    def step(theta: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
        positions, step_key = inputs
        real = positions[:, :, 0] >= 0
        means = jnp.take_along_axis(
            flat, jnp.maximum(positions, 0).reshape(trials, -1, 1), axis=1
        ).reshape(*positions.shape, DIM)
        means = means.mean(axis=2)  # [trials, units, dim]
        inner = jnp.einsum("tpd,tud->tpu", theta, means)
        squared = (theta**2).sum(-1)[:, :, None] - 2 * inner + (means**2).sum(-1)[:, None]
        norms = jnp.sqrt(jnp.maximum(squared, 1e-12))
        weights = jnp.minimum(1.0, clip_norms[:, None] / norms) * real[:, None]
        total = theta * weights.sum(-1)[..., None] - jnp.einsum("tpu,tud->tpd", weights, means)
        drawn_noise = GaussianNoise(1.0).sample(step_key, total[:, :1])  # one for all rates
        noise = drawn_noise * sigma * clip_norms[:, None]
        return theta - rates[:, None] * (total + noise) / unit_count, None

    start = jnp.zeros((trials, len(rates), DIM))
    keys = jax.random.split(key, drawn.shape[0])
    theta, _ = jax.lax.scan(step, start, (drawn, keys))
    return ((theta - mu[:, None]) ** 2).sum(-1)


@dataclasses.dataclass(frozen=True)
class Result:
    """Of one arm in one setting, on trials not used for tuning.

    Attributes:
      mean: mean squared error.
      standard_error: of the mean.
      errors: float [trials], paired over arms.
      rate, clip_norm: the best pair on the tuning trials.
      at_edge: whether that pair lies on the edge of the grid.
    """

    mean: float
    standard_error: float
    errors: np.ndarray
    rate: float
    clip_norm: float
    at_edge: bool


def evaluate(
    arm: Arm,
    setting: Setting,
    rates: np.ndarray,
    clip_norms: np.ndarray,
    tuning: int,
    trials: int,
) -> Result | None:
    """Tunes on some trials, scores on others; None if the budget cannot be spent this way."""
    size = arm.units(setting.budget)
    if not size:
        return None
    sigma = jnp.float32(noise_multiplier(arm, setting.budget, setting.epsilon))

    def errors(count: int, seed: int, lr: np.ndarray, clip: np.ndarray) -> np.ndarray:
        mu, examples = problems(count, seed, setting.sigma_2)
        drawn = draws(arm, size, count, seed)
        key = jax.random.key(of(seed))
        out = final_errors(mu, examples, drawn, key, lr, clip, sigma, size)
        return np.asarray(out, np.float64)

    grid = np.stack(np.meshgrid(rates, clip_norms, indexing="ij"), -1).reshape(-1, 2)
    grid = grid.astype(np.float32)
    tuned = np.nan_to_num(errors(tuning, 1, grid[:, 0], grid[:, 1]).mean(axis=0), nan=np.inf)
    best = int(tuned.argmin())
    i, j = divmod(best, len(clip_norms))
    at_edge = i in (0, len(rates) - 1) or j in (0, len(clip_norms) - 1)
    scored = errors(trials, 2, grid[best : best + 1, 0], grid[best : best + 1, 1])[:, 0]
    return Result(
        float(scored.mean()),
        float(scored.std(ddof=1) / np.sqrt(trials)),
        scored,
        float(rates[i]),
        float(clip_norms[j]),
        at_edge,
    )
