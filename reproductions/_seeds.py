"""Where randomness of reproductions starts: another replication has other seeds throughout."""

from __future__ import annotations

from typing import Any

STRIDE = 10_000_000  # more than any reproduction has seeds
_replication = 0


def replicate(number: int) -> None:
    """From now on, ``of`` gives the seeds of this replication; 0 is the first one."""
    global _replication
    _replication = number


def of(seed: Any) -> Any:
    """The seed (or array of them) of this replication that a reproduction numbers ``seed``."""
    return seed + STRIDE * _replication
