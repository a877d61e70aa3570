"""A recorded step has every pass of the schedule, on one clock for all ranks."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from crosscut.architecture.pipeline import Durations, Pass, Timed, Timeline, one_forward_one_backward, simulate
from crosscut.config import RunConfig
from crosscut.planner.stages import schedule_of_run
from crosscut.training.profiling.passes import PassRecorder, PipelineStep, RankPasses, pipeline_steps
from tests.training.jobs import parts
from tests.training.pipeline.jobs import LLAMA
from tests.training.pipeline.test_equality import FOUR, layout_of

LAYOUTS = [
    "pipeline=2 stages_per_rank=2",
    "pipeline=2 data=2 sharding=zero3 schedule=zero_bubble",
    "pipeline=4 schedule=zero_bubble",
    "pipeline=2 tensor=2",
]
ZERO_BUBBLE = ("layout.stages=[3,1]", "layout.pipeline=2", "layout.schedule=zero_bubble")


def record(run: RunConfig) -> tuple[list[RankPasses], dict[str, torch.Tensor]]:
    """Passes of this rank in two steps, and its weights after these steps."""
    trainer, batches = parts(run)
    recorder = PassRecorder(trainer.mesh)
    found = []
    for step in range(2):
        trainer.observer = recorder
        with recorder.step():
            trainer.step(step, batches.micro_batches(step))
        found.append(recorder.recorded())
    return found, {name: p.detach().full_tensor().clone() for name, p in trainer.model.named_parameters()}


def steps_of(run: RunConfig, found: list[Any]) -> list[list[PipelineStep]]:
    """Recorded steps of each pipeline, by step."""
    return [pipeline_steps(schedule_of_run(run), [of_rank[step] for of_rank, _ in found]) for step in range(2)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pass_of_every_rank_is_recorded_after_its_input_was_computed(ranks, run_with, layout):
    run = run_with(*FOUR, *layout_of(layout))
    size = run.layout.pipeline
    for pipelines in steps_of(run, ranks.run(run.layout.world_size, record, run)):
        assert len(pipelines) == run.layout.world_size // size
        for step in pipelines:  # `pipeline_steps` has compared the actions with the schedule
            assert len(step.timeline.ranks) == size
            require_order(step.timeline)
            for shares in step.shares():
                assert sum(shares) == pytest.approx(1.0)
                assert min(shares) >= 0.0
                assert shares.computing > 0.0


def require_order(timeline: Timeline) -> None:
    """Each pass of a rank starts after the pass before it, and after its input was computed on the other rank."""
    schedule = timeline.schedule
    sent = {schedule.sent(rank, timed.action): timed.end for rank, own in enumerate(timeline.ranks) for timed in own}
    for rank, own in enumerate(timeline.ranks):
        assert all(first.end <= second.start for first, second in pairwise(own))
        for timed in own:
            needed = schedule.received(rank, timed.action)
            assert needed is None or sent[needed] <= timed.start


def test_a_recorded_step_computes_the_same_weights_and_counts_each_deferred_gradient_once(ranks, run_with):
    run = run_with(*FOUR, *LLAMA, *ZERO_BUBBLE)
    recorded = ranks.run(2, record, run)
    matrices = 6  # query, key and value; the output of attention; the gate and both matrices of the MLP
    for (of_rank, _), num_layers in zip(recorded, (3, 1), strict=True):
        for step in of_rank:
            weights = [timed for timed in step.passes if timed.action.kind is Pass.WEIGHTS]
            assert [timed.weight_gradients for timed in weights] == [num_layers * matrices] * 4
            assert sum(timed.weight_gradients for timed in step.passes) == 4 * num_layers * matrices
            assert all(timed.duration > 0.0 for timed in weights)
    for (_, weights), plain in zip(recorded, ranks.run(2, plain_weights, run), strict=True):
        assert weights.keys() == plain.keys()
        assert all(torch.equal(weight, plain[name]) for name, weight in weights.items())


def plain_weights(run: RunConfig) -> dict[str, torch.Tensor]:
    trainer, batches = parts(run)
    for step in range(2):
        trainer.step(step, batches.micro_batches(step))
    return {name: p.detach().full_tensor().clone() for name, p in trainer.model.named_parameters()}


def passes_of(rank: int, timed: tuple[Timed, ...], *, host: str, began: float, late: float = 0.0) -> RankPasses:
    """Passes of a rank whose clock starts `late` after the step's first moment."""
    own = tuple(t._replace(start=t.start - late, end=t.end - late) for t in timed)
    return RankPasses((0,), rank, host, began + late, seconds=40.0, passes=own)


def test_ranks_on_one_machine_share_its_clock():
    """A rank that leaves the common start 2 seconds after the others has its passes moved by 2 seconds."""
    simulated = simulate(one_forward_one_backward(2, 4), Durations())
    gathered = [
        passes_of(rank, timed, host="one", began=100.0, late=2.0 * rank) for rank, timed in enumerate(simulated.ranks)
    ]
    (step,) = pipeline_steps(simulated.schedule, gathered[::-1])
    assert step.timeline.ranks == simulated.ranks
    assert step.seconds == (40.0, 42.0)


def test_clocks_of_different_machines_begin_together():
    simulated = simulate(one_forward_one_backward(2, 4), Durations())
    gathered = [
        passes_of(rank, timed, host=host, began=began)
        for rank, timed, host, began in zip((0, 1), simulated.ranks, ("one", "two"), (100.0, 7.0), strict=True)
    ]
    (step,) = pipeline_steps(simulated.schedule, gathered)
    assert step.timeline.ranks == simulated.ranks
    assert step.shares()[0] == pytest.approx((12 / 40, 3 / 40, 0.0, 25 / 40))
