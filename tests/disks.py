"""Small disks, for tests of everything that writes files."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, kilobytes: int) -> Iterator[Path]:
    """Mount a file system of some kilobytes at a new folder. The test is skipped if mounting is not possible."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)  # a process may still map a file


def remount(place: Path, option: str) -> None:
    """Change an option of the file system: `size=900k`, or `ro`."""
    subprocess.run(["mount", "-o", f"remount,{option}", str(place)], check=True)
