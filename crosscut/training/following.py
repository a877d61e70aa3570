"""Telling of each step while the next one runs.

A GPU must have its next step before it is done with the last, so the loop launches a step and only then waits for the
one before. What is made of a step (a checkpoint, a validation, a report) waits until it is known to be good.
"""

import time
from collections.abc import Callable

from crosscut.training.result import StepResult

Tell = Callable[[StepResult, float], None]
"""What is done with a step that went well, and the seconds it took."""


class Follower:
    """One step behind the device, until it is asked to catch up."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.seconds = 0.0
        """Of all steps told of, without what came between them."""
        self._begun_at = 0.0
        self._done_at = 0.0
        self._running: StepResult | None = None

    def launch(self, step: Callable[[], StepResult]) -> None:
        """Let `step` launch a step, and tell of the one before. Raises what that one's result raises."""
        begun_at = time.perf_counter()
        launched = step()
        self.catch_up()
        self._running, self._begun_at = launched, begun_at

    def catch_up(self) -> None:
        """Wait for the step that was launched last and tell of it. Raises what its result raises."""
        if self._running is None:
            return
        result, self._running = self._running.wait(), None
        # It began with its launch or, on a device that was still busy, with the end of the one before.
        seconds = result.done_at - max(self._begun_at, self._done_at)
        self._done_at = result.done_at
        self.seconds += seconds
        self.tell(result, seconds)
