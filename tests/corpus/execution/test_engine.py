"""Engines: where their tasks run, and the lock of their workers."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from crosscut.config.corpora import EngineConfig
from crosscut.config.errors import DataError
from crosscut.corpus.execution.engine import WORKERS_LOCK, TaskCall, start_engine
from crosscut.corpus.execution.stages import Counts, Output, StageTask


@pytest.fixture(autouse=True)
def _forked_workers() -> None:
    """Workers are spawned here, as outside of the tests."""


def look_around(output: Output) -> Counts:
    return {"parent": os.getppid(), "ignores_interrupts": signal.getsignal(signal.SIGINT) == signal.SIG_IGN}


def test_task_runs_in_a_process_that_this_one_has_started(tmp_path: Path) -> None:
    (tmp_path / "stage").mkdir()
    with start_engine(EngineConfig(workers=2), tmp_path) as engine:
        (record,) = engine.run([TaskCall(tmp_path / "stage", StageTask(name="a", function=look_around), "key")])
    assert record.counts == {"parent": os.getpid(), "ignores_interrupts": True}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere")])
def test_lock_that_is_no_file_is_told_instead_of_waited_for(
    tmp_path: Path, make: Callable[[Path], None], workers: int
) -> None:
    make(tmp_path / WORKERS_LOCK)
    with (
        pytest.raises(DataError, match=r"\.workers\.lock` must be a regular file, but is not: "),
        start_engine(EngineConfig(workers=workers), tmp_path),
    ):
        pass
