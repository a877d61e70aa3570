"""Collectives among data ranks that share one copy of the model (Rajbhandari et al. 2020).

Weights are gathered unit by unit, a unit being a layer or the root, which is all that belongs to no layer. ZeRO-2
gathers them once a step, ZeRO-3 in each forward pass, and the layers again in the backward pass. Every micro-batch's
gradients are scattered; their sums are reduced with the sums of other copies once a step. Messages are padded: `n`
ranks cut the rows of a tensor rank's part into equal shares.

    elements of a unit = sum over its tensors of ceil(rows / n) n columns
"""

from collections import Counter
from functools import partial
from math import prod

from crosscut.config import Layout
from crosscut.planner.candidate import Planned
from crosscut.planner.collective import Axis, Collective
from crosscut.planner.parameters import LocalTensor, layer_tensors, root_tensors


def sharded_parameters(run: Planned) -> list[Collective]:
    """The collectives of one step for the weights and gradients of a run that shards them."""
    precision = run.training.numbers
    layers = _of_unit(run, "layer", layer_tensors(run.model, run.layout), precision.compute_bytes)
    root = _of_unit(run, "root", root_tensors(run.model, run.layout), precision.accumulation_bytes)
    return [*layers, *root]


def shard_axis(layout: Layout) -> Axis:
    """The axis over which a copy is shared: all of the data axis, or the part of it that is a group."""
    return "data" if layout.num_replicas == 1 else "shard"


def _of_unit(run: Planned, unit: str, tensors: list[LocalTensor], weight_bytes: int) -> list[Collective]:
    """`weight_bytes` is of the type in which weights are gathered; gradients are scattered in that of the master
    weights. Each gradient that is partial is first summed over the tensor ranks.
    """
    layout, micro_batches = run.layout, run.num_micro_batches
    times = run.model.num_layers if unit == "layer" else 1
    gatherings = 1 if layout.sharding == "zero2" else micro_batches
    gradient_bytes = run.training.numbers.accumulation_bytes
    elements = sum(_padded(tensor, layout.shard_size) for tensor in tensors)
    over_shares = partial(Collective, axis=shard_axis(layout), elements=elements, ranks=layout.shard_size)
    gather = partial(over_shares, operation="all_gather", purpose=f"{unit} weights", element_bytes=weight_bytes)
    scatter = partial(over_shares, operation="reduce_scatter", phase="backward", element_bytes=gradient_bytes)
    collectives = [gather(phase="forward", count=gatherings * times)]
    if unit == "layer" and layout.sharding == "zero3":
        collectives.append(gather(phase="backward", count=gatherings * times))
    sizes = Counter(tensor.size for tensor in tensors if tensor.has_partial_gradient(layout))
    collectives += [
        Collective(
            operation="all_reduce",
            axis="tensor",
            phase="backward",
            purpose=f"{unit} replicated gradients",
            count=micro_batches * times * count,
            elements=size,
            element_bytes=weight_bytes,
            ranks=layout.tensor,
        )
        for size, count in sizes.items()
    ]
    copies = Collective(
        operation="all_reduce",
        axis="replica",
        phase="step",
        purpose=f"{unit} gradients of all copies",
        count=times,
        elements=elements // layout.shard_size,
        element_bytes=gradient_bytes,
        ranks=layout.num_replicas,
    )
    return [*collectives, scatter(purpose=f"{unit} gradients", count=micro_batches * times), copies]


def _padded(tensor: LocalTensor, num_shares: int) -> int:
    rows, *columns = tensor.shape
    return -(-rows // num_shares) * num_shares * prod(columns)
