"""One run in several processes, here two on this machine; on many, start each with its number.

``python examples/many_processes.py`` starts both; with ``HOST:PORT 2 0`` it is process 0 of 2.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import optax

import dpfl_jax as dpfl


def people(count: int) -> dpfl.ArrayStore:
    """The same in every process; each reads only what its devices need."""
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(1 + i % 5, 8)).astype(np.float32) for i in range(count)]
    return dpfl.ArrayStore.from_users(
        (f"person {i}", {"x": x, "y": x.sum(1)}) for i, x in enumerate(rows)
    )


def loss(params: dict[str, jax.Array], example: dict[str, jax.Array]) -> jax.Array:
    """Of one example."""
    return 0.5 * (example["x"] @ params["w"] - example["y"]) ** 2


def train(coordinator: str, processes: int, process: int, steps: int = 20) -> None:
    """What each process does: join the others, then train as ever."""
    jax.distributed.initialize(coordinator, processes, process)
    plan = dpfl.uls(group_size=4, cohort_size=64).plan(people(400), steps=steps, epsilon=8.0)
    result = dpfl.fit(loss, {"w": jax.numpy.zeros(8)}, plan, optax.adam(0.1))
    weights = np.round(np.asarray(result.params["w"], float), 3).tolist()
    # In one piece: the other processes write to the same terminal.
    said = f"process {process} of {processes}, {jax.device_count()} devices: {weights}\n"
    print(said, end="", flush=True)


def main(processes: int = 2) -> None:
    """Starts this file once for each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, coordinator, str(processes)]
    cpu = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    cpu.pop("XLA_FLAGS", None)
    started = [subprocess.Popen([*command, str(i)], env=cpu) for i in range(processes)]
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit("a process failed")


if __name__ == "__main__":
    train(sys.argv[1], *map(int, sys.argv[2:4])) if len(sys.argv) > 1 else main()
