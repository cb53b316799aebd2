"""The hospitals once more in plain NumPy: nothing of the library but its rates and its data."""

import numpy as np
import pytest
from jax import random

from dpfl_jax.accounting.rates import TwoStage
from dpfl_jax.federation.personal_budgets import ThreeLevels
from reproductions.rpdp._noise import noise_for_cap
from reproductions.rpdp._training import torch_init
from reproductions.rpdp.heart import CAP, DELTA, ROUNDS, bench, hospitals

TAU, SEEDS, RATE, BETA1, BETA2 = 10, 20, 0.005, 0.9, 0.999


def train(data, test, seed, sigma, rates, divisors, clip):
    """FedAvg with Adam in each silo, whose state lives on; clipped at 1 if ``clip``.

    ``rates``: of each record. ``divisors``: of each silo; None: the size of the batch.
    """
    rng = np.random.default_rng([7, seed])
    records = data.read(np.arange(data.num_records))
    x = np.c_[records["x"].astype(float), np.ones(data.num_records)]
    y, off = records["label"], data.silo_offsets
    sizes = np.diff(off)
    start = np.r_[rng.uniform(-1, 1, 13), rng.uniform(-1, 1)] / np.sqrt(13)
    m, v, steps = np.zeros((4, 14)), np.zeros((4, 14)), 0
    found = []
    for _ in range(ROUNDS):
        ends = []
        for i in range(4):
            w, mine = start.copy(), slice(off[i], off[i + 1])
            for step in range(steps + 1, steps + TAU + 1):
                chosen = off[i] + np.flatnonzero(rng.random(sizes[i]) < rates[mine])
                error = 1 / (1 + np.exp(-x[chosen] @ w)) - y[chosen]
                gradients = x[chosen] * error[:, None]
                if clip:
                    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
                    gradients = gradients / np.maximum(norms, 1.0)
                total = gradients.sum(0) + sigma * rng.normal(size=14)
                divisor = max(len(chosen), 1) if divisors is None else divisors[i]
                g = total / divisor
                m[i] = BETA1 * m[i] + (1 - BETA1) * g
                v[i] = BETA2 * v[i] + (1 - BETA2) * g * g
                corrected = m[i] / (1 - BETA1**step), v[i] / (1 - BETA2**step)
                w -= RATE * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)
            ends.append(w)
        steps += TAU
        start = np.average(ends, axis=0, weights=sizes)
        guess = test["x"] @ start[:13] + start[13] > 0
        found.append((guess == test["label"]).mean())
    return np.mean(found[-3:])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "how", ["non-private", "no noise", "certified", "minimum", "realized batch"]
)
def test_both_reach_the_same_accuracy(data_dir, how):
    """Means over 20 seeds, within 3.3 standard errors: one false alarm in 1,000."""
    data, test = hospitals(data_dir / "heart_disease")
    table = bench(data, test, TAU)
    setting = TwoStage(noise_for_cap(CAP, TAU, ROUNDS, 1.0, DELTA), TAU, ROUNDS, 1.0, DELTA)
    sizes = np.diff(data.silo_offsets)

    def both(seed):
        if how == "non-private":
            made = table.non_private(16)
            rates, sigma = np.repeat(np.minimum(16 / sizes, 1), sizes), 0.0
            divisors = np.minimum(16, sizes).astype(float)
        elif how == "no noise":
            made = table.without_noise(64)
            rates, sigma = np.repeat(np.minimum(64 / sizes, 1), sizes), 0.0
            divisors = np.minimum(64, sizes).astype(float)
        else:
            realized = how == "realized batch"
            policy = "certified" if how == "certified" else "minimum"
            made = table.personal(setting, ThreeLevels(), policy, seed, realized)
            rates, sigma = made.personal.assignment.rates, setting.noise_multiplier
            divisors = [
                plan.mechanism.participation.expected_batch for plan in made.federation.silos
            ]
            divisors = None if realized else divisors
        params = torch_init(table.model.init(random.key(0)), seed)
        ours = table.run(made, params, seed)[-3:].mean()
        return ours, train(data, test, seed, sigma, rates, divisors, how != "non-private")

    ours, theirs = np.array([both(seed) for seed in range(SEEDS)]).T
    error = np.hypot(ours.std(ddof=1), theirs.std(ddof=1)) / np.sqrt(SEEDS)
    assert abs(ours.mean() - theirs.mean()) < 3.3 * error
    assert error < 0.03  # small enough to tell a wrong noise or divisor
