"""The table of axes, and what layouts read in it."""

import dataclasses
import json
from collections.abc import Iterator

import pytest

from crosscut.config import Layout, LayoutError, RunConfig, ZeroStage, dump_toml, layout, load_layout, load_run
from crosscut.config.axes import AXES, OPTIONS, AxisRole, AxisRow, arrangements, role_of
from tests.refusals import refusal

Axes = tuple[str, ...]
UNSUPPORTED = [row for row in AXES if not row.is_supported]


@pytest.fixture
def all_supported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layouts accept every axis of the table."""
    monkeypatch.setattr(layout, "AXES", tuple(dataclasses.replace(row, is_supported=True) for row in AXES))
    yield


def mesh_axes_of(chosen: Layout) -> tuple[Axes, Axes, Axes]:
    """Axes of the mesh along which tokens, copies and slices differ."""
    return chosen.ranks.tokens.axes, chosen.ranks.copies.axes, chosen.ranks.slices.axes


def test_rows_follow_the_design() -> None:
    assert [(row.name, row.option, row.role) for row in AXES] == [
        ("pipeline", "pipeline", AxisRole.OWNS),
        ("replica", "data", AxisRole.TOKENS),
        ("shard", "data", AxisRole.TOKENS),
        ("context", "context", AxisRole.TOKENS),
        ("tensor", "tensor", AxisRole.CUTS),
        ("expert", "expert", AxisRole.OWNS),
    ]


def test_a_role_is_found_by_the_name_of_an_axis_and_of_its_field() -> None:
    assert role_of("replica") is role_of("shard") is role_of("data") is AxisRole.TOKENS
    assert role_of("tensor") is AxisRole.CUTS


def test_every_axis_has_its_size_in_a_layout() -> None:
    assert set(OPTIONS) <= {field.name for field in dataclasses.fields(Layout)}
    assert all(getattr(Layout(), option) == 1 for option in OPTIONS)


@pytest.mark.parametrize("row", UNSUPPORTED, ids=lambda row: row.name)
def test_an_axis_that_nothing_supports_is_refused(row: AxisRow) -> None:
    option = row.option
    assert refusal(LayoutError, load_run, {"model": {"preset": "gpt2-small"}}, [f"layout.{option}=2"]) == (
        f"`layout.{option}` must be 1, but is 2. This version of Crosscut has no {option} parallelism. "
        f"Remove `layout.{option}`, and raise layout.tensor or layout.data instead."
    )


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
    assert list(chosen.mesh_axes.items()) == list(mesh.items())
    assert mesh_axes_of(chosen) == (tokens, copies, slices)


@pytest.mark.usefixtures("all_supported")
def test_a_further_axis_takes_its_place_in_meshes_and_descriptions() -> None:
    chosen = Layout(tensor=2, data=4, context=2, expert=4)
    assert str(chosen) == "tensor 2 x context 2 x data 4, expert 4"
    assert chosen.world_size == 2 * 2 * 4
    assert list(chosen.mesh_axes) == ["data", "context", "tensor"]
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
