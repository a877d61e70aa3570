"""Origins of documents: paths of files and skipped records, as they were written."""

from pathlib import Path

import pytest

from crosscut.corpus import origins
from crosscut.corpus.origins import (
    Skipped,
    SkippedWriter,
    files_name,
    find_path,
    read_skipped,
    skipped_name,
    write_files,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ingest").mkdir()
    return tmp_path / "ingest"


def test_skipped_records_come_back_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "_ROWS_AT_ONCE", 4)
    rows = [Skipped("wiki/dump.xml", number, "redirect" if number % 3 else "blank") for number in range(1, 11)]
    for task, own in (("000001", rows[6:]), ("000000", rows[:6]), ("000002", [])):
        with SkippedWriter(folder / skipped_name(task)) as writer:
            for row in own:
                writer.add(row)
    assert list(read_skipped(folder.parent)) == rows


def test_path_of_a_file_is_found_by_its_name(folder: Path) -> None:
    write_files(folder / files_name("000000"), [("web/print.html", "/data/book/print.html")])
    write_files(folder / files_name("000001"), [("web/bad.html", "/data/\udcff.html")])
    assert find_path(folder.parent, "web/print.html") == "/data/book/print.html"
    assert find_path(folder.parent, "web/print.html", task="000001") is None
    assert find_path(folder.parent, "web/bad.html", task="000001") == "/data/\\udcff.html"
    assert find_path(folder.parent, "web/print.html", task="000009") is None, "no such task"
