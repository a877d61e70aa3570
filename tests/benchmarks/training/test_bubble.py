"""Stages that wait for known times: their recorded steps last at least as long as the simulated ones."""

import pytest

from benchmarks.training.bubble import DRAWN, SECONDS, WAITS, draw, simulated, wait_in_group
from crosscut.architecture.pipeline import Pass, without_messages
from crosscut.config import Layout
from crosscut.planner.stages import schedule_of
from crosscut.training.profiling.passes import PipelineStep
from tests.benchmarks.conftest import run_program


def steps_that_wait(ranks, layout: Layout, num_micro_batches: int) -> list[PipelineStep]:
    return ranks.run(layout.world_size, wait_in_group, layout, num_micro_batches, 1)[0]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [*reversed(WAITS)])  # zero bubble first, with its weight gradients
def test_a_recorded_step_waits_for_the_known_times(ranks, name):
    layout = WAITS[name]
    (step,) = steps_that_wait(ranks, layout, 4)
    schedule, bare = schedule_of(layout, 4), simulated(schedule_of(layout, 4))
    assert step.timeline.schedule == schedule
    for rank, passes in enumerate(step.timeline.ranks):
        for recorded, known in zip(passes, bare.ranks[rank], strict=True):
            assert recorded.duration >= known.duration
    assert step.timeline.total >= without_messages(step.timeline).total >= bare.total
    counted = [timed.weight_gradients for passes in step.timeline.ranks for timed in passes]
    kinds = [timed.action.kind for passes in step.timeline.ranks for timed in passes]
    assert counted == [1 if kind is Pass.WEIGHTS else 0 for kind in kinds]


def test_fewer_micro_batches_than_ranks_wait_as_simulated(ranks):
    layout = Layout(pipeline=4)
    (step,) = steps_that_wait(ranks, layout, 2)
    bare = simulated(schedule_of(layout, 2))
    assert bare.mean_bubble == pytest.approx(3 / 2)
    assert step.timeline.total >= bare.total == pytest.approx((2 + 3) * sum(vars(SECONDS).values()))


def test_the_figure_has_the_passes_of_every_rank(tmp_path):
    from matplotlib import image

    timelines = {name: simulated(schedule_of(WAITS[name], 8)) for name in DRAWN}
    draw(timelines, tmp_path / "figure.png")
    pixels = image.imread(tmp_path / "figure.png")
    red, green, blue = (255 * pixels[::4, :, :3]).round().astype(int).transpose(2, 0, 1)
    colors = set((red << 16 | green << 8 | blue).flat)
    for color in ("4878a8", "86aed4", "d1682f", "eda77f", "4f9a57", "e9e9e9"):
        assert int(color, 16) in colors


@pytest.mark.slow  # starts ranks of its own for every schedule; the tests above run the same code in the kept ranks
def test_the_command_prints_both_tables(tmp_path):
    figure = tmp_path / "figure.png"
    done = run_program("training/bubble.py", "--steps", 1, "--turns", 1, "--figure", figure, timeout=900)
    assert figure.stat().st_size > 10_000
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    waits = {(row[0], row[1]): row for row in rows if len(row) == 9}
    assert waits["| 1F1B, 2 stages per rank", "8"][2:5] == ["0.375", "0.188", "0.188"]
    assert waits["| zero bubble", "8"][4] == "0.125"
    assert waits["| 1F1B", "2"][2:5] == ["1.500"] * 3
    flops = {row[0]: row[6] for row in rows if len(row) == 11}
    assert len(flops) == 5
    assert len({value for name, value in flops.items() if name != "| schedule"}) == 1, "no schedule computes more"
