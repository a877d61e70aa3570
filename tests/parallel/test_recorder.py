"""The account of what is really sent."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from crosscut.config import Layout
from crosscut.parallel import CollectiveRecorder, Sent, collectives, make_mesh
from tests.parallel.twins import CPU
from tests.ranks import RankPool


def _send_all(layout: Layout) -> list[Sent]:
    mesh = make_mesh(layout, CPU)
    x = torch.ones(4, 6)
    with CollectiveRecorder(mesh) as recorder:
        collectives.all_reduce(x, mesh.tensor)
        collectives.all_gather(x, mesh.tensor, 1)
        collectives.reduce_scatter(x, mesh.tensor, 1)
        collectives.all_reduce(x[0], mesh.data, "max")
        collectives.split(x, mesh.tensor, 1)
    collectives.all_reduce(x, mesh.tensor)  # outside
    return recorder.sent


def test_every_collective_is_recorded_in_order_with_its_axis_and_whole_tensor(ranks: RankPool) -> None:
    over_tensor = [("all_reduce", "tensor", 24), ("all_gather", "tensor", 48), ("reduce_scatter", "tensor", 24)]
    sent = [*over_tensor, ("all_reduce", "data", 6)]
    assert ranks.run(4, _send_all, Layout(tensor=2, data=2)) == [sent] * 4


def _sizes_sent() -> list[int]:
    mesh = make_mesh(Layout(tensor=2), CPU)
    with CollectiveRecorder(mesh) as recorder:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            collectives.all_gather(torch.ones(2, dtype=dtype), mesh.tensor, 0)
    return recorder.element_bytes


def test_the_size_of_an_element_is_recorded(ranks: RankPool) -> None:
    assert ranks.run(2, _sizes_sent) == [[4, 2, 8]] * 2


def test_an_axis_of_one_rank_sends_nothing(ranks: RankPool) -> None:
    assert ranks.run(1, _send_all, Layout()) == [[]]
    assert {sent.axis for sent in ranks.run(2, _send_all, Layout(data=2))[0]} == {"data"}


def _send_inside_a_distributed_tensor() -> list[Sent]:
    mesh = make_mesh(Layout(tensor=2), CPU)
    whole, partial = (
        DTensor.from_local(torch.ones(6), mesh.tensor.device_mesh, [placement])
        for placement in (Replicate(), Partial())
    )
    with CollectiveRecorder(mesh) as recorder:
        whole.add_(partial)
    assert torch.equal(whole.to_local(), torch.full((6,), 3.0))
    return recorder.sent


def test_what_a_distributed_tensor_sends_by_itself_is_recorded_too(ranks: RankPool) -> None:
    assert ranks.run(2, _send_inside_a_distributed_tensor) == [[("all_reduce", "tensor", 6)]] * 2


def _send_by_torch_itself() -> list[Sent]:
    mesh = make_mesh(Layout(tensor=2), CPU)
    group, x = mesh.tensor.device_mesh.get_group(), torch.ones(6)
    with CollectiveRecorder(mesh) as recorder:
        dist.all_gather([torch.empty(6), torch.empty(6)], x, group=group)
        dist.all_to_all_single(torch.empty(6), x, group=group)
        dist.broadcast(x, group=group, group_src=0)
        collectives.all_gather_objects("no numbers", mesh.tensor)
    return recorder.sent


def test_messages_of_code_that_calls_torch_itself_are_recorded_but_not_objects(ranks: RankPool) -> None:
    sent = [("all_gather", "tensor", 12), ("all_to_all", "tensor", 6), ("broadcast", "tensor", 6)]
    assert ranks.run(2, _send_by_torch_itself) == [sent] * 2


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(tensor=2, data=2)], ids=str)
def test_recording_changes_no_result(ranks: RankPool, layout: Layout) -> None:
    for recorded, plain in ranks.run(layout.world_size, _with_and_without, layout):
        assert torch.equal(recorded, plain)


def _with_and_without(layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = make_mesh(layout, CPU)
    x = torch.arange(4.0) + mesh.tensor.rank
    with CollectiveRecorder(mesh):
        recorded = collectives.all_reduce(x, mesh.tensor)
    return recorded, collectives.all_reduce(x, mesh.tensor)
