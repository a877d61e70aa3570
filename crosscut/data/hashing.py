"""SHA-256 of several files in parallel. Threads suffice, because hashing releases the interpreter lock."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from crosscut.config.system.byte_progress import byte_progress
from crosscut.config.system.files import require_regular
from crosscut.config.system.machine import available_cores

_BLOCK = 1 << 20


def sha256(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256 of one file, in hexadecimal. After each block, `advance` is called with the block's number of bytes.
    Raises `OSError` if the file is not a regular file or cannot be read.
    """
    require_regular(path)
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
            advance(size)
    return digest.hexdigest()


def sha256_of_all(paths: Sequence[Path], *, description: str = "") -> list[str]:
    """SHA-256 of several files, in the given order. With `description`, long work shows its progress under this name.
    Raises `OSError` for a file that cannot be read.
    """
    total = sum(path.stat().st_size for path in paths) if description else 0
    with byte_progress(description, total, shown=bool(description)) as advance:
        return list(sha256_of_each(paths, advance))


def sha256_of_each(paths: Sequence[Path], advance: Callable[[int], None] = lambda _: None) -> Iterator[str]:
    """Yield the SHA-256 of several files, in the given order, each as soon as it is known. Raises `OSError` for a file
    that cannot be read.
    """
    with ThreadPoolExecutor(available_cores()) as pool:
        yield from pool.map(partial(sha256, advance=advance), paths)
