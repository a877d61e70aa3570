"""Reading of JSON, atomic writing of small files, and a check that a file can be written."""

import json
import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from crosscut.config.errors import ConfigError


def parse_json(content: str | bytes) -> Any:
    """Parse JSON. Raises `ValueError` if the content is not JSON, and also if it is nested too deeply (Python's own
    reader raises `RecursionError`).
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: to a temporary file first, which is flushed to the disk and then renamed. After a crash,
    the path holds either the old content or the new content, never a part.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # a full disk: a part of the file would only take up room
        temporary.unlink(missing_ok=True)
        raise


def require_writable_file(setting: str, path: Path) -> None:
    """Raise `ConfigError`, which names `setting`, unless a file can be written at `path`. Call this before the work
    starts; the check leaves no file behind.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"`{setting}` must name a file, but `{path}` is a folder. Name a file in the folder.")
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise ConfigError(
            f"`{setting}` must name a file that can be written, but is `{path}`: {error.strerror}. Create its folder, "
            "or name another file."
        ) from None
