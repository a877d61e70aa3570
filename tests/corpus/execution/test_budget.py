"""A record that takes too much time or memory, or ends its process, is lost by name, and always the same record is."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from crosscut.config.corpora import CorpusConfig, EngineConfig, IngestConfig, SourceConfig
from crosscut.config.errors import DamagedDataError, DataError
from crosscut.config.system.markers import MARKER_FILE
from crosscut.corpus.audit.explain import explain
from crosscut.corpus.audit.lookup import Runs
from crosscut.corpus.documents import READ, Part
from crosscut.corpus.execution import budget
from crosscut.corpus.execution.budget import LostRecord, add_loss, memory_for, read_losses, seconds_for
from crosscut.corpus.execution.engine import TaskCall, start_engine
from crosscut.corpus.execution.running import run_stage
from crosscut.corpus.execution.stages import (
    Counts,
    Digests,
    Output,
    PlannedStage,
    StageTask,
    TaskRecord,
    execute,
    read_records,
)
from crosscut.corpus.ingest import IngestStage, check_damage, check_rejects
from crosscut.corpus.readers.mail import messages as mail
from crosscut.corpus.readers.record import Item
from crosscut.data.progress import ProgressBar
from tests.refusals import refusal

NAMES = ("first", "STUCK", "LARGE", "CRASH", "last")
BOX = "".join(f"From a@b.example Sat Nov 21 22:44:22 2026\nSubject: m\n\nmessage {name}\n\n" for name in NAMES)
BACKTRACKING = re.compile("(a+)+$")


def take_for_ever() -> None:
    BACKTRACKING.match("a" * 60 + "b")  # does not return to Python


def take_all_memory() -> None:
    bytearray(2 * memory_for(0))


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


FAULTS = {b"STUCK": take_for_ever, b"LARGE": take_all_memory, b"CRASH": crash}


def with_faults(read: Callable[[Output], Counts], output: Output) -> Counts:
    """Run a task of `ingest` in which some messages have a fault that no reader has any more."""
    budget.SECONDS, budget.SMALL, budget.GRACE, right = 0.3, 0, 0, mail._read_message

    def read_message(raw: bytes, number: int, position: int) -> Item:
        for name, fault in FAULTS.items():
            if name in raw:
                fault()
        return right(raw, number, position)

    mail._read_message = read_message
    return read(output)


def stuck_after_one(read: Callable[[Output], Counts], output: Output) -> Counts:
    """Run a task of `ingest` in which the second message of a file is never found."""
    budget.SECONDS, budget.SMALL, budget.GRACE, split = 0.3, 0, 0, mail._split

    def find(*arguments: Any) -> Iterator[tuple[bytes, int]]:
        yield next(split(*arguments))
        take_for_ever()

    mail._split = find
    return read(output)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "SECONDS", 0.3)


@pytest.fixture
def config(tmp_path: Path) -> CorpusConfig:
    (tmp_path / "box.mbox").write_text(BOX)
    source = SourceConfig(name="mail", files=(str(tmp_path / "box.mbox"),))
    return CorpusConfig(sources=(source,), folder=str(tmp_path / "out"), ingest=IngestConfig(max_rejects=0.7))


class Here:
    """An engine that runs tasks in this process, as fast as the tasks are: it sets no limits."""

    def run(self, calls: Sequence[TaskCall]) -> Iterator[TaskRecord]:
        return (execute(*call) for call in calls)


def ingest(config: CorpusConfig, plant: Callable[..., Counts] | None = None) -> list[TaskRecord]:
    """Run the stage. `plant` replaces the function of its tasks, which then run in a process of their own."""
    work = Path(config.folder) / "work"

    def plan(work: Path) -> list[StageTask]:
        tasks = IngestStage(config=config).tasks(work)
        return [replace(task, function=partial(plant, task.function)) if plant else task for task in tasks]

    stage = PlannedStage(name="ingest", version=5, plan=plan)
    started = start_engine(EngineConfig(workers=1), work) if plant else nullcontext(Here())
    with started as engine, ProgressBar(shown=False) as bar:
        run_stage(stage, work, engine=engine, digests=Digests(), bar=bar)
    return read_records(work, "ingest")


def texts(config: CorpusConfig) -> list[str]:
    return [document.text.strip() for document in Part(Path(config.folder) / "work", "000000-0000").documents()]


def rejects(config: CorpusConfig) -> list[dict[str, str]]:
    path = Path(config.folder) / "work" / "ingest" / "000000.rejects.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_that_exceed_their_budget_are_rejects_by_name(config):
    records = ingest(config, with_faults)
    assert texts(config) == ["message first", "message last"]
    found = rejects(config)
    assert [(one["place"], one["rule"], one["reason"]) for one in found] == [
        ("message 2", "took too long", "the record of 27 bytes took more than 0.3 s of processor time"),
        ("message 3", "took too much memory", "the record of 27 bytes took more than 1,536 MiB of memory"),
        ("message 4", "crashed the reader", "the record of 27 bytes ended the process with SIGSEGV"),
    ]
    assert found[0]["excerpt"].startswith("Subject: m\n\nmessage STUCK")
    assert records[0].counts["rules"]["took too long"] == {"documents": 1, "bytes": 0}
    check_rejects(records, config)
    check_damage(records, config)
    with pytest.raises(DataError, match=r"3 of 5 records.*box.mbox`, message 2: the record of 27 bytes took more than"):
        check_rejects(records, replace(config, ingest=IngestConfig(max_rejects=0.1)))
    told = explain(Runs(Path(config.folder) / "work", READ), "mail/box.mbox#message 2")
    assert "message 2: the record of 27 bytes took more than 0.3 s of processor time" in told
    assert not list(Path(config.folder).glob("work/*/*.unfinished"))
    check_resumed_runs(config, Path(config.folder) / "work" / "ingest")


def check_resumed_runs(config: CorpusConfig, folder: Path) -> None:
    """Losses hold for a resumed run, even on a machine that is fast enough, but not for a changed file."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "000000.json"}
    for path in folder.iterdir():  # as after a kill in the last attempt
        if path.suffix != ".losses" and path.name != MARKER_FILE:
            path.unlink()
    ingest(config)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "000000.json"} == files
    Path(config.sources[0].files[0]).write_text(BOX + "more\n")
    ingest(config)
    assert texts(config) == [*(f"message {name}" for name in NAMES[:-1]), "message last\n\nmore"]
    assert not rejects(config)


def test_rest_of_a_file_is_lost_if_the_time_passes_between_two_records(config):
    records = ingest(config, stuck_after_one)
    assert texts(config) == ["message first"]
    (reject,) = rejects(config)
    assert (reject["place"], reject["rule"]) == ("after record 1", "took too long")
    told = refusal(DamagedDataError, check_damage, records, config)
    assert "box.mbox`, after record 1, after 1 documents: the file after 1 records" in told


def test_budget_grows_with_the_record():
    assert seconds_for(0) == 0.3
    assert seconds_for(10**6) - seconds_for(0) == pytest.approx(20)
    assert memory_for(10**6) - memory_for(0) == 64 * 10**6


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": "k"}', '{"key": "k", "losses": [{"place": 3}]}', "\xff"])
def test_damaged_list_of_losses_is_no_list(tmp_path, content):
    (tmp_path / "t.losses").write_text(content, encoding="latin-1")
    assert read_losses(tmp_path, "t", "k") == []


def test_losses_add_up_and_belong_to_a_key(tmp_path):
    first, second = (LostRecord("s/ä", f"byte {number}", 0, "took too long", "long") for number in (1, 2))
    add_loss(tmp_path, "t", "k", first)
    add_loss(tmp_path, "t", "k", second)
    assert read_losses(tmp_path, "t", "k") == [first, second]
    assert read_losses(tmp_path, "t", "other") == []
