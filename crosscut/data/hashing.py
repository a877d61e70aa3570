"""SHA-256 of several files in parallel. Threads suffice, because hashing releases the interpreter lock."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from crosscut.config.system.files import require_regular
from crosscut.config.system.machine import available_cores


def sha256(path: Path) -> str:
    """SHA-256 of one file, in hexadecimal. Raises `OSError` if the file is not a regular file or cannot be read."""
    require_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_all(paths: Sequence[Path]) -> list[str]:
    """SHA-256 of several files, in the given order. Raises `OSError` for a file that cannot be read."""
    return list(sha256_of_each(paths))


def sha256_of_each(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the SHA-256 of several files, in the given order, each as soon as it is known. Raises `OSError` for a file
    that cannot be read.
    """
    with ThreadPoolExecutor(available_cores()) as pool:
        yield from pool.map(sha256, paths)
