"""Measurement of time on a machine that also runs other programs."""

import functools
import time
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec

P = ParamSpec("P")


def quickest(
    call: Callable[[], object], *, limit: float, clock: Callable[[], float] = time.process_time, tries: int = 10
) -> float:
    """Seconds of the quickest of up to `tries` calls. A call that takes less than `limit` seconds is the last.

    Processor time does not count other programs, but is up to twice as long if another program uses the second hardware
    thread of the same core.
    """
    best = float("inf")
    for _ in range(tries):
        start = clock()
        call()
        best = min(best, clock() - start)
        if best < limit:
            break
    return best


def in_a_quiet_moment(test: Callable[P, None]) -> Callable[P, None]:
    """A test that compares measured times: repeated up to ten times, until no other program disturbs it."""

    @functools.wraps(test)
    def repeated(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(9):
            with suppress(AssertionError):
                return test(*args, **kwargs)
        return test(*args, **kwargs)

    return repeated
