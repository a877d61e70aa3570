"""Building blocks for the description of a sublayer: values, and the steps that read and compute values.

A sublayer is a list of steps. A step names the values that it reads and computes, its parameters, and the values that
are saved for its backward pass. `Step.on` turns the step into the work of one rank on a `Target` (shapes, device and
data types): it adds the messages, and the values that the target's attention kernel saves. Most messages come from two
kinds of steps: f, the entry into a parallel region (`Enter`), and g, the exit (`Leave`). The module `readings` derives
parameters, memory and FLOPs from the list.

Legend: `T` tensor ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from operator import attrgetter
from typing import Literal, NamedTuple

from crosscut.architecture.parameters import Matrix, Parameter
from crosscut.architecture.target import Kind, Target
from crosscut.config.conventions import num_pieces


class Rows(Enum):
    """Meaning of a value's rows."""

    STREAM = "tokens of the micro-batch; if the layout splits the sequence, each of T ranks has 1/T of the tokens"
    TOKENS = "all tokens of the micro-batch; each context rank has its own tokens"
    SHARED = "all tokens of the micro-batch, of all context ranks together"
    ROUTED = "one row for each token and each of its experts"
    RECEIVED = "the rows that the experts of the fullest rank receive, of all ranks that share the experts"
    KEYS = "tokens whose keys a rank computes from gathered latents: SHARED if context ranks gather, otherwise TOKENS"
    PREDICTED = "tokens of the micro-batch for which the head computes logits"
    ONE = "a single row"
    SEQUENCES = "sequences of the micro-batch"
    SEQUENCE = "tokens of one sequence; each context rank has its own tokens"


_NUM_ROWS: Mapping[Rows, Callable[[Target], float]] = {
    Rows.STREAM: attrgetter("own_tokens"),
    Rows.TOKENS: attrgetter("tokens"),
    Rows.SHARED: attrgetter("shared_tokens"),
    Rows.ROUTED: attrgetter("tokens"),
    Rows.RECEIVED: attrgetter("received_tokens"),
    Rows.KEYS: attrgetter("key_tokens"),
    Rows.PREDICTED: attrgetter("predicted_tokens"),
    Rows.ONE: lambda _: 1,
    Rows.SEQUENCES: attrgetter("sequences"),
    Rows.SEQUENCE: attrgetter("own_length"),
}
"""Number of rows on one rank, of a value with one copy of each row."""


@dataclass(frozen=True)
class Value:
    """A tensor [rows, width] that one step computes and other steps read."""

    name: str
    width: int
    """Width over all tensor ranks if the ranks divide the value (`cut`), otherwise the width on each rank."""
    rows: Rows = Rows.TOKENS
    cut: bool = False
    heads: int = 0
    """Number of heads of a value that ranks may divide only between heads. Each rank then holds at least one whole
    head. 0 for a value that ranks may divide at any column."""
    copies: int = 1
    """Number of rows of each token, for `Rows.ROUTED` and `Rows.RECEIVED`."""
    is_cheap: bool = False
    """Whether `training.recompute = "operators"` recomputes the value instead of saving it for the backward pass."""
    kind: Kind = Kind.COMPUTE

    def local_width(self, target: Target) -> int:
        """Width on one rank."""
        if not self.cut:
            return self.width
        if not self.heads:
            return target.own(self.width)
        return target.own_heads(self.heads) * (self.width // self.heads)

    def elements(self, target: Target) -> int:
        """Number of elements on one rank."""
        return self.num_rows(target) * self.local_width(target)

    def num_rows(self, target: Target) -> int:
        """Number of rows on one rank."""
        return round(self.copies * _NUM_ROWS[self.rows](target))

    def bytes(self, target: Target) -> int:
        """Bytes on one rank."""
        return self.elements(target) * target.bytes_of(self.kind)


class Operation(StrEnum):
    """Collective operation of the ranks along an axis."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SHIFT = "shift"
    """Every rank sends a tensor to the next rank, and the last rank to the first one."""
    SEND = "send"
    """A rank sends a tensor to one other rank."""


class Overlap(Enum):
    """Computation that overlaps with a message."""

    NOTHING = "nothing"
    WEIGHT_GRADIENT = "the gradients of the region's weights"
    INPUT_GRADIENT = "the gradient of the region's input"
    HALF_FORWARD = "the forward product of the other half of the micro-batch"
    HALF_INPUT_GRADIENT = "the gradient of the other half's input"
    BUCKETS = "the rest of the backward pass: each bucket of gradients is sent when it is full"
    BLOCK = "attention to the keys and values that arrived before"
    NEIGHBOUR_LAYER = "the previous or the next layer: weights are gathered one layer ahead"


MessageAxis = Literal["tensor", "context", "expert"]
"""Axis along which ranks communicate inside the model."""


@dataclass(frozen=True)
class Message:
    """A message between the ranks along an axis."""

    operation: Operation
    elements: int
    """Elements of the full tensor: the result of a gather, or the input of any other operation."""
    overlap: Overlap = Overlap.NOTHING
    pieces: int = 1
    """Number of equal parts in which the tensor is sent."""
    axis: MessageAxis = "tensor"
    kind: Kind = Kind.COMPUTE
    count: int = 1
    """Number of equal messages that are sent one after the other."""


@dataclass(frozen=True)
class Passes:
    """Bytes that a step reads and writes outside of its matrix products, in the forward and in the backward pass."""

    forward: float = 0.0
    backward: float = 0.0
    gelu: int = 0
    """Number of elements to which the step applies GeLU. GeLU's arithmetic takes time in addition to the time for
    reading and writing the elements."""


class Product(NamedTuple):
    """A matrix product of one rank: [m, k] x [k, n], `batch` times."""

    m: int
    k: int
    n: int
    batch: int = 1
    is_frozen: bool = False
    """Whether the second factor is a frozen weight, which has no gradient."""
    groups: int = 1
    """Number of second factors. The rows of the first factor are divided evenly among them."""
    sums_groups: bool = False
    """Whether the groups divide k instead of m, as in the gradients of the second factors."""

    @property
    def of_group(self) -> tuple[float, float, float, int]:
        """Shape of the product of one group (m, k, n), and number of such products."""
        if self.groups == 1:
            return self.m, self.k, self.n, self.batch
        m, k = (1, self.groups) if self.sums_groups else (self.groups, 1)
        return self.m / m, self.k / k, self.n, self.batch * self.groups

    @property
    def flops(self) -> int:
        """FLOPs of the product. A multiplication and an addition count as two FLOPs."""
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def elements(self) -> int:
        """Number of elements of the result."""
        return self.batch * self.m * self.n

    @property
    def of_input(self) -> "Product":
        """Product that computes the gradient of the first factor."""
        return Product(self.m, self.n, self.k, self.batch, groups=self.groups)

    @property
    def of_weight(self) -> "Product":
        """Product that computes the gradient of the second factor."""
        return Product(self.k, self.m, self.n, self.batch, groups=self.groups, sums_groups=self.groups > 1)


def weight_gradients(products: Iterable[Product]) -> Iterator[Product]:
    """Products that compute the gradients of the second factors. Frozen weights have no gradient."""
    return (product.of_weight for product in products if not product.is_frozen)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One computation step of a sublayer."""

    reads: tuple[Value, ...] = ()
    gives: tuple[Value, ...]
    keeps: tuple[Value, ...] = ()
    """Values that are saved for the backward pass. A value that several steps save is stored once."""
    parameters: tuple[Parameter, ...] = ()
    name: str = ""
    """Name of the step's messages, such as `attention input`."""
    forward: tuple[Message, ...] = ()
    backward: tuple[Message, ...] = ()
    """Messages of the backward pass. The method `on` fills in `forward` and `backward`."""

    def on(self, target: Target) -> "Step":
        """Return the step as one rank runs it on the target, with its messages and saved values."""
        del target
        return self

    @property
    def repeated(self) -> tuple[Message, ...]:
        """Messages that `training.recompute = "selective"` sends again in the backward pass, if this step is the
        attention core or a scan.
        """
        return self.forward

    def passes(self, target: Target) -> Passes:
        """Bytes that the step reads and writes on one rank outside of its matrix products."""
        del target
        return Passes()

    def repeats_of_keys(self, target: Target) -> int:
        """Number of query heads on one rank that share a key-value head. 1 for a step without heads."""
        del target
        return 1

    def is_fused(self, target: Target) -> bool:
        """Whether a single kernel computes all `inner_products` of the step, without storing intermediate results."""
        del target
        return False

    def skips_half(self, target: Target) -> bool:
        """Whether the kernel of a fused step computes only half of its `inner_products`, as causal attention does."""
        del target
        return False

    def inner_products(self, target: Target) -> tuple[Product, ...]:
        """Matrix products of the step that use no weight, such as the scores of attention."""
        del target
        return ()

    @property
    def is_core(self) -> bool:
        """Whether `training.recompute = "selective"` saves only the inputs of the step and runs the step again."""
        return False

    @property
    def is_scan(self) -> bool:
        """Whether the `inner_products` of the step are those of a scan, and not of attention."""
        return False

    def temporary(self, target: Target, inside: int) -> int:
        """Bytes of temporary tensors in the step's backward pass.

        `inside` is the number of bytes that the sublayer saves inside its parallel region.
        """
        del target, inside
        return 0


@dataclass(frozen=True, kw_only=True)
class Enter(Step):
    """f, the entry into a parallel region: no message in the forward pass, an all-reduce in the backward pass.

    With a split sequence, f is an all-gather in the forward pass and a reduce-scatter in the backward pass. Each rank
    saves only its own part of the region's input. The backward pass gathers the input a second time for the weight
    gradients.
    """

    overlaps: bool = True
    """Whether the messages overlap with products. False for messages of the embedding and of the output projection."""

    def on(self, target: Target) -> Step:
        """Return the step with its messages."""
        elements = target.tokens * self.gives[0].width
        beside = Overlap.WEIGHT_GRADIENT if self.overlaps else Overlap.NOTHING
        if not target.split:
            return replace(self, backward=(Message(Operation.ALL_REDUCE, elements, beside),))
        scatter = Message(Operation.REDUCE_SCATTER, elements, beside)
        if not self.overlaps:  # no second gather: the loss computes gradients in the forward pass
            return replace(self, forward=(Message(Operation.ALL_GATHER, elements),), backward=(scatter,))
        gather = _in_halves(target, Message(Operation.ALL_GATHER, elements, Overlap.HALF_FORWARD))
        again = Message(Operation.ALL_GATHER, elements, Overlap.INPUT_GRADIENT)
        return replace(self, forward=(gather,), backward=(again, scatter))


@dataclass(frozen=True, kw_only=True)
class Leave(Step):
    """g, the exit from a parallel region: an all-reduce in the forward pass, no message in the backward pass.

    With a split sequence, g is a reduce-scatter in the forward pass and an all-gather in the backward pass. The bias is
    added once, after the reduction.
    """

    overlaps: bool = True
    """Whether the messages overlap with products. False for messages of the embedding and of the output projection."""
    is_frozen: bool = False
    """Whether all parameters before this step are frozen, so that the backward pass ends at this step. True for a
    frozen embedding."""

    def on(self, target: Target) -> Step:
        """Return the step with its messages."""
        elements = target.tokens * self.gives[0].width
        if not target.split:
            return replace(self, forward=(Message(Operation.ALL_REDUCE, elements),))
        if not self.overlaps:
            scatter, gather = Message(Operation.REDUCE_SCATTER, elements), Message(Operation.ALL_GATHER, elements)
            return replace(self, forward=(scatter,), backward=() if self.is_frozen else (gather,))
        scatter = _in_halves(target, Message(Operation.REDUCE_SCATTER, elements, Overlap.HALF_FORWARD))
        gather = _in_halves(target, Message(Operation.ALL_GATHER, elements, Overlap.HALF_INPUT_GRADIENT))
        return replace(self, forward=(scatter,), backward=(gather,))

    def passes(self, target: Target) -> Passes:
        """Bytes that the addition of the bias reads and writes; 0 without a bias.

        The forward pass reads and writes the residual stream. In a compiled layer, the addition is fused with another
        operator, so it adds no bytes. The backward pass reads the gradient of the stream.
        """
        stream = self.gives[0].bytes(target) if self.parameters else 0
        has_gradient = not any(parameter.is_frozen for parameter in self.parameters)
        return Passes(forward=0 if target.compiled else 2 * stream, backward=stream if has_gradient else 0)


def _in_halves(target: Target, message: Message) -> Message:
    """Split the message into two halves if it is large enough and the target's products can be halved."""
    pieces = 1 if target.eight_bit else num_pieces(target.sequences, message.elements)
    return replace(message, pieces=pieces)


@dataclass(frozen=True, kw_only=True)
class Multiply(Step):
    """Matrix product with the weight of `matrix`: [rows, inputs] x [inputs, outputs].

    If the matrix has an adapter, the step also computes X D and (X D) U, and adds the result.
    """

    matrix: Matrix

    @property
    def defers(self) -> bool:
        """Whether a schedule may compute the gradient of the weight later."""
        return True

    def is_in_eight_bits(self, target: Target) -> bool:
        """Whether the products cast their factors to 8 bits."""
        return target.eight_bit

    def products(self, target: Target) -> tuple[Product, ...]:
        """The forward products on one rank: with the weight, and with the matrices of the adapter."""
        weight, rows = self.matrix.weight, self.reads[0].num_rows(target)
        outputs = self.gives[0].local_width(target)
        inputs = weight.on(target).shape[-1]
        product = Product(rows, inputs, outputs, is_frozen=weight.is_frozen)
        if (adapter := self.matrix.adapter) is None:
            return (product,)
        return product, Product(rows, inputs, adapter.down.shape[0]), Product(rows, adapter.rank, outputs)

    def passes(self, target: Target) -> Passes:
        """Bytes that are read and written to add the adapter's product to the product with the weight; 0 without an
        adapter.

        In a row-parallel layer, the adapter's product is accumulated into the product with the weight before g, so the
        addition reads and writes nothing more.
        """
        is_added = self.matrix.adapter is not None and self.gives[0].cut
        return Passes(forward=3 * self.gives[0].bytes(target) if is_added else 0)


@dataclass(frozen=True, kw_only=True)
class Pointwise(Step):
    """Step that computes each element or each row of its result independently of the others."""


def enter(x: Value, name: str, *, overlaps: bool = True) -> tuple[Value, Step]:
    """Describe the entry into a parallel region, the paper's f. Return the value inside the region, and the step
    `Enter`.
    """
    entered = replace(x, name=f"{x.name}, entered", rows=Rows.TOKENS)
    return entered, Enter(reads=(x,), gives=(entered,), name=name, overlaps=overlaps)


def leave(
    x: Value, name: str, *, bias: Parameter | None = None, overlaps: bool = True, is_frozen: bool = False
) -> tuple[Value, Step]:
    """Describe the exit from a parallel region, the paper's g, and the addition of the bias. Return the value on the
    residual stream, and the step `Leave`. `is_frozen` says whether all parameters before this step are frozen.
    """
    left = replace(x, name=f"{x.name}, left", rows=Rows.STREAM)
    parameters = () if bias is None else (bias,)
    return left, Leave(
        reads=(x,), gives=(left,), parameters=parameters, name=name, overlaps=overlaps, is_frozen=is_frozen
    )


def multiply_columns(entered: Value, matrix: Matrix, *, name: str, keeps: Value, heads: int = 0) -> tuple[Value, Step]:
    """Multiply by a column-parallel matrix: X A_i. Return the product, and the step.

    `entered` is X inside the parallel region. For the backward pass, the step saves `keeps`, which is X before the
    region.
    """
    y = Value(name, matrix.out_features, cut=True, heads=heads)
    kept = (keeps, *_low(matrix, name))
    return y, Multiply(reads=(entered,), gives=(y,), keeps=kept, parameters=matrix.parameters, matrix=matrix)


def multiply_whole(x: Value, matrix: Matrix, *, name: str) -> tuple[Value, Step]:
    """Multiply by a matrix that every rank holds whole, outside of the parallel regions: X A. Return the product, and
    the step. Each rank multiplies its own part of the residual stream.
    """
    y = Value(name, matrix.out_features, x.rows)
    low = tuple(replace(value, rows=x.rows) for value in _low(matrix, name))
    return y, Multiply(reads=(x,), gives=(y,), keeps=(x, *low), parameters=matrix.parameters, matrix=matrix)


def multiply_rows(x: Value, matrix: Matrix, *, name: str) -> tuple[Value, Step]:
    """Multiply by a row-parallel matrix: X_i A_i. Return the product, and the step.

    The step `Leave` (g) afterwards sums the products of all ranks.
    """
    y = Value(name, matrix.out_features)
    parameters = tuple(parameter for parameter in matrix.parameters if parameter is not matrix.bias)
    return y, Multiply(reads=(x,), gives=(y,), keeps=(x, *_low(matrix, name)), parameters=parameters, matrix=matrix)


def _low(matrix: Matrix, name: str) -> tuple[Value, ...]:
    """Product X D of the adapter, which the step saves for the backward pass. Empty if the matrix has no adapter."""
    return () if matrix.adapter is None else (Value(f"{name}, low rank", matrix.adapter.down.shape[0]),)
