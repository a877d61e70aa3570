"""Rule that finds spikes in the series of the loss and of the gradient norm, without a threshold to tune.

Let x_t be the logarithm of the loss, or of the gradient norm, at step t. The usual value is the median of the last
`BASE` values, and the excess is r_t = x_t - usual value. The scale s is 1.4826 times the median of |r| over the last
`SPREAD` steps, which is the standard deviation if the noise is normal. Medians hardly change when a few values are far
off, so the spike itself does not hide in the statistics. The usual value of a falling loss lags behind, so a falling
loss has a negative excess.

| figure | a step is suspicious if r exceeds both | one step is an alarm if r exceeds both |
|---|---|---|
| loss | 6 s and log 1.05 | 12 s and log 2 |
| gradient norm | 6 s and log 10 | 12 s and log 100 |

`ENOUGH` suspicious steps among `RECENT` steps are also an alarm. A loss or a norm that is not finite is always an
alarm. The limits in multiples of s adapt to the noise of the run. The fixed factors are not tuned to a run: a rise of
less than 5% is not worth a rollback, and batches of clean runs have gradient norms up to 12 times the usual norm.
"""

import bisect
import math
import statistics
from dataclasses import dataclass

BASE = 64
"""Number of steps whose median is the usual value."""

SPREAD = 128
"""Number of steps whose excesses determine the scale."""

LEAST = 32
"""Number of steps that the rule must have seen before a finite value can be an alarm. Half of these steps determine the
first usual value, and the other half determine the first scale.
"""

REMEMBERED = 1024
"""Minimum number of recent steps that the rule keeps."""

RECENT, ENOUGH = 5, 3
"""`ENOUGH` suspicious steps among the last `RECENT` steps are an alarm."""

_SUSPICIOUS, _CERTAIN = 6.0, 12.0
_TO_DEVIATION = 1.4826
_SMALLEST = 1e-300


@dataclass(frozen=True)
class SpikeLimits:
    """Minimum factors over the usual value. A value below the factor `suspicious` is never suspicious, and a value
    below the factor `certain` is never an alarm by itself.
    """

    suspicious: float
    certain: float


LOSS, NORM = SpikeLimits(1.05, 2.0), SpikeLimits(10.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Spike that the rule has found. Steps count from 0."""

    first: int
    """First suspicious step of the spike."""
    step: int
    """Step at which the rule was certain."""
    reason: str
    """Description of the spike for the user, without a full stop at the end."""


@dataclass(frozen=True)
class Judged:
    """Excess and scale of a value. Both are None while there are too few earlier values."""

    excess: float | None = None
    scale: float | None = None

    def exceeds(self, deviations: float, factor: float) -> bool:
        """Whether the excess is more than `deviations` times the scale, and the value is more than `factor` times the
        usual value.
        """
        if self.excess is None or self.scale is None:
            return False
        return self.excess > max(deviations * self.scale, math.log(factor))


@dataclass
class FigureSeries:
    """Series of the loss or of the gradient norm."""

    name: str
    limits: SpikeLimits

    def __post_init__(self) -> None:
        self.values: list[float] = []
        self.excesses: list[float | None] = []
        self.judged = Judged()
        """Excess and scale of the last value."""

    def add(self, value: float) -> None:
        """Add the next value. Its excess and its scale are computed from the earlier values."""
        logarithm = math.log(max(value, _SMALLEST))
        base = self.values[-BASE:]
        excess = logarithm - statistics.median(base) if len(base) >= LEAST // 2 else None
        sizes = [abs(e) for e in self.excesses[-SPREAD:] if e is not None]
        scale = _TO_DEVIATION * statistics.median(sizes) if len(sizes) >= LEAST // 2 else None
        self.values.append(logarithm)
        self.excesses.append(excess)
        self.judged = Judged(excess, scale)

    def describe(self) -> str:
        """Describe the last value, such as "loss 8.1, usually 3.9"."""
        last, excess = self.values[-1], self.excesses[-1]
        usual = "" if excess is None else f", usually {math.exp(last - excess):.4g}"
        return f"{self.name} {math.exp(last):.4g}{usual}"

    def remove(self, places: slice) -> None:
        """Remove the values at these positions."""
        del self.values[places], self.excesses[places]


class SpikeRule:
    """Rule that finds spikes, with the figures of the steps so far. The same series always gives the same alarms."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._suspicious: list[bool] = []
        self.loss, self.norm = FigureSeries("loss", LOSS), FigureSeries("gradient norm", NORM)

    def observe(self, step: int, loss: float, norm: float) -> Alarm | None:
        """Add the figures of step `step`, which must be later than all steps so far. Returns an alarm if this step
        completes a spike. If the loss or the norm is not finite, the step is an alarm and is not added.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return Alarm(first=step, step=step, reason=f"loss {loss:.4g}, gradient norm {norm:.4g}")
        figures = (self.loss, self.norm)
        for figure, value in zip(figures, (loss, norm), strict=True):
            figure.add(value)
        suspicious = [figure for figure in figures if figure.judged.exceeds(_SUSPICIOUS, figure.limits.suspicious)]
        certain = any(figure.judged.exceeds(_CERTAIN, figure.limits.certain) for figure in figures)
        self._steps.append(step)
        self._suspicious.append(bool(suspicious))
        self._trim()
        recent = zip(self._steps[-RECENT:], self._suspicious[-RECENT:], strict=True)
        bad = [number for number, is_suspicious in recent if is_suspicious and number > step - RECENT]
        if not certain and (len(bad) < ENOUGH or not suspicious):
            return None
        reason = "; ".join(figure.describe() for figure in suspicious or figures)
        return Alarm(first=min(bad, default=step), step=step, reason=reason)

    def forget(self, step: int) -> None:
        """Forget step `step` and all later steps."""
        self._remove(slice(bisect.bisect_left(self._steps, step), None))

    def _trim(self) -> None:
        """Drop old steps, so that the memory stays bounded in a long run."""
        if len(self._steps) >= 2 * REMEMBERED:
            self._remove(slice(0, -REMEMBERED))

    def _remove(self, places: slice) -> None:
        del self._steps[places], self._suspicious[places]
        for figure in (self.loss, self.norm):
            figure.remove(places)
