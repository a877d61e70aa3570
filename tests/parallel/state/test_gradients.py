"""Gradients between the backward pass and the optimizer: sums over the axes, the norm, clipping."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.config import Layout, LayoutError
from crosscut.parallel import (
    CollectiveRecorder,
    ColumnParallelLinear,
    GradientReducer,
    LayerNorm,
    ParallelMesh,
    RowParallelLinear,
    clip_gradients_,
    global_gradient_norm,
    local,
    make_mesh,
    replicated_parameter,
)
from tests.parallel.twins import CLOSE, CPU, fill, part, reduce_gradients, split_sequence
from tests.ranks import RankPool

H, B, S = 8, 8, 4
LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(tensor=4),
    Layout(tensor=2, sequence_parallel=True),
    Layout(data=2),
    Layout(data=4),
    Layout(tensor=2, data=2),
    Layout(tensor=2, data=2, sequence_parallel=True),
]


class Stack(nn.Module):
    """Three residual MLPs: a norm, columns, rows each."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.norms = nn.ModuleList(LayerNorm(H, mesh=mesh, dtype=torch.float64) for _ in range(3))
        self.columns = nn.ModuleList(ColumnParallelLinear(H, 4 * H, mesh=mesh, dtype=torch.float64) for _ in range(3))
        self.rows = nn.ModuleList(RowParallelLinear(4 * H, H, mesh=mesh, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, column, row in zip(self.norms, self.columns, self.rows, strict=True):
            x = x + row(F.gelu(column(norm(x))))
        return x


def _stack(mesh: ParallelMesh) -> Stack:
    stack = Stack(mesh)
    for i, parameter in enumerate(stack.parameters()):
        fill(parameter, 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)).double())
    return stack


def _batch(mesh: ParallelMesh) -> Tensor:
    """This rank's share of one batch: sequences over the data axis, positions where the sequence is split."""
    x = torch.randn(B, S, H, generator=torch.Generator().manual_seed(99)).double()
    return part(x.chunk(mesh.data.size)[mesh.data.rank], mesh, split_sequence(mesh.layout))


def _full_gradients(stack: nn.Module) -> list[Tensor]:
    return [p.grad.full_tensor().clone() for p in stack.parameters()]


def _train_once(layout: Layout, bucket_bytes: int, num_micro_batches: int) -> dict[str, Any]:
    mesh = make_mesh(layout, CPU)
    stack = _stack(mesh)
    parameters = list(stack.parameters())
    reducer = GradientReducer(parameters, mesh, bucket_bytes=bucket_bytes)
    sent = []
    for i, x in enumerate(_batch(mesh).chunk(num_micro_batches)):
        if i == num_micro_batches - 1:
            reducer.arm()
        with CollectiveRecorder(mesh) as recorder:
            stack(x).square().sum().backward()
        sent.append(recorder.sent)
    with CollectiveRecorder(mesh) as recorder:
        reducer.finish()
    sent.append(recorder.sent)
    gradients = _full_gradients(stack)
    with CollectiveRecorder(mesh) as recorder:
        norm = global_gradient_norm(parameters)
    clip_gradients_(parameters, norm, 1.0)
    return {
        "gradients": gradients,
        "norm": norm,
        "sent for the norm": recorder.sent,
        "clipped": _full_gradients(stack),
        "sent": sent,
        "largest": max(p.to_local().nbytes for p in parameters),
    }


@pytest.fixture(scope="module")
def whole(ranks: RankPool) -> dict[str, Any]:
    """Results on one device, with which the results of all layouts are compared."""
    return ranks.run(1, _train_once, Layout(), 1, 1)[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("bucket_bytes", "num_micro_batches"), [(1, 1), (3000, 2)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_norm_and_clipping_are_those_of_one_device(
    ranks: RankPool, whole: dict[str, Any], layout: Layout, bucket_bytes: int, num_micro_batches: int
) -> None:
    norm = torch.nn.utils.get_total_norm(whole["gradients"])
    for result in ranks.run(layout.world_size, _train_once, layout, bucket_bytes, num_micro_batches):
        torch.testing.assert_close(result["gradients"], whole["gradients"], **CLOSE)
        torch.testing.assert_close(result["norm"], norm, **CLOSE)
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in whole["gradients"]]
    for parameter, gradient in zip(parameters, whole["gradients"], strict=True):
        parameter.grad = gradient.clone()
    assert norm > 2.0
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    torch.testing.assert_close(result["clipped"], [p.grad for p in parameters], **CLOSE)


def test_only_the_armed_backward_pass_sends_over_the_data_axis(ranks: RankPool) -> None:
    result = ranks.run(2, _train_once, Layout(data=2), 1 << 30, 2)[0]
    first, second, finish = result["sent"]
    assert first == []
    assert [sent.axis for sent in second] == ["data"]
    assert finish == []


def test_buckets_are_sent_while_the_backward_pass_goes_on(ranks: RankPool) -> None:
    backward, finish = ranks.run(4, _train_once, Layout(tensor=2, data=2), 1, 1)[0]["sent"]
    axes = [sent.axis for sent in backward][3:]  # without the forward pass
    assert axes.count("tensor") == 3
    assert axes.count("data") == 18  # each parameter is a bucket
    assert axes.index("data") < len(axes) - 1 - axes[::-1].index("tensor"), "nothing was overlapped"
    assert finish == []


def test_a_bucket_is_filled_to_its_size(ranks: RankPool) -> None:
    result = ranks.run(2, _train_once, Layout(data=2), 3000, 1)[0]
    buckets = [sent.elements * 8 for sent in result["sent"][0]]
    assert sum(buckets) == sum(g.nbytes for g in result["gradients"])
    assert all(3000 <= size < 3000 + result["largest"] for size in buckets[:-1])
    assert 1 < len(buckets) < 18


def _held_while_sent(bucket_bytes: int) -> list[bool]:
    """Which gradients are still their parameters' own when the backward pass is done."""
    mesh = make_mesh(Layout(data=2), CPU)
    stack = _stack(mesh)
    reducer = GradientReducer(stack.parameters(), mesh, bucket_bytes=bucket_bytes)
    reducer.arm()
    stack(_batch(mesh)).sum().backward()
    held = [parameter.grad is not None for parameter in stack.parameters()]
    reducer.finish()
    assert all(parameter.grad is not None for parameter in stack.parameters())
    return held


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_gradients_that_are_sent_are_not_held_twice(ranks: RankPool, bucket_bytes: int) -> None:
    assert not any(any(held) for held in ranks.run(2, _held_while_sent, bucket_bytes))


def test_partial_gradients_are_summed_in_one_message(ranks: RankPool) -> None:
    backward, finish = ranks.run(2, _train_once, Layout(tensor=2, sequence_parallel=True), 1, 1)[0]["sent"]
    assert all(sent.operation != "all_reduce" for sent in backward)
    assert finish == [("all_reduce", "tensor", 3 * 3 * H)]  # of each MLP two vectors of the norm, one bias


def test_the_norm_sends_one_element(ranks: RankPool) -> None:
    result = ranks.run(4, _train_once, Layout(tensor=2, data=2), 1, 1)[0]
    assert result["sent for the norm"] == [("all_reduce", "tensor", 1)]


def _use_some(layout: Layout, used_by: list[set[int]]) -> list[Tensor | None]:
    """Parameter i is used on the data ranks that are in `used_by[i]`; each adds the rank's own number."""
    mesh = make_mesh(layout, CPU)
    parameters = [replicated_parameter((3,), mesh.tensor, dtype=torch.float64, device=CPU) for _ in used_by]
    reducer = GradientReducer(parameters, mesh, bucket_bytes=1)
    reducer.arm()
    total = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for i, (parameter, users) in enumerate(zip(parameters, used_by, strict=True)):
        if mesh.data.rank in users:
            total = total + (local(parameter, torch.float64) * (10 * i + mesh.data.rank + 1)).sum()
    total.backward()
    reducer.finish()
    return [None if p.grad is None else p.grad.full_tensor() for p in parameters]


def test_parameters_that_some_ranks_do_not_use_are_summed_with_their_own(ranks: RankPool) -> None:
    used_by = [{0, 1}, {0}, {1}, {0, 1}, set()]
    for gradients in ranks.run(2, _use_some, Layout(data=2), used_by):
        expected = [sum(10 * i + rank + 1 for rank in users) for i, users in enumerate(used_by)]
        assert [g[0].item() for g in gradients] == expected


def test_an_unused_parameter_has_a_gradient_of_zeros_on_any_number_of_data_ranks(ranks: RankPool) -> None:
    """An optimizer passes over what has no gradient, and decays what has one of zeros."""
    for data in (1, 2):
        for (gradient,) in ranks.run(data, _use_some, Layout(data=data), [set()]):
            assert not gradient.any()


def _two_precisions() -> list[torch.dtype]:
    mesh = make_mesh(Layout(tensor=2, sequence_parallel=True), CPU)
    norms = nn.ModuleList(LayerNorm(H, mesh=mesh, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    reduce_gradients(lambda: sum(norm(torch.randn(2, S // 2, H)).sum() for norm in norms), norms.parameters(), mesh)
    return [norm.weight.grad.dtype for norm in norms]


def test_partial_gradients_of_two_precisions_keep_them(ranks: RankPool) -> None:
    assert ranks.run(2, _two_precisions)[0] == [torch.float32, torch.bfloat16]


def _frozen() -> list[bool]:
    mesh = make_mesh(Layout(data=2), CPU)
    stack = _stack(mesh)
    stack.columns.requires_grad_(False)
    reduce_gradients(lambda: stack(_batch(mesh)).sum(), stack.parameters(), mesh)
    return [p.grad is None for p in stack.columns.parameters()]


def test_frozen_parameters_are_left_alone(ranks: RankPool) -> None:
    assert ranks.run(2, _frozen)[0] == [True] * 6


def _backward_twice() -> None:
    mesh = make_mesh(Layout(data=2), CPU)
    stack = _stack(mesh)
    reducer = GradientReducer(stack.parameters(), mesh)
    reducer.arm()
    for _ in range(2):
        stack(_batch(mesh)).sum().backward()


def _ordinary() -> None:
    GradientReducer(nn.Linear(3, 2).parameters(), make_mesh(Layout(), CPU))


class Switch(nn.Module):
    """A layer norm that only the first data rank uses."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.norm, self.row = LayerNorm(H, mesh=mesh), RowParallelLinear(H, H, mesh=mesh)
        self.use = mesh.data.rank == 0

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(x) if self.use else x).square().sum() + self.row(torch.ones(2, S, H // 2)).sum()


def _switch() -> None:
    mesh = make_mesh(Layout(tensor=2, data=2, sequence_parallel=True), CPU)
    switch = Switch(mesh)
    reduce_gradients(lambda: switch(torch.randn(2, S // 2, H)), switch.parameters(), mesh)


TWICE = (
    r"^`GradientReducer.arm` must be followed by one backward pass and `finish`, but a second backward pass has begun "
    r"after gradients were sent. Call `arm` only before the last backward pass of a step.$"
)
ORDINARY = (
    r"^Every parameter must be a DTensor on the tensor axis, but a parameter of shape \(2, 3\) is an ordinary tensor. "
    r"Create the parameter with `replicated_parameter` or `sharded_parameter`.$"
)
ON_SOME = (
    "^Under sequence parallelism, a replicated parameter must be used on all data ranks or on no data rank, but a "
    r"parameter of shape \(8,\) was used on some data ranks only. Use the parameter on every rank, if necessary "
    r"multiplied by zero.$"
)


@pytest.mark.parametrize(
    ("job", "num_ranks", "error", "message"),
    [
        (_backward_twice, 2, RuntimeError, TWICE),
        (_ordinary, 1, LayoutError, ORDINARY),
        (_switch, 4, RuntimeError, ON_SOME),
    ],
)
def test_what_cannot_be_summed_is_refused(
    ranks: RankPool, job: Callable[[], None], num_ranks: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ranks.run(num_ranks, job)


def _accumulate_after_finish(layout: Layout) -> list[Tensor]:
    """A step whose gradients are zeroed in place, not dropped, before the next."""
    mesh = make_mesh(layout, CPU)
    stack = _stack(mesh)
    reducer = GradientReducer(stack.parameters(), mesh)
    for _ in range(2):
        for parameter in stack.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        reducer.arm()
        stack(_batch(mesh)).square().sum().backward()
        reducer.finish()
    return _full_gradients(stack)


def test_gradients_that_are_zeroed_in_place_are_summed_again(ranks: RankPool, whole: dict[str, Any]) -> None:
    for gradients in ranks.run(4, _accumulate_after_finish, LAYOUTS[-1]):
        torch.testing.assert_close(gradients, whole["gradients"], **CLOSE)
