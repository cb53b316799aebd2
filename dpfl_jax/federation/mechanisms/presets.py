"""The silo mechanisms that have names: each is a function, and a ``kind`` of ``mechanism``.

Their options are those of the parts (``participation``, clip rules, noise) under the same names.
In the pseudo-code q is ``sampling_prob``, or by default batch_size / (the silo's records), and B is
the expected size of a draw, the divisor.

Sources: "text A" is Marathe et al., "Subject Granular Differential Privacy in Federated Learning"
(2022, arXiv 2206.03617); "text B" is "Subject Level Differential Privacy with Hierarchical
Gradient Averaging".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack

from dpfl_jax import accounting
from dpfl_jax.clipping import Flat, NoClip
from dpfl_jax.config.kinds import SILOS
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.mechanisms.mechanism import SiloMechanism
from dpfl_jax.federation.mechanisms.participation import (
    PersonalRecords,
    Records,
    SiloParticipation,
    Subjects,
    WholeBatch,
)
from dpfl_jax.mechanisms.noise_strategies import Independent, NoNoise


class SiloOptions(TypedDict, total=False):
    """What presets take; see ``Records``, which most of them draw.

    Attributes:
      batch_size: expected records per local step; give this or ``sampling_prob``.
      sampling_prob: q, probability of each unit in each local step.
      max_records_per_subject: L, most records of a subject in a silo.
      clip_norm: C, the largest norm of one unit's gradient.
      arithmetic: of the noise, ``"exact"`` or ``"float"``.
    """

    batch_size: float | None
    sampling_prob: float | None
    max_records_per_subject: int
    clip_norm: float
    arithmetic: accounting.NoiseLaw


def _mechanism(
    participation: Callable[..., SiloParticipation],
    *,
    clip_norm: float = 1.0,
    arithmetic: accounting.NoiseLaw = "exact",
    **drawn: Any,
) -> SiloMechanism:
    return SiloMechanism(
        participation=participation(**drawn),
        clip=Flat(clip_norm),
        noise=Independent(arithmetic=arithmetic),
    )


def fed_avg(**common: Unpack[SiloOptions]) -> SiloMechanism:
    """FedAvg: plain local SGD, no clipping, no noise. The baseline (McMahan et al. 2017).

    It takes the options of the others, and makes nothing of those of clipping and noise.

    Examples:
      >>> from dpfl_jax.federation import fed_avg
      >>> fed_avg(batch_size=32).private
      False
    """
    names = ("batch_size", "sampling_prob", "max_records_per_subject")
    drawn: dict[str, Any] = {name: value for name, value in common.items() if name in names}
    return SiloMechanism(participation=Records(**drawn), clip=NoClip(), noise=NoNoise())


def local_item(**common: Unpack[SiloOptions]) -> SiloMechanism:
    """LocalItemDP: DP-SGD inside each silo, protecting single records.

    Source: text A, section 5 (the item-level baseline); text B, Algorithm 1's baseline. A record is
    in one silo, so silos do not compose.

        S   = each record of the silo independently with probability q
        g~  = (sum over S of clip(grad, C) + N(0, sigma^2 C^2)) / B

    Examples:
      >>> from dpfl_jax.federation import local_item
      >>> local_item(sampling_prob=0.1).privacy_unit
      'record'
    """
    return _mechanism(functools.partial(Records, protected="record"), **common)


def local_group(*, batch_cap: int | None = None, **common: Unpack[SiloOptions]) -> SiloMechanism:
    """LocalGroupDP: DP-SGD inside each silo, with noise for all of a subject's records.

    Source: text A, Algorithm 1.

        S   = each record of the silo independently with probability q
        g~  = (sum over S of clip(grad, C) + N(0, sigma^2 C^2)) / B

    Departures. The paper picks sigma anew for each batch, for groups of Z = the largest number of
    records of one subject in that batch, with the amplification of one record. That is not private
    (the scale of the noise is a statistic of the private batch) and Z is not the number of records
    by which neighbours differ. Here sigma is one constant, for a subject of up to L records in the
    silo, accounted by the mixture of Gaussians with Binomial(L, q) shifts; ``batch_cap`` is the
    honest form of Z: at most that many records of a subject stay in a batch.

    Examples:
      >>> from dpfl_jax.federation import local_group
      >>> local_group(sampling_prob=0.1, max_records_per_subject=4).privacy_unit
      'subject'
    """
    return _mechanism(functools.partial(Records, batch_cap=batch_cap), **common)


def hi_grad_avg(
    *,
    average: Literal["clip_then_average", "average_then_clip"] = "clip_then_average",
    **common: Unpack[SiloOptions],
) -> SiloMechanism:
    """HiGradAvgDP: each subject contributes the average of its clipped gradients.

    Source: text A, Algorithm 2; text B, Algorithm 1.

        S   = each record of the silo independently with probability q
        g_a = mean over subject a's records in S of clip(grad, C)        # norm <= C
        g~  = (sum over subjects of g_a + N(0, sigma^2 C^2)) / B

    With ``average="average_then_clip"`` g_a is the gradient of the mean loss of these records,
    clipped once: the same sensitivity.

    Departures. Sampling is Poisson: with batches of a fixed size a subject's records displace
    others' and the sensitivity is not C. The divisor is the constant B: the number of distinct
    subjects (text A's choice) can be read off the size of the noise. A subject is in a batch with
    probability 1 - (1-q)^L; text B accounts for q.

    Examples:
      >>> from dpfl_jax.federation import hi_grad_avg
      >>> hi_grad_avg(sampling_prob=0.1, max_records_per_subject=4).privacy_unit
      'subject'
    """
    return _mechanism(functools.partial(Records, average=average), **common)


def user_ldp(**common: Unpack[SiloOptions]) -> SiloMechanism:
    """UserLDP: the gradient of the whole batch is clipped once, and hidden entirely.

    Source: text A, Algorithm 3; text B, Algorithm 2.

        S   = each record of the silo independently with probability q
        g~  = clip(mean over S of grad, C) + N(0, sigma^2 C^2)           # not divided by B

    Departure. The papers take C for the sensitivity; two clipped means can point in opposite
    directions, so it is 2C. No amplification by sampling is claimed, as in the papers.

    Examples:
      >>> from dpfl_jax.federation import user_ldp
      >>> user_ldp(batch_size=32).privacy_unit
      'subject'
    """
    return _mechanism(WholeBatch, **common)


def subject_uls(*, group_size: int = 1, **common: Unpack[SiloOptions]) -> SiloMechanism:
    """Per-silo ULS: subjects are sampled rather than records, and clipped once each.

    The modern rival of the subject-level papers' algorithms: DP-SGD with user-level sampling
    (Charles et al. 2024, Algorithm 2) inside each silo.

        S   = each subject of the silo independently with probability q
        g_a = clip(gradient of the mean loss of up to G of a's records, C)
        g~  = (sum over S of g_a + N(0, sigma^2 C^2)) / (expected number of subjects)

    Examples:
      >>> from dpfl_jax.federation import subject_uls
      >>> subject_uls(sampling_prob=0.1, group_size=4, max_records_per_subject=8).privacy_unit
      'subject'
    """
    return _mechanism(functools.partial(Subjects, group_size=group_size), **common)


def rpdp(
    *,
    expected_batch: float | None = None,
    max_records_per_subject: int = 1,
    clip_norm: float = 1.0,
    arithmetic: accounting.NoiseLaw = "exact",
) -> SiloMechanism:
    """rPDP-FL: DP-SGD inside each silo in which every record has a sampling rate of its own.

    Source: Liu et al. 2024 (CCS), "Cross-silo federated learning with record-level personalized
    differential privacy", Algorithms 1 and 3, section 6.2.

        S   = each record j of the silo independently with probability q_j
        g~  = (sum over S of clip(grad, C) + N(0, sigma^2 C^2)) / b

    Departures. b is a public constant: the paper divides by |S|, which tells the size of the secret
    batch and is 0 when it is empty. Records whose budget is used up leave: the authors' code only
    logs it. The round after which a record leaves depends on its own rate and budget alone, and
    what it then spent is its rate's epsilon after that many rounds. Rounds in which the silo sits
    out are charged like all others, which is what makes the amplification by participation true.

    Examples:
      >>> from dpfl_jax.federation import rpdp
      >>> rpdp(expected_batch=32.0).privacy_unit
      'record'
    """
    if max_records_per_subject != 1:  # a subject of several costs what no event here says
        raise BadInputError("rpdp protects records: set max_records_per_subject to 1")
    return _mechanism(
        PersonalRecords,
        expected_batch=expected_batch,
        clip_norm=clip_norm,
        arithmetic=arithmetic,
    )


PRESETS: dict[str, Callable[..., SiloMechanism]] = {
    preset.__name__: preset
    for preset in (fed_avg, local_item, local_group, hi_grad_avg, user_ldp, subject_uls, rpdp)
}
for _name, _preset in PRESETS.items():
    SILOS.register(_preset, _name)
