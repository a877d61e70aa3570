"""The training loop on one rank: launch a step, then do the work that is due after this step, such as a validation
pass.

The loop runs one step ahead of its results. It launches step n + 1 before it has read the loss of step n, so the GPU
never waits for the host. Before the weights are used for anything else (validation, a checkpoint), the loop catches up:
it waits for the result of the last step.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosscut.checkpoint import Folder, Progress, Saver, folder_at, holds_average, load_checkpoint, read_manifest
from crosscut.config import TrainingError, write_toml
from crosscut.config.conventions import CONFIG_FILE
from crosscut.config.system.folder_lock import FolderLock
from crosscut.config.training import OnHang
from crosscut.evaluation import Score, evaluate_loss
from crosscut.flight import RECORD, Phase
from crosscut.launch import Stopped, StopRequest
from crosscut.launch.hangs import LEAST_BOUND, Reaction, Watch
from crosscut.launch.stopping import INTERRUPTIBLE
from crosscut.parallel import find_drift
from crosscut.training.batches import BatchesAhead, BatchSource
from crosscut.training.elastic import Restart
from crosscut.training.evaluations import ModelScores
from crosscut.training.optimization.averaging import SCORED
from crosscut.training.optimization.schedule import last_stable_step
from crosscut.training.result import NonFiniteError, StepResult
from crosscut.training.resuming import can_resume_after_hang
from crosscut.training.spikes.autopilot import Autopilot, SpikeFound
from crosscut.training.spikes.record import skips_of
from crosscut.training.step import Trainer
from crosscut.training.watching.diagnosis import explain_non_finite
from crosscut.training.watching.following import Follower
from crosscut.training.watching.metrics import Metrics
from crosscut.training.watching.profiling import Profiler
from crosscut.training.watching.throughput import Throughput


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a training run."""

    before: Score
    """Validation score before the first step of this process."""
    after: Score
    """Latest validation score."""
    throughput: Throughput
    first_step: int
    """Number of steps that were done before this process started training: 0 for a new run."""
    last_step: int
    """Number of steps done, including the first `first_step` steps."""
    seconds: float
    """Time that the training steps of this process took, in seconds, without validation and checkpoints."""
    stopped: bool
    """Whether a scheduler or a user ended the run early. If true, `after` may be the score of a step before
    `last_step`, and the checkpoint of `last_step` has been written.
    """
    interrupted: bool
    """Whether a user ended the run early with Ctrl-C."""


@dataclass
class _Course:
    """State of one call of `Loop.train`."""

    metrics: Metrics
    batches: BatchesAhead
    follower: Follower
    request: StopRequest
    done: int
    """Steps launched so far."""
    after: Score
    """Latest validation score."""
    stopped: bool = False
    """Whether all ranks have agreed to stop."""

    @contextmanager
    def until_stopped(self) -> Iterator[None]:
        """Context that ends early, and sets `stopped`, if the ranks agree to stop inside the context."""
        try:
            yield
        except Stopped:
            self.stopped = True


class Loop:
    """Training, validation, evaluation and checkpoints of one run."""

    hang_bound = LEAST_BOUND
    """Minimum time without progress after which the run counts as hanging, in seconds (`launch.hangs`)."""

    def __init__(
        self,
        trainer: Trainer,
        batches: BatchSource,
        *,
        identity: Mapping[str, Any] | None = None,
        profiler: Profiler | None = None,
        evaluations: ModelScores | None = None,
        lock: FolderLock | None = None,
    ) -> None:
        """`identity` describes the run in its checkpoints (`checkpoint.Progress`). `lock` is the lock of the run's
        folders, on the first rank.
        """
        self.profiler, self.evaluations, self.lock = profiler, evaluations, lock
        self.restart: Restart | None = None
        """Restart to record when the first step is done."""
        self.run, self.trainer, self.batches, self.mesh = trainer.run.config, trainer, batches, trainer.mesh
        self.identity = dict(identity or {})
        self.folder = Path(self.run.output.folder)
        self.throughput = Throughput.of(trainer.run, trainer.mesh)
        self._last_stable = last_stable_step(self.run.optimizer, self.run.training.steps)
        self.saver = Saver(
            self.run.checkpoints_folder,
            model=trainer.model,
            optimizer=trainer.optimizer,
            more=trainer.more_state,
            config=self.run.checkpoint,
            is_first_rank=self.mesh.is_first_rank,
        )
        self.autopilot = Autopilot(trainer, batches, self.load)
        self.memory_saver: Saver | None = None
        best = evaluations.best_step if evaluations else None
        self.saver.spared = self._last_stable if best is None else best

    def keep_in_memory(self, saver: Saver) -> None:
        """Also save checkpoints with `saver`, every `checkpoint.in_memory` steps."""
        self.memory_saver = saver

    def train(self, resume_from: Path | Folder | None = None) -> Outcome:
        """Run all remaining steps, or stop early if a scheduler or Ctrl-C asks for it (`launch.stopping`). With
        `resume_from`, load this checkpoint first.

        Raises `TrainingError` if a loss is not finite, if the loss scale has fallen too low, or if replicas of a
        parameter differ.
        """
        steps = self.run.training.steps
        first = self.load(resume_from).step if resume_from else 0
        watch = self._watch()
        with watch, self._metrics(first) as metrics, BatchesAhead(self.batches, num_steps=steps) as batches:
            before = self.validate(first, metrics)
            if note := self.autopilot.begin(first):
                metrics.note(note)
            follower = Follower(lambda result, seconds: self._tell(result, seconds, metrics), self.mesh.device)
            with StopRequest(INTERRUPTIBLE, lambda: _tell_request(request, metrics)) as request:
                watch.obey(lambda: request.asked)
                course = _Course(metrics, batches, follower, request, done=first, after=before)
                while course.done < steps and not course.stopped:
                    try:
                        self._take_step(course)
                    except SpikeFound as spike:
                        self._return(course, spike)
                self.finish_saving()
                RECORD.phase(Phase.END)
                if course.stopped:
                    request.meet()  # a rank that exited earlier would kill the rank that is still writing
        return Outcome(
            before=before,
            after=course.after,
            throughput=self.throughput,
            first_step=first,
            last_step=course.done,
            seconds=follower.seconds,
            stopped=course.stopped,
            interrupted=course.stopped and request.interrupted,
        )

    def _take_step(self, course: _Course) -> None:
        """Launch a step and do the chores that are due after it. Raises `SpikeFound` on all ranks after a spike."""
        self._launch_step(course)
        self.autopilot.check()
        for chore in self._chores_due(course):
            self._catch_up(course.follower)
            self.autopilot.check(settle=True)
            chore(course)
        self.autopilot.copy_if_due(course.done)

    def _return(self, course: _Course, spike: SpikeFound) -> None:
        """Roll back to a state before a loss spike. Raises `TrainingError` if the run must not continue."""
        self.saver.finish()
        if self.memory_saver is not None:
            self.memory_saver.finish()
        course.follower.drop()
        course.batches.forget()
        back = self.autopilot.recover(spike)
        course.done = back.step
        course.metrics.rewind(back.step)
        if back.failure or course.stopped:
            self.save(course.done, final=True)
            self.finish_saving()
        if back.failure:
            raise TrainingError(back.failure)
        course.metrics.note(back.told)

    def _chores_due(self, course: _Course) -> Iterator[Callable[[_Course], None]]:
        """Yield the chores that are due after the last launched step, in order: score the model, compare replicas,
        save.

        The ranks may agree to stop before or while the model is scored. The model is then not scored again, and a
        checkpoint is due. The caller must therefore do each chore before it asks for the next one.
        """
        done, training = course.done, self.run.training
        last = done == training.steps
        with course.until_stopped():
            course.request.check()
        if not course.stopped and (last or _is_due(done, training.validate_every)):
            yield self._validate
        if not course.stopped and self.evaluations and self.evaluations.is_due(done):
            yield self._evaluate
        saving = course.stopped or last or done == self._last_stable or _is_due(done, self.run.checkpoint.every)
        in_memory = not saving and self.memory_saver is not None and _is_due(done, self.run.checkpoint.in_memory)
        if saving or in_memory or _is_due(done, training.compare_replicas_every):
            yield lambda course: self.compare_replicas(course.done)
        if saving:
            yield lambda course: self.save(course.done, final=course.stopped or last)
        if in_memory:
            yield lambda course: self.save_in_memory(course.done)

    def _validate(self, course: _Course) -> None:
        with course.until_stopped():
            course.after = self.validate(course.done, course.metrics, course.request)

    def _evaluate(self, course: _Course) -> None:
        assert self.evaluations is not None
        RECORD.phase(Phase.EVALUATION)
        with course.until_stopped():
            with course.metrics.aside(), self.evaluated_weights():
                figures = self.evaluations.figures(self.trainer.model, course.request, step=course.done, shown=True)
            course.metrics.scores(course.done, figures)
            if self.evaluations.best_step is not None:
                self.saver.spared = self.evaluations.best_step

    def validate(self, step: int, metrics: Metrics, request: StopRequest | None = None) -> Score:
        """Score the model on the validation set after `step` steps, with the averaged weights if the run keeps an
        average. With `request`, the method raises `Stopped` if the ranks agree to stop during the scoring.

        Raises `TrainingError` on all ranks if the loss is not finite.
        """
        RECORD.phase(Phase.VALIDATION, step)
        batches = self.batches.validation_batches()
        with self.evaluated_weights():
            score = evaluate_loss(
                self.trainer.model,
                request.checked(batches) if request else RECORD.counted(batches),
                num_bytes=self.batches.validation_bytes,
            )
        metrics.validation(step, score)
        if not math.isfinite(score.loss):
            raise TrainingError(
                f"The validation loss must be finite, but after step {step} it is {score.loss}. These weights are not "
                "saved; the earlier checkpoints are safe. Lower `optimizer.learning_rate` and run again with "
                "--resume auto, or check the validation documents."
            )
        return score

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Give the model the averaged weights inside the context, if the run keeps an average (`optimizer.ema_decay`).
        At the end of the context, the model gets the weights of the last step back.
        """
        if self.trainer.average is None:
            yield
            return
        for saver in filter(None, (self.saver, self.memory_saver)):
            saver.copying.wait()  # a checkpoint in progress copies the weights
        with self.trainer.average.in_use():
            yield

    def compare_replicas(self, step: int) -> None:
        """Raise `TrainingError` on all ranks if replicas of a parameter differ after `step` steps. If
        `training.compare_replicas_every` is 0, do nothing.
        """
        if not self.run.training.compare_replicas_every:
            return
        RECORD.phase(Phase.COMPARISON)
        average = {} if self.trainer.average is None else self.trainer.average.tensors
        averages = {f"average of {name}": tensor for name, tensor in average.items()}
        drift = find_drift({**dict(self.trainer.model.named_parameters()), **averages}, self.mesh)
        if drift is None:
            return
        ranks = ", ".join(map(str, drift.ranks))
        where = f"differs from the majority (ranks: {ranks})" if drift.others else f"differs between ranks {ranks}"
        more = f" (other parameters that differ: {drift.num_parameters - 1})" if drift.num_parameters > 1 else ""
        raise TrainingError(
            f"`{drift.name}` must have identical values in all its replicas, but after step {step} it {where}, by up "
            f"to {drift.size:.1e} of its largest element{more}. "
            "These weights are not saved; the earlier checkpoints are safe. Check these ranks for failing memory or a "
            "failing device, and run again with --resume auto."
        )

    def save(self, step: int, *, final: bool = False) -> None:
        """Start writing a checkpoint of the state after `step` steps. When the checkpoint is complete, also write the
        run's config.

        Raises `CheckpointError` if the previous checkpoint could not be written and `checkpoint.on_failure` is `stop`.
        With `final`, the checkpoint is written even in this case.
        """
        RECORD.phase(Phase.CHECKPOINT)
        self.require_folder()
        progress = self._progress(step)
        self.saver.save(progress, written=lambda: write_toml(self.run, self.folder / CONFIG_FILE), final=final)

    def save_in_memory(self, step: int) -> None:
        """Start writing a checkpoint of the state after `step` steps to the memory of the machines. If that fails, the
        run continues, and the failure is reported.
        """
        assert self.memory_saver is not None
        self.memory_saver.save(self._progress(step))

    def _progress(self, step: int) -> Progress:
        return Progress(
            step=step,
            samples=self.batches.order.samples_after(step),
            layout=str(self.run.layout),
            seed=self.run.training.seed,
            identity=self.identity,
            config=dataclasses.asdict(self.run),
            skips=tuple(dataclasses.astuple(skip) for skip in self.batches.order.skips),
        )

    def finish_saving(self) -> None:
        """Wait until all started checkpoints are complete. Raises `CheckpointError` if the last checkpoint could not be
        written and `checkpoint.on_failure` is `stop`.
        """
        RECORD.phase(Phase.CHECKPOINT)
        self.saver.finish()
        if self.memory_saver is not None:
            self.memory_saver.finish()

    def load(self, folder: Path | Folder) -> Progress:
        """Load a checkpoint and return its progress. The checkpoint may come from another layout. The optimizer keeps
        the settings of this run, not the settings in the checkpoint. Raises `CheckpointError` on all ranks if the
        checkpoint cannot be loaded, or if its loss scale is unusable.

        If the checkpoint holds no average of the weights, the run's average begins with the weights of the checkpoint.
        """
        model, optimizer = self.trainer.model, self.trainer.optimizer
        more = self.trainer.more_state
        progress = load_checkpoint(folder, model=model, optimizer=optimizer, more=more, padded=model.padded_rows)
        if self.trainer.loss_scale is not None:
            self.trainer.loss_scale.require_usable(folder)
        if self.trainer.average is not None:
            self.trainer.average.has_begun = holds_average(read_manifest(folder_at(folder)))
        if not self.batches.order.skips:
            self.batches.order = dataclasses.replace(self.batches.order, skips=skips_of(progress))
        return progress

    def _launch_step(self, course: _Course) -> None:
        """Launch the next step and report the previous one. Raises `TrainingError` if the previous step failed."""
        step = course.done
        profiled = self.profiler.around(step) if self.profiler else nullcontext()
        with self._failures_explained(), profiled:
            course.follower.launch(lambda: self.trainer.step(step, course.batches.take(step)))
        course.done += 1
        RECORD.progress(is_step=True)

    def _catch_up(self, follower: Follower) -> None:
        """Report the step that was launched last. Raises `TrainingError` if that step failed."""
        with self._failures_explained():
            follower.catch_up()

    @contextmanager
    def _failures_explained(self) -> Iterator[None]:
        """Turn the failure of a step into an error that names the origin of the failure.

        The failed step is run again to find the origin. The weights are still those of the failed step, because the
        trainer changes no weights after a failure.
        """
        try:
            with self.autopilot.non_finite_found():
                yield
        except NonFiniteError as error:
            raise explain_non_finite(error, self.trainer, self.batches) from None

    def require_folder(self) -> None:
        """Raise `TrainingError` if the run's folder was moved away, or another run has taken it over."""
        if self.lock is not None:
            self.lock.require_held()

    def _tell(self, result: StepResult, seconds: float, metrics: Metrics) -> None:
        if self.lock is not None and self.lock.is_lost:
            self.require_folder()
        done = result.step + 1
        rates = self.throughput.rates(seconds, num_tokens=self.batches.num_tokens(result.step))
        samples = self.batches.order.samples_after(done)
        self.autopilot.observe(result)
        metrics.step(done, {**result.values(), **rates, "samples": samples})
        if self.restart is not None:
            self.restart.record(self.folder)
            self.restart = None

    def _watch(self) -> Watch:
        """Make the watch that explains hangs."""
        on_hang, checkpoints = self.run.training.on_hang, self.run.checkpoints_folder
        reaction = Reaction(
            ends=on_hang is not OnHang.WAIT,
            restarts=on_hang is OnHang.RESTART,
            can_resume=lambda: can_resume_after_hang(self.folder, checkpoints),
        )
        return Watch(self.folder, self.mesh.device, least_bound=self.hang_bound, reaction=reaction)

    def _metrics(self, first: int) -> Metrics:
        return Metrics(
            self.folder,
            num_steps=self.run.training.steps,
            start=first,
            active=self.mesh.is_first_rank,
            scored=SCORED if self.trainer.average else "",
        )


def _tell_request(request: StopRequest, metrics: Metrics) -> None:
    """Tell a user who has pressed Ctrl-C that the run needs a moment to end."""
    if request.interrupted:
        metrics.note(
            "Stopping after this step, with a checkpoint. Press Ctrl-C again to end at once without a checkpoint."
        )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
