"""One kind of message between ranks, as the planner counts it."""

from dataclasses import dataclass
from typing import Literal

Operation = Literal["all_reduce", "all_gather", "reduce_scatter"]
Axis = Literal["tensor", "data", "shard", "replica"]
"""`shard` and `replica` are the two axes that `data` is where several groups of data ranks each share one copy."""
Phase = Literal["forward", "backward", "step", "comparison"]


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
    """Name of the tensor that is sent."""

    count: int
    """Collectives of this kind in one step."""

    elements: int
    """Elements of the full tensor of each collective: the tensor before a reduce or scatter, or after a gather."""

    element_bytes: int
    """Bytes of one element."""

    ranks: int
    """Ranks that take part."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends in one step for all `count` of them, by ring algorithms."""
        rounds = 2 if self.operation == "all_reduce" else 1
        return rounds * (self.ranks - 1) / self.ranks * self.count * self.elements * self.element_bytes
