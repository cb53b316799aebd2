"""``Guarantee``: what a run, a plan or a reproduction promises, never an epsilon alone."""

from __future__ import annotations

import dataclasses
import decimal
import math
import re
import textwrap
from typing import Any, Literal

from dpfl_jax.errors import BadInputError, one_line
from dpfl_jax.task import EACH_ROW

_LISTS = ("assumptions", "caveats", "public_inputs")
Status = Literal["upper bound", "exact", "paper's closed form", "none"]


def without_infinities(values: Any) -> Any:
    """Returns the values with each infinity, which JSON lacks, replaced by the string "inf"."""
    if isinstance(values, dict):
        return {name: without_infinities(value) for name, value in values.items()}
    if isinstance(values, list):
        return [without_infinities(value) for value in values]
    return "inf" if values == math.inf else values


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """A differential-privacy guarantee with everything needed to judge it.

    Attributes:
      unit: what it protects: "user", "subject", "record", "example", "none".
      adjacency: how neighbouring data sets differ, e.g. "add-or-remove one user".
      trust: who is trusted: "central", "silo-local", "shuffle", "local".
      epsilon: in nats; ``inf`` if there is no guarantee.
      delta: in (0, 1).
      noise_multiplier: standard deviation of the noise over the clip norm.
      accountant: how epsilon was computed.
      sampling: the sampling that ran (not the one that was assumed).
      assumptions: what must hold for the guarantee to hold.
      caveats: what the guarantee does not cover.
      status: what kind of number epsilon is.
      steps: steps accounted, if known.
      released: what the adversary sees.
      unit_key: what makes a unit: the column or key of the data, as "column visit_id".
      public_inputs: what entered the run and is assumed to be public, each with its name; the
        guarantee does not protect it.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> people = dpfl.Population(num_users=1000, num_examples=9000, num_units=1000)
      >>> mechanism = dpfl.uls(group_size=4, cohort_size=64)
      >>> calibrated = mechanism.calibrate(people, steps=100, noise_multiplier=1.0, delta=1e-5)
      >>> guarantee: dpfl.Guarantee = calibrated.guarantee()
      >>> guarantee.unit, guarantee.adjacency, round(guarantee.epsilon, 2)
      ('user', 'add-or-remove one user', 4.48)
    """

    unit: str
    adjacency: str
    trust: str
    epsilon: float
    delta: float
    noise_multiplier: float
    accountant: str
    sampling: str
    assumptions: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    status: Status = "upper bound"
    steps: int | None = None
    released: str = "every intermediate model"
    unit_key: str = ""
    public_inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if math.isnan(self.epsilon) or self.epsilon < 0:
            raise BadInputError(f"a guarantee's epsilon must be at least 0, not {self.epsilon}")
        if not 0.0 <= self.delta <= 1.0:
            raise BadInputError(f"a guarantee's delta must be in [0, 1], not {self.delta}")
        for name in _LISTS:
            object.__setattr__(self, name, tuple(map(one_line, getattr(self, name))))
        # A column's name may hold line breaks.
        object.__setattr__(self, "unit_key", one_line(self.unit_key))

    @property
    def private(self) -> bool:
        """Whether there is a guarantee: epsilon is finite and delta is below 1."""
        return math.isfinite(self.epsilon) and self.delta < 1.0

    def to_json(self) -> dict[str, Any]:
        """Returns all fields as JSON values; an infinite epsilon becomes the string "inf"."""
        out = dataclasses.asdict(self)
        out |= {name: list(getattr(self, name)) for name in _LISTS}
        return without_infinities(out)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Guarantee:
        """Returns the guarantee that :meth:`to_json` wrote; unknown keys are ignored."""
        names = {field.name for field in dataclasses.fields(cls)}
        kept = {key: value for key, value in values.items() if key in names}
        kept["epsilon"] = float(kept["epsilon"])
        return cls(**kept)

    def summary(self) -> str:
        """Returns the guarantee in one line, with epsilon and delta rounded up."""
        if not self.private:
            return "NO differential-privacy guarantee"
        unverified = "" if self.status in ("upper bound", "exact") else ", not verified"
        return (
            f"epsilon {rounded_up(self.epsilon, 4)}, delta {rounded_up(self.delta, 3)} for each "
            f"{self.whose} ({self.adjacency}; trust model: {self.trust}{unverified})"
        )

    def in_short(self, meaning: str) -> list[str]:
        """Returns lines: the unit, the numbers, what they mean, and the last three caveats.

        Args:
          meaning: a sentence of ``Meaning``.
        """
        if not self.private:
            return [self.summary()]
        epsilon, delta = rounded_up(self.epsilon, 4), rounded_up(self.delta, 3)
        # The caveats of this very run come last.
        left_out = [re.split(": |; ", caveat)[0] for caveat in reversed(self.caveats[-3:])]
        return [
            f"protects each {self.whose} ({self.adjacency}; trust model: {self.trust})",
            f"epsilon {epsilon}, delta {delta}",
            meaning,
            *(f"not covered: {textwrap.shorten(clause, 200)}" for clause in left_out),
        ]

    @property
    def whose(self) -> str:
        """The unit with the column or key that defines it: "user by column visit_id"."""
        if self.unit_key == EACH_ROW:
            return EACH_ROW
        return f"{self.unit} by {self.unit_key}" if self.unit_key else self.unit

    def paragraph(self) -> str:
        """Returns the guarantee in words that a privacy officer can check, rounded up."""
        if not self.private:
            text = (
                "This gives NO differential-privacy guarantee "
                f"(unit: {self.unit}; sampling: {self.sampling})."
            )
        else:
            kind = {
                "upper bound": "an upper bound",
                "exact": "exact",
                "paper's closed form": "the paper's closed form, not verified by an accountant",
                "none": "no verified bound",
            }[self.status]
            epsilon, delta = rounded_up(self.epsilon, 6), rounded_up(self.delta, 6)
            text = (
                f"({epsilon}, {delta})-differential privacy for each "
                f"{self.whose}, with neighbouring data sets that differ by: {self.adjacency}. "
                f"Trust model: {self.trust}. It covers {self.released}. The noise multiplier is "
                f"{self.noise_multiplier:.7g}; sampling: {self.sampling}. Epsilon is {kind}, "
                f"computed by: {self.accountant}."
            )
        if self.public_inputs:
            listed = "; ".join(self.public_inputs)
            text += f" Assumed to be public, and not protected: {listed}."
        if self.assumptions:
            text += " It assumes: " + "; ".join(self.assumptions) + "."
        if self.caveats:
            text += " Caveats: " + "; ".join(self.caveats) + "."
        return text

    def __str__(self) -> str:
        return self.paragraph()

    def compare(self, other: Guarantee) -> str:
        """Returns whether this guarantee is stronger than ``other``.

        Returns:
          "equal"; "stronger" (epsilon and delta are at most as large, and one is smaller);
          "weaker"; or "incomparable" (one has the smaller epsilon, the other the smaller delta).

        Raises:
          BadInputError: unit, adjacency or trust differ, so that the numbers mean different things.
        """
        for name in ("unit", "adjacency", "trust"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise BadInputError(
                    f"these guarantees cannot be compared: their {name} differs "
                    f"({mine!r} and {theirs!r})"
                )
        mine_better = self.epsilon <= other.epsilon and self.delta <= other.delta
        theirs_better = other.epsilon <= self.epsilon and other.delta <= self.delta
        if mine_better and theirs_better:
            return "equal"
        if mine_better:
            return "stronger"
        return "weaker" if theirs_better else "incomparable"


def rounded_up(value: float, digits: int) -> str:
    """Returns an epsilon or delta rounded up to ``digits`` significant digits."""
    rounding = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return f"{float(rounding.create_decimal(repr(float(value)))):.{digits}g}"


def delta_caveats(delta: float, units: int, what: str) -> tuple[str, ...]:
    """Returns a caveat if delta is at least one over the number of units, else nothing.

    Args:
      delta: delta of the guarantee.
      units: public number of units.
      what: the units' name in the plural.

    Examples:
      >>> from dpfl_jax.accounting import delta_caveats
      >>> delta_caveats(1e-5, 1000, "users"), len(delta_caveats(0.01, 1000, "users"))
      ((), 1)
    """
    if delta * units < 1:
        return ()
    return (
        f"delta {delta:.3g} is not below one over the {units:,} {what}: publishing each of them in "
        "full with that probability would be allowed by it; set a smaller one",
    )
