"""Turns SIGTERM and SIGINT into a wish to stop, which the loop grants between two steps."""

from __future__ import annotations

import contextlib
import contextvars
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

_DEFAULT = contextvars.ContextVar("default_signal_handling", default=False)


@contextlib.contextmanager
def default_signal_handling() -> Iterator[None]:
    """Inside, signals act as they would without runs.

    For programs that go on after a run, and would take a part of it for the whole.
    """
    token = _DEFAULT.set(True)
    try:
        yield
    finally:
        _DEFAULT.reset(token)


class StopRequest:
    """Context manager: ``requested`` becomes the signal's name once one has arrived.

    A second signal of the same kind acts as it would have without us.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        """Installs the handlers (only possible in the main thread; elsewhere does nothing)."""
        if threading.current_thread() is threading.main_thread() and not _DEFAULT.get():
            for number in self.SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number).name
        signal.signal(number, self._previous[number])
