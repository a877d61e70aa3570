"""The two cuts against `nn.Linear`."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from crosscut.config import Layout, LayoutError
from crosscut.config.conventions import OVERLAPPED_ELEMENTS, num_pieces
from crosscut.parallel import (
    CollectiveRecorder,
    ColumnParallelLinear,
    ParallelMesh,
    ReplicatedLinear,
    RowParallelLinear,
    enter_tensor_parallel,
    fused,
    make_mesh,
)
from tests.parallel.twins import CLOSE, CPU, LAYOUTS, SOME, assert_twins, fill, part, split_sequence
from tests.ranks import RankPool
from tests.refusals import refusal

B, S, I, O = 2, 8, 12, 20  # noqa: E741 - the shapes' names
SENT = ("all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor")

FORWARD_IN_PIECES = [
    *["all_gather_into_tensor"] * 2,
    *["wait_tensor", "mm"] * 2,
    *["mm", "reduce_scatter_tensor"] * 2,
    *["wait_tensor"] * 2,
]
"""One half is used while the other travels."""

BACKWARD_IN_PIECES = [*["all_gather_into_tensor"] * 2, *["wait_tensor", "mm", "mm"] * 2]
"""Operators of the row-parallel layer, which comes first in the backward pass."""


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


class ParallelLatent(nn.Module):
    """A narrow latent outside of the region, whose columns are expanded inside."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.down = ReplicatedLinear(I, 3, mesh=mesh, dtype=torch.float64).on_stream()
        self.a = ColumnParallelLinear(3, O, mesh=mesh, dtype=torch.float64)
        self.b = RowParallelLinear(O, I, mesh=mesh, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a.multiply(enter_tensor_parallel(self.down(x), self.mesh))))


class SerialLatent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(I, 3).double()
        self.a, self.b = nn.Linear(3, O).double(), nn.Linear(O, I).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(self.down(x))))


make_column = partial(ColumnParallelLinear, I, O, dtype=torch.float64)
make_row = partial(RowParallelLinear, I, O, dtype=torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_column_parallel_linear_is_linear(ranks: RankPool, layout: Layout) -> None:
    serial = nn.Linear(I, O).double()
    assert_twins(ranks, layout, make_column, serial, torch.randn(B, S, I).double(), (split_sequence(layout), -1))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_row_parallel_linear_is_linear(ranks: RankPool, layout: Layout) -> None:
    serial = nn.Linear(I, O).double()
    assert_twins(ranks, layout, make_row, serial, torch.randn(B, S, I).double(), (-1, split_sequence(layout)))


def test_layers_without_bias_are_linear(ranks: RankPool) -> None:
    layout = Layout(tensor=2, sequence_parallel=True)
    for make, dims in ((make_column, (1, -1)), (make_row, (-1, 1))):
        serial = nn.Linear(I, O, bias=False).double()
        assert_twins(ranks, layout, partial(make, bias=False), serial, torch.randn(B, S, I).double(), dims)


@pytest.mark.parametrize("layout", SOME, ids=str)
def test_columns_then_rows_are_the_mlp(ranks: RankPool, layout: Layout) -> None:
    between = split_sequence(layout)
    assert_twins(ranks, layout, ParallelMLP, SerialMLP(), torch.randn(B, S, I).double(), (between, between))


@pytest.mark.parametrize("layout", SOME, ids=str)
def test_a_latent_enters_the_region_in_place_of_its_input(ranks: RankPool, layout: Layout) -> None:
    between = split_sequence(layout)
    assert_twins(ranks, layout, ParallelLatent, SerialLatent(), torch.randn(B, S, I).double(), (between, between))


def _sent_by_mlp(layout: Layout) -> list[Any]:
    mesh = make_mesh(layout, CPU)
    layer = ParallelMLP(mesh)
    x = torch.randn(B, S // layout.tensor if layout.sequence_parallel else S, I).double().requires_grad_()
    with CollectiveRecorder(mesh) as forward:
        y = layer(x)
    with CollectiveRecorder(mesh) as backward:
        y.sum().backward()
    return [forward.sent, backward.sent]


def test_an_mlp_sends_an_all_reduce_each_way_or_a_gather_and_a_reduce_scatter(ranks: RankPool) -> None:
    reduce, gather, scatter = ((name, "tensor", B * S * I) for name in ("all_reduce", "all_gather", "reduce_scatter"))
    assert ranks.run(2, _sent_by_mlp, Layout(tensor=2))[0] == [[reduce], [reduce]]
    split = ranks.run(2, _sent_by_mlp, Layout(tensor=2, sequence_parallel=True))[0]
    assert split == [[gather, scatter], [gather, gather, scatter]]  # the second gather is of the input, kept split


class _Operators(TorchDispatchMode):
    """The names of the operators that run inside, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @classmethod
    def is_infra_mode(cls) -> bool:  # torch.compile would run plain code under any other mode
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().split("::")[1].split(".")[0])
        return func(*args, **(kwargs or {}))


def _backward_operators(layout: Layout) -> list[str]:
    mesh = make_mesh(layout, CPU)
    layer = make_column(mesh=mesh)
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
    started, waited = names.index(collective), _last(names, "wait_tensor")
    assert "mm" in names[:started]
    assert "mm" in names[started:waited]


def _last(names: list[str], name: str) -> int:
    return len(names) - 1 - names[::-1].index(name)


def test_the_split_input_travels_while_the_input_gradient_is_computed(ranks: RankPool) -> None:
    names = ranks.run(2, _backward_operators, Layout(tensor=2, sequence_parallel=True))[0]
    assert "mm" in names[names.index("all_gather_into_tensor") : names.index("wait_tensor")]


def _kept_by_column(layout: Layout) -> list[tuple[int, ...]]:
    """The shapes of what is kept for the backward pass."""
    mesh = make_mesh(layout, CPU)
    layer, kept = make_column(mesh=mesh), []
    x = part(torch.randn(B, S, I).double(), mesh, split_sequence(layout)).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tuple(tensor.shape)) or tensor, _same):
        layer(x)
    return kept


def _same(tensor: Tensor) -> Tensor:
    return tensor


def test_the_input_is_kept_split(ranks: RankPool) -> None:
    assert ranks.run(2, _kept_by_column, Layout(tensor=2, sequence_parallel=True))[0] == [(B, S // 2, I), (O // 2, I)]


def _sent_by_compiled_mlp(layout: Layout) -> list[list[str]]:
    mesh = make_mesh(layout, CPU)
    compiled = torch.compile(ParallelMLP(mesh), fullgraph=True, backend="aot_eager_decomp_partition")
    x = part(torch.randn(B, S, I).double(), mesh, split_sequence(layout)).requires_grad_()
    with CollectiveRecorder(mesh) as forward:
        y = compiled(x)
    with CollectiveRecorder(mesh) as backward:
        y.sum().backward()
    return [sorted(sent.operation for sent in recorder.sent) for recorder in (forward, backward)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
def test_a_compiler_gathers_the_input_again_in_the_backward_pass(ranks: RankPool) -> None:
    forward, backward = ranks.run(2, _sent_by_compiled_mlp, Layout(tensor=2, sequence_parallel=True))[0]
    assert forward == ["all_gather", "reduce_scatter"], "what was gathered in the forward pass would be kept"
    assert backward == ["all_gather", "all_gather", "reduce_scatter"]


def _run_in_pieces(layout: Layout, count: int, backend: str = "") -> tuple[list[Tensor], list[str], list[str]]:
    """Results and operators, forward and backward, of an MLP in so many pieces of the batch."""
    with mock.patch.object(fused, "num_pieces", lambda *_: count):
        mesh = make_mesh(layout, CPU)
        mlp = ParallelMLP(mesh)
        for i, parameter in enumerate(mlp.parameters()):
            fill(parameter, torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)).double())
        whole = torch.randn(B, S, I, generator=torch.Generator().manual_seed(9)).double()
        x = part(whole, mesh, split_sequence(layout)).requires_grad_()
        module = torch.compile(mlp, fullgraph=True, backend=backend) if backend else mlp
        with _Operators() as forward:
            y = module(x)
        with _Operators() as backward:
            y.square().sum().backward()
        results = [y.detach(), x.grad, *(p.grad.to_local() for p in mlp.parameters())]
    return results, forward.names, backward.names


def _products_and_messages(names: list[str]) -> list[str]:
    """Names of the matrix products (all as `mm`) and of the messages among the operators."""
    return ["mm" if "mm" in name else name for name in names if name in SENT or "mm" in name]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("", id="plain"),
        # compiles for ten seconds; whole layers are compiled by `tests/training/speed`
        pytest.param("aot_eager_decomp_partition", id="compiled", marks=pytest.mark.slow),
    ],
)
def test_pieces_give_the_same_and_travel_beside_products(ranks: RankPool, backend: str) -> None:
    layout = Layout(tensor=2, sequence_parallel=True)
    expected, *_ = ranks.run(2, _run_in_pieces, layout, 1)[0]
    results, forward, backward = ranks.run(2, _run_in_pieces, layout, 2, backend)[0]
    for one, other in zip(expected, results, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    assert _products_and_messages(forward) == FORWARD_IN_PIECES
    assert _products_and_messages(backward)[:8] == BACKWARD_IN_PIECES


def test_pieces_are_halves_that_are_worth_a_collective() -> None:
    assert num_pieces(2, 2 * OVERLAPPED_ELEMENTS) == 2
    assert num_pieces(3, 2 * OVERLAPPED_ELEMENTS) == num_pieces(2, 2 * OVERLAPPED_ELEMENTS - 1) == 1


def test_layers_take_a_single_row(ranks: RankPool) -> None:
    single, batched = ranks.run(2, _single_row, Layout(tensor=2))[0]
    for one, other in zip(single, batched, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def _single_row(layout: Layout) -> list[list[Tensor]]:
    """Output and gradients for an input [I], and for the same as [1, 1, I]."""
    found = []
    for shape in ((I,), (1, 1, I)):
        mlp = ParallelMLP(make_mesh(layout, CPU))
        for i, parameter in enumerate(mlp.parameters()):
            fill(parameter, torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)).double())
        x = torch.arange(I).double().reshape(shape).requires_grad_()
        y = mlp(x)
        y.square().sum().backward()
        found.append([y.detach().flatten(), x.grad.flatten(), *(p.grad.to_local() for p in mlp.parameters())])
    return found


def _too_flat(layout: Layout) -> list[str]:
    mesh, messages = make_mesh(layout, CPU), []
    for layer, size in ((make_column(mesh=mesh), I), (make_row(mesh=mesh), I // 2)):
        messages.append(refusal(LayoutError, layer, torch.randn(4, size).double()))
    return messages


def test_a_split_sequence_needs_a_dimension(ranks: RankPool) -> None:
    assert ranks.run(2, _too_flat, Layout(tensor=2, sequence_parallel=True))[0] == [
        "Under sequence parallelism, a tensor that enters or leaves a parallel region must have at least three "
        f"dimensions, [batch, sequence, ...], but has the shape [4, {size}]. Add the missing dimensions, or set "
        "layout.sequence_parallel=false."
        for size in (I, I // 2)
    ]


def _autocast(layout: Layout) -> tuple[torch.dtype, list[torch.dtype], float]:
    mlp = ParallelMLP(make_mesh(layout, CPU)).float()
    for parameter in mlp.parameters():
        fill(parameter, torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    x = torch.randn(B, S, I, generator=torch.Generator().manual_seed(2)).requires_grad_()
    exact = mlp(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mlp(x)
    y.float().sum().backward()
    return y.dtype, [t.grad.dtype for t in (x, *mlp.parameters())], ((y - exact).norm() / exact.norm()).item()


def test_autocast_multiplies_in_its_type_and_gives_gradients_in_the_parameters(ranks: RankPool) -> None:
    dtype, gradients, error = ranks.run(2, _autocast, Layout(tensor=2))[0]
    assert dtype == torch.bfloat16
    assert gradients == [torch.float32] * 5
    assert 0 < error < 0.02


def _frozen_and_first(layout: Layout) -> tuple[bool, bool, list[Any]]:
    """A layer whose weight needs no gradient, then one whose input needs none."""
    mesh = make_mesh(layout, CPU)
    frozen, first = make_column(mesh=mesh), make_column(mesh=mesh)
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
    make(mesh=make_mesh(layout, CPU))


@pytest.mark.parametrize(
    ("make", "dim", "shape"),
    [(partial(ColumnParallelLinear, I, 21), 0, r"\(21, 12\)"), (partial(RowParallelLinear, 7, O), 1, r"\(20, 7\)")],
    ids=["columns", "rows"],
)
def test_a_cut_that_does_not_divide_is_refused(ranks: RankPool, make: Any, dim: int, shape: str) -> None:
    message = (
        f"^The size of the tensor axis must divide dimension {dim} of a parameter of shape {shape}, but is 2. "
        "Choose a size that divides the dimension, or pad the dimension.$"
    )
    with pytest.raises(LayoutError, match=message):
        ranks.run(2, _indivisible, Layout(tensor=2), make)
