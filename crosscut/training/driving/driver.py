"""Driver of runs. `crosscut train` and both kinds of `crosscut finetune` train with it.

| where | what the driver does |
|---|---|
| in one process, before training | locks the folders and prepares the runs |
| on every rank | builds the trainer and the loop, trains one run after the other, and checks that all files exist |
| in the process that started the ranks | starts the ranks again after a hang, and says how a stopped run continues |

A command describes its runs by a `Driver`, whose `prepare` returns a `PreparedRun` for each run. On a rank, a prepared
run makes the parts that depend on its kind (`RunParts`).
"""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from crosscut.checkpoint import Folder, Saver
from crosscut.checkpoint.storage import LocalFolder, folder_at
from crosscut.config import CheckpointError, ResolvedRun, RunConfig, RunHung, RunStopped, TrainingError
from crosscut.config.system.folder_lock import FolderLock
from crosscut.config.system.terminal import echo
from crosscut.generation.text import Around
from crosscut.launch import Done, Ranks, in_ranks
from crosscut.launch.stopping import INTERRUPTIBLE, ignore_requests
from crosscut.logbook.contents import remove_outlived
from crosscut.logbook.objects import write_object
from crosscut.logbook.schema import PLAN_FILE, Lifetime
from crosscut.parallel import ParallelMesh, make_mesh
from crosscut.parallel.collectives import share_from_first
from crosscut.pretrained import ModelSource, load_weights, require_finite
from crosscut.training.batches import BatchSource
from crosscut.training.elastic import Restart, is_elastic
from crosscut.training.evaluations import ModelScores
from crosscut.training.in_memory import InMemory, forget, memory_saver
from crosscut.training.loop import Loop, RunOutcome
from crosscut.training.profiling.profiler import Profiler
from crosscut.training.requirements import require_memory
from crosscut.training.resuming import Resume, naming_newest_checkpoint, newest_checkpoint
from crosscut.training.step import Trainer
from crosscut.training.tracking.measuring import plan_of


@dataclass(frozen=True)
class Stop:
    """Early end of a run, after its checkpoint was written."""

    step: int
    """Number of steps done."""
    interrupted: bool
    """Whether a user ended the run with Ctrl-C. If false, a scheduler ended the run."""


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Parts of a run on one rank that depend on the kind of the run."""

    batches: BatchSource
    finish: Callable[[Loop, RunOutcome], str]
    """Function that writes the report of a run whose steps are all done. Every rank calls it. On the first rank, it
    returns the reason why a file could not be written, or an empty text."""
    begin: Callable[[Loop], None] | None = None
    """Function that every rank calls before the first step."""
    evaluations: ModelScores | None = None
    profiler: Profiler | None = None
    samples: Callable[[Around], Mapping[str, str]] | None = None
    """Function that writes texts with the model, keyed by their prompts, for `output.sample_every`. Every rank calls
    it."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun(ABC):
    """Run that is ready to train. All ranks receive the same object before training starts."""

    run: ResolvedRun
    """Final settings of the run."""
    identity: dict[str, object]
    """Identity of the run (`resuming.identity_of`), which every checkpoint of the run records."""
    checkpoint: Folder | None
    """Checkpoint to resume from; None for a new run."""
    title: str = ""
    """Heading that is printed before the run; empty for none."""
    done: int = 0
    """Number of steps done in the checkpoint; 0 for a new run."""
    is_in_memory: bool = False
    """Whether `checkpoint` is in the memory of the machines. Each machine then has a folder of its own."""
    teacher: ModelSource | None = None
    """Teacher of the run, whose weights are loaded; None if the run computes no teacher."""
    memory_key: str = ""
    """Key of the run's checkpoints in memory; empty if the run keeps no checkpoints in memory."""
    restart: Restart | None = None
    """Description of this start as a restart; None if the run is not elastic, or if this is the run's first start."""

    @property
    def outlived(self) -> Lifetime | None:
        """Longest lifetime that ends with this start. None if the start has no steps left to train."""
        if self.checkpoint is None:
            return Lifetime.RUN if self.restart is None else Lifetime.STEPS
        return Lifetime.RESULT if self.done < self.run.training.steps else None

    @abstractmethod
    def initialize(self, trainer: Trainer) -> None:
        """Give the model of a new run its initial weights. Every rank calls this method."""

    @abstractmethod
    def parts(self, trainer: Trainer) -> RunParts:
        """Make the run's parts on this rank."""


@dataclass(frozen=True)
class PreparedRuns:
    """Runs that the ranks train one after the other. All runs have the same layout."""

    runs: tuple[PreparedRun, ...]
    lock: FolderLock
    """Lock of the runs' folders."""


@dataclass(frozen=True, kw_only=True)
class Driver:
    """Driver of the runs of one command."""

    run: RunConfig
    """Settings of the runs before their data are read. The layout, the device and the folders are final. The folders
    are locked until the runs end."""
    checkpoints: Callable[[], Iterable[str | Path]]
    """Function that returns the folders with the checkpoints of all runs."""
    again: str
    """Command that resumes the runs."""
    prepare: Callable[[Resume, InMemory], Sequence[PreparedRun]]
    """Function that prepares the runs, while their folders are locked. It returns no runs if all runs are complete. If
    the ranks start again after a hang, the function is called again, to resume."""
    is_complete: Callable[[Resume], bool] | None = None
    """Function that is called before the folders are locked. If it returns true, nothing is
    locked or trained."""
    stopped: Callable[[Stop], str] | None = None
    """Function that returns the message about a run that was stopped. By default, the message names the step and the
    command `again`."""

    def drive(self, resume: Resume) -> None:
        """Train all runs on the ranks of the layout. The method starts these ranks itself or, under torchrun, joins the
        ranks that torchrun started.

        Raises `RankFailure` if a rank failed for a reason that no other error describes. Raises `RunStopped` if a
        signal stopped a run and the run has written its checkpoint, or if a hang ended the run (`training.on_hang`).
        From then on, SIGTERM and SIGUSR1 are ignored, so that a repeated signal cannot hide `RunStopped`.
        """
        layout, device = self.run.layout, self.run.training.device
        ranks = Ranks(layout=layout, device=device, signals=INTERRUPTIBLE, may_idle=is_elastic(self.run))
        require_memory(self.run)
        stop = self._train_until_no_hang(ranks, resume)
        if stop is not None:
            ignore_requests()  # also in the process that started the ranks
            raise RunStopped(self._describe(stop), interrupted=stop.interrupted)

    def _describe(self, stop: Stop) -> str:
        if self.stopped is not None:
            return self.stopped(stop)
        return f"The run has stopped after step {stop.step}, and its checkpoint is written. Resume with `{self.again}`."

    def _train_until_no_hang(self, ranks: Ranks, resume: Resume) -> Stop | None:
        """Train on the ranks, and start them again after a hang if the run asks for this. Returns None if all steps are
        done.
        """
        while True:
            with ExitStack() as until_the_end:
                memory = InMemory(self.run)
                work = partial(train_runs, memory=memory)
                prepare = partial(self._prepare, resume, memory, until_the_end)
                beforehand = memory.find if resume else lambda: None
                try:
                    with naming_newest_checkpoint(self.checkpoints(), self.again):
                        return in_ranks(ranks, work, prepare=prepare, beforehand=beforehand)
                except RunHung as hung:
                    self._require_restart(hung)
            resume = "auto"

    def _prepare(self, resume: Resume, memory: InMemory, until_the_end: ExitStack) -> PreparedRuns | Done[Stop | None]:
        """Lock the folders until the stack `until_the_end` is closed, and prepare the runs for their ranks."""
        if self.is_complete is not None and self.is_complete(resume):
            return Done(None)
        lock = FolderLock(*_written_folders(self.run))
        until_the_end.enter_context(lock.held(partial(echo, err=True)))
        runs = tuple(self.prepare(resume, memory))
        return PreparedRuns(runs, lock) if runs else Done(None)

    def _require_restart(self, hung: RunHung) -> None:
        """Print a note if the ranks are to start again after a hang. Otherwise, raise `RunStopped`."""
        newest = newest_checkpoint(self.checkpoints())
        if hung.may_restart:
            echo(f"The run hung. Its ranks start again from `{newest}`.", err=True)
            return
        ignore_requests()
        raise RunStopped(
            f"The run hung and has ended. The report above is also in `{self.run.output.folder}`. The last checkpoint "
            f"is `{newest}`. Requeue the job, or resume with `{self.again}`."
        ) from None


def _written_folders(run: RunConfig) -> list[Path]:
    """Return the local folders that a run writes to. A folder inside another folder of the list is left out."""
    folders = [Path(run.output.folder)]
    checkpoints = folder_at(run.checkpoints_folder)
    if isinstance(checkpoints, LocalFolder) and not checkpoints.path.is_relative_to(folders[0]):
        folders.append(checkpoints.path)
    return folders


def train_runs(prepared: PreparedRuns, device: torch.device, memory: InMemory) -> Stop | None:
    """Train all runs on one rank. Returns how the first unfinished run was stopped, or None if all runs are complete.
    If the checkpoint of a run is in memory, each machine reads the checkpoint from its own folder, which `memory`
    names.
    """
    mesh = make_mesh(prepared.runs[0].run.layout, device)
    lock = prepared.lock if mesh.is_first_rank else None
    with nullcontext() if lock is None else lock.renewed():
        for number, run in enumerate(prepared.runs):
            if number:
                gc.collect()  # frees the model and the optimizer of the run before
            checkpoint = memory.checkpoint if run.is_in_memory else run.checkpoint
            if run.title and mesh.is_first_rank:
                echo(run.title)
            stop = _train(run, mesh, lock, checkpoint)
            if stop is not None:
                return stop
    return None


def _train(
    prepared: PreparedRun, mesh: ParallelMesh, lock: FolderLock | None, checkpoint: Folder | None
) -> Stop | None:
    """Train one run on one rank. Returns None if all steps are done."""
    run, key = prepared.run.config, prepared.memory_key
    trainer = _make_trainer(prepared, mesh)
    if checkpoint is None:
        prepared.initialize(trainer)
    parts = prepared.parts(trainer)
    loop = Loop(
        trainer,
        parts.batches,
        identity=prepared.identity,
        profiler=parts.profiler,
        evaluations=parts.evaluations,
        lock=lock,
    )
    loop.restart = prepared.restart if mesh.is_first_rank else None
    loop.samples = parts.samples
    if mesh.is_first_rank:
        _begin_folder(prepared, loop, mesh.device)
    if key:
        loop.checkpoints.memory_saver = memory_saver(run, key, trainer)
    if parts.begin is not None:
        parts.begin(loop)
    unwritten = ""
    with loop.checkpoints.completed():
        outcome = loop.train(checkpoint)
        if not outcome.stopped:
            loop.checkpoints.require_folder()
            # The ranks wait for the report: a rank that exits early would kill the rank that writes it.
            unwritten = share_from_first(parts.finish(loop, outcome))
        _require_written(run, loop.checkpoints.saver, unwritten)
        if key:
            forget(run, key)
    return Stop(outcome.last_step, outcome.interrupted) if outcome.stopped else None


def _begin_folder(prepared: PreparedRun, loop: Loop, device: torch.device) -> None:
    """Remove what an earlier start left in the run's folder, and write the plan. A start that makes no step leaves the
    result of the run.
    """
    run = prepared.run.config
    folder = Path(run.output.folder)
    if prepared.outlived is Lifetime.RESULT:
        loop.outlived = prepared.outlived
    elif prepared.outlived is not None:
        remove_outlived(folder, prepared.outlived)
    with suppress(Exception):  # the plan is for readers, and the run goes on without it
        write_object(folder / PLAN_FILE, plan_of(run, device))


def _make_trainer(prepared: PreparedRun, mesh: ParallelMesh) -> Trainer:
    """Make the trainer of a run, with the weights of its teacher."""
    trainer = Trainer(prepared.run, mesh)
    if prepared.teacher is not None and trainer.teacher is not None:
        trainer.teacher.load(prepared.teacher)
    return trainer


def _require_written(run: RunConfig, saver: Saver, unwritten: str) -> None:
    """Raise an error unless the last checkpoint and the report are written. `unwritten` is the reason why a file of the
    report is missing; it is empty if no file is missing. If the checkpoint is missing, the error is a
    `CheckpointError`, which also gives this reason. If only the report is missing, the error is a `TrainingError`.
    """
    try:
        saver.require_saved()
    except CheckpointError as error:
        if not unwritten:
            raise
        raise CheckpointError(
            f"{error} The report of the run is not complete either, because a file could not be written: {unwritten}."
        ) from None
    if unwritten:
        raise TrainingError(
            f"The report of the run must be written to `{run.output.folder}`, but is not: {unwritten}. All steps are "
            "done, and their checkpoint is written. Free space or grant access, and start again with --resume auto to "
            "write the report."
        )


def load_initial_weights(trainer: Trainer) -> None:
    """Load the weights of `training.initialize_from` into the model, if the setting names a folder."""
    if place := trainer.run.training.initialize_from:
        load_weights(trainer.model, trainer.run.model, Path(place))
        require_finite(trainer.model, place, is_published=True)
