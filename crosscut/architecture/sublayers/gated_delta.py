r"""Gated delta net: a mixer with a state (`recurrent`), whose groups share queries and keys.

    convolved values V, queries and keys, step sizes, strengths --> delta rule --> Y        norm(Y) silu(Z) of each head

A group is a key head with its query, and the heads are value heads. The norm has one weight for all heads, so each rank
computes only a part of the weight's gradient.

Source: Yang et al. 2024 (arXiv 2412.06464), section 3.
"""

from dataclasses import dataclass, replace

from crosscut.architecture.parameters import ONES, Cut, Law, Parameter, Role, Start, columns, columns_by_heads, rows
from crosscut.architecture.steps import Passes, Rows, Step, Value
from crosscut.architecture.sublayers.recurrent import STEP_BIAS, Heads, Recurrence, Recurrent, convolution, dynamics
from crosscut.architecture.target import Kind, Target
from crosscut.config import ModelConfig
from crosscut.config.parts.gated_delta import GatedDeltaConfig

_RATES = Start(Law.LOG_UNIFORM, 0.01, 16.0)
"""Initial values of the decay rates. The published code draws them between 0 and 16, and a rate of 0 has no
logarithm."""


@dataclass(frozen=True, kw_only=True)
class GatedDelta(Recurrent):
    """Gated delta net."""

    @classmethod
    def of(cls, model: ModelConfig, name: str) -> "GatedDelta":
        """Describe the gated delta net of a model in the part `name`."""
        sizes, hidden, bias = model.gated_delta, model.hidden_size, model.biases == "all"
        heads = _heads(sizes)
        width, number, wide, groups = heads.width, heads.number, heads.vectors_width, heads.num_groups
        by_groups = {"cut": Cut.HEADS, "heads": groups, "num_matrices": 2}
        starts = {"log_rate": _RATES, "step_bias": STEP_BIAS}
        return cls(
            name=name,
            sizes=sizes,
            heads=heads,
            gate=columns(f"{name}.inputs.gate", hidden, width, bias=bias),
            inner=columns(f"{name}.inputs.value", hidden, width, bias=bias),
            vectors=columns_by_heads(f"{name}.inputs.query_key", hidden, wide, heads=groups, bias=bias, num_matrices=2),
            controls=tuple(columns(f"{name}.inputs.{of}", hidden, number, bias=bias) for of in ("step", "strength")),
            convolution=convolution(f"{name}.convolution", width, heads.taps, bias=False, cut=Cut.COLUMNS),
            vector_convolution=convolution(f"{name}.query_key_convolution", wide, heads.taps, bias=False, **by_groups),
            dynamics=tuple(dynamics(f"{name}.{each}", (number,), start) for each, start in starts.items()),
            norm=Parameter(name=f"{name}.norm.weight", shape=(heads.size,), role=Role.NORM, inside=True, start=ONES),
            norm_groups=number,
            output=rows(f"{name}.output", width, hidden, bias=bias),
        )

    def recurrence(self, reads: tuple[Value, ...], mixed: Value) -> Step:
        """Return the delta rule."""
        return DeltaRule(reads=reads, gives=(mixed,), parameters=self.dynamics, part=self.name, heads=self.heads)


def _heads(sizes: GatedDeltaConfig) -> Heads:
    return Heads(
        number=sizes.num_value_heads,
        size=sizes.value_head_size,
        num_groups=sizes.num_key_heads,
        vector_size=sizes.key_head_size,
        taps=sizes.conv_size,
        chunk=sizes.chunk_size,
    )


@dataclass(frozen=True, kw_only=True)
class DeltaRule(Recurrence):
    """Chunked gated delta rule of the heads of a rank. Queries and keys read the state, and two matrices [Q, Q] are
    multiplied with [Q, P]: that of a triangular system, whose solution counts as a product with the whole square, and
    the weights of the changes.
    """

    num_readers, num_mixed = 2, 2

    def on(self, target: Target) -> Step:
        """Return the step with the values that it saves: those of each recurrence, and the errors of the state's
        guesses of the values.
        """
        step = super().on(target)
        width = self.heads.of_rank(target)[0] * self.heads.size * target.length
        return replace(step, keeps=(*step.keeps, Value(f"{self.part} errors", width, Rows.SEQUENCES)))

    def passes(self, target: Target) -> Passes:
        """Bytes of the decays [Q, Q] of each chunk and head, of tensors like the values, and of the states.

        The forward pass reads or writes the decays 18 times: their logarithms (1), the sums over segments (2), the mask
        (2), the exponential (2), the products with two kinds of scores (6), the part below the diagonal (2), the
        strengths (2), and the system (1). The backward pass computes them again and reads or writes tensors of their
        size 22 times more. The forward pass has 16 passes over tensors like the values, and six over the states, and
        the backward pass has 30 and twelve.
        """
        squares, width = self.square(target), self._width(target)
        values, states = width * target.length, width * self.heads.vector_size * len([*self.heads.chunks(target)])
        forward = 18 * squares + 16 * values + 6 * states
        return Passes(forward=forward, backward=40 * squares + 30 * values + 12 * states)

    def _width(self, target: Target) -> int:
        """Bytes of the values of one token of each sequence, on one rank in float32 or wider."""
        return target.sequences * self.heads.of_rank(target)[0] * self.heads.size * target.bytes_of(Kind.WIDE)

    def temporary(self, target: Target, inside: int) -> int:
        """Bytes of temporary tensors in the backward pass, in the last chunk or after it.

        In a chunk: the gradients of the result and of the values, the queries and keys after their norm and their
        gradients, and in the longest chunk, seven tensors like the decays, six like the values and three states. After
        the chunks: the joined gradients of the values, and the gradients of queries and keys, before and after the
        norm, in float32 or wider.
        """
        del inside
        inner, vectors = self.gives[0].bytes(target), self.reads[1].bytes(target)
        wide = self.reads[1].elements(target) * target.bytes_of(Kind.WIDE)
        longest = max(self.heads.chunks(target))
        in_chunk = 7 * self.square(target, longest) + (6 * longest + 3 * self.heads.vector_size) * self._width(target)
        return max(2 * inner + 2 * vectors + wide + in_chunk, 3 * (inner + vectors) + 4 * wide)
