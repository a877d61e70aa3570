"""Experts that ranks share, beside parameters that every rank holds, compared with one rank."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from crosscut.config import Layout
from tests.parallel.mixtures import LAYERS, MICRO_BATCHES, E, F, H, Outcome, trained, trained_from
from tests.ranks import RankPool

LAYOUTS = [
    Layout(tensor=2, data=2, expert=2),
    Layout(data=4, expert=2),
    Layout(data=2, context=2, expert=4),
    Layout(pipeline=2, data=2, expert=2),
    Layout(data=4, expert=2, sharding="zero3"),
    Layout(data=4, expert=4, sharding="zero2"),
    Layout(tensor=2, data=2, expert=2, sharding="zero3"),
    Layout(pipeline=2, data=2, expert=2, sharding="zero2"),
    Layout(data=2, context=2, expert=2, sharding="zero3"),
    Layout(data=4, expert=2, sharding="zero3", shard_group=2),
    Layout(data=2, context=2),
]
STEPS = 3


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> Outcome:
    (outcome,) = ranks.run(1, trained, Layout(), STEPS)
    return outcome


def assert_alike(of_ranks: list[Outcome], alone: Outcome, steps: slice = slice(None)) -> None:
    held = {name: tensor for outcome in of_ranks for name, tensor in outcome.parameters.items()}
    assert held.keys() == alone.parameters.keys()
    for outcome in of_ranks:
        assert outcome.losses == pytest.approx(alone.losses[steps], rel=1e-12)
        assert outcome.norms == pytest.approx(alone.norms[steps], rel=1e-12)
        for name, tensor in outcome.parameters.items():
            torch.testing.assert_close(tensor, alone.parameters[name], rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.one_in(11)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_that_share_experts_train_like_one_rank(layout: Layout, ranks: RankPool, alone: Outcome) -> None:
    assert_alike(ranks.run(layout.world_size, trained, layout, STEPS), alone)


def test_messages_of_experts_carry_the_names_of_their_own_axes(ranks: RankPool) -> None:
    first, *_ = ranks.run(4, trained, Layout(data=4, expert=2), 1)
    layer = MICRO_BATCHES * LAYERS
    each = Counter((sent.operation, sent.axis) for sent in first.sent[0])
    assert each == {
        ("all_gather", "expert"): 3 * layer,  # tokens, scores, and the gradients of the results
        ("reduce_scatter", "expert"): 3 * layer,
        ("all_reduce", "expert_data"): 1,
        ("all_reduce", "expert"): 1,
        ("all_reduce", "data"): 2,
    }


def test_an_axis_of_experts_with_the_ranks_of_the_data_axis_has_messages_of_its_own(ranks: RankPool) -> None:
    first, *_ = ranks.run(4, trained, Layout(data=4, expert=4), 1)
    elements = {axis: {sent.elements for sent in first.sent[0] if sent.axis == axis} for axis in ("data", "expert")}
    dense = LAYERS * (2 * F * H + F + H + E * H)
    assert elements["data"] == {dense, 1}
    assert elements["expert"] >= {1}, "the norm"
    assert dense not in elements["expert"]
    assert sum(sent == ("all_reduce", "data", 1) for sent in first.sent[0]) == 1, "the loss"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(data=2, expert=2), Layout(), Layout(data=4, expert=4)],
        [Layout(tensor=2, data=2, expert=2, sharding="zero3"), Layout(data=4, expert=4, sharding="zero2"), Layout()],
    ],
    ids=lambda layouts: " to ".join(map(str, layouts)),
)
def test_a_checkpoint_is_loaded_with_any_other_number_of_expert_ranks(
    layouts: list[Layout], ranks: RankPool, alone: Outcome, tmp_path: Path
) -> None:
    for layout, (start, stop) in zip(layouts, pairwise(range(STEPS + 1)), strict=True):
        of_ranks = ranks.run(layout.world_size, trained_from, layout, range(start, stop), tmp_path)
        assert of_ranks[0].losses == pytest.approx(alone.losses[start:stop], rel=1e-12)
    assert_alike(of_ranks, alone, slice(STEPS - 1, STEPS))
