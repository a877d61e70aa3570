"""Save checkpoints in the background while training continues.

`Saver.save` collects the state and passes it to a thread, which first copies the state to host memory (see `staging`)
and then writes the copy (see `writer`). The threads of the ranks communicate through a process group of their own, so
their messages cannot mix with those of training. Only one checkpoint is written at a time: the next save waits for the
previous save.
"""

import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.optim import Optimizer

from crosscut.checkpoint.folders import checkpoint_folder, drop_old
from crosscut.checkpoint.format.manifest import Progress
from crosscut.checkpoint.in_memory import Hosts
from crosscut.checkpoint.reader import StateDict
from crosscut.checkpoint.saving.neighbours import NeighbourCopies
from crosscut.checkpoint.saving.staging import CopyGuard, HostBuffers, computed
from crosscut.checkpoint.saving.writer import CheckpointWriter
from crosscut.checkpoint.state import More, first_cause, state_of, tensors_of
from crosscut.checkpoint.storage import Folder, LocalFolder, folder_at, reason
from crosscut.config import CheckpointConfig, CheckpointError
from crosscut.config.system.terminal import echo
from crosscut.launch.processes import is_lost_connection
from crosscut.parallel.collectives import background_group
from crosscut.parallel.state.parameters import placement_of


@dataclass(frozen=True)
class _Job:
    """One checkpoint to write, with this rank's part of the state."""

    folder: Folder
    progress: Progress
    state: StateDict
    tensors: dict[str, Tensor]
    ready: "torch.cuda.Event | None"
    """CUDA event that occurs once the tensors are computed. None on the CPU."""
    written: Callable[[], None]
    """Function that the first rank calls when the checkpoint is complete."""


class Saver:
    """Background writer of a run's checkpoints under `root`. Every rank creates a saver and calls the same methods in
    the same order.

    Use the saver as a context manager: on exit, it waits for the checkpoint in progress, even if the run fails.
    `config` decides which checkpoints are kept, and whether the run continues if a checkpoint cannot be written.
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
        """Create the saver. The tensors in `more` are also saved; they must not change between two optimizer steps."""
        self.root, self.config, self.is_first_rank = folder_at(root), config, is_first_rank
        self.spared: int | None = None
        """Step whose checkpoint is kept permanently."""
        self.model, self.optimizer, self.more = model, optimizer, more
        self.failure: CheckpointError | None = None
        """Error of the most recent save. None if that save succeeded, and before the first save."""
        self.seconds_held = 0.0
        """Total number of seconds that calls to `save` have taken. `copying.seconds_held` is the number of seconds that
        optimizer steps have waited for a copy."""
        self.copying = CopyGuard(optimizer)
        self.copies: NeighbourCopies | None = None
        """Exchange of files with other machines if this saver writes to the machines' memory, otherwise None."""
        self._buffers = HostBuffers()
        self._named = set[str]()
        """Sentences about folders that stay, which have been printed."""
        self._group = background_group()
        self._thread: ThreadPoolExecutor
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._wait()
        finally:
            self.copying.remove()

    def save(self, progress: Progress, *, written: Callable[[], None] = lambda: None, final: bool = False) -> None:
        """Start to write a checkpoint of the current state. `written` is called on the first rank when the checkpoint
        is complete.

        The state is copied in the background, and the next optimizer step waits for the end of the copy. The call first
        waits for the previous checkpoint. If the previous checkpoint could not be written and `config.on_failure` is
        `stop`, `CheckpointError` is raised on every rank. If `final` is true, this error is not raised, because
        otherwise the state of the last step would be lost. Call `require_saved` afterwards to check that the final
        checkpoint was written.
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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = self._thread.submit(self._work, job)
        # The thread ends with its save, because a thread that stays alive keeps the OpenMP threads of its loops alive.
        self._thread.shutdown(wait=False)
        self.seconds_held += time.perf_counter() - start

    def finish(self) -> None:
        """Wait until no checkpoint is in progress.

        If the checkpoint in progress could not be written and `config.on_failure` is `stop`, `CheckpointError` is
        raised on every rank. The same failure is not raised again by a later call.
        """
        failure = self._wait()
        if failure is not None and self.config.on_failure == "stop":
            raise failure

    def require_saved(self) -> None:
        """Wait until no checkpoint is in progress. Raise `CheckpointError` if the most recent checkpoint could not be
        written, even if `config.on_failure` is `continue`.
        """
        self._wait()
        if self.failure is not None:
            raise self.failure

    def _wait(self) -> CheckpointError | None:
        """Wait for the checkpoint in progress. Returns the error if the checkpoint could not be written. Otherwise, or
        if no checkpoint is in progress, returns None.
        """
        if self._writing is None:
            return None
        writing, self._writing = self._writing, None
        self._thread.shutdown()
        try:
            writing.result()
            self.failure = None
        except CheckpointError as error:
            self.failure = error
        return self.failure

    def _work(self, job: _Job) -> None:
        """Copy and write the state, in the background thread. A rank that cannot copy still takes part in the
        communication. Otherwise, the other ranks would wait forever.
        """
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
            job.folder,
            job.progress,
            staged=staged,
            placements=placements,
            published=lambda: self._published(job),
            failed=failed,
        )
        writer.copies = self.copies
        try:
            self._write(job.state, writer)
            if self.copies is not None:
                assert isinstance(job.folder, LocalFolder)
                self.copies.publish(job.folder, job.folder.draft())
        except (Exception, CheckpointException) as error:
            # Every error of the storage, including a lost connection to an object store, has one of these two classes.
            ours = isinstance(error, CheckpointException | CheckpointError)
            if not ours and isinstance(error, Exception) and is_lost_connection(error):
                raise  # another rank has failed, which `launch.processes` reports
            writer.discard()
            told = self._told(job, first_cause(error))
            if self.is_first_rank:
                self._warn(told)
            raise told from None

    def keep_in_memory(self, hosts: Hosts) -> None:
        """Write the checkpoints to the memory of the machines `hosts`, and send each machine's files to the next
        machine. `root` must be a folder in memory on every machine.
        """
        self.copies = NeighbourCopies(hosts, self._group)

    def _write(self, state: StateDict, writer: CheckpointWriter) -> None:
        """Write the state. A single rank exchanges no messages.

        If a rank sent a message to itself, gloo would copy the message with a parallel loop in one of gloo's own
        threads, and the OpenMP threads of this loop would stay alive. In a process with more OpenMP threads than cores,
        OpenMP threads no longer spin between two operators, and every later step of a small model takes twice as long.
        """
        is_alone = self._group.size() == 1
        if is_alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            state,
            storage_writer=writer,
            planner=DefaultSavePlanner(),
            process_group=None if is_alone else self._group,
            no_dist=is_alone,
        )

    def _published(self, job: _Job) -> None:
        """Finish a new checkpoint on the first rank: call the job's callback and remove old checkpoints.

        An error here is only reported, because the new checkpoint is complete.
        """
        try:
            job.written()
            keep, every = self.config.keep, self.config.keep_every
            left = drop_old(self.root, newest=job.progress.step, keep=keep, keep_every=every, spared=self.spared)
            for text in [text for text in left if text not in self._named]:
                self._named.add(text)
                echo(f"crosscut: {text}", err=True)
        except Exception as error:
            echo(
                f"crosscut: `{job.folder}` is complete, but recording it or removing old checkpoints failed: "
                f"{reason(error)}.",
                err=True,
            )

    def _told(self, job: _Job, cause: BaseException) -> CheckpointError:
        text = str(cause) if isinstance(cause, CheckpointError) else f"`{job.folder}` was not written: {reason(cause)}."
        goes_on = self.config.on_failure == "continue"
        choice = "" if goes_on else ", or let the run continue with checkpoint.on_failure=continue"
        return CheckpointError(
            f"{text} Any earlier checkpoints are unchanged. Free space, grant access, or set `checkpoint.folder` to "
            f"another folder{choice}."
        )

    def _warn(self, error: CheckpointError) -> None:
        """Report the error as soon as it happens. The ranks act on the error together, at the next checkpoint."""
        follows = "continues" if self.config.on_failure == "continue" else "stops at its next checkpoint"
        echo(f"crosscut: A checkpoint could not be written, and the run {follows}. {error}", err=True)


def save_checkpoint(
    root: str | Path | Folder,
    progress: Progress,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    is_first_rank: bool,
    keep: int,
) -> Folder:
    """Write one checkpoint under `root` and wait until it is complete. Then remove all but the newest `keep`
    checkpoints. Returns the folder of the new checkpoint.

    Every rank must call this function. If the checkpoint cannot be written, `CheckpointError` is raised on every rank.
    """
    config = CheckpointConfig(keep=keep)
    with Saver(root, model=model, optimizer=optimizer, config=config, is_first_rank=is_first_rank) as saver:
        saver.save(progress)
        saver.finish()
    return checkpoint_folder(root, progress.step)
