"""The report of a pipeline's recorded steps, from times that are known."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from crosscut.architecture.pipeline import Durations, interleaved, one_forward_one_backward, simulate
from crosscut.training.profiling.passes import PipelineStep
from crosscut.training.profiling.pipeline_profile import PipelineProfile


def printed(profile: PipelineProfile) -> str:
    text = io.StringIO()
    table = Table("rank", "stages", "computing", "bubble", "waiting", "rest")
    profile.print(table, Console(file=text, width=120))
    return text.getvalue()


def test_waiting_for_messages_is_told_apart_from_the_bubble():
    """Two ranks and four micro-batches, 3 seconds each: the bubble is a quarter of 12 seconds. The first and the last
    message of 0.5 seconds are in nobody's shadow, and the rest of the step takes 4 seconds."""
    timeline = simulate(one_forward_one_backward(2, 4), Durations(message=0.5))
    late = timeline.total - 15
    assert late >= 2 * 0.5
    step = PipelineStep(timeline, (20.0, 20.0))
    for shares in step.shares():
        assert shares == pytest.approx((12 / 20, 3 / 20, late / 20, (5 - late) / 20))
    text = printed(PipelineProfile({3: [step], 4: [step]}))
    share = f"{late / 20:.1%}"
    assert [line.split() for line in text.splitlines() if share in line] == [
        ["│", str(rank), "│", str(rank), "│", "60.0%", "│", "15.0%", "│", share, "│", f"{(5 - late) / 20:.1%}", "│"]
        for rank in (0, 1)
    ]
    assert f"bubble 0.250 and waiting {late / 12:.3f} of the computing time; (P - 1) / (V m) = 0.250" in text


def test_unequal_stages_are_part_of_the_bubble():
    timeline = simulate(one_forward_one_backward(2, 8), [Durations(), Durations(forward=2, backward=4)])
    first, last = PipelineStep(timeline, (60.0, 60.0)).shares()
    assert first == pytest.approx((24 / 60, 27 / 60, 0.0, 9 / 60))
    assert last == pytest.approx((48 / 60, 3 / 60, 0.0, 9 / 60))


def test_the_formula_knows_the_stages_of_a_rank():
    timeline = simulate(interleaved(4, 8, 2), Durations())
    text = printed(PipelineProfile({3: [PipelineStep(timeline, (60.0,) * 4)]}))
    assert "bubble 0.188 and waiting 0.000 of the computing time; (P - 1) / (V m) = 0.188" in text
    assert "│ 3    │ 3, 7" in text
