import os
from collections.abc import Callable
from pathlib import Path

import pytest

from crosscut.config.corpora import EngineConfig
from crosscut.config.errors import DataError
from crosscut.corpus.execution.engine import WORKERS_LOCK, start_engine


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
