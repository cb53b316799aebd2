"""A silo's mechanism: one value of which follow what a local step draws, clips, noises and costs.

    SiloMechanism(
        participation=Records(batch_size=64, max_items_per_subject=4, average="clip_then_average"),
        clip=Flat(1.0),
        noise=Independent(),
    )

Clip rules and noise are those of central mechanisms. The value is another one, because it is asked
of other numbers (``SiloFacts``, which differ from silo to silo), and because what it guarantees is
known only of all silos together (``federation.accountant``). Silos may differ in every number;
what must be equal is ``layout``: then one compiled program serves them all. ``presets`` has the
mechanisms that have names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any

import dp_accounting
import jax

from dpfl_jax.accounting.cells import NoisedSums
from dpfl_jax.clipping import ClippedGradResult, Flat, NoClip, Rule, clipped_grad
from dpfl_jax.config.kinds import CLIPS, NOISES, SILO_PARTICIPATIONS, SILOS, Kinds
from dpfl_jax.config.kinds import check_types as check_field_types
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.mechanisms.participation import (
    PersonalRecords,
    Records,
    SiloFacts,
    SiloParticipation,
    Subjects,
    WholeBatch,
)
from dpfl_jax.mechanisms.mechanism import check_bounded, check_noise_multiplier
from dpfl_jax.mechanisms.noise_strategies import Independent, NoiseStrategy, NoNoise
from dpfl_jax.mechanisms.unclipped import unclipped_sum
from dpfl_jax.mechanisms.unit_losses import LossFn, PyTree, pieces_of_user

SumFn = Callable[..., ClippedGradResult]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiloMechanism:
    """A silo's local step.

    Attributes:
      participation: which of its records a step draws, and how much of each.
      clip: bounds what a unit contributes.
      noise: ``Independent(...)`` or ``NoNoise()``.
      noise_multiplier: sigma; the noise on the sum has stddev sigma times the largest contribution.
        None until calibrated.
    """

    participation: Annotated[SiloParticipation, SILO_PARTICIPATIONS]
    clip: Annotated[Rule, CLIPS] = Flat(1.0)
    noise: Annotated[NoiseStrategy, NOISES] = Independent()
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        """Checks that the parts go together.

        Raises:
          BadInputError: they do not.
        """
        check_field_types(self)
        check_noise_multiplier(self.noise_multiplier)
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

    # ---- as a section of a configuration ---------------------------------------------------

    def to_section(self) -> dict[str, Any]:
        """What describes it in a configuration: a preset with its options, or the parts."""
        from dpfl_jax.federation.mechanisms.presets import as_preset  # which makes mechanisms

        preset = as_preset(self)
        if preset is not None:
            return preset
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: Kinds.dump(value) for name, value in fields.items()}

    to_json = to_section

    @functools.cached_property
    def kind(self) -> str:
        """The name of the preset that it is; "custom" of other combinations."""
        return str(self.to_section().get("kind", "custom"))

    @property
    def bounds(self) -> dict[str, Any]:
        """What bounds a unit's contribution: public constants, by name."""
        found: dict[str, Any] = {"clip_norm": self.clip.threshold}
        for name in ("group_size", "max_items_per_subject"):
            found[name] = getattr(self.participation, name, None)
        return found

    # ---- what runs -------------------------------------------------------------------------

    @property
    def private(self) -> bool:
        """Whether it guarantees anything."""
        return self.noise.is_private

    @property
    def unit(self) -> str:
        """Whom it protects."""
        return self.participation.unit if self.private else "none"

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
            pieces = pieces_of_user(unit, at_once)
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

    @property
    def sigma(self) -> float:
        """The noise multiplier; raises BadInputError before calibration."""
        if not self.private:
            return 0.0
        if self.noise_multiplier is None:
            raise BadInputError(
                f"this {self.kind} mechanism has no noise multiplier: set noise_multiplier, or "
                "calibrate the federation"
            )
        return self.noise_multiplier

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise on the clipped sum."""
        return self.sigma * self.clip.sensitivity if self.private else 0.0

    # ---- what is accounted -----------------------------------------------------------------

    def noised_sums(self, facts: SiloFacts, steps: int, unit: str) -> NoisedSums:
        """What is accounted of ``steps`` local steps for one record, or one subject."""
        scheme, units = self.participation.scheme(facts, unit), self.participation.num_units(facts)
        of = self.participation.contribution(unit)
        return NoisedSums(scheme, self.sigma, steps, units, contribution=of)

    def event(self, facts: SiloFacts, steps: int, unit: str | None = None) -> Any:
        """The event of ``steps`` local steps for one unit of this silo; None: its own."""
        if not self.private:
            return dp_accounting.NonPrivateDpEvent()
        return self.noised_sums(facts, steps, unit or self.unit).event()


SILOS.without_kind = SiloMechanism
for _participation in (Records, Subjects, WholeBatch, PersonalRecords):
    SILO_PARTICIPATIONS.register(_participation)
