r"""Mamba-2 mixer (SSD), with its heads divided over the tensor ranks.

    X --f--> gate Z_i                                                 -----------------------\
    X --f--> inputs U_i, vectors B and C --> convolution and SiLU --> scan --> norm(Y_i silu(Z_i)) O_i --g--> sum + bias
    X --f--> step sizes of the heads                              -->/

f is the entry into the parallel region, and g is the exit. Each rank has whole heads, and the vectors B and C of the
groups of its heads. If there are more ranks than groups, several ranks compute the vectors of the same group, and the
ranks of a group of the norm add up their squares. If context ranks share the sequences, each rank exchanges heads for
tokens before the convolution, which then needs no tokens of other ranks, and exchanges them back after the scan.

Source: Dao and Gu 2024 (arXiv 2405.21060), sections 6 and 7.

Legend: A heads, P elements of a head, G groups, N elements of the state, K taps, Q tokens of a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from crosscut.architecture.needs import Fixed, Share
from crosscut.architecture.parameters import (
    ONES,
    Cut,
    Law,
    Matrix,
    Parameter,
    Role,
    Start,
    columns,
    columns_by_heads,
    rows,
)
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
from crosscut.architecture.target import Kind, Target
from crosscut.config import ModelConfig
from crosscut.config.parts.mamba2 import Mamba2Config

_RATES = Start(Law.LOG_UNIFORM, 1.0, 16.0)
_STEPS = Start(Law.STEP_SIZE, 0.001, 0.1)
"""Initial values of the decay rates and of the biases of the step sizes, as in the published code (mamba_ssm 2.2)."""


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2 mixer."""

    name: str
    """Name of the part, which is the prefix of all names."""
    sizes: Mamba2Config
    gate: Matrix
    inner: Matrix
    bc: Matrix
    """Projection to the vectors B and C. The rows are grouped: first a group's B rows, then its C rows."""
    step: Matrix
    convolution: tuple[Parameter, Parameter]
    """Taps and bias of the inputs' channels."""
    bc_convolution: tuple[Parameter, Parameter]
    """Taps and bias of the channels of B and C."""
    dynamics: tuple[Parameter, Parameter, Parameter]
    """Logarithm of the decay rate, skip, and bias of the step size, of each head."""
    norm: Parameter
    output: Matrix

    @classmethod
    def of(cls, model: ModelConfig, name: str) -> "Mamba2":
        """Describe the Mamba-2 mixer of a model in the part `name`."""
        sizes, hidden, bias = model.mamba2, model.hidden_size, model.biases == "all"
        inner, wide = sizes.inner_size, 2 * sizes.num_groups * sizes.state_size
        by_groups = {"cut": Cut.HEADS, "heads": sizes.num_groups, "num_matrices": 2}
        starts = {"log_rate": _RATES, "skip": ONES, "step_bias": _STEPS}
        log_rate, skip, step_bias = (
            Parameter(name=f"{name}.{each}", shape=(sizes.num_heads,), role=Role.DYNAMICS, cut=Cut.COLUMNS, start=start)
            for each, start in starts.items()
        )
        return cls(
            name=name,
            sizes=sizes,
            gate=columns(f"{name}.inputs.gate", hidden, inner, bias=bias),
            inner=columns(f"{name}.inputs.inner", hidden, inner, bias=bias),
            bc=columns_by_heads(f"{name}.inputs.bc", hidden, wide, heads=sizes.num_groups, bias=bias, num_matrices=2),
            step=columns(f"{name}.inputs.step", hidden, sizes.num_heads, bias=bias),
            convolution=_convolution(f"{name}.convolution", inner, sizes.conv_size, cut=Cut.COLUMNS),
            bc_convolution=_convolution(f"{name}.bc_convolution", wide, sizes.conv_size, **by_groups),
            dynamics=(log_rate, skip, step_bias),
            norm=Parameter(name=f"{name}.norm.weight", shape=(inner,), role=Role.NORM, cut=Cut.COLUMNS, start=ONES),
            output=rows(f"{name}.output", inner, hidden, bias=bias),
        )

    def steps(self, x: Value) -> tuple[Value, list[Step]]:
        """Return the sublayer's output, and the steps that compute the output from the input `x`."""
        name, groups = self.name, self.sizes.num_groups
        entered, entering = enter(x, f"{name} input")
        gate, by_gate = multiply_columns(entered, self.gate, name=f"{name} gate", keeps=x)
        inner, by_inner = multiply_columns(entered, self.inner, name=f"{name} inner", keeps=x)
        bc, by_bc = multiply_columns(entered, self.bc, name=f"{name} bc", keeps=x, heads=groups)
        step, by_step = multiply_columns(entered, self.step, name=f"{name} step", keeps=x)
        exchange = ExchangeHeads(
            reads=(inner, bc, step),
            gives=tuple(replace(each, name=f"{each.name} of whole sequences") for each in (inner, bc, step)),
            name=f"{name} over context",
            mixer=self,
        )
        inner, bc, step = exchange.gives
        convolved = tuple(replace(each, name=f"{each.name} convolved", is_cheap=True) for each in (inner, bc))
        parameters = (*self.convolution, *self.bc_convolution)
        convolve = Convolve(reads=(inner, bc), gives=convolved, parameters=parameters, mixer=self)
        scanned = Value(f"{name} scanned", self.sizes.inner_size, cut=True)
        scan = Scan(reads=(*convolved, step), gives=(scanned,), parameters=self.dynamics, mixer=self)
        returned = replace(scanned, name=f"{name} scanned tokens")
        back = ExchangeTokens(reads=(scanned,), gives=(returned,), name=f"{name} over context", mixer=self)
        normed = replace(scanned, name=f"{name} normed")
        normalise = GateAndNormalise(
            reads=(returned, gate), gives=(normed,), parameters=(self.norm,), name=f"{name} norm", mixer=self
        )
        projected, project = multiply_rows(normed, self.output, name=f"{name} projected")
        left, leaving = leave(projected, f"{name} output", bias=self.output.bias)
        products = (by_gate, by_inner, by_bc, by_step)
        return left, [entering, *products, exchange, convolve, scan, back, normalise, project, leaving]

    @property
    def shares(self) -> frozenset[Share]:
        """The numbers of the documents."""
        return frozenset({Share.DOCUMENTS})

    def memory(self, tensor: int) -> tuple[Fixed, ...]:
        """Return the last inputs of the convolution, and the state, of one of `tensor` ranks."""
        sizes = self.sizes
        inner, groups = sizes.inner_size // tensor, max(sizes.num_groups // tensor, 1)
        channels = inner + groups * 2 * sizes.state_size
        state = (groups, sizes.state_size, inner // groups)
        return Fixed("inputs", (sizes.conv_size - 1, channels)), Fixed("state", state, is_wide=True)

    def repeats(self, target: Target) -> int:
        """Number of times that the vectors of a group are sent when context ranks exchange heads for tokens."""
        sizes = self.sizes
        return target.repeats_of_heads(target.own_heads(sizes.num_heads), target.own_heads(sizes.num_groups))

    def held(self, bc: Value, target: Target) -> Value:
        """Return `bc`, the vectors of the groups, as one rank holds them for the scan. Context ranks may hold the
        vectors of the same group.
        """
        return replace(bc, width=bc.local_width(target) * self.repeats(target), cut=False, heads=0)

    def scanned(self, target: Target) -> tuple[int, int]:
        """Numbers of heads and of groups that one rank scans."""
        groups = target.own_heads(self.sizes.num_groups) * self.repeats(target)
        heads = target.own_heads(self.sizes.num_heads)
        return target.exchanged_heads(heads), target.exchanged_heads(groups)


def _convolution(name: str, channels: int, taps: int, **cut: Any) -> tuple[Parameter, Parameter]:
    weight = Parameter(name=f"{name}.weight", shape=(channels, taps), role=Role.TAPS, **cut)
    return weight, replace(weight, name=f"{name}.bias", shape=(channels,), role=Role.BIAS)


@dataclass(frozen=True, kw_only=True)
class ExchangeHeads(Step):
    """Exchange of heads for tokens, if context ranks share the sequences; otherwise nothing."""

    mixer: Mamba2

    def on(self, target: Target) -> Step:
        """Return the step with its message."""
        if target.way is None:
            return self
        inner, bc, step = self.reads
        widths = inner.local_width(target), step.local_width(target)
        message = Message(
            Operation.ALL_TO_ALL, target.tokens * (sum(widths) + self.mixer.held(bc, target).width), axis="context"
        )
        return replace(self, forward=(message,), backward=(message,))


@dataclass(frozen=True, kw_only=True)
class Convolve(Pointwise):
    """Causal convolution of each channel, then SiLU."""

    mixer: Mamba2

    def on(self, target: Target) -> Step:
        """Return the step with the inputs, which it saves."""
        inner, bc = self.reads
        return replace(self, keeps=(inner, self.mixer.held(bc, target)))

    def passes(self, target: Target) -> Passes:
        """Bytes that the convolution and SiLU read and write.

        If compiled, the forward pass reads and writes the channels once, and the backward pass reads two tensors and
        writes one. Uncompiled, each tap but the last one reads two tensors and writes one, in the forward pass and in
        the backward pass, which convolves again; the gradients of a tap read two more.
        """
        channels = sum(x.bytes(target) for x in (self.reads[0], self.mixer.held(self.reads[1], target)))
        if target.compiled:
            return Passes(forward=2 * channels, backward=3 * channels)
        taps = self.mixer.sizes.conv_size - 1
        return Passes(forward=(4 + 3 * taps) * channels, backward=(9 + 8 * taps) * channels)

    def temporary(self, target: Target, inside: int) -> int:
        """Bytes of the gradients of the result, of the sums before SiLU and of the inputs, and of a product."""
        del inside
        return 4 * self.reads[0].bytes(target)


@dataclass(frozen=True, kw_only=True)
class Scan(Step):
    """Chunked scan of the heads of a rank."""

    mixer: Mamba2

    def on(self, target: Target) -> Step:
        """Return the step with the values that the scan saves: the operands and, for each chunk, the products C B^T and
        the state before the chunk. The first chunk begins with no state.
        """
        inner, bc, step = self.reads
        operands = (inner, self.mixer.held(bc, target), step)
        (heads, groups), sizes = self.mixer.scanned(target), self.mixer.sizes
        lengths = list(self._lengths(target))
        name, state = self.mixer.name, heads * sizes.head_size * sizes.state_size
        scores = Value(f"{name} scores", groups * sum(q * q for q in lengths), Rows.SEQUENCES)
        states = Value(f"{name} states", (len(lengths) - 1) * state, Rows.SEQUENCES, kind=Kind.WIDE)
        return replace(self, reads=operands, keeps=(*operands, scores, states))

    def _lengths(self, target: Target) -> Iterator[int]:
        """Yield the number of tokens of each chunk of a sequence."""
        chunk = self.mixer.sizes.chunk_size
        return (min(chunk, target.length - first) for first in range(0, target.length, chunk))

    @property
    def is_core(self) -> bool:
        """True: `training.recompute = "selective"` runs the scan again in the backward pass."""
        return True

    @property
    def is_scan(self) -> bool:
        """True: the products of the step are those of a scan."""
        return True

    def inner_products(self, target: Target) -> tuple[Product, ...]:
        """Products of one rank in one micro-batch. Each chunk of Q tokens has C B^T, [Q, N] x [N, Q], per group, and
        the weighted inputs, [Q, Q] x [Q, P], per head. Each chunk but the first one reads the state before it,
        [Q, N] x [N, R P] per group of R heads, and each chunk but the last one adds to the state, [N, Q] x [Q, R P].
        """
        (heads, groups), sizes = self.mixer.scanned(target), self.mixer.sizes
        of_group = heads // groups * sizes.head_size
        products = []
        lengths = list(self._lengths(target))
        for place, q in enumerate(lengths):
            products += [
                Product(q, sizes.state_size, q, target.sequences * groups),
                Product(q, q, sizes.head_size, target.sequences * heads),
            ]
            if place:
                products.append(Product(q, sizes.state_size, of_group, target.sequences * groups))
            if place + 1 < len(lengths):
                products.append(Product(sizes.state_size, q, of_group, target.sequences * groups))
        return tuple(products)

    def passes(self, target: Target) -> Passes:
        """Bytes of the decays [Q, Q] of each chunk and head.

        The forward pass reads or writes the decays ten times: their logarithms (1), the sums over segments (2), the
        mask (2), the exponential (2), and the product with C B^T (3). The backward pass computes them again and reads
        or writes tensors of their size 12 times more. The states are small beside them.
        """
        heads, _ = self.mixer.scanned(target)
        squares = sum(q * q for q in self._lengths(target)) * target.sequences * heads * target.bytes_of(Kind.WIDE)
        return Passes(forward=10 * squares, backward=22 * squares)

    def temporary(self, target: Target, inside: int) -> int:
        """Bytes of the gradients of the operands and of the result, and of the decays and their gradients in the
        longest chunk.
        """
        del inside
        heads, _ = self.mixer.scanned(target)
        square = max(self._lengths(target)) ** 2 * target.sequences * heads * target.bytes_of(Kind.WIDE)
        return 3 * self.gives[0].bytes(target) + 2 * self.reads[1].bytes(target) + 5 * square


@dataclass(frozen=True, kw_only=True)
class ExchangeTokens(Step):
    """Exchange of tokens for heads after the scan, if context ranks share the sequences; otherwise nothing."""

    mixer: Mamba2

    def on(self, target: Target) -> Step:
        """Return the step with its message."""
        if target.way is None:
            return self
        message = Message(Operation.ALL_TO_ALL, self.reads[0].elements(target), axis="context")
        return replace(self, forward=(message,), backward=(message,))


@dataclass(frozen=True, kw_only=True)
class GateAndNormalise(Pointwise):
    """norm(Y silu(Z)) over groups of columns. If there are more tensor ranks than groups, the ranks sum squares."""

    mixer: Mamba2

    def on(self, target: Target) -> Step:
        """Return the step with its messages and the values that it saves."""
        groups = self.mixer.sizes.norm_groups
        roots = Value(f"{self.mixer.name} roots", groups, cut=True, heads=groups, kind=Kind.ROOT)
        kept = replace(self, keeps=(*self.reads, roots))
        if not target.share_heads(groups):
            return kept
        message = Message(Operation.ALL_REDUCE, target.tokens * groups, kind=Kind.WIDE)
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
