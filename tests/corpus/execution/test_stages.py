"""A task is done once; what it depends on decides whether it is done again; half of its work is never taken for it."""

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from crosscut.config.errors import DataError
from crosscut.config.system.deletion import make_folder
from crosscut.corpus.execution.running import StageResult
from crosscut.corpus.execution.stages import Counts, Output, PlannedStage, StageTask, TaskRecord, add_counts
from tests.corpus.ingested import run
from tests.endless import ENDLESS
from tests.memory import at_most
from tests.refusals import refusal


def write(text: str, name: str, output: Output) -> Counts:
    output.path(name).write_text(text)
    return {"characters": len(text), "names": [name]}


def shout(source: Path, output: Output) -> Counts:
    output.path("loud.txt").write_text(source.read_text().upper())
    return {"characters": len(source.read_text())}


def fail(output: Output) -> Counts:
    output.path("half.txt").write_text("half")
    raise DataError("`it` must work, but does not.")


def fill(output: Output) -> Counts:
    output.path("half.txt").write_text("half")
    raise OSError(28, "No space left on device")


def die(output: Output) -> Counts:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def start(work: Path, *tasks: StageTask, version: int = 1, workers: int = 1) -> StageResult:
    """Start the command, which runs a stage of these tasks."""
    return run(work, [PlannedStage(name="first", version=version, plan=lambda _: tasks)], workers)["first"]


def writing(text: str, name: str = "a") -> StageTask:
    return StageTask(name=name, function=partial(write, text, f"{name}.txt"), settings={"text": text}, size=len(text))


def start_both(work: Path, task: StageTask) -> StageResult:
    """Start the command, which runs the stage of this task and then one that reads its file. Returns the result of the
    second stage.
    """
    source = work / "first" / "a.txt"
    shouting = StageTask(name="a", function=partial(shout, source), inputs=(source,))
    plans = {"first": task, "second": shouting}
    stages = [PlannedStage(name=name, version=1, plan=lambda _, task=task: [task]) for name, task in plans.items()]
    return run(work, stages)["second"]


def test_what_is_done_is_not_done_again(tmp_path):
    first = start(tmp_path, writing("one"), writing("three", "b"))
    again = start(tmp_path, writing("one"), writing("three", "b"))
    assert (first.num_tasks, first.num_run, again.num_run) == (2, 2, 0)
    assert first.counts == again.counts == {"characters": 8, "names": ["a.txt", "b.txt"]}
    assert first.size == again.size == 8


def test_a_changed_setting_redoes_its_task_alone(tmp_path):
    start(tmp_path, writing("one"), writing("two", "b"))
    assert start(tmp_path, writing("one"), writing("four", "b")).num_run == 1
    assert (tmp_path / "first" / "b.txt").read_text() == "four"


def test_a_new_version_redoes_all(tmp_path):
    start(tmp_path, writing("one"), writing("two", "b"))
    assert start(tmp_path, writing("one"), writing("two", "b"), version=2).num_run == 2


@pytest.mark.parametrize(("text", "runs"), [("one", 0), ("two", 1)])
def test_a_later_stage_is_redone_only_where_what_it_reads_has_changed(tmp_path, text, runs):
    start_both(tmp_path, writing("one"))
    assert start_both(tmp_path, writing(text)).num_run == runs
    assert (tmp_path / "second" / "loud.txt").read_text() == text.upper()


def test_the_same_content_from_other_settings_redoes_nothing_behind_it(tmp_path):
    for settings in ({"by": "hand"}, {"by": "machine"}):
        task = StageTask(name="a", function=partial(write, "one", "a.txt"), settings=settings)
        result = start_both(tmp_path, task)
    assert result.num_run == 0


@pytest.mark.parametrize("missing", ["a.txt", "a.json"])
def test_a_task_that_has_lost_a_file_is_redone(tmp_path, missing):
    start(tmp_path, writing("one"))
    (tmp_path / "first" / missing).unlink()
    assert start(tmp_path, writing("one")).num_run == 1
    assert (tmp_path / "first" / "a.txt").read_text() == "one"


def test_a_record_that_was_cut_short_counts_as_none(tmp_path):
    start(tmp_path, writing("one"))
    record = tmp_path / "first" / "a.json"
    record.write_text(record.read_text()[:20])
    assert start(tmp_path, writing("one")).num_run == 1


@pytest.mark.parametrize(("content", "runs"), [("One", 1), ("\0\0\0", 1), ("one", 0)])
def test_a_task_whose_file_was_edited_is_redone(tmp_path, content, runs):
    start(tmp_path, writing("one"))
    time.sleep(0.01)  # the clock of files is coarse
    (tmp_path / "first" / "a.txt").write_text(content)
    assert start(tmp_path, writing("one")).num_run == runs
    assert (tmp_path / "first" / "a.txt").read_text() == "one"


def edited(**changes: object) -> Callable[[Path], object]:
    """A change of the record's fields. Its hash stays as it was."""
    return lambda record: record.write_text(json.dumps(json.loads(record.read_text()) | changes))


def flip(record: Path) -> None:
    content = bytearray(record.read_bytes())
    content[content.index(b"characters")] ^= 1
    record.write_bytes(content)


def unsealed(record: Path) -> None:
    fields = json.loads(record.read_text())
    del fields["sha256"]
    record.write_text(json.dumps(fields))


def sparse(record: Path) -> None:
    with record.open("wb") as file:
        file.truncate(1 << 40)


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda record: (record.unlink(), make(record))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "counts": edited(counts={"characters": 10**9}),
    "type of counts": edited(counts=3),
    "type of sizes": edited(sizes=[["a.txt", 3]]),
    "no files": edited(files={}, sizes={}),
    "hash of a file": edited(files={"a.txt": "0" * 64}),
    "hash": edited(sha256="0" * 64),
    "another field": edited(more=1),
    "no hash": unsealed,
    "one bit": flip,
    "spaces": lambda record: record.write_text(record.read_text() + " "),
    "half a character": lambda record: record.write_bytes(b"\xff" + record.read_bytes()),
    "nested": lambda record: record.write_text("[" * 100_000),
    "digits": lambda record: record.write_text('{"size": ' + "9" * 5000 + "}"),
    "a list": lambda record: record.write_text("[]"),
    "sparse": sparse,
    **{kind: replaced_by(make) for kind, make in ENDLESS.items()},
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_record_that_is_not_as_it_was_written_is_not_believed(tmp_path, kind):
    first = start(tmp_path, writing("one"))
    record = tmp_path / "first" / "a.json"
    content = record.read_text()
    DAMAGE[kind](record)
    with at_most(1 << 26):
        again = start(tmp_path, writing("one"))
    assert (again.num_run, again.counts) == (1, first.counts)
    assert json.loads(record.read_text())["files"] == json.loads(content)["files"]
    assert start(tmp_path, writing("one")).num_run == 0


def test_files_of_tasks_that_are_no_more_go(tmp_path):
    start(tmp_path, writing("one"), writing("two", "b"))
    (tmp_path / "first" / ".c.unfinished").mkdir()
    start(tmp_path, writing("one"))
    assert {path.name for path in (tmp_path / "first").iterdir()} == {".crosscut", "a.txt", "a.json"}


@pytest.mark.parametrize("name", ["../../other/a.txt", "/{}/other/a.txt", "..", "a/../../../other/a.txt"])
def test_record_cannot_name_a_file_elsewhere(tmp_path, name):
    """The record of a downloaded corpus, whose hash fits. The files of tasks that are no more are removed."""
    work = tmp_path / "corpus" / "work"
    start(work, writing("one"))
    mine = make_folder(tmp_path, "other") / "a.txt"
    mine.write_text("mine")
    forged = TaskRecord(task="z", key="", seconds=0, size=0, files={name.format(tmp_path): ""}, sizes={}, counts={})
    (work / "first" / "z.json").write_text(forged.content())
    start(work, writing("one"))
    assert mine.read_text() == "mine"


def test_files_of_the_user_in_a_stage_stay(tmp_path):
    start(tmp_path, writing("one"), writing("two", "b"))
    (tmp_path / "first" / "notes.txt").write_text("mine")
    (tmp_path / "first" / ".mine.unfinished").mkdir()
    (tmp_path / "first" / ".mine.unfinished" / "a").write_text("mine")
    start(tmp_path, writing("three"))
    assert not (tmp_path / "first" / "b.txt").exists()
    assert (tmp_path / "first" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "first" / ".mine.unfinished" / "a").read_text() == "mine"


def test_task_that_writes_fewer_files_leaves_none_of_its_earlier_ones(tmp_path):
    start(tmp_path, writing("one"))
    other = StageTask(name="a", function=partial(write, "one", "other.txt"))
    start(tmp_path, other)
    assert {path.name for path in (tmp_path / "first").iterdir()} == {".crosscut", "a.json", "other.txt"}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fail, "`it` must work, but does not."),
        (fill, "must be writable, but writing failed: No space left on device ("),
    ],
)  # fmt: skip
def test_a_task_that_fails_leaves_nothing_and_keeps_what_is_done(tmp_path, function, message):
    assert message in refusal(DataError, start, tmp_path, writing("one"), StageTask(name="b", function=function))
    assert {path.name for path in (tmp_path / "first").iterdir()} == {".crosscut", "a.txt", "a.json"}


def test_processes_give_what_one_gives_and_a_dead_one_is_told(tmp_path):
    tasks = [writing(f"text {number}", f"task-{number}") for number in range(9)]
    alone = start(tmp_path / "alone", *tasks)
    together = start(tmp_path / "together", *tasks, workers=2)
    assert alone.counts == together.counts
    with pytest.raises(DataError, match="One of the 2 worker processes died, perhaps because memory ran out"):
        start(tmp_path / "together", *tasks, StageTask(name="worst", function=die), workers=2)
    assert start(tmp_path / "together", *tasks, workers=2).num_run == 0


def test_counts_add_up():
    one = {"documents": 1, "rules": {"short": {"bytes": 3}}, "first": ["a"]}
    other = {"documents": 2, "rules": {"short": {"bytes": 4}, "url": {"bytes": 1}}, "first": ["b"], "new": 1.5}
    assert add_counts([one, other, {}]) == {
        "documents": 3, "rules": {"short": {"bytes": 7}, "url": {"bytes": 1}}, "first": ["a", "b"], "new": 1.5,
    }  # fmt: skip
    assert one == {"documents": 1, "rules": {"short": {"bytes": 3}}, "first": ["a"]}
