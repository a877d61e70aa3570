"""Record of the skips of a run (`logbook.skips`) at its start and after a rollback, and the checkpoints that agree with
it.
"""

from pathlib import Path

from crosscut.checkpoint import Progress, list_checkpoints, read_manifest
from crosscut.checkpoint.folders import remove_checkpoint
from crosscut.checkpoint.format.manifest import step_of
from crosscut.config import CheckpointError, ConfigError, RunConfig
from crosscut.config.system.deletion import remove_file
from crosscut.logbook.schema import SKIPS_FILE, SPIKES_FOLDER
from crosscut.logbook.skips import SampleSkip, SkipRecord, own_record, read_record
from crosscut.training.spikes.order import agree


def new_record(run: RunConfig) -> SkipRecord:
    """Return the record of a new run: the skips in the file `training.skips`, without the spikes that caused them.
    Raises `ConfigError` if the file cannot be read.
    """
    path = run.training.skips
    return SkipRecord(skips=read_record(Path(path)).skips if path else ())


def write_new_record(run: RunConfig, record: SkipRecord, *, is_new: bool) -> None:
    """Replace an older record in the folder of a new run. A resumed run keeps its own. Raises `ConfigError` if the
    record cannot be written.
    """
    if not is_new:
        return
    folder = Path(run.output.folder)
    try:
        if record.skips:
            record.write(folder)
        elif not remove_file(folder / SPIKES_FOLDER / SKIPS_FILE):
            raise ConfigError(
                f"`{folder / SPIKES_FOLDER / SKIPS_FILE}` must not exist in the folder of a new run, but does, and "
                "Crosscut did not write it. Move it away, or choose another `output.folder`."
            )
    except OSError as error:
        raise ConfigError(
            f"`{folder}` must be a writable folder, but is not: {error.strerror}. Grant access, or choose "
            "another `output.folder`."
        ) from None


def resumed_record(run: RunConfig, progress: Progress) -> SkipRecord:
    """Return the record of a run that resumes from a checkpoint with this progress. It is the record in the run's
    folder or, if there is none, a record of the skips that the checkpoint stores.
    """
    record = own_record(Path(run.output.folder))
    return SkipRecord(skips=skips_of(progress)) if record is None else record


def skips_of(progress: Progress) -> tuple[SampleSkip, ...]:
    """Return the skips that a checkpoint stores."""
    return tuple(SampleSkip(*pair) for pair in progress.skips)


def is_abandoned(run: RunConfig, progress: Progress) -> bool:
    """Whether a checkpoint with this progress does not belong to the run any more, because the run has rolled back to
    an earlier step and left out sequences on which the checkpoint was trained.
    """
    record = own_record(Path(run.output.folder))
    return record is not None and not agree(record.skips, skips_of(progress), done=progress.step)


def drop_abandoned(run: RunConfig) -> list[str]:
    """Remove the checkpoints that do not belong to the run any more, because the run has rolled back to an earlier step
    and left out sequences on which these checkpoints were trained. Returns the names of the removed checkpoints.

    Without a record, no checkpoint is removed. A checkpoint with an unreadable manifest is not removed either. Other
    checks report it. Raises `CheckpointError` for a checkpoint that Crosscut may not remove.
    """
    record = own_record(Path(run.output.folder))
    if record is None:
        return []
    removed = []
    for folder in list_checkpoints(run.checkpoints_folder):
        try:
            progress = read_manifest(folder).progress
        except CheckpointError:
            continue
        if not agree(record.skips, skips_of(progress), done=progress.step):
            if left := remove_checkpoint(folder):
                raise CheckpointError(f"The run cannot resume from an abandoned checkpoint. {left}")
            removed.append(folder.name)
    return removed


def drop_later(run: RunConfig, step: int) -> None:
    """Remove the checkpoints of the steps after `step`, because the run has rolled back to step `step`. Raises
    `CheckpointError` for a checkpoint that Crosscut may not remove.
    """
    for folder in list_checkpoints(run.checkpoints_folder):
        if (step_of(folder.name) or 0) > step and (left := remove_checkpoint(folder)):
            raise CheckpointError(left)
