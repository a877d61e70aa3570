"""Seconds that messages take, and the seconds that do not overlap with computation.

A ring of n ranks performs an all-gather or a reduce-scatter in n - 1 steps and an all-reduce in 2 (n - 1) steps. The
latency and the bandwidth of the slowest link in the ring determine the time. `traffic` gives the bytes:

    steps x latency + bytes that a rank sends / bandwidth

The ranks that communicate along one axis form a group. The ranks of a tensor group are adjacent. In a data group, the
distance between neighbouring ranks is the number of tensor ranks. A ring over several nodes enters and leaves each node
once. A ring with g ranks in a node uses the g network adapters of these ranks. The node's other adapters belong to
other rings, which send at the same time:

    bandwidth = min(bandwidth inside the node, g x bandwidth of one adapter)

All groups of an axis wait for the slowest group. If one group spans two nodes, all groups of its axis therefore count
as spanning nodes, and g is the smallest number of ranks that one group has in one node, over all groups and all nodes
that they use. Unsharded gradients are sent in buckets, and each bucket takes all the steps of a ring.

If the switches of the slowest link can sum (`Link.reducing`), an all-reduce sends its whole tensor only once, at a rate
of the switches' own. NCCL chooses the faster way, and so does the forecast:

    latency of the switches + bytes of the tensor / min(rate inside the node, g x rate of the switches)

The rate inside the node is that of an all-reduce of g ranks, around their ring or in the node's own switches.

In an all-to-all, each of n ranks sends one part to each of the others. If g of them are in its node, (g - 1) / n of the
tensor go through the links inside the node and, at the same time, (n - g) / n through the rank's own adapter:

    max((g - 1) / n x bytes / bandwidth inside the node, (n - g) / n x bytes / bandwidth of one adapter)

If a message overlaps with a product, the step waits only for the time by which the message takes longer than the
product (docs/speed.md). The stages of a pipeline send to their neighbours. If one pipeline spans two nodes, every
message between stages counts as a message between nodes. A rank sends this message through its own adapter.
"""

from dataclasses import replace
from functools import lru_cache
from math import ceil, inf, lcm
from typing import NamedTuple

from crosscut.architecture import Operation, Overlap, describe, flat, lower
from crosscut.architecture.messages import Phase
from crosscut.architecture.steps import weight_gradients
from crosscut.config import Layout
from crosscut.planner.candidate import Planned, target_of
from crosscut.planner.hardware import Hardware, Where
from crosscut.planner.messages.collective import Collective
from crosscut.planner.products import Speed
from crosscut.planner.program import Program
from crosscut.planner.stages import separates_weights


class Exchange(NamedTuple):
    """Time that the operations of one `Collective` take in one training step."""

    collective: Collective
    where: Where
    seconds: float
    """Seconds of all `collective.count` operations together."""
    exposed: float
    """Part of `seconds` that overlaps with no computation. The step waits for this part."""


def collective_seconds(
    collective: Collective, run: Planned, hardware: Hardware, program: Program | None = None
) -> tuple[Where, float]:
    """Return the slowest link that a collective uses, and the seconds of a single collective.

    Gradients are sent in the buckets of `program`; without a program, as one message.
    """
    line = run.line(collective.axis)
    where: Where = "node"
    link, rate = hardware.node, hardware.node.rate
    is_pair = collective.operation == Operation.SEND or collective.axis == "ends"
    fewest = fewest_in_a_node(line.stride, line.size, per_node=hardware.ranks_per_node, ranks=run.layout.world_size)
    if fewest < line.size and hardware.network is not None:
        where, link = "network", hardware.network
        rate = min(rate, (1 if is_pair else fewest) * link.rate)
    messages = _num_messages(collective, program.bucket_bytes if program else None)
    steps = messages * collective.steps
    sent = collective.wire_bytes / collective.count
    if found := link.measured.get(collective.operation):
        return where, steps * found.latency + sent / found.rate(sent / messages)
    if collective.operation == Operation.ALL_TO_ALL:
        return where, steps * link.latency + _all_to_all_seconds(collective, fewest, hardware, program)
    around = steps * link.latency + sent / rate
    if collective.operation != Operation.ALL_REDUCE or not link.reducing:
        return where, around
    reduced = link.reducing_rate
    if where == "network":
        reduced = min(_summed_in_node(hardware, fewest), fewest * reduced)
    tensor = collective.elements * collective.element_bytes
    return where, min(around, messages * link.reducing_latency + tensor / reduced)


def _summed_in_node(hardware: Hardware, ranks: int) -> float:
    """Bytes per second of a tensor that `ranks` ranks of a node sum: around a ring, or in the node's switches."""
    node = hardware.node
    return max(node.rate * ranks / (2 * (ranks - 1)), node.reducing_rate) if ranks > 1 else inf


def _all_to_all_seconds(collective: Collective, in_node: int, hardware: Hardware, program: Program | None) -> float:
    """Seconds in which a rank sends its parts in an all-to-all, without latencies. `in_node` ranks are in its node."""
    part = collective.elements * collective.element_bytes / collective.ranks
    inside, outside = (in_node - 1) * part, (collective.ranks - in_node) * part
    if collective.axis == "expert" and program:
        inside, outside = inside * program.sent_rows[0], outside * program.sent_rows[1]
    between = outside / hardware.network.rate if hardware.network else 0.0
    return max(inside / hardware.node.rate, between)


@lru_cache(maxsize=4096)
def fewest_in_a_node(stride: int, size: int, *, per_node: int, ranks: int) -> int:
    """Smallest number of ranks that one group has in one node, over all groups and all nodes that they use.

    `ranks` ranks form groups of `size` ranks. The ranks of a group are `stride` apart, and a node has `per_node` ranks.
    If every group fits into one node, the result is `size`. Every group fits if there is only one node, or if each node
    holds whole blocks of `stride * size` ranks. A node boundary inside a block splits at least one group.
    """
    block = stride * size
    if ranks <= per_node or per_node % block == 0:
        return size
    if stride >= per_node:
        return 1
    period = min(ranks, lcm(block, per_node))
    pieces = (_shortest_piece(begin, min(begin + block, period), per_node) for begin in range(0, period, block))
    return max(1, min(pieces) // stride)


def _shortest_piece(begin: int, end: int, length: int) -> int:
    """Length of the shortest piece of [begin, end) that multiples of `length` cut out."""
    first = begin // length * length + length
    return end - begin if first >= end else min(first - begin, end % length or length)


def _num_messages(collective: Collective, bucket_bytes: int | None) -> int:
    """Number of messages of one collective. For gradients, this is the number of buckets; otherwise 1."""
    if collective.overlap is not Overlap.BUCKETS or bucket_bytes is None:
        return 1
    return ceil(collective.elements * collective.element_bytes / bucket_bytes)


class Beside(NamedTuple):
    """Computation that can overlap with messages, in seconds per micro-batch."""

    speed: Speed
    """Forecaster of the seconds of matrix products."""
    layer_forward: float
    """Mean seconds of one layer's forward pass."""
    layer_backward: float
    layer_attention: tuple[float, float]
    """Mean seconds of attention in one layer, in the forward and in the backward pass."""
    forward: float
    """Seconds of the forward pass of all layers."""
    backward: float
    """Seconds of the backward pass of all layers."""


def exchange(collective: Collective, run: Planned, program: Program, beside: Beside) -> Exchange:
    """Time of one collective of `step_traffic`, and the part of this time that does not overlap with the computation in
    `beside`. For messages between the stages of a pipeline, this part is 0, because the bubble of `step_time` already
    contains it.
    """
    if program.repeats_keys and collective.axis == "context":
        collective = replace(collective, elements=collective.elements * _repeats_of_keys(run))
    if program.narrow_gradients and collective.overlap is Overlap.BUCKETS:
        collective = replace(collective, element_bytes=run.training.numbers.compute_bytes)
    where, each = collective_seconds(collective, run, beside.speed.hardware, program)
    axis, overlap, count = collective.axis, collective.overlap, collective.count
    seconds = exposed = count * each
    if collective.operation == Operation.SEND:
        exposed = 0.0
    elif overlap is Overlap.BLOCK and program.overlaps_context:
        exposed = count * _shift_waits(collective, each, beside)
    elif axis == "tensor" and program.overlaps_tensor:
        exposed = count * _tensor_waits(collective, each, run, beside)
    elif axis != "context" and program.overlaps_data and not _follows_passes(collective, run.layout, program):
        if overlap is Overlap.BUCKETS:
            return _gradients(collective, where, seconds, run, program, beside)
        if overlap is Overlap.NEIGHBOUR_LAYER:
            exposed = _shares_waited_for(collective, each, run, beside)
    return Exchange(collective, where, seconds, exposed)


def _repeats_of_keys(run: Planned) -> int:
    """Largest number of query heads per key-value head on a tensor rank."""
    target = target_of(run, device="cuda")
    steps = (step for layer in describe(run.model).kinds for step in flat(lower(layer, target)))
    return max(step.repeats_of_keys(target) for step in steps)


def _follows_passes(collective: Collective, layout: Layout, program: Program) -> bool:
    """Whether the data ranks of a pipeline sum the gradients of `collective` only after all passes have ended. With one
    stage per rank and whole copies of the weights, the sum overlaps with the last backward pass, unless the schedule
    computes the weight gradients later. With several stages per rank, the sum overlaps with passes only in some
    programs (`Program.overlaps_stages`).
    """
    if layout.num_stages == 1 or collective.phase == Phase.FORWARD:
        return False
    waits_for_stages = layout.stages_per_rank > 1 and not program.overlaps_stages
    return collective.overlap is Overlap.NEIGHBOUR_LAYER or waits_for_stages or separates_weights(layout)


def _gradients(
    collective: Collective, where: Where, seconds: float, run: Planned, program: Program, beside: Beside
) -> Exchange:
    """Time of reducing gradients over the data ranks, in buckets.

    The reduction overlaps with the backward pass of the last micro-batch, except for the bucket of the embeddings,
    which follows the backward pass. With ZeRO-1 (`shards_optimizer`), the gather of the updated weights overlaps with
    the next forward pass. With V stages on each of P ranks, P more micro-batches run through each of the other stages
    after a stage has finished. The overlap is therefore longer: P (V - 1) / V + 1 / V passes of a micro-batch.
    """
    layout, each = run.layout, run.layout.stages_per_rank
    passes = (min(layout.ranks.owners.size, run.num_micro_batches) * (each - 1) + 1) / each
    gathered = 0.0
    if program.shards_optimizer:
        precision = run.training.numbers
        seconds /= 2
        gathered = seconds * precision.compute_bytes / precision.accumulation_bytes
    passes *= collective.share
    hidden, ahead = passes * beside.backward, passes * beside.forward
    last = collective.last_elements / collective.elements * seconds
    waited = max(seconds - hidden, last) + max(0.0, gathered - ahead)
    return Exchange(collective, where, seconds + gathered, waited)


def _tensor_waits(collective: Collective, each: float, run: Planned, beside: Beside) -> float:
    """Seconds that the step waits for one message between tensor ranks.

    If the micro-batch is sent in two halves, the message of one half overlaps with the product of the other half. With
    symmetric memory, a message is sent in small pieces that overlap with the whole product.
    """
    speed, overlap = beside.speed, collective.overlap
    if overlap in (Overlap.HALF_FORWARD, Overlap.HALF_INPUT_GRADIENT):
        factors = collective.beside if overlap is Overlap.HALF_FORWARD else [p.of_input for p in collective.beside]
        product = sum(speed.product(factor) for factor in factors)
        if run.layout.symmetric_memory:
            return max(0.0, each - product)
        return each if collective.pieces == 1 else (each + max(0.0, each - product / 2)) / 2
    if overlap is Overlap.WEIGHT_GRADIENT and not separates_weights(run.layout):
        return max(0.0, each - sum(speed.product(product) for product in weight_gradients(collective.beside)))
    if overlap is Overlap.INPUT_GRADIENT:
        return max(0.0, each - sum(speed.product(product.of_input) for product in collective.beside))
    return each


def _shift_waits(collective: Collective, each: float, beside: Beside) -> float:
    """Seconds that the step waits for one message of ring attention.

    While a message arrives, the rank attends to one of C blocks of keys and values, where C is the number of context
    ranks. All blocks take the same time. In the backward pass, the gradients of keys and values travel as well, over
    the same link.
    """
    forward, backward = beside.layer_attention
    hidden = forward if collective.phase == Phase.FORWARD else backward / 2
    return max(0.0, each - hidden / collective.ranks)


def _shares_waited_for(collective: Collective, each: float, run: Planned, beside: Beside) -> float:
    """Seconds that the step waits while weights of sharded layers are gathered or their gradients are scattered.

    Weights are gathered one layer ahead and gradients are scattered one layer behind, so each message overlaps with the
    computation of one layer. All messages of a backward pass share the link. The first gather and the last scatter of a
    pass overlap with nothing.
    """
    passes = max(1, collective.count // collective.layers) if collective.has_first_layer else 0
    if collective.phase == Phase.FORWARD:
        hidden = beside.layer_forward
    else:
        kinds = 1 + (run.layout.sharding == "zero3") + (run.layout.num_replicas > 1)
        hidden = beside.layer_backward / kinds
    hidden *= collective.share
    return passes * each + (collective.count - passes) * max(0.0, each - hidden)
