"""A run whose token shards another program changes, as its user sees it."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from crosscut.cli.main import EXIT_DAMAGED
from tests.cli.conftest import TINY


@contextmanager
def changed_in_the_meantime(run: Path, name: str, size: int) -> Iterator[None]:
    """Truncate a file of the run's tokens as soon as the run has trained for some steps."""

    def change() -> None:
        metrics, end = run / "metrics.jsonl", time.monotonic() + 60
        while time.monotonic() < end and not (metrics.is_file() and metrics.read_text().count("loss") > 2):
            time.sleep(0.01)
        os.truncate(run / "tokens" / name, size)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.slow  # tests/data/shards has the error, and test_damage.py its exit status
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("train-0.tokens", "layout.tensor=1"),
        ("train-0.tokens", "layout.tensor=2"),  # a rank that only loses its connection waits for seconds
        ("validation.tokens", "layout.tensor=2"),  # the same error on another thread
    ],
)
def test_run_whose_shard_is_truncated_ends_with_one_message(crosscut_here, book, tmp_path, name, layout):
    run = tmp_path / "run"
    settings = (
        *TINY,
        "data.num_shards=1",
        "training.steps=100000",
        "checkpoint.every=50",
        "training.validate_every=20",
    )
    with changed_in_the_meantime(run, name, 10):
        result = crosscut_here("train", *settings, f"data.text={book}", f"output.folder={run}", layout)
    assert result.returncode == EXIT_DAMAGED, result.stderr
    told = [line for line in result.stderr.splitlines() if line.startswith("crosscut: ")]
    assert len(told) == 1, result.stderr
    assert told[0].startswith(f"crosscut: `{run}/tokens/{name}` must not change while it is read, but now has 10 bytes")
    assert "Checkpoints that have been written are safe." in told[0]
    assert "Traceback" not in result.stderr
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
