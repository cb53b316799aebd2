"""What a run costs: operations over what a chip is stated, or was measured, to do."""

from __future__ import annotations

import dataclasses
import math

from dpfl_jax.errors import BadInputError

# Peak bfloat16 FLOP/s of one chip, dense: Google Cloud's TPU pages, NVIDIA's data sheets.
PEAK = {
    "v2": 45e12,
    "v3": 123e12,
    "v4": 275e12,
    "v5e": 197e12,
    "v5p": 459e12,
    "v6e": 918e12,
    "tpu7x": 2307e12,
    "a100": 312e12,
    "h100": 989e12,
    "h200": 989e12,
}
# Memory of one GPU, in bytes (NVIDIA's data sheets; the smaller A100).
GPU_BYTES = {"a100": 40 * 10**9, "h100": 80 * 10**9, "h200": 141 * 10**9}


@dataclasses.dataclass(frozen=True)
class Chip:
    """What pays for operations.

    Attributes:
      peak: FLOP/s of one chip.
      mfu: share of the peak that a run reaches, in (0, 1].
      price: of one chip for an hour, in any currency; None: no money.
      watts: of one chip; None: no energy.
      step_seconds: of a step, whatever its batch: noise, optimiser, dispatch.
    """

    peak: float
    mfu: float = 0.4
    price: float | None = None
    watts: float | None = None
    step_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.peak) and self.peak > 0):
            raise BadInputError(f"a chip of {self.peak} FLOP/s: give a number above 0")
        if not 0 < self.mfu <= 1:
            raise BadInputError(f"the MFU is {self.mfu}, but it is a share of the peak: 0 to 1")
        for name in ("price", "watts"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise BadInputError(f"the {name} of a chip is {value}, but it must be 0 or more")

    @classmethod
    def named(cls, name: str, **rest: float | None) -> Chip:
        """By its name in ``PEAK``, or by its FLOP/s written as a number.

        Raises:
          BadInputError: neither.
        """
        try:
            peak = PEAK[name] if name in PEAK else float(name)
        except ValueError:
            raise BadInputError(
                f"--chip is {name!r}, but it must be one of {', '.join(PEAK)}, or FLOP/s such as "
                "2e14"
            ) from None
        return cls(peak, **{key: value for key, value in rest.items() if value is not None})

    def bill(self, flops: float, steps: int = 0) -> dict[str, float]:
        """Chip-hours of so many operations and steps; money and kWh where price and watts are."""
        hours = (flops / (self.peak * self.mfu) + steps * self.step_seconds) / 3600.0
        found = {"flops": flops, "chip_hours": hours}
        if self.price is not None:
            found["money"] = hours * self.price
        if self.watts is not None:
            found["kwh"] = hours * self.watts / 1000.0
        return found

    def largest_budget(self, hours: float, flops_per_gradient: float, steps: int) -> int:
        """The largest power-of-two compute budget whose run takes at most so many chip-hours.

        Raises:
          BadInputError: not even one gradient a step is paid for.
        """
        one = self.bill(flops_per_gradient * steps)["chip_hours"]
        if not hours >= one:
            raise BadInputError(
                f"{hours:g} chip-hours do not pay for one gradient a step ({one:.3g}): give more, "
                "or take fewer steps"
            )
        return 2 ** int(math.log2(hours / one) + 1e-9)


def expected_rows(size: float, row: int) -> float:
    """Rows of ``row`` units that a Poisson draw of ``size`` expected units fills, in the mean.

    A row that is begun is computed in full.
    """
    from scipy import stats

    if size > 1e4:
        return size / row + 0.5
    most = int(size + 12 * math.sqrt(size) + 12)
    drawn = range(1, most + 1)
    probs = stats.poisson.pmf(drawn, size)
    return float(sum(p * -(-n // row) for n, p in zip(drawn, probs, strict=True)))
