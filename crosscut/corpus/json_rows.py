"""Read, row by row, the .jsonl files that stages write into a corpus's `work` folder. Each row is checked, because a
faulty disk or another program may have damaged the files.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crosscut.config.errors import DamagedDataError
from crosscut.config.system.files import require_regular
from crosscut.data.text.json_text import parse_record
from crosscut.data.text.sources import unreadable

JsonRow = dict[str, Any]
"""Row of a .jsonl file: a JSON object."""

REJECT_KEYS = frozenset({"name", "source", "file", "place", "rule", "reason", "excerpt"})
"""Keys of every row in a file `*.rejects.jsonl` of the stage `ingest`."""

_LONGEST_LINE = 1 << 24
"""Maximum number of characters in a line. Stages write excerpts of some hundred characters."""


def read_rows(path: Path, keys: frozenset[str]) -> Iterator[JsonRow]:
    """Yield the rows of a .jsonl file. Each row is a JSON object that has at least the given keys.

    Raises `DataError` if the file cannot be read, and `DamagedDataError` if a line is not a JSON object with these
    keys.
    """
    try:
        require_regular(path)
        with path.open(encoding="utf-8", errors="replace") as file:
            number = 0
            while line := file.readline(_LONGEST_LINE):
                number += 1
                yield _parsed(path, number, line, keys)
    except OSError as error:
        raise unreadable(str(path), error) from None


def _parsed(path: Path, number: int, line: str, keys: frozenset[str]) -> JsonRow:
    try:
        row = parse_record(line)
    except ValueError as error:
        reason = str(error)
    else:
        if isinstance(row, dict) and keys <= row.keys():
            return row
        reason = f"it is not a JSON object with {', '.join(f'`{key}`' for key in sorted(keys))}"
    raise DamagedDataError(
        f"`{path}`, line {number}, must be unchanged since `crosscut prepare` wrote it, but is damaged: {reason}. "
        f"Delete the folder `{path.parent}`, and start `crosscut prepare` again."
    )
