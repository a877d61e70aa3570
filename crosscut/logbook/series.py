"""Series of figures over the steps of a run, thinned to a bounded number of points."""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

MOST_POINTS = 8192
"""Maximum number of points of a series. A thinned series has from a quarter to all of them."""


class Series:
    """Values of one figure, by step. Steps ascend.

    A series with more than `MOST_POINTS` points is thinned: of the points in each interval of steps, the smallest and
    the largest value stay, and one value that is not finite, so that spikes and gaps stay visible.
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")
        """Values. NaN for a value that is not finite."""
        self.interval = 1
        """Number of steps in an interval."""
        self._thinned = 0
        """Number of points before the last interval that was thinned."""

    def extend(self, steps: Sequence[int], values: Iterable[float]) -> None:
        """Append points. The first of the `steps` must not be before the last step of the series."""
        self.steps.extend(steps)
        self.values.extend(values)
        if len(self.steps) > MOST_POINTS:
            self._thin()

    def undo(self, step: int) -> None:
        """Remove the points of `step` and of later steps. Of an interval that was thinned, the points before `step`
        stay.
        """
        kept = bisect_left(self.steps, step)
        del self.steps[kept:], self.values[kept:]
        self._thinned = 0

    def pairs(self) -> list[tuple[int, float | None]]:
        """Return the steps with their values. A value that is not finite is None."""
        return [
            (step, value if math.isfinite(value) else None) for step, value in zip(self.steps, self.values, strict=True)
        ]

    def _thin(self) -> None:
        interval = self.interval
        while (self.steps[-1] - self.steps[0]) // self.interval >= MOST_POINTS // 4 - 1:
            self.interval *= 2
        first = self._thinned if interval == self.interval else 0
        steps, values, end = self.steps[:first], self.values[:first], len(self.steps)
        while first < end:
            self._thinned = len(steps)
            bound = (self.steps[first] // self.interval + 1) * self.interval
            last = bisect_left(self.steps, bound, first, end)
            for place in _kept(self.values[first:last].tolist()):
                steps.append(self.steps[first + place])
                values.append(self.values[first + place])
            first = last
        self.steps, self.values = steps, values


def _kept(values: Sequence[float]) -> Iterable[int]:
    """Return the positions of the smallest value, of the largest one, and of the first one that is not finite."""
    if len(values) < 3:
        return range(len(values))
    if math.isfinite(sum(values)):
        return sorted({values.index(min(values)), values.index(max(values))})
    finite = [place for place, value in enumerate(values) if math.isfinite(value)]
    kept = {place for place, value in enumerate(values) if not math.isfinite(value)}
    kept = {min(kept)} if kept else kept
    if finite:
        kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    return sorted(kept)
