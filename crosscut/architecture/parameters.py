"""Global shapes of a model's parameters, and the part of each parameter that one tensor rank holds.

Each parameter states how the tensor ranks divide it (`Cut`) and its purpose (`Role`). The role decides the initial
values, whether weight decay applies and which learning rate applies, so no code has to guess these from the parameter's
name.

Shapes: O outputs, I inputs. As in PyTorch, a weight is [O, I]. The columns of the paper's matrices are therefore
dimension 0, and the rows are dimension 1.
"""

from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import NamedTuple

from crosscut.architecture.target import Target
from crosscut.config.conventions import VOCABULARY_MULTIPLE, padded_vocab_size
from crosscut.config.optimizer import ParameterGroup
from crosscut.config.training import InitialSpread

INITIAL_SPREAD = 0.02
"""Standard deviation of the initial weights (paper, section 4.1.1)."""


class Role(Enum):
    """Purpose of a parameter, which decides its initial values, its weight decay and its learning rate."""

    MATRIX = "matrix"
    BEFORE_RESIDUAL = "matrix whose product is added to the residual stream"
    EMBEDDING = "embedding"
    """Embedding of tokens or positions. The embedding of tokens may also be the output projection (tied)."""
    HEAD = "output projection"
    """Weight that computes the logits, if the weight is not tied to the token embedding."""
    NORM = "norm"
    """Scale or shift of a norm."""
    BIAS = "bias"
    TAPS = "taps of a convolution"
    DYNAMICS = "decay rate, step size or skip of a recurrent mixer"
    BALANCE = "bias that balances the loads of experts"
    """This bias has no gradient. It follows the loads once per step."""
    DOWN = "first matrix of an adapter"
    UP = "second matrix of an adapter"
    """This matrix starts at zero, so that a new adapter changes nothing."""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies. It applies to matrices, embeddings and taps, but not to norms and biases
        (paper, section 4.1.1), and not to the dynamics of a recurrent mixer (Gu and Dao 2023, arXiv 2312.00752).
        """
        return self not in (Role.NORM, Role.BIAS, Role.DYNAMICS, Role.BALANCE)

    @property
    def group(self) -> ParameterGroup:
        """Group of parameters that this role belongs to. All parameters of a group have the same learning rate."""
        return _GROUPS[self]


_GROUPS = {
    Role.MATRIX: ParameterGroup.MATRIX,
    Role.BEFORE_RESIDUAL: ParameterGroup.MATRIX,
    Role.EMBEDDING: ParameterGroup.EMBEDDING,
    Role.HEAD: ParameterGroup.HEAD,
    Role.NORM: ParameterGroup.SCALAR,
    Role.BIAS: ParameterGroup.SCALAR,
    Role.TAPS: ParameterGroup.SCALAR,
    Role.DYNAMICS: ParameterGroup.SCALAR,
    Role.BALANCE: ParameterGroup.SCALAR,
    Role.DOWN: ParameterGroup.MATRIX,
    Role.UP: ParameterGroup.MATRIX,
}


class Law(Enum):
    """Law of a parameter's initial values."""

    NORMAL = "normal distribution with mean 0"
    CONSTANT = "the same value everywhere"
    LOG_UNIFORM = "logarithm of a number that is uniform between two limits"
    LOG_INDEX = "logarithm of the index in dimension 1, counted from 1"
    STEP_SIZE = "inverse softplus of a step size whose logarithm is uniform between the logarithms of two limits"


class Start(NamedTuple):
    """Rule for a parameter's initial values."""

    law: Law
    first: float
    """Standard deviation of a normal distribution, the constant, or the lower limit; unused by indexes."""
    last: float = 0.0
    """Upper limit; unused by the normal distribution, by a constant and by indexes."""


ZEROS, ONES = Start(Law.CONSTANT, 0.0), Start(Law.CONSTANT, 1.0)


class Cut(Enum):
    """Way in which the tensor ranks divide a parameter."""

    WHOLE = "every rank holds the whole parameter"
    COLUMNS = "dimension 0, the outputs of a weight or a bias"
    ROWS = "dimension 1, the inputs of a weight"
    HEADS = "dimension 0 in whole heads; ranks share a head if there are more ranks than heads"
    VOCABULARY = "dimension 0, padded to a multiple of `padded_to`, and of 128 times the number of ranks"


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    """Global shape, without the padding of the vocabulary."""
    role: Role
    cut: Cut = Cut.WHOLE
    heads: int = 0
    """Number of heads of a parameter that ranks divide only between heads (`Cut.HEADS`); 0 for other parameters."""
    num_matrices: int = 1
    """Number of matrices that the parameter stores. The rows of several matrices alternate by head: first the rows of
    head 0 of each matrix, then the rows of head 1 of each matrix."""
    stacked: int = 0
    """Number of matrices [O, I] that dimension 0 stacks, one for each expert; 0 for a single matrix. The ranks that
    share experts divide dimension 0. The ways of `cut` count dimensions from the second one."""
    inside: bool = False
    """Whether every rank holds the whole parameter but uses it inside a parallel region."""
    is_wide: bool = False
    """Whether layers use the parameter in at least float32, whatever the element type of the products is."""
    on_whole: bool = False
    """Whether every rank applies the parameter to whole sequences, even if the layout splits the sequence."""
    padded_to: int = VOCABULARY_MULTIPLE
    """Multiple to which `Cut.VOCABULARY` pads dimension 0."""
    num_inputs: int = 0
    """Fan-in of an embedding, for `InitialSpread.FAN_IN`. 0 for other parameters, whose fan-in is the size of the last
    dimension."""
    start: Start | None = None
    """Rule for the initial values. None means the rule of the parameter's role (`initial`)."""
    is_frozen: bool = False
    """Whether the parameter is left out of training. A frozen parameter has no gradient and no optimizer state."""

    def initial(self, num_residual_sums: int, spread: InitialSpread = InitialSpread.PAPER) -> Start:
        """Rule for the initial values. The rule does not depend on the layout: it uses the fan-in of the whole weight.

        Without a rule of its own (`start`), a parameter that weight decay does not reach starts at zero. The other
        parameters are drawn from a normal distribution. `spread` selects its deviation: 0.02 (paper, section 4.1.1) or
        1 / sqrt(fan-in). For a matrix before a residual sum, the deviation is divided by the square root of the number
        of residual sums, which is twice the number of layers in GPT-2 (paper, section 4.1.1).

        The first matrix of an adapter has the deviation that PEFT uses, 1 / sqrt(3 x number of inputs), and so have the
        taps of a convolution, whose inputs are the taps: PyTorch's own convolution has the same variance. The second
        matrix of an adapter starts at zero.
        """
        if self.start is not None:
            return self.start
        if not self.role.decays or self.role is Role.UP:
            return ZEROS
        if self.role in (Role.DOWN, Role.TAPS):
            return Start(Law.NORMAL, float((3 * self.shape[1]) ** -0.5))
        by_inputs = spread is InitialSpread.FAN_IN
        deviation = (self.num_inputs or self.shape[-1]) ** -0.5 if by_inputs else INITIAL_SPREAD
        return Start(Law.NORMAL, deviation / num_residual_sums**0.5 if self.role is Role.BEFORE_RESIDUAL else deviation)

    @property
    def module(self) -> str:
        """Name of the parameter's module in the module around it."""
        return self.name.split(".")[-2]

    def named(self, prefix: str) -> "Parameter":
        """Return the parameter with `prefix` added before its name."""
        return replace(self, name=f"{prefix}{self.name}")

    def padded_shape(self, tensor: int) -> tuple[int, ...]:
        """Global shape for `tensor` tensor ranks, with the padding of the vocabulary."""
        if self.cut is not Cut.VOCABULARY:
            return self.shape
        return (padded_vocab_size(self.shape[0], tensor, self.padded_to), *self.shape[1:])

    def dim_cut(self, tensor: int) -> int | None:
        """Dimension along which the parameter is divided if the tensor axis has `tensor` ranks. None if each rank holds
        the whole parameter.
        """
        if self.cut is Cut.WHOLE or (self.cut is Cut.HEADS and self.heads < tensor):
            return None
        return (1 if self.cut is Cut.ROWS else 0) + (self.stacked > 0)

    def on(self, target: Target) -> "LocalParameter":
        """Return the part of the parameter that one rank holds.

        Each rank computes only a part of the gradient of a parameter that every rank holds whole and that a parallel
        region uses. With a split sequence, this is also true for every whole parameter that a rank applies only to its
        part of the sequence. A frozen parameter has no gradient.
        """
        ranks = target.tensor
        shape, dim = list(self.padded_shape(ranks)), self.dim_cut(ranks)
        if dim is not None:
            shape[dim] = target.own(shape[dim])
        if self.stacked:
            shape[0] = target.own_experts(shape[0])
        is_partial = self.inside or self.cut is Cut.HEADS or (target.split and not self.on_whole)
        return LocalParameter(
            name=self.name,
            shape=tuple(shape),
            role=self.role,
            is_expert=self.stacked > 0,
            is_wide=self.is_wide,
            is_whole=dim is None,
            num_parts=1 if dim is None else ranks,
            has_partial_gradient=dim is None and ranks > 1 and is_partial and not self.is_frozen,
            is_frozen=self.is_frozen,
        )


@dataclass(frozen=True, kw_only=True)
class LocalParameter:
    """The part of a parameter that one tensor rank holds."""

    name: str
    shape: tuple[int, ...]
    role: Role
    is_expert: bool
    """Whether the parameter stacks experts, which ranks may share (`Layout.ranks_of`)."""
    is_wide: bool
    """Whether layers use the parameter in at least float32."""
    is_whole: bool
    """Whether every tensor rank holds the same, whole parameter."""
    num_parts: int
    """Number of parts into which the tensor ranks divide the parameter; 1 if every rank holds the whole parameter."""
    has_partial_gradient: bool
    """Whether each tensor rank computes only a part of the gradient, so that the ranks must sum the parts."""
    is_frozen: bool
    """Whether the parameter is left out of training."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Adapter:
    """Low-rank adapter of a matrix (LoRA): Y = X A + scale (X D) U, with D [inputs, r] and U [r, outputs].

    Source: Hu et al. 2021 (arXiv 2106.09685), section 4.1, where D is called A and U is called B.
    """

    down: Parameter
    """Matrix D, stored as [r, inputs]. If the weight stores several matrices, each matrix has its own adapter, and the
    rows of the first adapter come before the rows of the second adapter."""
    up: Parameter
    """Matrix U, stored as [outputs, r]. The rows are in the order of the weight's rows."""
    scale: float

    @property
    def rank(self) -> int:
        """Rank r of the adapter: the number of columns of U."""
        return self.up.shape[1]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The two matrices D and U."""
        return self.down, self.up


@dataclass(frozen=True)
class Matrix:
    """Weight and bias of a linear layer: Y = X A + b."""

    weight: Parameter
    bias: Parameter | None = None
    adapter: Adapter | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The weight and, if the layer has them, the bias and the adapter's matrices."""
        bias = () if self.bias is None else (self.bias,)
        return (self.weight, *bias, *(() if self.adapter is None else self.adapter.parameters))

    @property
    def adapter_name(self) -> str:
        """Name of the adapter's module, which is inside the module of the weight."""
        module, _, _ = self.weight.name.rpartition(".")
        return f"{module}.adapter"

    @property
    def out_features(self) -> int:
        """Width of Y over all tensor ranks."""
        return self.weight.shape[-2]

    @property
    def in_features(self) -> int:
        """Width of X over all tensor ranks."""
        return self.weight.shape[-1]


def columns(name: str, inputs: int, outputs: int, *, bias: bool) -> Matrix:
    """Describe a column-parallel matrix. The tensor ranks divide its columns and its bias."""
    weight = Parameter(name=f"{name}.weight", shape=(outputs, inputs), role=Role.MATRIX, cut=Cut.COLUMNS)
    return Matrix(weight, _bias(name, weight) if bias else None)


def columns_by_heads(name: str, inputs: int, outputs: int, *, heads: int, bias: bool, num_matrices: int = 1) -> Matrix:
    """Describe a column-parallel matrix whose columns form `heads` heads. Every rank holds only whole heads.

    If `num_matrices` is above 1, each head has columns of `num_matrices` matrices, such as keys and values.
    """
    weight = Parameter(
        name=f"{name}.weight",
        shape=(outputs, inputs),
        role=Role.MATRIX,
        cut=Cut.HEADS,
        heads=heads,
        num_matrices=num_matrices,
    )
    return Matrix(weight, _bias(name, weight) if bias else None)


def whole(name: str, inputs: int, outputs: int, *, bias: bool) -> Matrix:
    """Describe a matrix outside of the parallel regions. Every rank holds the whole matrix and its bias."""
    weight = Parameter(name=f"{name}.weight", shape=(outputs, inputs), role=Role.MATRIX)
    return Matrix(weight, _bias(name, weight) if bias else None)


def rows(name: str, inputs: int, outputs: int, *, bias: bool) -> Matrix:
    """Describe a row-parallel matrix before a residual sum.

    Every rank holds the whole bias. The bias is added once, after the products of all ranks have been summed.
    """
    weight = Parameter(name=f"{name}.weight", shape=(outputs, inputs), role=Role.BEFORE_RESIDUAL, cut=Cut.ROWS)
    return Matrix(weight, Parameter(name=f"{name}.bias", shape=(outputs,), role=Role.BIAS) if bias else None)


def _bias(name: str, weight: Parameter) -> Parameter:
    """Describe the bias of a matrix whose columns may be cut. The bias is cut like the columns of the matrix."""
    return replace(weight, name=f"{name}.bias", shape=weight.shape[:1], role=Role.BIAS)
