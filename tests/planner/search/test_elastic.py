"""Layouts for another number of ranks than the layout of a run has."""

import pytest

from crosscut.config import LayoutError, ModelConfig, RunConfig, load_run
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.planner.search import run_on, search_layouts
from tests.refusals import refusal

LAPTOP = KNOWN_HARDWARE["laptop"]


def run_of(*overrides: str, **layout: object) -> RunConfig:
    training = {"batch_size": 512, "sequence_length": 1024}
    return load_run({"model": {"preset": "gpt2-small"}, "training": training, "layout": layout}, overrides)


@pytest.mark.parametrize(("elastic", "ranks"), [("data", 8), ("all", 8), ("off", 4)])
def test_a_layout_with_as_many_ranks_stays_and_so_does_a_run_that_is_not_elastic(elastic: str, ranks: int) -> None:
    run = run_of(tensor=2, data=4, sharding="zero2", elastic=elastic)
    assert run_on(run, ranks, LAPTOP) is run


@pytest.mark.parametrize(
    ("ranks", "data"), [(2, 1), (4, 2), (6, 2), (7, 2), (12, 4), (16, 8), (33, 16), (1024, 512), (5000, 512)]
)
def test_only_the_number_of_data_ranks_changes_and_it_divides_the_batch(ranks: int, data: int) -> None:
    run = run_of(tensor=2, data=16, sharding="zero2", sequence_parallel=True, elastic="data")
    fitted = run_on(run, ranks, None)
    assert (fitted.layout.data, fitted.layout.tensor, fitted.layout.sharding) == (data, 2, "zero2")
    assert fitted.layout.sequence_parallel
    assert fitted.training.batch_size == 512
    assert fitted.layout.world_size <= ranks


def test_pipeline_and_context_ranks_stay_too() -> None:
    run = run_of(pipeline=2, context=2, tensor=2, data=2, elastic="data")
    assert str(run_on(run, 11, None).layout) == str(run_of(pipeline=2, context=2, tensor=2).layout)


@pytest.mark.parametrize(
    ("micro", "ranks", "expected"), [(0, 2, 128), (0, 8, 64), (8, 2, 8), (8, 3, 8), (128, 8, 64), (64, 1, 64)]
)
def test_micro_batches_do_not_grow(micro: int, ranks: int, expected: int) -> None:
    run = run_of(f"training.micro_batch_size={micro}", data=4, elastic="data")
    assert run_on(run, ranks, None).micro_batch_size == expected


def test_a_smaller_batch_at_the_start_is_divided_as_well() -> None:
    run = run_of("training.initial_batch_size=4", "training.ramp_steps=1000", data=4, elastic="data")
    assert run_on(run, 512, None) is not run
    assert run_on(run, 512, None).layout.data == 4


def test_stages_keep_their_number_of_micro_batches_a_multiple_of_the_pipeline() -> None:
    run = run_of(
        "training.batch_size=24", "training.micro_batch_size=3", pipeline=4, stages_per_rank=3, data=2, elastic="data"
    )
    fitted = run_on(run, 4, None)
    assert (fitted.layout.data, fitted.micro_batch_size, fitted.num_micro_batches) == (1, 3, 8)


@pytest.mark.parametrize(("ranks", "group"), [(4, 2), (2, 2), (1, 0), (8, 2)])
def test_groups_that_hold_one_copy_stay_where_they_divide_the_data_ranks(ranks: int, group: int) -> None:
    run = run_of(data=16, sharding="zero3", shard_group=2, elastic="data")
    assert run_on(run, ranks, None).layout.shard_group == group


@pytest.mark.parametrize(("ranks", "expert"), [(16, 4), (8, 4), (2, 2), (1, 1)])
def test_data_ranks_share_experts_as_far_as_they_can(monkeypatch: pytest.MonkeyPatch, ranks: int, expert: int) -> None:
    monkeypatch.setattr(ModelConfig, "num_experts", 8)
    run = run_of(data=16, expert=4, elastic="data")
    assert run_on(run, ranks, None).layout.expert == expert


def test_fewer_ranks_than_share_a_layer_are_refused() -> None:
    assert refusal(LayoutError, run_on, run_of(tensor=4, data=4, pipeline=3, elastic="data"), 11, None) == (
        "`layout.tensor` x `layout.pipeline` must be at most the number of processes (11), but is 12. With "
        'layout.elastic="data", only the number of data ranks changes. Start at least 12 processes, or set '
        'layout.elastic="all".'
    )


def tiny(**layout: object) -> RunConfig:
    training = {"batch_size": 4, "sequence_length": 32}
    return load_run({"model": {"preset": "laptop-tiny", "vocab_size": 500}, "training": training, "layout": layout})


def test_of_all_layouts_the_fastest_is_taken() -> None:
    run = tiny(data=4, elastic="all")
    fitted = run_on(run, 2, LAPTOP)
    assert fitted == search_layouts(run, LAPTOP, 2).fitting[0].run(run)
    assert (fitted.layout.world_size, fitted.layout.elastic) == (2, "all")
    assert fitted.training.batch_size == 4


def test_where_no_layout_has_all_ranks_some_are_idle() -> None:
    run = tiny(data=2, elastic="all")
    assert run_on(run, 7, LAPTOP).layout.world_size == 4  # a batch of 4 sequences, and 2 layers


def test_all_layouts_of_an_unknown_device_are_refused() -> None:
    with pytest.raises(
        LayoutError, match=r'`layout.elastic` must be "data" on a device that the planner does not know'
    ):
        run_on(run_of(data=2, elastic="all"), 4, None)


def test_a_run_that_fits_nowhere_is_refused() -> None:
    run = load_run({"model": {"preset": "megatron-8.3b"}, "training": {"batch_size": 8}, "layout": {"elastic": "all"}})
    with pytest.raises(LayoutError, match=r"The run must fit on the 2 processes that were started, but no layout fits"):
        run_on(run, 2, LAPTOP)
