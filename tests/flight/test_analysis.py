"""The ranks that block a run are found in records of a few ranks, written by hand."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pytest

from crosscut.flight.analysis import Finding, find_causes
from crosscut.flight.reading import Group, Process, RankMessage, RankRecord
from crosscut.flight.record import STARTED, MessageKind, RunPhase

GROUPS = {
    "tensor 0": ("tensor", (0, 1)),
    "tensor 1": ("tensor", (2, 3)),
    "data 0": ("data", (0, 2)),
    "data 1": ("data", (1, 3)),
    "all": ("all ranks", (0, 1, 2, 3)),
    "pair": ("tokens", (0, 1)),
    "0 to 1": ("pipeline", (0, 1)),
    "1 to 2": ("pipeline", (1, 2)),
}

Call = tuple[str, int, MessageKind, int]
"""Group, count, kind and number of elements of a message."""


def record(
    rank: int,
    started: Mapping[str, int],
    awaits: Call | None = None,
    *,
    others: Sequence[Call] = (),
    world_size: int = 4,
    on_device: bool = False,
) -> RankRecord:
    """Record of a rank that has started `started` messages in its groups, and waits for one of these messages."""
    calls = [*others, *([awaits] if awaits else [])]
    messages = {
        number: RankMessage(number, group, GROUPS[group][0], count, kind, elements, 7, RunPhase.FORWARD, 0, STARTED)
        for number, (group, count, kind, elements) in enumerate(calls, 1)
    }
    groups = {
        name: Group(name, axis, frozenset(ranks), started.get(name, 0))
        for name, (axis, ranks) in GROUPS.items()
        if rank in ranks
    }
    return RankRecord(
        rank=rank, world_size=world_size, pid=1, host="here", machine="", process_start="", step=7,
        phase=RunPhase.FORWARD, place=0, groups=groups, messages=messages,
        awaited=None if on_device or not awaits else messages[len(calls)], waits_for_device=on_device,
    )  # fmt: skip


def by_rank(*records: RankRecord) -> dict[int, RankRecord]:
    return {record.rank: record for record in records}


def find(*records: RankRecord, silent: Mapping[int, Process] = MappingProxyType({})) -> Finding:
    return find_causes(by_rank(*records), silent)


def sum_of(group: str, count: int, elements: int = 8) -> Call:
    return group, count, MessageKind.ALL_REDUCE, elements


def test_a_late_rank_is_the_cause_and_its_message_is_missing():
    found = find(
        record(0, {"tensor 0": 5}, sum_of("tensor 0", 5), world_size=2), record(1, {"tensor 0": 4}, world_size=2)
    )
    assert (found.causes, found.waiting, found.disagreements) == ((1,), (0,), ())
    (missing,) = found.missing
    assert (missing.rank, missing.waiting) == (1, (0,))
    assert (missing.message.axis, missing.message.count, missing.message.step) == ("tensor", 5, 7)


def test_the_chain_of_two_groups_ends_at_the_cause():
    found = find(  # 3 reads data, 2 waits for it over tensor, 0 for 2 over data, 1 for 0 over tensor
        record(0, {"tensor 0": 4, "data 0": 3}, sum_of("data 0", 3)),
        record(1, {"tensor 0": 5}, sum_of("tensor 0", 5)),
        record(2, {"tensor 1": 9, "data 0": 2}, sum_of("tensor 1", 9)),
        record(3, {"tensor 1": 8}),
    )
    assert (found.causes, found.waiting) == ((3,), (0, 1, 2))
    assert [(m.message.group, m.waiting) for m in found.missing] == [("tensor 1", (2,))]


def test_two_late_ranks_are_both_causes():
    found = find(
        record(0, {"all": 2}, sum_of("all", 2)),
        record(1, {"all": 1}),
        record(2, {"all": 1}),
        record(3, {"all": 2}, sum_of("all", 2)),
    )
    assert (found.causes, found.waiting) == ((1, 2), (0, 3))
    assert [m.waiting for m in found.missing] == [(0, 3), (0, 3)]


@pytest.mark.parametrize("process", [Process.STOPPED, Process.GONE, Process.RUNS])
def test_a_silent_rank_is_the_cause_even_if_it_has_started_the_message(process):
    records = [record(rank, {"tensor 0": 5}, sum_of("tensor 0", 5), world_size=2) for rank in (0, 1)]
    found = find(*records, silent={1: process})
    assert (found.causes, found.waiting) == ((1,), (0,))
    assert find(*records).causes == ()


def test_a_silent_rank_is_the_cause_and_not_a_rank_that_waits_for_it():
    found = find(
        record(0, {"tensor 0": 5}, sum_of("tensor 0", 5)),
        record(1, {"tensor 0": 4, "data 1": 3}, sum_of("data 1", 3)),
        record(2, {"tensor 1": 5}, sum_of("tensor 1", 5)),
        record(3, {"tensor 1": 4, "data 1": 2}),
        silent={3: Process.STOPPED},
    )
    assert (found.causes, found.waiting) == ((3,), (0, 1, 2))
    assert {m.rank for m in found.missing} == {3}


def test_a_rank_without_a_record_is_the_cause():
    found = find_causes(by_rank(record(0, {"tensor 0": 1}, sum_of("tensor 0", 1), world_size=2)), {})
    assert (found.causes, found.waiting) == ((1,), (0,))


def test_a_pipeline_is_followed_to_the_stage_that_does_not_send():
    found = find(
        record(0, {"0 to 1": 2}, world_size=3),
        record(1, {"0 to 1": 3, "1 to 2": 2}, ("0 to 1", 3, MessageKind.RECEIVE, 64), world_size=3),
        record(2, {"1 to 2": 3}, ("1 to 2", 3, MessageKind.RECEIVE, 64), world_size=3),
    )
    assert (found.causes, found.waiting) == ((0,), (1, 2))


def test_a_send_and_its_receive_agree():
    found = find(
        record(0, {"0 to 1": 1}, ("0 to 1", 1, MessageKind.SEND, 64), world_size=2),
        record(1, {"0 to 1": 1}, ("0 to 1", 1, MessageKind.RECEIVE, 64), world_size=2),
    )
    assert found.disagreements == ()


@pytest.mark.parametrize(
    "theirs",
    [("tensor 0", 5, MessageKind.ALL_GATHER, 8), ("tensor 0", 5, MessageKind.ALL_REDUCE, 16)],
    ids=["kind", "elements"],
)
def test_ranks_with_different_calls_disagree(theirs):
    mine = sum_of("tensor 0", 5)
    found = find(record(0, {"tensor 0": 5}, mine, world_size=2), record(1, {"tensor 0": 5}, theirs, world_size=2))
    (pair,) = found.disagreements
    assert (pair.first, pair.second) == (0, 1)
    assert (pair.first_message.kind, pair.second_message.kind) == (mine[2], theirs[2])
    assert (pair.first_message.elements, pair.second_message.elements) == (mine[3], theirs[3])
    assert found.causes == (0, 1)


def test_ranks_that_wait_for_each_other_in_different_groups_disagree():
    found = find(
        record(0, {"tensor 0": 5, "pair": 1}, sum_of("tensor 0", 5), world_size=2),
        record(1, {"tensor 0": 4, "pair": 2}, sum_of("pair", 2), world_size=2),
    )
    (pair,) = found.disagreements
    assert (pair.first_message.group, pair.second_message.group) == ("tensor 0", "pair")
    assert found.causes == (0, 1)


def test_if_no_rank_waits_all_ranks_are_causes():
    records = by_rank(record(0, {"tensor 0": 5}, world_size=2), record(1, {"tensor 0": 5}, world_size=2))
    assert find_causes(records, {}).causes == (0, 1)


def test_a_gpu_waits_for_the_first_message_that_a_member_has_not_started():
    ahead = record(
        0, {"tensor 0": 6}, world_size=2, on_device=True,
        others=[sum_of("tensor 0", 4), sum_of("tensor 0", 5), sum_of("tensor 0", 6)],
    )  # fmt: skip
    behind = record(1, {"tensor 0": 4}, world_size=2, on_device=True, others=[sum_of("tensor 0", 4)])
    found = find_causes(by_rank(ahead, behind), {})
    assert (found.causes, found.waiting) == ((1,), (0,))
    assert found.missing[0].message.count == 5
