"""Each rank takes one whole tensor of several that are cut over ranks, and gives it back in parts."""

from typing import Any

import pytest
import torch
from torch import nn

from crosscut.config import Layout
from crosscut.parallel import make_mesh, replicated_parameter, shard_model, sharded_parameter
from crosscut.parallel.state.parameters import local_offsets, local_part
from crosscut.parallel.state.turns import given_back, num_holders, taken
from tests.parallel.twins import CPU
from tests.ranks import RankPool

ROWS, COLUMNS = 10, 12


def _in_turns(layout: Layout, dim: int | None, number: int) -> dict[str, Any]:
    """Take whole tensors whose elements are numbered, add 1,000 times the rank, and give them back."""
    mesh = make_mesh(layout, CPU)
    place: dict[str, Any] = {"dtype": torch.float64, "device": mesh.parameter_device}
    shape = (ROWS, COLUMNS)
    make = replicated_parameter if dim is None else sharded_parameter
    cut = {} if dim is None else {"dim": dim}
    model = nn.ParameterList([make(shape, mesh.tensor, **cut, **place)])
    if layout.shard_size > 1:
        shard_model(model, mesh, units=[], always_used=True)
    (like,) = model
    first, size = local_offsets(like), local_part(like).shape
    region = tuple(slice(start, start + length) for start, length in zip(first, size, strict=True))
    wholes = [torch.arange(ROWS * COLUMNS, dtype=torch.float64).view(shape) + 10_000 * i for i in range(number)]
    whole = taken((each[region].clone() for each in wholes), like)
    known = None if whole is None else next(i for i, each in enumerate(wholes) if torch.equal(each, whole))
    back = given_back(None if whole is None else -whole, like, number, torch.float64)
    exact = [torch.equal(part, -each[region]) for part, each in zip(back, wholes, strict=True)]
    return {"holders": num_holders(like), "taken": known, "exact": all(exact), "size": tuple(size)}


CASES = [
    (Layout(tensor=2, data=2), 0, 2),
    (Layout(tensor=4), 1, 4),
    (Layout(data=4, sharding="zero3"), None, 4),  # 10 rows over 4 ranks: 3, 3, 3 and 1
    (Layout(tensor=2, data=2, sharding="zero2"), 0, 4),  # 5 rows over 2 ranks: 3 and 2
    (Layout(tensor=2, data=2, sharding="zero3"), 1, 4),
    (Layout(tensor=2, data=2, sharding="zero3"), None, 2),  # the tensor ranks do the same
]
"""Layout, dimension that the tensor axis cuts, and number of ranks over which a tensor is cut."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("layout", "dim", "holders", "number"), [(*case, number) for case in CASES for number in range(1, case[2] + 1)],
    ids=str,
)  # fmt: skip
def test_each_rank_gets_another_whole_tensor(
    ranks: RankPool, layout: Layout, dim: int | None, holders: int, number: int
) -> None:
    told = ranks.run(layout.world_size, _in_turns, layout, dim, number)
    assert all(rank["exact"] for rank in told)
    assert {rank["holders"] for rank in told} == {holders}
    copies = layout.world_size // holders
    assert sorted(rank["taken"] for rank in told if rank["taken"] is not None) == sorted(list(range(number)) * copies)


def test_parts_are_as_uneven_as_the_test_says(ranks: RankPool) -> None:
    layout = Layout(tensor=2, data=2, sharding="zero2")
    assert sorted(rank["size"][0] for rank in ranks.run(4, _in_turns, layout, 0, 4)) == [2, 2, 3, 3]


def test_one_rank_keeps_its_tensor(ranks: RankPool) -> None:
    assert ranks.run(1, _in_turns, Layout(), 0, 1) == [
        {"holders": 1, "taken": 0, "exact": True, "size": (ROWS, COLUMNS)}
    ]
