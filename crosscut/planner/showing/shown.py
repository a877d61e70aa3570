"""A model's layers on one rank, as the terminal, JSON and the picture show them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from crosscut.planner.messages.collective import Collective


@dataclass(frozen=True)
class Tensor:
    """A weight, or a tensor that a step reads, computes or saves."""

    name: str
    shape: tuple[int, ...]
    """Shape on one rank. An activation is [rows, width]: the rows are mostly tokens of the micro-batch."""
    whole: tuple[int, ...]
    """Shape over all ranks that compute the same micro-batch."""
    cut: str
    """Where the ranks cut the tensor: columns, rows, heads, vocabulary, experts or tokens, joined by "and". Empty for
    a tensor that every rank has whole."""
    bytes: int
    """Bytes on one rank."""
    is_summand: bool = False
    """Whether the tensor is one summand, and g adds up those of all tensor ranks."""


@dataclass(frozen=True, kw_only=True)
class ShownStep:
    """One step of a layer on one rank."""

    part: str
    """Name of the part of the layer."""
    action: str
    """Action in words, such as `multiply`. `f` and `g` are the entry into a parallel region and the exit."""
    name: str
    """Name of the step's messages. Empty for a step that sends nothing."""
    weights: tuple[Tensor, ...]
    reads: tuple[Tensor, ...]
    gives: tuple[Tensor, ...]
    saves: tuple[Tensor, ...]
    """Tensors that the step saves for the backward pass, and that no earlier step has saved."""
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    again: tuple[Collective, ...] = ()
    """Forward messages that recomputation sends again in the backward pass."""
    runs_again: bool = False
    """Whether recomputation runs the step again in the backward pass."""


@dataclass(frozen=True, kw_only=True)
class ShownBlock:
    """Embedding, layer or head."""

    title: str
    """Title, such as `layers 0 to 23: attention gelu`."""
    numbers: tuple[int, ...]
    """Numbers of the layers, which are alike. Empty for the embedding and the head."""
    steps: tuple[ShownStep, ...]
    repeats_first: bool = False
    """Whether recomputation repeats its steps before the backward pass of the layer. If it is false, each step is
    repeated just before its own backward pass."""

    @property
    def forward(self) -> Iterator[Collective]:
        """Messages of the forward pass of one micro-batch, in order."""
        return chain.from_iterable(step.forward for step in self.steps)

    @property
    def backward(self) -> Iterator[Collective]:
        """Messages of the backward pass of one micro-batch, in order, with those that recomputation repeats."""
        if self.repeats_first:
            yield from chain.from_iterable(step.again for step in self.steps)
        for step in reversed(self.steps):
            again = () if self.repeats_first else step.again
            first = len(step.forward) - len(again) if again else 0  # what follows the repeated messages goes back first
            yield from (*step.backward[:first], *again, *step.backward[first:])

    @property
    def saved_bytes(self) -> int:
        """Bytes that a rank saves for the backward pass of one micro-batch."""
        return sum(tensor.bytes for step in self.steps for tensor in step.saves)

    @property
    def weight_elements(self) -> int:
        """Number of elements of the weights on one rank."""
        return sum(elements(tensor.shape) for step in self.steps for tensor in step.weights)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Layers of a run on one rank."""

    model: str
    """Name or sizes of the model."""
    layout: str
    tensor: int
    """Number of tensor ranks."""
    splits_sequence: bool
    """Whether the tensor ranks divide the tokens outside of the parallel regions."""
    micro_batch: tuple[int, int]
    """Sequences of a micro-batch, and tokens of a sequence."""
    compute: str
    """Element type of products and activations."""
    recompute: str
    blocks: tuple[ShownBlock, ...]
    others: tuple[Collective, ...]
    """Messages of one step that belong to no step of a layer, such as sums of gradients over data ranks."""

    def region(self, part: str) -> "Shown":
        """Only the parallel region of a part in the first block that has the part: f, the steps inside, and g."""
        block = next(block for block in self.blocks if any(step.part == part for step in block.steps))
        steps = tuple(
            step for step, inside in steps_inside(block) if step.part == part and (inside or step.action == "g")
        )
        return replace(self, blocks=(replace(block, title=part, steps=steps),), others=())

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON holds them."""
        facts = {name: getattr(self, name) for name in ("model", "layout", "tensor", "splits_sequence")}
        return {
            **facts,
            "micro_batch": {"sequences": self.micro_batch[0], "length": self.micro_batch[1]},
            "compute": self.compute,
            "recompute": self.recompute,
            "blocks": [_block(block) for block in self.blocks],
            "others": _messages(self.others),
        }


def steps_inside(block: ShownBlock) -> Iterator[tuple[ShownStep, bool]]:
    """Steps of a block, each with whether its results are inside a parallel region."""
    inside = next((step.action for step in block.steps if step.action in ("f", "g")), "") == "g"
    for step in block.steps:
        inside = step.action == "f" or (inside and step.action != "g")
        yield step, inside


def elements(shape: Iterable[int]) -> int:
    """Number of elements of a shape."""
    product = 1
    for size in shape:
        product *= size
    return product


def message_bytes(message: Collective) -> int:
    """Bytes of the full tensor of one message."""
    return message.elements * message.element_bytes


def _block(block: ShownBlock) -> dict[str, object]:
    return {
        "title": block.title,
        "layers": list(block.numbers),
        "steps": [_step(step) for step in block.steps],
        "forward": _messages(block.forward),
        "backward": _messages(block.backward),
        "saved_bytes": block.saved_bytes,
        "weight_elements": block.weight_elements,
    }


def _step(step: ShownStep) -> dict[str, object]:
    tensors = {name: [_tensor(each) for each in getattr(step, name)] for name in ("weights", "reads", "gives", "saves")}
    sent = {name: _messages(getattr(step, name)) for name in ("forward", "backward", "again")}
    facts = {"part": step.part, "action": step.action, "name": step.name}
    return {**facts, **tensors, **sent, "runs_again": step.runs_again}


def _tensor(tensor: Tensor) -> dict[str, object]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "whole": list(tensor.whole),
        "cut": tensor.cut,
        "bytes": tensor.bytes,
        "is_summand": tensor.is_summand,
    }


def _messages(messages: Iterable[Collective]) -> list[dict[str, object]]:
    return [
        {
            "purpose": each.purpose,
            "operation": str(each.operation),
            "axis": each.axis,
            "ranks": each.ranks,
            "count": each.count,
            "elements": each.elements,
            "element_bytes": each.element_bytes,
            "bytes": message_bytes(each),
            "sent_bytes": each.wire_bytes / each.count,
        }
        for each in messages
    ]
