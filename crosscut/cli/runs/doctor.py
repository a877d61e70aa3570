"""`crosscut doctor`."""

import time
from pathlib import Path

import click

from crosscut.cli.arguments import LocalPath
from crosscut.config import ConfigError
from crosscut.config.system.terminal import echo

_LATE = 15.0
"""A rank counts as not answering if its monitoring thread, which normally runs every second, has not run for this many
seconds."""


@click.command()
@click.option(
    "--attach",
    "run",
    type=LocalPath(path_type=Path),
    metavar="RUN",
    help="Folder of a run that is training, or that was killed.",
)
def doctor(run: Path | None) -> None:
    """Explain what every rank of a run is doing now or, without a run, what this machine can do.

    Without --attach, the command says what this machine has, what a run would use, and how to get what is missing.

    With --attach, the command reads the records that the ranks keep of their messages and of their position in the
    program. If ranks wait in a collective, the report names the collective, the ranks that have not reached it, and the
    ranks that are waiting for them (docs/hangs.md). The command does not disturb the run, and also works while a rank
    is stopped. The state of ranks on other machines may be up to five seconds old.
    """
    if run is None:
        from crosscut.cli.runs.machine import show_machine

        show_machine()
    else:
        _explain(run)


def _explain(run: Path) -> None:
    """Print what every rank of the run in this folder is doing."""
    from crosscut.flight.reading import (
        RankStatus,
        is_here,
        outside_stack,
        read_records,
        read_statuses,
        read_traces,
    )
    from crosscut.flight.record import RecordWord
    from crosscut.flight.report import describe, examine, seconds_without_progress
    from crosscut.logbook.contents import read_summary
    from crosscut.logbook.schema import WATCH_FOLDER

    folder = run / WATCH_FOLDER
    records = {} if read_summary(run) else read_records(folder)  # an elastic run leaves the records of lost ranks
    if not records:
        raise ConfigError(
            f"`--attach` must name the folder of a run that is training, but `{run}` has no records of ranks (in "
            f"`{folder}`). A run that has ended has no records. Check the path."
        )
    now = time.monotonic_ns()
    answering = {
        rank: RankStatus({"by py-spy": stack} if (stack := outside_stack(record)) else {}, 0.0, rank)
        for rank, record in records.items()
        if not is_here(record) or record.since(RecordWord.BEAT, now) < _LATE
    }
    seconds = seconds_without_progress(records, now)
    bound = max(record.words[RecordWord.BOUND] for record in records.values()) / 1e9
    statuses = {**answering, **read_statuses(folder)}
    hang = examine(records, statuses, read_traces(folder), seconds=seconds, bound=bound if seconds > bound else 0.0)
    echo(describe(hang), nl=False)
