"""Messages between tensor ranks that a list of steps sends, and the products that overlap with them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from crosscut.architecture.decoder import Layer
from crosscut.architecture.lowering import flat, lower, run_again
from crosscut.architecture.steps import Enter, Leave, Message, Multiply, Overlap, Product, Step
from crosscut.architecture.target import Target


class Phase(StrEnum):
    """Part of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    """Once per training step, after the backward pass."""
    COMPARISON = "comparison"
    """Comparison of replicas, outside of training steps."""


@dataclass(frozen=True)
class Sent:
    """A message of one micro-batch."""

    phase: Phase
    name: str
    """Name of the step that sends the message."""
    message: Message
    again: bool = False
    """Whether recomputation repeats the message of a forward pass."""

    @property
    def label(self) -> str:
        """Name for readers, such as `mlp input again`."""
        for_weights = " for its weights" if self.message.overlap is Overlap.INPUT_GRADIENT else ""
        return f"{self.name}{' again' if self.again else ''}{for_weights}"


def forward_messages(steps: Iterable[Step]) -> Iterator[Sent]:
    """Messages of a forward pass, in order."""
    return (Sent(Phase.FORWARD, step.name, message) for step in steps for message in step.forward)


def backward_messages(steps: Sequence[Step]) -> Iterator[Sent]:
    """Messages of a backward pass, in order, without those of recomputation."""
    return (Sent(Phase.BACKWARD, step.name, message) for step in reversed(steps) for message in step.backward)


def repeated_messages(layer: Layer, target: Target, *, everything: bool) -> Iterator[Sent]:
    """Messages that full recomputation sends again; `everything` as in `run_again`."""
    steps = run_again(layer, target, everything=everything)
    return (Sent(Phase.BACKWARD, step.name, message, again=True) for step in steps for message in step.forward)


@lru_cache(maxsize=16384)
def products_at(layer: Layer, target: Target) -> dict[str, tuple[Product, ...]]:
    """Forward products of a layer on one rank, by the name of the communication step next to them.

    Products that read the result of f (the start of a parallel region) belong to f. The product whose result g (the end
    of the region) sums belongs to g. They overlap
    with the messages of that step.
    """
    steps = list(flat(lower(layer, target)))
    multiplications = [step for step in steps if isinstance(step, Multiply)]
    found = {}
    for step in steps:
        if isinstance(step, Enter):
            found[step.name] = tuple(m.product(target) for m in multiplications if step.gives[0] in m.reads)
        elif isinstance(step, Leave):
            found[step.name] = tuple(m.product(target) for m in multiplications if step.reads[0] in m.gives)
    return found
