"""The table of axes, and what layouts read in it."""

import dataclasses
import json
from typing import Any

import pytest

from crosscut.config import (
    Layout,
    LayoutError,
    ModelConfig,
    RunConfig,
    ZeroStage,
    dump_toml,
    load_layout,
    load_run,
)
from crosscut.config.axes import AXES, OPTIONS, AxisRole, arrangements, role_of
from crosscut.config.layouts.limits import require_expert_axis
from tests.refusals import refusal

Axes = tuple[str, ...]


def mesh_axes_of(chosen: Layout) -> tuple[Axes, Axes, Axes]:
    """Axes of the mesh along which tokens, copies and slices differ."""
    return chosen.ranks.tokens.axes, chosen.ranks.copies.axes, chosen.ranks.slices.axes


def test_rows_follow_the_design() -> None:
    assert [(row.name, row.option, row.role) for row in AXES] == [
        ("pipeline", "pipeline", AxisRole.OWNS),
        ("replica", "data", AxisRole.TOKENS),
        ("shard", "data", AxisRole.TOKENS),
        ("context", "context", AxisRole.TOKENS),
        ("expert_replica", "expert_data", AxisRole.TOKENS),
        ("expert_shard", "expert_data", AxisRole.TOKENS),
        ("expert", "expert", AxisRole.OWNS),
        ("tensor", "tensor", AxisRole.CUTS),
    ]


def test_a_role_is_found_by_the_name_of_an_axis_and_of_its_field() -> None:
    assert role_of("replica") is role_of("shard") is role_of("data") is AxisRole.TOKENS
    assert role_of("tensor") is AxisRole.CUTS


def test_every_axis_has_its_size_in_a_layout() -> None:
    assert set(OPTIONS) <= {field.name for field in dataclasses.fields(Layout)}
    assert all(getattr(Layout(), option) == 1 for option in OPTIONS)


@pytest.mark.parametrize(
    ("chosen", "mesh", "tokens", "copies", "slices"),
    [
        (Layout(), {"data": 1, "tensor": 1}, (), (), ()),
        (Layout(tensor=2, data=2), {"data": 2, "tensor": 2}, ("data",), ("data",), ()),
        (Layout(tensor=2, data=2, sharding="zero3"), {"data": 2, "tensor": 2}, ("data",), (), ("data",)),
        (
            Layout(tensor=2, data=4, sharding="zero2", shard_group=2),
            {"replica": 2, "shard": 2, "tensor": 2},
            ("replica", "shard"),
            ("replica",),
            ("shard",),
        ),
        (Layout(data=4, sharding="zero2", shard_group=1), {"data": 4, "tensor": 1}, ("data",), ("data",), ()),
    ],
    ids=str,
)
def test_sets_of_ranks_follow_from_the_roles(
    chosen: Layout, mesh: dict[str, int], tokens: tuple[str, ...], copies: tuple[str, ...], slices: tuple[str, ...]
) -> None:
    assert list(chosen.ranks.mesh_axes.items()) == list(mesh.items())
    assert mesh_axes_of(chosen) == (tokens, copies, slices)


def test_a_folded_axis_takes_its_place_in_meshes_and_descriptions() -> None:
    chosen = Layout(tensor=2, data=4, context=2, expert=4)
    assert str(chosen) == "tensor 2 x context 2 x data 4, expert 4"
    assert chosen.world_size == 2 * 2 * 4
    assert list(chosen.ranks.mesh_axes) == ["data", "context", "tensor"]
    assert mesh_axes_of(chosen) == (("data", "context"), ("data", "context"), ())


@pytest.mark.parametrize(("data", "slices"), [(1, ("context",)), (4, ("data", "context"))])
def test_data_and_context_ranks_together_share_one_copy(data: int, slices: tuple[str, ...]) -> None:
    chosen = Layout(tensor=2, data=data, context=2, sharding=ZeroStage.ZERO3)
    assert mesh_axes_of(chosen) == (slices, (), slices)
    assert (chosen.shard_size, chosen.num_replicas) == (2 * data, 1)
    assert str(chosen) == f"tensor 2 x context 2 x data {data}, zero3"


def test_tensor_ranks_are_adjacent_then_ranks_that_share_a_copy() -> None:
    chosen = Layout(tensor=2, data=4, sharding="zero3", shard_group=2)
    assert chosen.place_of(5) == {"pipeline": 0, "replica": 1, "shard": 0, "context": 0, "tensor": 1}
    places = [tuple(chosen.place_of(rank).values()) for rank in range(chosen.world_size)]
    assert places == sorted(set(places))


def test_a_stage_of_zero_equals_its_string_everywhere() -> None:
    chosen = Layout(data=2, sharding="zero2")  # type: ignore[arg-type]
    assert chosen.sharding is ZeroStage.ZERO2
    assert chosen.sharding == "zero2"
    assert chosen == Layout(data=2, sharding=ZeroStage.ZERO2) == load_layout("data=2,sharding=zero2")
    assert f"{chosen.sharding}" == "zero2"
    assert json.dumps(dataclasses.asdict(chosen)["sharding"]) == '"zero2"'


def test_a_stage_of_zero_survives_toml() -> None:
    run = load_run({"model": {"preset": "gpt2-small"}}, ["layout.data=2", "layout.sharding=zero3"])
    assert 'sharding = "zero3"' in dump_toml(run)
    again = load_run({"model": {"preset": "gpt2-small"}}, [], change_layout=lambda _: run.layout)
    assert isinstance(again, RunConfig)
    assert again.layout == run.layout


def test_ranks_are_arranged_along_the_supported_axes() -> None:
    found = list(arrangements(12))
    assert [sizes["tensor"] for sizes in found if sizes["pipeline"] == 1] == [1, 2, 3, 4, 6, 12]
    assert [sizes["pipeline"] for sizes in found if sizes["tensor"] == 2] == [6, 3, 2, 1]
    assert all(set(sizes) == {"tensor", "data", "pipeline"} for sizes in found)
    assert all(Layout(**sizes).world_size == 12 for sizes in found)


def test_the_stride_of_an_axis_is_the_size_of_what_is_inside_it() -> None:
    layout = Layout(tensor=2, data=12, sharding="zero3", shard_group=3)
    assert [layout.ranks.line(axis).stride for axis in ("tensor", "shard", "replica")] == [1, 2, 6]
    assert Layout(tensor=4, data=2).ranks.line("data").stride == 4
    assert [layout.place_of(rank)["shard"] for rank in (0, 2, 4, 6)] == [0, 1, 2, 0]


ALL_AXES = Layout(pipeline=3, data=4, context=2, tensor=2)
SHARDED = dataclasses.replace(ALL_AXES, sharding=ZeroStage.ZERO3)
IN_GROUPS = Layout(data=4, tensor=2, sharding=ZeroStage.ZERO2, shard_group=2)


@pytest.mark.parametrize(
    ("chosen", "tokens", "copies", "slices"),
    [
        (Layout(), ("data", 1), ("data", 1), ("data", 1)),
        (ALL_AXES, ("tokens", 8), ("tokens", 8), ("data", 1)),
        (SHARDED, ("shard", 8), ("data", 1), ("shard", 8)),
        (IN_GROUPS, ("data", 4), ("replica", 2), ("shard", 2)),
        (dataclasses.replace(SHARDED, data=1), ("context", 2), ("data", 1), ("context", 2)),
        (dataclasses.replace(SHARDED, context=1), ("data", 4), ("data", 1), ("data", 4)),
        (dataclasses.replace(IN_GROUPS, shard_group=1), ("data", 4), ("data", 4), ("data", 1)),
    ],
    ids=str,
)
def test_lines_of_ranks_have_the_names_of_their_messages(
    chosen: Layout, tokens: tuple[str, int], copies: tuple[str, int], slices: tuple[str, int]
) -> None:
    plan = chosen.ranks
    assert [(line.name, line.size) for line in (plan.tokens, plan.copies, plan.slices)] == [tokens, copies, slices]
    assert (plan.cuts.name, plan.cuts.size) == ("tensor", chosen.tensor)
    assert (plan.owners.name, plan.owners.size) == ("pipeline", chosen.pipeline)


@pytest.mark.parametrize("chosen", [ALL_AXES, SHARDED, IN_GROUPS], ids=str)
def test_ranks_of_a_line_are_one_stride_apart(chosen: Layout) -> None:
    """The places of the ranks along the axes are computed apart from the plan."""
    places = [chosen.place_of(rank) for rank in range(chosen.world_size)]
    plan = chosen.ranks
    differ = {
        "tokens": (plan.tokens, ("replica", "shard", "context")),
        "cuts": (plan.cuts, ("tensor",)),
        "owners": (plan.owners, ("pipeline",)),
        "slices": (plan.slices, ("shard", "context")),
    }
    for line, axes in differ.values():
        fixed = [[place for axis, place in at.items() if axis not in axes] for at in places]
        of_first = [rank for rank, at in enumerate(fixed) if at == fixed[0]]
        if line.size > 1:
            assert of_first == list(range(0, line.size * line.stride, line.stride))
            assert plan.line(line.name) == line
    assert plan.per_owner == sum(at["pipeline"] == 0 for at in places)
    assert plan.line("ends") == plan.owners


EXPERTS = [
    Layout(data=4, expert=2),
    Layout(data=2, context=2, expert=4),
    Layout(tensor=2, data=2, expert=2),
    Layout(pipeline=3, tensor=2, data=4, context=2, expert=4),
    Layout(tensor=2, data=4, expert=2, sharding=ZeroStage.ZERO3),
    Layout(pipeline=2, data=8, expert=2, sharding=ZeroStage.ZERO3, shard_group=4),
]


@pytest.mark.parametrize("chosen", EXPERTS, ids=str)
def test_the_plan_of_experts_arranges_the_same_ranks_anew(chosen: Layout) -> None:
    plan = chosen.expert_ranks
    places = [plan.place_of(rank) for rank in range(chosen.world_size)]
    assert len({tuple(at.values()) for at in places}) == chosen.world_size
    for mine, dense in zip(places, map(chosen.place_of, range(chosen.world_size)), strict=True):
        assert {name: mine[name] for name in ("pipeline", "tensor")} == {n: dense[n] for n in ("pipeline", "tensor")}
    assert plan.tokens.size * chosen.expert == chosen.ranks.tokens.size
    assert plan.tokens.size == plan.copies.size * plan.slices.size
    assert plan.line("expert").stride == chosen.tensor


def test_lines_of_experts_have_names_of_their_own() -> None:
    whole, sharded, grouped = (EXPERTS[i].expert_ranks for i in (3, 4, 5))
    assert [line.name for line in (whole.tokens, whole.copies)] == ["expert_data", "expert_data"]
    assert (whole.tokens.size, whole.slices.size) == (2, 1)
    assert (sharded.slices.name, sharded.slices.size, sharded.copies.size) == ("expert_data", 2, 1)
    lines = [(line.name, line.size, line.stride) for line in (grouped.tokens, grouped.copies, grouped.slices)]
    assert lines == [("expert_data", 4, 2), ("expert_replica", 2, 4), ("expert_shard", 2, 2)]
    assert list(grouped.mesh_axes) == ["pipeline", "expert_replica", "expert_shard", "expert", "tensor"]


def test_a_line_may_join_axes_that_are_not_adjacent() -> None:
    owners = Layout(pipeline=2, data=4, tensor=2, expert=2).expert_ranks.owners
    assert (owners.name, owners.axes, owners.size) == ("pipeline_expert", ("pipeline", "expert"), 4)
    assert owners.steps == ((2, 8), (2, 2))
    assert [rank for rank in range(16) if owners.place_of(rank) == 3] == [10, 11, 14, 15]


def test_with_one_expert_rank_experts_are_parameters_like_all_others() -> None:
    chosen = Layout(tensor=2, data=4, context=2, sharding=ZeroStage.ZERO3)
    assert chosen.expert_ranks is chosen.ranks


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"data": 2, "context": 2, "expert": 3},
            "`layout.expert` must divide `layout.data` x `layout.context` (4), but is 3. Try 1, 2 or 4.",
        ),
        (
            {"data": 8, "expert": 8, "sharding": ZeroStage.ZERO3, "shard_group": 4},
            "`layout.expert` must divide `layout.shard_group` (4), but is 8. Try 1, 2 or 4.",
        ),
    ],
)
def test_expert_ranks_divide_the_ranks_that_see_different_tokens(given: dict[str, Any], message: str) -> None:
    assert refusal(LayoutError, Layout, **given) == message


def test_a_model_without_experts_has_one_expert_rank() -> None:
    given = ["layout.data=4", "layout.expert=2", "training.batch_size=8"]
    assert refusal(LayoutError, load_run, {"model": {"preset": "gpt2-small"}}, given) == (
        "`layout.expert` must be 1 for a model without experts, but is 2. Set layout.expert=1: all 4 ranks of "
        "`layout.data` x `layout.context` then share the batch."
    )


def test_expert_ranks_divide_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "num_experts", 12)
    model, chosen = ModelConfig(num_layers=1, hidden_size=8, num_heads=2), Layout(data=8, expert=8)
    assert refusal(LayoutError, require_expert_axis, model, chosen) == (
        "`layout.expert` must divide `layout.data` x `layout.context` (8) and `model.experts.number` (12), but is 8. "
        "Try 1, 2 or 4."
    )
    require_expert_axis(model, Layout(data=8, expert=4))


def test_without_stages_the_same_ranks_hold_the_whole_model() -> None:
    staged = Layout(pipeline=4, stages_per_rank=2, tensor=2, data=3)
    assert staged.without_stages() == Layout(tensor=2, data=12)
    assert staged.without_stages().world_size == staged.world_size


def test_a_batch_is_shared_by_the_ranks_that_read_different_sequences() -> None:
    chosen = Layout(pipeline=3, data=4, context=2, tensor=2)
    assert chosen.share_of(24) == 6
    assert [chosen.divides(batch_size) for batch_size in (24, 26)] == [True, False]


@pytest.mark.parametrize(
    ("chosen", "divisor"),
    [
        (Layout(), 1),
        (Layout(tensor=2), 1),
        (Layout(tensor=2, sequence_parallel=True), 2),
        (Layout(context=4), 8),
        (Layout(context=4, tensor=2, sequence_parallel=True), 16),
    ],
    ids=str,
)
def test_pieces_of_sequences_divide_their_length(chosen: Layout, divisor: int) -> None:
    assert chosen.length_divisor == divisor


@pytest.mark.parametrize(
    ("layout", "splits"),
    [
        (Layout(tensor=2, sequence_parallel=True), True),
        (Layout(tensor=1, sequence_parallel=True), False),
        (Layout(tensor=2), False),
    ],
    ids=str,
)
def test_one_tensor_rank_splits_no_sequence(layout: Layout, splits: bool) -> None:
    assert layout.splits_sequence == splits
