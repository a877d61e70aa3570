"""MLP of two matrices, A cut by columns and B cut by rows: Y = act(X A) B (paper, section 3, Figure 3a).

    X --f--> X A_i --act--> Y_i B_i --g--> sum_i Y_i B_i + bias

f is the entry into the parallel region, and g is the exit, which sums the results of all ranks.
"""

from dataclasses import dataclass

from crosscut.architecture.needs import Share
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
from crosscut.architecture.target import Target
from crosscut.config import ModelConfig
from crosscut.config.parts.kinds import FeedForward

KINDS = (FeedForward.GELU, FeedForward.GELU_EXACT, FeedForward.RELU2)
"""Kinds of parts that the class `MLP` describes."""


_EAGER_PASSES = {FeedForward.GELU: (2, 3), FeedForward.GELU_EXACT: (2, 3), FeedForward.RELU2: (4, 7)}
"""Number of tensors that the uncompiled kernels of an activation function read or write, as (forward, backward)."""


class EachToken:
    """Sublayer that treats each token alone."""

    @property
    def shares(self) -> frozenset[Share]:
        """Empty: the sublayer reads no shared tensor."""
        return frozenset()

    def memory(self, target: Target) -> tuple[()]:
        """Return an empty tuple: the sublayer needs no earlier tokens."""
        del target
        return ()


@dataclass(frozen=True)
class MLP(EachToken):
    """MLP without a gate: Y = act(X A) B."""

    name: str
    """Name of the part, which is the prefix of all names."""
    kind: FeedForward
    """Name of the activation."""
    expand: Matrix
    """Matrix A, before the activation."""
    contract: Matrix
    """Matrix B, after the activation."""

    @classmethod
    def of(cls, model: ModelConfig, name: str, kind: FeedForward) -> "MLP":
        """Describe the MLP of a model in the part `name`. `kind` is the activation."""
        hidden, inner, bias = model.hidden_size, model.mlp_size, model.biases == "all"
        return cls(
            name,
            kind,
            expand=columns(f"{name}.expand", hidden, inner, bias=bias),
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
        expanded, expand = multiply_columns(entered, self.expand, name=f"{name} expand", keeps=keeps)
        activated = Value(f"{name} activated", self.expand.out_features, cut=True, is_cheap=True)
        activate = Activate(
            reads=(expanded,), gives=(activated,), keeps=(expanded,), kind=self.kind, matrix=self.expand
        )
        contracted, contract = multiply_rows(activated, self.contract, name=f"{name} contract")
        return contracted, [expand, activate, contract]


@dataclass(frozen=True, kw_only=True)
class Activate(Pointwise):
    """Apply the activation between the two matrices."""

    kind: FeedForward
    matrix: Matrix
    """The matrix before the activation. The method `passes` also counts the gradient of this matrix's bias."""

    def passes(self, target: Target) -> Passes:
        """Bytes that the activation and the bias gradient read and write.

        If compiled, the forward pass reads one tensor and writes one, and the backward pass reads two and writes one.
        Uncompiled, GeLU reads and writes the same number of tensors. Squared ReLU reads and writes four tensors forward
        and seven backward. The bias gradient reads one more tensor.
        """
        value = self.gives[0]
        inner = value.bytes(target)
        forward, backward = (2, 3) if target.compiled else _EAGER_PASSES[self.kind]
        gelu = 0 if self.kind is FeedForward.RELU2 else value.elements(target)
        has_gradient = self.matrix.bias is not None and not self.matrix.bias.is_frozen
        return Passes(forward=forward * inner, backward=(backward + has_gradient) * inner, gelu=gelu)

    def temporary(self, target: Target, inside: int) -> int:
        """Bytes of the gradient of the activation's result."""
        del inside
        return self.gives[0].bytes(target)
