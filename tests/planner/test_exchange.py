from dataclasses import replace

import pytest

from crosscut.config import PRESETS, Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.planner import step_traffic
from crosscut.planner.exchange import ring_seconds
from crosscut.planner.hardware import KNOWN_HARDWARE, MeasuredMessage
from crosscut.planner.time import step_time

DGX = KNOWN_HARDWARE["v100-32gb-dgx2h"]
assert DGX.network is not None


def run_of(layout: Layout, *, dropout: float = 0.0, micro: int = 1) -> RunConfig:
    model = ModelConfig(**{**PRESETS["megatron-8.3b"], "dropout": dropout})
    training = TrainingConfig(batch_size=8 * layout.data, micro_batch_size=micro, precision="float16", device="cuda")
    return RunConfig(model=model, layout=layout, training=training)


def ring(layout: Layout, purpose: str) -> tuple[str, float, float]:
    run = run_of(layout)
    found = next(c for c in step_traffic(run) if c.purpose == purpose)
    return *ring_seconds(found, run, DGX), found.wire_bytes / found.count


def test_tensor_ranks_of_a_node_send_through_its_own_links() -> None:
    where, seconds, sent = ring(Layout(tensor=8), "attention output")
    assert where == "node"
    assert seconds == pytest.approx(14 * DGX.node.latency + sent / DGX.node.rate)


def test_data_ranks_on_several_nodes_have_as_many_adapters_as_ranks_in_a_node() -> None:
    assert DGX.network is not None
    where, seconds, sent = ring(Layout(tensor=8, data=64), "gradients")
    assert where == "network"
    assert seconds == pytest.approx(126 * DGX.network.latency + sent / (2 * DGX.network.rate))


def test_tensor_ranks_over_several_nodes_have_all_adapters() -> None:
    assert DGX.network is not None
    where, seconds, sent = ring(Layout(tensor=32), "attention output")
    assert where == "network"
    assert seconds == pytest.approx(62 * DGX.network.latency + sent / (16 * DGX.network.rate))


def test_an_operation_that_was_measured_takes_what_was_found() -> None:
    split = run_of(Layout(tensor=8, sequence_parallel=True))
    found = {c.operation: c for c in step_traffic(split) if c.axis == "tensor" and c.phase == "forward"}
    measured = {"all_gather": MeasuredMessage(latency=1e-3, rates=((1.0, 1e9),))}
    hardware = replace(DGX, node=replace(DGX.node, measured=measured))
    gather = found["all_gather"]
    assert ring_seconds(gather, split, hardware)[1] == pytest.approx(7e-3 + gather.wire_bytes / gather.count / 1e9)
    scatter = found["reduce_scatter"]
    assert ring_seconds(scatter, split, hardware) == ring_seconds(scatter, split, DGX)


def test_between_two_measured_messages_the_rate_is_on_a_line_of_logarithms() -> None:
    message = MeasuredMessage(latency=0.0, rates=((1e6, 4e9), (1e8, 1e9)))
    assert [message.rate(sent) for sent in (1.0, 1e6, 1e7, 1e8, 1e12)] == pytest.approx([4e9, 4e9, 2e9, 1e9, 1e9])


def test_groups_of_a_node_share_inside_and_their_copies_across() -> None:
    layout = Layout(tensor=4, data=8, sharding="zero3", shard_group=4)
    assert ring(layout, "layer weights")[0] == "node"
    assert ring(layout, "layer gradients of all copies")[0] == "network"


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sharding", ["none", "zero2", "zero3"])
def test_no_more_is_waited_for_than_is_sent(sequence_parallel: bool, sharding: str) -> None:
    layout = Layout(tensor=8, data=64, sequence_parallel=sequence_parallel, sharding=sharding)
    time = step_time(run_of(layout), DGX)
    for entry in time.exchanges:
        assert 0 <= entry.exposed <= entry.seconds * (1 + 1e-9)
    assert time.exposed == pytest.approx(sum(entry.exposed for entry in time.exchanges))
    assert 0 < time.exposed < sum(entry.seconds for entry in time.exchanges)


def test_what_runs_beside_a_product_is_hidden_on_a_fast_link_and_seen_on_a_slow_one() -> None:
    run = run_of(Layout(tensor=8))
    slow = replace(DGX, node=replace(DGX.node, bandwidth=DGX.node.bandwidth / 100))

    def waited(hardware, purpose: str) -> float:
        return sum(e.exposed for e in step_time(run, hardware).exchanges if e.collective.purpose == purpose)

    assert waited(DGX, "attention output") > 0  # g: nothing to do before it is there
    assert waited(replace(DGX, node=replace(DGX.node, bandwidth=1e15, latency=0.0)), "mlp input") == 0.0
    assert waited(slow, "mlp input") > waited(slow, "attention output") / 2


def test_symmetric_memory_hides_a_split_sequences_messages() -> None:
    plain = step_time(run_of(Layout(tensor=8, sequence_parallel=True)), DGX)
    pieces = step_time(run_of(Layout(tensor=8, sequence_parallel=True, symmetric_memory=True)), DGX)
    assert pieces.exposed < plain.exposed
    assert pieces.compute == plain.compute


def test_gradients_hide_behind_the_backward_pass_of_the_last_micro_batch() -> None:
    whole, parts = (step_time(run_of(Layout(tensor=8, data=64), micro=micro), DGX) for micro in (8, 1))

    def waited(time) -> float:
        return sum(e.exposed for e in time.exchanges if e.collective.purpose == "gradients")

    assert waited(whole) < waited(parts)
