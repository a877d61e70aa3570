r"""Gated MLP of three matrices: Y = (act(X G) * X U) B, with G and U cut by columns and B by rows.

    X --f--> X G_i --act--\
                           * --> Y_i B_i --g--> sum_i Y_i B_i + bias
    X --f--> X U_i -------/

f is the entry into the parallel region and runs once for both products. g is the exit and sums the results of all
ranks. Source: Shazeer 2020 (arXiv 2002.05202).
"""

from dataclasses import dataclass

from crosscut.architecture.parameters import Matrix, columns, rows
from crosscut.architecture.steps import (
    Passes,
    Pointwise,
    Step,
    Value,
    enter,
    leave,
    multiply_columns,
    multiply_rows,
)
from crosscut.architecture.sublayers.mlp import EachToken
from crosscut.architecture.target import Target
from crosscut.config import ModelConfig
from crosscut.config.parts.kinds import FeedForward

KINDS = (FeedForward.SWIGLU, FeedForward.GEGLU)
"""Kinds of parts that the class `GatedMLP` describes."""


@dataclass(frozen=True)
class GatedMLP(EachToken):
    """Gated MLP: Y = (act(X G) * X U) B."""

    name: str
    """Name of the part, which is the prefix of all names."""
    kind: FeedForward
    """Name of the gate's activation."""
    gate: Matrix
    """Matrix G, whose product goes through the activation."""
    up: Matrix
    """Matrix U of the branch without an activation."""
    contract: Matrix
    """Matrix B, which returns to the hidden size."""

    @classmethod
    def of(cls, model: ModelConfig, name: str, kind: FeedForward) -> "GatedMLP":
        """Describe the gated MLP of a model in the part `name`. `kind` is the activation of the gate."""
        hidden, inner, bias = model.hidden_size, model.mlp_size, model.biases == "all"
        return cls(
            name,
            kind,
            gate=columns(f"{name}.expand.gate", hidden, inner, bias=bias),
            up=columns(f"{name}.expand.up", hidden, inner, bias=bias),
            contract=rows(f"{name}.contract", inner, hidden, bias=bias),
        )

    def steps(self, x: Value) -> tuple[Value, list[Step]]:
        """Return the sublayer's output, and the steps that compute the output from the input `x`."""
        entered, entering = enter(x, f"{self.name} input")
        contracted, inner = self.inside(entered, keeps=x)
        left, leaving = leave(contracted, f"{self.name} output", bias=self.contract.bias)
        return left, [entering, *inner, leaving]

    def inside(self, entered: Value, *, keeps: Value) -> tuple[Value, list[Step]]:
        """Return the result inside the parallel region, of which each rank has a summand, and the steps that compute it
        from the input `entered`. The steps save `keeps` in place of the input.
        """
        name = self.name
        gate, multiply_gate = multiply_columns(entered, self.gate, name=f"{name} gate", keeps=keeps)
        up, multiply_up = multiply_columns(entered, self.up, name=f"{name} up", keeps=keeps)
        activated = Value(f"{name} activated", self.up.out_features, cut=True, is_cheap=True)
        activate = ActivateGate(reads=(gate, up), gives=(activated,), keeps=(gate, up), kind=self.kind)
        contracted, contract = multiply_rows(activated, self.contract, name=f"{name} contract")
        return contracted, [multiply_gate, multiply_up, activate, contract]


@dataclass(frozen=True, kw_only=True)
class ActivateGate(Pointwise):
    """Apply the activation to the gate branch, and multiply the two branches element by element."""

    kind: FeedForward

    def passes(self, target: Target) -> Passes:
        """Bytes that the activation and the product of the branches read and write.

        If compiled, the forward pass reads two tensors and writes one, and the backward pass reads three and writes
        two. Uncompiled, the forward pass reads and writes five tensors in total, and the backward pass nine.
        """
        inner = self.gives[0].bytes(target)
        forward, backward = (3, 5) if target.compiled else (5, 9)
        gelu = self.gives[0].elements(target) if self.kind is FeedForward.GEGLU else 0
        return Passes(forward=forward * inner, backward=backward * inner, gelu=gelu)

    def temporary(self, target: Target, inside: int) -> int:
        """Bytes of three gradients: of the result, and of the two branches."""
        del inside
        return 3 * self.gives[0].bytes(target)
