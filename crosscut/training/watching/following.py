"""Report each step while the next step runs.

A GPU must have its next step queued before it finishes the current step. The loop therefore launches a step and only
then waits for the previous step. Work that needs the result of a step (a checkpoint, a validation pass, a report) waits
until the step is known to be good, which means that its loss and gradients are finite.
"""

from collections.abc import Callable

import torch

from crosscut.flight import RECORD, RunPhase
from crosscut.training.result import Moment, StepResult

Tell = Callable[[StepResult, float], None]
"""Function that receives the result of a good step and the seconds that the step took on the device."""


class Follower:
    """Launcher of steps. It reports each step after the next step has been launched, or when `catch_up` is called."""

    def __init__(self, tell: Tell, device: torch.device) -> None:
        self.tell, self.device = tell, device
        self.seconds = 0.0
        """Seconds of all reported steps on the device, without the time between steps."""
        self._running: tuple[Moment, StepResult] | None = None

    def launch(self, step: Callable[[], StepResult]) -> None:
        """Call `step`, which launches a step, then report the previous step. Raises any error of the previous step's
        result.
        """
        launched = Moment(self.device), step()
        self.catch_up()
        self._running = launched

    def catch_up(self) -> None:
        """Wait for the step that was launched last and report this step. Raises any error of its result."""
        if self._running is None:
            return
        (begin, result), self._running = self._running, None
        RECORD.phase(RunPhase.RESULT)
        seconds = begin.seconds_to(result.wait().end)
        self.seconds += seconds
        self.tell(result, seconds)

    def drop(self) -> None:
        """Do not report the step that was launched last."""
        self._running = None
