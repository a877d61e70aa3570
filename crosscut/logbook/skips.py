"""Record of the sequences that a run has left out: `spikes/skips.json` in the run's folder.

The record makes a run repeatable without the rule that finds spikes: a new run with `training.skips` leaves out the
same sequences at the same steps. After a spike, the record is written before training continues, so a run that is
killed and resumed still leaves out these sequences.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from crosscut.config import ConfigError
from crosscut.config.system.deletion import enter_folder
from crosscut.config.system.files import read_json
from crosscut.config.system.records import Count, from_json
from crosscut.logbook.objects import write_object
from crosscut.logbook.schema import SKIPS_FILE, SPIKES_FOLDER, require_version


@dataclass(frozen=True, order=True)
class SampleSkip:
    """Sequences that a run leaves out between two steps."""

    step: Count
    """Number of steps done before the run leaves out the sequences."""
    sequences: Count
    """Number of sequences that the run leaves out."""


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
        write_object(folder / SPIKES_FOLDER / SKIPS_FILE, self)

    def next_file(self, step: int) -> str:
        """Return the name of the file about the next spike, at step `step`, counted from 1."""
        return f"{len(self.events) + 1:02d}-step-{step:06d}.txt"

    def with_event(self, skips: Iterable[SampleSkip], event: Event) -> "SkipRecord":
        """Return the record after another spike, with `event` added. `skips` replaces the skips of the record."""
        return replace(self, skips=tuple(skips), events=(*self.events, event))


def read_record(path: Path) -> SkipRecord:
    """Read a record. Raises `ConfigError` if the file cannot be read or does not hold a record."""
    table = read_json(path, remedy="Give the `skips.json` of a run, or remove the setting.")
    require_version(table.get("version"), path)
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
    path = folder / SPIKES_FOLDER / SKIPS_FILE
    return read_record(path) if path.exists() else None
