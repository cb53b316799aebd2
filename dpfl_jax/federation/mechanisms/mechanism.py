"""A silo's mechanism: one value of which follow what a local step draws, clips, noises and costs.

    SiloMechanism(
        participation=Records(batch_size=64, max_records_per_subject=4, batch_cap=2),
        clip=Flat(1.0),
        noise=Independent(),
    )

Clip rules and noise are those of central mechanisms. The value is another one, because it is asked
of other numbers (``SiloFacts``, which differ from silo to silo), and because what it guarantees is
known only of all silos together (``federation.accountant``). So the noise of a silo is its plan's
(``federation.SiloPlan``). Silos may differ in every number;
what must be equal is ``layout``: then one compiled program serves them all. ``presets`` has the
mechanisms that have names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jax

from dpfl_jax.clipping import ClippedGradResult, Flat, NoClip, Rule, clipped_grad
from dpfl_jax.clipping.unclipped import unclipped_sum
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
from dpfl_jax.federation.mechanisms.participation import (
    PersonalRecords,
    Records,
    SiloParticipation,
    Subjects,
    WholeBatch,
)
from dpfl_jax.mechanisms.mechanism import check_bounded
from dpfl_jax.mechanisms.noise_strategies import Independent, NoiseStrategy, NoNoise
from dpfl_jax.mechanisms.unit_losses import LossFn, PyTree, pieces_of_unit

SumFn = Callable[..., ClippedGradResult]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiloMechanism(Composed):
    """A silo's local step.

    Attributes:
      participation: which of its records a step draws, and how much of each.
      clip: bounds what a unit contributes.
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
          BadInputError: they do not.
        """
        check_types(self)
        if not isinstance(self.noise, Independent | NoNoise):
            raise BadInputError(
                f"mechanism.noise is {self.noise.kind}, but silos have independent noise, or none"
            )
        if not isinstance(self.clip, Rule):
            raise BadInputError(
                f"mechanism.clip is {self.clip.kind}, but the clip norm of silos is a constant: "
                "take another clip rule"
            )
        if self.private:
            check_bounded(self.clip)

    def preset_options(self) -> dict[str, Any]:
        drawn = self.participation
        values = fields_of(drawn, self.noise, self.clip)
        if values.get("average") is None:
            values["average"] = "clip_then_average"  # of the preset that averages
        return values | {"max_records_per_subject": drawn.max_records_per_subject}

    def without_derived(self) -> SiloMechanism:
        fields = dataclasses.fields(self.participation)
        derived = {f.name: f.default for f in fields if f.metadata.get("derived")}
        drawn = dataclasses.replace(self.participation, **derived)
        return dataclasses.replace(self, participation=drawn)

    @property
    def bounds(self) -> dict[str, Any]:
        """What bounds a unit's contribution: public constants, by name."""
        found: dict[str, Any] = {"clip_norm": self.clip.threshold}
        for name in ("group_size", "max_records_per_subject"):
            found[name] = getattr(self.participation, name, None)
        return found

    # ---- what runs -------------------------------------------------------------------------

    @property
    def private(self) -> bool:
        """Whether it guarantees anything."""
        return self.noise.is_private

    @property
    def privacy_unit(self) -> str:
        """Whom it protects, what adjacency adds or removes."""
        return self.participation.protected if self.private else "none"

    @property
    def layout(self) -> tuple[Any, ...]:
        """What must be equal in all silos: one program and one kind of event serves them."""
        return (self.participation.layout, self.rule(1.0), self.noise)

    @property
    def clip_norm(self) -> float:
        """C, above which gradients are clipped; 1 of rules that have no such norm."""
        return float(getattr(self.clip, "clip_norm", 1.0))

    def rule(self, clip_norm: Any) -> Rule:
        """The clip rule at a clip norm (a float, or an array on the device)."""
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
          examples_at_once: of a unit that holds more records, so many are processed at once, and
            gradients are added up before the norm is taken: padding takes no time. None: all.
          **options: passed to ``clipping.clipped_grad``; strategies other than ``"auto"`` and
            ``"scan"`` process a unit at once.
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
