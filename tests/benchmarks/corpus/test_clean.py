"""The benchmark of cleaning runs, and tells documents that differ."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.corpus.clean import main

ROOT = Path(__file__).parents[3]


def test_tiny_run_reports_differences_and_speed(tmp_path: Path) -> None:
    (tmp_path / "mail").mkdir()
    (tmp_path / "mail" / "1.txt").write_bytes(b'Subject: caf\xe9\r\n\r\nA "quoted" word -- and Sm\xf6rg\xe5sbord.\r\n')
    (tmp_path / "mail" / "2.txt").write_text("Plain.\n", encoding="utf-8")
    script, report = str(ROOT / "benchmarks" / "corpus" / "clean.py"), tmp_path / "report.json"
    command = [sys.executable, script, "--mail", str(tmp_path / "mail"), "--workers", "1", "--json", str(report)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    figures = json.loads(report.read_text())
    assert list(figures["repair"]) == ["mail", "mail, typeset", "mail, mis-decoded"]
    assert [(one["documents"], one["changed"], one["differ"]) for one in figures["repair"].values()] == [(2, 1, 0)] * 3
    assert figures["language"]["mail"]["documents"] == 2
    assert "mail, typeset" in process.stdout


def test_tables_by_language_count_what_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "zh.txt").write_text("\u597d\uff0c\u5bf9\u3002\n\u201c\u597d\u3002\u201d\n", encoding="utf-8")
    (tmp_path / "en.txt").write_text("One.\nTwo &amp; three.\n", encoding="utf-8")
    report = tmp_path / "report.json"
    options = ["--sentences", str(tmp_path), "--by-language", "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["clean.py", *options])
    main()
    tables = json.loads(report.read_text())["by language"]
    chinese, english = tables["repair by language"]["zh"], tables["repair by language"]["en"]
    assert (chinese["right"], chinese["changed"], chinese["changed_by_ftfy"], chinese["planted"]) == (2, 0, 2, 2)
    assert (english["sentences"], english["right"], english["planted"]) == (2, 1, 0)
    steps = tables["changed by one step"]["zh"]
    assert {key: count for key, count in steps.items() if count} == {"fix_character_width": 1, "uncurl_quotes": 1}
    assert tables["ends of sentences"]["zh"] == {"sentences": 2, "end": 2, "found": 1, "wrong": 0, "joined": 0}
    assert "repair by language" in capsys.readouterr().out
