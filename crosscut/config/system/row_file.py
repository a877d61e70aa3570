"""Files to which a run appends rows of JSON, one per line. Each row has the number of steps done (`step`), so that the
rows of undone steps can be removed.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from crosscut.config.checks import MOST
from crosscut.config.system.files import open_own, parse_json, require_regular, write_whole

Row = dict[str, Any]


class RowFile:
    """File of rows that is open for appending. `start` is the step from which the run continues. Rows of later steps,
    written by an earlier start of the run, and incomplete lines are removed, and all rows if `start` is 0.

    `is_row` says whether a run can have written a row (`read_rows`), and `longest` is the maximum number of characters
    of a line. All methods raise `OSError` if the file cannot be written.
    """

    def __init__(self, path: Path, is_row: Callable[[Row], bool], *, longest: int, start: int) -> None:
        self.path, self._is_row, self._longest = path, is_row, longest
        rows = self._rows() if start else []
        self.kept = [row for row in rows if row["step"] <= start]
        """Rows of earlier starts of the run."""
        write_whole(path, _lines(self.kept))
        self._file: IO[str] = open_own(path, "a")

    def append(self, row: Mapping[str, object]) -> None:
        """Write a row. The row is in the file when the call returns."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Remove the rows of the steps after `step`."""
        self.kept = [row for row in self._rows() if row["step"] <= step]
        write_whole(self.path, _lines(self.kept))
        file = open_own(self.path, "a")
        self._file.close()
        self._file = file

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _rows(self) -> list[Row]:
        return read_rows(self.path, self._is_row, longest=self._longest)


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


def _lines(rows: Iterable[Row]) -> str:
    """Return the content of a file with these rows."""
    return "".join(json.dumps(row) + "\n" for row in rows)
