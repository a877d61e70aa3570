"""Time of a step of pipeline stages."""

from dataclasses import replace

import pytest

from crosscut.config import PRESETS, Layout, ModelConfig, RunConfig, TrainingConfig, ZeroStage
from crosscut.config.layout import PipelineSchedule
from crosscut.planner.hardware import KNOWN_HARDWARE, Hardware
from crosscut.planner.messages.exchange import Exchange
from crosscut.planner.time import StepTime, bubble_share, step_time

H100 = KNOWN_HARDWARE["h100-sxm"]
BATCH = 8


def run_of(layout: Layout, *, vocab_size: int = 128, **training: object) -> RunConfig:
    """24 layers, and a vocabulary whose products take a thousandth of the time of six layers."""
    model = ModelConfig(**{**PRESETS["megatron-1.2b"], "num_layers": 24, "dropout": 0.0, "vocab_size": vocab_size})
    settings = {"batch_size": BATCH, "micro_batch_size": 1, "precision": "bfloat16", "device": "cuda", **training}
    return RunConfig(model=model, layout=layout, training=TrainingConfig(**settings))  # type: ignore[arg-type]


def only_products(hardware: Hardware = H100) -> Hardware:
    """Only matrix products take time; memory and messages take none."""
    free = replace(hardware.node, bandwidth=1e30, latency=0.0)
    return replace(hardware, memory_bandwidth=1e30, multiprocessors=0, start=0.0, node=free, network=None)


def exchange_of(time: StepTime, purpose: str) -> Exchange:
    return next(entry for entry in time.exchanges if entry.collective.purpose == purpose)


@pytest.mark.parametrize(
    "layout", [Layout(pipeline=2), Layout(pipeline=4), Layout(pipeline=4, stages_per_rank=2)], ids=str
)
def test_equal_stages_and_free_links_have_the_published_bubble(layout: Layout) -> None:
    time, whole = step_time(run_of(layout), only_products()), step_time(run_of(Layout()), only_products())
    share = bubble_share(layout.pipeline, BATCH, chunks=layout.stages_per_rank)
    assert time.bubble == pytest.approx(share * time.compute, rel=5e-3)
    assert time.total == pytest.approx((1 + share) * whole.total / layout.pipeline, rel=5e-3)


def test_weight_gradients_fill_the_bubble_of_zero_bubble() -> None:
    """The bubble is (P - 1) (f + b - w), where f + b - w is the forward product and both passes of attention."""
    plain, zero = (
        step_time(run_of(Layout(pipeline=4, schedule=schedule), compile="off"), only_products())
        for schedule in (PipelineSchedule.ONE_FORWARD_ONE_BACKWARD, PipelineSchedule.ZERO_BUBBLE)
    )
    assert zero.compute == pytest.approx(plain.compute)
    assert zero.bubble == pytest.approx(3 / BATCH * (zero.products / 3 + zero.attention), rel=5e-3)
    assert zero.bubble < 0.6 * plain.bubble


def test_a_stage_with_more_layers_waits_only_for_the_first_and_the_last_pass_of_the_other() -> None:
    time = step_time(run_of(Layout(pipeline=2, stages=(2, 22))), only_products())
    assert time.bubble == pytest.approx(2 / 22 * time.compute / BATCH, rel=5e-3)
    first = step_time(run_of(Layout(pipeline=2, stages=(22, 2))), only_products())
    assert first.compute == pytest.approx(time.compute, rel=5e-3)
    assert first.bubble == pytest.approx(0.0, abs=1e-9), "the other stage is done before the first one needs it"


def test_the_loss_makes_the_last_stage_slow_and_the_first_one_wait() -> None:
    layout = Layout(pipeline=4, stages=(6, 6, 6, 6))
    few, many = (step_time(run_of(layout, vocab_size=size), only_products()) for size in (128, 51_200))
    logits = 3 * 2 * BATCH * 1024 * 1536 * (51_200 - 128) / (H100.flops["bfloat16"] * H100.products_attained)
    assert many.products - few.products == pytest.approx(logits)
    assert many.bubble == pytest.approx(few.bubble, rel=5e-3), "the head fills no bubble"


@pytest.mark.parametrize("ranks_per_node", [2, 1])
def test_the_bubble_contains_the_messages_to_other_stages(ranks_per_node: int) -> None:
    """One micro-batch passes forward and back once."""
    run = run_of(Layout(pipeline=2), batch_size=1)
    free = only_products()
    slow = replace(free, node=H100.node, network=H100.network, ranks_per_node=ranks_per_node)
    link = H100.node if ranks_per_node == 2 else H100.network
    assert link is not None
    message = link.latency + 1024 * 1536 * 2 / link.rate
    found = step_time(run, slow)
    assert found.bubble - step_time(run, free).bubble == pytest.approx(2 * message, rel=1e-6)
    assert exchange_of(found, "gradients of hidden states").exposed == 0.0


@pytest.mark.parametrize(("ranks_per_node", "where"), [(4, "node"), (2, "network")])
def test_both_ends_of_a_pipeline_share_a_node_if_all_stages_do(ranks_per_node: int, where: str) -> None:
    run = run_of(Layout(pipeline=4, stages=(6, 6, 6, 6)), vocab_size=51_200)
    found = exchange_of(step_time(run, replace(H100, ranks_per_node=ranks_per_node)), "gradient of the tied embedding")
    assert (found.where, found.exposed) == (where, found.seconds)


def test_gradients_of_data_ranks_overlap_only_with_a_backward_pass_that_completes_them() -> None:
    layouts = Layout(), Layout(stages_per_rank=2, pipeline=2), Layout(schedule=PipelineSchedule.ZERO_BUBBLE, pipeline=2)
    overlapping, interleaved, delayed = (
        exchange_of(step_time(run_of(replace(layout, data=2, pipeline=2), compile="off"), H100), "gradients")
        for layout in layouts
    )
    assert overlapping.exposed < overlapping.seconds / 2
    assert interleaved.exposed == interleaved.seconds
    assert delayed.exposed == delayed.seconds


def test_sharded_gradients_of_stages_are_summed_after_all_passes() -> None:
    time = step_time(run_of(Layout(pipeline=2, data=2, sharding=ZeroStage.ZERO3)), H100)
    scattered = [entry for entry in time.exchanges if entry.collective.operation == "reduce_scatter"]
    assert scattered
    assert all(entry.exposed == entry.seconds for entry in scattered)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_two_stages_take_a_single_micro_batch_as_long_as_one_rank_does(recompute: str) -> None:
    """The passes of all layers, of the embedding and of the loss follow each other, on one rank or on two."""
    hardware = replace(
        only_products(), memory_bandwidth=H100.memory_bandwidth, start=H100.start, layer_host=(2e-3, 3e-3)
    )
    whole, staged = (
        step_time(run_of(layout, vocab_size=51_200, batch_size=1, recompute=recompute), hardware)
        for layout in (Layout(), Layout(pipeline=2, stages=(10, 14)))
    )
    passes = whole.total - whole.optimizer
    assert staged.total - staged.optimizer == pytest.approx(passes, rel=1e-3)
    assert 0.4 * passes < staged.bubble < 0.5 * passes, "the rank with fewer layers has less work"
