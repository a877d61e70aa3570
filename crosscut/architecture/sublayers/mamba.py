r"""Mamba-1 mixer (S6), with its channels divided over the tensor ranks.

    X --f--> gate Z_i                                         ---------------------------------\
    X --f--> inputs --> convolution and SiLU --> U_i ---------------------> scan --> Y_i silu(Z_i) O_i --g--> sum + bias
                        U_i P_i --g--> norms --f--> step vector S_i --> step sizes -->/
                                                    B and C ------------------------>/

f is the entry into the parallel region, and g is the exit. Each rank has whole channels. The selection consists of the
step vector and of the vectors B and C, and depends on all channels: each rank computes the part of its own channels, g
sums the parts, and f returns the sums to the region. If the layout splits the sequence, the norms between g and f treat
only a rank's own tokens.

If context ranks share the sequences, each rank exchanges channels for tokens before the convolution, which then needs
no tokens of other ranks, and exchanges them back after the scan. The selection is then a sum over tensor and context
ranks: a reduce-scatter over the context ranks comes before g, and an all-gather after f, so that g sums only a rank's
own tokens. The selection is narrow. To exchange the convolved channels back before the product, and the step sizes
after it, would send more.

Source: Gu and Dao 2023 (arXiv 2312.00752), section 3; the norms: Lieber et al. 2024 (arXiv 2403.19887), section 6.4.

Legend: D channels, N elements of the state of a channel, R elements of the step vector, Q tokens of a chunk.
"""

from dataclasses import dataclass, replace

from crosscut.architecture.needs import Fixed, Share
from crosscut.architecture.parameters import ONES, Cut, Law, Matrix, Parameter, Role, Start, columns, rows
from crosscut.architecture.steps import (
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
from crosscut.architecture.sublayers.context import over_context
from crosscut.architecture.sublayers.gated_mlp import ActivateGate
from crosscut.architecture.sublayers.norm import Norm, vector_norm
from crosscut.architecture.sublayers.recurrent import STEP_BIAS, Convolve, ScanStep, convolution, dynamics
from crosscut.architecture.target import Kind, Target
from crosscut.config import ModelConfig
from crosscut.config.parts.kinds import FeedForward
from crosscut.config.parts.mamba import MambaConfig

_RATES = Start(Law.LOG_INDEX, 0.0)
"""Initial values of the decay rates: 1 to N in each channel (section 3.6)."""

NORMS = ("step_norm", "b_norm", "c_norm")
"""Names of the norms of the step vector, of B and of C."""


@dataclass(frozen=True)
class Mamba:
    """Mamba-1 mixer."""

    name: str
    """Name of the part, which is the prefix of all names."""
    sizes: MambaConfig
    gate: Matrix
    inner: Matrix
    convolution: tuple[Parameter, ...]
    """Taps and bias of the channels."""
    selection: Matrix
    """Projection of the channels to the step vector and to the vectors B and C."""
    norms: tuple[Norm, ...]
    """Norms of the step vector, of B and of C; empty without norms."""
    step: Matrix
    """Projection of the step vector to the step sizes of the channels."""
    dynamics: tuple[Parameter, ...]
    """Logarithms of the decay rates, skip, and bias of the step size, of each channel."""
    output: Matrix

    @classmethod
    def of(cls, model: ModelConfig, name: str) -> "Mamba":
        """Describe the Mamba-1 mixer of a model in the part `name`."""
        sizes, hidden, bias = model.mamba, model.hidden_size, model.biases == "all"
        inner, rank = sizes.inner_size, sizes.step_rank
        selection = rows(f"{name}.selection", inner, sizes.selection_size, bias=False)
        step = columns(f"{name}.step", rank, inner, bias=False)
        starts = {
            "log_rate": ((inner, sizes.state_size), _RATES),
            "skip": ((inner,), ONES),
            "step_bias": ((inner,), STEP_BIAS),
        }
        widths = (rank, sizes.state_size, sizes.state_size)
        norms = tuple(vector_norm(model, f"{name}.{each}", width) for each, width in zip(NORMS, widths, strict=True))
        return cls(
            name=name,
            sizes=sizes,
            gate=columns(f"{name}.inputs.gate", hidden, inner, bias=bias),
            inner=columns(f"{name}.inputs.inner", hidden, inner, bias=bias),
            convolution=convolution(f"{name}.convolution", inner, sizes.conv_size, bias=True, cut=Cut.COLUMNS),
            selection=replace(selection, weight=replace(selection.weight, role=Role.MATRIX)),
            norms=norms if sizes.vector_norms else (),
            step=replace(step, weight=replace(step.weight, start=Start(Law.NORMAL, (3 * rank) ** -0.5))),
            dynamics=tuple(dynamics(f"{name}.{each}", *kind) for each, kind in starts.items()),
            output=rows(f"{name}.output", inner, hidden, bias=bias),
        )

    def steps(self, x: Value) -> tuple[Value, list[Step]]:
        """Return the sublayer's output, and the steps that compute the output from the input `x`."""
        name = self.name
        entered, entering = enter(x, f"{name} input")
        gate, by_gate = multiply_columns(entered, self.gate, name=f"{name} gate", keeps=x)
        inner, by_inner = multiply_columns(entered, self.inner, name=f"{name} inner", keeps=x)
        whole, exchange = over_context(inner, f"{name} over context")
        convolved = replace(inner, name=f"{name} convolved", is_cheap=True)
        taps = self.sizes.conv_size
        convolve = Convolve(reads=(whole,), gives=(convolved,), parameters=self.convolution, taps=taps)
        selection, selecting = self._selection(convolved)
        step, by_step = self._step_sizes(selection)
        scanned = Value(f"{name} scanned", self.sizes.inner_size, cut=True)
        scan = Scan(reads=(convolved, step, selection), gives=(scanned,), parameters=self.dynamics, mixer=self)
        returned, back = over_context(scanned, f"{name} over context")
        gated = replace(scanned, name=f"{name} gated", is_cheap=True)
        both = (gate, returned)
        activate = ActivateGate(reads=both, gives=(gated,), keeps=both, kind=FeedForward.SWIGLU)
        projected, project = multiply_rows(gated, self.output, name=f"{name} projected")
        left, leaving = leave(projected, f"{name} output", bias=self.output.bias)
        before = [entering, by_gate, by_inner, exchange, convolve, *selecting]
        return left, [*before, by_step, scan, back, activate, project, leaving]

    def _selection(self, convolved: Value) -> tuple[Value, list[Step]]:
        """Return the selection of all tokens, and the steps that compute it from the channels."""
        name = f"{self.name} selection"
        part, project = multiply_rows(convolved, self.selection, name=f"{name}, part")
        part = replace(part, rows=Rows.SHARED)
        summed, scatter = over_context(part, name, Operation.REDUCE_SCATTER, Operation.ALL_GATHER)
        left, leaving = leave(summed, name, overlaps=False)
        normed, norming = self._normed(left)
        entered, entering = enter(normed, name, overlaps=False)
        whole, gather = over_context(entered, name, Operation.ALL_GATHER, Operation.REDUCE_SCATTER, gives=Rows.SHARED)
        return whole, [replace(project, gives=(part,)), scatter, leaving, *norming, entering, gather]

    def _normed(self, selection: Value) -> tuple[Value, list[Step]]:
        """Return the selection after the norms, and the steps of the norms."""
        if not self.norms:
            return selection, []
        vectors = tuple(
            replace(selection, name=f"{self.name} {name}", width=norm.size)
            for name, norm in zip(NORMS, self.norms, strict=True)
        )
        pairs = [norm.step(vector.name, vector) for norm, vector in zip(self.norms, vectors, strict=True)]
        joined = replace(selection, name=f"{self.name} selection, normed")
        join = Pointwise(reads=tuple(normed for normed, _ in pairs), gives=(joined,))
        return joined, [Pointwise(reads=(selection,), gives=vectors), *(step for _, step in pairs), join]

    def _step_sizes(self, selection: Value) -> tuple[Value, Step]:
        """Return the step sizes before the softplus, and the step that computes them from the selection."""
        vector = replace(selection, rows=Rows.TOKENS, width=self.step.in_features)
        y, multiply = multiply_columns(vector, self.step, name=f"{self.name} step", keeps=selection)
        keeps = tuple(replace(each, rows=Rows.SHARED) for each in multiply.keeps)
        return y, replace(multiply, keeps=keeps)

    @property
    def shares(self) -> frozenset[Share]:
        """The numbers of the documents."""
        return frozenset({Share.DOCUMENTS})

    def memory(self, target: Target) -> tuple[Fixed, ...]:
        """Return the last inputs of the convolution, and the state, of one rank."""
        channels = target.own(self.sizes.inner_size)
        state = (self.sizes.state_size, channels)
        return Fixed("inputs", (self.sizes.conv_size - 1, channels)), Fixed("state", state, is_wide=True)


@dataclass(frozen=True, kw_only=True)
class Scan(ScanStep):
    """Selective scan of the channels of a rank."""

    mixer: Mamba

    def on(self, target: Target) -> Step:
        """Return the step with the values that the scan saves: the operands and, for each chunk but the first one, the
        state before the chunk.
        """
        name, chunks = self.mixer.name, -(-target.length // self.mixer.sizes.chunk_size)
        states = Value(f"{name} states", (chunks - 1) * self._state(target), Rows.SEQUENCES, kind=Kind.WIDE)
        return replace(self, keeps=(*self.reads, states))

    def _state(self, target: Target) -> int:
        """Number of elements of the state of one sequence on one rank."""
        sizes = self.mixer.sizes
        return sizes.inner_size // target.tensor // target.context * sizes.state_size

    def inner_products(self, target: Target) -> tuple[Product, ...]:
        """The products of a token's vector C with the states, [1, N] x [N, D]."""
        sizes = self.mixer.sizes
        channels = self._state(target) // sizes.state_size
        return (Product(1, sizes.state_size, channels, target.sequences * target.length),)

    def passes(self, target: Target) -> Passes:
        """Bytes of the states and of the decays [N, D] of each token.

        The forward pass reads or writes tensors of this size eight times: the logarithms of the decays (1), the
        exponential (2), the terms that enter the states (1), the sums (3), and the outputs (1). The backward pass
        computes decays and states again (7), and reads or writes 22 more.
        """
        tokens = target.sequences * target.length
        states = tokens * self._state(target) * target.bytes_of(Kind.WIDE)
        return Passes(forward=8 * states, backward=29 * states)

    def temporary(self, target: Target, inside: int) -> int:
        """Bytes of the gradients of the operands and of the result, and of the decays, states and gradients of states
        of one chunk.
        """
        del inside
        of_chunk = target.sequences * min(self.mixer.sizes.chunk_size, target.length) * self._state(target)
        operands = 3 * self.gives[0].bytes(target) + 2 * self.reads[2].bytes(target)
        return operands + 3 * of_chunk * target.bytes_of(Kind.WIDE)
