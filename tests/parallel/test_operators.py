"""f, g, their sequence-parallel kin, and the collectives under them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut import parallel
from crosscut.config import Layout, LayoutError
from crosscut.parallel import CollectiveRecorder, collectives, make_mesh
from tests.parallel.twins import CPU, each
from tests.ranks import RankPool

SHAPE = (2, 4, 4)  # B, S, H


def _own(rank: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """A tensor that differs from rank to rank, of whole numbers so that sums are exact."""
    return torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(rank)).double()


def _apply(name: str, num_ranks: int) -> tuple[Any, ...]:
    mesh = make_mesh(Layout(tensor=num_ranks), CPU)
    x = _own(mesh.tensor.rank).requires_grad_()
    before = x.detach().clone()
    with CollectiveRecorder(mesh) as forward:
        y = getattr(parallel, name)(x, mesh.tensor)
    grad = _own(10 + mesh.tensor.rank, tuple(y.shape))
    grad_before = grad.clone()
    with CollectiveRecorder(mesh) as backward:
        y.backward(grad)
    assert torch.equal(x, before), "the argument was changed"
    assert torch.equal(grad, grad_before), "the gradient was changed"
    operations = [[sent.operation for sent in recorder.sent] for recorder in (forward, backward)]
    return y.detach(), x.grad, operations


def _identity(parts: list[Tensor]) -> list[Tensor]:
    return parts


def _sum(parts: list[Tensor]) -> list[Tensor]:
    return [sum(parts[1:], parts[0])] * len(parts)


def _join(dim: int) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda parts: [torch.cat(parts, dim)] * len(parts)


def _split(dim: int) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda parts: [part.chunk(len(parts), dim)[i] for i, part in enumerate(parts)]


def _sum_and_split(parts: list[Tensor]) -> list[Tensor]:
    return _split(1)(_sum(parts))


TABLE = {
    "copy_to_tensor_parallel": (_identity, _sum, [[], ["all_reduce"]]),
    "reduce_from_tensor_parallel": (_sum, _identity, [["all_reduce"], []]),
    "gather_from_sequence_parallel": (_join(1), _sum_and_split, [["all_gather"], ["reduce_scatter"]]),
    "reduce_scatter_to_sequence_parallel": (_sum_and_split, _join(1), [["reduce_scatter"], ["all_gather"]]),
    "scatter_to_sequence_parallel": (_split(1), _join(1), [[], ["all_gather"]]),
    "gather_from_tensor_parallel": (_join(2), _split(2), [["all_gather"], []]),
    "join_from_sequence_parallel": (_join(1), _split(1), [["all_gather"], []]),
}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_forward_and_backward_are_those_of_the_table(ranks: RankPool, num_ranks: int) -> None:
    results = ranks.run(num_ranks, each, _apply, [(name, num_ranks) for name in TABLE])
    for (name, (forward, backward, operations)), found in zip(TABLE.items(), zip(*results, strict=True), strict=True):
        expected = forward([_own(rank) for rank in range(num_ranks)])
        shape = tuple(expected[0].shape)
        expected_grads = backward([_own(10 + rank, shape) for rank in range(num_ranks)])
        for (y, grad, sent), expected_y, expected_grad in zip(found, expected, expected_grads, strict=True):
            assert torch.equal(y, expected_y), name
            assert torch.equal(grad, expected_grad), name
            assert sent == operations, name


def _identical(name: str) -> bool:
    mesh = make_mesh(Layout(), CPU)
    x = torch.ones(SHAPE, requires_grad=True)
    return getattr(parallel, name)(x, mesh.tensor) is x


def test_on_one_rank_an_operator_is_the_identity(ranks: RankPool) -> None:
    assert ranks.run(1, each, _identical, [(name,) for name in TABLE]) == [[True] * len(TABLE)]


def _use_twice(name: str) -> Tensor:
    mesh = make_mesh(Layout(tensor=2), CPU)
    x = torch.ones(SHAPE, requires_grad=True)
    (getattr(parallel, name)(x, mesh.tensor) + x).sum().backward()
    return x.grad


def test_a_gradient_that_is_used_twice_is_not_changed_between(ranks: RankPool) -> None:
    for gradient in ranks.run(2, _use_twice, "copy_to_tensor_parallel"):
        assert torch.equal(gradient, torch.full(SHAPE, 3.0))  # written in place it would be 4
    for gradient in ranks.run(2, _use_twice, "reduce_from_tensor_parallel"):
        assert torch.equal(gradient, torch.full(SHAPE, 2.0))


COLLECTIVES: dict[str, tuple[Any, ...]] = {"all_reduce": (), "all_gather": (1,), "reduce_scatter": (1,), "split": (1,)}


def _collect(name: str, arguments: tuple[Any, ...]) -> list[bool]:
    axis = make_mesh(Layout(tensor=2), CPU).tensor
    kept = []
    for x in (_own(axis.rank), _own(axis.rank).transpose(0, 2), _own(axis.rank, (1, 4, 4))):
        before = x.clone()
        y = getattr(collectives, name)(x, axis, *arguments)
        y.zero_()
        kept.append(torch.equal(x, before))
    return kept


def test_a_collective_returns_a_fresh_tensor_and_leaves_its_argument(ranks: RankPool) -> None:
    for kept in ranks.run(2, each, _collect, list(COLLECTIVES.items())):
        assert all(map(all, kept)), kept


def _largest() -> Tensor:
    axis = make_mesh(Layout(tensor=2), CPU).tensor
    return collectives.all_reduce(_own(axis.rank), axis, "max")


def test_an_all_reduce_can_take_the_largest(ranks: RankPool) -> None:
    for y in ranks.run(2, _largest):
        assert torch.equal(y, torch.maximum(_own(0), _own(1)))


def _along(dim: int) -> tuple[Tensor, Tensor]:
    axis = make_mesh(Layout(tensor=2), CPU).tensor
    x = _own(axis.rank)
    return collectives.all_gather(x, axis, dim), collectives.reduce_scatter(x, axis, dim)


def test_gather_and_scatter_work_along_any_dimension(ranks: RankPool) -> None:
    parts = [_own(0), _own(1)]
    for i, results in enumerate(ranks.run(2, each, _along, [(0,), (1,), (2,)])):
        for dim, (gathered, scattered) in enumerate(results):
            assert torch.equal(gathered, torch.cat(parts, dim))
            assert torch.equal(scattered, (parts[0] + parts[1]).chunk(2, dim)[i])


def _uneven(name: str, length: int) -> None:
    mesh = make_mesh(Layout(tensor=4), CPU)
    getattr(parallel, name)(torch.ones(1, length, 4), mesh.tensor)


@pytest.mark.parametrize("name", ["scatter_to_sequence_parallel", "reduce_scatter_to_sequence_parallel"])
def test_a_sequence_that_the_ranks_do_not_divide_is_refused_by_all(ranks: RankPool, name: str) -> None:
    message = (
        "^To split a tensor over the tensor axis, the size of dimension 1 must be a multiple of the number of ranks "
        r"\(4\), but is 6. Pad the dimension, or choose a layout that divides it.$"
    )
    with pytest.raises(LayoutError, match=message):
        ranks.run(4, _uneven, name, 6)


def _enter_and_leave(layout: Layout) -> list[str]:
    mesh = make_mesh(layout, CPU)
    x = torch.ones(SHAPE, requires_grad=True)
    with CollectiveRecorder(mesh) as recorder:
        parallel.leave_tensor_parallel(parallel.enter_tensor_parallel(x, mesh), mesh).sum().backward()
    return [sent.operation for sent in recorder.sent]


def test_entering_and_leaving_are_f_and_g_or_their_sequence_parallel_kin(ranks: RankPool) -> None:
    assert ranks.run(2, _enter_and_leave, Layout(tensor=2)) == [["all_reduce", "all_reduce"]] * 2
    split = ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]
    assert ranks.run(2, _enter_and_leave, Layout(tensor=2, sequence_parallel=True)) == [split] * 2
