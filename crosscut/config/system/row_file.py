"""Files to which a run appends rows of JSON, one per line. Each row has the number of steps done (`step`), so that the
rows of undone steps can be removed.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from crosscut.config.checks import MOST
from crosscut.config.system.files import open_own, parse_json, require_regular, write_whole

Row = dict[str, Any]


class RowFile:
    """File of rows to which a run appends. Begin with `start`. All methods raise `OSError` if the file cannot be
    written.

    `is_row` says whether a run can have written a row (`read_rows`), and `longest` is the maximum number of characters
    of a line.
    """

    def __init__(self, path: Path, is_row: Callable[[Row], bool], *, longest: int) -> None:
        self.path, self._is_row, self._longest = path, is_row, longest
        self._file: IO[str] | None = None

    def start(self, step: int) -> list[Row]:
        """Open the file of a run that continues from a step. Rows of later steps, written by an earlier start of the
        run, and incomplete lines are removed, and all rows if `step` is 0. Returns the rows that are left.
        """
        return self._keep(self._rows(until=step) if step else [])

    def rewind(self, step: int) -> list[Row]:
        """Remove the rows of the steps after `step`. Returns the rows that are left."""
        return self._keep(self._rows(until=step))

    def append(self, row: Mapping[str, object]) -> None:
        """Write a row. The row is in the file when the call returns."""
        assert self._file is not None
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _rows(self, *, until: int) -> list[Row]:
        return [row for row in read_rows(self.path, self._is_row, longest=self._longest) if row["step"] <= until]

    def _keep(self, rows: list[Row]) -> list[Row]:
        """Replace the file by one with these rows, and open it for appending."""
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in rows))
        file = open_own(self.path, "a")
        self.close()
        self._file = file
        return rows


def read_rows(path: Path, is_row: Callable[[Row], bool], *, longest: int) -> list[Row]:
    """Read the rows of a file. Lines that a run cannot have written are skipped, and so are incomplete lines, which a
    crash or a full disk can leave. Returns no rows if the file is missing. Raises `OSError` if the file cannot be read
    or is not a regular file.
    """
    rows: list[Row] = []
    if not path.exists():
        return rows
    require_regular(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(longest):
            with suppress(ValueError):
                row = parse_json(line if line.endswith("\n") else "")
                if isinstance(row, dict) and type(step := row.get("step")) is int and 0 <= step <= MOST and is_row(row):
                    rows.append(row)
    return rows
