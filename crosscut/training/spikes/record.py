"""Record of the sequences that a run has left out: `spikes/skips.json` in the run's folder.

The record makes a run repeatable without the rule that finds spikes: a new run with `training.skips` leaves out the
same sequences at the same steps. After a spike, the record is written before training continues, so a run that is
killed and resumed still leaves out these sequences.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from crosscut.checkpoint import Progress, list_checkpoints, read_manifest
from crosscut.checkpoint.folders import remove_checkpoint
from crosscut.checkpoint.format.manifest import step_of
from crosscut.config import CheckpointError, ConfigError, RunConfig
from crosscut.config.system.deletion import enter_folder, remove_file
from crosscut.config.system.files import read_json, write_json
from crosscut.config.system.records import from_json
from crosscut.training.spikes.order import SampleSkip, agree
from crosscut.training.spikes.rule import Alarm

SPIKES_FOLDER = "spikes"
RECORD_FILE = "skips.json"


@dataclass(frozen=True, kw_only=True)
class Event:
    """Spike after which the run rolled back to an earlier step."""

    spike_step: int
    """Step of the spike, counted from 1."""
    back_to: int
    """Number of steps done in the state to which the run rolled back."""
    sequences: int
    """Number of sequences that the run left out because of this spike."""
    reason: str
    """Description of the spike."""
    file: str
    """Name of a file in the folder `spikes`. The file lists the sequences that were left out."""

    @classmethod
    def after(cls, record: "SkipRecord", alarm: Alarm, *, back_to: int, sequences: int) -> Self:
        """Return the event for the spike `alarm`, which comes after the events in `record`."""
        step = alarm.step + 1
        name = f"{len(record.events) + 1:02d}-step-{step:06d}.txt"
        return cls(spike_step=step, back_to=back_to, sequences=sequences, reason=alarm.reason, file=name)

    @property
    def told(self) -> str:
        """Message for the user about the rollback."""
        return (
            f"The run rolls back to step {self.back_to} and leaves out {self.sequences:,} sequences, which "
            f"`{SPIKES_FOLDER}/{self.file}` lists."
        )


@dataclass(frozen=True, kw_only=True)
class SkipRecord:
    """Skips of a run, and the spikes that caused them."""

    skips: tuple[SampleSkip, ...] = ()
    events: tuple[Event, ...] = ()
    """Spikes that the run itself has found. Empty for skips that come from the record of another run."""

    def write(self, folder: Path) -> None:
        """Write the record atomically to a run's folder. Raises `OSError`."""
        enter_folder(folder, SPIKES_FOLDER)
        write_json(folder / SPIKES_FOLDER / RECORD_FILE, asdict(self), indent=1)


def read_record(path: Path) -> SkipRecord:
    """Read a record. Raises `ConfigError` if the file cannot be read or does not hold a record."""
    table = read_json(path, remedy="Give the `skips.json` of a run, or remove the setting.")
    try:
        record = from_json(SkipRecord, table)
        steps = [skip.step for skip in record.skips]
        if "skips" not in table or steps != sorted(set(steps)) or any(skip.sequences < 1 for skip in record.skips):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"`{path}` must hold the skips of a run, in ascending order of their steps, but does not. Use an "
            "unmodified `spikes/skips.json` from a run."
        ) from None
    return record


def own_record(folder: Path) -> SkipRecord | None:
    """Read the record in a run's folder. Returns None if there is no record. Raises `ConfigError` if the record cannot
    be read.
    """
    path = folder / SPIKES_FOLDER / RECORD_FILE
    return read_record(path) if path.exists() else None


def new_record(run: RunConfig) -> SkipRecord:
    """Return the record of a new run: the skips in the file `training.skips`, without the spikes that caused them. The
    new record replaces an older record in the run's folder. Raises `ConfigError` if `training.skips` cannot be read or
    the record cannot be written.
    """
    path = run.training.skips
    record = SkipRecord(skips=read_record(Path(path)).skips if path else ())
    folder = Path(run.output.folder)
    try:
        if record.skips:
            record.write(folder)
        elif not remove_file(folder / SPIKES_FOLDER / RECORD_FILE):
            raise ConfigError(
                f"`{folder / SPIKES_FOLDER / RECORD_FILE}` must not exist in the folder of a new run, but does, and "
                "Crosscut did not write it. Move it away, or choose another `output.folder`."
            )
    except OSError as error:
        raise ConfigError(
            f"`{folder}` must be a writable folder, but is not: {error.strerror}. Grant access, or choose "
            "another `output.folder`."
        ) from None
    return record


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


def with_event(record: SkipRecord, skips: Iterable[SampleSkip], event: Event) -> SkipRecord:
    """Return the record after another spike, with `event` added. `skips` replaces the skips of the record."""
    return replace(record, skips=tuple(skips), events=(*record.events, event))
