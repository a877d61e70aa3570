"""A rank that computes more slowly than the others is found, although all ranks take the same time for a step."""

import struct

import pytest

from crosscut.flight.reading import RankRecord, parse_record
from crosscut.flight.record import Record, RecordWord, RunPhase
from crosscut.flight.stragglers import find_stragglers

STEP = 1_000_000_000


def reading(rank: int, steps: int, *, own: float, data: float = 0.0) -> RankRecord:
    """Record of a rank after steps of one second, in which the rank computes for `own` seconds and waits otherwise."""
    record = Record()
    record.open(rank=rank, world_size=4)
    words = {
        RecordWord.STEPS: steps,
        RecordWord.SPENT + RunPhase.FORWARD: int(steps * STEP * (1 - data)),
        RecordWord.SPENT + RunPhase.DATA: int(steps * STEP * data),
        RecordWord.WAITED: int(steps * STEP * (1 - own - data)),
    }
    for word, value in words.items():
        record._words[word] = value
    content = bytes(memoryview(record._words).cast("B"))
    record.close()
    assert struct.unpack_from("q", content, RecordWord.STEPS * 8)[0] == steps
    return parse_record(content)


def between(steps: int, **of_rank_2: float) -> list[str]:
    shares = {rank: {"own": 0.5} for rank in range(4)} | {2: of_rank_2}
    before = {rank: reading(rank, 10, **share) for rank, share in shares.items()}
    after = {rank: reading(rank, 10 + steps, **share) for rank, share in shares.items()}
    return [str(straggler) for straggler in find_stragglers(before, after)]


def test_a_slow_rank_is_named_with_its_shares():
    (told,) = between(20, own=0.8)
    assert told.startswith("Rank 2 (host ")
    assert told.endswith(
        "is 1.6 times as slow as the median of the ranks. Its time per step: compute 80%, data 0%, sending 0%, "
        "waiting 20%."
    )


def test_slow_data_count():
    (told,) = between(20, own=0.5, data=0.4)
    assert "compute 50%, data 40%, sending 0%, waiting 10%" in told


@pytest.mark.parametrize(("steps", "own"), [(20, 0.6), (3, 0.9)], ids=["not slow enough", "too few steps"])
def test_no_rank_is_named(steps, own):
    assert between(steps, own=own) == []
