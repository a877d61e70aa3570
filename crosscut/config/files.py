"""Writing a small file so that it is never seen half written."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write beside, flush to the disk, rename: after a crash there is the old file or the new one, never a part."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
