r"""Mamba-2 mixer (SSD): a mixer with a state (`recurrent`), whose groups share the vectors B and C.

    convolved inputs U and vectors B and C, step sizes --> scan --> Y        norm(Y silu(Z)) over groups of columns

If there are more tensor ranks than groups of the norm, the ranks of a group add up their squares.

Source: Dao and Gu 2024 (arXiv 2405.21060), sections 6 and 7.
"""

from dataclasses import dataclass

from crosscut.architecture.parameters import ONES, Cut, Law, Parameter, Role, Start, columns, columns_by_heads, rows
from crosscut.architecture.steps import Passes, Step, Value
from crosscut.architecture.sublayers.recurrent import STEP_BIAS, Heads, Recurrence, Recurrent, convolution, dynamics
from crosscut.architecture.target import Target
from crosscut.config import ModelConfig
from crosscut.config.parts.mamba2 import Mamba2Config

_RATES = Start(Law.LOG_UNIFORM, 1.0, 16.0)
"""Initial values of the decay rates, as in the published code (mamba_ssm 2.2)."""


@dataclass(frozen=True, kw_only=True)
class Mamba2(Recurrent):
    """Mamba-2 mixer."""

    @classmethod
    def of(cls, model: ModelConfig, name: str) -> "Mamba2":
        """Describe the Mamba-2 mixer of a model in the part `name`."""
        sizes, hidden, bias = model.mamba2, model.hidden_size, model.biases == "all"
        heads = _heads(sizes)
        inner, wide, groups = heads.width, heads.vectors_width, sizes.num_groups
        by_groups = {"cut": Cut.HEADS, "heads": groups, "num_matrices": 2}
        starts = {"log_rate": _RATES, "skip": ONES, "step_bias": STEP_BIAS}
        return cls(
            name=name,
            sizes=sizes,
            heads=heads,
            gate=columns(f"{name}.inputs.gate", hidden, inner, bias=bias),
            inner=columns(f"{name}.inputs.inner", hidden, inner, bias=bias),
            vectors=columns_by_heads(f"{name}.inputs.bc", hidden, wide, heads=groups, bias=bias, num_matrices=2),
            controls=(columns(f"{name}.inputs.step", hidden, heads.number, bias=bias),),
            convolution=convolution(f"{name}.convolution", inner, heads.taps, bias=True, cut=Cut.COLUMNS),
            vector_convolution=convolution(f"{name}.bc_convolution", wide, heads.taps, bias=True, **by_groups),
            dynamics=tuple(dynamics(f"{name}.{each}", (heads.number,), start) for each, start in starts.items()),
            norm=Parameter(name=f"{name}.norm.weight", shape=(inner,), role=Role.NORM, cut=Cut.COLUMNS, start=ONES),
            norm_groups=sizes.norm_groups,
            output=rows(f"{name}.output", inner, hidden, bias=bias),
        )

    def recurrence(self, reads: tuple[Value, ...], mixed: Value) -> Step:
        """Return the scan."""
        return Scan(reads=reads, gives=(mixed,), parameters=self.dynamics, part=self.name, heads=self.heads)


def _heads(sizes: Mamba2Config) -> Heads:
    return Heads(
        number=sizes.num_heads,
        size=sizes.head_size,
        num_groups=sizes.num_groups,
        vector_size=sizes.state_size,
        taps=sizes.conv_size,
        chunk=sizes.chunk_size,
    )


@dataclass(frozen=True, kw_only=True)
class Scan(Recurrence):
    """Chunked scan of the heads of a rank. Its scores are C B^T, and its one product [Q, Q] x [Q, P] weighs the
    inputs.
    """

    num_readers, num_mixed = 1, 1

    def passes(self, target: Target) -> Passes:
        """Bytes of the decays [Q, Q] of each chunk and head.

        The forward pass reads or writes the decays ten times: their logarithms (1), the sums over segments (2), the
        mask (2), the exponential (2), and the product with C B^T (3). The backward pass computes them again and reads
        or writes tensors of their size 12 times more. The states are small beside them.
        """
        squares = self.square(target)
        return Passes(forward=10 * squares, backward=22 * squares)

    def temporary(self, target: Target, inside: int) -> int:
        """Bytes of the gradients of the operands and of the result, and of the decays and their gradients in the
        longest chunk.
        """
        del inside
        longest = self.square(target, max(self.heads.chunks(target)))
        return 3 * self.gives[0].bytes(target) + 2 * self.reads[1].bytes(target) + 5 * longest
