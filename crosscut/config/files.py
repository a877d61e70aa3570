"""Atomic writing of small files."""

import os
from pathlib import Path


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
