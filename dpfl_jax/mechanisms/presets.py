"""The published mechanisms: each is a function, and a ``kind`` of the section ``mechanism``.

Options have the names of the fields of the parts that they set (``participation``,
``noise_strategies``, clip rules, ``individual_budget``, ``user_update``).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, TypedDict, Unpack

from dpfl_jax import accounting
from dpfl_jax.clipping import Adaptive, NoClip, Rule
from dpfl_jax.config.kinds import CENTRAL, CLIPS
from dpfl_jax.errors import BadInputError, one_of
from dpfl_jax.mechanisms.individual_budget import IndividualBudget
from dpfl_jax.mechanisms.mechanism import NAMED_CLIPS, Mechanism
from dpfl_jax.mechanisms.noise_strategies import (
    Banded,
    BandedInverse,
    Buffered,
    Independent,
    NoiseStrategy,
    NoNoise,
)
from dpfl_jax.mechanisms.participation import Examples, OwnerSets, Participation, Users
from dpfl_jax.mechanisms.user_update import Gradient, UnitUpdate, UserUpdate
from dpfl_jax.sampling import (
    Cyclic,
    CyclicPoisson,
    Poisson,
    RandomAllocation,
    TruncatedPoisson,
)
from dpfl_jax.sampling.schemes import SamplingScheme

Clipping = Literal["flat", "normalized", "per_layer", "automatic"]


class CommonOptions(TypedDict, total=False):
    """Options of all presets.

    Attributes:
      clip_norm: C, the largest norm of one unit's gradient.
      clipping: what a gradient of norm n is multiplied by. ``"flat"``: min(1, C/n), so that a unit
        contributes at most C. ``"normalized"``: min(1/C, 1/n), so that a unit contributes at most
        1, and the learning rate does not depend on C (De et al. 2022). ``"per_layer"``: flat for
        the gradient of each of L parameters, with C/sqrt(L) (McMahan et al. 2018); faster where
        norms need gradients, but more of the gradient is lost for the same noise.
        ``"automatic"``: 1/(n + 0.01), which does not use ``clip_norm`` (Bu et al. 2023).
      clip: a clip rule, instead of these two: ``Adaptive(...)``, ``PerGroup(...)``.
      arithmetic: how noise is drawn and added, ``"exact"`` or ``"float"``.
    """

    clip_norm: float
    clipping: Clipping
    clip: Annotated[Rule | Adaptive, CLIPS] | None
    arithmetic: accounting.NoiseLaw


class UserOptions(CommonOptions, total=False):
    """Options of the presets whose units are users.

    Attributes:
      user_learning_rate: learning rate of a user update (``UserUpdate``), which is then clipped;
        None: a user's gradient is clipped.
      user_batch_size: most examples in a local step of the update; None: all.
      user_epochs: passes of the update over the user's examples.
    """

    user_learning_rate: float | None
    user_batch_size: int | None
    user_epochs: int


def _mechanism(
    participation: Participation,
    noise: NoiseStrategy = Independent(),
    budget: IndividualBudget | None = None,
    /,
    *,
    clip_norm: float = 1.0,
    clipping: Clipping = "flat",
    clip: Rule | Adaptive | None = None,
    arithmetic: accounting.NoiseLaw = "exact",
    user_learning_rate: float | None = None,
    user_batch_size: int | None = None,
    user_epochs: int = 1,
) -> Mechanism:
    one_of("clipping", clipping, NAMED_CLIPS)
    if clip is not None and (clip_norm, clipping) != (1.0, "flat"):
        raise BadInputError(
            "mechanism.clip and mechanism.clip_norm or clipping are given: leave clip_norm and "
            "clipping out, and set the fields of clip"
        )
    update: UnitUpdate = Gradient()
    if user_learning_rate is not None:
        update = UserUpdate(
            user_learning_rate=user_learning_rate,
            user_batch_size=user_batch_size,
            user_epochs=user_epochs,
        )
    elif user_batch_size is not None or user_epochs != 1:
        raise BadInputError(
            "user_batch_size and user_epochs are options of a user update: give "
            "user_learning_rate, too, or leave them out"
        )
    return Mechanism(
        participation=participation,
        clip=NAMED_CLIPS[clipping](clip_norm) if clip is None else clip,
        noise=dataclasses.replace(noise, arithmetic=arithmetic),
        update=update,
        budget=budget,
    )


def _users(
    group_size: int,
    cohort_size: float,
    scheme: SamplingScheme,
    noise: NoiseStrategy = Independent(),
    budget: IndividualBudget | None = None,
    /,
    **common: Unpack[UserOptions],
) -> Mechanism:
    participation = Users(group_size=group_size, cohort_size=cohort_size, scheme=scheme)
    return _mechanism(participation, noise, budget, **common)


def non_private(*, batch_size: float) -> Mechanism:
    """Plain SGD on Poisson-sampled examples, without privacy: a baseline.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> rows = dpfl.Population(num_users=1000, num_examples=2000, num_units=2000)
      >>> mechanism = dpfl.non_private(batch_size=64)
      >>> calibrated = mechanism.calibrate(rows, steps=100, noise_multiplier=0.0)
      >>> calibrated.guarantee().epsilon
      inf
    """
    return Mechanism(participation=Examples(batch_size=batch_size), clip=NoClip(), noise=NoNoise())


def els(
    *,
    group_size: int,
    batch_size: float,
    sampling_prob: float | None = None,
    **common: Unpack[CommonOptions],
) -> Mechanism:
    """DP-SGD with example-level sampling, accounted for users (Charles et al. 2024, Algorithm 1).

    D_sub = at most group_size examples of each user                 # once, before training
    at each step:
      S     = each example of D_sub independently with probability p # Poisson
      g     = (sum over S of clip(grad, C) + N(0, (C sigma)^2)) / B  # B = batch_size

    p is ``sampling_prob``, or by default B / (number of examples in D_sub).

    Examples:
      >>> import dpfl_jax as dpfl
      >>> mechanism = dpfl.els(group_size=2, batch_size=64)
      >>> rows = dpfl.Population(num_users=1000, num_examples=2000, num_units=2000)
      >>> calibrated = mechanism.calibrate(rows, steps=100, epsilon=4.0, delta=1e-5)
      >>> round(calibrated.noise_multiplier, 3)
      1.095
    """
    participation = Examples(
        batch_size=batch_size, group_size=group_size, scheme=Poisson(sampling_prob)
    )
    return _mechanism(participation, **common)


def uls(
    *,
    group_size: int,
    cohort_size: float,
    sampling_prob: float | None = None,
    **common: Unpack[UserOptions],
) -> Mechanism:
    """DP-SGD with user-level sampling (Charles et al. 2024, Algorithm 2).

        at each step:
          U   = each user independently with probability q               # Poisson
          D_u = at most group_size examples of u, afresh, for u in U
          g_u = mean over D_u of grad                                    # the user's own count
          g   = (sum over U of clip(g_u, C) + N(0, (C sigma)^2)) / M     # M = cohort_size

    q is ``sampling_prob``, or by default M / (number of users).

    With ``user_learning_rate`` a step is a federated round, and g_u a user update (DP-FedAvg;
    McMahan et al. 2018).

    Examples:
      >>> import dpfl_jax as dpfl
      >>> mechanism = dpfl.uls(group_size=4, cohort_size=64)
      >>> people = dpfl.Population(num_users=1000, num_examples=9000, num_units=1000)
      >>> calibrated = mechanism.calibrate(people, steps=100, epsilon=4.0, delta=1e-5)
      >>> round(calibrated.noise_multiplier, 3)
      1.059
    """
    return _users(group_size, cohort_size, Poisson(sampling_prob), **common)


def truncated(
    *,
    group_size: int,
    cohort_size: float,
    cap: int | None = None,
    sampling_prob: float | None = None,
    **common: Unpack[UserOptions],
) -> Mechanism:
    """User-level sampling whose cohorts never exceed ``cap`` users (Chua et al. 2024).

    Source: arXiv 2411.04205, with users for examples. In a full cohort one user takes the place of
    another, which is accounted as a replacement: choose a cap that is seldom reached. By default
    it is 4 standard deviations above ``cohort_size``. (``uls``, which has no cap, reserves memory
    for cohorts some 8 standard deviations above it, which one draw in 10^15 exceeds.)

    Examples:
      >>> import dpfl_jax as dpfl
      >>> mechanism = dpfl.truncated(group_size=4, cohort_size=64, cap=96)
      >>> people = dpfl.Population(num_users=1000, num_examples=9000, num_units=1000)
      >>> calibrated = mechanism.calibrate(people, steps=100, noise_multiplier=1.0, delta=1e-5)
      >>> round(calibrated.guarantee().epsilon, 2)
      4.56
    """
    return _users(group_size, cohort_size, TruncatedPoisson(sampling_prob, cap), **common)


def allocation(
    *,
    group_size: int,
    cohort_size: float,
    period: int | None = None,
    **common: Unpack[UserOptions],
) -> Mechanism:
    """Random allocation: each user in exactly one of every ``period`` steps, drawn uniformly.

    Source: Feldman and Shenfeld, "Efficient privacy loss accounting for subsampling and random
    allocation" (2026, arXiv 2602.17284); "balls in bins" in Chua et al. 2024. With Poisson sampling
    of the same rate a user may be drawn twice in a period, or not at all. Here neither happens, so
    less noise is needed, most of all in runs of one or few periods. ``period`` is by default
    (number of users) / ``cohort_size``; if it is given, it decides how many users take part, and
    ``cohort_size`` is still the divisor.

    Departures: a user takes part in k of T steps by being allocated to one of T / k steps in each
    of k periods, independently. The paper's bound for k of T steps is for this sampling, too. A run
    may end within a period.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> mechanism = dpfl.allocation(group_size=4, cohort_size=50, period=20)
      >>> people = dpfl.Population(num_users=1000, num_examples=9000, num_units=1000)
      >>> calibrated = mechanism.calibrate(people, steps=40, noise_multiplier=1.0, delta=1e-5)
      >>> round(calibrated.guarantee().epsilon, 2)
      2.03
    """
    return _users(group_size, cohort_size, RandomAllocation(period), **common)


def bandmf(
    *,
    group_size: int,
    cohort_size: float,
    bands: int = 4,
    column: tuple[float, ...] | None = None,
    sampling_prob: float | None = None,
    **common: Unpack[UserOptions],
) -> Mechanism:
    """BandMF: ``bands`` groups of users take turns, with Poisson sampling and banded noise.

    Source: Choquette-Choo et al., "(Amplified) Banded Matrix Factorization: a unified approach to
    private training" (2023, arXiv 2306.08153), Algorithm 2 and Theorem 4, with users for examples.

        group(u) = uniform in 0 .. b-1, for each user u                   # once, before training
        at each step t:
          U   = each user of group t mod b independently with probability p
          D_u = at most group_size examples of u, afresh, for u in U
          g_t = sum over U of clip(mean over D_u of grad, C)
          g   = (g_t + C sigma (K^-1 Z)_t) / M                            # K has b bands

    b is ``bands``: the number of bands, of groups, and of steps from one turn of a user to the
    next. p is ``sampling_prob``, or by default b M / (number of users).
    Two steps of a user are at least b apart, so that K maps them to different rows: a user pays
    for T / b steps at b times the probability. The noise of a step is partly subtracted again in
    the steps that follow. Optimisers add up gradients, so this lowers the noise that matters, that
    of prefix sums.

    Departures: each user's group is drawn independently, because a partition into groups of equal
    size depends on all users. So p follows from the number of users, whatever the sizes of the
    groups are, and M is an expectation over the groups, too.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> mechanism = dpfl.bandmf(group_size=4, cohort_size=64, bands=4)
      >>> people = dpfl.Population(num_users=1000, num_examples=9000, num_units=1000)
      >>> calibrated = mechanism.calibrate(people, steps=100, epsilon=4.0, delta=1e-5)
      >>> calibrated.guarantee().epsilon <= 4.0
      True
    """
    noise = Banded(bands=bands, column=column)
    scheme = CyclicPoisson(sampling_prob, period=bands)
    return _users(group_size, cohort_size, scheme, noise, **common)


def blt(
    *,
    group_size: int,
    cohort_size: float,
    period: int | None = None,
    buffers: int = 2,
    decays: tuple[float, ...] | None = None,
    scales: tuple[float, ...] | None = None,
    horizon: int | None = None,
    **common: Unpack[UserOptions],
) -> Mechanism:
    """BLT: each user takes part at every ``period``-th step; a few buffers correlate the noise.

    Source: McMahan, Xu and Xu, "A hassle-free algorithm for private learning in practice" (2024,
    arXiv 2408.08868).

        turn(u) = uniform in 0 .. s-1, for each user u     # s = period; once, before training
        at each step t:
          U   = the users whose turn is t mod s
          D_u = at most group_size examples of u, afresh, for u in U
          g_t = sum over U of clip(mean over D_u of grad, C)
          g   = (g_t + C sigma (K^-1 Z)_t) / M

    In T steps a user takes part at most k = ceil(T / s) times, s steps apart. The accounting bounds
    how far this moves K G, and lets the attacker know whose turn it is: there is no amplification
    by sampling, and turns need not be secret. Each user's turn is drawn independently, because a
    partition into groups of equal size depends on all users.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> mechanism = dpfl.blt(group_size=4, cohort_size=50, period=20)
      >>> people = dpfl.Population(num_users=1000, num_examples=9000, num_units=1000)
      >>> calibrated = mechanism.calibrate(people, steps=100, epsilon=4.0, delta=1e-5)
      >>> calibrated.guarantee().epsilon <= 4.0
      True
    """
    noise = Buffered(buffers=buffers, decays=decays, scales=scales, horizon=horizon)
    return _users(group_size, cohort_size, Cyclic(period), noise, **common)


def banded_inverse(
    *,
    group_size: int,
    cohort_size: float,
    period: int | None = None,
    bands: int = 3,
    fractions: tuple[float, ...] | None = None,
    redrawn: bool = False,
    horizon: int | None = None,
    **common: Unpack[UserOptions],
) -> Mechanism:
    """Each user takes part at every ``period``-th step; K^-1 of the noise is banded.

    Like ``blt``, with ``BandedInverse`` in the place of ``Buffered``.

    Source: Kalinin, McKenna, Upadhyay and Lampert 2025 (arXiv 2505.12128).

    Examples:
      >>> import dpfl_jax as dpfl
      >>> mechanism = dpfl.banded_inverse(group_size=4, cohort_size=50, period=20, bands=3)
      >>> people = dpfl.Population(num_users=1000, num_examples=9000, num_units=1000)
      >>> calibrated = mechanism.calibrate(people, steps=100, epsilon=4.0, delta=1e-5)
      >>> calibrated.guarantee().epsilon <= 4.0
      True
    """
    noise = BandedInverse(bands=bands, fractions=fractions, redrawn=redrawn, horizon=horizon)
    return _users(group_size, cohort_size, Cyclic(period), noise, **common)


def owner_sets(
    *,
    group_size: int,
    cohort_size: float,
    sets_per_user: int,
    sampling_prob: float | None = None,
    **common: Unpack[UserOptions],
) -> Mechanism:
    """User-level privacy for records with several owners: sets of owners are drawn.

    S_sub = sets of owners, at most sets_per_user of each user       # once, by who owns what
    at each step:
      S     = each set of S_sub independently with probability q     # Poisson
      D_s   = at most group_size records of the set s, afresh, for s in S
      g     = (sum over S of clip(mean over D_s of grad, C) + N(0, (C sigma)^2)) / M

    Examples:
      >>> import dpfl_jax as dpfl
      >>> mechanism = dpfl.owner_sets(group_size=4, cohort_size=32, sets_per_user=3)
      >>> mails = dpfl.Population(num_users=500, num_examples=4000, num_units=900, shared=True)
      >>> calibrated = mechanism.calibrate(mails, steps=100, epsilon=4.0, delta=1e-5)
      >>> round(calibrated.noise_multiplier, 3)
      1.495
    """
    participation = OwnerSets(
        group_size=group_size,
        cohort_size=cohort_size,
        sets_per_user=sets_per_user,
        scheme=Poisson(sampling_prob),
    )
    return _mechanism(participation, **common)


def individual(
    *,
    group_size: int,
    cohort_size: float,
    refresh: int = 20,
    least_steps: int | None = None,
    renyi_order: float | None = None,
    sampling_prob: float | None = None,
    **common: Unpack[UserOptions],
) -> Mechanism:
    """``uls``, in which every user has a privacy budget of their own (Feldman and Zrnic 2021).

    Examples:
      >>> import dpfl_jax as dpfl
      >>> mechanism = dpfl.experimental.individual(group_size=4, cohort_size=64, refresh=20)
      >>> people = dpfl.Population(num_users=1000, num_examples=9000, num_units=1000)
      >>> calibrated = mechanism.calibrate(people, steps=100, epsilon=4.0, delta=1e-5)
      >>> calibrated.guarantee().epsilon <= 4.0
      True
    """
    return _users(
        group_size,
        cohort_size,
        Poisson(sampling_prob),
        Independent(),
        IndividualBudget(refresh=refresh, least_steps=least_steps, renyi_order=renyi_order),
        **common,
    )


def individual_els(
    *,
    group_size: int,
    batch_size: float,
    refresh: int = 20,
    least_steps: int | None = None,
    renyi_order: float | None = None,
    sampling_prob: float | None = None,
    **common: Unpack[CommonOptions],
) -> Mechanism:
    """``els``, in which every user has a privacy budget of their own (Feldman and Zrnic 2021).

    Examples:
      >>> import dpfl_jax as dpfl
      >>> mechanism = dpfl.experimental.individual_els(group_size=2, batch_size=64, refresh=20)
      >>> rows = dpfl.Population(num_users=1000, num_examples=2000, num_units=2000)
      >>> calibrated = mechanism.calibrate(rows, steps=100, epsilon=4.0, delta=1e-5)
      >>> calibrated.guarantee().epsilon <= 4.0
      True
    """
    participation = Examples(
        batch_size=batch_size, group_size=group_size, scheme=Poisson(sampling_prob)
    )
    return _mechanism(
        participation,
        Independent(),
        IndividualBudget(refresh=refresh, least_steps=least_steps, renyi_order=renyi_order),
        **common,
    )


PRESETS = {
    "none" if preset is non_private else preset.__name__: preset
    for preset in (
        *(non_private, els, uls, truncated, allocation, bandmf, blt, banded_inverse),
        *(owner_sets, individual, individual_els),
    )
}
for _name, _preset in PRESETS.items():
    CENTRAL.register(_preset, _name)
