"""Description of the collectives of one kind in a training step: operation, axis, size and number."""

from dataclasses import dataclass, replace
from functools import partial

from crosscut.architecture import Operation, Overlap, Product
from crosscut.architecture.messages import Phase
from crosscut.config.layouts.ranks import Line

_DIRECT = (Operation.SHIFT, Operation.SEND)
"""Operations in which a rank sends the whole tensor in one message."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Group of equal collective operations that a rank runs in one training step."""

    operation: Operation
    """Operation, such as an all-reduce."""

    axis: str
    """Name of the line of ranks that communicate (`RankPlan.line`)."""

    phase: Phase
    """Part of training: `forward` and `backward` run in every micro-batch, and `step` runs once per training step.
    `comparison` is the comparison of replicas, outside of training steps."""

    purpose: str
    """Name of the sent tensor in reports, such as `gradients`."""

    count: int
    """Number of these collectives in one step."""

    elements: int
    """Elements of the full tensor of one collective: the result of a gather, or the input of any other operation."""

    element_bytes: int
    """Bytes of one element."""

    ranks: int
    """Number of ranks that take part in each collective."""

    overlap: Overlap = Overlap.NOTHING
    """Computation that overlaps with the message."""

    beside: tuple[Product, ...] = ()
    """Forward products of the parallel region. The message overlaps with these products, or with the products that
    compute the gradients."""

    pieces: int = 1
    """Number of equal messages into which a tensor is split."""

    layers: int = 1
    """Number of layers that send the message."""

    has_first_layer: bool = True
    """Whether the layers include the first layer of the model, whose messages overlap with nothing."""

    last_elements: int = 0
    """Elements of gradients that are complete only at the end of the backward pass: those outside of the layers, mainly
    of the embeddings."""

    share: float = 1.0
    """Share of the overlapping computation that hides this message. Messages of experts and of other parameters are
    sent during the same computation."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends in one step for all `count` collectives, with ring algorithms."""
        parts = 1 if self.operation in _DIRECT else self.ranks
        return self.steps / parts * self.count * self.elements * self.element_bytes

    @property
    def steps(self) -> int:
        """Number of messages that a rank sends one after the other. A shift is one message, and so is a send. In any
        other operation, each message has one part of the full tensor for each rank.
        """
        if self.operation in _DIRECT:
            return 1
        return (2 if self.operation == Operation.ALL_REDUCE else 1) * (self.ranks - 1)


def at_once(*collectives: Collective) -> list[Collective]:
    """Return collectives that are sent during the same computation, each with its share of this computation."""
    total = sum(collective.wire_bytes for collective in collectives) if len(collectives) > 1 else 0
    if not total:
        return list(collectives)
    return [replace(collective, share=collective.wire_bytes / total) for collective in collectives]


def along(collective: partial[Collective], line: Line) -> partial[Collective]:
    """Let the ranks of a line send the collective."""
    return partial(collective, axis=line.name, ranks=line.size)
