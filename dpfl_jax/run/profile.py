"""A trace of a few steps, as xprof, TensorBoard and Perfetto open it."""

from __future__ import annotations

import pathlib
from types import TracebackType
from typing import Any

import jax


class Profile:
    """Traces turns of the loop after the first one, which compiles.

    A trace tells how long single steps took, and so how much was drawn for them: it is as private
    as the data (``report.PRIVATE_METRICS_CAVEAT``). It changes nothing that is computed.
    """

    def __init__(self, folder: pathlib.Path | None, turns: int) -> None:
        """Writes into ``folder`` (None: nowhere), for its owner alone; ``turns`` of the loop."""
        self._folder, self._left = folder, turns if folder is not None else 0
        self._running, self._compiled = False, False

    def __enter__(self) -> Profile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def before(self) -> None:
        """To be called before each turn."""
        if self._compiled and self._left and not self._running:
            assert self._folder is not None
            self._folder.mkdir(mode=0o700, exist_ok=True)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python would be most of the file
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._running = True
        self._compiled = True

    def after(self, state: Any) -> None:
        """To be called after each turn, with what it has computed."""
        if self._running:
            self._left -= 1
            if not self._left:
                jax.block_until_ready(state)
                self._stop()

    def _stop(self) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
