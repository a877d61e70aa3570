"""Collectives of PyTorch's Flight Recorder are read from its JSON, sent to other ranks, and compared."""

import json
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from crosscut.flight.reading import RankStatus, read_traces, write_traces
from crosscut.flight.report import describe, examine
from crosscut.flight.traces import (
    COMPLETED,
    SCHEDULED,
    STARTED,
    RecordedCollective,
    Trace,
    describe_trace,
    find_behind,
    find_differences,
    parse_traces,
    read_dump,
)
from tests.flight.test_analysis import by_rank, record

recorded = pytest.mark.skipif(
    not hasattr(c10d, "_dump_fr_trace_json"), reason="this torch has no Flight Recorder for gloo"
)


def entry(number: int, name: str = "nccl:all_reduce", state: str = SCHEDULED, **more: Any) -> dict[str, Any]:
    """Entry of the recorder, with the fields that are read."""
    sizes: dict[str, Any] = {"input_sizes": [[2, 4]], "output_sizes": [[2, 4]]}
    types: dict[str, Any] = {"input_dtypes": ["Float"], "output_dtypes": ["Float"]}
    common = {"process_group": ["3", "mesh_data"], "is_p2p": False, "retired": False, "time_created_ns": 100}
    return {"collective_seq_id": number, "profiling_name": name, "state": state, **common, **sizes, **types, **more}


def read(*entries: dict[str, Any], since: int = 0) -> list[Trace]:
    return read_dump(json.dumps({"version": "2.10", "entries": entries}), lambda name: [0, int(name)], since)


def trace(*collectives: tuple[int, str, str, int], group: str = "1", ranks: tuple[int, ...] = (0, 1, 2)) -> Trace:
    made = (
        RecordedCollective(number, name, ((elements,),), ((elements,),), ("Float",), state)
        for number, name, state, elements in collectives
    )
    return Trace(group, "", "nccl", ranks, tuple(made))


def send_and_read() -> list[Trace]:
    group = dist.new_group([0, 1], group_desc="tests")
    for elements in (4, 6):
        dist.all_reduce(torch.ones(elements), group=group)
    dist.barrier(group)
    deadline = time.monotonic() + 10
    while True:  # a thread of PyTorch retires the collectives
        found = read_dump(c10d._dump_fr_trace_json(), lambda _: dist.get_process_group_ranks(group))
        (own,) = (trace for trace in found if trace.description == "tests")
        if own.collectives[-2].state == COMPLETED or time.monotonic() > deadline:
            return [own]
        time.sleep(0.02)


@recorded
def test_what_the_recorder_of_this_torch_returns_is_read(ranks):
    for (found,) in ranks.run(2, send_and_read):
        assert (found.backend, found.ranks) == ("gloo", (0, 1))
        assert [one.number for one in found.collectives] == list(range(1, len(found.collectives) + 1))
        assert [(one.name, one.inputs, one.types) for one in found.collectives[:2]] == [
            ("all_reduce", ((4,),), ("Float",)),
            ("all_reduce", ((6,),), ("Float",)),
        ]
        assert all(one.state == COMPLETED for one in found.collectives[:-1])
        assert found.collectives[-1].name == "barrier"


def test_states_and_groups_are_read_and_sends_and_older_entries_are_left_out():
    found = read(
        entry(7, time_created_ns=99),
        entry(8, state=COMPLETED),
        entry(9, "nccl:_all_gather_base", state=STARTED, output_sizes=[[4, 4]]),
        entry(1, is_p2p=True),
        entry(1, "gloo:barrier", process_group=["0", "default_pg"], retired=True, input_sizes=[], input_dtypes=[]),
        entry(10),
        since=100,
    )
    assert [(one.group, one.description, one.backend, one.ranks) for one in found] == [
        ("3", "mesh_data", "nccl", (0, 3)),
        ("0", "default_pg", "gloo", (0, 0)),
    ]
    assert [(one.number, one.name, one.state) for one in found[0].collectives] == [
        (8, "all_reduce", COMPLETED),
        (9, "_all_gather_base", STARTED),
        (10, "all_reduce", SCHEDULED),
    ]
    assert found[1].collectives[0].state == COMPLETED
    assert describe_trace(found[0], 12) == (
        "completed 8 (all_reduce, Float [2, 4]); started 9 (_all_gather_base, Float [2, 4]); "
        "scheduled 10 (all_reduce, Float [2, 4]); has not scheduled 12"
    )


def test_only_collectives_around_the_first_open_one_are_kept():
    (found,) = read(*(entry(i, state=COMPLETED if i < 50 else SCHEDULED) for i in range(100)))
    assert [one.number for one in found.collectives] == [*range(46, 62), 99]
    assert describe_trace(found, 50) == (
        "completed 49 (all_reduce, Float [2, 4]); "
        "scheduled 50 (all_reduce, Float [2, 4]) to 99 (all_reduce, Float [2, 4])"
    )
    (found,) = read(*(entry(i, state=COMPLETED) for i in range(100)))
    assert [one.number for one in found.collectives] == [96, 97, 98, 99]


@pytest.mark.parametrize(
    "dump",
    ["", "[]", '{"entries": 3}', '{"entries": [3]}', '{"entries": [{}]}', '{"entries": {"a": 1}}',
     json.dumps({"entries": [entry(1, process_group="1")]}), json.dumps({"entries": [entry(1, input_sizes=3)]})],
)  # fmt: skip
def test_a_dump_of_another_form_is_refused(dump):
    with pytest.raises(ValueError):
        read_dump(dump, lambda _: [])


def test_traces_pass_from_rank_to_rank(tmp_path):
    found = read(entry(8, state=COMPLETED), entry(9))
    write_traces(tmp_path, 3, found)
    write_traces(tmp_path, 4, [])
    (tmp_path / "trace-00005.json").write_text('[["1", "", "nccl", [0], [[1, "all_reduce", 3, [], [], "scheduled"]]]]')
    assert read_traces(tmp_path) == {3: found}


@pytest.mark.parametrize(
    "value",
    [3, [3], [[]], [["1", "", "nccl", [0], []]], [["1", "", "nccl", [0], [[1, "a", [], [], [], "unknown"]]]],
     [["1", "", "nccl", [0], [["x", "a", [], [], [], SCHEDULED]]]]],
)  # fmt: skip
def test_traces_of_another_form_are_refused(value):
    with pytest.raises(ValueError):
        parse_traces(value)


def test_a_rank_that_has_not_scheduled_what_others_wait_for_is_behind():
    on_time = trace((4, "all_reduce", COMPLETED, 8), (5, "all_reduce", SCHEDULED, 8))
    late = trace((4, "all_reduce", COMPLETED, 8))
    assert find_behind({0: [on_time], 1: [late], 2: [on_time]}) == ((1,), (0, 2))
    assert find_behind({0: [on_time], 1: [], 2: [on_time]}) == ((1,), (0, 2))
    assert find_behind({0: [late], 1: [late], 2: [late]}) == ((), ())
    assert find_behind({0: [on_time], 2: [on_time]}) == ((), ())  # rank 1 has not answered


def test_a_chain_of_two_groups_ends_at_the_rank_that_waits_for_none():
    waits = trace((5, "all_reduce", SCHEDULED, 8), ranks=(0, 1))
    done = trace((4, "all_reduce", COMPLETED, 8), ranks=(0, 1))
    blocked = trace((3, "all_gather", STARTED, 8), group="2", ranks=(1, 2))
    behind = trace((2, "all_gather", COMPLETED, 8), group="2", ranks=(1, 2))
    assert find_behind({0: [waits], 1: [done, blocked], 2: [behind]}) == ((2,), (0, 1))


@pytest.mark.parametrize(
    ("first", "second", "differ"),
    [
        (("all_reduce", 8), ("all_reduce", 8), False),
        (("all_reduce", 8), ("all_gather", 8), True),
        (("all_reduce", 8), ("all_reduce", 16), True),
        (("_reduce_scatter_base", 8), ("_reduce_scatter_base", 16), True),
        (("all_to_all", 8), ("all_to_all", 16), False),
        (("gather", 8), ("gather", 16), False),
    ],
)
def test_ranks_with_another_collective_or_size_under_the_same_number_differ(first, second, differ):
    same = (4, "all_reduce", COMPLETED, 8)
    mine, theirs = (trace(same, (5, name, SCHEDULED, elements)) for name, elements in (first, second))
    found = find_differences({0: [mine], 1: [mine], 2: [theirs]})
    assert [(one.first, one.second, one.first_collective.number) for one in found] == ([(0, 2, 5)] if differ else [])


def test_a_report_names_ranks_that_have_started_different_collectives():
    records = by_rank(*(record(rank, {}, world_size=2) for rank in range(2)))
    traces = {0: [trace((3, "broadcast", SCHEDULED, 4))], 1: [trace((3, "reduce", SCHEDULED, 8))]}
    hang = examine(records, {rank: RankStatus({}, 9.0, rank) for rank in records}, traces, seconds=9.0, bound=5.0)
    assert (hang.finding.causes, hang.silent) == ((0, 1), {})
    text = describe(hang)
    assert (
        "\nTHE RANKS DISAGREE: ranks 0 and 1 have started different collectives in group `1` (PyTorch's Flight "
        "Recorder).\n  rank 0: 3 (broadcast, Float [4]), scheduled\n  rank 1: 3 (reduce, Float [8]), scheduled\n"
    ) in text
    assert "  process    runs, and waits for collective 3 (broadcast, Float [4]) of group `1`" in text
