"""Rough speeds of machines, from which ways are chosen: a wrong guess costs time, nothing else."""

from __future__ import annotations

import dataclasses

import jax

from dpfl_jax.errors import BadInputError


@dataclasses.dataclass(frozen=True)
class Machine:
    """One device.

    Attributes:
      flops: dense operations per second it sustains.
      bandwidth: bytes per second to and from its memory.
      keep_factor: per-unit gradients may be kept where they take at most this many times the
        memory of what the taps recorded, which they replace.
    """

    flops: float
    bandwidth: float
    keep_factor: float

    def seconds(self, flops: float, moved: float) -> float:
        """Time for so many operations and so many bytes, one after the other."""
        return flops / self.flops + moved / self.bandwidth


MACHINES = {
    "cpu": Machine(flops=6e10, bandwidth=1.5e10, keep_factor=2.0),
    "gpu": Machine(flops=4e14, bandwidth=3e12, keep_factor=1.0),
    "tpu": Machine(flops=1.5e14, bandwidth=8e11, keep_factor=1.0),
}


def machine_for(platform: str | None) -> Machine:
    """The machine of a platform name; None: the default backend's.

    Raises:
      BadInputError: an unknown name.
    """
    name = jax.default_backend() if platform is None else platform
    name = {"cuda": "gpu", "rocm": "gpu"}.get(name, name)
    if name not in MACHINES:
        raise BadInputError(
            f"bounded_grad: platform is {name!r}, but it must be one of {sorted(MACHINES)}"
        )
    return MACHINES[name]
