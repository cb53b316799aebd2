"""Rough speeds of devices, by which strategies are chosen: a wrong guess only costs time.

The devices' rounding, however, affects the bound on norms, so the largest rounding of all attached
devices is assumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax

from dpfl_jax.errors import one_of


@dataclasses.dataclass(frozen=True)
class Machine:
    """The speeds and the rounding of a kind of device.

    Attributes:
      flops: sustained FLOPs per second of dense products.
      gram: FLOPs per second for Gram matrices, whose products have small blocks.
      exact: FLOPs per second for Gram matrices of float32 operands, which must not be rounded.
      bandwidth: bytes per second to and from its memory.
      interconnect: bytes per second to other devices; None: the memory is shared.
      rounding: relative rounding of a float32 operand in a product of default precision (bfloat16
        on TPUs, TensorFloat-32 on GPUs).
      keep_factor: per-unit gradients may be kept where they take at most this many times the
        memory of the tap records that they replace; None: where there is memory for them.
      kernel: FLOPs per second of the kernel that forms a gradient with its norm; None: there is
        none.
      mosaic: whether it is Mosaic's, which refuses meshes with axes that are not manual.
      rounds_in_loops: whether bfloat16 factors are rounded within loops, as behind them that is one
        more pass over what is stored. (On a TPU it took memory.)
      scan_traffic: how often a scan over single units moves all parameters through memory for each
        unit, in addition to the traffic of a batch.
      working_set: largest block of temporary memory, in bytes, that the C library keeps between
        calls; larger blocks come from the system page by page each time; None: no limit.
      near: bytes of temporary memory that do not slow products down, although they do not fit in
        ``cache``; None: no limit.
      cache: bytes that are fast to write and read again; None: all memory is equally fast.
    """

    flops: float
    gram: float
    exact: float
    bandwidth: float
    rounding: float
    interconnect: float | None = None
    keep_factor: float | None = None
    kernel: float | None = None
    mosaic: bool = False
    rounds_in_loops: bool = False
    scan_traffic: float = 7.0
    working_set: float | None = None
    near: float | None = None
    cache: float | None = None

    def seconds(self, flops: float, moved: float) -> float:
        """Returns the seconds that so many operations, followed by moving so many bytes, take."""
        return flops / self.flops + moved / self.bandwidth

    def sending(self, sent: float) -> float:
        """Returns the seconds for sending so many bytes to other devices."""
        return 0.0 if self.interconnect is None else sent / self.interconnect

    def holding(self, held: float) -> float:
        """Returns the extra seconds of a call that holds so many (estimated) bytes of memory."""
        if self.working_set is not None and held > _SURE * self.working_set:  # one single block
            return held / _PAGES
        return 0.0 if self.near is None else max(0.0, held - self.near) / _FAR


# Bytes per second of memory that the system hands out page by page (measured: 2.2e9 to 2.7e9).
_PAGES = 2.5e9
# Share of the working set from which an estimate counts as larger, because estimates are too low.
_SURE = 0.9
# Bytes beyond ``near`` per extra second of a step (measured: steps of transformers with 12 to 24
# MiB at a time, 5e9 to 7e9; but a transformer with 29, an LSTM with 21 and a network of two
# convolutions with 19 MB at a time were as fast as with half of that).
_FAR = 6e9

# Settings of jax_default_matmul_precision that round no more than the default does.
_AS_USUAL = (None, "default", "high", "highest", "float32", "tensorfloat32", "bfloat16_3x")

MACHINES = {
    "cpu": Machine(
        flops=6e10,
        gram=6e10,
        exact=6e10,
        bandwidth=1.5e10,
        rounding=0.0,
        keep_factor=2.0,
        working_set=2.0**25,  # glibc's DEFAULT_MMAP_THRESHOLD_MAX
        near=1.9e7,
        cache=1.2e6,
    ),
    "gpu": Machine(  # an H200 (docs/results/speed.md); float32 does not run on its tensor cores
        flops=4e14,
        gram=1.5e14,
        exact=4e13,
        bandwidth=3e12,
        interconnect=1e11,  # between the GPUs of a host
        rounding=2.0**-10,  # TensorFloat-32; some units truncate operands instead of rounding
        kernel=3.4e14,  # not measured
        rounds_in_loops=True,
    ),
    "tpu": Machine(
        flops=1.5e14,
        gram=1.5e14,
        exact=1.5e14,
        bandwidth=8e11,
        interconnect=1e11,
        rounding=2.0**-8,
        kernel=1e14,  # not measured
        mosaic=True,
    ),
}


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
# Chips that are two devices for JAX.
_HALVES = ("v2", "v3", "tpu7x")


def peak_flops(kind: str) -> float | None:
    """Returns the peak FLOP/s of one device by its ``device_kind``; None if it is not known."""
    name = kind.lower().removeprefix("tpu ").replace(" lite", "e").replace("-", " ")
    name = {"v5": "v5p"}.get(name, name)
    found = next((chip for chip in PEAK if chip == name or f" {chip} " in f" {name} "), None)
    return None if found is None else PEAK[found] / (2 if found in _HALVES else 1)


def machine_for(platform: str | None) -> Machine:
    """Returns the machine for a platform name; None: for the default backend.

    Raises:
      BadInputError: the name is unknown.
    """
    name = jax.default_backend() if platform is None else platform
    name = {"cuda": "gpu", "rocm": "gpu"}.get(name, name)
    one_of("clipped_grad: platform", name, sorted(MACHINES))
    machine = MACHINES[name]
    if name == jax.default_backend() == "gpu" and not peak_flops(jax.devices()[0].device_kind):
        # The kernel's tiles fill the shared memory of an A100 or H100; other GPUs have less.
        machine = dataclasses.replace(machine, kernel=None)
    return dataclasses.replace(machine, rounding=max(machine.rounding, _least_rounding()))


def memory_limit() -> float | None:
    """Returns half the bytes of the first device's memory, or None if they are not known."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return 0.5 * stats["bytes_limit"] if "bytes_limit" in stats else None


def _least_rounding() -> float:
    """The largest rounding of float32 products with default precision on any attached device."""
    worst = max(MACHINES[name].rounding for name in _attached())
    asked: Any = jax.config
    if asked.jax_default_matmul_precision not in _AS_USUAL:
        worst = max(worst, 2.0**-8)  # a preset such as BF16_BF16_F32
    return worst


@functools.cache
def _attached() -> tuple[str, ...]:
    attached = ["cpu"]
    for name in ("gpu", "tpu"):
        with contextlib.suppress(RuntimeError):  # no device of that kind
            if jax.devices(name):
                attached.append(name)
    return tuple(attached)
