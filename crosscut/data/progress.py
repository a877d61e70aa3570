"""Progress bar for long jobs over text, with the share of the corpus that has been read, the throughput, and the
remaining time.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from crosscut.config.system.terminal import new_console

if TYPE_CHECKING:
    from rich.progress import Progress


class ProgressBar:
    """Progress bar on the error stream, with one line per phase of the job. If `shown` is False, nothing appears."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if self._shown:
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[rate]}", markup=False),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=new_console(stderr=True),
            )
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def phase(self, description: str, total_bytes: int) -> ProgressPhase:
        """Start a line for a phase that reads files with `total_bytes` bytes in total."""
        return ProgressPhase(self._progress, description, total_bytes)


class ProgressPhase:
    """One line of a `ProgressBar`."""

    def __init__(self, progress: Progress | None, description: str, total_bytes: int) -> None:
        self._progress = progress
        self._total = total_bytes
        self._started = time.monotonic()
        self._position = -1
        self._num_bytes = 0
        self._task = progress.add_task(description, total=total_bytes, rate="") if progress is not None else None

    def advance(self, position: int, num_bytes: int = 0) -> None:
        """Report that the files have been read up to byte `position`, and that another `num_bytes` bytes of text have
        been processed.
        """
        self._num_bytes += num_bytes
        # Many documents come from one piece of a file. The bar is drawn once for all of them.
        if self._progress is None or self._task is None or position == self._position:
            return
        self._position = position
        seconds = max(time.monotonic() - self._started, 1e-3)
        rate = f"{self._num_bytes / seconds / 1e6:.1f} MB/s" if self._num_bytes else ""
        self._progress.update(self._task, completed=position, rate=rate)

    def finish(self) -> None:
        """Set the bar to complete."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._total)
