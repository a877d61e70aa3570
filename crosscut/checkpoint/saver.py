"""Saving while the training goes on.

`Saver.save` takes the state, and hands it to a thread that first copies it to host memory (see `staging`) and then
writes it (see `writer`). The ranks' threads agree through a process group of their own, so that their messages cannot
mix with the training's. One checkpoint is written at a time: the next save waits for the one before.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from crosscut.checkpoint.folders import checkpoint_folder, drop_old
from crosscut.checkpoint.manifest import Progress
from crosscut.checkpoint.staging import CopyGuard, HostBuffers, computed
from crosscut.checkpoint.state import More, first_cause, state_of, tensors_of
from crosscut.checkpoint.storage import Folder, folder_at, reason
from crosscut.checkpoint.writer import CheckpointWriter, StagedSavePlanner
from crosscut.config import CheckpointConfig, CheckpointError
from crosscut.launch.processes import is_lost_connection
from crosscut.parallel.collectives import background_group
from crosscut.parallel.state.parameters import placement_of


@dataclass(frozen=True)
class _Job:
    """One checkpoint to write, as this rank sees it."""

    folder: Folder
    progress: Progress
    state: dict[str, Any]
    tensors: dict[str, Tensor]
    ready: "torch.cuda.Event | None"
    written: Callable[[], None]


class Saver:
    """Writes a run's checkpoints under `root` in the background. Every rank makes one and calls it alike.

    As a context it waits at the end for the checkpoint that is being written, also when the run fails. `config` says
    which checkpoints to keep, and whether a run goes on when one cannot be written.
    """

    def __init__(
        self,
        root: str | Path | Folder,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        config: CheckpointConfig,
        is_first_rank: bool,
        more: More | None = None,
    ) -> None:
        """`more` is saved, too; between two steps of the optimizer it must not change."""
        self.root, self.config, self.is_first_rank = folder_at(root), config, is_first_rank
        self.model, self.optimizer, self.more = model, optimizer, more
        self.failure: CheckpointError | None = None
        """Why the newest checkpoint could not be written; None when it could."""
        self.seconds_held = 0.0
        """Seconds for which `save` has held its callers; `copying` counts the seconds that steps waited for a copy."""
        self.copying = CopyGuard(optimizer)
        self._buffers = HostBuffers()
        self._group = background_group()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._wait()
        finally:
            self._thread.shutdown()
            self.copying.remove()

    def save(self, progress: Progress, *, written: Callable[[], None] = lambda: None, final: bool = False) -> None:
        """Begin to write a checkpoint; `written` is called on the first rank once it is in its place.

        The state is that of this moment: it is copied before the next optimizer step changes it. Waits for the
        checkpoint before. Raises `CheckpointError`, on every rank alike, when that one could not be written and the
        run is to stop then. The `final` one of a run is tried all the same, since what it holds would be lost: whether
        the run has failed is for `finish` to say then.
        """
        start = time.perf_counter()
        if final:
            self._wait()
        else:
            self.finish()
        state = state_of(self.model, self.optimizer, self.more)
        tensors = tensors_of(state)
        folder = checkpoint_folder(self.root, progress.step)
        device = next(iter(tensors.values())).device
        job = _Job(folder, progress, state, tensors, computed(device), written)
        self.copying.begin()
        self._writing = self._thread.submit(self._work, job)
        self.seconds_held += time.perf_counter() - start

    def finish(self) -> None:
        """Wait until all that was saved is in its place.

        Raises `CheckpointError`, on every rank alike and once, when it could not be written and the run is to stop
        then.
        """
        failure = self._wait()
        if failure is not None and self.config.on_failure == "stop":
            raise failure

    def require_saved(self) -> None:
        """Raise the `CheckpointError` of the newest checkpoint if it could not be written, whatever the policy."""
        self._wait()
        if self.failure is not None:
            raise self.failure

    def _wait(self) -> CheckpointError | None:
        """Wait for the checkpoint that is being written; why it could not be, if this is found out now."""
        if self._writing is None:
            return None
        writing, self._writing = self._writing, None
        try:
            writing.result()
            self.failure = None
        except CheckpointError as error:
            self.failure = error
        return self.failure

    def _work(self, job: _Job) -> None:
        """In the thread: copy, then write. A rank that cannot copy still meets the others, so that none waits."""
        staged: dict[str, Tensor] = {}
        failed: BaseException | None = None
        try:
            staged = self._buffers.copy(job.tensors, job.ready)
        except Exception as error:
            failed = error
        finally:
            self.copying.end()
        placements = {name: placement_of(tensor) for name, tensor in job.tensors.items()}
        writer = CheckpointWriter(
            job.folder, job.progress, placements=placements, published=lambda: self._published(job), failed=failed
        )
        try:
            dcp.save(job.state, storage_writer=writer, planner=StagedSavePlanner(staged), process_group=self._group)
        except (Exception, CheckpointException) as error:
            # What a storage raises comes as one of the two, also where its own connection is lost.
            ours = isinstance(error, CheckpointException | CheckpointError)
            if not ours and isinstance(error, Exception) and is_lost_connection(error):
                raise  # another rank is gone, which `launch.processes` tells
            told = self._told(job, first_cause(error))
            if self.is_first_rank:
                self._warn(told)
            raise told from None

    def _published(self, job: _Job) -> None:
        """On the first rank: the new checkpoint is in its place, so older ones may go.

        What fails here is told and fails no save: the checkpoint is there.
        """
        try:
            job.written()
            drop_old(self.root, newest=job.progress.step, keep=self.config.keep, keep_every=self.config.keep_every)
        except Exception as error:
            click.echo(
                f"crosscut: `{job.folder}` is written, but what follows a checkpoint was not done: {reason(error)}.",
                err=True,
            )

    def _told(self, job: _Job, cause: BaseException) -> CheckpointError:
        text = str(cause) if isinstance(cause, CheckpointError) else f"`{job.folder}` must be written: {reason(cause)}."
        goes_on = self.config.on_failure == "continue"
        choice = "" if goes_on else ", or let the run go on: checkpoint.on_failure=continue"
        return CheckpointError(
            f"{text} Earlier checkpoints are as they were. Make room or access, or set `checkpoint.folder` to another "
            f"place{choice}."
        )

    def _warn(self, error: CheckpointError) -> None:
        """Say it when it happens: the ranks can only act on it together, at the next checkpoint."""
        follows = "goes on" if self.config.on_failure == "continue" else "stops at its next checkpoint"
        click.echo(f"crosscut: No checkpoint was written, and the run {follows}. {error}", err=True)


def save_checkpoint(
    root: str | Path | Folder,
    progress: Progress,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    is_first_rank: bool,
    keep: int,
) -> Folder:
    """Write one checkpoint under `root` and drop all but the newest `keep`, with nothing going on meanwhile.

    Every rank calls it. Raises `CheckpointError`, on every rank alike.
    """
    config = CheckpointConfig(keep=keep)
    with Saver(root, model=model, optimizer=optimizer, config=config, is_first_rank=is_first_rank) as saver:
        saver.save(progress)
        saver.finish()
    return checkpoint_folder(root, progress.step)
