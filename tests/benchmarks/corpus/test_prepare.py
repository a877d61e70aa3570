"""The pipeline is timed stage by stage, and killed and gone on with, by the real command."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

from benchmarks.corpus.prepare_crash import digest
from crosscut.data import read_documents
from tests.benchmarks.conftest import run_program


@pytest.fixture
def speeches(tmp_path: Path) -> Path:
    """A small real corpus."""
    path = tmp_path / "speeches.jsonl"
    texts = [document.text[:6000] for document in read_documents(["builtin:state-of-the-union"])]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc")
def test_every_stage_is_timed(speeches, tmp_path):
    figures, questions = tmp_path / "figures.json", tmp_path / "questions.txt"
    questions.write_text("What would a president say of the state of the union, had he but a moment to say it in?\n")
    arguments = ("--set", "tokens.vocab_size=500", "engine.workers=1", "--json", figures)
    done = run_program("corpus/prepare.py", speeches, "--test-sets", questions, *arguments)
    told = json.loads(figures.read_text())
    names = [stage["name"] for stage in told["stages"]]
    assert names[0] == "ingest"
    assert {"cleaning", "sketches", "leakage", "tokens", "packing"} <= set(names)
    rows = {line.split()[0] for line in done.stdout.partition("MB/s\n")[2].splitlines() if line}
    assert rows - {"in"} == {stage["name"] for stage in told["stages"] if stage["tasks"]}
    assert told["peak_bytes"] > 50e6


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes(speeches):
    assert "2 kills, 0 files differ" in run_program("corpus/prepare_crash.py", "--text", speeches, "--kills", 2).stdout


def test_records_of_equal_tasks_are_equal_whatever_time_they_took(tmp_path):
    files = [tmp_path / name for name in ("first.json", "slower.json", "other.json")]
    for file, seconds, files_hash in zip(files, (0.1, 0.2, 0.1), ("a", "a", "b"), strict=True):
        record = {"task": "t", "seconds": seconds, "files": {"part": files_hash}}
        file.write_text(json.dumps({**record, "sha256": hashlib.sha256(json.dumps(record).encode()).hexdigest()}))
    first, slower, other = map(digest, files)
    assert first == slower != other
