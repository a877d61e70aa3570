"""A run whose checkpoints cannot be written, as its user sees it."""

import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from crosscut.checkpoint import list_checkpoints
from crosscut.config.system.markers import MARKER_FILE
from tests.cli.conftest import TINY
from tests.disks import small_disk as disk_of

LIMIT = 200_000
"""Bytes that a file may have: enough for the metrics, too few for a checkpoint of 0.5 MB."""


def train(book, folder, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A run on a disk that takes no large files, which every write finds out as it does a full disk."""
    command = [sys.executable, "-m", "crosscut", "train", *TINY, "checkpoint.every=1"]
    return subprocess.run(
        [*command, f"data.text={book}", f"output.folder={folder}", *overrides], capture_output=True, text=True,
        timeout=120, check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT)),
    )  # fmt: skip


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow  # test_full_disk_stops_the_run_without_a_traceback is quick
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
    assert "Traceback" not in result.stderr
    assert names_in(tmp_path / "run" / "checkpoints") == {MARKER_FILE}, "no part of a failed checkpoint is left"


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is raised as an error on Linux")
@pytest.mark.slow
def test_run_goes_on_without_checkpoints_if_it_is_to(book, tmp_path):
    result = train(book, tmp_path / "run", "layout.tensor=1", "checkpoint.on_failure=continue")
    assert "after 4 steps" in result.stdout
    assert result.stderr.count("A checkpoint could not be written, and the run continues.") == 4, "said at each"
    assert result.returncode == 2, "the trained model is nowhere, which the exit status must tell"
    assert "step-00000004` must be writable" in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert names_in(tmp_path / "run" / "checkpoints") == {MARKER_FILE}
    assert (tmp_path / "run" / "summary.json").exists(), "small files still fit"
    assert (tmp_path / "run" / "loss.png").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own, of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2M", "tmpfs", folder], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting a disk is not permitted")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_full_disk_stops_the_run_without_a_traceback(crosscut_here, book, tmp_path):
    """The disk has room for the first rows of the metrics and for the first scalars, but for no checkpoint."""
    tokens = f"data.tokens={tmp_path / 'tokens'}"
    settings = (*TINY, f"data.text={book}", tokens, "training.steps=24", "checkpoint.every=12", "layout.tensor=1")
    with disk_of(tmp_path / "disk", 32) as disk:
        result = crosscut_here(
            "train", *settings, f"output.folder={disk / 'run'}", "checkpoint.on_failure=stop", status=2
        )
        assert "Traceback" not in result.stderr + result.stdout
        told = "Some rows of `metrics.jsonl` cannot be written: No space left on device. Training continues."
        assert result.stdout.count(told) == 1
        last = result.stderr.strip().splitlines()[-1]
        assert last.startswith(f"crosscut: `{disk}/run/checkpoints/step-00000024` must be writable, but is not: ")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the disk is a tmpfs")
def test_full_disk_stops_nothing_but_the_files_that_do_not_fit(book, small_disk):
    """Two checkpoints of 0.6 MB fit beside each other, and one that failed is in nobody's way. Then nothing fits."""
    run = small_disk / "run"
    command = [sys.executable, "-m", "crosscut", "train", *TINY, f"data.text={book}", f"output.folder={run}"]
    command += ["checkpoint.every=1", "checkpoint.keep=1", "checkpoint.on_failure=continue", "training.steps=30"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list_checkpoints(run / "checkpoints"):
        time.sleep(0.01)
    filler = small_disk / "filler"
    with suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    _, errors = process.communicate(timeout=120)
    assert "Traceback" not in errors
    assert process.returncode == 2, errors
    assert "No space left on device" in errors
    assert "The report of the run is not complete either, because a file could not be written: No space" in errors
    hidden = {name for name in names_in(run / "checkpoints") if name.startswith(".")}
    assert hidden == {MARKER_FILE}, "no part of a failed checkpoint is left"
    filler.unlink()
    again = subprocess.run([*command, "--resume", "auto"], capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    assert (run / "summary.json").exists()


def test_run_whose_config_does_not_fit_ends_with_a_message(crosscut_here, book, tmp_path):
    settings = (*TINY, f"data.text={book}", f"data.tokens={tmp_path / 'tokens'}", "layout.tensor=1")
    with disk_of(tmp_path / "disk", 4) as disk:  # one page, which the lock takes
        result = crosscut_here("train", *settings, f"output.folder={disk}", status=2)
        assert result.stderr.splitlines()[-1] == (
            f"crosscut: `{disk}/.crosscut` must be a path that this command can use, but is not: No space left on "
            "device. Free some space, or choose another path."
        )


def test_report_is_written_without_a_sample_if_the_tokenizer_is_gone(crosscut_here, book, tmp_path, monkeypatch):
    from crosscut.training import job

    def write_report(*arguments):
        (tmp_path / "tokens" / "tokenizer.json").unlink()
        return real(*arguments)

    real = job.write_report
    monkeypatch.setattr(job, "write_report", write_report)
    settings = (*TINY, f"data.text={book}", f"data.tokens={tmp_path / 'tokens'}", "layout.tensor=1")
    crosscut_here("train", *settings, f"output.folder={tmp_path / 'run'}", status=0)
    assert (tmp_path / "run" / "summary.json").exists()
    sample = (tmp_path / "run" / "sample.txt").read_text()
    assert sample.startswith("No text. `")
    assert "tokens/tokenizer.json` must exist, but is missing. " in sample
