"""Rows that go to the ranks of their experts and back."""

from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.parallel import CollectiveRecorder, make_mesh
from crosscut.parallel.owners.experts import plan_exchange, return_rows, send_rows
from tests.parallel.twins import CPU
from tests.ranks import RankPool

COUNTS = {
    "uneven": [[1, 0, 3, 2], [0, 0, 0, 5], [2, 2, 2, 2], [0, 4, 0, 0]],
    "all rows to one expert": [[0, 0, 3, 0], [0, 0, 2, 0], [0, 0, 1, 0], [0, 0, 4, 0]],
    "each to the expert of the next rank": [[0, 2, 0, 0], [0, 0, 2, 0], [0, 0, 0, 2], [2, 0, 0, 0]],
    "a rank without rows": [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [3, 0, 0, 1]],
}
"""Number of rows of each rank for each of four experts."""


def exchanged(counts: list[list[int]]) -> tuple[Tensor, Tensor, Tensor, list[int], list[Any]]:
    """Send rows [rank, expert, number] to the ranks of their experts, multiply them by the rank's number, and send them
    back. Returns the rows of a rank's experts, the results, the gradient of the rows, the ends, and the messages.
    """
    mesh = make_mesh(Layout(data=4, expert=4), CPU)
    axis, mine = mesh.expert, counts[mesh.expert.rank]
    rows = torch.tensor([[axis.rank, e, i] for e, n in enumerate(mine) for i in range(n)], dtype=torch.float64)
    rows = rows.reshape(-1, 3).requires_grad_()
    with CollectiveRecorder(mesh) as recorder:
        exchange = plan_exchange(torch.tensor(mine), sum(mine), axis)
        received = send_rows(rows, exchange)
        results = return_rows(received * (axis.rank + 1), exchange)
        (results * (axis.rank + 10)).sum().backward()
    return (
        received.detach(),
        results.detach(),
        rows.grad,
        exchange.ends.tolist(),
        [tuple(sent) for sent in recorder.sent],
    )


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_rows_come_to_their_experts_and_back(ranks: RankPool, counts: list[list[int]]) -> None:
    told = ranks.run(4, exchanged, counts)
    for rank, (received, results, gradient, ends, sent) in enumerate(told):
        expected = [[r, rank, i] for r in range(4) for i in range(counts[r][rank])]
        assert received.tolist() == expected, "rows are sorted by expert, then by rank, and keep their order"
        assert ends == [len(expected)]
        own = torch.tensor([[rank, e, i] for e, n in enumerate(counts[rank]) for i in range(n)]).double().reshape(-1, 3)
        factors = own[:, 1:2] + 1
        assert torch.equal(results, own * factors)
        assert torch.equal(gradient, (factors * (rank + 10)).expand_as(own))
        assert {operation for operation, _, _ in sent} == {"all_to_all"}
        assert {axis for _, axis, _ in sent} == {"expert"}


def test_the_sum_of_exchanged_elements_does_not_depend_on_the_loads(ranks: RankPool) -> None:
    sent = [sum(elements for _, _, elements in told[-1]) for told in ranks.run(4, exchanged, COUNTS["uneven"])]
    num_rows = sum(map(sum, COUNTS["uneven"]))
    assert sum(sent) == 4 * (4 + 0) + 4 * 3 * num_rows
