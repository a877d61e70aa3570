"""The arrangement of ranks."""

import pytest
import torch
import torch.distributed as dist

from crosscut.config import Layout, LayoutError, ZeroStage
from crosscut.parallel import Axis, CollectiveRecorder, make_mesh, make_repeated_mesh
from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.pretended import pretended_ranks
from tests.parallel.twins import CPU
from tests.ranks import RankPool


def _members(axis: Axis) -> list[int]:
    gathered = [torch.zeros(1) for _ in range(axis.size)]
    dist.all_gather(gathered, torch.tensor([float(dist.get_rank())]), group=axis.device_mesh.get_group())
    return [int(rank) for rank in gathered]


def _arrangement(layout: Layout) -> dict[str, object]:
    mesh = make_mesh(layout, CPU)
    return {
        "tensor": (mesh.tensor.rank, _members(mesh.tensor)),
        "data": (mesh.data.rank, _members(mesh.data)),
        "first": mesh.is_first_rank,
        "sequence_parallel": mesh.sequence_parallel,
    }


def test_tensor_groups_are_adjacent_and_data_groups_stride_across_them(ranks: RankPool) -> None:
    arrangements = ranks.run(4, _arrangement, Layout(tensor=2, data=2))
    assert [a["tensor"] for a in arrangements] == [(0, [0, 1]), (1, [0, 1]), (0, [2, 3]), (1, [2, 3])]
    assert [a["data"] for a in arrangements] == [(0, [0, 2]), (0, [1, 3]), (1, [0, 2]), (1, [1, 3])]
    assert [a["first"] for a in arrangements] == [True, False, False, False], "one rank prints and writes"


def test_one_tensor_rank_has_no_sequence_to_split(ranks: RankPool) -> None:
    assert not ranks.run(1, _arrangement, Layout(sequence_parallel=True))[0]["sequence_parallel"]
    assert ranks.run(2, _arrangement, Layout(tensor=2, sequence_parallel=True))[0]["sequence_parallel"]


def test_a_layout_of_another_size_than_the_run_is_refused(ranks: RankPool) -> None:
    message = (
        r"^`layout.tensor` x `layout.data` must be the number of processes \(2\), but is 2 x 2 = 4. Change the "
        "number of processes to 4, or change the layout.$"
    )
    with pytest.raises(LayoutError, match=message):
        ranks.run(2, _arrangement, Layout(tensor=2, data=2))


def _repeated_arrangement(layout: Layout) -> dict[str, object]:
    mesh = make_repeated_mesh(layout, CPU)
    return {"tensor": _members(mesh.tensor), "data": _members(mesh.data), "first": mesh.is_first_rank}


@pytest.mark.parametrize(
    ("layout", "tensor", "data"),
    [
        (Layout(tensor=2), [[0, 1], [0, 1], [2, 3], [2, 3]], [[0], [1], [2], [3]]),
        (Layout(data=2, sharding="zero3"), [[0], [1], [2], [3]], [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (Layout(tensor=2, data=2), [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]),
    ],
)
def test_a_smaller_layout_is_repeated_over_all_ranks(
    ranks: RankPool, layout: Layout, tensor: list[list[int]], data: list[list[int]]
) -> None:
    arrangements = ranks.run(4, _repeated_arrangement, layout)
    assert [a["tensor"] for a in arrangements] == tensor
    assert [a["data"] for a in arrangements] == data
    assert [a["first"] for a in arrangements] == [rank % layout.world_size == 0 for rank in range(4)]


def test_a_layout_that_does_not_divide_the_ranks_is_not_repeated(ranks: RankPool) -> None:
    with pytest.raises(LayoutError, match="must be the number of processes"):
        ranks.run(4, _repeated_arrangement, Layout(tensor=3))


@pytest.mark.parametrize(
    ("chosen", "num_groups"),
    [
        (Layout(tensor=2, data=2), 2),
        (Layout(tensor=2, data=2, sharding="zero3"), 2),
        (Layout(tensor=2, data=4, sharding="zero3", shard_group=2), 4),  # one more for both data axes together
    ],
    ids=str,
)
def test_an_axis_of_one_rank_has_no_process_group(chosen: Layout, num_groups: int) -> None:
    with pretended_ranks(chosen.world_size, 0):
        make_mesh(chosen, CPU)
        groups = dist.distributed_c10d._world.pg_names
        assert len(groups) == 1 + num_groups  # all ranks are a group


def test_context_ranks_are_between_data_and_tensor_ranks() -> None:
    chosen = Layout(tensor=2, context=2, data=4)
    for rank in (0, 2, 5):
        with pretended_ranks(chosen.world_size, rank):
            mesh = make_mesh(chosen, CPU)
            assert [axis.name for axis in mesh.axes] == ["data", "context", "tensor"]
            assert mesh.is_first_rank == (rank == 0)
            assert mesh.tokens.device_mesh.mesh.tolist() == list(range(rank % 2, 16, 2))
            assert mesh.copies is mesh.tokens
            first = rank // 4 * 4 + rank % 2
            assert mesh.context.device_mesh.mesh.tolist() == [first, first + 2]


@pytest.mark.parametrize("data", [1, 2])
def test_data_and_context_ranks_share_one_copy_of_a_sharded_model(data: int) -> None:
    chosen = Layout(tensor=2, context=2, data=data, sharding=ZeroStage.ZERO3)
    with pretended_ranks(chosen.world_size, 3):
        mesh = make_mesh(chosen, CPU)
        assert mesh.sharding.shard.device_mesh.mesh.tolist() == list(range(1, chosen.world_size, 2))
        assert mesh.copies is None


@pytest.mark.parametrize(
    "chosen",
    [
        Layout(tensor=2, data=4),
        Layout(tensor=2, data=4, sharding=ZeroStage.ZERO2, shard_group=2),
        Layout(pipeline=2, tensor=2, context=2, data=2),
        Layout(pipeline=2, tensor=2, context=2, data=2, sharding=ZeroStage.ZERO3),
        Layout(context=2, tensor=2, sharding=ZeroStage.ZERO3),
    ],
    ids=str,
)
def test_groups_of_the_mesh_are_the_lines_of_the_plan(chosen: Layout) -> None:
    plan, rank = chosen.ranks, chosen.world_size - 1
    with pretended_ranks(chosen.world_size, rank):
        mesh = make_mesh(chosen, CPU)
        sharding = mesh.sharding and mesh.sharding.shard
        made = {
            "tokens": (mesh.tokens, plan.tokens),
            "batch": (mesh.data, plan.batch),
            "cuts": (mesh.tensor, plan.cuts),
            "owners": (mesh.pipeline, plan.owners),
            "copies": (mesh.copies, plan.copies),
            "slices": (sharding, plan.slices),
        }
        for axis, line in made.values():
            assert (1 if axis is None else axis.size) == line.size
            if axis is not None and line.size > 1:
                assert (axis.name, rank - axis.device_mesh.mesh.tolist()[-2]) == (line.name, line.stride)
        assert mesh.reader == (mesh.data.rank, chosen.data)


@pytest.mark.parametrize(
    "chosen",
    [
        Layout(pipeline=2, tensor=2, context=2, data=2, expert=4),
        Layout(tensor=2, data=4, expert=2, sharding=ZeroStage.ZERO3),
        Layout(tensor=2, data=8, expert=2, sharding=ZeroStage.ZERO2, shard_group=4),
        Layout(tensor=2, data=4, expert=2, sharding=ZeroStage.ZERO2, shard_group=2),
    ],
    ids=str,
)
def test_experts_have_a_second_mesh_of_the_same_ranks(chosen: Layout) -> None:
    plan, rank = chosen.expert_ranks, chosen.world_size - 1
    with pretended_ranks(chosen.world_size, rank):
        mesh = make_mesh(chosen, CPU)
        sharding = mesh.experts.sharding and mesh.experts.sharding.shard
        made = {
            "expert": (mesh.expert, plan.line("expert")),
            "tokens": (mesh.experts.tokens, plan.tokens),
            "copies": (mesh.experts.copies, plan.copies),
            "slices": (sharding, plan.slices),
        }
        for axis, line in made.values():
            assert (1 if axis is None else axis.size) == line.size
            if axis is not None and line.size > 1:
                assert (axis.name, rank - axis.device_mesh.mesh.tolist()[-2]) == (line.name, line.stride)
        assert mesh.experts.cuts.mesh_dim_names == ("expert", "tensor")
        assert mesh.plans == (mesh.dense, mesh.experts)


def test_axes_of_the_same_ranks_have_groups_of_their_own_names() -> None:
    chosen = Layout(data=4, expert=4)
    with pretended_ranks(4, 1):
        for _ in range(2):  # a second mesh of the same process finds the name again
            mesh = make_mesh(chosen, CPU)
            assert mesh.data.device_mesh.mesh.tolist() == mesh.expert.device_mesh.mesh.tolist() == [0, 1, 2, 3]
            assert mesh.data.group_name != mesh.expert.group_name
            with CollectiveRecorder(mesh) as recorder:
                for axis in (mesh.data, mesh.expert):
                    all_reduce(torch.ones(3), axis)
            assert [sent.axis for sent in recorder.sent] == ["data", "expert"]


def test_one_expert_rank_needs_no_second_mesh() -> None:
    with pretended_ranks(4, 1):
        mesh = make_mesh(Layout(tensor=2, data=2), CPU)
        assert mesh.experts is mesh.dense
        assert (mesh.expert.size, mesh.pipeline.size) == (1, 1)


@pytest.mark.parametrize(("rank", "expected"), [(0, False), (3, False), (4, True), (5, True)])
def test_the_last_stage_computes_the_loss(rank: int, expected: bool) -> None:
    with pretended_ranks(6, rank):
        assert make_mesh(Layout(pipeline=3, tensor=2), CPU).has_loss == expected


def test_an_axis_of_one_rank_that_is_no_axis_of_the_mesh_sends_nothing() -> None:
    with pretended_ranks(2, 0):
        context = make_mesh(Layout(tensor=2), CPU).context
        assert (context.name, context.rank, context.size) == ("context", 0, 1)
