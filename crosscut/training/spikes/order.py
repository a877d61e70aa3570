"""Order of the training samples in a run that leaves batches out.

The batch of step n normally starts at sample `samples_before(n)`. A skip (step s, k sequences) moves the batch of step
s, and of every later step, by k sequences further along the order of the samples. The k sequences are never trained.
The batch of a step is still a pure function of the settings, the skips and the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from crosscut.config import TrainingConfig


@dataclass(frozen=True, order=True)
class Skip:
    """Sequences that a run leaves out between two steps."""

    step: int
    """Number of steps that are done when the run leaves out the sequences."""
    sequences: int
    """Number of sequences that the run leaves out."""


@dataclass(frozen=True)
class SampleOrder:
    """Positions of the batches of a run in the order of the training samples."""

    training: TrainingConfig
    skips: tuple[Skip, ...] = field(default=())
    """Skips of the run, in ascending order of their steps, at most one per step."""

    def first_sample(self, step: int) -> int:
        """Position of the first sequence of the batch of step `step`, counted from 0."""
        left_out = sum(skip.sequences for skip in self.skips if skip.step <= step)
        return self.training.samples_before(step) + left_out

    def samples_after(self, done: int) -> int:
        """Number of sequences that the run has trained or left out when `done` steps are done. Sequences that the run
        leaves out before the next step do not count yet.
        """
        left_out = sum(skip.sequences for skip in self.skips if skip.step < done)
        return self.training.samples_before(done) + left_out

    def leaving_out(self, step: int, end: int) -> "SampleOrder":
        """Order in which the batch of step `step` starts at position `end`. Skips of earlier steps stay, and this skip
        replaces all skips of `step` and of later steps. `end` must be after `first_sample(step)`.
        """
        earlier = tuple(skip for skip in self.skips if skip.step < step)
        start = SampleOrder(self.training, earlier).first_sample(step)
        return SampleOrder(self.training, (*earlier, Skip(step, end - start)))

    def skipped_at(self, step: int) -> int:
        """Number of sequences that the run leaves out exactly before step `step`."""
        return sum(skip.sequences for skip in self.skips if skip.step == step)


def agree(ours: Sequence[Skip], theirs: Sequence[Skip], *, done: int) -> bool:
    """Whether two runs with these skips have trained the same batches in their first `done` steps."""

    def before(skips: Sequence[Skip]) -> list[Skip]:
        return sorted(skip for skip in skips if skip.step < done)

    return before(ours) == before(theirs)
