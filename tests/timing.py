"""How long something takes on a machine that others use."""

import time
from collections.abc import Callable


def quickest(
    call: Callable[[], object], *, limit: float, clock: Callable[[], float] = time.process_time, tries: int = 10
) -> float:
    """Seconds of the quickest of so many tries, the last of which is the first that takes less than `limit`.

    Processor time does not count others' programs, but counts twice where one of them has the other half of a core.
    """
    best = float("inf")
    for _ in range(tries):
        start = clock()
        call()
        best = min(best, clock() - start)
        if best < limit:
            break
    return best
