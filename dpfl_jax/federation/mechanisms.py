"""A silo's mechanism: one value that decides what a local step draws, clips, noises and costs.

    SiloMechanism(
        participation=Records(batch_size=64, max_records_per_subject=4, batch_cap=2),
        clip=Flat(1.0),
        noise=Independent(),
    )

Clip rules and noise are shared with central mechanisms. The class is another, as its methods need
a silo's public sizes (``SiloFacts``), and because its guarantee depends on all silos together
(``federation.accountant``). So the noise multiplier of a silo is in its plan
(``federation.SiloPlan``). Silos may differ in every number. Only ``layout`` must be equal, so that
one compiled program serves all of them. ``PRESETS`` are the published mechanisms: each is a
function, and a ``kind`` of the section ``mechanism``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypedDict, Unpack

import jax

from dpfl_jax import accounting
from dpfl_jax.clipping import ClippedGradResult, Flat, NoClip, Rule, clipped_grad
from dpfl_jax.clipping.gradients import unclipped_sum
from dpfl_jax.config.kinds import (
    CLIPS,
    NOISES,
    SILO_PARTICIPATIONS,
    SILOS,
    Composed,
    Kinds,
    check_types,
    fields_of,
)
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.participation import (
    PersonalRecords,
    Records,
    SiloParticipation,
    Subjects,
    WholeBatch,
)
from dpfl_jax.mechanisms.mechanism import check_bounded
from dpfl_jax.mechanisms.noise_strategies import Independent, NoiseStrategy, NoNoise
from dpfl_jax.mechanisms.participation import LossFn, PyTree, pieces_of_unit

SumFn = Callable[..., ClippedGradResult]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiloMechanism(Composed):
    """The mechanism of a silo's local steps.

    Attributes:
      participation: which of the silo's records a step draws, and how much of each subject's.
      clip: clip rule, which bounds what a unit contributes.
      noise: ``Independent(...)`` or ``NoNoise()``.

    Examples:
      >>> from dpfl_jax.federation import Records, SiloMechanism, local_item
      >>> SiloMechanism(participation=Records(sampling_prob=0.1, protected="record")).kind
      'local_item'
      >>> local_item(sampling_prob=0.1).participation.sampling_prob
      0.1
    """

    participation: Annotated[SiloParticipation, SILO_PARTICIPATIONS]
    clip: Annotated[Rule, CLIPS] = Flat(1.0)
    noise: Annotated[NoiseStrategy, NOISES] = Independent()

    kinds: ClassVar[Kinds] = SILOS

    def __post_init__(self) -> None:
        """Checks that the parts go together.

        Raises:
          BadInputError: two of the parts exclude each other.
        """
        check_types(self)
        if not isinstance(self.noise, Independent | NoNoise):
            raise BadInputError(
                f"mechanism.noise is {self.noise.kind}, but silos support only independent noise: "
                "set it to independent, or to none for a run without privacy"
            )
        if not isinstance(self.clip, Rule):
            raise BadInputError(
                f"mechanism.clip is {self.clip.kind}, but silos need a constant clip norm: take "
                "another clip rule"
            )
        if self.private:
            check_bounded(self.clip)

    def preset_options(self) -> dict[str, Any]:
        drawn = self.participation
        values = fields_of(drawn, self.noise, self.clip)
        if values.get("average") is None:
            values["average"] = "clip_then_average"  # the default of the preset that averages
        return values | {"max_records_per_subject": drawn.max_records_per_subject}

    def without_derived(self) -> SiloMechanism:
        fields = dataclasses.fields(self.participation)
        derived = {f.name: f.default for f in fields if f.metadata.get("derived")}
        drawn = dataclasses.replace(self.participation, **derived)
        return dataclasses.replace(self, participation=drawn)

    # ---- what runs -------------------------------------------------------------------------

    @property
    def privacy_unit(self) -> str:
        """What adjacency adds or removes: ``"subject"``, ``"record"``, or ``"none"``."""
        return self.participation.protected if self.private else "none"

    @property
    def layout(self) -> tuple[Any, ...]:
        """What must be equal in all silos, so that one program and one kind of event serve them."""
        return (self.participation.layout, self.rule(1.0), self.noise)

    @property
    def clip_norm(self) -> float:
        """The clip norm C; 1 for rules without one."""
        return float(getattr(self.clip, "clip_norm", 1.0))

    def rule(self, clip_norm: Any) -> Rule:
        """Returns the clip rule with another clip norm (a float, or an array on the device)."""
        if not hasattr(self.clip, "clip_norm"):
            return self.clip
        made: Any = self.clip
        return dataclasses.replace(made, clip_norm=clip_norm)

    def clipped_grad(
        self, loss_fn: LossFn, *, examples_at_once: int | None = None, **options: Any
    ) -> SumFn:
        """Returns ``(params, units, mask, weight, clip_norm) -> ClippedGradResult``.

        Args:
          loss_fn: ``(params, record) -> scalar``.
          examples_at_once: number of a unit's records that are processed at once; gradients of such
            microbatches are added up before the norm is taken, and padding takes no time. None:
            all records.
          **options: passed to ``clipping.clipped_grad``. Strategies other than ``"auto"`` and
            ``"scan"`` ignore ``examples_at_once``.
        """
        unit_loss = self.participation.unit_loss(loss_fn)
        formed = options.get("strategy", "auto") in ("auto", "scan")
        at_once = examples_at_once if formed and unit_loss is not loss_fn else None

        def cut(unit: PyTree) -> PyTree:
            assert at_once is not None
            pieces = pieces_of_unit(unit, at_once)
            return {**pieces, "there": pieces["mask"].any(axis=1)}

        def summed(
            params: PyTree, units: PyTree, mask: jax.Array, weight: jax.Array, clip_norm: jax.Array
        ) -> ClippedGradResult:
            if isinstance(self.clip, NoClip):
                return unclipped_sum(unit_loss)(params, units, mask, weight)
            large = at_once is not None and units["mask"].shape[-1] > at_once
            how = {**options, "pieces": cut} if large else options
            bounded = clipped_grad(unit_loss, rule=self.rule(clip_norm), **how)
            return bounded(params, units, mask=mask, weight=weight)

        return summed


SILOS.without_kind = SiloMechanism
for _participation in (Records, Subjects, WholeBatch, PersonalRecords):
    SILO_PARTICIPATIONS.register(_participation)


# ---- presets -------------------------------------------------------------------------------------
# Options have the names of the fields that they set in the parts (participation, clip rules,
# noise). In the pseudo-code, q is ``sampling_prob``, or by default batch_size / (records of the
# silo), and B is the divisor, the expected number of units in a draw.
#
# Sources: "text A" is Marathe et al., "Subject Granular Differential Privacy in Federated Learning"
# (2022, arXiv 2206.03617); "text B" is "Subject Level Differential Privacy with Hierarchical
# Gradient Averaging".


class SiloOptions(TypedDict, total=False):
    """Options of the presets.

    Attributes:
      batch_size: expected records per local step; give this or ``sampling_prob``.
      sampling_prob: probability q of each unit in each local step.
      max_records_per_subject: most records of a subject in a silo, L.
      clip_norm: largest norm of one unit's gradient, C.
      arithmetic: how noise is drawn and added, ``"exact"`` or ``"float"``.
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
    """FedAvg: plain local SGD without clipping and noise, a baseline (McMahan et al. 2017).

    It takes the options of the other presets, and ignores those of clipping and noise.

    Examples:
      >>> from dpfl_jax.federation import fed_avg
      >>> fed_avg(batch_size=32).private
      False
    """
    names = ("batch_size", "sampling_prob", "max_records_per_subject")
    drawn: dict[str, Any] = {name: value for name, value in common.items() if name in names}
    return SiloMechanism(participation=Records(**drawn), clip=NoClip(), noise=NoNoise())


def local_item(**common: Unpack[SiloOptions]) -> SiloMechanism:
    """LocalItemDP: DP-SGD inside each silo, which protects single records.

    Source: text A, section 5 (the item-level baseline); text B, Algorithm 1's baseline. A record is
    in one silo, so that the losses of silos do not compose.

        S   = each record of the silo independently with probability q
        g~  = (sum over S of clip(grad, C) + N(0, sigma^2 C^2)) / B

    Examples:
      >>> from dpfl_jax.federation import local_item
      >>> local_item(sampling_prob=0.1).privacy_unit
      'record'
    """
    return _mechanism(functools.partial(Records, protected="record"), **common)


def local_group(*, batch_cap: int | None = None, **common: Unpack[SiloOptions]) -> SiloMechanism:
    """LocalGroupDP: DP-SGD inside each silo, with enough noise for all records of a subject.

    Source: text A, Algorithm 1.

        S   = each record of the silo independently with probability q
        g~  = (sum over S of clip(grad, C) + N(0, sigma^2 C^2)) / B

    Departures. The paper chooses sigma for each batch, for groups of Z = the largest number of
    records of one subject in that batch, with the amplification of one record. That is not private:
    the scale of the noise is a statistic of the private batch, and neighbours differ in more than Z
    records. Here sigma is a constant, for a subject with up to L records in the silo, accounted by
    the mixture of Gaussians with Binomial(L, q) shifts. ``batch_cap`` takes the place of Z: at most
    that many records of a subject stay in a batch.

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
    clipped once. The sensitivity is the same.

    Departures. Sampling is Poisson: in batches of a fixed size, a subject's records would displace
    other records, and the sensitivity would not be C. The divisor is the constant B: the size of
    the noise would reveal the number of distinct subjects, which text A divides by. A subject is in
    a batch with probability 1 - (1-q)^L; text B accounts for q.

    Examples:
      >>> from dpfl_jax.federation import hi_grad_avg
      >>> hi_grad_avg(sampling_prob=0.1, max_records_per_subject=4).privacy_unit
      'subject'
    """
    return _mechanism(functools.partial(Records, average=average), **common)


def user_ldp(**common: Unpack[SiloOptions]) -> SiloMechanism:
    """UserLDP: the gradient of the whole batch is clipped once, and noise hides all of it.

    Source: text A, Algorithm 3; text B, Algorithm 2.

        S   = each record of the silo independently with probability q
        g~  = clip(mean over S of grad, C) + N(0, sigma^2 C^2)           # not divided by B

    Departure. The papers take C for the sensitivity, but two clipped means can point in opposite
    directions, so that it is 2C. As in the papers, no amplification by sampling is claimed.

    Examples:
      >>> from dpfl_jax.federation import user_ldp
      >>> user_ldp(batch_size=32).privacy_unit
      'subject'
    """
    return _mechanism(WholeBatch, **common)


def subject_uls(*, group_size: int = 1, **common: Unpack[SiloOptions]) -> SiloMechanism:
    """Per-silo ULS: subjects are sampled, not records, and each is clipped once.

    It is DP-SGD with user-level sampling (Charles et al. 2024, Algorithm 2) inside each silo, a
    modern alternative to the algorithms of the subject-level papers.

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
    """rPDP-FL: DP-SGD inside each silo, in which every record has its own sampling rate.

    Source: Liu et al. 2024 (CCS), "Cross-silo federated learning with record-level personalized
    differential privacy", Algorithms 1 and 3, section 6.2.

        S   = each record j of the silo independently with probability q_j
        g~  = (sum over S of clip(grad, C) + N(0, sigma^2 C^2)) / b

    Departures. b is a public constant: the paper divides by |S|, which reveals the size of the
    secret batch, and is 0 if the batch is empty. Records whose budget is spent leave; the authors'
    code only logs it. The round after which a record leaves depends only on its rate and its
    budget, and it has spent the epsilon of its rate after that many rounds. Rounds in which the
    silo does not take part are charged like all others, as amplification by participation needs.

    Examples:
      >>> from dpfl_jax.federation import rpdp
      >>> rpdp(expected_batch=32.0).privacy_unit
      'record'
    """
    if max_records_per_subject != 1:  # no event here covers a subject with several records
        raise BadInputError(
            "mechanism.kind=rpdp protects records: set mechanism.max_records_per_subject to 1"
        )
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
