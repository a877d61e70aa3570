"""Files to which a run appends rows of JSON, one per line. Each row has the number of steps done (`step`), so that the
rows of undone steps can be removed.

The first row has the version of the schema, and the time at which the file was last written anew. A reader that follows
the file sees by this row that rows were removed, even if the new file has the inode of the old one.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from crosscut.config.checks import MOST
from crosscut.config.system.files import open_own, parse_json, require_regular, write_whole
from crosscut.logbook.schema import (
    LOADS_FILE,
    MEASUREMENTS_FILE,
    METRICS_FILE,
    RESTARTS_FILE,
    SAMPLES_FILE,
    VERSION,
    require_version,
)

_LARGEST = 1e300
"""Largest figure of a row. JSON can hold integers that are too large to be converted to a float."""

Row = dict[str, Any]
"""Row of a file. In `metrics.jsonl`, the values are numbers or None."""


@dataclass(frozen=True)
class RowRule:
    """Rule for the lines of a file that a run can have written."""

    is_row: Callable[[Row], bool]
    longest: int
    """Maximum number of characters of a line."""

    def parse(self, line: str) -> Row | None:
        """Parse a line. Returns None for a line that no run can have written, and for an incomplete line."""
        with suppress(ValueError):
            row = parse_json(line if line.endswith("\n") else "")
            if isinstance(row, dict) and type(step := row.get("step")) is int and 0 <= step <= MOST:
                return row if self.is_row(row) or is_header(row) else None
        return None


def _are_numbers(row: Row) -> bool:
    return all(
        value is None or (isinstance(value, int | float) and not abs(value) > _LARGEST) for value in row.values()
    )


def _are_loads(row: Row) -> bool:
    loads, entropies = row.get("loads"), row.get("entropy")
    return (
        isinstance(loads, dict)
        and isinstance(entropies, dict)
        and bool(loads)
        and loads.keys() == entropies.keys()
        and all(isinstance(of, list) and of and all(map(_is_count, of)) for of in loads.values())
        and all(isinstance(entropy, int | float) and math.isfinite(entropy) for entropy in entropies.values())
    )


def _is_count(load: object) -> bool:
    return type(load) is int and 0 <= load < 1 << 53


def _is_sample(row: Row) -> bool:
    return isinstance(row.get("prompt"), str) and isinstance(row.get("text"), str)


def _is_measured(row: Row) -> bool:
    ranks = row.get("ranks")
    return (
        isinstance(row.get("layout"), str) and isinstance(ranks, list) and all(isinstance(one, dict) for one in ranks)
    )


RULES: Mapping[str, RowRule] = {
    METRICS_FILE: RowRule(_are_numbers, 1 << 20),  # rows of a run have less than a thousand characters
    LOADS_FILE: RowRule(_are_loads, 1 << 24),  # 100 layers of 1,000 experts take a million characters
    SAMPLES_FILE: RowRule(_is_sample, 1 << 20),
    MEASUREMENTS_FILE: RowRule(_is_measured, 1 << 26),
    RESTARTS_FILE: RowRule(lambda row: isinstance(row.get("after"), str), 1 << 20),
}
"""Rules by the name of the file."""


def header(step: int) -> Row:
    """Return the first row of a file that is written anew with the rows up to `step`."""
    return {"step": step, "version": VERSION, "written_at": time.time()}


def is_header(row: Mapping[str, object]) -> bool:
    """Whether a row is the first row of a file."""
    return "written_at" in row


class RowFile:
    """File of rows to which a run appends. Begin with `start`, or with the first row: the file then continues from step
    `begin`. All methods raise `OSError` if the file cannot be written.
    """

    def __init__(self, path: Path, *, begin: int = 0) -> None:
        self.path, self._begin = path, begin
        self._file: IO[str] | None = None

    def start(self, step: int) -> list[Row]:
        """Open the file of a run that continues from a step. Rows of later steps, written by an earlier start of the
        run, and incomplete lines are removed, and all rows if `step` is 0. Returns the rows that are left.
        """
        return self._keep(self._rows(until=step) if step else [], step)

    def rewind(self, step: int) -> list[Row]:
        """Remove the rows of the steps after `step`. Returns the rows that are left."""
        if self._file is None:
            self._begin = min(self._begin, step)
            return []
        return self._keep(self._rows(until=step), step)

    def append(self, row: Mapping[str, object]) -> None:
        """Write a row. The row is in the file when the call returns."""
        if self._file is None:
            self.start(self._begin)
        assert self._file is not None
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _rows(self, *, until: int) -> list[Row]:
        return [row for row in read_rows(self.path) if row["step"] <= until]

    def _keep(self, rows: list[Row], step: int) -> list[Row]:
        """Replace the file by one with these rows, and open it for appending."""
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in (header(step), *rows)))
        file = open_own(self.path, "a")
        self.close()
        self._file = file
        return rows


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Append a row to a file that need not exist and that this process does not keep open. Raises `OSError`."""
    is_cut = _ends_in_half_a_line(path)
    with open_own(path, "a") as file:
        rows = (row,) if file.tell() else (header(0), row)
        file.write("\n" * is_cut + "".join(json.dumps(each) + "\n" for each in rows))


def _ends_in_half_a_line(path: Path) -> bool:
    """Whether a killed run, or a full disk, has left the beginning of a line."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a file, without the first one (`header`). Lines that a run cannot have written are skipped, and
    so are incomplete lines, which a crash or a full disk can leave. Returns no rows if the file is missing. Raises
    `OSError` if the file cannot be read or is not a regular file, and `NewerFileError`.
    """
    rows: list[Row] = []
    if not path.exists():
        return rows
    require_regular(path)
    rule = RULES[path.name]
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(rule.longest):
            row = rule.parse(line)
            if row is not None and is_header(row):
                require_version(row.get("version"), path)
            elif row is not None:
                rows.append(row)
    return rows


def require_readable_rows(path: Path) -> None:
    """Raise `NewerFileError` if a newer Crosscut wrote the file. Only the first row is read."""
    with path.open(encoding="utf-8", errors="replace") as file:
        row = RULES[path.name].parse(file.readline(1000))
    if row is not None and is_header(row):
        require_version(row.get("version"), path)


def without_undone(rows: Iterable[Row]) -> list[Row]:
    """Leave out rows of `metrics.jsonl` that a later row of a training step has undone. A run removes such rows from
    the file, unless the disk was full.
    """
    kept: list[Row] = []
    last = 0
    for row in rows:
        if "loss" in row:
            if row["step"] <= last:
                kept = [one for one in kept if one["step"] < row["step"]]
            last = row["step"]
        kept.append(row)
    return kept
