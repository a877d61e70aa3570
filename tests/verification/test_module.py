"""Models of one's own: right ones that must pass, whatever they are made of, and faults that must be named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.config import ConfigError, Layout
from crosscut.parallel import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelMesh,
    RowParallelLinear,
    copy_to_tensor_parallel,
    disturb_,
    enter_tensor_parallel,
    make_mesh,
    normal_,
    reduce_from_tensor_parallel,
    replicated_parameter,
    shard_model,
    sharded_parameter,
)
from crosscut.parallel.state.parameters import local
from crosscut.verification import LayoutReport, verify_module
from tests.ranks import RankPool
from tests.verification.runs import CPU

WIDE: Any = {"dtype": torch.float64, "device": CPU}


def fill(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        (normal_ if parameter.dim() > 1 else disturb_)(parameter, std=0.3, seed=1, name=name)


class Cut(nn.Module):
    """A part of a weight's columns, inside a region that somebody else has entered."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.weight = sharded_parameter((16, 8), mesh.tensor, dim=0, **WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight, x.dtype))


class SharedEntry(nn.Module):
    """SwiGLU: one f before two modules, whose input gradients are parts of a sum."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm = LayerNorm(8, mesh=mesh, dtype=torch.float64)
        self.gate, self.up = Cut(mesh), Cut(mesh)
        self.contract = RowParallelLinear(16, 8, mesh=mesh, dtype=torch.float64)
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        h = enter_tensor_parallel(self.norm(x), self.mesh)
        return self.contract(F.silu(self.gate(h)) * self.up(h))


class MaskedHeads(nn.Module):
    """Attention written by hand: infinities in a softmax, batch and heads in one dimension, a module of bools."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        place: Any = {"mesh": mesh, "dtype": torch.float64}
        self.qkv = ColumnParallelLinear(8, 24, **place)  # four heads of two
        self.output = RowParallelLinear(8, 8, **place)
        self.softmax, self.later = nn.Softmax(-1), Later()
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, 2)).transpose(1, 2).flatten(0, 1).unbind(-2)
        scores = (q @ k.transpose(1, 2)).masked_fill(self.later(x), -torch.inf)
        heads = (self.softmax(scores) @ v).unflatten(0, (x.shape[0], -1)).transpose(1, 2).flatten(2)
        y: Tensor = self.output(heads)
        return y


class Later(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)


class Scaled(nn.Module):
    """A scalar that every rank holds, used on parts; a state that training moves; parameters of the root's own."""

    def __init__(self, mesh: ParallelMesh, *, summed: bool = True) -> None:
        super().__init__()
        self.mesh, self.summed = mesh, summed
        self.temperature = replicated_parameter((), mesh.tensor, value=1.5, **WIDE)
        self.inner = Cut(mesh)
        self.running = nn.BatchNorm1d(3, affine=False, dtype=torch.float64)
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.inner(copy_to_tensor_parallel(self.running(x), self.mesh.tensor)))
        scale = local(self.temperature, h.dtype)
        if self.summed:
            scale = copy_to_tensor_parallel(scale, self.mesh.tensor)
        return reduce_from_tensor_parallel((h * scale).square().sum(-1), self.mesh.tensor)


class GivesLoss(SharedEntry):
    """A model whose call returns this data rank's part of the loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().sum() / 96


def loss(model: nn.Module, mesh: ParallelMesh) -> Tensor:
    x = torch.randn(4, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y: Tensor = model(x.chunk(mesh.data.size)[mesh.data.rank])
    return y if y.dim() == 0 else y.square().sum() / 96


def _verify(kind: Callable[..., nn.Module], layout: Layout) -> LayoutReport:
    return verify_module(kind, loss, make_mesh(layout, CPU))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", [SharedEntry, MaskedHeads, GivesLoss], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(data=2), Layout(tensor=2, data=2)], ids=str)
def test_right_model_passes_whatever_it_is_made_of(ranks: RankPool, kind, layout: Layout) -> None:
    report = ranks.run(layout.world_size, _verify, kind, layout)[0]
    assert report.same, (report.first, [row for row in report.rows if not row.same])


class Shared(nn.Module):
    """Two layers and a norm, which data ranks may share."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        wide: Any = {"mesh": mesh, "dtype": torch.float64}
        pairs = [(ColumnParallelLinear(8, 16, **wide), RowParallelLinear(16, 8, **wide)) for _ in range(2)]
        self.layers = nn.ModuleList(nn.Sequential(first, nn.GELU(), second) for first, second in pairs)
        self.norm = LayerNorm(8, **wide)
        shard_model(self, mesh, units=self.layers, always_used=True)
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        y: Tensor = self.norm(x)
        return y


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2, sharding="zero3"),
        pytest.param(Layout(tensor=2, data=2, sharding="zero3"), marks=pytest.mark.slow),  # four ranks
        pytest.param(Layout(tensor=2, data=2, sharding="zero2"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_own_model_that_data_ranks_share_passes(ranks: RankPool, layout: Layout) -> None:
    report = ranks.run(layout.world_size, _verify, Shared, layout)[0]
    assert report.same, (report.first, [row for row in report.rows if not row.same])
    assert report.layout == str(layout)


def test_scalar_parameter_and_a_state_that_training_moves_pass(ranks: RankPool) -> None:
    report = ranks.run(2, _verify, Scaled, Layout(tensor=2))[0]
    assert report.same, report.first


def _unsummed(mesh: ParallelMesh) -> nn.Module:
    return Scaled(mesh, summed=False)


def test_scalar_whose_gradient_is_not_summed_is_named_with_the_root_that_holds_it(ranks: RankPool) -> None:
    first, other = ranks.run(2, _verify, _unsummed, Layout(tensor=2))
    assert first == other
    assert first.first.module == "Scaled"
    assert "part of a sum" in first.first.cause


def _loss_of_one_rank(layout: Layout) -> LayoutReport:
    def uneven(model: nn.Module, mesh: ParallelMesh) -> Tensor:
        value = loss(model, mesh)
        return value + value.detach() * mesh.tensor.rank  # the same gradient, another number

    return verify_module(SharedEntry, uneven, make_mesh(layout, CPU))


def test_loss_that_only_the_first_rank_has_right_is_a_difference(ranks: RankPool) -> None:
    report = ranks.run(2, _loss_of_one_rank, Layout(tensor=2))[0]
    assert report.first.module == "loss"


def _failing(mesh: ParallelMesh) -> str:
    try:
        verify_module(lambda on: nn.Identity(), loss, mesh)
    except ConfigError as error:
        return str(error)
    return ""


def _no_parameters() -> str:
    return _failing(make_mesh(Layout(), CPU))


def test_model_without_parameters_is_refused(ranks: RankPool) -> None:
    assert ranks.run(1, _no_parameters) == ["A model to verify must have parameters, but this model has none."]


def _uncut_loss_fails(layout: Layout) -> str:
    def failing(model: nn.Module, mesh: ParallelMesh) -> Tensor:
        if mesh.tensor.size == 1:
            raise ValueError("the uncut model has no loss")
        return loss(model, mesh)

    try:
        verify_module(SharedEntry, failing, make_mesh(layout, CPU))
    except ValueError as error:
        return str(error)
    return ""


def test_an_error_of_the_uncut_step_reaches_all_ranks(ranks: RankPool) -> None:
    """The other ranks would wait for the first rank in the step of the cut model."""
    assert ranks.run(2, _uncut_loss_fails, Layout(tensor=2)) == ["the uncut model has no loss"] * 2
