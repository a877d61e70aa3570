"""A run whose checkpoints cannot be written, as its user sees it."""

import resource
import subprocess
import sys

import pytest

from tests.cli.conftest import TINY

LIMIT = 200_000
"""Bytes that a file may have: enough for the metrics, too few for a checkpoint of 0.5 MB."""


def train(book, folder, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A run on a disk that takes no large files, which every write finds out as it does a full disk."""
    command = [sys.executable, "-m", "crosscut", "train", *TINY, "checkpoint.every=1"]
    return subprocess.run(
        [*command, f"data.text={book}", f"output.folder={folder}", *overrides],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT)),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is raised as an error on Linux")
def test_run_stops_when_a_checkpoint_cannot_be_written(book, tmp_path):
    result = train(book, tmp_path / "run", "layout.tensor=2")
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("crosscut:")]
    assert lines[0].startswith(
        "crosscut: A checkpoint could not be written, and the run stops at its next checkpoint. "
    )
    assert lines[-1].startswith(f"crosscut: `{tmp_path}/run/checkpoints/step-00000001` must be writable, but is not: ")
    assert "File too large" in lines[-1]
    assert len(lines) == 2, "once when it happens, once at the end; not once per rank"


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is raised as an error on Linux")
@pytest.mark.slow
def test_run_goes_on_without_checkpoints_if_it_is_to(book, tmp_path):
    result = train(book, tmp_path / "run", "layout.tensor=1", "checkpoint.on_failure=continue")
    assert "after 4 steps" in result.stdout
    assert result.stderr.count("A checkpoint could not be written, and the run continues.") == 4, "said at each"
    assert result.returncode == 2, "the trained model is nowhere, which the exit status must tell"
    assert "step-00000004` must be writable" in result.stderr.strip().splitlines()[-1]
