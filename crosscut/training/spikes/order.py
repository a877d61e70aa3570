"""Order of the training samples in a run that leaves batches out.

The batch of step n normally starts at sample `samples_before(n)`. A skip (step s, k sequences) moves the batches of
step s and of all later steps forward by k sequences. The model is never trained on these k sequences. The batch of a
step is still a pure function of the settings, the skips and the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from crosscut.config import TrainingConfig
from crosscut.logbook.skips import SampleSkip


@dataclass(frozen=True)
class SampleOrder:
    """Position of each batch of a run in the order of the training samples."""

    training: TrainingConfig
    skips: tuple[SampleSkip, ...] = field(default=())
    """Skips of the run, in ascending order of their steps, at most one per step."""

    def first_sample(self, step: int) -> int:
        """Return the position of the first sequence in the batch of step `step`. Steps and positions count from 0."""
        left_out = sum(skip.sequences for skip in self.skips if skip.step <= step)
        return self.training.samples_before(step) + left_out

    def samples_after(self, done: int) -> int:
        """Return the number of sequences that the run has trained on or left out in its first `done` steps. Sequences
        that the run leaves out between these steps and the next step do not count yet.
        """
        left_out = sum(skip.sequences for skip in self.skips if skip.step < done)
        return self.training.samples_before(done) + left_out

    def leaving_out(self, step: int, end: int) -> "SampleOrder":
        """Return an order with a new skip, so that the batch of step `step` starts at position `end`. Skips before
        earlier steps are kept. The new skip replaces all skips before step `step` and before later steps. `end` must be
        after `first_sample(step)`.
        """
        earlier = tuple(skip for skip in self.skips if skip.step < step)
        start = SampleOrder(self.training, earlier).first_sample(step)
        return SampleOrder(self.training, (*earlier, SampleSkip(step, end - start)))

    def skipped_at(self, step: int) -> int:
        """Return the number of sequences that the run leaves out directly before step `step`."""
        return sum(skip.sequences for skip in self.skips if skip.step == step)


def agree(ours: Sequence[SampleSkip], theirs: Sequence[SampleSkip], *, done: int) -> bool:
    """Whether two runs with these skips train on the same batches in their first `done` steps."""

    def before(skips: Sequence[SampleSkip]) -> list[SampleSkip]:
        return sorted(skip for skip in skips if skip.step < done)

    return before(ours) == before(theirs)
