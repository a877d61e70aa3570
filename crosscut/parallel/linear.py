r"""Linear layers with the two cuts of the paper's section 3: one matrix cut by columns, the next cut by rows.

        X --f--> X A_1 --GeLU--> Y_1 B_1 --\
                                            g--> sum_i Y_i B_i + bias
        X --f--> X A_2 --GeLU--> Y_2 B_2 --/

f (`operators.enter_tensor_parallel`) passes the input into the parallel region. g (`operators.leave_tensor_parallel`)
sums the partial results of all ranks. In the forward pass, the first product therefore needs no communication, and the
second product needs one sum. Each layer calls one function of the module `fused`, which runs both the operator and the
product, and overlaps messages with products. In `fused`, the plain twin of each function shows the operator and the
product separately.

Shapes: B batch, S sequence, I in, O out, T tensor ranks. PyTorch stores weights as [O, I], so the paper's columns are
dimension 0 here, and the paper's rows are dimension 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.config import LayoutError
from crosscut.kernels.products import ORDINARY, Products, product_dtype
from crosscut.parallel.fused import LowRank, enter_and_multiply, multiply_and_leave, multiply_inside, skip_and_leave
from crosscut.parallel.mesh import Axis, ParallelMesh
from crosscut.parallel.state.parameters import ParameterMaker, local, local_inside, local_on_sequence


@dataclass(frozen=True)
class Multiplication:
    """Settings of a linear layer's matrix products: the implementation, and whether recomputation skips products."""

    products: Products = ORDINARY
    """Implementation of the products in the forward and the backward pass."""
    skips_repetition: bool = False
    """Whether a row-parallel layer skips its work when a backward pass recomputes the layer. Set this to true if no
    code reads the recomputed output. The recomputed layer then keeps its input and returns zeros, without multiplying
    or sending.
    """


MULTIPLICATION = Multiplication()
"""Default settings: products in the element type of the arguments, and no skipped products."""


class Blocks(NamedTuple):
    """Output features of a layer as `number` blocks of `width` features each, such as attention heads. The tensor axis
    never splits a block.
    """

    number: int
    width: int


class ColumnParallelLinear(nn.Module):
    """Linear layer whose weight is cut by columns: Y_i = f(X) A_i + b_i. f (`enter_tensor_parallel`) passes the input
    into the parallel region. The output stays split over the ranks.

    Input [B, S, I] (under sequence parallelism [B, S/T, I]), output [B, S, O/T]. Parameters: `weight` [O, I] and `bias`
    [O] as Shard(0); zeros until initialised.

    `out_features` O may be given as `Blocks`: N blocks that the tensor axis does not split. If there are fewer blocks
    than ranks, T / N adjacent ranks compute the same block, the output is [B, S, O / N], and the parameters are
    Replicate. Each rank uses only its own block, so its gradient covers only this block. The gradients are summed over
    the tensor axis afterwards.

    Forward: nothing is sent (sequence parallelism: all-gather). Backward: all-reduce of the input's gradient (sequence
    parallelism: reduce-scatter), overlapped with the product of the weight's gradient. Under sequence parallelism, the
    layer keeps its split input and gathers the sequence again in the backward pass, overlapped with the product of the
    input's gradient. Source: paper, section 3, eq. 3; Korthikanti et al. 2022, section 4.2.2.

    Raises `LayoutError` if T does not divide O, or, with `Blocks`, if T neither divides N nor is a multiple of N. The
    forward pass raises `LayoutError` if, under sequence parallelism, the input has fewer than three dimensions.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Blocks,
        *,
        mesh: ParallelMesh,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
        how: Multiplication = MULTIPLICATION,
    ) -> None:
        super().__init__()
        self.mesh, self.products = mesh, how.products
        self._alone = mesh.without_tensor
        self.is_read = False
        """Whether code outside of the layer reads the weight (`own_weight`), so that it must keep its plain order."""
        self.adapter: LowRankAdapter | None = None
        num_blocks, self._block_width = None, 0
        if isinstance(out_features, Blocks):
            num_blocks, self._block_width = out_features
            out_features = num_blocks * self._block_width
        self._own_rows = rows_of_block(out_features, num_blocks, mesh.tensor)
        self.weight = self._with_rows(out_features, in_features, dtype=dtype)
        self.bias = self._with_rows(out_features, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply f (`enter_tensor_parallel`), then compute X A_i + b_i: [B, S, I] (or [B, S/T, I]) to [B, S, O/T].

        The result equals `y` in the following two lines. The function `enter_and_multiply` runs both lines at once, and
        overlaps the message of f with products:

            entered = enter_tensor_parallel(x, mesh)  # f
            y = F.linear(entered, weight, bias)  # X A_i + b_i
        """
        (y,) = _multiply_all(x, [self], self.mesh)
        return y

    def multiply(self, entered: Tensor) -> Tensor:
        """Compute X A_i + b_i for an input that is already inside the parallel region: [B, S, I] to [B, S, O/T]. Sends
        nothing. In the backward pass, each rank gets its own part of the input's gradient.
        """
        (y,) = _multiply_all(entered, [self], self._alone)
        return y

    def add_adapter(self, rank: int, *, scale: float, num_matrices: int = 1) -> None:
        """Give the layer a low-rank adapter, and freeze the weight and the bias: Y_i = f(X) A_i + scale (f(X) D) U_i +
        b_i. The adapter changes nothing until `adapter.up` differs from zero.

        If the output consists of several matrices whose blocks alternate (`num_matrices`), each matrix has its own
        adapter. Parameters: `adapter.down` [r, I] as Replicate, with the adapters of the matrices one after the other,
        and `adapter.up` [O, r], placed like the weight. Each rank's gradient of `adapter.down` is partial. The adapter
        adds no communication. Source: Hu et al. 2021, section 4.1.
        """
        self.requires_grad_(False)
        (out_features, in_features), dtype = self.weight.shape, self.weight.dtype
        self.adapter = LowRankAdapter(
            down=ParameterMaker(self.mesh, dtype).replicated(rank * num_matrices, in_features),
            up=self._with_rows(out_features, rank, dtype=dtype),
            scale=scale,
            num_matrices=num_matrices,
        )

    def add_adapted(self, y: Tensor, low: Tensor) -> Tensor:
        """Add the adapter's product to `y` [B, S, O/T]. `low` [B, S, r] is f(X) D."""
        assert self.adapter is not None
        up, num = self._own(self.adapter.up, low.dtype), self.adapter.num_matrices
        low = low * self.adapter.scale
        if num == 1:
            return y + F.linear(low, up)
        # The blocks of the matrices alternate in the rows of `up`, such as keys and values of a head.
        rows = up.unflatten(0, (-1, num, self._block_width // num)).unbind(1)
        parts = [F.linear(part, own.flatten(0, 1)) for part, own in zip(low.chunk(num, -1), rows, strict=True)]
        joined = torch.stack([part.unflatten(-1, (-1, self._block_width // num)) for part in parts], dim=-2)
        return y + joined.flatten(-3)

    def inside(self, x: Tensor, part: slice | None = None) -> Tensor:
        """Compute X A_i, or the columns `part` of it, without f and without the bias. `x` [B, S, I] is inside the
        parallel region. Sends nothing.
        """
        x = x.to(product_dtype(x))
        weight = self.own_weight(self.products.weight_dtype(self.weight, x.dtype))
        y = multiply_inside(x, part_of(weight, part), self.products)
        if self.adapter is None:
            return y
        low = F.linear(x, local_inside(self.adapter.down, x.dtype)) * self.adapter.scale
        return y + F.linear(low, part_of(self._own(self.adapter.up, x.dtype), part))

    def own_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the rows of the weight by which this rank multiplies, cast to `dtype`: [O/T, I], the transpose of
        A_i.
        """
        return self._own(self.weight, dtype)

    def own_bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return the part of the bias that this rank adds, cast to `dtype`: b_i [O/T]. None if the layer has no
        bias.
        """
        return None if self.bias is None else self._own(self.bias, dtype)

    def _with_rows(self, *shape: int, dtype: torch.dtype) -> nn.Parameter:
        """Create a parameter whose dimension 0 is the layer's output features."""
        make = ParameterMaker(self.mesh, dtype)
        return make.sharded(*shape, dim=0) if self._own_rows is None else make.replicated(*shape)

    def _own(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        if self._own_rows is None:
            return local(parameter, dtype)
        return local_inside(parameter, dtype)[self._own_rows]


def rows_of_block(out_features: int, num_blocks: int | None, axis: Axis) -> slice | None:
    """Return the rows of this rank's block if several ranks compute the same block. Return None if each row belongs to
    one rank only.
    """
    if num_blocks is None or num_blocks % axis.size == 0:
        return None
    if axis.size % num_blocks:
        raise LayoutError(
            f"The size of the {axis.name} axis must divide {num_blocks}, the number of blocks of a layer, or be a "
            f"multiple of {num_blocks}, but is {axis.size}. Change `layout.{axis.name}`."
        )
    width, block = out_features // num_blocks, axis.rank * num_blocks // axis.size
    return slice(block * width, (block + 1) * width)


class ColumnParallelLinears(nn.Module):
    """Several column-parallel layers with the same input. The input enters the parallel region only once.

    The input has the shape that `ColumnParallelLinear` expects. The output is a tuple of the layers' outputs, in the
    order of the arguments. Each layer becomes a submodule, named after its keyword argument. Together, the layers send
    the same messages as a single `ColumnParallelLinear`.
    """

    def __init__(self, **layers: ColumnParallelLinear) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._layers = tuple(layers.values())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Enter the parallel region once (`enter_tensor_parallel`), then compute X A_i + b_i for each layer."""
        return _multiply_all(x, self._layers, self._layers[0].mesh)

    def inside(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute X A_i for each layer, without f and without biases. `x` is inside the parallel region."""
        return tuple(layer.inside(x) for layer in self._layers)


def _multiply_all(x: Tensor, layers: Sequence[ColumnParallelLinear], mesh: ParallelMesh) -> tuple[Tensor, ...]:
    """Multiply `x` by the weights of all layers and by the first matrices of their adapters. `x` enters the parallel
    region only once. Return the output of each layer.
    """
    x, products = x.to(product_dtype(x)), layers[0].products
    weights = [layer.own_weight(products.weight_dtype(layer.weight, x.dtype)) for layer in layers]
    biases = [layer.own_bias(x.dtype) for layer in layers]
    downs = [local_inside(layer.adapter.down, x.dtype) for layer in layers if layer.adapter is not None]
    every = [*biases, *[None] * len(downs)]
    outputs = enter_and_multiply(x, [*weights, *downs], every, mesh=mesh, products=products)
    lows = iter(outputs[len(layers) :])
    return tuple(
        y if layer.adapter is None else layer.add_adapted(y, next(lows))
        for layer, y in zip(layers, outputs[: len(layers)], strict=True)
    )


class RowParallelLinear(nn.Module):
    """Linear layer whose weight is cut by rows: Y = g(X_i A_i) + b. Each rank holds some columns X_i of the input. g
    (`leave_tensor_parallel`) sums the products of all ranks, and the bias is added once, after the sum.

    Input [B, S, I/T], output [B, S, O] (under sequence parallelism [B, S/T, O]). Parameters: `weight` [O, I] as
    Shard(1), `bias` [O] as Replicate; zeros until initialised.

    Forward: all-reduce of the output (sequence parallelism: reduce-scatter). Backward: nothing is sent (sequence
    parallelism: all-gather). Source: paper, section 3, eq. 2.

    Raises `LayoutError` if T does not divide I. The forward pass raises `LayoutError` if, under sequence parallelism,
    the input has fewer than three dimensions.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        mesh: ParallelMesh,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
        how: Multiplication = MULTIPLICATION,
    ) -> None:
        super().__init__()
        self.mesh, self.products = mesh, how.products
        self.adapter: LowRankAdapter | None = None
        self._skips_repetition = how.skips_repetition
        make = ParameterMaker(mesh, dtype)
        self.weight = make.sharded(out_features, in_features, dim=1)
        self.bias = make.replicated(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Compute X_i A_i, apply g (`leave_tensor_parallel`), then add b once. The shape [B, S, I/T] becomes [B, S, O],
        or, under sequence parallelism, [B, S/T, O].

        The result equals `y` in the following two lines. The function `multiply_and_leave` runs both lines at once. It
        makes no copies for g and the bias, and overlaps the message with the product:

            left = leave_tensor_parallel(F.linear(x, weight), mesh)  # X_i A_i, then g
            y = left + bias
        """
        x = x.to(product_dtype(x))
        bias = None if self.bias is None else local_on_sequence(self.bias, self.mesh, x.dtype)
        weight = local(self.weight, self.products.weight_dtype(self.weight, x.dtype))
        leave = skip_and_leave if self.skips_now else multiply_and_leave
        adapter = None if self.adapter is None else self._low_rank(x)
        return leave(x, weight, bias, mesh=self.mesh, products=self.products, adapter=adapter)

    def inside(self, x: Tensor, part: slice | None = None, *, skips: bool = False) -> Tensor:
        """Compute X_i A_i, without g and without the bias: a term of the sum over all ranks. `x` [B, S, I/T] may have
        only the columns `part` of X_i. Sends nothing. With `skips`, no code reads the result, and nothing is
        multiplied.
        """
        x = x.to(product_dtype(x))
        weight = local(self.weight, self.products.weight_dtype(self.weight, x.dtype))
        weight = part_of(weight, part, dim=1)
        y = multiply_inside(x, weight, self.products, skips=skips)
        if self.adapter is None:
            return y
        low = F.linear(x, part_of(local(self.adapter.down, x.dtype), part, dim=1)) * self.adapter.scale
        return y + F.linear(low, local_inside(self.adapter.up, x.dtype))

    @property
    def skips_now(self) -> bool:
        """Whether the layer runs again in a backward pass that does not read its result."""
        return self._skips_repetition and is_recomputing()

    def add_adapter(self, rank: int, *, scale: float) -> None:
        """Give the layer a low-rank adapter, and freeze the weight and the bias: Y = g(X_i A_i + scale (X_i D_i) U) +
        b. The adapter changes nothing until `adapter.up` differs from zero.

        Parameters: `adapter.down` [r, I] as Shard(1) and `adapter.up` [O, r] as Replicate. Each rank's gradient of
        `adapter.up` is partial. The adapter adds no communication. Source: Hu et al. 2021, section 4.1.
        """
        self.requires_grad_(False)
        out_features, in_features = self.weight.shape
        make = ParameterMaker(self.mesh, self.weight.dtype)
        self.adapter = LowRankAdapter(
            down=make.sharded(rank, in_features, dim=1), up=make.replicated(out_features, rank), scale=scale
        )

    def _low_rank(self, x: Tensor) -> LowRank:
        assert self.adapter is not None
        low = F.linear(x, local(self.adapter.down, x.dtype)) * self.adapter.scale
        return LowRank(low, local_inside(self.adapter.up, x.dtype))


@final
class LowRankAdapter(nn.Module):
    """Parameters of a layer's low-rank adapter: `down` and `up`, called A and B in the paper of Hu et al. The layer
    does the arithmetic.

    Both matrices are zeros until initialised. While `up` is zero, the adapter changes nothing.
    """

    def __init__(self, *, down: nn.Parameter, up: nn.Parameter, scale: float, num_matrices: int = 1) -> None:
        super().__init__()
        self.down, self.up = down, up
        self.scale, self.num_matrices = scale, num_matrices


class ReplicatedLinear(nn.Module):
    """Linear layer that is not cut: every rank computes Y = X A + b with the whole A. Sends nothing.

    Input [..., I], output [..., O]. Parameters: `weight` [O, I] and `bias` [O] as Replicate; zeros until initialised.

    Inside a parallel region, X is the same on all ranks, and in the backward pass each rank gets a different gradient
    of Y, for example from its own part of the vocabulary. A layer `on_stream` is outside of the regions: X is the same
    on all ranks or, under sequence parallelism, this rank's part of the sequence. Inside a region, and under sequence
    parallelism, each rank's gradients of the parameters are partial, and `gradients.GradientReducer` sums them over the
    tensor ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        mesh: ParallelMesh,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
        how: Multiplication = MULTIPLICATION,
    ) -> None:
        super().__init__()
        self.mesh, self.products, self.inside = mesh, how.products, True
        self._alone = mesh.without_tensor
        self.adapter: LowRankAdapter | None = None
        make = ParameterMaker(mesh, dtype)
        self.weight = make.replicated(out_features, in_features)
        self.bias = make.replicated(out_features) if bias else None

    def on_stream(self) -> Self:
        """Use the layer outside of the parallel regions, and return it."""
        self.inside = False
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Compute X A + b, and add the product of the adapter if there is one."""
        x = x.to(product_dtype(x))
        bias = None if self.bias is None else self._own(self.bias, x.dtype)
        if self.adapter is None:
            return self._multiply(x, [self.weight], bias)[0]
        y, low = self._multiply(x, [self.weight, self.adapter.down], bias)
        return y + self._multiply(low * self.adapter.scale, [self.adapter.up])[0]

    def add_adapter(self, rank: int, *, scale: float) -> None:
        """Give the layer a low-rank adapter, and freeze the weight and the bias: Y = X A + scale (X D) U + b. The
        adapter changes nothing until `adapter.up` differs from zero.

        Parameters: `adapter.down` [r, I] and `adapter.up` [O, r], placed like the weight. Source: Hu et al. 2021,
        section 4.1.
        """
        self.requires_grad_(False)
        (out_features, in_features), make = self.weight.shape, ParameterMaker(self.mesh, self.weight.dtype)
        down, up = make.replicated(rank, in_features), make.replicated(out_features, rank)
        self.adapter = LowRankAdapter(down=down, up=up, scale=scale)

    def _multiply(self, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None = None) -> tuple[Tensor, ...]:
        own = [self._own(weight, self.products.weight_dtype(weight, x.dtype)) for weight in weights]
        biases = [bias, *[None] * (len(weights) - 1)]
        return enter_and_multiply(x, own, biases, mesh=self._alone, products=self.products)

    def _own(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        return local_inside(parameter, dtype) if self.inside else local_on_sequence(parameter, self.mesh, dtype)


def part_of(x: Tensor, part: slice | None, dim: int = 0) -> Tensor:
    """Return `part` of a dimension of `x`. With None, return `x` itself, which may be a packed weight."""
    return x if part is None else x.narrow(dim, part.start, part.stop - part.start)


def is_recomputing() -> bool:
    """Whether this code runs inside a backward pass, which means that a checkpointed module is being recomputed."""
    return torch._C._current_graph_task_id() != -1
