"""One kind of message between ranks, as the planner counts it."""

from dataclasses import dataclass
from typing import Literal

from crosscut.architecture import Operation, Overlap, Product
from crosscut.architecture.messages import Phase

Axis = Literal["tensor", "data", "shard", "replica"]
"""`shard` and `replica` are the two parts of `data` if each of several groups of data ranks shares one copy."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Equal collectives of one step, as one rank takes part in them."""

    operation: Operation
    """Operation that the ranks run together."""

    axis: Axis
    """Axis of the layout along which the ranks communicate."""

    phase: Phase
    """Part of a step: `forward` and `backward` happen in every micro-batch, `step` once; `comparison` is of no step."""

    purpose: str
    """Name of the tensor that is sent, for readers."""

    count: int
    """Collectives of this kind in one step."""

    elements: int
    """Elements of the full tensor of each collective: the tensor before a reduce or scatter, or after a gather."""

    element_bytes: int
    """Bytes of one element."""

    ranks: int
    """Ranks that take part."""

    overlap: Overlap = Overlap.NOTHING
    """Work that runs while the message is on its way."""

    beside: tuple[Product, ...] = ()
    """Forward products that the message, or their gradients, can overlap with."""

    pieces: int = 1
    """Number of equal messages that one tensor is sent in."""

    layers: int = 1
    """Layers that send or receive it."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends in one step for all `count` of them, by ring algorithms."""
        rounds = 2 if self.operation == Operation.ALL_REDUCE else 1
        return rounds * (self.ranks - 1) / self.ranks * self.count * self.elements * self.element_bytes
