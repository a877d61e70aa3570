"""Layouts with a pipeline in a search."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product

import pytest

from crosscut.config import Layout, RunConfig, load_run
from crosscut.config.checks import divisors
from crosscut.config.layout import PipelineSchedule
from crosscut.config.training import Recompute
from crosscut.planner.candidate import Candidate
from crosscut.planner.hardware import KNOWN_HARDWARE, Hardware
from crosscut.planner.memory import forecast_memory
from crosscut.planner.products import Speed
from crosscut.planner.search import MOST_PIPELINES, Plans, search_layouts
from crosscut.planner.search.pipelines import _micro_batches
from crosscut.planner.search.reasons import reason_against_arrangement
from crosscut.planner.stages import stage_sizes
from crosscut.planner.time import shortest_step, step_time

H100, LAPTOP = KNOWN_HARDWARE["h100-sxm"], KNOWN_HARDWARE["laptop"]
ZERO = PipelineSchedule.ZERO_BUBBLE


def slow_links(memory: float = 80e9) -> Hardware:
    """Devices with little memory, and with links of 1 GB/s."""
    node = replace(H100.node, bandwidth=1e9)
    return replace(H100, memory=int(memory), node=node, network=node, ranks_per_node=4)


def run_of(*overrides: str, batch: int = 16, **model: object) -> RunConfig:
    size = {"num_layers": 8, "hidden_size": 1024, "num_heads": 4, "vocab_size": 32_000, "dropout": 0.0, **model}
    training = {"batch_size": batch, "sequence_length": 512, "precision": "bfloat16"}
    return load_run({"model": size, "training": training}, overrides)


@cache
def plans_over_slow_links(memory: float, num_ranks: int) -> Plans:
    return search_layouts(run_of(), slow_links(memory), num_ranks)


def with_pipeline(plans: Plans) -> list[Candidate]:
    return [plan.candidate for plan in plans.fitting if plan.candidate.layout.pipeline > 1]


def with_cut(candidate: Candidate, sizes: tuple[int, ...]) -> Candidate:
    return Candidate.at(replace(candidate, layout=replace(candidate.layout, stages=sizes)), 0)


def cuts(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Every cut of the layers into stages of at least one layer."""
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *inner, num_layers)))


def all_candidates(plans: Plans, num_ranks: int) -> Iterator[Candidate]:
    """Every candidate with a pipeline that the search describes, in no particular order."""
    run = plans.asked
    layers, batch = run.model.num_layers, run.training.batch_size
    for tensor, data in product(divisors(num_ranks), divisors(num_ranks)):
        if num_ranks % (tensor * data) or not 1 < (pipeline := num_ranks // tensor // data) <= layers or tensor > 4:
            continue
        several = divisors(layers // pipeline)[1:] if layers % pipeline == 0 else []
        stages = [(1, "1f1b"), (1, "zero_bubble"), *((number, "1f1b") for number in {*several[:1], *several[-1:]})]
        options = product(stages, (False, True)[: min(tensor, 2)], ("none", "zero2")[: min(data, 2)])
        for (number, schedule), split, sharding in options:
            layout = Layout(
                tensor=tensor, data=data, pipeline=pipeline, stages_per_rank=number,
                schedule=PipelineSchedule(schedule), sequence_parallel=split, sharding=sharding,  # type: ignore[arg-type]
            )  # fmt: skip
            modes = (("none", 1), ("operators", 1), ("full", 2), ("full", 1))
            for (mode, every), micro in product(modes, divisors(batch // data)):
                m = batch // data // micro
                if m >= pipeline and (number == 1 or m % pipeline == 0):
                    training = replace(
                        run.training, micro_batch_size=micro, recompute=Recompute(mode), recompute_every=every,
                        device="cuda",  # type: ignore[arg-type]
                    )  # fmt: skip
                    yield Candidate(run.model, layout, training, run.optimizer)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("run", "hardware", "num_ranks"),
    [
        (run_of(num_layers=7, layers=("attention gelu", "attention swiglu")), slow_links(), 4),
        (run_of(), slow_links(), 4),
        (run_of(), slow_links(0.7e9), 8),
        (run_of(num_layers=6, vocab_size=1000, batch=12), H100, 6),
    ],
    ids=["layers of two kinds", "slow links", "little memory", "fast links"],
)
def test_the_pipelines_are_the_fastest_of_all_that_fit(run: RunConfig, hardware: Hardware, num_ranks: int) -> None:
    plans = search_layouts(run, hardware, num_ranks)
    times, tried = {}, list(all_candidates(plans, num_ranks))
    speed = Speed(hardware, plans.asked.training.precision, ranks=num_ranks)
    for candidate in tried:
        ranks = range(candidate.layout.pipeline)
        if max(forecast_memory(Candidate.at(candidate, rank)).total for rank in ranks) <= hardware.memory:
            times[candidate] = step_time(candidate, hardware, speed=speed).total
            assert shortest_step(candidate, speed) <= times[candidate] * (1 + 1e-9)
    others = [plan.time.total for plan in plans.fitting if plan.candidate.layout.pipeline == 1]
    limit = sorted([*others, *times.values()])[MOST_PIPELINES - 1]
    expected = {candidate for candidate, seconds in times.items() if seconds <= limit}
    assert len(tried) > 100
    assert {with_cut(found, ()) for found in with_pipeline(plans)} == expected


def test_where_messages_outweigh_the_logits_the_cut_is_not_by_flops() -> None:
    """Two tensor ranks send as much in every layer. The last stage, which also computes the logits, can therefore have
    more layers than its FLOPs suggest.
    """
    plans = plans_over_slow_links(0.7e9, 8)
    speed = Speed(plans.hardware, plans.asked.training.precision, ranks=8)
    fastest = plans.fitting[0]
    candidate = fastest.candidate
    assert candidate.layout.stages == (2, 2, 2, 2) != stage_sizes(with_cut(candidate, ()))
    of_cut = {cut: step_time(with_cut(candidate, cut), plans.hardware, speed=speed).total for cut in cuts(8, 4)}
    assert fastest.time.total == pytest.approx(min(of_cut.values()))
    assert fastest.time.total < 0.95 * step_time(with_cut(candidate, ()), plans.hardware, speed=speed).total
    written = fastest.run(plans.asked)
    assert step_time(written, plans.hardware).total == pytest.approx(fastest.time.total, rel=1e-3)


def test_another_cut_fits_into_memory_and_is_worth_a_setting() -> None:
    for plans in (plans_over_slow_links(0.7e9, 8), plans_over_slow_links(80e9, 4)):
        speed = Speed(plans.hardware, plans.asked.training.precision, ranks=plans.num_ranks)
        for plan in (plan for plan in plans.fitting if plan.candidate.layout.pipeline > 1):
            candidate = plan.candidate
            ranks = range(candidate.layout.pipeline)
            assert plan.memory.total == max(
                forecast_memory(Candidate.at(candidate, rank), device="cuda").total for rank in ranks
            )
            assert plan.memory.total <= plans.hardware.memory
            default = step_time(with_cut(candidate, ()), plans.hardware, speed=speed).total
            assert plan.time.total <= default * (0.99 if candidate.layout.stages else 1 + 1e-9)


@pytest.mark.slow  # test_the_pipelines_are_the_fastest_of_all_that_fit has a small model, and compares more
def test_over_slow_links_a_large_model_gets_a_pipeline() -> None:
    """44 billion parameters, whose tensor ranks fill a node, on nodes with slow network adapters."""
    model = {"num_layers": 24, "hidden_size": 12_288, "num_heads": 16, "vocab_size": 51_200}
    run = load_run({"model": model, "training": {"batch_size": 32, "sequence_length": 1024, "precision": "bfloat16"}})
    assert H100.network is not None
    plans = search_layouts(run, replace(H100, network=replace(H100.network, bandwidth=5e9)), 16)
    best = plans.fitting[0]
    assert best.candidate.layout.pipeline > 1
    others = [plan.time.total for plan in plans.fitting if plan.candidate.layout.pipeline == 1]
    assert best.time.total < min(others, default=float("inf"))
    assert best.time.bubble_share > 0
    for plan in plans.fitting[:MOST_PIPELINES]:
        written = plan.run(plans.asked)
        assert written.layout == plan.candidate.layout
        assert step_time(written, plans.hardware).total == pytest.approx(plan.time.total, rel=1e-3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("preset", "hardware", "num_ranks"), [("gpt2-small", LAPTOP, 2), ("llama3-8b", H100, 8)])
def test_where_data_ranks_are_faster_a_pipeline_is_not_first(preset: str, hardware: Hardware, num_ranks: int) -> None:
    training = {"batch_size": 64 if hardware is H100 else 8}
    best = search_layouts(load_run({"model": {"preset": preset}, "training": training}), hardware, num_ranks).fitting[0]
    assert best.candidate.layout.pipeline == 1


def test_pipelines_that_are_not_possible_have_a_reason() -> None:
    def reasons_of(run: RunConfig, num_ranks: int) -> dict[str, str]:
        rejected = search_layouts(run, H100, num_ranks).rejected
        return {entry.label: entry.reason for entry in rejected if entry.candidate.layout.pipeline > 1}

    reasons = reasons_of(run_of(num_layers=6, batch=20), 8)
    assert reasons["tensor 1 x data 1 x pipeline 8"] == "6 layers cannot be cut into 8 pipeline stages"
    assert reasons["tensor 1 x data 2 x pipeline 4, 2 stages per rank"] == (
        "6 layers cannot be divided evenly over 4 ranks with several stages each"
    )
    assert reasons_of(run_of(batch=4), 8)["tensor 1 x data 2 x pipeline 4"] == (
        "a data rank's share of the batch (2 sequences) gives fewer micro-batches than the 4 pipeline ranks need"
    )
    assert reasons_of(run_of(batch=6), 4)["tensor 1 x data 1 x pipeline 4, 2 stages per rank"] == (
        "with several stages per rank, the number of micro-batches must be a multiple of the number of pipeline "
        "ranks (4), but a data rank has 6 sequences per step"
    )


def test_an_arrangement_that_does_not_fit_is_rejected_once() -> None:
    plans = search_layouts(run_of(hidden_size=4096), replace(H100, memory=int(5e9)), 4)
    entries = [entry for entry in plans.rejected if entry.candidate.layout.pipeline > 1 and entry.needed]
    arranged = [entry.candidate.layout.arrangement for entry in entries]
    assert len(arranged) == len(set(arranged)) > 0
    assert all(entry.needed > 5e9 for entry in entries)
    kept = {candidate.layout.arrangement for candidate in with_pipeline(plans)}
    assert not kept & set(arranged)


def test_the_zero_bubble_schedule_needs_layers_that_need_not_be_compiled() -> None:
    plans = search_layouts(run_of("training.compile=off", batch=8), slow_links(), 2)
    assert any(candidate.layout.schedule is ZERO for candidate in with_pipeline(plans))
    compiled = search_layouts(run_of("training.compile=on", batch=8), slow_links(), 2)
    assert with_pipeline(compiled)
    assert not any(candidate.layout.schedule is ZERO for candidate in with_pipeline(compiled))


def test_a_batch_that_no_data_axis_divides_may_have_a_pipeline() -> None:
    plans = search_layouts(run_of(num_heads=1, hidden_size=256, batch=15), H100, 10)
    assert {plan.candidate.layout.data for plan in plans.fitting} == {5}


def test_pipelines_whose_forecast_would_take_longer_than_a_second_are_refused() -> None:
    """A batch of 10^9 sequences, or a pipeline of 10^8 ranks, once had no answer in 40 seconds."""
    run = run_of(batch=1_000_000, num_layers=10_000)
    assert reason_against_arrangement(run, Layout(pipeline=500)) == ""
    assert reason_against_arrangement(run, Layout(pipeline=501)) == (
        "a pipeline of more than 500 ranks cannot be forecast"
    )
    for layout in (Layout(pipeline=2), Layout(pipeline=4), Layout(pipeline=500), Layout(pipeline=2, stages_per_rank=5)):
        sizes = _micro_batches(run, layout)
        assert sizes
        assert all(1_000_000 // size * layout.num_stages <= 250_000 for size in sizes), layout
    assert min(_micro_batches(run, Layout(pipeline=2))) == 8, "smaller ones are left out"
