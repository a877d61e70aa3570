from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from crosscut.architecture import Operation
from crosscut.config import PRESETS, Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.planner import Candidate, step_traffic
from crosscut.planner.hardware import KNOWN_HARDWARE, Hardware, MeasuredMessage
from crosscut.planner.messages.collective import Collective
from crosscut.planner.messages.exchange import Exchange, collective_seconds, fewest_in_a_node
from crosscut.planner.program import Program
from crosscut.planner.time import step_time

DGX, H100 = KNOWN_HARDWARE["v100-32gb-dgx2h"], KNOWN_HARDWARE["h100-sxm"]
assert DGX.network is not None
assert H100.network is not None

MODEL = ModelConfig(**PRESETS["megatron-8.3b"])
ALL_REDUCE = {"operation": "all_reduce", "phase": "step", "purpose": "numbers", "count": 1}
ALL_REDUCE |= {"elements": 1000, "element_bytes": 4}


def run_of(layout: Layout, *, dropout: float = 0.0, micro: int = 1) -> RunConfig:
    model = ModelConfig(**{**PRESETS["megatron-8.3b"], "dropout": dropout})
    training = TrainingConfig(batch_size=8 * layout.data, micro_batch_size=micro, precision="float16", device="cuda")
    return RunConfig(model=model, layout=layout, training=training)


def ring(layout: Layout, purpose: str) -> tuple[str, float, float]:
    run = run_of(layout)
    found = next(c for c in step_traffic(run) if c.purpose == purpose)
    return *collective_seconds(found, run, DGX), found.wire_bytes / found.count


@pytest.mark.parametrize(
    ("layout", "purpose", "link", "steps", "adapters"),
    [
        (Layout(tensor=8), "attention output", "node", 14, 1),
        (Layout(tensor=8, data=64), "gradients", "network", 126, 2),
        (Layout(tensor=32), "attention output", "network", 62, 16),
    ],
    ids=str,
)
def test_ranks_of_a_node_send_through_its_links_and_others_through_an_adapter_for_each_rank_in_a_node(
    layout: Layout, purpose: str, link: str, steps: int, adapters: int
) -> None:
    where, seconds, sent = ring(layout, purpose)
    assert where == link
    used = getattr(DGX, link)
    assert seconds == pytest.approx(steps * used.latency + sent / (adapters * used.rate))


SUMMING = replace(H100, network=replace(H100.network, reducing=0.8, reducing_latency=31e-6))
"""H100s whose InfiniBand switches sum as well, with as high a rate as that of other messages."""


def all_reduce_seconds(layout: Layout, hardware: Hardware, megabytes: float = 64.0) -> tuple[str, float]:
    """Link and seconds of one all-reduce of this size over the tensor ranks."""
    values = {**ALL_REDUCE, "axis": "tensor", "ranks": layout.tensor, "elements": int(megabytes * 250_000)}
    return collective_seconds(Collective(**values), Candidate(MODEL, layout, TrainingConfig()), hardware)


def test_switches_that_sum_take_a_tensor_once() -> None:
    """NCCL's maintainers: 275 GB/s of a tensor over 8 H100s, where a ring attains 370 / 1.75 = 211 GB/s."""
    layout, large = Layout(tensor=8), 4000.0
    where, seconds = all_reduce_seconds(layout, H100, large)
    assert where == "node"
    assert large * 1e6 / seconds == pytest.approx(275e9, rel=0.01)
    ring_only = replace(H100, node=replace(H100.node, reducing=0.0))
    assert large * 1e6 / all_reduce_seconds(layout, ring_only, large)[1] == pytest.approx(370e9 / 1.75, rel=0.03)


@pytest.mark.parametrize(("tensor", "megabytes"), [(2, 4000.0), (4, 0.001)])
def test_a_ring_is_chosen_where_it_is_faster(tensor: int, megabytes: float) -> None:
    """Over two GPUs, a ring sends the tensor once as well; a short message suffers from the latency of the switches."""
    ring_only = replace(H100, node=replace(H100.node, reducing=0.0))
    layout = Layout(tensor=tensor)
    assert all_reduce_seconds(layout, H100, megabytes) == all_reduce_seconds(layout, ring_only, megabytes)


def test_switches_between_nodes_halve_what_an_adapter_sends() -> None:
    """Of one rank per node, whose adapter is all that limits it."""
    one_each = replace(SUMMING, ranks_per_node=1)
    around, reduced = (
        all_reduce_seconds(Layout(tensor=16), hardware, 4000.0)
        for hardware in (replace(one_each, network=replace(one_each.network, reducing=0.0)), one_each)
    )
    assert around[0] == reduced[0] == "network"
    assert around[1] / reduced[1] == pytest.approx(2 * 15 / 16, rel=0.01)


def test_an_all_reduce_over_more_nodes_is_never_faster() -> None:
    fast = replace(SUMMING, network=replace(SUMMING.network, reducing=1.0))
    seconds = [all_reduce_seconds(Layout(tensor=tensor), fast, 4000.0)[1] for tensor in (8, 16, 64)]
    assert seconds == sorted(seconds)


def test_only_all_reduces_are_summed_in_the_switches() -> None:
    layout = Layout(tensor=8, sequence_parallel=True)
    run = run_of(layout)
    rings = replace(H100, node=replace(H100.node, reducing=0.0))
    for found in step_traffic(run):
        same = collective_seconds(found, run, H100) == collective_seconds(found, run, rings)
        assert same or found.operation == Operation.ALL_REDUCE
    plain, split = (
        step_time(run_of(each), H100).exposed - step_time(run_of(each), rings).exposed
        for each in (Layout(tensor=8), layout)
    )
    assert plain < 0.0
    assert abs(split) < -plain / 10


@pytest.mark.parametrize("key", ["v100-32gb-dgx2h", "a100-80gb", "h100-pcie", "laptop"])
def test_devices_whose_switches_cannot_sum_do_not(key: str) -> None:
    hardware = KNOWN_HARDWARE[key]
    assert hardware.node.reducing == 0.0
    assert hardware.network is None or hardware.network.reducing == 0.0


def test_an_operation_that_was_measured_takes_what_was_found() -> None:
    split = run_of(Layout(tensor=8, sequence_parallel=True))
    found = {c.operation: c for c in step_traffic(split) if c.axis == "tensor" and c.phase == "forward"}
    measured = {"all_gather": MeasuredMessage(latency=1e-3, rates=((1.0, 1e9),))}
    hardware = replace(DGX, node=replace(DGX.node, measured=measured))
    gather = found["all_gather"]
    assert collective_seconds(gather, split, hardware)[1] == pytest.approx(
        7e-3 + gather.wire_bytes / gather.count / 1e9
    )
    scatter = found["reduce_scatter"]
    assert collective_seconds(scatter, split, hardware) == collective_seconds(scatter, split, DGX)


def test_a_message_goes_at_the_rate_of_its_size_and_gradients_at_a_buckets() -> None:
    """On a link that sends 4 GB/s up to 1 MB and 1 GB/s from 100 MB on, with a latency of a millisecond."""
    message = MeasuredMessage(latency=1e-3, rates=((1e6, 4e9), (1e8, 1e9)))
    hardware = replace(DGX, node=replace(DGX.node, measured={"all_reduce": message}))
    run = run_of(Layout(tensor=8, data=2))
    found = {c.purpose: c for c in step_traffic(run)}
    activations = found["attention output"]
    sent = 2 * 7 / 8 * 1024 * 3072 * 2
    assert collective_seconds(activations, run, hardware)[1] == pytest.approx(14e-3 + sent / message.rate(sent))
    assert 1.5e9 < message.rate(sent) < 3.5e9
    gradients = found["gradients"]
    buckets = 1 + gradients.elements * 4 // (32 << 20)
    seconds = collective_seconds(gradients, run, hardware, Program(compiled=True, bucket_bytes=32 << 20))[1]
    own = gradients.elements * 4  # of two ranks, each sends as much as the tensor has
    assert seconds == pytest.approx(buckets * 2e-3 + own / message.rate(own / buckets))
    assert message.rate(own / buckets) > 1.3 * message.rate(own)
    entry = next(e for e in step_time(run, hardware).exchanges if e.collective == gradients)
    assert (entry.where, entry.seconds) == ("node", seconds)


def groups_over_nodes(stride: int, size: int, per_node: int, ranks: int) -> list[list[int]]:
    """Number of ranks of each group in each node, counted from lists of the groups' ranks."""
    firsts = [block + offset for block in range(0, ranks, stride * size) for offset in range(stride)]
    groups = [[first + i * stride for i in range(size)] for first in firsts]
    assert sorted(rank for group in groups for rank in group) == list(range(ranks))
    return [[sum(rank // per_node == node for rank in group) for node in range(ranks)] for group in groups]


@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 6, 8])
def test_the_group_with_the_fewest_ranks_in_a_node_decides(per_node: int) -> None:
    for stride, size, blocks in product((1, 2, 3, 4, 5, 8), (2, 3, 4, 5, 8), (1, 2, 3, 5)):
        ranks = stride * size * blocks
        expected = min(n for group in groups_over_nodes(stride, size, per_node, ranks) for n in group if n)
        assert fewest_in_a_node(stride, size, per_node=per_node, ranks=ranks) == expected, (stride, size, ranks)


def test_groups_that_lie_over_two_nodes_are_not_inside() -> None:
    """On nodes of 8: ranks 5 to 9 of tensor 5; ranks 6 and 9 of shard groups of two at tensor 3."""
    eight = replace(DGX, ranks_per_node=8)
    assert eight.network is not None
    five = Collective(**{**ALL_REDUCE, "axis": "tensor", "ranks": 5})
    where, seconds = collective_seconds(five, Candidate(MODEL, Layout(tensor=5, data=2), TrainingConfig()), eight)
    sent = 2 * 4 / 5 * 1000 * 4
    assert where == "network"
    assert seconds == pytest.approx(8 * eight.network.latency + sent / (2 * eight.network.rate))
    layout = Layout(tensor=3, data=4, sharding="zero3", shard_group=2)
    pair = Collective(**{**ALL_REDUCE, "axis": "shard", "ranks": 2})
    assert collective_seconds(pair, Candidate(MODEL, layout, TrainingConfig()), eight)[0] == "network"
    twelve = replace(DGX, ranks_per_node=12)
    assert collective_seconds(pair, Candidate(MODEL, layout, TrainingConfig()), twelve)[0] == "node"


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


def shifts_of(layout: Layout, length: int, program: Program | None = None) -> list[Exchange]:
    """Shifts of ring attention in a step of one sequence on H100s."""
    model = ModelConfig(**{**PRESETS["llama3-8b"], "max_sequence_length": length})
    training = TrainingConfig(batch_size=1, sequence_length=length, precision="bfloat16", device="cuda")
    time = step_time(RunConfig(model=model, layout=layout, training=training), H100, program=program)
    return [entry for entry in time.exchanges if entry.collective.operation == Operation.SHIFT]


@pytest.mark.parametrize("length", [4096, 131_072])
def test_shifts_of_a_ring_arrive_during_attention_if_the_sequence_is_long(length: int) -> None:
    shifts = shifts_of(Layout(context=8, context_attention="ring"), length)
    assert [found.collective.count for found in shifts] == [7 * 32, 7 * 32, 7 * 32, 32]
    keys, keys_again, sums, last = (found.exposed / found.seconds for found in shifts)
    assert last == 1.0  # nothing is left to compute when the last gradients travel
    if length == 131_072:
        assert keys == keys_again == sums == 0.0
    else:
        assert 0.0 < keys < 1.0
        assert 0.0 < sums < 1.0


def test_gradients_of_a_stage_hide_behind_the_passes_of_the_other_stages_of_its_rank_if_the_program_says_so() -> None:
    layout = Layout(data=8, pipeline=4, stages_per_rank=3)
    model = ModelConfig(**{**PRESETS["megatron-8.3b"], "num_layers": 72, "dropout": 0.0})
    training = TrainingConfig(batch_size=64, micro_batch_size=1, precision="bfloat16", device="cuda")
    run = RunConfig(model=model, layout=layout, training=training)
    late, early = (
        next(e for e in step_time(run, H100, program=program).exchanges if e.collective.purpose == "gradients")
        for program in (Program(compiled=True), Program(compiled=True, overlaps_stages=True))
    )
    assert late.exposed == late.seconds
    assert early.seconds == late.seconds
    assert early.exposed < 0.3 * late.exposed


def test_a_program_may_repeat_keys_for_each_query_head_and_wait_for_the_messages_of_a_ring() -> None:
    shifts = partial(shifts_of, Layout(tensor=2, context=4, context_attention="ring"), 8192)
    plain, repeated = shifts(Program(compiled=True)), shifts(Program(compiled=True, repeats_keys=True))
    waiting = shifts(Program(compiled=True, overlaps_context=False))
    for one, more, waited in zip(plain, repeated, waiting, strict=True):
        assert more.collective.elements == 4 * one.collective.elements  # 32 heads of queries, 8 of keys
        assert waited.exposed == waited.seconds == one.seconds >= one.exposed


def test_a_program_may_sum_gradients_in_the_type_of_the_products() -> None:
    run = run_of(Layout(tensor=8, data=64))
    wide, narrow = (
        next(e for e in step_time(run, DGX, program=program).exchanges if e.collective.purpose == "gradients")
        for program in (Program(compiled=True), Program(compiled=True, narrow_gradients=True))
    )
    assert (wide.collective.element_bytes, narrow.collective.element_bytes) == (4, 2)
    assert narrow.seconds == pytest.approx(wide.seconds / 2, rel=0.15)  # and half as many buckets
