"""The record of a rank is read as it was written: from its memory, from a copy, and while the process is stopped."""

import os
import resource
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from click.testing import CliRunner

from crosscut.cli.main import commands
from crosscut.config import ConfigError
from crosscut.flight.places import enter, leave, place_name
from crosscut.flight.reading import (
    Process,
    parse_record,
    process_of,
    read_records,
    read_statuses,
    read_traces,
    record_path,
    status_path,
    trace_path,
)
from crosscut.flight.record import (
    DONE,
    NUM_MESSAGES,
    STARTED,
    STARTING,
    MessageKind,
    ModelPart,
    Record,
    RecordWord,
    RunPhase,
    TableGroup,
)
from crosscut.flight.report import describe, examine
from tests.nursery import forked
from tests.refusals import refusal


@pytest.fixture
def record():
    made = Record()
    made.open(rank=3, world_size=4)
    yield made
    made.close()


def read(record: Record, path: Path):
    record.copy_to(path)
    return parse_record(path.read_bytes())


def test_position_and_groups_are_read_as_written(record, tmp_path):
    record[RecordWord.WORLD_SIZE] = 5000
    record.phase(RunPhase.BACKWARD, 41)
    record.at(ModelPart.MLP | 2 << 8)
    record.add_group("7", "tensor", range(0, 4096, 2))
    record.add_group("8", "data", [1, 3, 4])
    found = read(record, tmp_path / "copy")
    assert (found.rank, found.world_size, found.pid) == (3, 5000, os.getpid())
    assert (found.step, found.phase, place_name(found.place)) == (41, RunPhase.BACKWARD, "layer 2, MLP")
    assert found.groups["7"].ranks == range(0, 4096, 2)
    assert found.groups["8"].ranks == {1, 3, 4}


def test_a_message_counts_as_started_only_after_its_start(record, tmp_path):
    group = record.add_group("7", "tensor", [0, 3])
    number = record.start(MessageKind.ALL_GATHER, group, 640)
    assert read(record, tmp_path / "copy").groups["7"].started == 0
    record.started(number, key=1)
    found = read(record, tmp_path / "copy")
    assert found.groups["7"].started == 1
    assert found.messages[number].state == STARTED
    assert (found.messages[number].kind, found.messages[number].elements) == (MessageKind.ALL_GATHER, 640)


def test_the_awaited_message_is_the_one_with_the_key_and_not_the_last_one(record, tmp_path):
    group = record.add_group("7", "tensor", [0, 3])
    for key in (10, 20):
        record.started(record.start(MessageKind.ALL_REDUCE, group, key), key)
    waiting = record.wait(10)
    found = read(record, tmp_path / "copy")
    assert found.awaited is not None
    assert (found.awaited.number, found.awaited.elements) == (waiting, 10)
    record.waited(waiting)
    found = read(record, tmp_path / "copy")
    assert found.awaited is None
    assert [message.state for message in found.messages.values()] == [DONE, STARTED]


def test_the_ring_keeps_the_last_messages(record, tmp_path):
    group = record.add_group("7", "tensor", [0, 3])
    for elements in range(NUM_MESSAGES + 5):
        record.started(record.start(MessageKind.ALL_REDUCE, group, elements))
    record.start(MessageKind.ALL_REDUCE, group, 1)
    found = read(record, tmp_path / "copy")
    assert sorted(found.messages) == list(range(7, NUM_MESSAGES + 7))
    assert found.messages[NUM_MESSAGES + 6].state == STARTING
    assert found.message("7", NUM_MESSAGES + 5).elements == NUM_MESSAGES + 4


def test_a_closed_record_takes_no_notes():
    closed = Record()
    closed.phase(RunPhase.DATA, 3)
    closed.progress()
    assert closed[RecordWord.PROGRESS] == closed[RecordWord.STEP] == 0


def test_files_that_are_no_records_are_left_out(tmp_path):
    (tmp_path / "rank-00000").write_bytes(b"\0" * 100_000)
    (tmp_path / "rank-00001").write_bytes(b"short")
    (tmp_path / "rank-00002").symlink_to("/dev/zero")
    assert read_records(tmp_path) == {}


def write_record(path: Path, groups: list[list[object]], **words: int) -> None:
    """Write a record as a stranger could: with these groups in its table, and these integers in its header."""
    made = Record()
    made.open(rank=0, world_size=1)
    for ranks in groups:
        made._table.groups.append(TableGroup(f"{len(made._table.groups)}", "data", ranks))
    made._write_table()
    made.started(made.start(MessageKind.ALL_REDUCE, 0, 8))
    made.wait(0)
    for word, value in words.items():
        made[RecordWord[word]] = value
    made[RecordWord.DESCRIPTOR] = -1
    made.copy_to(path)
    made.close()


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([[0, 10**10, 1, -1]], {"WORLD_SIZE": 2}),  # more ranks than memory
        ([[0, 2**62, 1, -1]], {"WORLD_SIZE": 2**62}),
        ([], {"WORLD_SIZE": 2**62}),
        ([], {"WORLD_SIZE": -1}),
        ([], {"RANK": 2**40, "WORLD_SIZE": 2}),
        ([], {"RANK": -1, "WORLD_SIZE": 2}),
        ([[2**62, -(2**62), -1, -1]], {"WORLD_SIZE": 2}),
        ([[0, 1, 0, -1]], {"WORLD_SIZE": 2}),
        ([[0, 2]], {"WORLD_SIZE": 2}),
        ([["0"]], {"WORLD_SIZE": 2}),
        ([[0.5, 1]], {"WORLD_SIZE": 2}),
        ([[0]] * 65, {"WORLD_SIZE": 2}),
    ],
    ids=str,
)
def test_a_record_with_impossible_numbers_is_none(tmp_path, groups, words):
    write_record(record_path(tmp_path, 0), groups, **words)
    start = time.process_time()
    assert read_records(tmp_path) == {}
    assert time.process_time() - start < 1


def test_a_record_of_a_million_ranks_is_answered(tmp_path):
    """Sixty groups of all ranks take no memory for each rank."""
    groups: list[list[object]] = [[0, 1 << 20, 1, -1]] * 60
    write_record(record_path(tmp_path, 0), groups, WORLD_SIZE=1 << 20, ON_DEVICE=1)
    start = time.process_time()
    text = describe(examine(read_records(tmp_path), {}, seconds=1.0, bound=0.5))
    assert "DID NOT ARRIVE: rank 1, which has left no record." in text
    assert time.process_time() - start < 10


@pytest.mark.parametrize("number", ["Infinity", "NaN", "1e400", f"{'9' * 5000}"])
def test_traces_with_impossible_numbers_are_left_out(tmp_path, number):
    trace_path(tmp_path, 0).write_text(f'[["g", "d", "gloo", [{number}], [[1, "a", [], [], [], "started"]]]]')
    assert read_traces(tmp_path) == {}


def test_a_status_without_bounds_is_left_out(tmp_path):
    with status_path(tmp_path, 0).open("wb") as file:
        file.write(b'{"rank": 0, "stacks": {}, "seconds": 1}')
        file.truncate(100 << 20)
    assert read_statuses(tmp_path) == {}


def test_gradients_record_the_place_of_the_backward_pass(monkeypatch, record):
    import torch

    monkeypatch.setattr("crosscut.flight.places.RECORD", record)
    x = torch.ones(2, requires_grad=True)
    enter(ModelPart.LAYER, 5)
    y = leave(x * 2, ModelPart.LAYER, 5)
    enter(ModelPart.HEAD)
    assert place_name(record.place) == "output layer and loss"
    y.sum().backward()
    assert place_name(record.place) == "layer 5"


def keep_a_record(folder: str, connection: Connection) -> None:
    record = Record()
    record.open(rank=0, world_size=1)
    record.copy_to(record_path(Path(folder), 0))
    record.phase(RunPhase.CHECKPOINT, 12)
    connection.send(None)
    connection.recv()


def test_memory_is_read_while_the_process_is_stopped_and_the_copy_after_its_end(tmp_path):
    ours, theirs = forked().Pipe()
    process = forked().Process(target=keep_a_record, args=(str(tmp_path), theirs))
    process.start()
    try:
        assert ours.poll(60)
        os.kill(process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while process_of(found := read_records(tmp_path)[0]) is Process.RUNS and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (found.step, found.phase, process_of(found)) == (12, RunPhase.CHECKPOINT, Process.STOPPED)
    finally:
        process.kill()
        process.join()
    found = read_records(tmp_path)[0]
    assert (found.step, found.phase, process_of(found)) == (0, RunPhase.START, Process.GONE)


def test_ranks_of_an_earlier_start_with_more_ranks_are_left_out(tmp_path):
    for rank, world_size in ((0, 4), (3, 4), (0, 2), (1, 2)):
        made = Record()
        made.open(rank=rank, world_size=world_size)
        made.copy_to(record_path(tmp_path, rank))
        made.close()
    assert {rank: found.world_size for rank, found in read_records(tmp_path).items()} == {0: 2, 1: 2}


def test_without_free_file_descriptors_nothing_is_read_and_nothing_is_raised(record, tmp_path):
    record.copy_to(record_path(tmp_path, 3))
    assert list(read_records(tmp_path)) == [3]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        found = read_records(tmp_path), read_statuses(tmp_path), read_traces(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == ({}, {}, {})


def test_a_complete_run_has_no_ranks_to_explain(record, tmp_path):
    """An elastic run leaves the records of ranks that it has lost."""
    path, doctor = record_path(tmp_path / "watch", 3), ["doctor", "--attach", str(tmp_path)]
    path.parent.mkdir()
    record.copy_to(path)
    assert "DID NOT ARRIVE" in CliRunner().invoke(commands, doctor).output
    (tmp_path / "summary.json").write_text('{"version": 1}')
    told = refusal(ConfigError, CliRunner().invoke, commands, doctor, catch_exceptions=False)
    assert "A run that has ended has no records" in told
