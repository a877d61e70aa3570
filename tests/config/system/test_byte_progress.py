"""Progress of long work on bytes."""

import re
from pathlib import Path

import pytest

from crosscut.config.system.byte_progress import byte_progress
from crosscut.data.hashing import sha256_of_all


def test_a_log_gets_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with byte_progress("check big", 10**12) as advance:
        for _ in range(25):
            now[0] += 1
            advance(10**9)
    assert capsys.readouterr().err.splitlines() == [
        "check big  10.0 of 1,000.0 GB  1,000 MB/s  0:16:30 left",
        "check big  20.0 of 1,000.0 GB  1,000 MB/s  0:16:20 left",
    ]


def test_short_work_and_work_that_is_not_shown_say_nothing(capsys: pytest.CaptureFixture[str]):
    for shown in (True, False):
        with byte_progress("check", 10, shown=shown) as advance:
            advance(10)
    assert capsys.readouterr().err == ""


def test_hashing_of_several_files_shows_one_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_bytes(file.name.encode() * 3_000_000)
    quiet = sha256_of_all(files)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("crosscut.config.system.byte_progress.SECONDS_BETWEEN_LINES", -1.0)
    assert sha256_of_all(files, description="hash text") == quiet
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 9, "three blocks of three files"
    assert re.match(r"hash text  0\.0 of 0\.0 GB  [\d,]+ MB/s", lines[-1])
