"""The two cuts against `nn.Linear`."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from crosscut.config import Layout, LayoutError
from crosscut.parallel import CollectiveRecorder, ColumnParallelLinear, ParallelMesh, RowParallelLinear, make_mesh
from tests.parallel.twins import CPU, LAYOUTS, assert_twins, fill, part, split_sequence
from tests.ranks import RankPool

B, S, I, O = 2, 8, 12, 20  # noqa: E741 - the shapes' names


class ParallelMLP(nn.Module):
    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.a = ColumnParallelLinear(I, O, mesh=mesh, dtype=torch.float64)
        self.b = RowParallelLinear(O, I, mesh=mesh, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x)))


class SerialMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(I, O).double(), nn.Linear(O, I).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x)))


def make_column(mesh: ParallelMesh) -> nn.Module:
    return ColumnParallelLinear(I, O, mesh=mesh, dtype=torch.float64)


def make_row(mesh: ParallelMesh) -> nn.Module:
    return RowParallelLinear(I, O, mesh=mesh, dtype=torch.float64)


def make_column_without_bias(mesh: ParallelMesh) -> nn.Module:
    return ColumnParallelLinear(I, O, mesh=mesh, bias=False, dtype=torch.float64)


def make_row_without_bias(mesh: ParallelMesh) -> nn.Module:
    return RowParallelLinear(I, O, mesh=mesh, bias=False, dtype=torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_column_parallel_linear_is_linear(ranks: RankPool, layout: Layout, bias: bool) -> None:
    serial = nn.Linear(I, O, bias=bias).double()
    make = make_column if bias else make_column_without_bias
    assert_twins(ranks, layout, make, serial, torch.randn(B, S, I).double(), (split_sequence(layout), -1))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_row_parallel_linear_is_linear(ranks: RankPool, layout: Layout, bias: bool) -> None:
    serial = nn.Linear(I, O, bias=bias).double()
    make = make_row if bias else make_row_without_bias
    assert_twins(ranks, layout, make, serial, torch.randn(B, S, I).double(), (-1, split_sequence(layout)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_columns_then_rows_are_the_mlp(ranks: RankPool, layout: Layout) -> None:
    between = split_sequence(layout)
    assert_twins(ranks, layout, ParallelMLP, SerialMLP(), torch.randn(B, S, I).double(), (between, between))


def _bias_alone(layout: Layout) -> Tensor:
    mesh = make_mesh(layout, CPU)
    layer = RowParallelLinear(I, O, mesh=mesh)
    fill(layer.bias, torch.ones(O))  # the weight stays zero
    return layer(torch.randn(B, S, I // layout.tensor)).detach()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bias_is_added_once(ranks: RankPool, layout: Layout) -> None:
    for y in ranks.run(layout.tensor, _bias_alone, layout):
        assert torch.equal(y, torch.ones_like(y))


def _sent_by_mlp(layout: Layout) -> list[Any]:
    mesh = make_mesh(layout, CPU)
    layer = ParallelMLP(mesh)
    x = torch.randn(B, S // layout.tensor if layout.sequence_parallel else S, I).double().requires_grad_()
    with CollectiveRecorder(mesh) as forward:
        y = layer(x)
    with CollectiveRecorder(mesh) as backward:
        y.sum().backward()
    return [forward.sent, backward.sent]


def test_an_mlp_sends_one_all_reduce_forward_and_one_backward(ranks: RankPool) -> None:
    once = [("all_reduce", "tensor", B * S * I)]
    assert ranks.run(2, _sent_by_mlp, Layout(tensor=2))[0] == [once, once]


def test_a_sequence_parallel_mlp_sends_a_gather_and_a_reduce_scatter_each_way(ranks: RankPool) -> None:
    gather, scatter = ("all_gather", "tensor", B * S * I), ("reduce_scatter", "tensor", B * S * I)
    forward, backward = ranks.run(2, _sent_by_mlp, Layout(tensor=2, sequence_parallel=True))[0]
    assert forward == [gather, scatter]
    assert backward == [gather, gather, scatter]  # the second gather is of the input, which was kept split


class _Operators(TorchDispatchMode):
    """The names of the operators that run inside, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().split("::")[1].split(".")[0])
        return func(*args, **(kwargs or {}))


def _backward_operators(layout: Layout) -> list[str]:
    mesh = make_mesh(layout, CPU)
    layer = make_column(mesh)
    y = layer(part(torch.randn(B, S, I).double(), mesh, split_sequence(layout)).requires_grad_())
    with _Operators() as operators:
        y.sum().backward()
    return operators.names


@pytest.mark.parametrize(
    ("layout", "collective"),
    [(Layout(tensor=2), "all_reduce_"), (Layout(tensor=2, sequence_parallel=True), "reduce_scatter_tensor")],
    ids=str,
)
def test_the_input_gradient_travels_while_the_weight_gradient_is_computed(
    ranks: RankPool, layout: Layout, collective: str
) -> None:
    names = ranks.run(2, _backward_operators, layout)[0]
    started, waited = names.index(collective), names.index("wait_tensor")
    assert "mm" in names[:started]
    assert "mm" in names[started:waited]


def _frozen_and_first(layout: Layout) -> tuple[bool, bool, list[Any]]:
    """A layer whose weight needs no gradient, then one whose input needs none."""
    mesh = make_mesh(layout, CPU)
    frozen, first = make_column(mesh), make_column(mesh)
    frozen.requires_grad_(False)
    x = torch.randn(B, S, I).double().requires_grad_()
    frozen(x).sum().backward()
    with CollectiveRecorder(mesh) as recorder:
        first(x.detach()).sum().backward()
    return x.grad is not None and frozen.weight.grad is None, first.weight.grad is not None, recorder.sent


def test_only_gradients_that_are_needed_are_computed_and_sent(ranks: RankPool) -> None:
    assert ranks.run(2, _frozen_and_first, Layout(tensor=2))[0] == (True, True, [])


def _bfloat16_gradients(layout: Layout) -> list[torch.dtype]:
    mesh = make_mesh(layout, CPU)
    mlp = ParallelMLP(mesh).to(torch.float32)
    x = torch.randn(B, S, I, dtype=torch.bfloat16)
    y = mlp(x)
    y.float().sum().backward()
    return [y.dtype, *(p.grad.dtype for p in mlp.parameters())]


def test_float32_parameters_get_float32_gradients_from_bfloat16_products(ranks: RankPool) -> None:
    assert ranks.run(2, _bfloat16_gradients, Layout(tensor=2))[0] == [torch.bfloat16, *[torch.float32] * 4]


def _indivisible(layout: Layout, make: Any) -> None:
    make(make_mesh(layout, CPU))


def make_wide(mesh: ParallelMesh) -> nn.Module:
    return ColumnParallelLinear(I, 21, mesh=mesh)


def make_narrow(mesh: ParallelMesh) -> nn.Module:
    return RowParallelLinear(7, O, mesh=mesh)


@pytest.mark.parametrize(("make", "dim", "shape"), [(make_wide, 0, r"\(21, 12\)"), (make_narrow, 1, r"\(20, 7\)")])
def test_a_cut_that_does_not_divide_is_refused(ranks: RankPool, make: Any, dim: int, shape: str) -> None:
    message = (
        f"^The tensor axis must divide dimension {dim} of a parameter of shape {shape}, but has 2 ranks. "
        "Choose a size that divides it, or pad the dimension.$"
    )
    with pytest.raises(LayoutError, match=message):
        ranks.run(2, _indivisible, Layout(tensor=2), make)
