"""Progress of work on many bytes, such as hashing: a bar on a terminal, and a line every ten seconds elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock

from crosscut.config.system.terminal import echo, new_console

LARGE = 1 << 28
"""Minimum number of bytes for which a terminal shows a bar."""

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def byte_progress(description: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Show on the error stream how many of `total` bytes are done, the rate and the remaining time. Yields the function
    that advances the progress by a number of bytes; threads may call it. Without `shown`, nothing appears.
    """
    if not shown:
        yield lambda _: None
    elif not sys.stderr.isatty():
        yield _ProgressLines(description, total).advance
    elif total < LARGE:
        yield lambda _: None
    else:
        with _bar(description, total) as advance:
            yield advance


class _ProgressLines:
    """Lines for a log file."""

    def __init__(self, description: str, total: int) -> None:
        self._description, self._total, self._done = description, total, 0
        self._start = self._last = time.monotonic()
        self._lock = Lock()

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            now = time.monotonic()
            if now - self._last < SECONDS_BETWEEN_LINES:
                return
            self._last = now
            rate = self._done / (now - self._start)
            left = timedelta(seconds=round(max(self._total - self._done, 0) / rate))
            echo(
                f"{self._description}  {self._done / 1e9:,.1f} of {self._total / 1e9:,.1f} GB  "
                f"{rate / 1e6:,.0f} MB/s  {left} left",
                err=True,
            )


@contextmanager
def _bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=new_console(stderr=True)) as bar:
        task = bar.add_task(description, total=total)
        yield lambda num_bytes: bar.update(task, advance=num_bytes)
