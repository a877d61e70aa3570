"""Progress of a task with throughput and remaining time: a bar on a terminal, and a line every ten seconds elsewhere,
such as in a log file. Before the progress, the size of the task and a forecast of its time can be printed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

from rich.progress import BarColumn, Progress, TextColumn

from crosscut.config.system.terminal import new_console
from crosscut.evaluation.scoring import Follow, Rounds

_SECONDS_BETWEEN_LINES = 10.0

_MEASURED_SECONDS = 1.0
"""Minimum time in seconds that is measured for the forecast."""

_LONG_BATCH_SECONDS = 10.0
"""Minimum time in seconds that the first batch must take to count for the forecast. A first batch that takes less time
is left out, because the start-up of the device makes it slower than the other batches.
"""


class Bar(NamedTuple):
    """Progress bar of a task."""

    name: str
    shown: bool
    size: str = ""
    """Description of the task's size, which is printed first. After about a second of measured work, the expected time
    of the whole task is printed, and the bar starts. A task that ends sooner has no forecast. If the description is
    empty, neither the description nor the expected time is printed.
    """
    unit: str = "tokens"
    """Unit of the task's size and of its rate."""


@contextmanager
def progress(bar: Bar, num_tokens: int) -> Iterator[Callable[[int], None]]:
    """Show progress on the error stream. Yields a function, which must be called with the number of tokens (or of other
    units, `bar.unit`) read since the last call.
    """
    if not bar.shown:
        yield lambda _: None
        return
    display = _TaskProgress(bar, num_tokens)
    try:
        yield display.advance
    finally:
        display.close()


@contextmanager
def rounds_shown(bar: Bar, lengths: Sequence[int], around: Follow, *, size: int) -> Iterator[Follow]:
    """Show progress while a rank reads rounds of windows or examples. Yields the generator function that follows the
    rounds, inside the generator function `around`. `lengths` holds the number of tokens of each window. After a round,
    the bar counts the tokens of `size` ranks, as if all had read as many.
    """
    with progress(bar, sum(lengths)) as advance:

        def follow(rounds: Rounds) -> Rounds:
            for group in around(rounds):
                yield group
                advance(size * sum(lengths[i] for i in group))

        yield follow


class _TaskProgress:
    """Progress lines and progress bar of one task."""

    def __init__(self, bar: Bar, num_tokens: int) -> None:
        self._name, self._unit, self._num_tokens = bar.name, bar.unit, num_tokens
        self._console = console = new_console(stderr=True)
        columns = (TextColumn(bar.name, markup=False), BarColumn(), TextColumn("{task.fields[told]}", markup=False))
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._bar.add_task(bar.name, total=num_tokens, told="")
        self._done = 0
        self._began = self._last_line = time.monotonic()
        self._measured_from: tuple[float, int] | None = (self._began, 0)
        """Time and number of tokens at the start of the measurement. None after the forecast."""
        if bar.size:
            self._line(bar.size)
        else:
            self._measured_from = None
            self._bar.start()

    def advance(self, more: int) -> None:
        """Count more tokens as read."""
        self._done = min(self._num_tokens, self._done + more)
        now = time.monotonic()
        rate = self._done / max(now - self._began, 1e-3)
        left = _clock(self._left(rate)) if rate else "?"
        told = f"{self._done / self._num_tokens:.0%}  {rate:,.0f} {self._unit}/s  {left} left"
        self._bar.update(self._task, completed=self._done, told=told)
        if self._measured_from is not None:
            self._measure(now, *self._measured_from)
        if not self._console.is_terminal and now - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._line(told)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()

    def _measure(self, now: float, start: float, done: int) -> None:
        """Print the forecast and start the bar if enough work has been measured. The measurement started at the time
        `start`, after `done` tokens had been read.
        """
        seconds = now - start
        if not done and seconds < _LONG_BATCH_SECONDS:
            self._measured_from = now, self._done
        elif seconds >= _MEASURED_SECONDS and done < self._done < self._num_tokens:
            left = self._left((self._done - done) / max(seconds, 1e-3))
            self._line(f"expected time {_clock(now - self._began + left)}")
            self._measured_from = None
            self._bar.start()

    def _left(self, rate: float) -> float:
        """Seconds that the remaining tokens take at `rate` tokens/s."""
        return (self._num_tokens - self._done) / rate

    def _line(self, text: str) -> None:
        self._console.print(f"{self._name}  {text}", highlight=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    """Format a time as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))
