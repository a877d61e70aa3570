"""Description of the collectives of one kind in a training step: operation, axis, size and number."""

from dataclasses import dataclass
from typing import Literal

from crosscut.architecture import Operation, Overlap, Product
from crosscut.architecture.messages import Phase

Axis = Literal["tensor", "data", "shard", "replica"]
"""Axis of a collective. `shard` and `replica` are the two parts of `data` if the data ranks form several groups, each
of which shards one copy of the model."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Equal collectives of one step, as seen from one rank."""

    operation: Operation
    """Operation, such as an all-reduce."""

    axis: Axis
    """Axis of the layout along which the ranks communicate."""

    phase: Phase
    """Part of a step: `forward` and `backward` happen in every micro-batch, `step` happens once. `comparison` is the
    comparison of replicas, outside of training steps."""

    purpose: str
    """Name of the tensor that is sent, for readers."""

    count: int
    """Number of collectives in one step."""

    elements: int
    """Elements of the full tensor of each collective: before a reduction, after a gather."""

    element_bytes: int
    """Bytes of one element."""

    ranks: int
    """Number of ranks that take part."""

    overlap: Overlap = Overlap.NOTHING
    """Computation that overlaps with the message."""

    beside: tuple[Product, ...] = ()
    """Forward products of the parallel region. The message overlaps with these products or with their gradients."""

    pieces: int = 1
    """Number of equal messages in which one tensor is sent."""

    layers: int = 1
    """Number of layers that send the message."""

    has_first_layer: bool = True
    """Whether the model's first layer is among these layers. Its messages overlap with nothing."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends in one step for all `count` collectives, with ring algorithms."""
        rounds = 2 if self.operation == Operation.ALL_REDUCE else 1
        return rounds * (self.ranks - 1) / self.ranks * self.count * self.elements * self.element_bytes
