"""Cases trained in turns on kept ranks."""

from dataclasses import replace

import pytest
import torch

from crosscut.config import Layout, load_run
from crosscut.parallel import CollectiveRecorder, make_repeated_mesh
from crosscut.scaling.cases import Case, Devices, study_cases
from crosscut.scaling.measure import Stepping, order, train_in_turns
from crosscut.training.precision import resolve_on
from tests.ranks import RankPool

CPU = torch.device("cpu")
MODEL = {"num_layers": 1, "hidden_size": 16, "num_heads": 4, "vocab_size": 300, "dropout": 0.0}
TINY = load_run({"model": MODEL, "training": {"batch_size": 2, "sequence_length": 8}})
TWO_CORES = Devices(kind="cpu", count=2, most=4)
STUDIES = study_cases(resolve_on(TINY, CPU), TWO_CORES).studies


def _train(cases: list[Case], turns: int) -> list[list[float]]:
    return train_in_turns(cases, turns, make_repeated_mesh(Layout(data=4), CPU))


def test_every_case_has_the_seconds_of_its_slowest_rank_of_each_turn(ranks: RankPool) -> None:
    cases = [STUDIES["data"][2], STUDIES["tensor"][0], STUDIES["process"][1]]
    first, *others = ranks.run(4, _train, cases, 2)
    assert [len(seconds) for seconds in first] == [2] * len(cases)
    assert all(0 < seconds < 30 for taken in first for seconds in taken)
    assert others == [first] * 3


@pytest.mark.slow
def test_options_of_a_layout_are_measured_too(ranks: RankPool) -> None:
    run = load_run(
        {"model": {"preset": "laptop-tiny", "vocab_size": 300, "dropout": 0.0}, "training": {"batch_size": 2}},
        ("layout.sequence_parallel=true", 'layout.sharding="zero3"', "training.sequence_length=8"),
    )
    cases = study_cases(resolve_on(run, CPU), TWO_CORES).studies["data"]
    assert all(taken[0] > 0 for taken in ranks.run(4, _train, cases, 1)[0])


def test_stages_and_shared_sequences_are_measured(ranks: RankPool) -> None:
    run = resolve_on(replace(TINY, model=replace(TINY.model, num_layers=2)), CPU)
    studies, _ = study_cases(run, TWO_CORES)
    cases = [*studies["pipeline"], studies["context"][1]]
    assert [case.run.layout.world_size for case in cases] == [1, 2, 2]
    seconds = ranks.run(4, _train, cases, 1)[0]
    assert all(0 < taken[0] < 30 for taken in seconds)


def _step(case: Case) -> tuple[float, int, int]:
    """Seconds, threads, and how much this rank sent."""
    mesh = make_repeated_mesh(case.run.layout, CPU)
    stepping = Stepping(case, CPU, make_repeated_mesh(Layout(data=4), CPU).data.rank)
    with CollectiveRecorder(mesh) as recorder:
        seconds = stepping.step(0)
    return seconds, torch.get_num_threads(), len(recorder.sent)


def test_ranks_that_a_case_does_not_use_do_nothing(ranks: RankPool) -> None:
    outcomes = ranks.run(4, _step, STUDIES["tensor"][1])
    assert [seconds > 0 for seconds, *_ in outcomes] == [True, True, False, False]
    assert [sent > 0 for *_, sent in outcomes] == [True, True, False, False]


def test_one_process_computes_with_its_threads(ranks: RankPool) -> None:
    assert [threads for _, threads, _ in ranks.run(4, _step, STUDIES["process"][0])] == [2, 1, 1, 1]


def test_each_turn_takes_all_cases_and_begins_with_another() -> None:
    turns = [order(turn, 3) for turn in range(4)]
    assert turns == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]
