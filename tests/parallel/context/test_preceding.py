"""A causal convolution over context ranks, beside the convolution of whole sequences: values, gradients, messages."""

from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.kernels.recurrent.convolution import convolve
from crosscut.parallel import CollectiveRecorder, Sent, make_mesh
from crosscut.parallel.context import join_zigzag, preceded_pieces, split_zigzag
from crosscut.parallel.context.preceding import plan_preceding
from tests.parallel.spatial.faults import halo_gradients_dropped, no_halos
from tests.parallel.twins import CLOSE, CPU
from tests.ranks import RankPool

LENGTH, WIDTH = 32, 3
TAPS = [4, 7]
"""With 7 taps on 4 ranks, a token reads three pieces."""


def _data(num_taps: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs, taps, bias, documents, and the gradient of the result."""
    generator = torch.Generator().manual_seed(num_taps)
    shapes = ((2, LENGTH, WIDTH), (WIDTH, num_taps), (WIDTH,), (2, LENGTH, WIDTH))
    x, taps, bias, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    documents = torch.tensor([[0] * 11 + [1] * 21, [0] * 32])
    return x, taps, bias, documents, grad


def _whole(num_taps: int) -> tuple[Tensor, ...]:
    x, taps, bias, documents, grad = _data(num_taps)
    operands = [each.requires_grad_() for each in (x, taps, bias)]
    y = convolve(*operands, documents=documents)
    y.backward(grad)
    return (y.detach(), *(each.grad for each in operands))


def _convolved(num_taps: int, fault: str = "") -> tuple[Tensor, ...]:
    """Job of a rank: result and gradients of the convolution, joined over the ranks."""
    mesh = make_mesh(Layout(context=4), CPU)
    axis, before = mesh.context, num_taps - 1
    x, taps, bias, documents, grad = _data(num_taps)
    own = split_zigzag(x, 4, 1)[axis.rank].requires_grad_()
    operands = [each.requires_grad_() for each in (taps, bias)]
    with pytest.MonkeyPatch.context() as patch:
        _plant(patch, fault)
        windows = preceded_pieces(own, axis, before=before)
        of_windows = preceded_pieces(split_zigzag(documents, 4, 1)[axis.rank], axis, before=before)
        pieces = [
            convolve(window, *operands, documents=each)[:, before:]
            for window, each in zip(windows, of_windows, strict=True)
        ]
        torch.cat(pieces, 1).backward(split_zigzag(grad, 4, 1)[axis.rank])
    return (torch.cat(pieces, 1).detach(), own.grad, *(each.grad for each in operands))


def _plant(patch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "tokens lost":
        no_halos(patch)
    elif fault == "gradients lost":
        halo_gradients_dropped(patch)
    elif fault == "pieces of neighbours":
        patch.setattr("crosscut.parallel.context.preceding.plan_preceding", _contiguous)


def _contiguous(length: int, num_ranks: int, before: int) -> Any:
    """A plan as if rank r had the pieces 2 r and 2 r + 1."""
    plan = plan_preceding(length, num_ranks, before)
    pieces = sorted(piece for ranges in plan.held for piece in ranges)
    return type(plan)(tuple(zip(pieces[::2], pieces[1::2], strict=True)), plan.wants)


def _joined(of_ranks: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    y, of_x, *parameters = zip(*of_ranks, strict=True)
    return join_zigzag(y, 1), join_zigzag(of_x, 1), *(torch.stack(each).sum(0) for each in parameters)


@pytest.mark.parametrize("num_taps", TAPS)
def test_a_causal_convolution_over_context_ranks_equals_one_rank(ranks: RankPool, num_taps: int) -> None:
    torch.testing.assert_close(_joined(ranks.run(4, _convolved, num_taps)), _whole(num_taps), **CLOSE)


@pytest.mark.parametrize("fault", ["tokens lost", "gradients lost", "pieces of neighbours"])
def test_planted_faults_are_found(ranks: RankPool, fault: str) -> None:
    found = _joined(ranks.run(4, _convolved, 4, fault))
    assert any(not torch.allclose(a, b, rtol=1e-3) for a, b in zip(found, _whole(4), strict=True))


def _messages(num_taps: int) -> tuple[list[Sent], list[Sent]]:
    mesh = make_mesh(Layout(context=4), CPU)
    axis = mesh.context
    x = torch.randn(2, LENGTH // 4, WIDTH, requires_grad=True)
    with CollectiveRecorder(mesh, grid=[axis]) as recorder:
        sum(piece.sum() for piece in preceded_pieces(x, axis, before=num_taps - 1)).backward()
    plan, others = plan_preceding(LENGTH, 4, num_taps - 1), [rank for rank in range(4) if rank != axis.rank]
    rows = [plan.rows(axis.rank, taker) for taker in others] + [plan.rows(giver, axis.rank) for giver in others]
    return recorder.sent, [Sent("send", "context", each * 2 * WIDTH) for each in rows if each]


@pytest.mark.parametrize("num_taps", TAPS)
def test_messages_are_those_of_the_plan(ranks: RankPool, num_taps: int) -> None:
    for sent, planned in ranks.run(4, _messages, num_taps):
        assert sent == planned
    assert plan_preceding(LENGTH, 4, 3).rows(1, 0) == 3  # piece 6 precedes rank 0's piece 7
    assert plan_preceding(LENGTH, 4, 3).sent == 2 * 3 * 3  # before all pieces but 0 and 4, whose rank has piece 3, too


def test_one_rank_has_the_whole_sequence(ranks: RankPool) -> None:
    (pieces,) = ranks.run(1, _alone)
    assert [piece.tolist() for piece in pieces] == [[[0.0, 0.0, 1.0, 1.0, 1.0]]]


def _alone() -> tuple[Tensor, ...]:
    return preceded_pieces(torch.ones(1, 3), make_mesh(Layout(), CPU).context, before=2)
