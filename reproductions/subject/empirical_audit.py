"""An attack on one subject, to see which calibrations are broken in practice.

The worst case of the accountant, simulated: all of the target's record gradients point in one
direction with norm C, nobody else contributes there. An attacker who sees every local step decides
by the likelihood ratio whether the target took part. From true and false positive rates over many
simulated runs follows a lower bound on epsilon with 99 % confidence (Clopper-Pearson, both rates;
Jagielski et al. 2020, "Auditing differentially private machine learning").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats

from dpfl_jax import accounting
from dpfl_jax.accounting import events
from reproductions._plots import columns, panel
from reproductions._seeds import of
from reproductions.registry import Claim, Outcome, Settings, Source
from reproductions.subject import _closed_forms

TITLE = "an attack that tells which calibrations are broken"
SOURCE = "Marathe et al., texts A and B; likelihood-ratio attack on the worst-case subject"

EPSILON, DELTA = 4.0, 1e-5
RECORDS, BATCH, CAP, STEPS = 2000, 64, 10, 200
Q = BATCH / RECORDS
CONFIDENCE = 0.99
OTHERS = 1000  # coordinates besides the one along which the target's gradients point
NO_MORE, MORE = "no attack finds more than epsilon 4", "an attack finds more than epsilon 4"


def lower_bound(hits: int, false_alarms: int, trials: int, delta: float = DELTA) -> float:
    """Epsilon that the rates imply at least, with confidence 0.99."""
    slack = (1 - CONFIDENCE) / 2
    least = stats.beta.ppf(slack, hits, trials - hits + 1) if hits else 0.0
    most = stats.beta.ppf(1 - slack, false_alarms + 1, trials - false_alarms)
    return float(max(0.0, math.log(max(least - delta, 1e-300) / most)))


def attack(
    score: Callable[[np.random.Generator, bool], np.ndarray], trials: int, delta: float = DELTA
) -> float:
    """The best lower bound: the threshold is chosen on one half, the bound taken on the other."""
    rng = np.random.default_rng(of(0))
    inside, outside = score(rng, True), score(rng, False)
    half = trials // 2
    candidates = np.quantile(outside[:half], [0.5, 0.9, 0.99, 0.999, 0.9999, 1.0])

    def bound(threshold: float, part: slice) -> float:
        return lower_bound(
            int((inside[part] > threshold).sum()),
            int((outside[part] > threshold).sum()),
            half,
            delta,
        )

    best = max(candidates, key=lambda t: bound(float(t), slice(0, half)))
    return bound(float(best), slice(half, 2 * half))


def constant_noise(sigma: float, average: bool, trials: int) -> Callable[..., np.ndarray]:
    """Log-likelihood ratios of runs with one noise; ``average``: the target moves by C at most."""
    counts = np.arange(CAP + 1)
    weights = stats.binom.pmf(counts, CAP, Q)
    shifts = np.minimum(counts, 1) if average else counts

    def score(rng: np.random.Generator, inside: bool) -> np.ndarray:
        total = np.zeros(trials)
        for _ in range(STEPS):
            shift = shifts[rng.binomial(CAP, Q, trials)] if inside else 0
            y = shift + sigma * rng.standard_normal(trials)
            terms = np.log(weights)[:, None] + (
                y[None, :] * shifts[:, None] - shifts[:, None] ** 2 / 2
            ) / (sigma * sigma)
            total += np.logaddexp.reduce(terms, axis=0)
        return total

    return score


def batch_noise(table: np.ndarray, dimensions: int, trials: int) -> Callable[..., np.ndarray]:
    """The same where sigma follows the batch: others have one record each, so Z is the target's.

    The noise of the other ``dimensions`` coordinates shows which sigma was used.
    """
    counts = np.arange(CAP + 1)
    log_weights = stats.binom.logpmf(counts, CAP, Q)
    sigma_of = table[np.clip(counts, 1, CAP) - 1]

    def log_density(y: np.ndarray, rest: np.ndarray, shift: float, sigma: float) -> np.ndarray:
        spread = -(dimensions + 1) * math.log(sigma) - rest / (2 * sigma * sigma)
        return spread - (y - shift) ** 2 / (2 * sigma * sigma)

    def score(rng: np.random.Generator, inside: bool) -> np.ndarray:
        total = np.zeros(trials)
        for _ in range(STEPS):
            count = rng.binomial(CAP, Q, trials) if inside else np.zeros(trials, int)
            sigma = sigma_of[count]
            y = count + sigma * rng.standard_normal(trials)
            rest = sigma * sigma * rng.chisquare(dimensions, trials)
            terms = [
                w + log_density(y, rest, float(c), float(s))
                for c, w, s in zip(counts, log_weights, sigma_of, strict=True)
            ]
            total += np.logaddexp.reduce(terms, axis=0) - log_density(
                y, rest, 0.0, float(sigma_of[0])
            )
        return total

    return score


def run(settings: Settings) -> Outcome:
    """Attacks the sound mechanisms and the papers', whose noise is by the moments accountant."""
    trials = 20_000 if settings.quick else 400_000
    item = _closed_forms.moments_noise(EPSILON, DELTA, Q, STEPS)
    hi = accounting.calibrate_noise_multiplier(
        lambda s: events.poisson_of_averaged(s, Q, CAP, STEPS), EPSILON, DELTA
    )
    group = accounting.calibrate_noise_multiplier(
        lambda s: events.poisson_of_several(s, Q, CAP, STEPS), EPSILON, DELTA
    )
    table = np.array(
        [
            _closed_forms.noise_by_group(EPSILON, DELTA, z, Q, STEPS, moments=True)
            for z in range(1, CAP + 1)
        ]
    )
    # Name, what is claimed of it, by whom, epsilon by the accountant, attack.
    cases: list[tuple[str, str, Source, float, Callable[..., np.ndarray]]] = [
        (
            "sound HiGradAvgDP",
            NO_MORE,
            "ours",
            accounting.epsilon(events.poisson_of_averaged(hi, Q, CAP, STEPS), DELTA),
            constant_noise(hi, True, trials),
        ),
        (
            "sound LocalGroupDP",
            NO_MORE,
            "ours",
            accounting.epsilon(events.poisson_of_several(group, Q, CAP, STEPS), DELTA),
            constant_noise(group, False, trials),
        ),
        (
            "text B, HiGradAvgDP, noise of one record",
            MORE,  # that it has epsilon 4 is a claim of the audit by the accountant
            "ours",
            accounting.epsilon(events.poisson_of_averaged(item, Q, CAP, STEPS), DELTA),
            constant_noise(item, True, trials),
        ),
        (
            "LocalGroupDP, noise by the batch",
            NO_MORE,
            "paper",
            math.inf,
            batch_noise(table, OTHERS, trials),
        ),
    ]
    claims: list[Claim] = []
    rows: list[dict[str, Any]] = []
    for name, claimed, source, real, score in cases:
        with settings.console.status(name):
            found = attack(score, trials)
        rows.append({"mechanism": name, "claimed": EPSILON, "real": real, "attack": found})
        holds = (found > EPSILON) == (claimed == MORE)
        note = "by the attack, with 99 % confidence"
        claims.append(
            Claim(f"{name}: {claimed}", f">= {found:.3g}", EPSILON, holds, note, source=source)
        )
    file = settings.out / "subject_empirical_audit.png"
    _draw(rows, file)
    note = (
        f"one silo, {RECORDS} records, batch {BATCH}, K={CAP}, {STEPS} steps; {trials} simulated "
        "runs with and without the subject; what an attack can show is limited by their number to "
        f"epsilon {math.log(trials / 2 / -math.log((1 - CONFIDENCE) / 2)):.1f}"
    )
    adversary = (
        "the attacker sees each local step, over which the papers compose, where their server sees "
        "a round's update; and it is the worst case: nobody else contributes along the target's "
        f"direction, all others have one record in a batch, and {OTHERS:,} other coordinates show "
        "the size of the noise"
    )
    return Outcome(claims, [file], rows, [note, adversary])


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file, size=(8, 3)) as axes:
        bars = axes.barh(*columns(rows, "mechanism", "attack"))
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.axvline(EPSILON, color="C3", ls="--", label="claimed")
        axes.set_xlabel("epsilon shown by the attack (99 % confidence)")
