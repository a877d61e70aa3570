"""Measurement of time on a machine that also runs other programs."""

import time
from collections.abc import Callable


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
