"""Noise over signal, before anything is trained, and which settings would lower it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dpfl_jax.errors import BadInputError

# Noise over signal that advice must reach. Gradients are never all at the clip norm and aligned: of
# configs/subject/digits.yaml the held-out loss, 2.40 before, is 3.20 after a run at 0.75
# (privacy.epsilon=0.8), 1.56 at 0.43 and 1.08 at 0.24.
_ENOUGH = 0.5
# (the key to change, its values in order, each with what makes the configuration that has it).
Knob = tuple[str, list[tuple[Any, Callable[[], Any]]]]
Knobs = Iterable[Knob]


@dataclasses.dataclass(frozen=True)
class Balance:
    """Expected size of the noise, and the largest of the signal, in units of the learning rate.

    Attributes:
      noise: norm of the noise on a round's averaged update.
      signal: most that a round's averaged update can be.
      rounds: R.
      called: what a round is called: of central training, a step.
    """

    noise: float
    signal: float
    rounds: int
    called: str = "round"

    @property
    def ratio(self) -> float:
        """Noise over signal of the whole run; above 1 noise swamps signal."""
        if not self.noise:
            return 0.0
        return self.noise / (self.signal * math.sqrt(self.rounds))

    def to_json(self) -> dict[str, float]:
        """Plain numbers."""
        result = {self.called: self.noise / self.signal, "run": self.ratio}
        return {f"over_a_{name}": float(f"{value:.4g}") for name, value in result.items()}

    def __str__(self) -> str:
        return (
            f"noise over signal (the largest possible update): about "
            f"{self.noise / self.signal:.3g} in a {self.called}, {self.ratio:.3g} over all "
            f"{self.rounds} {self.called}s"
        )


def advice(
    balance: Balance, knobs: Knobs, balance_of: Callable[[Any], Balance | None]
) -> list[str]:
    """Sentences to print: the balance, and where noise swamps signal the values that would do.

    Args:
      balance: of what is configured.
      knobs: see ``Knobs``; asked for only if needed.
      balance_of: of another configuration.
    """
    if balance.ratio <= 1.0:
        return [str(balance)]
    found, tried = [], []
    for key, values in knobs:
        tried += [key] if values else []
        for value, changed in values:
            try:
                would_be = balance_of(changed())
            except BadInputError:  # no such mechanism, or no noise that meets the target
                continue
            if would_be is not None and would_be.ratio <= _ENOUGH:
                found.append(f"{key}={value} ({would_be.ratio:.2g})")
                break
    better = (
        f"one of these would do, the noise then being so many times the signal: {', '.join(found)}"
        if found
        else "no single change of these would do: "
        f"{', '.join(tried)}; take a smaller model, or more people"
    )
    return [f"warning: noise swamps signal: {balance}; {better}"]


def knob(config: Any, key: str, values: Sequence[Any]) -> Knob:
    """A key of a configuration with further values; of a mechanism's, an option of who is drawn."""
    section, *_, name = key.split(".")

    def changed(value: Any) -> Any:
        old = getattr(config, section)
        if section == "mechanism" and config.variant != "isrl":
            drawn = dataclasses.replace(old.participation, **{name: value})
            new = dataclasses.replace(old, participation=drawn)
        elif section == "mechanism":
            new = dataclasses.replace(old, **{name: value})
        else:
            new = old.model_copy(update={name: value})
        return config.model_copy(update={section: new})

    return key, [(value, functools.partial(changed, value)) for value in values]


def doubled(start: float, most: float, times: int = 6) -> list[float]:
    """2, 4, ... times ``start``, up to ``most``, rounded to three digits."""
    result = [float(f"{start * 2**k:.3g}") for k in range(1, times + 1)]
    return [*dict.fromkeys(min(value, most) for value in result)]
