"""Files of a run's folder that hold one JSON object with the version of the schema."""

from collections.abc import Mapping
from pathlib import Path

from crosscut.config.system.files import json_or_none, write_json
from crosscut.config.system.records import to_json
from crosscut.logbook.schema import VERSION, require_version


def write_object(path: Path, value: object) -> None:
    """Write a mapping or a dataclass as a JSON object with the version of the schema, atomically. Raises `OSError`."""
    write_json(path, {"version": VERSION, **to_json(value)})


def read_object(path: Path) -> Mapping[str, object] | None:
    """Read a JSON object. Returns None if the file is missing or holds something else. Raises `NewerFileError`."""
    table = json_or_none(path)
    if not isinstance(table, dict):
        return None
    require_version(table.get("version"), path)
    return table
