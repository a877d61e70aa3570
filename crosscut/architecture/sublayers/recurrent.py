r"""Mixers that carry a state through a sequence, such as Mamba-2, with their heads divided over the tensor ranks.

    X --f--> gate Z_i                                                  -----------------------\
    X --f--> inputs U_i, vectors of the groups --> convolution, SiLU --> recurrence --> norm and gate --> O_i --g--> sum
    X --f--> controls of the heads                                    -->/

f is the entry into the parallel region, and g is the exit. Each rank has whole heads, and the two vectors of each group
of its heads. If there are more ranks than groups, several ranks compute the vectors of the same group. If context ranks
share the sequences, each rank exchanges heads for tokens before the convolution, which then needs no tokens of other
ranks, and exchanges them back after the recurrence.

Legend: A heads, P elements of a head, G groups, R = A / G heads of a group, N elements of a vector, K taps, Q tokens of
a chunk.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from crosscut.architecture.needs import Fixed, Share
from crosscut.architecture.parameters import Cut, Law, Matrix, Parameter, Role, Start
from crosscut.architecture.steps import (
    Message,
    Operation,
    Passes,
    Pointwise,
    Product,
    Rows,
    Step,
    Value,
    enter,
    leave,
    multiply_columns,
    multiply_rows,
)
from crosscut.architecture.sublayers.context import OverContext, over_context
from crosscut.architecture.target import Kind, Target

STEP_BIAS = Start(Law.STEP_SIZE, 0.001, 0.1)
"""Initial biases of the step sizes, as in the published code of Mamba-2 and of the gated delta net."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Sizes of the heads of a recurrent mixer, and of the groups of heads that share two vectors."""

    number: int
    size: int
    """Width P of a head."""
    num_groups: int
    vector_size: int
    """Number N of elements of each of a group's two vectors. A head's state has N x P elements."""
    taps: int
    chunk: int
    """Tokens of a chunk."""

    @property
    def width(self) -> int:
        """Width of all heads together."""
        return self.number * self.size

    @property
    def vectors_width(self) -> int:
        """Width of the vectors of all groups together."""
        return 2 * self.num_groups * self.vector_size

    def repeats(self, target: Target) -> int:
        """Number of times that the vectors of a group are sent when context ranks exchange heads for tokens."""
        return target.repeats_of_heads(target.own_heads(self.number), target.own_heads(self.num_groups))

    def held(self, vectors: Value, target: Target) -> Value:
        """Return the vectors of the groups as one rank holds them for the recurrence. Context ranks may hold the
        vectors of the same group.
        """
        return replace(vectors, width=vectors.local_width(target) * self.repeats(target), cut=False, heads=0)

    def operands(self, values: tuple[Value, ...], target: Target) -> tuple[Value, ...]:
        """Return the inputs, the vectors and the controls as one rank holds them for the recurrence."""
        inner, vectors, *controls = values
        return inner, self.held(vectors, target), *controls

    def of_rank(self, target: Target) -> tuple[int, int]:
        """Numbers of heads and of groups whose recurrence one rank computes."""
        groups = target.own_heads(self.num_groups) * self.repeats(target)
        return target.exchanged_heads(target.own_heads(self.number)), target.exchanged_heads(groups)

    def chunks(self, target: Target) -> Iterator[int]:
        """Yield the number of tokens of each chunk of a sequence."""
        return (min(self.chunk, target.length - first) for first in range(0, target.length, self.chunk))


@dataclass(frozen=True, kw_only=True)
class Recurrent(ABC):
    """Mixer that carries a state through a sequence."""

    name: str
    """Name of the part, which is the prefix of all names."""
    sizes: Any
    """Section of the config that holds the mixer's settings."""
    heads: Heads
    gate: Matrix
    inner: Matrix
    """Projection to the inputs of the heads."""
    vectors: Matrix
    """Projection to the two vectors of each group. The rows are grouped: first a group's rows of the first vector, then
    its rows of the second one."""
    controls: tuple[Matrix, ...]
    """Projections to one number per head, such as the step size."""
    convolution: tuple[Parameter, ...]
    """Taps of the inputs' channels, and their bias if there is one."""
    vector_convolution: tuple[Parameter, ...]
    """Taps, and the bias, of the channels of the vectors."""
    dynamics: tuple[Parameter, ...]
    """Parameters of the heads, in the order in which the recurrence takes them."""
    norm: Parameter
    norm_groups: int
    """Number of groups of columns that the norm normalises one by one."""
    output: Matrix

    @property
    def inputs(self) -> tuple[Matrix, ...]:
        """Projections of the mixer's input."""
        return self.gate, self.inner, self.vectors, *self.controls

    def steps(self, x: Value) -> tuple[Value, list[Step]]:
        """Return the sublayer's output, and the steps that compute the output from the input `x`."""
        name, heads = self.name, self.heads
        entered, entering = enter(x, f"{name} input")
        found = [
            multiply_columns(entered, matrix, name=f"{name} {matrix.weight.module}", keeps=x, heads=matrix.weight.heads)
            for matrix in self.inputs
        ]
        (gate, *sent), products = zip(*found, strict=True)
        exchange = _ExchangeHeads(
            reads=tuple(sent),
            gives=tuple(replace(each, name=f"{each.name} of whole sequences") for each in sent),
            name=f"{name} over context",
            heads=heads,
        )
        inner, vectors, *controls = exchange.gives
        convolved = tuple(replace(each, name=f"{each.name} convolved", is_cheap=True) for each in (inner, vectors))
        parameters = (*self.convolution, *self.vector_convolution)
        convolve = _ConvolveBoth(
            reads=(inner, vectors), gives=convolved, parameters=parameters, taps=heads.taps, heads=heads
        )
        mixed = Value(f"{name} mixed", heads.width, cut=True)
        recur = self.recurrence((*convolved, *controls), mixed)
        returned, back = over_context(mixed, f"{name} over context")
        normed = replace(mixed, name=f"{name} normed")
        normalise = GateAndNormalise(
            reads=(returned, gate),
            gives=(normed,),
            parameters=(self.norm,),
            name=f"{name} norm",
            groups=self.norm_groups,
        )
        projected, project = multiply_rows(normed, self.output, name=f"{name} projected")
        left, leaving = leave(projected, f"{name} output", bias=self.output.bias)
        return left, [entering, *products, exchange, convolve, recur, back, normalise, project, leaving]

    @abstractmethod
    def recurrence(self, reads: tuple[Value, ...], mixed: Value) -> Step:
        """Return the step that computes `mixed` from the convolved inputs and vectors and the controls."""

    @property
    def shares(self) -> frozenset[Share]:
        """The numbers of the documents."""
        return frozenset({Share.DOCUMENTS})

    def memory(self, target: Target) -> tuple[Fixed, ...]:
        """Return the last inputs of the convolution, and the state, of one rank."""
        heads, groups, inner = self.heads, target.own_heads(self.heads.num_groups), target.own(self.heads.width)
        channels = inner + groups * 2 * heads.vector_size
        state = (groups, heads.vector_size, inner // groups)
        return Fixed("inputs", (heads.taps - 1, channels)), Fixed("state", state, is_wide=True)


def convolution(name: str, channels: int, taps: int, *, bias: bool, **cut: Any) -> tuple[Parameter, ...]:
    """Describe the taps of a convolution of each channel, and the bias if there is one."""
    weight = Parameter(name=f"{name}.weight", shape=(channels, taps), role=Role.TAPS, **cut)
    shift = replace(weight, name=f"{name}.bias", shape=(channels,), role=Role.BIAS)
    return (weight, shift) if bias else (weight,)


def dynamics(name: str, shape: tuple[int, ...], start: Start) -> Parameter:
    """Describe a parameter of the heads or channels, such as their decay rates."""
    return Parameter(name=name, shape=shape, role=Role.DYNAMICS, cut=Cut.COLUMNS, is_wide=True, start=start)


@dataclass(frozen=True, kw_only=True)
class _ExchangeHeads(OverContext):
    """Exchange of heads for tokens, if context ranks share the sequences."""

    heads: Heads

    def elements(self, target: Target) -> int:
        """Number of elements of all operands of the recurrence."""
        return sum(value.elements(target) for value in self.heads.operands(self.reads, target))


@dataclass(frozen=True, kw_only=True)
class Convolve(Pointwise):
    """Causal convolution of each channel, then SiLU."""

    taps: int

    def on(self, target: Target) -> Step:
        """Return the step with the inputs, which it saves."""
        return replace(self, keeps=self.operands(target))

    def operands(self, target: Target) -> tuple[Value, ...]:
        """Return the inputs as one rank holds them."""
        del target
        return self.reads

    def passes(self, target: Target) -> Passes:
        """Bytes that the convolution and SiLU read and write.

        If compiled, the forward pass reads and writes the channels once, and the backward pass reads two tensors and
        writes one. Uncompiled, each tap but the last one reads two tensors and writes one, in the forward pass and in
        the backward pass, which convolves again; the gradients of a tap read two more.
        """
        channels = sum(x.bytes(target) for x in self.operands(target))
        if target.compiled:
            return Passes(forward=2 * channels, backward=3 * channels)
        taps = self.taps - 1
        return Passes(forward=(4 + 3 * taps) * channels, backward=(9 + 8 * taps) * channels)

    def temporary(self, target: Target, inside: int) -> int:
        """Bytes of the gradients of the result, of the sums before SiLU and of the inputs, and of a product."""
        del inside
        return 4 * self.reads[0].bytes(target)


@dataclass(frozen=True, kw_only=True)
class _ConvolveBoth(Convolve):
    """Convolution of the inputs of the heads and of the vectors of the groups."""

    heads: Heads

    def operands(self, target: Target) -> tuple[Value, ...]:
        """Return the inputs and the vectors as one rank holds them."""
        return self.heads.operands(self.reads, target)


@dataclass(frozen=True, kw_only=True)
class ScanStep(Step, ABC):
    """Step that carries a state from token to token."""

    @property
    def is_core(self) -> bool:
        """True: `training.recompute = "selective"` runs the scan again in the backward pass."""
        return True

    @property
    def is_scan(self) -> bool:
        """True: the products of the step are those of a scan."""
        return True


@dataclass(frozen=True, kw_only=True)
class Recurrence(ScanStep, ABC):
    """Recurrence of the heads of a rank, in chunks of tokens."""

    part: str
    heads: Heads
    num_readers: ClassVar[int]
    """Number of vectors of a group through which a token reads the state and the tokens of its chunk."""
    num_mixed: ClassVar[int]
    """Number of products [Q, Q] x [Q, P] of a head in a chunk."""

    def on(self, target: Target) -> Step:
        """Return the step with the values that it saves: the operands, the scores of each chunk, which are the products
        of a group's vectors, and the state before each chunk. The first chunk begins with no state.
        """
        operands = self.heads.operands(self.reads, target)
        (heads, groups), lengths = self.heads.of_rank(target), [*self.heads.chunks(target)]
        width = self.num_readers * groups * sum(q * q for q in lengths)
        scores = Value(f"{self.part} scores", width, Rows.SEQUENCES)
        width = (len(lengths) - 1) * heads * self.heads.size * self.heads.vector_size
        states = Value(f"{self.part} states", width, Rows.SEQUENCES, kind=Kind.WIDE)
        return replace(self, reads=operands, keeps=(*operands, scores, states))

    def inner_products(self, target: Target) -> tuple[Product, ...]:
        """Products of one rank in one micro-batch. Each chunk of Q tokens has the scores, [Q, N] x [N, Q], per group
        and reader, and the products [Q, Q] x [Q, P] per head. Each chunk but the first one reads the state before it,
        [Q, N] x [N, R P] per group of R heads and reader, and each chunk but the last one adds to the state, [N, Q] x
        [Q, R P].
        """
        (heads, groups), size = self.heads.of_rank(target), self.heads.vector_size
        of_group, of_all = heads // groups * self.heads.size, target.sequences * groups
        products, lengths = [], list(self.heads.chunks(target))
        for place, q in enumerate(lengths):
            products.append(Product(self.num_readers * q, size, q, of_all))
            products.append(Product(q, q, self.heads.size, self.num_mixed * target.sequences * heads))
            if place:
                products.append(Product(self.num_readers * q, size, of_group, of_all))
            if place + 1 < len(lengths):
                products.append(Product(size, q, of_group, of_all))
        return tuple(products)

    def square(self, target: Target, *tokens: int) -> int:
        """Bytes of the decays [Q, Q] of chunks with these numbers of tokens, or of all chunks, on one rank."""
        squares = sum(q * q for q in tokens or self.heads.chunks(target))
        return squares * target.sequences * self.heads.of_rank(target)[0] * target.bytes_of(Kind.WIDE)


@dataclass(frozen=True, kw_only=True)
class GateAndNormalise(Pointwise):
    """Norm over groups of columns, with a gate. If there are more tensor ranks than groups, the ranks sum squares."""

    groups: int

    def on(self, target: Target) -> Step:
        """Return the step with its messages and the values that it saves."""
        roots = Value(f"{self.name} roots", self.groups, cut=True, heads=self.groups, kind=Kind.ROOT)
        kept = replace(self, keeps=(*self.reads, roots))
        if not target.share_heads(self.groups):
            return kept
        message = Message(Operation.ALL_REDUCE, target.tokens * self.groups, kind=Kind.WIDE)
        return replace(kept, forward=(message,), backward=(message,))

    def passes(self, target: Target) -> Passes:
        """Bytes that the gate and the norm read and write: if compiled, three tensors in the forward pass and five in
        the backward pass; uncompiled, 11 and 24.
        """
        inner = self.gives[0].bytes(target)
        forward, backward = (3, 5) if target.compiled else (11, 24)
        return Passes(forward=forward * inner, backward=backward * inner)

    def temporary(self, target: Target, inside: int) -> int:
        """Bytes of the gradient of the result, and of five tensors of at least float32: the normal values, their
        gradients, the gate, and the gradients of the gated values and of the gate.
        """
        del inside
        inner = self.gives[0]
        return inner.bytes(target) + 5 * inner.elements(target) * target.bytes_of(Kind.WIDE)
