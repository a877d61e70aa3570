"""Products of sorted rows with the matrices of their experts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.kernels.experts import collect, in_turn, multiply_groups, sort_by_expert, spread, takes_turns, weigh
from crosscut.kernels.gelu import gelu
from crosscut.model.sublayers.gated_mlp import swiglu

LOADS = {
    "even": [16, 16, 16, 16], "uneven": [1, 0, 61, 2], "collapsed": [0, 0, 0, 64], "two": [0, 32, 32, 0],
}  # fmt: skip


def factors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 24), (4, 32, 24), (64, 32))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)  # type: ignore[return-value]


def gradients(rows: Tensor, weight: Tensor, grad: Tensor, ends: Tensor) -> list[Tensor]:
    rows, weight = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    y = multiply_groups(rows, weight, ends)
    y.backward(grad)
    assert rows.grad is not None
    assert weight.grad is not None
    return [y.detach(), rows.grad, weight.grad]


@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_each_row_meets_the_matrix_of_its_expert(loads: str, dtype: torch.dtype) -> None:
    rows, weight, grad = factors(dtype)
    experts = torch.arange(4).repeat_interleave(torch.tensor(LOADS[loads]))
    found = gradients(rows, weight, grad, torch.tensor(LOADS[loads]).cumsum(0))
    wide, w, g = (x.double() for x in (rows, weight, grad))
    y = torch.einsum("ni,noi->no", wide, w[experts])
    of_weight = torch.stack([g[experts == e].T @ wide[experts == e] for e in range(4)])
    expected = [y, torch.einsum("no,noi->ni", g, w[experts]), of_weight]
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("activate", [swiglu, gelu])
def test_experts_in_turn_compute_the_same_bits(loads: str, dtype: torch.dtype, activate: Any) -> None:
    rows, expand, _ = factors(dtype)
    weights, up = torch.linspace(0.0, 1.0, len(rows), dtype=dtype), [expand.flip(0)] if activate is swiglu else []
    leaves = [x.clone().requires_grad_() for x in (rows, weights, expand, *up, expand.mT.contiguous())]
    ends, grad = torch.tensor(LOADS[loads]).cumsum(0), torch.randn_like(rows)

    def plain(rows: Tensor, weights: Tensor, *matrices: Tensor) -> Tensor:
        inner = [multiply_groups(rows, matrix, ends) for matrix in matrices[:-1]]
        return multiply_groups(weigh(activate, weights, *inner), matrices[-1], ends)

    results = [plain(*leaves), in_turn(activate, *leaves[:2], ends, *leaves[2:])]
    expected, found = ([y, *torch.autograd.grad(y, leaves, grad)] for y in results)
    assert all(map(torch.equal, found, expected))


def test_only_experts_with_many_rows_that_are_trained_take_turns() -> None:
    rows, weights, trained = torch.ones(512, 8), torch.ones(512), torch.ones(4, 1024, 8, requires_grad=True)
    assert takes_turns(rows, weights, trained)
    assert not takes_turns(rows, weights, trained.detach())
    assert not takes_turns(rows[:508], weights[:508], trained)
    assert not takes_turns(rows.bfloat16(), weights, trained)
    with torch.no_grad():
        assert not takes_turns(rows, weights, trained)


def test_a_gradient_that_is_one_number_everywhere_is_taken() -> None:
    rows, weight, _ = factors(torch.bfloat16)
    ends = torch.tensor([16, 32, 48, 64])
    spread_out = torch.ones((), dtype=torch.bfloat16).expand(64, 32)
    found = gradients(rows, weight, spread_out, ends)
    expected = gradients(rows, weight, spread_out.contiguous(), ends)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


def test_rows_come_back_to_their_tokens() -> None:
    chosen = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])
    places = sort_by_expert(chosen, torch.tensor([3, 2, 3, 0]))
    assert places.tokens.tolist() == [0, 1, 3, 1, 2, 0, 2, 3]
    assert places.ends.tolist() == [3, 5, 8, 8]
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    rows = spread(x, places)
    assert torch.equal(rows, x[places.tokens])
    weights = torch.randn(8, 1, dtype=torch.float64)
    y = collect(rows * weights, places, 4)
    torch.testing.assert_close(y, torch.zeros_like(x).index_add(0, places.tokens, rows * weights))
    assert torch.autograd.gradcheck(lambda x: collect(spread(x, places) * weights, places, 4), (x,))
