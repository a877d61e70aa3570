"""Building blocks of a sublayer's description: values, and the steps that read and compute values.

A sublayer is the list of its steps. A step names the values that it reads and gives, its parameters, and the values
that its backward pass needs. `Step.on` turns the step into the work of one rank on a `Target`: f and g get their
messages there, and attention the values that the target's kernel keeps. Everything that the planner, the proof, weight
decay and initialisation need is a reading of the list (`readings`).

Legend: `T` tensor ranks.
"""

from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import NamedTuple

from crosscut.architecture.parameters import Matrix, Parameter
from crosscut.architecture.target import Kind, Target
from crosscut.config.conventions import num_pieces


class Rows(Enum):
    """Unit of a value's rows."""

    STREAM = "tokens; each of T ranks has a T-th of them if the layout splits the sequence"
    TOKENS = "all tokens of the micro-batch"


@dataclass(frozen=True)
class Value:
    """A tensor [rows, width] that one step gives and others read."""

    name: str
    width: int
    """Width over all tensor ranks if the value is cut, otherwise the width on each rank."""
    rows: Rows = Rows.TOKENS
    cut: bool = False
    heads: int = 0
    """Heads that a cut value consists of. Every rank has at least one whole head. 0 if a head may be divided."""
    is_cheap: bool = False
    """Whether `training.recompute = "operators"` computes the value again instead of keeping it."""
    kind: Kind = Kind.COMPUTE

    def local_width(self, tensor: int) -> int:
        """Width on one of this many tensor ranks."""
        if not self.cut:
            return self.width
        return max(self.heads // tensor, 1) * (self.width // self.heads) if self.heads else self.width // tensor

    def elements(self, target: Target) -> int:
        """Number of elements on one rank."""
        rows = target.own_tokens if self.rows is Rows.STREAM else target.tokens
        return rows * self.local_width(target.tensor)

    def bytes(self, target: Target) -> int:
        """Bytes on one rank."""
        return self.elements(target) * target.bytes_of(self.kind)


class Operation(StrEnum):
    """Operation that the ranks of an axis run together."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"


class Overlap(Enum):
    """Work that runs while a message is on its way."""

    NOTHING = "nothing"
    WEIGHT_GRADIENT = "the gradients of the region's weights"
    INPUT_GRADIENT = "the gradient of the region's input"
    HALF_FORWARD = "the forward product of the other half of the micro-batch"
    HALF_INPUT_GRADIENT = "the gradient of the other half's input"
    BUCKETS = "the rest of the backward pass: gradients leave in buckets, as these are filled"
    NEIGHBOUR_LAYER = "the layer before or after: weights are gathered one layer ahead"


@dataclass(frozen=True)
class Message:
    """A message between the tensor ranks."""

    operation: Operation
    elements: int
    """Elements of the whole tensor: before a reduction, after a gather."""
    overlap: Overlap = Overlap.NOTHING
    pieces: int = 1
    """Number of equal parts in which the tensor is sent."""


@dataclass(frozen=True)
class Passes:
    """Bytes that a step reads and writes outside of its products."""

    forward: float = 0.0
    backward: float = 0.0
    gelu: int = 0
    """Elements that the step passes through GeLU. GeLU's arithmetic takes time in addition to its bytes."""


class Product(NamedTuple):
    """A matrix product of one rank: [m, k] x [k, n], `batch` times."""

    m: int
    k: int
    n: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """FLOPs: two for a multiplication and an addition."""
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def of_input(self) -> "Product":
        """Product that gives the gradient of the first factor."""
        return Product(self.m, self.n, self.k, self.batch)

    @property
    def of_weight(self) -> "Product":
        """Product that gives the gradient of the second factor."""
        return Product(self.k, self.m, self.n, self.batch)


@dataclass(frozen=True, kw_only=True)
class Step:
    """An operation of a sublayer."""

    reads: tuple[Value, ...] = ()
    gives: tuple[Value, ...]
    keeps: tuple[Value, ...] = ()
    """Values that the backward pass reads. A value that several steps keep is stored once."""
    parameters: tuple[Parameter, ...] = ()
    name: str = ""
    """Name of the step's messages, such as `attention input`."""
    forward: tuple[Message, ...] = ()
    backward: tuple[Message, ...] = ()
    """Messages of both passes. `on` fills them in."""

    def on(self, target: Target) -> "Step":
        """The step as one rank does it on the target."""
        del target
        return self

    def passes(self, target: Target) -> Passes:
        """Bytes that the step reads and writes outside of its products on one rank."""
        del target
        return Passes()

    def is_fused(self, target: Target) -> bool:
        """Whether one kernel computes the step's inner products and keeps nothing between them."""
        del target
        return False

    def inner_products(self, target: Target) -> tuple[Product, ...]:
        """Products of the step that have no weight, such as the scores of attention."""
        del target
        return ()

    @property
    def is_core(self) -> bool:
        """Whether `training.recompute = "selective"` runs the step again and keeps the values that it reads."""
        return False

    def temporary(self, target: Target, inside: int) -> int:
        """Bytes that the step's backward pass needs for a while.

        `inside` are the bytes that the sublayer keeps of its values inside the parallel region.
        """
        del target, inside
        return 0


@dataclass(frozen=True, kw_only=True)
class Enter(Step):
    """f: entry into a parallel region. With a split sequence, an all-gather whose backward pass is a reduce-scatter.

    With a split sequence, the region keeps only this rank's part of its input. The backward pass gathers the input a
    second time for the weight gradients.
    """

    overlaps: bool = True
    """Whether the messages overlap with the region's products. Those at the two ends of the model do not."""

    def on(self, target: Target) -> Step:
        """The step with its messages."""
        elements = target.tokens * self.gives[0].width
        beside = Overlap.WEIGHT_GRADIENT if self.overlaps else Overlap.NOTHING
        if not target.split:
            return replace(self, backward=(Message(Operation.ALL_REDUCE, elements, beside),))
        scatter = Message(Operation.REDUCE_SCATTER, elements, beside)
        if not self.overlaps:  # the loss computes its gradients while it has the gathered input
            return replace(self, forward=(Message(Operation.ALL_GATHER, elements),), backward=(scatter,))
        gather = _in_halves(target, Message(Operation.ALL_GATHER, elements, Overlap.HALF_FORWARD))
        again = Message(Operation.ALL_GATHER, elements, Overlap.INPUT_GRADIENT)
        return replace(self, forward=(gather,), backward=(again, scatter))


@dataclass(frozen=True, kw_only=True)
class Leave(Step):
    """g: exit from a parallel region, then the bias, which is added once. With a split sequence, a reduce-scatter."""

    overlaps: bool = True
    """As `Enter.overlaps`."""

    def on(self, target: Target) -> Step:
        """The step with its messages."""
        elements = target.tokens * self.gives[0].width
        if not target.split:
            return replace(self, forward=(Message(Operation.ALL_REDUCE, elements),))
        if not self.overlaps:
            scatter, gather = Message(Operation.REDUCE_SCATTER, elements), Message(Operation.ALL_GATHER, elements)
            return replace(self, forward=(scatter,), backward=(gather,))
        scatter = _in_halves(target, Message(Operation.REDUCE_SCATTER, elements, Overlap.HALF_FORWARD))
        gather = _in_halves(target, Message(Operation.ALL_GATHER, elements, Overlap.HALF_INPUT_GRADIENT))
        return replace(self, forward=(scatter,), backward=(gather,))

    def passes(self, target: Target) -> Passes:
        """Forward the bias reads and writes the stream, unless a compiler fuses it; backward it reads the gradient."""
        stream = self.gives[0].bytes(target) if self.parameters else 0
        return Passes(forward=0 if target.compiled else 2 * stream, backward=stream)


def _in_halves(target: Target, message: Message) -> Message:
    """Split the message into two halves if it is large enough and the target's products can be halved."""
    pieces = num_pieces(target.sequences, message.elements) if target.sends_halves else 1
    return replace(message, pieces=pieces)


@dataclass(frozen=True, kw_only=True)
class Multiply(Step):
    """Product with the weight of `matrix`: [tokens, inputs] x [inputs, outputs]."""

    matrix: Matrix

    def product(self, target: Target) -> Product:
        """Forward product of one rank."""
        inputs = self.matrix.weight.on(target.tensor).shape[1]
        return Product(target.tokens, inputs, self.gives[0].local_width(target.tensor))


@dataclass(frozen=True, kw_only=True)
class Pointwise(Step):
    """Operation that computes each element, or each row, of its result by itself."""


def enter(x: Value, name: str, *, overlaps: bool = True) -> tuple[Value, Step]:
    """f: the value inside the parallel region, and the step that brings it there."""
    entered = replace(x, name=f"{x.name}, entered", rows=Rows.TOKENS)
    return entered, Enter(reads=(x,), gives=(entered,), name=name, overlaps=overlaps)


def leave(x: Value, name: str, *, bias: Parameter | None = None, overlaps: bool = True) -> tuple[Value, Step]:
    """Leave a parallel region with g and add the bias. Return the value on the residual stream, and the step."""
    left = replace(x, name=f"{x.name}, left", rows=Rows.STREAM)
    parameters = () if bias is None else (bias,)
    return left, Leave(reads=(x,), gives=(left,), parameters=parameters, name=name, overlaps=overlaps)


def multiply_columns(entered: Value, matrix: Matrix, *, name: str, keeps: Value, heads: int = 0) -> tuple[Value, Step]:
    """Column-parallel product X A_i. The backward pass keeps the input as it was before f."""
    y = Value(name, matrix.out_features, cut=True, heads=heads)
    return y, Multiply(reads=(entered,), gives=(y,), keeps=(keeps,), parameters=matrix.parameters, matrix=matrix)


def multiply_rows(x: Value, matrix: Matrix, *, name: str) -> tuple[Value, Step]:
    """Row-parallel product X_i A_i, a part of the sum that g completes."""
    y = Value(name, matrix.out_features)
    return y, Multiply(reads=(x,), gives=(y,), keeps=(x,), parameters=(matrix.weight,), matrix=matrix)
