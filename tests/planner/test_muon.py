"""Cost of Muon, by hand for one layer and a layout, and none of it without Muon."""

from dataclasses import replace
from typing import Any

import pytest

from crosscut.config import Layout, ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from crosscut.planner import Candidate, forecast_memory, hardware_flops_per_rank, step_time, step_traffic
from crosscut.planner.hardware import KNOWN_HARDWARE

H100 = KNOWN_HARDWARE["h100-sxm"]
ADAMW = OptimizerConfig()
MUON = OptimizerConfig(matrices="muon", matrix_learning_rate=0.02)
H, INNER, LAYERS = 64, 256, 3
MODEL = ModelConfig(num_layers=LAYERS, hidden_size=H, num_heads=4, vocab_size=300, max_sequence_length=32, dropout=0.0)


def run_of(optimizer: OptimizerConfig = MUON, layout: Layout | None = None, **training: Any) -> RunConfig:
    settings = {"batch_size": 8, "sequence_length": 32, "precision": "float32", **training}
    layout = layout or Layout()
    return RunConfig(model=MODEL, layout=layout, training=TrainingConfig(**settings), optimizer=optimizer)


def test_ranks_orthogonalize_the_matrices_in_turns() -> None:
    """Query, key, value and output are square; the two matrices of the MLP have 64 and 256 rows or columns. Each of
    them is in all three layers: two ranks need two turns, and more ranks than layers need one turn.
    """
    square = 2 * 3 * H**3
    wide = 2 * (2 * H * INNER * H + H**3)
    for layout, turns in (
        (Layout(), LAYERS),
        (Layout(tensor=2), 2),
        (Layout(data=2), LAYERS),
        (Layout(data=2, sharding="zero2"), 2),
        (Layout(tensor=2, data=4, sharding="zero3"), 1),
    ):
        with_muon, without = (hardware_flops_per_rank(run_of(optimizer, layout)) for optimizer in (MUON, ADAMW))
        assert with_muon - without == turns * 5 * (4 * square + 2 * wide), str(layout)


def test_matrices_have_one_moment() -> None:
    matrices = LAYERS * (4 * H * H + 2 * H * INNER)
    for layout, shares in ((Layout(), 1), (Layout(tensor=2, data=2, sharding="zero2"), 4)):
        with_muon, without = (forecast_memory(run_of(optimizer, layout), device="cpu") for optimizer in (MUON, ADAMW))
        assert without.optimizer - with_muon.optimizer == 4 * matrices // shares


@pytest.mark.parametrize(("precision", "num_bytes"), [("float32", 4), ("bfloat16", 2), ("float16", 4), ("float64", 8)])
def test_updates_are_exchanged_over_shards_and_over_tensor_ranks(precision: str, num_bytes: int) -> None:
    """Four ranks share three equal parameters: one turn, with as many elements as for four parameters."""
    layout = Layout(tensor=2, data=4, sharding="zero3", shard_group=2)
    found = step_traffic(run_of(layout=layout, precision=precision))
    assert {c.operation for c in found if c.purpose.startswith("updates")} == {"all_to_all"}
    sent = {
        purpose: sorted((c.axis, c.elements, c.count, c.element_bytes) for c in found if c.purpose == purpose)
        for purpose in ("updates", "updates of shards")
    }
    sizes = sorted([H * H, H * H, 2 * H * H, H * INNER, H * INNER])  # query, output, keys and values, and the MLP
    # A data rank has quarters of four parameters, and a tensor rank has halves of two: both as many as a whole one.
    assert sent["updates"] == [("tensor", size, 2, num_bytes) for size in sizes]
    assert sent["updates of shards"] == [("shard", size, 2, num_bytes) for size in sizes]


def test_the_step_takes_longer_by_the_products() -> None:
    fast = replace(H100, products_attained=1.0, memory_bandwidth=1e30, multiprocessors=0, start=0.0)
    ideal = replace(fast, measured={})
    with_muon, without = (step_time(run_of(optimizer), ideal) for optimizer in (MUON, ADAMW))
    extra = hardware_flops_per_rank(run_of()) - hardware_flops_per_rank(run_of(ADAMW))
    assert with_muon.optimizer - without.optimizer == pytest.approx(extra / ideal.flops["float32"])
    assert with_muon.products == without.products


def test_without_muon_nothing_is_sent_for_it() -> None:
    layout = Layout(tensor=2, data=2, sharding="zero3")
    assert not [c for c in step_traffic(run_of(ADAMW, layout)) if c.purpose.startswith("updates")]
    run = run_of(layout=layout)
    assert step_traffic(Candidate(run.model, run.layout, run.training, run.optimizer)) == step_traffic(run)
