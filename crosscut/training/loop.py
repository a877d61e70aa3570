"""The training loop on one rank: launch a step, then do the work that is due after this step, such as a validation
pass.

The loop runs one step ahead of its results. It launches step n + 1 before it has read the loss of step n, so the GPU
never waits for the host. Before the weights are used for anything else (validation, a checkpoint), the loop catches up:
it waits for the result of the last step.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from crosscut.checkpoint import Folder
from crosscut.config import TrainingError
from crosscut.config.system.folder_lock import FolderLock
from crosscut.config.training import OnHang
from crosscut.evaluation import Score, evaluate_loss
from crosscut.flight import RECORD, RunPhase
from crosscut.generation.text import Around
from crosscut.launch import Stopped, StopRequest
from crosscut.launch.hangs import LEAST_BOUND, Reaction, Watch
from crosscut.launch.stopping import INTERRUPTIBLE
from crosscut.logbook.contents import remove_outlived
from crosscut.logbook.schema import MEASUREMENTS_FILE, SAMPLES_FILE, Lifetime
from crosscut.parallel.collectives import share_from_first
from crosscut.training.batches import BatchesAhead, BatchSource
from crosscut.training.elastic import Restart
from crosscut.training.evaluations import ModelScores
from crosscut.training.loads.idle import IdleExperts, describe_collapses
from crosscut.training.optimization.averaging import SCORED
from crosscut.training.optimization.schedule import last_stable_step
from crosscut.training.profiling.profiler import Profiler
from crosscut.training.result import NonFiniteError, StepResult
from crosscut.training.resuming import can_resume_after_hang
from crosscut.training.saving import RunCheckpoints
from crosscut.training.spikes.autopilot import Autopilot, SpikeFound
from crosscut.training.step import Trainer
from crosscut.training.tracking.measuring import RankMeter
from crosscut.training.tracking.metrics import Metrics
from crosscut.training.watching.diagnosis import explain_non_finite, require_equal_replicas
from crosscut.training.watching.following import Follower
from crosscut.training.watching.throughput import Throughput


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
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
    """Training, validation and evaluation of one run. `checkpoints` saves and loads its checkpoints."""

    hang_bound = LEAST_BOUND
    """Minimum time without progress after which the run counts as hanging, in seconds (`launch.hangs`)."""

    def __init__(
        self,
        trainer: Trainer,
        batches: BatchSource,
        *,
        identity: Mapping[str, object] | None = None,
        profiler: Profiler | None = None,
        evaluations: ModelScores | None = None,
        lock: FolderLock | None = None,
    ) -> None:
        """`identity` describes the run in its checkpoints (`checkpoint.Progress`). `lock` is the lock of the run's
        folders, on the first rank.
        """
        self.run, self.trainer, self.batches, self.mesh = trainer.run.config, trainer, batches, trainer.mesh
        self.profiler, self.evaluations = profiler, evaluations
        self.samples: Callable[[Around], Mapping[str, str]] | None = None
        """Function that writes texts with the model, keyed by their prompts. Every rank calls it."""
        self.restart: Restart | None = None
        """Restart to record when the first step is done."""
        self.outlived: Lifetime | None = None
        """Lifetime of the files that the first step ends (`logbook.contents.remove_outlived`), on the first rank."""
        self.folder = Path(self.run.output.folder)
        self.throughput = Throughput.of(trainer.run, trainer.mesh)
        self.checkpoints = RunCheckpoints(trainer, batches, identity=identity or {}, lock=lock)
        self.idle_experts = IdleExperts(self.run.training.idle_expert_steps)
        self.meter = RankMeter(trainer)
        self.autopilot = Autopilot(trainer, batches, self.checkpoints.load)
        self._last_stable = last_stable_step(self.run.optimizer, self.run.training.steps)
        best = evaluations.best_step if evaluations else None
        self.checkpoints.saver.spared = self._last_stable if best is None else best

    def train(self, resume_from: Path | Folder | None = None) -> RunOutcome:
        """Run all remaining steps, or stop early if a scheduler or Ctrl-C asks for it (`launch.stopping`). With
        `resume_from`, load this checkpoint first.

        Raises `TrainingError` if a loss is not finite, if the loss scale has fallen too low, or if replicas of a
        parameter differ.
        """
        steps = self.run.training.steps
        first = self.checkpoints.load(resume_from).step if resume_from else 0
        watch = self._watch()
        with watch, self._metrics(first) as metrics, BatchesAhead(self.batches, num_steps=steps) as batches:
            before = self.validate(first, metrics)
            if note := self.autopilot.begin(first):
                metrics.note(note)
            follower = Follower(lambda result, seconds: self._tell(result, seconds, metrics), self.mesh.device)
            with StopRequest(INTERRUPTIBLE, lambda: _tell_request(request, metrics)) as request:
                watch.obey(lambda: request.asked)
                course = _Course(metrics, batches, follower, request, done=first, after=before)
                if first == steps and self._lacks_scores():
                    self._evaluate(course)
                while course.done < steps and not course.stopped:
                    try:
                        self._take_step(course)
                    except SpikeFound as spike:
                        self._return(course, spike)
                self.checkpoints.finish()
                RECORD.phase(RunPhase.END)
                if course.stopped:
                    request.meet()  # a rank that exited earlier would kill the rank that is still writing
        return RunOutcome(
            before=before,
            after=course.after,
            throughput=self.throughput,
            first_step=first,
            last_step=course.done,
            seconds=follower.seconds,
            stopped=course.stopped,
            interrupted=course.stopped and request.interrupted,
        )

    def _lacks_scores(self) -> bool:
        """Whether the run was stopped between its last step and the scores of it. The first rank decides."""
        missing = self.evaluations is not None and self.evaluations.is_missing(self.run.training.steps)
        return bool(share_from_first(missing, is_late=False))

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
        self.checkpoints.finish()
        course.follower.drop()
        course.batches.forget()
        back = self.autopilot.recover(spike)
        course.done = back.step
        course.metrics.rewind(back.step)
        self.idle_experts.forget()
        if back.failure or course.stopped:
            self.checkpoints.save(course.done, final=True)
            self.checkpoints.finish()
        if back.failure:
            raise TrainingError(back.failure)
        course.metrics.note(back.told)

    def _chores_due(self, course: _Course) -> Iterator[Callable[[_Course], None]]:
        """Yield the chores that are due after the last launched step, in order: score the model, write samples,
        compare replicas, save.

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
        if not course.stopped and self.samples and _is_due(done, self.run.output.sample_every):
            yield self._sample
        saving = course.stopped or last or done == self._last_stable or _is_due(done, self.run.checkpoint.every)
        is_kept = self.checkpoints.memory_saver is not None
        in_memory = not saving and is_kept and _is_due(done, self.run.checkpoint.in_memory)
        if training.compare_replicas_every and (saving or in_memory or _is_due(done, training.compare_replicas_every)):
            yield lambda course: require_equal_replicas(self.trainer, course.done)
        if saving:
            yield lambda course: self.checkpoints.save(course.done, final=course.stopped or last)
        if in_memory:
            yield lambda course: self.checkpoints.save_in_memory(course.done)

    def _validate(self, course: _Course) -> None:
        with course.until_stopped():
            course.after = self.validate(course.done, course.metrics, course.request)

    def _evaluate(self, course: _Course) -> None:
        assert self.evaluations is not None
        RECORD.phase(RunPhase.EVALUATION)
        with course.until_stopped():
            with course.metrics.aside(), self.evaluated_weights():
                figures = self.evaluations.figures(self.trainer.model, course.request, step=course.done)
            course.metrics.scores(course.done, figures)
            if self.evaluations.best_step is not None:
                self.checkpoints.saver.spared = self.evaluations.best_step

    def _sample(self, course: _Course) -> None:
        assert self.samples is not None
        RECORD.phase(RunPhase.EVALUATION)
        with course.until_stopped():
            with self.evaluated_weights():
                texts = self.samples(course.request.checked)
            rows = [{"step": course.done, "prompt": prompt, "text": text} for prompt, text in texts.items()]
            course.metrics.rows(SAMPLES_FILE, rows)

    def validate(self, step: int, metrics: Metrics, request: StopRequest | None = None) -> Score:
        """Score the model on the validation set after `step` steps, with the averaged weights if the run keeps an
        average. With `request`, the method raises `Stopped` if the ranks agree to stop during the scoring.

        Raises `TrainingError` on all ranks if the loss is not finite.
        """
        RECORD.phase(RunPhase.VALIDATION, step)
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
        for saver in self.checkpoints.savers:
            saver.copying.wait()  # a checkpoint in progress copies the weights
        with self.trainer.average.in_use():
            yield

    def _launch_step(self, course: _Course) -> None:
        """Launch the next step and report the previous one. Raises `TrainingError` if the previous step failed."""
        step = course.done
        profiled = self.profiler.around(step, self.throughput.peak) if self.profiler else nullcontext()
        with self._failures_explained(), profiled:
            course.follower.launch(lambda: self.meter.step(step, course.batches.take(step)))
        course.done += 1
        RECORD.progress(is_step=True)
        if self.meter.is_due:
            course.metrics.rows(MEASUREMENTS_FILE, [{"step": course.done, **self.meter.row()}])

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

    def _tell(self, result: StepResult, seconds: float, metrics: Metrics) -> None:
        if self.checkpoints.lock is not None and self.checkpoints.lock.is_lost:
            self.checkpoints.require_folder()
        done = result.step + 1
        rates = self.throughput.rates(seconds, num_tokens=self.batches.num_tokens(result.step))
        samples = self.batches.order.samples_after(done)
        self.autopilot.observe(result)
        metrics.step(done, {**result.values(), **rates, "samples": samples})
        if (loads := result.loads()) and metrics.active:
            metrics.loads(done, loads)
            if found := self.idle_experts.step(loads):
                metrics.event(done, describe_collapses(done, found), [each.row for each in found])
        if self.outlived is not None:
            remove_outlived(self.folder, self.outlived)
            self.outlived = None
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
            trackers=self.run.output.trackers,
        )


def _tell_request(request: StopRequest, metrics: Metrics) -> None:
    """Tell a user who has pressed Ctrl-C that the run needs a moment to end."""
    if request.interrupted:
        metrics.note(
            "Stopping after this step, with a checkpoint. Press Ctrl-C again to end at once without a checkpoint."
        )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
