"""Comparison of a parallel layer with its serial twin, a plain PyTorch module with the same weights, input and gradient
of the output.

`assert_twins` runs `run_twin` on the ranks of a layout. It compares the output, the input gradient, the parameter
gradients, the gradient norm, and the parameters after one step of AdamW.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from crosscut.config import Layout
from crosscut.parallel import GradientReducer, ParallelMesh, global_gradient_norm, make_mesh
from tests.ranks import RankPool

CPU = torch.device("cpu")
LAYOUTS = [
    Layout(tensor=1),
    Layout(tensor=2),
    Layout(tensor=4),
    Layout(tensor=2, sequence_parallel=True),
    Layout(tensor=4, sequence_parallel=True),
]
_QUICK = (Layout(tensor=2), Layout(tensor=4, sequence_parallel=True))
SOME: list[Any] = [one if one in _QUICK else pytest.param(one, marks=pytest.mark.slow) for one in LAYOUTS]
"""`LAYOUTS` of which two are quick. For layers whose mechanism another layer's test has on all layouts."""
SEQUENCE = 1
"""The sequence dimension."""
CLOSE = {"rtol": 1e-12, "atol": 1e-12}

EPSILON = 1e-3
"""Epsilon of AdamW in these tests. If a gradient is close to 0, its last bit depends on the order of a sum, and the
usual epsilon of 1e-8 would enlarge this bit 10^7 times. A comparison to 1e-12 would then test the machine and not the
layer.
"""


def each(function: Callable[..., Any], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Job of a rank: the results of `function` for several tuples of arguments. Starting a job takes longer than most
    functions.
    """
    return [function(*case) for case in cases]


def fill(parameter: nn.Parameter, full: Tensor) -> None:
    """Fill a distributed parameter with its part of `full`. Padding, the rows beyond the rows of `full`, stays zero."""
    target, (placement,) = parameter.to_local(), parameter.placements
    first = [0] * full.dim()
    if isinstance(placement, Shard):
        first[placement.dim] = parameter.device_mesh.get_local_rank() * target.shape[placement.dim]
    piece = full[tuple(slice(start, start + size) for start, size in zip(first, target.shape, strict=True))]
    with torch.no_grad():
        target[tuple(map(slice, piece.shape))].copy_(piece)


def part(x: Tensor, mesh: ParallelMesh, dim: int | None) -> Tensor:
    """This tensor rank's part of `x`, as a leaf of its own."""
    size = mesh.tensor.size
    return x.clone() if dim is None else x.chunk(size, dim)[mesh.tensor.rank].clone()


def part_of_gradient(grad_y: Tensor, y: Tensor, mesh: ParallelMesh, dim: int | None) -> Tensor:
    """This rank's part of the gradient of an output. If ranks share a part, the first of them gets all of it."""
    if dim != -1 or y.shape[-1] * mesh.tensor.size == grad_y.shape[-1]:
        return part(grad_y, mesh, dim)
    num_parts = grad_y.shape[-1] // y.shape[-1]
    number, place = divmod(mesh.tensor.rank, mesh.tensor.size // num_parts)
    own = grad_y.chunk(num_parts, -1)[number]
    return torch.zeros_like(own) if place else own


def joined(parts: list[Tensor], dim: int | None) -> Tensor:
    """Join the parts of the ranks along `dim`. If `dim` is None, all parts must be equal to the last bit."""
    if dim is not None:
        return torch.cat(parts, dim)
    for other in parts[1:]:
        assert torch.equal(parts[0], other), "ranks differ"
    return parts[0]


def reduce_gradients(loss: Callable[[], Tensor], parameters: Iterable[nn.Parameter], mesh: ParallelMesh) -> None:
    """Run the backward pass of a loss, and sum the gradients over the ranks."""
    reducer = GradientReducer(parameters, mesh)
    reducer.arm()
    loss().backward()
    reducer.finish()


def run_twin(
    layout: Layout,
    make: Callable[[ParallelMesh], nn.Module],
    weights: dict[str, Tensor],
    x: Tensor,
    grad_y: Tensor,
    dims: tuple[int | None, int | None],
) -> dict[str, Any]:
    """Job of a rank: forward and backward pass, reduction, gradient norm and one optimizer step of a parallel layer."""
    mesh = make_mesh(layout, CPU)
    layer = make(mesh=mesh)
    parameters = dict(layer.named_parameters())
    assert parameters.keys() == weights.keys()
    for name, parameter in parameters.items():
        fill(parameter, weights[name])
    own_x = part(x, mesh, dims[0])
    y = layer(own_x.requires_grad_() if own_x.is_floating_point() else own_x)
    reducer = GradientReducer(layer.parameters(), mesh)
    reducer.arm()
    y.backward(part_of_gradient(grad_y, y, mesh, dims[1]))
    reducer.finish()
    gradients = {name: None if p.grad is None else p.grad.full_tensor() for name, p in parameters.items()}
    norm = global_gradient_norm(list(layer.parameters()))
    torch.optim.AdamW(layer.parameters(), lr=0.1, eps=EPSILON).step()
    stepped = {name: p.full_tensor().detach() for name, p in parameters.items()}
    return {"y": y.detach(), "x": own_x.grad, "gradients": gradients, "norm": norm, "stepped": stepped}


def assert_twins(
    ranks: RankPool,
    layout: Layout,
    make: Callable[[ParallelMesh], nn.Module],
    serial: nn.Module,
    x: Tensor,
    dims: tuple[int | None, int | None],
) -> None:
    """Compare a parallel layer with `serial`. `dims` are the dimensions in which input and output are split over the
    ranks; None means not split.
    """
    own_x = x.clone().requires_grad_() if x.is_floating_point() else x
    y = serial(own_x)
    grad_y = torch.randn_like(y)
    weights = {name: p.detach().clone() for name, p in serial.named_parameters()}
    results = ranks.run(layout.tensor, run_twin, layout, make, weights, x, grad_y, dims)
    y.backward(grad_y)
    torch.testing.assert_close(joined([r["y"] for r in results], dims[1]), y.detach(), **CLOSE)
    if own_x.requires_grad:
        torch.testing.assert_close(joined([r["x"] for r in results], dims[0]), own_x.grad, **CLOSE)
    gradients = {name: p.grad for name, p in serial.named_parameters()}
    norm = torch.nn.utils.get_total_norm(gradients.values())
    torch.optim.AdamW(serial.parameters(), lr=0.1, eps=EPSILON).step()
    for result in results:
        torch.testing.assert_close(result["norm"], norm, **CLOSE)
        for name, parameter in serial.named_parameters():
            rows = slice(parameter.shape[0])  # a vocabulary may be padded
            torch.testing.assert_close(result["gradients"][name][rows], gradients[name], **CLOSE)
            torch.testing.assert_close(result["stepped"][name][rows], parameter.detach(), **CLOSE)


def split_sequence(layout: Layout) -> int | None:
    """Dimension in which a layout splits tensors between the parallel regions; None if it does not split them."""
    return SEQUENCE if layout.sequence_parallel else None
