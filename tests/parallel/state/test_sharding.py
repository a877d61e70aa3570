"""A model of one's own whose data ranks share one copy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from crosscut.config import Layout, LayoutError
from crosscut.parallel import (
    GradientReducer,
    LayerNorm,
    ParallelMesh,
    local,
    make_mesh,
    make_reducer,
    replicated_parameter,
    reshard,
    shard_model,
)
from crosscut.parallel.state import sharding
from tests.parallel.twins import CPU
from tests.ranks import RankPool
from tests.refusals import refusal

SHARED = Layout(data=2, sharding="zero3")


class Terms(nn.Module):
    """A sum of parameters [3], each used on the data ranks that `used_by` names."""

    def __init__(self, mesh: Any, used_by: list[set[int]]) -> None:
        super().__init__()
        self.mesh, self.used_by = mesh, used_by
        kind = {"dtype": torch.float64, "device": mesh.parameter_device}
        self.terms = nn.ParameterList(replicated_parameter((3,), mesh.tensor, **kind) for _ in used_by)

    def forward(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, requires_grad=True)
        for i, (parameter, users) in enumerate(zip(self.terms, self.used_by, strict=True)):
            if self.mesh.data.rank in users:
                total = total + (local(parameter, torch.float64) * (10 * i + self.mesh.data.rank + 1)).sum()
        return total * 1.0


def _use_some(used_by: list[set[int]]) -> list[Tensor]:
    mesh = make_mesh(SHARED, CPU)
    model = Terms(mesh, used_by)
    shard_model(model, mesh, units=[])
    reducer = make_reducer(model, mesh)
    reducer.arm()
    model().backward()
    reducer.finish()
    return [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="this torch scatters what all ranks use, only"
)
def test_parameters_that_some_ranks_do_not_use_are_summed_with_their_own(ranks: RankPool) -> None:
    used_by = [{0, 1}, {0}, {1}, set()]
    for gradients in ranks.run(2, _use_some, used_by):
        expected = [sum(10 * i + rank + 1 for rank in users) for i, users in enumerate(used_by)]
        assert [g.tolist() for g in gradients] == [[float(e)] * 3 for e in expected]


def _first_values() -> tuple[list[bool], list[list[float]]]:
    mesh = make_mesh(SHARED, CPU)
    norm = LayerNorm(3, mesh=mesh)
    on_meta = [p.is_meta for p in norm.parameters()]
    shard_model(norm, mesh, units=[], always_used=True)
    return on_meta, [p.full_tensor().tolist() for p in norm.parameters()]


def test_parameters_take_no_memory_before_they_are_shared_and_then_have_their_first_values(ranks: RankPool) -> None:
    assert ranks.run(2, _first_values) == [([True, True], [[1.0] * 3, [0.0] * 3])] * 2


def _forward_without_gradient() -> list[int]:
    mesh = make_mesh(SHARED, CPU)
    model = Terms(mesh, [{0, 1}])
    shard_model(model, mesh, units=[], always_used=True)
    sizes = []
    with torch.no_grad():
        model()
    sizes.append(next(model.parameters()).to_local().numel())
    reshard(model)
    sizes.append(next(model.parameters()).to_local().numel())
    return sizes


def test_what_a_forward_pass_without_gradient_gathered_is_given_back(ranks: RankPool) -> None:
    assert ranks.run(2, _forward_without_gradient) == [[3, 2], [3, 1]]


def _train_unshared() -> None:
    mesh = make_mesh(SHARED, CPU)
    make_reducer(Terms(mesh, [{0}]), mesh)


def _share_ordinary() -> None:
    mesh = make_mesh(SHARED, CPU)
    shard_model(nn.Linear(4, 4), mesh, units=[])


def _share_a_scalar() -> None:
    mesh = make_mesh(SHARED, CPU)
    model = nn.Module()
    model.scale = replicated_parameter((), mesh.tensor, dtype=torch.float64, device=mesh.parameter_device)
    shard_model(model, mesh, units=[])


def _reduce_shares_as_copies() -> None:
    GradientReducer([], make_mesh(SHARED, CPU))


class Masked(LayerNorm):
    """With a buffer beside its parameters."""

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        super().__init__(3, mesh=mesh)
        self.register_buffer("mask", torch.arange(3.0, device=device))


def _mask_after_sharding(device: str) -> list[float]:
    mesh = make_mesh(SHARED, CPU)
    model = Masked(mesh, torch.device(device))
    shard_model(model, mesh, units=[], always_used=True)
    mask: list[float] = model.mask.tolist()
    return mask


def test_buffers_stay_as_they_are(ranks: RankPool) -> None:
    assert ranks.run(2, _mask_after_sharding, "cpu") == [[0.0, 1.0, 2.0]] * 2


def test_a_buffer_without_values_is_refused(ranks: RankPool) -> None:
    assert refusal(LayoutError, ranks.run, 2, _mask_after_sharding, "meta") == (
        "The buffer `mask` must have values before the model is sharded, but is on `meta`. Create the buffer on the "
        "mesh's `device`."
    )


def _shard_with_an_older_torch() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "_SUMS_UNUSED", False)
        mesh = make_mesh(SHARED, CPU)
        shard_model(LayerNorm(3, mesh=mesh), mesh, units=[], always_used=True)
        shard_model(LayerNorm(3, mesh=mesh), mesh, units=[])


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (_train_unshared, "must be sharded before it is trained on a mesh with sharding, but is not"),
        (_share_ordinary, "must be a DTensor on the tensor axis, but a parameter of shape"),
        (_share_a_scalar, r"`scale` must have at least one .* is a scalar\. .* Give the parameter the shape \(1,\)"),
        (_reduce_shares_as_copies, "needs a mesh on which every data rank holds a whole copy of the model, but"),
        (_shard_with_an_older_torch, r"`always_used` must be true with PyTorch before 2\.12, but is false"),
    ],
)
def test_what_cannot_be_sharded_is_refused(ranks: RankPool, job: Callable[[], None], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ranks.run(2, job)
