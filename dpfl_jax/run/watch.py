"""Notices that another process of the run is gone, and ends this one with one sentence.

A process that dies leaves the others waiting in a reduction for ever: nothing in the program can
notice. So a thread of each process says every few seconds that it lives, in the key-value store of
JAX's coordination service (which process 0 hosts), and looks at what the others say.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

_FOLDER = "dpfl/alive/"
_DONE = "done"


class Roll:
    """Who has been heard of lately; time is given, so that it can be tested."""

    def __init__(self, processes: int, patience_s: float, now: float) -> None:
        """Everybody is taken to be alive at ``now``."""
        self._patience = patience_s
        self._said = dict.fromkeys(range(processes), "")
        self._changed = dict.fromkeys(range(processes), now)

    def hear(self, said: Mapping[int, str], now: float) -> None:
        """Takes note of what each process says at present."""
        for process, words in said.items():
            if self._said[process] != words:
                self._said[process], self._changed[process] = words, now

    def lost(self, now: float) -> int | None:
        """The first process that has not changed its words for too long, if there is one."""
        for process, words in self._said.items():
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
        self._roll = Roll(jax.process_count(), patience_s, time.monotonic())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="dpfl-watch")
        self._thread.start()

    def stop(self) -> None:
        """Tells the others that this process leaves by itself, and stops watching."""
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
                found = self._client.key_value_dir_get(_FOLDER)
            except Exception:
                # Process 0 answers no more: if it is not back soon, it is lost.
                found = []
            if ended:
                return
            now = time.monotonic()
            self._roll.hear({int(key.rsplit("/", 1)[1]): words for key, words in found}, now)
            lost = self._roll.lost(now)
            if lost is not None:
                self._on_loss(lost)


class LastWords:
    """Says one sentence for this process if it is ended from outside.

    JAX's runtime aborts a process with a stack trace when process 0 is lost, or when it finds
    before ``Watch`` that another one is; so a shell waits beside each process and speaks for it.
    """

    _SCRIPT = 'read word; [ "$word" = bye ] || printf "%s\\n" "$0" >&2'

    def __init__(self, how: str) -> None:
        """Starts the shell.

        Args:
          how: the option by which the run goes on.
        """
        text = (
            f"dpfl: process {jax.process_index()} of {jax.process_count()} was ended from outside "
            f"(it was killed, or another process was lost); the same command with {how} goes on "
            "from the last checkpoint, with any number of processes, and counts nothing twice"
        )
        self._shell = subprocess.Popen(
            ["sh", "-c", self._SCRIPT, text], stdin=subprocess.PIPE, start_new_session=True
        )

    def unsaid(self) -> None:
        """Takes the words back: this process ends by itself."""
        with contextlib.suppress(OSError, ValueError):
            self._shell.communicate(b"bye\n", timeout=5)


def sentence(lost: int | None, how: str) -> str:
    """What a person is told.

    Args:
      lost: number of the process, or None if it is not known.
      how: the option by which the run goes on.
    """
    which = "another process" if lost is None else f"process {lost}"
    return (
        f"{which} of this run was lost, so process {jax.process_index()} of {jax.process_count()} "
        f"stops too; the same command with {how} goes on from the last checkpoint, with any number "
        "of processes, and counts nothing twice"
    )


def say_and_leave(text: str, status: int) -> None:
    """Ends the process at once: the usual way out waits for processes that may be gone."""
    sys.stdout.flush()
    print(f"\ndpfl: {text}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(status)
