r"""Linear layers with the two cuts of the paper's section 3: one matrix cut by columns, the next cut by rows.

        X --f--> X A_1 --GeLU--> Y_1 B_1 --\
                                            g--> sum_i Y_i B_i + bias
        X --f--> X A_2 --GeLU--> Y_2 B_2 --/

The first product needs no communication in the forward pass; the second is followed by one sum. f is
`operators.enter_tensor_parallel`, and g is `operators.leave_tensor_parallel`. Each layer runs its operator and its
product as one function of `fused`, which overlaps messages with products. In that file, the plain twin of
each function shows the two steps separately.

Shapes: B batch, S sequence, I in, O out, T tensor ranks. PyTorch stores weights as [O, I], so the paper's columns are
dimension 0 here and its rows are dimension 1.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crosscut.config import LayoutError
from crosscut.kernels.products import ORDINARY, Products, product_dtype
from crosscut.parallel.fused import enter_and_multiply, multiply_and_leave
from crosscut.parallel.mesh import Axis, ParallelMesh
from crosscut.parallel.state.parameters import (
    local,
    local_inside,
    local_on_sequence,
    replicated_parameter,
    sharded_parameter,
)


@dataclass(frozen=True)
class Multiplication:
    """Matrix products of a linear layer, and whether the layer computes its output again when a backward pass
    recomputes it.
    """

    products: Products = ORDINARY
    """Implementation of the products in the forward and the backward pass."""
    skips_repetition: bool = False
    """Whether a row-parallel layer does nothing when recomputation runs it again inside a backward pass. Set this if
    nobody reads the recomputed output. The layer then keeps its input, multiplies nothing, sends nothing and returns
    zeros.
    """


MULTIPLICATION = Multiplication()
"""Default: products in the type of the arguments, and every run computes its output."""


class Blocks(NamedTuple):
    """Output of `number` blocks of equal `width`, such as heads. No block is split between ranks."""

    number: int
    width: int


class ColumnParallelLinear(nn.Module):
    """Y_i = f(X) A_i + b_i: the weight is cut by columns, and the output stays split.

    Input [B, S, I] (under sequence parallelism [B, S/T, I]), output [B, S, O/T]. Parameters: `weight` [O, I] and `bias`
    [O] as Shard(0); zeros until initialised.

    `out_features` O may be `Blocks`: N blocks that are not cut themselves. With fewer blocks than ranks, T / N adjacent
    ranks compute the same block, and the output is [B, S, O / N]. The parameters are then Replicate. Each rank uses
    only its own block, so its gradient covers only that block; the gradients are summed over the tensor axis
    afterwards.

    Forward: nothing is sent (sequence parallelism: all-gather). Backward: all-reduce of the input's gradient (sequence
    parallelism: reduce-scatter), which overlaps with the product of the weight's gradient. Under sequence parallelism,
    the layer keeps its split input and gathers it again in the backward pass, overlapped with the product of the
    input's gradient. Source: paper, section 3, eq. 3; Korthikanti et al. 2022, section 4.2.2. Raises `LayoutError` if
    the tensor axis does not divide O, if with `Blocks` it neither divides N nor is a multiple of N, or if the sequence
    is split and the input has fewer than three dimensions.
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
        num_blocks = None
        if isinstance(out_features, Blocks):
            num_blocks, out_features = out_features.number, out_features.number * out_features.width
        self._own_rows = _rows_of_block(out_features, num_blocks, mesh.tensor)
        place: Any = {"dtype": dtype, "device": mesh.parameter_device}
        make = partial(sharded_parameter, dim=0) if self._own_rows is None else replicated_parameter
        self.weight = make((out_features, in_features), mesh.tensor, **place)
        self.bias = make((out_features,), mesh.tensor, **place) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """f, then X A_i + b_i: [B, S, I] (or [B, S/T, I]) to [B, S, O/T].

        `enter_and_multiply` computes these two lines in one function, which overlaps f's message with the products:

            entered = enter_tensor_parallel(x, mesh)  # f
            y = F.linear(entered, weight, bias)  # X A_i + b_i
        """
        x = x.to(product_dtype(x))
        weight, bias = self.own_weight(x.dtype), self.own_bias(x.dtype)
        (y,) = enter_and_multiply(x, [weight], [bias], mesh=self.mesh, products=self.products)
        return y

    def own_weight(self, dtype: torch.dtype) -> Tensor:
        """Rows of the weight that this rank multiplies by: A_i, transposed, [O/T, I]."""
        return self._own(self.weight, dtype)

    def own_bias(self, dtype: torch.dtype) -> Tensor | None:
        """Part of the bias that this rank adds: b_i [O/T]; None without a bias."""
        return None if self.bias is None else self._own(self.bias, dtype)

    def _own(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        if self._own_rows is None:
            return local(parameter, dtype)
        return local_inside(parameter, dtype)[self._own_rows]


def _rows_of_block(out_features: int, num_blocks: int | None, axis: Axis) -> slice | None:
    """Rows of this rank's block, if several ranks compute the same block; None if the rows are cut."""
    if num_blocks is None or num_blocks % axis.size == 0:
        return None
    if axis.size % num_blocks:
        raise LayoutError(
            f"The {axis.name} axis must divide the {num_blocks} blocks of a layer or be a multiple of that number, but "
            f"has {axis.size} ranks. Choose another layout."
        )
    width, block = out_features // num_blocks, axis.rank * num_blocks // axis.size
    return slice(block * width, (block + 1) * width)


class ColumnParallelLinears(nn.Module):
    """Several column-parallel layers with the same input. The input enters the parallel region once for all of them.

    Input as in `ColumnParallelLinear`; output a tuple with each layer's output, in the order of the arguments. Each
    layer is a submodule under its argument's name. The communication is that of one layer.
    """

    def __init__(self, **layers: ColumnParallelLinear) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._layers = tuple(layers.values())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Enter the parallel region once (f), then compute X A_i + b_i for each layer."""
        x = x.to(product_dtype(x))
        weights = [layer.own_weight(x.dtype) for layer in self._layers]
        biases = [layer.own_bias(x.dtype) for layer in self._layers]
        first = self._layers[0]
        return enter_and_multiply(x, weights, biases, mesh=first.mesh, products=first.products)


class RowParallelLinear(nn.Module):
    """Y = g(X_i A_i) + b: the weight is cut by rows, the input is split by columns, and the bias is added once, after
    the sum.

    Input [B, S, I/T], output [B, S, O] (under sequence parallelism [B, S/T, O]). Parameters: `weight` [O, I] as
    Shard(1), `bias` [O] as Replicate; zeros until initialised.

    Forward: all-reduce of the output (sequence parallelism: reduce-scatter). Backward: nothing is sent (sequence
    parallelism: all-gather). Source: paper, section 3, eq. 2. Raises `LayoutError` if the tensor axis does not divide
    I, or if the sequence is split and the input has fewer than three dimensions.
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
        self._skips_repetition = how.skips_repetition
        place: Any = {"dtype": dtype, "device": mesh.parameter_device}
        self.weight = sharded_parameter((out_features, in_features), mesh.tensor, dim=1, **place)
        self.bias = replicated_parameter((out_features,), mesh.tensor, **place) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """X_i A_i, then g, then b once: [B, S, I/T] to [B, S, O] (or [B, S/T, O]).

        `multiply_and_leave` computes these two lines in one function, which needs no copies and overlaps the message
        with the product:

            left = leave_tensor_parallel(F.linear(x, weight), mesh)  # X_i A_i, then g
            y = left + bias
        """
        x = x.to(product_dtype(x))
        bias = None if self.bias is None else local_on_sequence(self.bias, self.mesh, x.dtype)
        weight = local(self.weight, x.dtype)
        is_needed = not (self._skips_repetition and is_recomputing())
        return multiply_and_leave(x, weight, bias, mesh=self.mesh, products=self.products, is_needed=is_needed)


def is_recomputing() -> bool:
    """Whether the code runs inside a backward pass, as a recomputed (checkpointed) module does."""
    return torch._C._current_graph_task_id() != -1
