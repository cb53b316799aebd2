"""One run in many processes: how they start, agree, and end if one of them is lost.

Every process runs the same program. Process 0 alone writes the report, the metrics and the ledger,
and sends what only it can decide (is this run new?) to the others. An error in one process is sent
to all, so that a bad input ends every process with one sentence instead of leaving the rest
waiting. The secret root key is never sent: it is read from the run directory, which all share.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpfl_jax.buckets import as_given
from dpfl_jax.config.execution import ProcessesConfig
from dpfl_jax.errors import BadInputError, StoppedError, UnreachableError, one_of
from dpfl_jax.randomness import RootKey

T = TypeVar("T")

ENVIRONMENT = ("DPFL_COORDINATOR", "DPFL_NUM_PROCESSES", "DPFL_PROCESS_ID")
MODE = "DPFL_PROCESSES"


class AgreedError(BadInputError):
    """A bad input that every process knows of, so that all end by themselves."""


def is_primary() -> bool:
    """Whether this process writes what is written once (process 0)."""
    return jax.process_index() == 0


def many() -> bool:
    """Whether the run has more than one process."""
    return jax.process_count() > 1


def start(section: ProcessesConfig) -> bool:
    """Joins the other processes, if there are any; must come before JAX's first use of a device.

    Args:
      section: whether, and for how long, to look for the others. Where they are is given by
        ``DPFL_COORDINATOR``, ``DPFL_NUM_PROCESSES`` and ``DPFL_PROCESS_ID``, or by the cluster.

    Returns:
      Whether this is one of several processes.

    Raises:
      BadInputError: not enough is known, or the others did not come in time.
    """
    known = {name: os.environ[name] for name in ENVIRONMENT if os.environ.get(name)}
    for name in ENVIRONMENT[1:]:
        if not known.get(name, "0").isdecimal():
            raise BadInputError(f"{name} is {known[name]!r}, but it must be a whole number")
    mode = section.mode
    if mode == "auto" and os.environ.get(MODE):
        mode = os.environ[MODE]  # type: ignore[assignment]
        one_of(MODE, mode, ("auto", "detect", "one"))
    if mode == "one" or (mode == "auto" and not known and not _many_are_announced()):
        if jax.process_count() > 1:  # the accelerators of a slice know of each other
            raise BadInputError(
                f"this is one of {jax.process_count()} processes of a slice, but they were not "
                f"joined: set {MODE}=detect in all of them"
            )
        return False
    if known and len(known) < len(ENVIRONMENT):
        missing = next(name for name in ENVIRONMENT if name not in known)
        raise BadInputError(
            f"{next(iter(known))} is set, but {missing} is not: set all three, or none where the "
            "cluster provides them (TPU slices, SLURM, Open MPI)"
        )
    address, total, mine = (known.get(name, "0") for name in ENVIRONMENT)
    if known and not int(mine) < int(total):
        raise BadInputError(
            f"{ENVIRONMENT[2]} is {mine}, but it must be below {ENVIRONMENT[1]}, {total}"
        )
    if total == "1":
        return False
    options: dict[str, Any] = {
        "initialization_timeout": section.start_timeout_s,
        # Later than ``Watch``: JAX ends the process without saying how to resume.
        "heartbeat_timeout_seconds": 2 * section.lost_after_s,
        "shutdown_timeout_seconds": section.start_timeout_s,
    }
    if known:
        options |= {
            "coordinator_address": address,
            "num_processes": int(total),
            "process_id": int(mine),
            "cluster_detection_method": "deactivate",
        }
    # The service tells all processes that one of them got SIGTERM (``stops_after``).
    jax.config.update("jax_enable_preemption_service", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Programs that send to each other must run in the same order everywhere; on accelerators a
    # stream sees to that.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        where = f"at {address}" if known else "of this cluster"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInputError(
            f"the processes {where} could not be joined ({reason}): check that all are started "
            f"with the same {ENVIRONMENT[0]} within processes.start_timeout_s = "
            f"{section.start_timeout_s} s"
        ) from None
    return many()


def _many_are_announced() -> bool:
    """Whether the environment says that this is one of several processes."""
    for total, member in (
        ("SLURM_NTASKS", "SLURM_STEP_NODELIST"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ):
        if member in os.environ and os.environ.get(total, "1").isdigit():
            return int(os.environ.get(total, "1")) > 1
    if "JAX_COORDINATOR_ADDRESS" in os.environ or "MEGASCALE_COORDINATOR_ADDRESS" in os.environ:
        return True
    return "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")


# ---- messages between processes ------------------------------------------------------------------


def gather(value: Any) -> list[Any]:
    """Returns the values (plain JSON) of all processes, in their order. All must call it."""
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(data)))).reshape(-1)
    # Whole pages: a program is compiled for each size.
    padded = np.zeros(-(-int(lengths.max()) // 512) * 512, np.uint8)
    padded[: len(data)] = data
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(row[:n].tobytes()) for row, n in zip(rows, lengths)]


def broadcast(value: Any) -> Any:
    """Returns process 0's value (plain JSON) in every process. All must call it."""
    return gather(value if is_primary() else None)[0]


def fresh_key() -> RootKey:
    """A new secret root key, the same in every process (for runs without a directory).

    It crosses the network between the processes; a run with a directory reads it there instead.
    """
    secret = broadcast(RootKey.generate().secret.hex() if is_primary() else None)
    return RootKey(bytes.fromhex(secret))


def on_all_hosts(action: Callable[[], T]) -> T:
    """Runs ``action`` in every process; a bad input in one of them is raised in all.

    Raises:
      AgreedError: the first process's sentence, if any process has one.
    """
    if not many():
        return action()
    result, sentence = None, None
    try:
        result = action()
    except BadInputError as error:
        sentence = str(error)
    for process, refusal in enumerate(gather(sentence)):
        if refusal is not None:
            raise AgreedError(f"{refusal} (process {process})" if process else refusal)
    return result  # type: ignore[return-value]


def on_primary(action: Callable[[], T]) -> T | None:
    """Runs ``action`` in process 0 while the others wait; returns its result there, None here.

    Raises:
      AgreedError: in every process, with process 0's sentence.
    """
    return on_all_hosts(lambda: action() if is_primary() else None)


def check_same(facts: Mapping[str, Any]) -> None:
    """Checks that all processes hold the same facts (plain JSON; nothing secret).

    Raises:
      AgreedError: names the first fact that differs. Training would otherwise sample from another
        distribution than the accounted one, or add parts of different noise.
    """
    if not many():
        return
    everywhere = gather(dict(facts))
    for process, other in enumerate(everywhere[1:], start=1):
        for name, value in everywhere[0].items():
            if other.get(name) != value:
                raise AgreedError(
                    f"process {process} has another {name} than process 0: give all processes the "
                    "same command, package versions, data and run directory"
                )


# ---- stopping ------------------------------------------------------------------------------------


def hear_sigterm() -> bool:
    """Whether JAX's preemption service listens for SIGTERM in all of several processes."""
    # Not public: JAX says it only by the error of ``reached_preemption_sync_point``.
    from jax._src.distributed import global_state

    return many() and global_state.preemption_sync_manager is not None


def stops_after(step: int) -> bool:
    """Whether the processes agreed to stop after this step, because one of them got SIGTERM.

    Every process must call it after every step, with numbers that increase by one. It sends nothing
    unless there was a signal.
    """
    return hear_sigterm() and multihost_utils.reached_preemption_sync_point(step)


# ---- ending --------------------------------------------------------------------------------------


@contextlib.contextmanager
def synchronized_shutdown(how: str, section: ProcessesConfig) -> Iterator[None]:
    """Ends all processes at once, with one sentence, if one of them fails.

    An error or a stop that all processes know of passes through. Anything else ends this process
    without waiting for the others, which would otherwise wait for it; their ``Watch`` ends them.

    Args:
      how: how to resume, for the sentence, e.g. ``--run-dir runs/mine``.
      section: how long a process may be silent.
    """
    if not many():
        yield
        return
    exit_message = ExitMessage(how)

    def leave(text: str, status: int) -> None:
        exit_message.cancel()
        print_and_exit(as_given(text), status)

    watch = Watch(section.lost_after_s, lambda lost: leave(lost_message(lost, how), 1))
    try:
        yield
    except (AgreedError, StoppedError) as error:
        watch.stop()
        exit_message.cancel()
        if not is_primary():
            raise SystemExit(2 if isinstance(error, AgreedError) else 1) from None
        raise
    except BaseException as error:
        if isinstance(error, BadInputError):
            leave(f"error: {error} (process {jax.process_index()})", 2)
        if isinstance(error, UnreachableError):
            leave(f"{error} (process {jax.process_index()})", 1)
        if _is_about_others(error):
            leave(lost_message(None, how), 1)
        traceback.print_exc()
        leave(f"process {jax.process_index()} failed, and the others will stop too", 1)
    watch.stop()
    exit_message.cancel()


_ABOUT_OTHERS = (
    "gloo",
    "nccl",
    "heartbeat",
    "coordination",
    "unavailable",
    "deadline",
    "barrier",
    "connection reset",
    "connection closed",
)


def _is_about_others(error: BaseException) -> bool:
    """Whether an error of the runtime says that another process is gone."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen).lower()
        if isinstance(seen, jax.errors.JaxRuntimeError) and any(w in text for w in _ABOUT_OTHERS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


# ---- noticing that another process is gone -------------------------------------------------------
# If a process dies, the others wait in a reduction for ever. So a thread of each process writes
# every few seconds that it is alive, into the key-value store of JAX's coordination service (which
# process 0 hosts), and reads what the others wrote.

_FOLDER = "dpfl/alive/"
_DONE = "done"


class Heartbeats:
    """Which processes are alive; the time is an argument, for tests."""

    def __init__(self, processes: int, patience_s: float, now: float) -> None:
        self._patience = patience_s
        self._beats = dict.fromkeys(range(processes), "")
        self._changed = dict.fromkeys(range(processes), now)

    def update(self, said: Mapping[int, str], now: float) -> None:
        """Records the current value of each process."""
        for process, words in said.items():
            if self._beats[process] != words:
                self._beats[process], self._changed[process] = words, now

    def lost(self, now: float) -> int | None:
        """The first process whose value has not changed for too long, if there is one."""
        for process, words in self._beats.items():
            if words != _DONE and now - self._changed[process] > self._patience:
                return process
        return None


class Watch:
    """A thread that watches the other processes until ``stop``."""

    def __init__(self, patience_s: float, on_loss: Callable[[int], Any]) -> None:
        """Starts watching.

        Args:
          patience_s: silence after which a process counts as lost.
          on_loss: called in the thread, with the number of the process.
        """
        # Not public, but what Orbax builds on too; JAX offers nothing else that does not block.
        from jax._src.distributed import global_state

        self._client: Any = global_state.client
        self._me, self._on_loss = jax.process_index(), on_loss
        self._every = min(5.0, patience_s / 5)
        self._heartbeats = Heartbeats(jax.process_count(), patience_s, time.monotonic())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="dpfl-watch")
        self._thread.start()

    def stop(self) -> None:
        """Announces that this process ends by itself, and stops watching."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        count = 0
        while True:
            ended = self._ended.wait(self._every)
            count += 1
            try:
                words = _DONE if ended else str(count)
                self._client.key_value_set(f"{_FOLDER}{self._me}", words, allow_overwrite=True)
                entries = self._client.key_value_dir_get(_FOLDER)
            except Exception:
                # Process 0 does not answer: if that lasts, it counts as lost.
                entries = []
            if ended:
                return
            now = time.monotonic()
            self._heartbeats.update(
                {int(key.rsplit("/", 1)[1]): words for key, words in entries}, now
            )
            lost = self._heartbeats.lost(now)
            if lost is not None:
                self._on_loss(lost)


class ExitMessage:
    """Prints one sentence if this process is ended from outside.

    JAX's runtime aborts a process with a stack trace when process 0 is lost, or when it notices
    before ``Watch`` that another one is; so a shell waits for each process and prints for it.
    """

    _SCRIPT = 'read word; [ "$word" = bye ] || printf "%s\\n" "$0" >&2'

    def __init__(self, how: str) -> None:
        """Starts the shell.

        Args:
          how: the option by which the run resumes.
        """
        text = (
            f"dpfl: process {jax.process_index()} of {jax.process_count()} was ended from outside "
            f"(it was killed, or another process was lost); the same command with {how} resumes "
            "from the last checkpoint, with any number of processes, and counts nothing twice"
        )
        self._shell = subprocess.Popen(
            ["sh", "-c", self._SCRIPT, text], stdin=subprocess.PIPE, start_new_session=True
        )

    def cancel(self) -> None:
        """Prints nothing: this process ends by itself."""
        with contextlib.suppress(OSError, ValueError):
            self._shell.communicate(b"bye\n", timeout=5)


def lost_message(lost: int | None, how: str) -> str:
    """Returns the sentence to print if a process is lost.

    Args:
      lost: number of the process, or None if it is not known.
      how: the option by which the run resumes.
    """
    which = "another process" if lost is None else f"process {lost}"
    return (
        f"{which} of this run was lost, so process {jax.process_index()} of {jax.process_count()} "
        f"stops too; the same command with {how} resumes from the last checkpoint, with any number "
        "of processes, and counts nothing twice"
    )


def print_and_exit(text: str, status: int) -> None:
    """Ends the process at once: the usual way out waits for processes that may be gone."""
    sys.stdout.flush()
    print(f"\ndpfl: {text}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(status)
