"""`crosscut metrics`. It is a command and no option of another one, because it needs only the folder, and no torch."""

import csv
import io
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from crosscut.cli.arguments import LocalPath, file_option
from crosscut.config import ConfigError
from crosscut.config.system.files import write_whole
from crosscut.config.system.terminal import echo
from crosscut.logbook.contents import read_metrics
from crosscut.logbook.rows import Row
from crosscut.logbook.schema import METRICS_FILE

_EVENTS = ("hang_", "idle_")
"""Beginnings of keys that belong to events."""


@click.command()
@click.argument("run", type=LocalPath(path_type=Path), metavar="RUN")
@file_option("--csv", metavar="FILE", help="Write the table to this file instead of printing it.")
def metrics(run: Path, csv: Path | None) -> None:
    """Print the figures of a run as a CSV table, with a row for each step.

    RUN is the folder of a run, which may be training. A cell is empty if the step has no such figure. The columns are
    the keys of metrics.jsonl (docs/tables/run-files.md). A terminal shows six digits; files and pipes get all digits.
    """
    try:
        rows = read_metrics(run)
    except OSError as error:
        raise ConfigError(
            f"`{run / METRICS_FILE}` must be a file that can be read, but is not: {error.strerror}. Name the folder of "
            "a run, or grant access."
        ) from None
    if not rows:
        raise ConfigError(
            f"`RUN` must be the folder of a run that has trained, but `{run}` has no rows in `{METRICS_FILE}`. "
            "Check the path."
        )
    if csv is not None:
        write_whole(csv, table_of(rows))
    else:
        echo(table_of(_rounded(rows) if sys.stdout.isatty() else rows), nl=False)


def _rounded(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with figures of six digits, for people."""
    return [{key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()} for row in rows]


def table_of(rows: Iterable[Row]) -> str:
    """Return the figures in rows of `metrics.jsonl` as CSV. Rows of one step become one row."""
    by_step: dict[int, Row] = {}
    for row in rows:
        figures = {key: value for key, value in row.items() if not key.startswith(_EVENTS)}
        by_step.setdefault(row["step"], {}).update(figures)
    columns = dict.fromkeys(key for row in by_step.values() for key in row)
    table = io.StringIO()
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(by_step[step] for step in sorted(by_step))
    return table.getvalue()
