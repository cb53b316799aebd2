"""What a run shows while it works, and how it is asked to stop.

A terminal or notebook shows a bar, a log file plain lines. SIGTERM and SIGINT become a request to
stop, which the loop follows between two steps.
"""

from __future__ import annotations

import contextlib
import contextvars
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import rich.console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

from dpfl_jax.errors import plain

# Off a terminal: seconds between lines of steps, and the longest silence.
LINE_EVERY = 10.0
SILENCE = 25.0


class Console(rich.console.Console):
    """Rich's console without markup or control characters: what is shown may come from anywhere."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Highlights ``warning:`` at the start of a text."""
        result = super().render_str(text, **options)
        if text.startswith("warning:"):
            result.stylize("bold yellow", 0, len("warning:"))
        return result

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


def draws(console: rich.console.Console) -> bool:
    """Whether lines can be drawn over: in a terminal or a notebook."""
    return console.is_terminal or console.is_jupyter


def default_console() -> Console | None:
    """A console if the output is a terminal or a notebook, else None."""
    console = Console()
    return console if draws(console) else None


class RunConsole(Console):
    """A console that also suits log files: off a terminal every phase prints a line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.begin("starting")
        self._said = time.monotonic()

    def print(self, *objects: Any, **options: Any) -> None:
        self._said = time.monotonic()
        super().print(*objects, **options)

    def begin(self, doing: str) -> None:
        """Names what is being done from now on, for the lines that ``alive`` prints."""
        self._doing, self._since = doing, time.monotonic()

    def status(self, status: Any, **options: Any) -> Any:
        """Shows rich's status in a terminal, and prints a line elsewhere."""
        self.begin(str(status))
        if draws(self):
            return super().status(status, **options)
        self.print(f"{status} ...", highlight=False)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Prints a line whenever nothing else was printed for ``SILENCE`` seconds."""
        if draws(self) or self.quiet:
            yield
            return
        over = threading.Event()

        def beat() -> None:
            while not over.wait(SILENCE / 25):
                if time.monotonic() - self._said > SILENCE:
                    seconds = time.monotonic() - self._since
                    self.print(f"still {self._doing} ({seconds:.0f} s)", highlight=False)

        thread = threading.Thread(target=beat, daemon=True, name="progress")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def phase(console: rich.console.Console | None, doing: str) -> None:
    """Names what is being done, for the lines that ``alive`` prints, and prints nothing."""
    if isinstance(console, RunConsole):
        console.begin(doing)


class StepProgress:
    """Context manager around a bar with step, loss, fraction clipped, tokens/s and epsilon."""

    def __init__(
        self, console: rich.console.Console, label: str, total: int, completed: int = 0
    ) -> None:
        self._console, self._label, self._total = console, label, total
        self._line = time.monotonic()
        self.begin(completed, " (compiling, or a long one)")
        self._progress = None
        if draws(console):
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}", markup=False),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task(label, total=total, completed=completed, status="")

    def __enter__(self) -> StepProgress:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, completed: int, more: str = "") -> None:
        """Names the step that comes after ``completed`` ones as what is being done."""
        step = min(completed + 1, self._total)
        phase(self._console, f"at {self._label} {step} of {self._total}{more}")

    def update(self, completed: int, status: str) -> None:
        """Moves the bar; off a terminal prints a line every ``LINE_EVERY`` s, and the last."""
        self.begin(completed)
        if self._progress is not None:
            self._progress.update(self._task, completed=completed, status=status)
            return
        now = time.monotonic()
        if completed >= self._total or now - self._line >= LINE_EVERY:
            self._line = now
            line = f"{self._label} {completed}/{self._total} {status}".rstrip()
            self._console.print(line, highlight=False, soft_wrap=True)


# ---- signals -------------------------------------------------------------------------------------


_DEFAULT = contextvars.ContextVar("default_signal_handling", default=False)


@contextlib.contextmanager
def default_signal_handling() -> Iterator[None]:
    """Keeps runs inside this context from handling signals.

    For programs that continue after a run, and would take an interrupted run for a finished one.
    """
    token = _DEFAULT.set(True)
    try:
        yield
    finally:
        _DEFAULT.reset(token)


class StopRequest:
    """Context manager: ``requested`` becomes the signal's name once one has arrived.

    A second signal of the same kind acts as it would without this context.
    """

    def __init__(self, elsewhere: bool = False) -> None:
        """Listens for SIGTERM and SIGINT.

        Args:
          elsewhere: whether JAX's preemption service listens for SIGTERM. It gets one in place of
            SIGINT, too.
        """
        self.signals = (signal.SIGINT,) if elsewhere else (signal.SIGTERM, signal.SIGINT)
        self._elsewhere = elsewhere
        self.requested: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        """Installs the handlers (only possible in the main thread; elsewhere does nothing)."""
        if threading.current_thread() is threading.main_thread() and not _DEFAULT.get():
            for number in self.signals:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number).name
        signal.signal(number, self._previous[number])
        if self._elsewhere:
            signal.raise_signal(signal.SIGTERM)
