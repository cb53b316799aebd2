"""The progress bar of a run."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class StepProgress:
    """Context manager around a bar with step, loss, fraction clipped, tokens/s and epsilon."""

    def __init__(self, console: Console, label: str, total: int, completed: int = 0) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(label, total=total, completed=completed, status="")

    def __enter__(self) -> StepProgress:
        """Starts drawing."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops drawing."""
        self._progress.stop()

    def update(self, completed: int, status: str) -> None:
        """Moves the bar."""
        self._progress.update(self._task, completed=completed, status=status)
