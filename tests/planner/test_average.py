"""Cost of a moving average of the weights: one number for each parameter that a rank owns, and nothing to send."""

from dataclasses import replace

import pytest

from crosscut.config import Layout, OptimizerConfig, RunConfig, TrainingConfig
from crosscut.planner import forecast_memory, step_time, step_traffic
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.planner.parameters import parameters_per_rank
from crosscut.planner.products import Speed
from tests.planner.test_muon import MODEL, MUON

H100 = KNOWN_HARDWARE["h100-sxm"]
LAYOUTS = (Layout(), Layout(tensor=2), Layout(tensor=2, data=2, sharding="zero3"))


def runs(layout: Layout, optimizer: OptimizerConfig = MUON, **training: object) -> tuple[RunConfig, RunConfig]:
    """A run with an average, and the same run without one."""
    settings = TrainingConfig(**{"batch_size": 8, "sequence_length": 32, "precision": "float32", **training})
    plain = RunConfig(model=MODEL, layout=layout, training=settings, optimizer=optimizer)
    return replace(plain, optimizer=replace(optimizer, ema_decay=0.999)), plain


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("precision", "num_bytes"), [("bfloat16", 4), ("float64", 8)])
def test_a_rank_holds_the_average_of_its_own_parameters(layout: Layout, precision: str, num_bytes: int) -> None:
    for device in ("cpu", "cuda"):
        averaged, plain = (forecast_memory(run, device=device) for run in runs(layout, precision=precision))
        own = parameters_per_rank(MODEL, layout) // layout.shard_size
        assert averaged.optimizer - plain.optimizer == num_bytes * own
        assert replace(averaged, optimizer=plain.optimizer) == plain


def test_moments_in_host_memory_leave_the_average_on_the_device() -> None:
    averaged, plain = (forecast_memory(run) for run in runs(Layout(), offload=("optimizer",)))
    assert plain.optimizer == 0
    assert averaged.optimizer == 4 * parameters_per_rank(MODEL, Layout())


def test_a_step_takes_longer_by_two_reads_and_a_write_and_sends_nothing_more() -> None:
    layout = Layout(tensor=2, data=2, sharding="zero3")
    averaged, plain = runs(layout)
    assert step_traffic(averaged) == step_traffic(plain)
    slower, faster = (step_time(run, H100) for run in (averaged, plain))
    own = parameters_per_rank(MODEL, layout) / layout.shard_size
    expected = Speed(H100, "float32", ranks=layout.world_size).passes(3 * 4 * own)
    assert slower.optimizer - faster.optimizer == pytest.approx(expected)
    assert slower.total - faster.total == pytest.approx(expected)
