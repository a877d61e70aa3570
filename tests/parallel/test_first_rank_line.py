"""The line on which the first rank tells the others what is new."""

import json

import torch.distributed as dist

from crosscut.parallel.collectives import FirstRankLine
from tests.ranks import RankPool

VALUES = [None, {"a": [1, 2.5]}, None, "x" * 100_000, 0, []]


def heard() -> list[object]:
    line = FirstRankLine(lambda value: json.dumps(value).encode(), json.loads)
    first = dist.get_rank() == 0
    values = [line.share(value if first else "not looked at") for value in VALUES]
    line.close()
    return values


def test_all_ranks_hear_the_first_ranks_values_in_their_order(ranks: RankPool) -> None:
    assert ranks.run(3, heard) == [VALUES] * 3


def test_a_rank_alone_hears_itself(ranks: RankPool) -> None:
    assert ranks.run(1, heard) == [VALUES]
