"""What each mechanism does to one privacy unit, as ``dp_accounting.DpEvent`` objects.

A noise multiplier is the standard deviation of the noise on the *sum*, divided by the clip norm C.
Events are for add-or-remove of one unit unless their docstring says replace-one. An event does not
say who is trusted: the mechanism that returns it does.

Examples:
  >>> from dpfl_jax import accounting
  >>> event = accounting.events.els(2.0, sampling_prob=0.01, group_size=4, steps=100)
  >>> round(accounting.epsilon(event, delta=1e-5), 2)
  0.87
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import dp_accounting
import numpy as np
from dp_accounting import DpEvent, dp_event

from dpfl_jax.accounting.discretize import binomial_weights
from dpfl_jax.accounting.event_types import (
    AllocatedDpEvent,
    FilteredDpEvent,
    FixedSizeGaussianDpEvent,
    TwoStageSampledDpEvent,
)
from dpfl_jax.errors import BadInputError, positive, probability, require

LEAST_NOISE = 1e-6


def check_noise(noise_multiplier: float) -> float:
    """Returns the noise multiplier as a float; raises BadInputError unless finite and >= 0."""
    good = math.isfinite(noise_multiplier) and noise_multiplier >= 0
    require(good, "the noise multiplier", noise_multiplier, "a finite number, 0 or more")
    # Noise below a millionth of the sensitivity hides nothing and makes losses overflow: it is 0.
    return float(noise_multiplier) if noise_multiplier >= LEAST_NOISE else 0.0


def check_prob(prob: float, what: str = "sampling probability") -> float:
    """Returns the probability as a float; raises BadInputError unless in [0, 1]."""
    probability(f"the {what}", prob)
    return float(prob)


def check_count(count: int, what: str, least: int = 0) -> int:
    """Returns the count as an int; raises BadInputError unless a whole number >= ``least``."""
    good = not isinstance(count, bool) and int(count) == count and count >= least
    require(good, f"the {what}", count, f"a whole number >= {least}")
    return int(count)


def repeated(event: DpEvent, steps: int) -> DpEvent:
    """Returns ``event`` composed adaptively with itself, ``steps`` times in all."""
    steps = check_count(steps, "number of steps")
    if steps == 0:
        return dp_accounting.NoOpDpEvent()
    return dp_accounting.SelfComposedDpEvent(event, steps)


def composed(*events: DpEvent) -> DpEvent:
    """Returns the adaptive composition of several events on one data set."""
    return dp_accounting.ComposedDpEvent(list(events))


def gaussian(noise_multiplier: float, steps: int) -> DpEvent:
    """Returns the event of Gaussian sums in which every unit takes part in every step."""
    return repeated(dp_accounting.GaussianDpEvent(check_noise(noise_multiplier)), steps)


def uls(noise_multiplier: float, sampling_prob: float, steps: int) -> DpEvent:
    """Returns the event of user-level sampling: each user joins a step with probability q.

    Unit: user; add-or-remove. Charles et al. 2024, Theorem 2. The group size does not matter.

    Args:
      noise_multiplier: sigma_ULS.
      sampling_prob: q, probability of each user in each step (Poisson).
      steps: T, number of steps.
    """
    # proof: uls-event-1
    step = dp_accounting.PoissonSampledDpEvent(
        check_prob(sampling_prob), dp_accounting.GaussianDpEvent(check_noise(noise_multiplier))
    )
    return repeated(step, steps)


def individual(
    noise_multiplier: float,
    sampling_prob: float,
    least_steps: int,
    order: float,
    steps: int,
    *,
    group_size: int = 1,
) -> DpEvent:
    """Returns the event of sampling with a Renyi filter: users leave when their budget is spent.

    Unit: user; add-or-remove. Feldman and Zrnic 2021. While no user can have spent the budget, it
    is the event without a filter. Where all users take part in every step, it is one Gaussian that
    costs the budget (Koskela, Tobaben and Honkela 2023, arXiv 2209.15596).

    Args:
      noise_multiplier: sigma.
      sampling_prob: probability of each user, or of each example, in each step.
      least_steps: steps whose cost at the clip norm (of ``group_size`` examples) is each budget.
      order: Renyi order of the filter, above 1; orders of ``renyi.ORDERS`` are accounted tightly.
      steps: T, number of steps.
      group_size: largest number of examples of a user; 1 if users are drawn.
    """
    # proof: individual-event-1
    if steps <= check_count(least_steps, "number of least_steps", 1):
        return els(noise_multiplier, sampling_prob, group_size, steps)
    budget = els(noise_multiplier, sampling_prob, group_size, least_steps)
    return budget if sampling_prob == 1 else FilteredDpEvent(order, budget)


poisson = uls
"""Returns the event of DP-SGD by record: :func:`uls` with records in place of users."""


def allocated(noise_multiplier: float, period: int, steps: int) -> DpEvent:
    """Returns the event of random allocation: one random step of every ``period`` for each unit.

    Unit: any; add-or-remove. Feldman and Shenfeld 2026 (arXiv 2602.17284). The draws of different
    stretches of ``period`` steps are independent; the last stretch may be cut short.

    Args:
      noise_multiplier: sigma.
      period: t, at least 1.
      steps: T, number of steps.
    """
    sigma, period = check_noise(noise_multiplier), check_count(period, "period", 1)
    # proof: allocation-event-1
    whole, rest = divmod(check_count(steps, "number of steps"), period)
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    stretch = repeated(AllocatedDpEvent(gaussian, period, period), whole)
    if not rest:
        return stretch
    return composed(stretch, AllocatedDpEvent(gaussian, period, rest))


def banded(
    noise_multiplier: float, sampling_prob: float, column: Sequence[float], steps: int
) -> DpEvent:
    """Returns the event of cyclic Poisson sampling over b groups, with noise C^-1 Z, C banded.

    Unit: user; add-or-remove. Choquette-Choo et al. 2023 (arXiv 2306.08153), Theorem 4: a user is
    drawn in every b-th step at most, and the columns of C for these steps do not overlap. So the
    run is one Poisson-sampled Gaussian for each turn of the user, with the norm of a column as its
    sensitivity. The first group has spent most after ``steps`` steps, which cut its last column.

    Args:
      noise_multiplier: standard deviation of each entry of Z over the clip norm.
      sampling_prob: p, probability of each user in the group whose turn it is.
      column: first column of C, lower triangular and Toeplitz: b numbers, one for each group.
      steps: T, number of steps.
    """
    sigma, steps = check_noise(noise_multiplier), check_count(steps, "number of steps")
    bands = np.asarray(column, float)
    if bands.ndim != 1 or not len(bands) or not np.isfinite(bands).all() or not bands.any():
        raise BadInputError("`column` must hold a finite number for each band, not all zero")
    # proof: bandmf-event-1
    norms = np.sqrt(np.cumsum(bands**2))
    turns, rest = divmod(steps, len(bands))
    whole = uls(sigma / float(norms[-1]), sampling_prob, turns)
    if not rest or not norms[rest - 1]:
        return whole
    last = uls(sigma / float(norms[rest - 1]), sampling_prob, 1)
    return composed(whole, last) if turns else last


def toeplitz(
    noise_multiplier: float, column: Sequence[float] | np.ndarray, separation: int, steps: int
) -> DpEvent:
    """Returns the event of users taking turns, with noise C^-1 Z and no amplification: a Gaussian.

    Unit: user; add-or-remove; the schedule of turns may be known. C is lower triangular and
    Toeplitz with a column >= 0 that does not increase, so that taking part as early and as often as
    allowed is the worst case (Kalinin and Lampert 2024, arXiv 2405.13763, Theorem 2).

    Args:
      noise_multiplier: standard deviation of each entry of Z over the clip norm.
      column: first column of C, without its trailing zeros.
      separation: s, least number of steps from one turn of a user to the next.
      steps: T, number of steps.
    """
    sigma, steps = check_noise(noise_multiplier), check_count(steps, "number of steps")
    separation = check_count(separation, "separation", 1)
    given = np.asarray(column, float)
    if given.ndim != 1 or not len(given) or not (np.isfinite(given).all() and given[0] > 0):
        raise BadInputError("`column` must hold finite numbers, the first above 0")
    if given.min() < 0 or (np.diff(given) > 0).any():
        raise BadInputError(
            "`column` must hold numbers of 0 or more that do not increase: otherwise taking part "
            "early and often is not the worst case"
        )
    if not steps:
        return dp_accounting.NoOpDpEvent()
    turns = -(-steps // separation)
    padded = np.zeros(turns * separation)
    padded[: min(steps, len(given))] = given[:steps]
    # proof: toeplitz-event-1
    moved = np.cumsum(padded.reshape(turns, separation), axis=0).ravel()[:steps]
    # Each entry is a sum of at most `turns` numbers, and fsum rounds once: round up by two units in
    # the last place for every rounding.
    norm = math.sqrt(math.fsum(moved**2)) * (1 + (2 * turns + 8) * 2.0**-52)
    return dp_accounting.GaussianDpEvent(check_noise(sigma / norm))


def els(noise_multiplier: float, sampling_prob: float, group_size: int, steps: int) -> DpEvent:
    """Returns the event of example-level sampling for a user of at most ``group_size`` examples.

    Unit: user; add-or-remove. Charles et al. 2024, Theorem 1: a batch has Binomial(G, p) examples
    of the user, each moving the sum by at most C, so a step is a mixture of Gaussians. This is
    exact: for every smaller delta there is data on which the guarantee fails.

    Args:
      noise_multiplier: sigma_ELS.
      sampling_prob: p, probability of each example in each step.
      group_size: G, largest number of examples of a user in the whole run.
      steps: T, number of steps.
    """
    sigma, prob = check_noise(noise_multiplier), check_prob(sampling_prob)
    size = check_count(group_size, "group size", 1)
    if prob == 0.0:
        return dp_accounting.NoOpDpEvent()
    if size == 1:
        return uls(sigma, prob, steps)
    # proof: els-event-1
    counts, weights = binomial_weights(size, prob)
    return mixture(sigma, counts, weights, steps)


def shuffled_epochs(noise_multiplier: float, group_size: int, epochs: int) -> DpEvent:
    """Returns the event of batches cut from shuffled passes, without amplification; zero-out.

    Unit: user, whose slots stay in place with zero gradients. It is a sound fallback for runs that
    shuffle: a user's ``group_size`` examples may all fall into one batch, so that the sensitivity
    of a pass is at most G C. For ULS pass 1, as a user is in one batch of a pass.
    """
    size = check_count(group_size, "group size", 1)
    passes = check_count(epochs, "number of passes")
    return gaussian(check_noise(noise_multiplier) / size, passes)


def mixture(
    noise_multiplier: float,
    sensitivities: Sequence[float] | np.ndarray,
    probs: Sequence[float] | np.ndarray,
    steps: int,
) -> DpEvent:
    """Returns the event of a unit that moves a sum by sensitivities[i] * C w.p. probs[i], at most.

    Choquette-Choo et al. 2024 (arXiv 2310.15526), Lemma 4.5: it covers vector contributions whose
    norms are stochastically dominated.
    """
    sigma = check_noise(noise_multiplier)
    shifts = [float(s) for s in sensitivities]
    weights = [float(w) for w in probs]
    if len(shifts) != len(weights) or not shifts:
        raise BadInputError("a mixture needs as many sensitivities as probabilities, at least one")
    if min(shifts) < 0 or min(weights) < 0 or not math.isclose(sum(weights), 1.0, rel_tol=1e-9):
        raise BadInputError(
            "a mixture needs sensitivities >= 0 and probabilities >= 0 that sum to 1"
        )
    if max(shifts) == 0.0:
        return dp_accounting.NoOpDpEvent()
    return repeated(dp_event.MixtureOfGaussiansDpEvent(sigma, shifts, weights), steps)


def two_stage(
    noise_multiplier: float,
    sampling_prob: float,
    participation_prob: float,
    local_steps: int,
    rounds: int,
) -> DpEvent:
    """Returns the event of rounds of local DP-SGD in which the silo takes part at random.

    Unit: record; add-or-remove; trust: silo-local. Which silos took part is public. Liu et al. 2024
    (rPDP-FL), Lemma 2, without the slack of Renyi accounting.

    Args:
      noise_multiplier: sigma of each local step.
      sampling_prob: q, probability of this record in each local step (may differ by record).
      participation_prob: lambda, probability of the silo in each round.
      local_steps: tau, local steps in a round.
      rounds: T, number of rounds.
    """
    inner = uls(noise_multiplier, sampling_prob, 1)
    assert isinstance(inner, dp_accounting.SelfComposedDpEvent)
    step = inner.event
    lam = check_prob(participation_prob, "participation probability")
    local_steps = check_count(local_steps, "number of local steps", 1)
    if lam == 1.0:
        return repeated(step, local_steps * check_count(rounds, "number of rounds"))
    # proof: rpdp-event-1
    return repeated(TwoStageSampledDpEvent(lam, step, local_steps), rounds)


def fixed_size(noise_multiplier: float, dataset_size: int, batch_size: int, steps: int) -> DpEvent:
    """Returns the event of fixed-size batches without replacement; replace-one adjacency only.

    Balle, Barthe, Gaboardi 2018 (Theorem 11); Zhu, Dong, Wang 2022 (Proposition 30).

    Args:
      noise_multiplier: standard deviation over C; accounting doubles the sensitivity to 2C.
      dataset_size: n, the public number of units.
      batch_size: units in every batch.
      steps: T, number of steps.
    """
    size = check_count(dataset_size, "data set size", 1)
    batch = check_count(batch_size, "batch size")
    if batch > size:
        raise BadInputError(f"a batch of {batch} cannot be drawn from {size}: lower batch_size")
    if batch == 0:
        return dp_accounting.NoOpDpEvent()
    return repeated(FixedSizeGaussianDpEvent(size, batch, check_noise(noise_multiplier)), steps)


def truncated_poisson(
    noise_multiplier: float, sampling_prob: float, dataset_size: int, batch_cap: int, steps: int
) -> DpEvent:
    """Returns the event of Poisson sampling with batches cut at random to ``batch_cap`` units.

    It is dp-accounting's ``TruncatedSubsampledGaussianDpEvent``, for privacy units that are drawn
    themselves. ``dataset_size`` is the size of the larger of two neighbouring data sets: if it
    equals the cap, one more unit costs far more.
    """
    step = dp_event.TruncatedSubsampledGaussianDpEvent(
        dataset_size=check_count(dataset_size, "data set size", 1),
        sampling_probability=check_prob(sampling_prob),
        truncated_batch_size=check_count(batch_cap, "batch cap", 1),
        noise_multiplier=check_noise(noise_multiplier),
    )
    return repeated(step, steps)


def poisson_of_several(
    noise_multiplier: float,
    sampling_prob: float,
    max_units: int,
    steps: int,
    per_step_cap: int | None = None,
) -> DpEvent:
    """Returns the event of Poisson sampling for a privacy unit that has K of the units drawn.

    The unit is a user with K examples (``els``), or a subject with K records in one silo;
    add-or-remove. A batch has Binomial(K, q) of them, and with a cap Z min(Binomial(K, q), Z).
    (A sound version of LocalGroupDP of Marathe et al.)

    Args:
      noise_multiplier: constant over batches (noise that depends on the batch is not private).
      sampling_prob: q, probability of each drawn unit in each step (Poisson).
      max_units: K, enforced on the data.
      steps: steps of the whole run (in a silo: local steps times rounds).
      per_step_cap: Z, the most of the privacy unit's units kept in a batch; None for no cap.
    """
    if per_step_cap is None:
        return els(noise_multiplier, sampling_prob, max_units, steps)
    cap = check_count(per_step_cap, "batch cap", 1)
    prob = check_prob(sampling_prob)
    if prob == 0.0:
        return dp_accounting.NoOpDpEvent()
    counts, weights = binomial_weights(check_count(max_units, "records per subject", 1), prob)
    # proof: local-group-event-1
    clipped = np.minimum(counts, cap)
    values = np.unique(clipped)
    grouped = [float(weights[clipped == value].sum()) for value in values]
    return mixture(noise_multiplier, [float(v) for v in values], grouped, steps)


def any_of_several(sampling_prob: float, max_units: int) -> float:
    """Returns the probability that any of K units is in a Poisson batch, 1 - (1-q)^K."""
    prob = check_prob(sampling_prob)
    size = check_count(max_units, "records per subject", 1)
    # proof: hi-grad-avg-event-1
    return 1.0 if prob == 1.0 else -math.expm1(size * math.log1p(-prob))


def poisson_of_averaged(
    noise_multiplier: float, sampling_prob: float, max_units: int, steps: int
) -> DpEvent:
    """Returns the event of Poisson sampling for a privacy unit whose K drawn units are averaged.

    A subject under HiGradAvgDP in one silo; add-or-remove. It moves the sum by C at most, and takes
    part with probability 1 - (1-q)^K. Sampling must be Poisson and the divisor public. The
    arguments are those of :func:`poisson_of_several`.
    """
    return uls(noise_multiplier, any_of_several(sampling_prob, max_units), steps)


def user_ldp(noise_multiplier: float, steps: int, *, sensitivity: float = 2.0) -> DpEvent:
    """Returns the event of UserLDP: one clipped batch gradient per step, without amplification.

    With and without the unit, the clipped mean can point in opposite directions, so the sensitivity
    is 2C. The subject-level papers use C (Lemma 3.9 / A.2), which is not a bound: pass
    ``sensitivity=1.0`` only to show what they claim.
    """
    positive("the sensitivity", sensitivity)
    # proof: user-ldp-event-1
    return gaussian(check_noise(noise_multiplier) / sensitivity, steps)


def horizontal(silo_events: Sequence[DpEvent]) -> DpEvent:
    """Returns the composed event of a subject with records in several silos (Theorem 3.12 / 4.1).

    Args:
      silo_events: what each silo that may hold the subject does in the whole run; they may differ.
    """
    if not silo_events:
        raise BadInputError("horizontal composition needs the event of at least one silo")
    return composed(*silo_events)


def isrl_dp(noise_multiplier: float, sampling_prob: float, rounds: int) -> DpEvent:
    """Returns the event of a silo's noisy minibatches, to be accounted under replace-one adjacency.

    Unit: record of a silo; trust: silo-local (ISRL-DP, Lowy and Razaviyayn 2023), with Poisson
    sampling inside the silo. ``noise_multiplier`` is sigma * K / L in the paper's terms.
    """
    return uls(noise_multiplier, sampling_prob, rounds)


def matrix_factorization(
    noise_multiplier: float, strategy: np.ndarray, participations: np.ndarray | None = None
) -> DpEvent:
    """Returns the event of matrix factorisation (DP-FTRL): x -> A x with A = B C and noise B z.

    It is one Gaussian, whose sensitivity is the largest norm of C applied to the gradients of a
    unit, which an adversary chooses, at the steps of its participation pattern.

    Args:
      noise_multiplier: standard deviation of each entry of z over the clip norm.
      strategy: C, float [steps, steps] (or [m, steps]).
      participations: bool [patterns, steps], the steps in which a unit may take part, one row per
        possible pattern; None for one participation, in any one step.
    """
    matrix = np.asarray(strategy, dtype=float)
    if matrix.ndim != 2 or not np.all(np.isfinite(matrix)):
        raise BadInputError("the strategy must be a finite matrix with one column per step")
    gram = np.abs(matrix.T @ matrix)
    if participations is None:
        squared = float(np.max(np.diag(gram)))
    else:
        patterns = np.atleast_2d(np.asarray(participations, dtype=float))
        if patterns.shape[1] != matrix.shape[1]:
            raise BadInputError(
                f"participation patterns have {patterns.shape[1]} steps, but the strategy has "
                f"{matrix.shape[1]} columns: give one column per step"
            )
        # For vectors x_i with |x_i| <= 1: |sum_i C_i x_i|^2 <= sum_ij |<C_i, C_j>|.
        squared = float(np.max(np.einsum("ps,st,pt->p", patterns, gram, patterns)))
    sensitivity = math.sqrt(squared)
    if sensitivity == 0.0:
        return dp_accounting.NoOpDpEvent()
    return dp_accounting.GaussianDpEvent(check_noise(noise_multiplier) / sensitivity)
