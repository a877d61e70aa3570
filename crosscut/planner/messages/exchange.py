"""Seconds that messages take, and the part of them that a step waits for.

A ring of n ranks does an all-gather or a reduce-scatter in n - 1 steps, an all-reduce in twice as many; each step has
the latency of the slowest link, and the bytes of `traffic` go through its bandwidth:

    steps x latency + bytes that a rank sends / bandwidth

Groups of tensor ranks are adjacent, those of data ranks stride across them. A ring over several nodes enters and leaves
each of them once; where g of its ranks are in a node, g adapters are its own, since the node's other ranks are in other
rings that send at the same time:

    bandwidth = min(inside the node, g x that of one adapter)

All groups of a kind wait for the slowest, so one that lies over two nodes puts the kind between nodes, and g is the
fewest ranks that any of them has in a node. Gradients that are whole go in buckets, each of which has its own steps.

A step waits for a message that runs beside a product only as long as the message outlasts the product (docs/speed.md).
"""

from collections import Counter
from functools import lru_cache
from math import ceil, lcm
from typing import NamedTuple

from crosscut.architecture import Operation, Overlap
from crosscut.architecture.messages import Phase
from crosscut.planner.candidate import Planned
from crosscut.planner.hardware import Hardware, Where
from crosscut.planner.messages.collective import Collective
from crosscut.planner.products import Speed
from crosscut.planner.program import Program


class Exchange(NamedTuple):
    """Equal collectives of one step in time."""

    collective: Collective
    where: Where
    seconds: float
    """Seconds of all collectives of the entry."""
    exposed: float
    """Part of `seconds` that the step waits for."""


def ring_seconds(
    collective: Collective, run: Planned, hardware: Hardware, *, bucket_bytes: int | None = None
) -> tuple[Where, float]:
    """Link and seconds of one of the collectives; gradients go in buckets of `bucket_bytes`, where given."""
    layout, n = run.layout, collective.ranks
    stride = 1 if collective.axis == "tensor" else layout.tensor
    if collective.axis == "replica":
        stride *= layout.shard_size
    where: Where = "node"
    link, rate = hardware.node, hardware.node.rate
    fewest = fewest_in_a_node(stride, n, per_node=hardware.ranks_per_node, ranks=layout.world_size)
    if fewest < n and hardware.network is not None:
        where, link = "network", hardware.network
        rate = min(rate, fewest * link.rate)
    messages = _num_messages(collective, bucket_bytes)
    steps = messages * (2 if collective.operation == Operation.ALL_REDUCE else 1) * (n - 1)
    sent = collective.wire_bytes / collective.count
    if found := link.measured.get(collective.operation):
        return where, steps * found.latency + sent / found.rate(sent / messages)
    return where, steps * link.latency + sent / rate


@lru_cache(maxsize=4096)
def fewest_in_a_node(stride: int, size: int, *, per_node: int, ranks: int) -> int:
    """Fewest ranks that any group has in a node where it has any; `ranks` ranks make groups of `size`, `stride` apart.

    The result is `size` where each group is inside one node: where there is one node, or where nodes hold whole blocks
    of `stride * size` ranks, since a node's edge inside a block cuts at least one of its groups.
    """
    block = stride * size
    if ranks <= per_node or per_node % block == 0:
        return size
    if stride >= per_node:
        return 1
    period = min(ranks, lcm(block, per_node))
    return min(Counter((rank // block, rank % stride, rank // per_node) for rank in range(period)).values())


def _num_messages(collective: Collective, bucket_bytes: int | None) -> int:
    """Messages of one collective of an entry: gradients go in buckets, which are sent when they are full."""
    if collective.overlap is not Overlap.BUCKETS or bucket_bytes is None:
        return 1
    return ceil(collective.elements * collective.element_bytes / bucket_bytes)


class Beside(NamedTuple):
    """Work that overlaps with messages, in seconds."""

    speed: Speed
    """Seconds of the products that a message overlaps with."""
    layer_forward: float
    """Mean seconds of a layer's forward pass of one micro-batch; `layer_backward` is that of its backward pass."""
    layer_backward: float
    forward: float
    backward: float
    """Seconds of all layers' backward pass of one micro-batch; `forward` has those of the forward pass."""
    root_share: float
    """Share of the embeddings in a rank's gradients; the embeddings' gradients are complete after the backward pass."""


def exchange(collective: Collective, run: Planned, hardware: Hardware, program: Program, beside: Beside) -> Exchange:
    """One entry of `step_traffic` in time."""
    where, each = ring_seconds(collective, run, hardware, bucket_bytes=program.bucket_bytes)
    seconds = collective.count * each
    if collective.axis == "tensor":
        waited = _tensor_waits(collective, each, run, beside) if program.overlaps_tensor else each
        return Exchange(collective, where, seconds, collective.count * waited)
    if not program.overlaps_data:
        return Exchange(collective, where, seconds, seconds)
    if collective.overlap is Overlap.BUCKETS:
        return _gradients(collective, where, seconds, run, program, beside)
    if collective.overlap is Overlap.NEIGHBOUR_LAYER:
        return Exchange(collective, where, seconds, _shares_waited_for(collective, each, run, beside))
    return Exchange(collective, where, seconds, seconds)


def _gradients(
    collective: Collective, where: Where, seconds: float, run: Planned, program: Program, beside: Beside
) -> Exchange:
    """Exchange of gradients in buckets during the last micro-batch's backward pass, the embeddings' bucket after it."""
    gathered = 0.0
    if program.shards_optimizer:
        precision = run.training.numbers
        seconds /= 2
        gathered = seconds * precision.compute_bytes / precision.accumulation_bytes
    waited = max(seconds - beside.backward, beside.root_share * seconds) + max(0.0, gathered - beside.forward)
    return Exchange(collective, where, seconds + gathered, waited)


def _tensor_waits(collective: Collective, each: float, run: Planned, beside: Beside) -> float:
    """Seconds that the step waits for one message between tensor ranks.

    A message that goes in two halves overlaps with the other half's product; with symmetric memory, a message goes in
    pieces that overlap with the whole product.
    """
    speed, overlap = beside.speed, collective.overlap
    if overlap in (Overlap.HALF_FORWARD, Overlap.HALF_INPUT_GRADIENT):
        factors = collective.beside if overlap is Overlap.HALF_FORWARD else [p.of_input for p in collective.beside]
        product = sum(speed.product(factor) for factor in factors)
        if run.layout.symmetric_memory:
            return max(0.0, each - product)
        return each if collective.pieces == 1 else (each + max(0.0, each - product / 2)) / 2
    if overlap is Overlap.WEIGHT_GRADIENT:
        return max(0.0, each - sum(speed.product(product.of_weight) for product in collective.beside))
    if overlap is Overlap.INPUT_GRADIENT:
        return max(0.0, each - sum(speed.product(product.of_input) for product in collective.beside))
    return each


def _shares_waited_for(collective: Collective, each: float, run: Planned, beside: Beside) -> float:
    """Seconds that the step waits for gathers of layers' weights and scatters of their gradients.

    Weights are gathered one layer ahead and gradients scattered one layer behind; all messages of a backward pass share
    the link. The first gather and the last scatter of a pass have nothing beside them.
    """
    passes = max(1, collective.count // collective.layers)
    if collective.phase == Phase.FORWARD:
        hidden = beside.layer_forward
    else:
        kinds = 1 + (run.layout.sharding == "zero3") + (run.layout.num_replicas > 1)
        hidden = beside.layer_backward / kinds
    return passes * each + (collective.count - passes) * max(0.0, each - hidden)
