"""Products in pieces: wired as their plain kin, through PyTorch's own stand-ins where there is no GPU."""

import pytest
import torch
from torch import Tensor

from crosscut.config import Layout, LayoutError
from crosscut.parallel import (
    CollectiveRecorder,
    ColumnParallelLinear,
    RowParallelLinear,
    Sent,
    make_mesh,
    normal_,
    require_symmetric_memory,
)
from tests.parallel.stand_ins import products_in_pieces
from tests.ranks import RankPool

CPU = torch.device("cpu")
B, S, H, INNER = 2, 8, 12, 20


def _mlp(layout: Layout, compiled: bool) -> tuple[list[Tensor], list[Sent]]:
    """Output and gradients of a column- and a row-parallel layer, and what they sent."""
    mesh = make_mesh(layout, CPU)
    first = ColumnParallelLinear(H, INNER, mesh=mesh, dtype=torch.float64)
    second = RowParallelLinear(INNER, H, mesh=mesh, dtype=torch.float64)
    model = torch.nn.Sequential(first, torch.nn.GELU(), second)
    for name, parameter in model.named_parameters():
        normal_(parameter, std=0.5, seed=1, name=name)
    whole = torch.randn(B, S, H, generator=torch.Generator().manual_seed(0)).double()
    x = whole.chunk(mesh.tensor.size, 1)[mesh.tensor.rank].clone().requires_grad_()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    with products_in_pieces(), CollectiveRecorder(mesh) as recorder:
        y = run(x)
        y.square().sum().backward()
    gradients = [p.grad.to_local() for p in model.parameters()]
    return [y.detach(), x.grad, *gradients], recorder.sent


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "compiled",
    [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=pytest.mark.slow)],  # compiles
)
def test_products_in_pieces_give_and_send_what_plain_ones_do(ranks: RankPool, compiled: bool) -> None:
    plain = ranks.run(2, _mlp, Layout(tensor=2, sequence_parallel=True), False)
    pieces = ranks.run(2, _mlp, Layout(tensor=2, sequence_parallel=True, symmetric_memory=True), compiled)
    for (expected, sent), (actual, sent_in_pieces) in zip(plain, pieces, strict=True):
        assert sorted(sent_in_pieces) == sorted(sent)
        assert len(sent) == 5
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_symmetric_memory_is_refused_on_the_cpu() -> None:
    with pytest.raises(LayoutError) as error:
        require_symmetric_memory(Layout(tensor=2, sequence_parallel=True, symmetric_memory=True), CPU)
    assert str(error.value) == (
        "`layout.symmetric_memory` must be false here, but is true. Symmetric memory needs GPUs, but the run is on "
        "the CPU. Set layout.symmetric_memory=false. Messages then still overlap with matrix products, but in "
        "larger pieces."
    )
    require_symmetric_memory(Layout(tensor=2, sequence_parallel=True), CPU)


@pytest.mark.parametrize(
    ("environment", "refused"),
    [
        ({}, True),  # what starts all ranks asks for all of them
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}, False),
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}, True),
    ],
)
def test_gpus_that_cannot_reach_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], refused: bool
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} != {2, 3})
    layout = Layout(tensor=2, data=2, sequence_parallel=True, symmetric_memory=True)
    if refused:
        with pytest.raises(LayoutError, match=r"GPU [23] cannot access the memory of GPU [23]\. This needs NVLink or"):
            require_symmetric_memory(layout, torch.device("cuda"))
    else:
        require_symmetric_memory(layout, torch.device("cuda"))
