"""Parameters as distributed tensors, and the local tensors behind them."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from crosscut.config import Layout
from crosscut.parallel import local, local_on_sequence, make_mesh, replicated_parameter, sharded_parameter
from crosscut.parallel.state.parameters import local_inside
from tests.parallel.twins import CPU, fill
from tests.ranks import RankPool


def _over_tensor(tensor: DTensor) -> Placement:
    names = tensor.device_mesh.mesh_dim_names
    return tensor.placements[names.index("tensor")]


def _placed(layout: Layout) -> list[Any]:
    axis = make_mesh(layout, CPU).tensor
    place: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    parameters = [
        sharded_parameter((8, 6), axis, dim=0, **place),
        sharded_parameter((8, 6), axis, dim=1, **place),
        replicated_parameter((8, 6), axis, value=2.0, **place),
    ]
    return [
        (tuple(p.shape), tuple(p.to_local().shape), _over_tensor(p), p.sum().full_tensor().item()) for p in parameters
    ]


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_parameter_has_its_global_shape_and_each_rank_its_part(ranks: RankPool, tensor: int) -> None:
    for columns, rows, whole in ranks.run(tensor, _placed, Layout(tensor=tensor)):
        assert columns == ((8, 6), (8 // tensor, 6), Shard(0), 0.0)
        assert rows == ((8, 6), (8, 6 // tensor), Shard(1), 0.0)
        assert whole == ((8, 6), (8, 6), Replicate(), 96.0)


def _use(layout: Layout) -> dict[str, DTensor]:
    mesh = make_mesh(layout, CPU)
    place: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    cut, whole, between = (
        sharded_parameter((8, 6), mesh.tensor, dim=1, **place),
        replicated_parameter((6,), mesh.tensor, **place),
        replicated_parameter((6,), mesh.tensor, **place),
    )
    for x in (
        local(cut, torch.bfloat16),
        local(whole, torch.bfloat16),
        local_on_sequence(between, mesh, torch.bfloat16),
    ):
        assert type(x) is torch.Tensor
        assert x.dtype == torch.bfloat16
        x.sum().backward()
    gradients = {"cut": cut.grad, "whole": whole.grad, "between": between.grad}
    return {name: (_over_tensor(g), g.dtype, tuple(g.shape)) for name, g in gradients.items()}


@pytest.mark.parametrize("split", [False, True])
def test_a_gradient_has_its_parameter_s_type_and_tells_whether_it_is_partial(ranks: RankPool, split: bool) -> None:
    for gradients in ranks.run(2, _use, Layout(tensor=2, sequence_parallel=split)):
        assert gradients["cut"] == (Shard(1), torch.float32, (8, 6))
        assert gradients["whole"] == (Replicate(), torch.float32, (6,))
        assert gradients["between"] == (Partial() if split else Replicate(), torch.float32, (6,))


def _filled(tensor: int) -> torch.Tensor:
    parameter = sharded_parameter(
        (6, 8), make_mesh(Layout(tensor=tensor), CPU).tensor, dim=1, dtype=torch.float32, device=CPU
    )
    fill(parameter, torch.arange(48.0).view(6, 8))
    return parameter.full_tensor().detach()


def test_parts_are_in_the_order_of_the_ranks(ranks: RankPool) -> None:
    for whole in ranks.run(4, _filled, 4):
        assert torch.equal(whole, torch.arange(48.0).view(6, 8))


def _gradients_by(layout: Layout) -> list[Any]:
    """Facts about the gradient of each parameter, after one and after two uses, with this package's function and with
    PyTorch's.
    """
    mesh = make_mesh(layout, CPU)
    place: dict[str, Any] = {"dtype": torch.float64, "device": CPU}
    found = []
    for parameter, gradient in (
        (sharded_parameter((8, 6), mesh.tensor, dim=0, **place), None),
        (sharded_parameter((8, 6), mesh.tensor, dim=1, **place), None),
        (replicated_parameter((8, 6), mesh.tensor, **place), [Partial()]),
    ):
        own = local if gradient is None else local_inside
        for use in (lambda x, w: x * w, lambda x, w: x.t() @ w, lambda x, w: x[1:].sum() * w):
            seen = []
            for part in (own(parameter, torch.float64), parameter.to_local(grad_placements=gradient)):
                weights = torch.arange(part.numel(), dtype=torch.float64).view(part.shape) + 1.0
                parameter.grad = None
                told = []
                for _ in range(2):
                    use(part, weights).sum().backward(retain_graph=True)
                    g = parameter.grad
                    told.append((g.placements, g.shape, g.to_local().tolist()))
                seen.append(told)
            found.append(seen)
    return found


@pytest.mark.parametrize("tensor", [1, 2])
def test_gradients_are_those_of_pytorch_s_own_way_to_the_local_part(ranks: RankPool, tensor: int) -> None:
    for found in ranks.run(tensor, _gradients_by, Layout(tensor=tensor)):
        assert len(found) == 9
        for ours, theirs in found:
            assert ours == theirs


class _Dropped(torch.autograd.Function):
    """Uses its input, and gives it no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


def _drop() -> tuple[bool, bool]:
    mesh = make_mesh(Layout(), CPU)
    used, dropped = (replicated_parameter((6,), mesh.tensor, dtype=torch.float32, device=CPU) for _ in range(2))
    (local(used, torch.float32) + _Dropped.apply(local(dropped, torch.float32))).sum().backward()
    return used.grad is None, dropped.grad is None


def test_no_gradient_stays_none(ranks: RankPool) -> None:
    assert ranks.run(1, _drop) == [(False, True)]
