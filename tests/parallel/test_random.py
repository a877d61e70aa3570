"""Weights that do not know the layout, and the two streams of dropout."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crosscut.config import Layout
from crosscut.parallel import (
    Dropout,
    ParallelMesh,
    RandomStreams,
    make_mesh,
    normal_,
    replicated_parameter,
    seed_of,
    sharded_parameter,
)
from tests.parallel.twins import CPU
from tests.ranks import RankPool

LAYOUT_2X2 = Layout(tensor=2, data=2)


def _parameters(mesh: ParallelMesh, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """One of each placement, of sizes that blocks of 64 do not divide, on four ranks 75 and 50 each."""
    place: dict[str, Any] = {"dtype": dtype, "device": CPU}
    return {
        "columns": sharded_parameter((300, 40), mesh.tensor, dim=0, **place),
        "rows": sharded_parameter((30, 200), mesh.tensor, dim=1, **place),
        "whole": replicated_parameter((100, 30), mesh.tensor, **place),
    }


def _drawn(tensor: int, seed: int = 5, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    parameters = _parameters(make_mesh(Layout(tensor=tensor), CPU), dtype)
    before = torch.get_rng_state()
    for name, parameter in parameters.items():
        normal_(parameter, std=0.02, seed=seed, name=name)
    assert torch.equal(torch.get_rng_state(), before), "the default generator was used"
    return {name: parameter.full_tensor().detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("tensor", [2, 4])
def test_initial_weights_do_not_depend_on_the_layout(ranks: RankPool, tensor: int) -> None:
    whole = ranks.run(1, _drawn, 1)[0]
    for drawn in ranks.run(tensor, _drawn, tensor):
        for name, values in whole.items():
            assert torch.equal(drawn[name], values), name


def test_initial_weights_are_normal_and_no_two_blocks_alike(ranks: RankPool) -> None:
    for name, values in ranks.run(1, _drawn, 1)[0].items():
        assert abs(values.mean()) < 0.002, name
        assert abs(values.std() / 0.02 - 1) < 0.05, name
        assert values.unique().numel() > 0.99 * values.numel(), name


def test_initial_weights_follow_from_seed_and_name(ranks: RankPool) -> None:
    drawn, again, other = (ranks.run(1, _drawn, 1, seed)[0] for seed in (5, 5, 6))
    for name in drawn:
        assert torch.equal(drawn[name], again[name])
        assert not torch.equal(drawn[name], other[name])
    assert not torch.equal(drawn["columns"][:30, :30], drawn["whole"][:30])


def test_initial_weights_of_every_type_are_the_float32_ones(ranks: RankPool) -> None:
    drawn = ranks.run(1, _drawn, 1)[0]
    for dtype in (torch.float64, torch.bfloat16):
        for name, values in ranks.run(1, _drawn, 1, 5, dtype)[0].items():
            assert values.dtype == dtype
            assert torch.equal(values, drawn[name].to(dtype))


def test_a_seed_is_the_same_in_every_process_and_differs_with_every_part() -> None:
    assert seed_of("weights", 5, "name", 0) == 2023414450193524406
    seeds = {seed_of(*parts) for parts in [(1, 2), (2, 1), (12,), ("1", "2", ""), (1, 23), (12, 3)]}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)


def _draws(layout: Layout, step: int = 0, micro_batch: int = 0, seed: int = 1) -> dict[str, Tensor]:
    """Draws on one rank: from the shared stream, twice from the rank's own stream, from the shared stream again, and
    between the parallel regions.
    """
    streams = RandomStreams(make_mesh(layout, CPU), seed)
    streams.restart(step=step, micro_batch=micro_batch)
    drawn = {"shared": torch.rand(8)}
    with streams.per_rank():
        drawn["own"] = torch.rand(8)
    with streams.per_rank():
        drawn["own again"] = torch.rand(8)
    drawn["shared again"] = torch.rand(8)
    with streams.between_regions():
        drawn["between"] = torch.rand(8)
    return drawn


def _distinct(tensors: list[Tensor]) -> int:
    return len({tuple(t.tolist()) for t in tensors})


def test_tensor_ranks_share_one_stream_and_have_one_of_their_own(ranks: RankPool) -> None:
    draws = ranks.run(4, _draws, LAYOUT_2X2)
    for name in ("shared", "shared again", "between"):
        first, second, third, fourth = (d[name] for d in draws)
        assert torch.equal(first, second)
        assert torch.equal(third, fourth)
        assert not torch.equal(first, third), "data ranks drop alike"
    assert _distinct([d[name] for d in draws for name in ("own", "own again")]) == 8


def test_between_the_regions_a_split_sequence_has_the_rank_s_own_stream(ranks: RankPool) -> None:
    draws = ranks.run(2, _draws, Layout(tensor=2, sequence_parallel=True))
    names = ("own", "own again", "between")
    assert _distinct([d[name] for d in draws for name in names]) == 6
    for rank, drawn in enumerate(draws):  # and no other that would have to be switched to
        torch.manual_seed(seed_of("per rank", 1, 0, 0, 0, rank))
        for name in ("shared", "own", "own again", "shared again", "between"):
            assert torch.equal(drawn[name], torch.rand(8))


def test_the_rank_s_own_stream_leaves_the_shared_one_where_it_was(ranks: RankPool) -> None:
    two, four = ranks.run(2, _draws, Layout(tensor=2))[0], ranks.run(4, _draws, Layout(tensor=4))[0]
    for name in ("shared", "shared again", "between"):
        assert torch.equal(two[name], four[name])


def test_alone_on_its_axis_a_rank_has_one_stream(ranks: RankPool) -> None:
    alone = ranks.run(1, _draws, Layout())[0]
    torch.manual_seed(seed_of("shared", 1, 0, 0, 0))
    for name in ("shared", "own", "own again", "shared again", "between"):
        assert torch.equal(alone[name], torch.rand(8))


def test_streams_begin_anew_from_seed_step_and_micro_batch(ranks: RankPool) -> None:
    first, again = (ranks.run(2, _draws, Layout(tensor=2), 3, 1)[0] for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    places = [(3, 1, 1), (4, 1, 1), (3, 0, 1), (3, 1, 2)]
    others = [ranks.run(2, _draws, Layout(tensor=2), *place)[0] for place in places]
    for name in first:
        assert _distinct([drawn[name] for drawn in others]) == len(places)


def _draws_of_layers(layout: Layout, order: list[int], wasted: int) -> dict[int, list[Tensor]]:
    """Draws of each layer if the layers run in this order, after `wasted` other draws."""
    streams = RandomStreams(make_mesh(layout, CPU), 1)
    streams.enter_layer(0)  # before the first micro-batch: no effect
    streams.restart(step=3, micro_batch=1)
    torch.rand(wasted)
    drawn = {}
    for index in order:
        streams.enter_layer(index)
        with streams.per_rank():
            own = torch.rand(8)
        drawn[index] = [torch.rand(8), own]
    return drawn


def test_a_layer_draws_the_same_whatever_was_drawn_before(ranks: RankPool) -> None:
    first = ranks.run(2, _draws_of_layers, Layout(tensor=2), [0, 1, 2], 0)
    later = ranks.run(2, _draws_of_layers, Layout(tensor=2), [2, 1], 5)
    for one, other in zip(first, later, strict=True):
        assert all(torch.equal(a, b) for index in (1, 2) for a, b in zip(one[index], other[index], strict=True))
    assert _distinct([shared for shared, _ in first[0].values()]) == 3, "layers drop alike"
    assert _distinct([own for drawn in first for _, own in drawn.values()]) == 6
    assert all(torch.equal(first[0][index][0], first[1][index][0]) for index in (0, 1, 2))


def _use_unstarted(use: str) -> None:
    streams = RandomStreams(make_mesh(Layout(), CPU), 1)
    if use == "per rank":
        with streams.per_rank():
            pass
    else:
        Dropout(0.1, streams=streams)(torch.ones(4))


@pytest.mark.parametrize("use", ["per rank", "dropout"])
def test_streams_that_were_not_started_are_an_error(ranks: RankPool, use: str) -> None:
    message = (
        r"^`RandomStreams.restart` must be called before a forward pass with dropout, but was not called. Call it at "
        "the start of every micro-batch.$"
    )
    with pytest.raises(RuntimeError, match=message):
        ranks.run(1, _use_unstarted, use)


def _drop(layout: Layout, probability: float, training: bool, inside: bool = False) -> Tensor:
    streams = RandomStreams(make_mesh(layout, CPU), 1)
    streams.restart(step=0)
    return Dropout(probability, streams=streams, inside=inside).train(training)(torch.ones(4, 1000))


def test_dropout_drops_its_share_and_scales_the_rest(ranks: RankPool) -> None:
    y = ranks.run(1, _drop, Layout(), 0.2, True)[0]
    assert set(y.unique().tolist()) == {0.0, 1.25}
    assert abs((y == 0).double().mean() - 0.2) < 0.03


def test_dropout_drops_nothing_at_evaluation_or_at_probability_zero(ranks: RankPool) -> None:
    assert torch.equal(ranks.run(1, _drop, Layout(), 0.2, False)[0], torch.ones(4, 1000))
    assert torch.equal(ranks.run(1, _drop, Layout(), 0.0, True)[0], torch.ones(4, 1000))


def test_dropout_is_the_same_on_all_tensor_ranks_unless_the_sequence_is_split(ranks: RankPool) -> None:
    assert _distinct([y.flatten() for y in ranks.run(4, _drop, Layout(tensor=4), 0.2, True)]) == 1
    split = Layout(tensor=4, sequence_parallel=True)
    assert _distinct([y.flatten() for y in ranks.run(4, _drop, split, 0.2, True)]) == 4


def test_dropout_inside_a_region_differs_on_all_tensor_ranks(ranks: RankPool) -> None:
    for layout in (Layout(tensor=4), Layout(tensor=4, sequence_parallel=True)):
        assert _distinct([y.flatten() for y in ranks.run(4, _drop, layout, 0.2, True, True)]) == 4
