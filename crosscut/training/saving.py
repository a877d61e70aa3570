"""Checkpoints of a run on one rank: the loop saves them to disk and to the memory of the machines, and loads them."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from crosscut.checkpoint import Folder, Progress, Saver, folder_at, holds_average, load_checkpoint, read_manifest
from crosscut.config import write_toml
from crosscut.config.conventions import CONFIG_FILE
from crosscut.config.system.folder_lock import FolderLock
from crosscut.flight import RECORD, RunPhase
from crosscut.training.batches import BatchSource
from crosscut.training.spikes.record import skips_of
from crosscut.training.step import Trainer


class RunCheckpoints:
    """Checkpoints of one run. Every rank calls the same methods in the same order, inside the context `completed`."""

    def __init__(
        self, trainer: Trainer, batches: BatchSource, *, identity: Mapping[str, object], lock: FolderLock | None
    ) -> None:
        """`identity` describes the run in its checkpoints (`checkpoint.Progress`). `lock` is the lock of the run's
        folders, on the first rank.
        """
        self.run, self.trainer, self.batches = trainer.run.config, trainer, batches
        self.identity, self.lock = dict(identity), lock
        self.saver = Saver(
            self.run.checkpoints_folder,
            model=trainer.model,
            optimizer=trainer.optimizer,
            more=trainer.more_state,
            config=self.run.checkpoint,
            is_first_rank=trainer.mesh.is_first_rank,
        )
        self.memory_saver: Saver | None = None
        """Saver that writes to the memory of the machines every `checkpoint.in_memory` steps. None if the run keeps no
        checkpoints there."""

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Context that waits at its end for the checkpoints in progress, even if the run fails."""
        with ExitStack() as savers:
            for saver in self.savers:
                savers.enter_context(saver)
            yield

    @property
    def savers(self) -> tuple[Saver, ...]:
        """All savers of the run."""
        return (self.saver,) if self.memory_saver is None else (self.saver, self.memory_saver)

    def require_folder(self) -> None:
        """Raise `TrainingError` if the run's folder was moved away, or another run has taken it over."""
        if self.lock is not None:
            self.lock.require_held()

    def save(self, step: int, *, final: bool = False) -> None:
        """Start writing a checkpoint of the state after `step` steps. When the checkpoint is complete, also write the
        run's config.

        Raises `CheckpointError` if the previous checkpoint could not be written and `checkpoint.on_failure` is `stop`.
        With `final`, the checkpoint is written even in this case.
        """
        RECORD.phase(RunPhase.CHECKPOINT)
        self.require_folder()
        self._share_errors()
        config = Path(self.run.output.folder) / CONFIG_FILE
        self.saver.save(self._progress(step), written=lambda: write_toml(self.run, config), final=final)

    def save_in_memory(self, step: int) -> None:
        """Start writing a checkpoint of the state after `step` steps to the memory of the machines. If that fails, the
        run continues, and the failure is reported.
        """
        assert self.memory_saver is not None
        self._share_errors()
        self.memory_saver.save(self._progress(step))

    def _share_errors(self) -> None:
        """Make the errors of gradients in low rank the same on all ranks that hold terms, so that the checkpoint suits
        every layout.
        """
        if self.trainer.low_rank is not None:
            for saver in self.savers:
                saver.copying.wait()
            self.trainer.low_rank.share_errors()

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

    def finish(self) -> None:
        """Wait until all started checkpoints are complete. Raises `CheckpointError` if the last checkpoint could not be
        written and `checkpoint.on_failure` is `stop`.
        """
        RECORD.phase(RunPhase.CHECKPOINT)
        for saver in self.savers:
            saver.finish()

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
