"""Tests with the marker `alone`, which run while no other process of the same pytest runs a test."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the time limit: waiting does not count
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Wait until the test may run, if several processes run the tests."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    folder = item.config._tmp_path_factory.getbasetemp().parent  # type: ignore[attr-defined]  # the same in all processes
    with turn(folder, alone=item.get_closest_marker("alone") is not None):
        return (yield)


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Hold the lock of running tests, shared with other tests or alone.

    Every test first takes the lock of the queue. A test that waits to be alone keeps the queue's lock, so that no other
    test can start before it.
    """
    with opened(folder / "running.lock") as running:
        with opened(folder / "queue.lock") as queue:
            fcntl.flock(queue, fcntl.LOCK_EX)
            fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open the file of a lock, and release the lock at the end, also where a child of the test has inherited it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        yield file
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)
