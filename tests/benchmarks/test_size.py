"""The size of a small checkout is counted line by line, beside another one and beside the record."""

import json
from pathlib import Path

import pytest

from benchmarks import size
from tests.benchmarks.conftest import write_files

FILES = {
    "crosscut/__init__.py": "",
    "crosscut/model/gpt.py": '''"""Model."""

from typing import Any  # an import is no use


class GPT:
    """Model."""

    size: int = 3
    """Number of
    parameters."""

    def run(self, first: Any) -> "Any":
        """Run."""
        # a comment
        text = """Two
        lines"""

        return typing.Any(text, first)
''',
    "crosscut/model/large.py": "class Large:\n" + "    def m(self): ...\n" * 16,
    "crosscut/data/small.py": "class Small:\n" + "    def m(self): ...\n" * 15,
    "tests/conftest.py": "import os\n",
    "tests/model/test_gpt.py": '"""Tests."""\n\n\ndef test_a():\n    pass\n',
    "benchmarks/model/speed.py": "x = 1\n",
    "README.md": "three handwritten words\n",
    "docs/page.md": "one <!-- not run: so --> `a b`\n<!-- measured -->\n| 1 |\n<!-- end -->\n"
    "<!-- x: begin -->\nno\n<!-- x: end -->\n",
    "docs/written.md": "<!-- Written by `python docs/generate.py`. -->\n\nmany words\n",
    "docs/faults.md": "# Faults\n\nThis page lists faults.\n`python docs/faults.py` writes this page.\n",
    "docs/decisions/0001-a.md": "not counted\n",
}

EXPECTED = {
    "data": {"code": 16, "nodes": 77, "functions": 15},
    "docs": {"words": 11},
    "model": {
        "code": 7 + 17,
        "nodes": 31 + 82,
        "functions": 17,
        "large classes": 1,
        "Any": 2,
        "tests": 2,
        "benchmarks": 1,
    },
    "no room": {"nodes": 1, "tests": 1},
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return write_files(tmp_path, FILES)


def test_every_column_counts_what_the_program_says(checkout):
    assert size.measure(checkout) == EXPECTED


def test_two_checkouts_stand_in_one_table(checkout, capsys):
    after = write_files(checkout / "after", {"crosscut/__init__.py": "x = 1\n"})
    size.main([str(checkout), str(after)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| room | code | nodes | functions | large classes | Any |")
    assert "| data | 16 -> 0 | 77 -> 0 | 15 -> 0 |  |  |  |  |  |" in lines
    assert lines[-1].startswith("| total | 40 -> 1 |")


def test_the_change_since_the_record_is_printed_with_the_seconds_of_a_run(checkout, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(size, "RECORD", tmp_path / "size.json")
    size.main([str(checkout), "--write"])
    assert json.loads(size.RECORD.read_text()) == EXPECTED
    (checkout / "crosscut" / "data" / "new.py").write_text("x = 1\n")
    run = tmp_path / "run.xml"
    run.write_text('<testsuite><testcase classname="tests.model.test_gpt" name="test_a" time="61.2"/></testsuite>')
    capsys.readouterr()
    size.main([str(checkout), "--change", "--durations", str(run)])
    printed = capsys.readouterr().out
    assert "| data | 16 -> 17 |" in printed
    assert "| 2 | 0 -> 61 | 1 |  |\n" in printed


def test_more_folders_than_a_table_holds_are_refused(checkout, capsys):
    with pytest.raises(SystemExit):
        size.main([str(checkout), str(checkout), "--change"])
    assert "must be one folder beside --change, but are 2. Leave the others out." in capsys.readouterr().err


def test_the_record_is_whole():
    recorded = json.loads(size.RECORD.read_text())
    assert {"model", "parallel", "training", "verification", "docs"} <= set(recorded)
    assert all(set(figures) <= set(size.COLUMNS) for figures in recorded.values())
