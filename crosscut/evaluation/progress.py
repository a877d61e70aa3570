"""Progress of a task with throughput and remaining time: a bar on a terminal, and a line every ten seconds elsewhere,
such as in a log file.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.progress import BarColumn, Progress, TextColumn

from crosscut.config.terminal import new_console

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(name: str, num_tokens: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show progress on the error stream. Yields a function, which must be called with the number of tokens read since
    the last call.
    """
    if not shown:
        yield lambda _: None
        return
    console = new_console(stderr=True)
    began = last = time.monotonic()
    done = 0
    columns = (TextColumn(name, markup=False), BarColumn(), TextColumn("{task.fields[told]}", markup=False))
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(name, total=num_tokens, told="")

        def advance(more: int) -> None:
            nonlocal done, last
            done = min(num_tokens, done + more)
            now = time.monotonic()
            rate = done / max(now - began, 1e-3)
            left = timedelta(seconds=round((num_tokens - done) / rate)) if done else "?"
            told = f"{done / num_tokens:.0%}  {rate:,.0f} tokens/s  {left} left"
            bar.update(task, completed=done, told=told)
            if not console.is_terminal and now - last > _SECONDS_BETWEEN_LINES:
                last = now
                console.print(f"{name}  {told}", highlight=False)

        yield advance
