"""Low-rank adapters of the parallel layers against plain products with W + scale U D."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.config import Layout
from crosscut.parallel import (
    Blocks,
    CollectiveRecorder,
    ColumnParallelLinear,
    ColumnParallelLinears,
    ParallelMesh,
    RowParallelLinear,
    make_mesh,
)
from tests.parallel.stand_ins import products_in_pieces
from tests.parallel.twins import CLOSE, CPU, SOME, fill, joined, part, run_twin, split_sequence
from tests.ranks import RankPool

B, S, I, O = 2, 8, 12, 20  # noqa: E741 - the shapes' names
RANK, SCALE = 3, 1.5
HEADS, WIDTH = 2, 5
"""Blocks of keys and values, fewer than four ranks, and elements of a key."""


def make_column(mesh: ParallelMesh) -> nn.Module:
    layer = ColumnParallelLinear(I, O, mesh=mesh, dtype=torch.float64)
    layer.add_adapter(RANK, scale=SCALE)
    return layer


def make_row(mesh: ParallelMesh) -> nn.Module:
    layer = RowParallelLinear(I, O, mesh=mesh, dtype=torch.float64)
    layer.add_adapter(RANK, scale=SCALE)
    return layer


def make_keys_and_values(mesh: ParallelMesh) -> nn.Module:
    layer = ColumnParallelLinear(I, Blocks(HEADS, 2 * WIDTH), mesh=mesh, dtype=torch.float64)
    layer.add_adapter(RANK, scale=SCALE, num_matrices=2)
    return layer


def weights_of(num_matrices: int = 1) -> dict[str, Tensor]:
    shapes = {"weight": (O, I), "bias": (O,), "adapter.down": (RANK * num_matrices, I), "adapter.up": (O, RANK)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def assert_adapted(
    ranks: RankPool, layout: Layout, make: Callable[[ParallelMesh], nn.Module], dims: tuple[int | None, int | None],
    *, num_matrices: int = 1
) -> None:  # fmt: skip
    weights, x = weights_of(num_matrices), torch.randn(B, S, I, dtype=torch.float64)
    grad_y = torch.randn(B, S, O, dtype=torch.float64)
    results = ranks.run(layout.tensor, run_twin, layout, make, weights, x, grad_y, dims)
    down, up, own_x = (tensor.requires_grad_() for tensor in (weights["adapter.down"], weights["adapter.up"], x))
    matrix_of_row = torch.arange(O) // WIDTH % num_matrices
    delta = torch.stack([up[row] @ down.unflatten(0, (num_matrices, RANK))[matrix_of_row[row]] for row in range(O)])
    y = F.linear(own_x, weights["weight"] + SCALE * delta, weights["bias"])
    y.backward(grad_y)
    outputs = [result["y"] for result in results]
    share = max(1, sum(output.shape[-1] for output in outputs) // O) if dims[1] == -1 else 1
    torch.testing.assert_close(joined(outputs[::share], dims[1]), y.detach(), **CLOSE)
    torch.testing.assert_close(joined([result["x"] for result in results], dims[0]), own_x.grad, **CLOSE)
    norm = torch.nn.utils.get_total_norm([down.grad, up.grad])
    for result in results:
        torch.testing.assert_close(result["gradients"]["adapter.down"], down.grad, **CLOSE)
        torch.testing.assert_close(result["gradients"]["adapter.up"], up.grad, **CLOSE)
        torch.testing.assert_close(result["norm"], norm, **CLOSE)
        assert result["gradients"]["weight"] is None
        assert result["gradients"]["bias"] is None


@pytest.mark.parametrize("layout", SOME, ids=str)
def test_a_column_parallel_layer_with_an_adapter_is_the_changed_layer(ranks: RankPool, layout: Layout) -> None:
    assert_adapted(ranks, layout, make_column, (split_sequence(layout), -1))


@pytest.mark.parametrize("layout", SOME, ids=str)
def test_a_row_parallel_layer_with_an_adapter_is_the_changed_layer(ranks: RankPool, layout: Layout) -> None:
    assert_adapted(ranks, layout, make_row, (-1, split_sequence(layout)))


@pytest.mark.parametrize("layout", SOME, ids=str)
def test_keys_and_values_have_an_adapter_each(ranks: RankPool, layout: Layout) -> None:
    assert_adapted(ranks, layout, make_keys_and_values, (split_sequence(layout), -1), num_matrices=2)


class AdaptedMLP(nn.Module):
    def __init__(self, mesh: ParallelMesh, rank: int) -> None:
        super().__init__()
        gate, up = (ColumnParallelLinear(I, O, mesh=mesh) for _ in range(2))
        contract = RowParallelLinear(O, I, mesh=mesh)
        for layer in (gate, up, contract) if rank else ():
            layer.add_adapter(rank, scale=1.0)
        self.expand, self.contract = ColumnParallelLinears(gate=gate, up=up), contract

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.expand(x)
        return self.contract(F.silu(gate) * up)


def _sent(layout: Layout, rank: int) -> list[Any]:
    mesh = make_mesh(layout, CPU)
    x = torch.randn(B, S // layout.tensor if layout.sequence_parallel else S, I).requires_grad_()
    with CollectiveRecorder(mesh) as recorder:
        AdaptedMLP(mesh, rank)(x).sum().backward()
    return list(recorder.sent)


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(tensor=2, sequence_parallel=True)], ids=str)
def test_adapters_send_nothing(ranks: RankPool, layout: Layout) -> None:
    without, adapted = (ranks.run(2, _sent, layout, rank)[0] for rank in (0, RANK))
    assert adapted == without
    assert adapted


def _in_pieces(layout: Layout, weights: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    """On a rank: outputs of the row-parallel layer with an adapter, plain and with symmetric memory."""
    outputs = []
    for how in (layout, Layout(tensor=2, sequence_parallel=True, symmetric_memory=True)):
        mesh = make_mesh(how, CPU)
        layer = make_row(mesh)
        for name, parameter in layer.named_parameters():
            fill(parameter, weights[name])
        with products_in_pieces():
            outputs.append(layer(part(x, mesh, -1)).detach())
    return outputs


def test_symmetric_memory_gives_the_same_sum(ranks: RankPool) -> None:
    layout, x = Layout(tensor=2, sequence_parallel=True), torch.randn(B, S, I, dtype=torch.float64)
    for plain, in_pieces in ranks.run(2, _in_pieces, layout, weights_of(), x):
        torch.testing.assert_close(in_pieces, plain, **CLOSE)
