"""The norm of all gradients, clipping, and the spread of a value that is not finite to other ranks."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from crosscut.config import Layout
from crosscut.parallel import (
    CollectiveRecorder,
    LayerNorm,
    Sent,
    clip_gradients_,
    global_gradient_norm,
    local,
    make_mesh,
    measure_gradients,
    replicated_parameter,
    sharded_parameter,
)
from tests.parallel.twins import CPU
from tests.ranks import RankPool

H, S = 8, 4


def _norm_over_owners() -> tuple[float, list[Sent]]:
    """Norm of two parameters, one on each rank. The gradient is 3 on the first rank, and 4 on the second."""
    mesh = make_mesh(Layout(data=2), CPU)
    weight = replicated_parameter((), mesh.tensor, dtype=torch.float32, device=CPU)
    weight.grad = torch.full_like(weight, 3.0 + mesh.data.rank)
    with CollectiveRecorder(mesh) as recorder:
        norm = global_gradient_norm([weight], owners=[mesh.data])
    return norm.item(), recorder.sent


def test_the_norm_counts_the_parameters_of_all_owners(ranks: RankPool) -> None:
    assert ranks.run(2, _norm_over_owners) == [(5.0, [("all_reduce", "data", 1)])] * 2


def _norm_of_many(dtype: torch.dtype) -> tuple[float, float]:
    """Gradient norm of a parameter with a million elements on each of two ranks, and the norm computed in float64."""
    mesh = make_mesh(Layout(tensor=2), CPU)
    weight = sharded_parameter((2000, 1000), mesh.tensor, dim=0, dtype=dtype, device=CPU)
    weight.grad = torch.ones_like(weight)
    weight.grad.to_local().normal_(0.0, 1e-4, generator=torch.Generator().manual_seed(mesh.tensor.rank))
    exact = weight.grad.full_tensor().double().square().sum().sqrt()
    return global_gradient_norm([weight]).item(), exact.item()


def test_the_norm_of_many_elements_is_exact(ranks: RankPool) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-5)):
        norm, exact = ranks.run(2, _norm_of_many, dtype)[0]
        assert norm == pytest.approx(exact, rel=tolerance), dtype


def _clip_below() -> bool:
    parameter = _leaf(torch.ones(4), 2.0)
    clip_gradients_([parameter], torch.tensor(4.0), 5.0)
    return torch.equal(parameter.grad.full_tensor(), torch.full((4,), 2.0))


def _leaf(value: Tensor, gradient: float) -> nn.Parameter:
    mesh = make_mesh(Layout(), CPU)
    parameter = replicated_parameter(tuple(value.shape), mesh.tensor, dtype=value.dtype, device=CPU)
    local(parameter, value.dtype).backward(torch.full_like(value, gradient))
    return parameter


def test_gradients_below_the_largest_norm_are_left_alone(ranks: RankPool) -> None:
    assert ranks.run(1, _clip_below) == [True]


def _placements_before() -> bool:
    mesh = make_mesh(Layout(tensor=2, sequence_parallel=True), CPU)
    norm = LayerNorm(H, mesh=mesh)
    norm(torch.randn(2, S // 2, H)).sum().backward()
    gradient = norm.weight.grad
    assert isinstance(gradient, DTensor)
    assert gradient.placements == (Partial(),)
    try:
        global_gradient_norm(list(norm.parameters()))
    except AssertionError:
        return True
    return False


def test_the_norm_of_partial_gradients_is_not_taken(ranks: RankPool) -> None:
    assert ranks.run(2, _placements_before) == [True, True]


def _norm_beside(value: float, is_owned: bool) -> tuple[float, bool, float]:
    """Norm on two ranks of a gradient of 3 on each, where the second rank also has `value`, which does not count.
    Returns the norm, whether this rank's own part is finite, and the verdict.
    """
    mesh = make_mesh(Layout(data=2) if is_owned else Layout(tensor=2), CPU)
    axis = mesh.data if is_owned else mesh.tensor
    if is_owned:
        weight = replicated_parameter((), mesh.tensor, dtype=torch.float32, device=CPU)
    else:
        weight = sharded_parameter((2,), mesh.tensor, dim=0, dtype=torch.float32, device=CPU)
    weight.grad = torch.full_like(weight, 3.0)
    also = [torch.tensor([1.0, value if axis.rank else 1.0])]
    measured = measure_gradients([weight], [axis] if is_owned else (), also=also)
    return measured.norm.item(), bool(measured.own.isfinite()), measured.verdict.item()


@pytest.mark.parametrize("is_owned", [True, False], ids=["owners", "cut"])
def test_a_value_that_does_not_count_only_spreads_what_is_not_finite(ranks: RankPool, is_owned: bool) -> None:
    assert ranks.run(2, _norm_beside, 5.0, is_owned) == [(18.0**0.5, True, 0.0)] * 2
    for value in (math.nan, math.inf):
        first, second = ranks.run(2, _norm_beside, value, is_owned)
        assert (first[1], second[1]) == (True, False)
        assert all(math.isnan(norm) and math.isnan(verdict) for norm, _, verdict in (first, second))
