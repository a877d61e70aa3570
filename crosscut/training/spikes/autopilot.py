"""Autopilot of the training loop. It watches the loss and the gradient norm of each step. After a spike, it rolls the
run back to an earlier state and leaves out the batches that came after this state (`training.on_spike`).

The first rank decides and tells the other ranks, so that all ranks leave the loop at the same point.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from crosscut.checkpoint import Folder, checkpoint_folder, find_damage, list_checkpoints
from crosscut.checkpoint.format.manifest import step_of
from crosscut.config import CrosscutError, TrainingError
from crosscut.config.training import OnSpike
from crosscut.logbook.contents import read_metrics
from crosscut.logbook.schema import SPIKES_FOLDER
from crosscut.logbook.skips import Event, SkipRecord, own_record
from crosscut.parallel.collectives import share_from_first
from crosscut.parallel.state.agreement import FirstRankNews
from crosscut.training.batches import BatchSource
from crosscut.training.result import NonFiniteError, StepResult
from crosscut.training.spikes.copies import StateCopies, steps_between_copies
from crosscut.training.spikes.evidence import Abandoned, Evidence, write_evidence
from crosscut.training.spikes.order import SampleOrder
from crosscut.training.spikes.record import drop_later
from crosscut.training.spikes.rule import REMEMBERED, Alarm, SpikeRule
from crosscut.training.step import Trainer

MARGIN = 5
"""Minimum number of steps between a state and the first suspicious step. A newer state may already be damaged, so a
rollback uses a newer state only if there is no older one."""

MOST_SPIKES = 10
"""Maximum number of rollbacks in a run. The next spike stops the run."""

MOST_SHARE = 0.1
"""Maximum share of a run's sequences that the run leaves out because of spikes."""


class SpikeFound(Exception):  # noqa: N818 - the name describes an event
    """Raised on all ranks at the same point when the first rank has found a spike."""

    def __init__(self, alarm: Alarm | None) -> None:
        super().__init__()
        self.alarm = alarm
        """Spike that this rank has found. On all ranks except the first, it may be None or differ from the first
        rank's."""


@dataclass(frozen=True)
class Return:
    """Rollback of a run to an earlier state."""

    step: int
    """Number of steps done in the earlier state."""
    told: str
    """Message for the user."""
    failure: str = ""
    """Reason why the run must not continue; empty if it continues."""


class Autopilot:
    """Autopilot of one rank. Every rank calls the same methods in the same order."""

    def __init__(self, trainer: Trainer, batches: BatchSource, load: Callable[[Folder], object]) -> None:
        """`load` is the function that loads a checkpoint into the trainer."""
        self.trainer, self.batches, self.run, self._load = trainer, batches, trainer.run.config, load
        self.choice = self.run.training.on_spike
        self.folder = Path(self.run.output.folder)
        self.copies: StateCopies | None = None
        """Copies of the state in host memory; None if the run needs no copies or has no room for them."""
        self._rule = SpikeRule()
        self._alarm: Alarm | None = None
        self._seen: deque[Abandoned] = deque(maxlen=REMEMBERED)
        self._news: FirstRankNews | None = None
        self._returned_to: int | None = None
        """Number of steps done in the state to which the run rolled back last. A spike right after this rollback is a
        reason to leave out more batches. It does not mean that the state is damaged.
        """

    @property
    def is_on(self) -> bool:
        """Whether the run looks for spikes."""
        return self.choice is not OnSpike.OFF

    def begin(self, done: int) -> str:
        """Start watching after `done` steps. Returns a note for the user, or an empty string."""
        if not self.is_on:
            return ""
        self._news = FirstRankNews()
        for step, loss, norm in share_from_first(self._earlier(done)):
            self._rule.observe(step, loss, norm)
        if self.choice is OnSpike.STOP:
            return ""
        copies = StateCopies(self.trainer)
        if self._news.any_of(not copies.fit()):
            return (
                "The copies of the state for a rollback after a loss spike do not fit into host memory. After a spike, "
                "the run therefore rolls back to its last checkpoint on disk. A lower `checkpoint.every` loses fewer "
                "steps."
            )
        self.copies = copies
        copies.keep(done)
        return ""

    def _earlier(self, done: int) -> list[tuple[int, float, float]]:
        """Return the figures of the last steps before a resume: step (counted from 0), loss and gradient norm. On all
        ranks except the first, the list is empty.
        """
        if not done or not self.trainer.mesh.is_first_rank:
            return []
        with suppress(OSError):
            rows = [row for row in read_metrics(self.folder) if row["step"] <= done and not row.get("skipped")]
            figures = [(row["step"] - 1, row.get("loss"), row.get("gradient_norm")) for row in rows]
            known = [(step, loss, norm) for step, loss, norm in figures if loss is not None and norm is not None]
            return known[-REMEMBERED:]
        return []

    def observe(self, result: StepResult) -> None:
        """Check the figures of a completed step for a spike. A step that the loss scale has skipped is not checked."""
        if not self.is_on or result.skipped:
            return
        self._seen.append(Abandoned(result.step + 1, result.loss, result.gradient_norm))
        alarm = self._rule.observe(result.step, result.loss, result.gradient_norm)
        self._alarm = self._alarm or alarm

    def check(self, *, settle: bool = False) -> None:
        """Raise `SpikeFound` on all ranks if the first rank has found a spike. If there are several ranks, all ranks
        raise the exception only at the next call. With `settle`, they raise it at this call, which waits for the first
        rank's answer.
        """
        if self._news is None:
            return
        found = self._alarm is not None
        if self._news.settle(found) if settle else self._news.pass_on(found):
            raise SpikeFound(self._alarm)

    def copy_if_due(self, done: int) -> None:
        """Copy the state after `done` steps to host memory, if a copy is due."""
        if self.copies is not None and done % steps_between_copies(self.run.training.steps) == 0:
            self.copies.keep(done)

    @contextmanager
    def non_finite_found(self) -> Iterator[None]:
        """Context that treats a step with a non-finite loss or gradient norm as a spike, if `training.on_spike` is
        `skip`.
        """
        try:
            yield
        except NonFiniteError as error:
            if self.choice is not OnSpike.SKIP:
                raise
            self._seen.append(Abandoned(error.step + 1, error.loss, error.norm))
            reason = f"loss {error.loss:.4g}, gradient norm {error.norm:.4g}"
            reason += " (the loss scale has fallen too low)" if error.exhausted else ""
            raise SpikeFound(Alarm(first=error.step, step=error.step, reason=reason)) from None

    def recover(self, spike: SpikeFound) -> Return:
        """Roll back to a state before a spike, and leave out the batches that came after this state. When this method
        returns, the run's record says which sequences are left out. No checkpoint may be in progress. Every rank must
        call this method.

        Raises `TrainingError` on all ranks if `training.on_spike` is `stop`, if there is no earlier state, or if the
        record cannot be written.
        """
        assert self._news is not None
        self._news.discard()
        alarm: Alarm = share_from_first(spike.alarm)
        if self.choice is OnSpike.STOP:
            raise self._stopped(alarm)
        target = self._restore(alarm)
        order = self.batches.order
        first, end = order.first_sample(target), order.first_sample(alarm.step + 1)
        end = max(end, first + order.skipped_at(target))  # a return to the same step leaves out twice as many
        back: Return | TrainingError = share_from_first(self._record(alarm, order.leaving_out(target, end), target))
        if isinstance(back, TrainingError):
            raise back
        if not back.failure:
            self.batches.order = order.leaving_out(target, end)
        self._alarm = None
        self._rule.forget(target)
        return back

    def _restore(self, alarm: Alarm) -> int:
        """Roll back to an earlier state: to a copy in host memory or, if there is none, to a checkpoint. Returns the
        number of steps done in this state.
        """
        steps = [] if self.copies is None else [step for step in self.copies.steps if step <= alarm.first]
        old = [step for step in steps if step <= alarm.first - MARGIN or step == self._returned_to]
        if self.copies is not None and steps:
            target = max(old or steps)
            self.copies.restore(target)
        else:
            target = share_from_first(self._checkpoint_before(alarm))
            if target is None:
                raise TrainingError(
                    "A rollback after a spike needs an earlier state, but there is no checkpoint from before the spike "
                    f"at step {alarm.step + 1} ({alarm.reason}). Lower `optimizer.learning_rate` or "
                    "`checkpoint.every`, and start a new run."
                )
            self._load(checkpoint_folder(self.run.checkpoints_folder, target))
        self._returned_to = target
        self.trainer.release()
        return target

    def _checkpoint_before(self, alarm: Alarm) -> int | None:
        """Return the step of the newest undamaged checkpoint that is old enough for a rollback. None if there is none,
        and on all ranks except the first.
        """
        if not self.trainer.mesh.is_first_rank:
            return None
        for folder in reversed(list_checkpoints(self.run.checkpoints_folder)):
            step = step_of(folder.name)
            if step is not None and step <= alarm.first - MARGIN and not find_damage(folder):
                return step
        return None

    def _record(self, alarm: Alarm, order: SampleOrder, target: int) -> Return | TrainingError | None:
        """On the first rank, write the sequences to leave out into the run's record, write the file about the spike,
        and remove the checkpoints after step `target`. Returns the rollback, or the error if a file cannot be written.
        Returns None on the other ranks.
        """
        if not self.trainer.mesh.is_first_rank:
            return None
        first = self.batches.order.first_sample(target)
        count = order.first_sample(target) - first
        record = SkipRecord(skips=self.batches.order.skips)
        try:
            record = own_record(self.folder) or record
            told, failure = f"Spike at step {alarm.step + 1}: {alarm.reason}. ", self._limit(record, count)
            if not failure:
                step = alarm.step + 1
                event = Event(
                    spike_step=step, back_to=target, sequences=count, reason=alarm.reason, file=record.next_file(step)
                )
                told += event.told
                undone = [seen for seen in self._seen if seen.step > target]
                write_evidence(self.folder, event.file, Evidence(told, undone, first, count), self.batches)
                record.with_event(order.skips, event).write(self.folder)
            drop_later(self.run, target)
        except (OSError, CrosscutError) as error:
            return TrainingError(
                f"`{self.folder / SPIKES_FOLDER}` must be a writable folder, but is not: "
                f"{getattr(error, 'strerror', None) or error}. The run must record there which sequences it leaves out "
                f"after the spike at step {alarm.step + 1}. The earlier checkpoints are safe. Free space or grant "
                "access, and run again with --resume auto."
            )
        self._seen = deque((seen for seen in self._seen if seen.step <= target), maxlen=REMEMBERED)
        return Return(target, told, failure and told + failure)

    def _limit(self, record: SkipRecord, count: int) -> str:
        """Return the reason why the run must not leave out `count` more sequences after another spike. The text is
        empty if the run may leave them out.
        """
        number = len(record.events) + 1
        left_out = sum(event.sequences for event in record.events) + count
        most = int(MOST_SHARE * self.run.training.samples_before(self.run.training.steps))
        if number <= MOST_SPIKES and left_out <= most:
            return ""
        return (
            f"A run may roll back at most {MOST_SPIKES} times and leave out at most {most:,} sequences "
            f"({MOST_SHARE:.0%} of the run), but this would be rollback {number}, with {left_out:,} sequences left "
            "out in all, so the run stops. A checkpoint of the state before the spike is written. Look at the files in "
            f"`{self.folder / SPIKES_FOLDER}`, then lower `optimizer.learning_rate` or set training.on_spike=off, and "
            "run again with --resume auto."
        )

    def _stopped(self, alarm: Alarm) -> TrainingError:
        """Return the error for a spike at which the run stops."""
        steps = [step_of(folder.name) or 0 for folder in list_checkpoints(self.run.checkpoints_folder)]
        before, later = ([s for s in steps if s <= alarm.first], [s for s in steps if s > alarm.first])
        again = "run again with --resume auto training.on_spike=skip"
        if later:
            names = ", ".join(f"`step-{step:08d}`" for step in later)
            again = f"Remove {names}, which may be damaged, and {again}" if before else "Start a new run"
        elif not before:
            again = "Start a new run with training.on_spike=skip"
        again = again[0].upper() + again[1:]
        saved = (
            f"The last checkpoint before the spike is step {max(before)}" if before else "No earlier checkpoint exists"
        )
        return TrainingError(
            f"The loss or the gradient norm has jumped at step {alarm.step + 1} ({alarm.reason}), and the run stops "
            f"because of training.on_spike=stop. {saved}. {again} to leave out the batches of the spike, or continue "
            "through the spike with training.on_spike=off."
        )
