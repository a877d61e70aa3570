"""Telling of each step while the next one runs.

A GPU must have its next step before it is done with the last, so the loop launches a step and only then waits for the
one before. What is made of a step (a checkpoint, a validation, a report) waits until it is known to be good.
"""

from collections.abc import Callable

import torch

from crosscut.training.result import Moment, StepResult

Tell = Callable[[StepResult, float], None]
"""Function that receives the result of a good step and the seconds that the step took."""


class Follower:
    """One step behind the device, until it is asked to catch up."""

    def __init__(self, tell: Tell, device: torch.device) -> None:
        self.tell, self.device = tell, device
        self.seconds = 0.0
        """Seconds of all reported steps on the device, without the time between them."""
        self._running: tuple[Moment, StepResult] | None = None

    def launch(self, step: Callable[[], StepResult]) -> None:
        """Let `step` launch a step, and tell of the one before. Raises what that one's result raises."""
        launched = Moment(self.device), step()
        self.catch_up()
        self._running = launched

    def catch_up(self) -> None:
        """Wait for the step that was launched last and tell of it. Raises what its result raises."""
        if self._running is None:
            return
        (begin, result), self._running = self._running, None
        seconds = begin.seconds_to(result.wait().end)
        self.seconds += seconds
        self.tell(result, seconds)
