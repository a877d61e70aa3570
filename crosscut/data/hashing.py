"""SHA-256 of files, several at a time: hashing releases the interpreter lock, so threads suffice."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from crosscut.config.machine import available_cores


def sha256(path: Path) -> str:
    """SHA-256 of one file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_all(paths: Sequence[Path]) -> list[str]:
    """SHA-256 of files, in their order. Raises `OSError` for one that cannot be read."""
    with ThreadPoolExecutor(available_cores()) as pool:
        return list(pool.map(sha256, paths))
