"""Messages that a list of steps sends between tensor ranks, and the matrix products that overlap with the messages."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from crosscut.architecture.lowering import flat, lower, run_again
from crosscut.architecture.parts import Layer
from crosscut.architecture.steps import Enter, Leave, Message, Multiply, Overlap, Product, Step
from crosscut.architecture.target import Target


class Phase(StrEnum):
    """Part of training in which a message is sent."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    """Once per training step, after the backward pass."""
    COMPARISON = "comparison"
    """Comparison of replicas, outside of training steps."""


@dataclass(frozen=True)
class Sent:
    """A message that a step of a sublayer sends in one micro-batch."""

    phase: Phase
    name: str
    """Name of the step that sends the message."""
    message: Message
    again: bool = False
    """Whether this message repeats a forward message in the backward pass, because of recomputation."""

    @property
    def label(self) -> str:
        """Name of the message in reports, such as `mlp input again`."""
        for_weights = " for its weights" if self.message.overlap is Overlap.INPUT_GRADIENT else ""
        return f"{self.name}{' again' if self.again else ''}{for_weights}"


def forward_messages(steps: Iterable[Step]) -> Iterator[Sent]:
    """Messages of a forward pass, in order."""
    return (Sent(Phase.FORWARD, step.name, message) for step in steps for message in step.forward)


def backward_messages(steps: Sequence[Step]) -> Iterator[Sent]:
    """Messages of a backward pass, in order, without the messages that recomputation repeats."""
    return (Sent(Phase.BACKWARD, step.name, message) for step in reversed(steps) for message in step.backward)


def repeated_messages(layer: Layer, target: Target, *, everything: bool, core: bool = False) -> Iterator[Sent]:
    """Messages that recomputation sends again. If `everything` is true, all steps run again, as in a compiled layer. If
    `core` is true, only the attention core or the scan runs again, as with selective recomputation.
    """
    if core:
        return (
            Sent(Phase.BACKWARD, step.name, message, again=True)
            for step in flat(lower(layer, target))
            if step.is_core
            for message in step.repeated
        )
    steps = run_again(layer, target, everything=everything)
    return (Sent(Phase.BACKWARD, step.name, message, again=True) for step in steps for message in step.forward)


@lru_cache(maxsize=16384)
def products_at(layer: Layer, target: Target) -> dict[str, tuple[Product, ...]]:
    """Forward products on one rank that overlap with the messages of a layer. The keys are the names of the steps that
    send the messages.

    The steps with these messages are the paper's f and g. f starts a parallel region, and the messages of f overlap
    with the products that read the result of f. g ends the region, and the messages of g overlap with the product that
    g sums over the ranks.
    """
    found = _multiplications_at(layer, target).items()
    return {name: tuple(product for m in matching for product in m.products(target)) for name, matching in found}


def multiplications_apart(layer: Layer, target: Target) -> Iterator[Multiply]:
    """Matrix products of a layer that are not in `products_at`, such as those of experts: no message of f or g
    overlaps with them.
    """
    found = {id(step) for steps in _multiplications_at(layer, target).values() for step in steps}
    steps = (step for step in flat(lower(layer, target)) if isinstance(step, Multiply))
    return (step for step in steps if id(step) not in found)


def _multiplications_at(layer: Layer, target: Target) -> dict[str, list[Multiply]]:
    """Steps whose products overlap with the messages of f and g, by the names of the steps that send the messages."""
    steps = list(flat(lower(layer, target)))
    multiplications = [step for step in steps if isinstance(step, Multiply)]
    found = {}
    for step in steps:
        if isinstance(step, Enter):
            found[step.name] = [m for m in multiplications if step.gives[0] in m.reads]
        elif isinstance(step, Leave):
            found[step.name] = [m for m in multiplications if step.reads[0] in m.gives]
    return found
