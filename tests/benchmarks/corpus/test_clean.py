"""The benchmark of cleaning runs, and tells documents that differ."""

import json
import subprocess
import sys
from pathlib import Path

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
