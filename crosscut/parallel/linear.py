r"""The two cuts of the paper's section 3: a matrix cut by columns, then one cut by rows.

        X --f--> X A_1 --GeLU--> Y_1 B_1 --\
                                            g--> sum_i Y_i B_i + bias
        X --f--> X A_2 --GeLU--> Y_2 B_2 --/

The first product needs no communication forward, the second sums once. f is `operators.enter_tensor_parallel`, g is
`operators.leave_tensor_parallel`. Each layer runs its operator and its product as one function of `fused`, which sends
while it multiplies and stands there below the same two steps written one after the other.

Shapes: B batch, S sequence, I in, O out, T tensor ranks. PyTorch keeps weights as [O, I], so the paper's columns are
dimension 0 here and its rows dimension 1.
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
    """Products of a linear layer, and whether it computes its output again in a backward pass."""

    products: Products = ORDINARY
    """The products of the forward and the backward pass."""
    skips_repetition: bool = False
    """Whether nobody reads a row-parallel layer's output when the layer runs again inside a backward pass. Then the
    layer keeps its input, multiplies nothing, sends nothing and gives zeros."""


MULTIPLICATION = Multiplication()
"""Multiplication in the type of the arguments, at every run."""


class Blocks(NamedTuple):
    """An output of `number` blocks of equal `width`, such as heads. No rank gets a part of a block."""

    number: int
    width: int


class ColumnParallelLinear(nn.Module):
    """Y_i = f(X) A_i + b_i: the weight cut by columns, the output left split.

    Input [B, S, I] (under sequence parallelism [B, S/T, I]), output [B, S, O/T]. Parameters: `weight` [O, I] and `bias`
    [O] as Shard(0); zeros until initialised.

    `out_features` O may be `Blocks`: N blocks, which are not cut themselves. With fewer blocks than ranks, each block
    is the output of T / N adjacent ranks: [B, S, O / N]. Parameters are then Replicate. Each rank uses only its own
    block of them, so its gradient covers only that block; the gradients are summed over the tensor axis afterwards.

    Forward: nothing is sent (sequence parallelism: all-gather). Backward: all-reduce of the input's gradient (sequence
    parallelism: reduce-scatter), which runs while the weight's gradient is computed; under sequence parallelism the
    input is kept split and gathered once more, while the input's gradient is computed. Source: paper, section 3, eq. 3;
    Korthikanti et al. 2022, section 4.2.2. Raises `LayoutError` when the tensor axis does not divide O, or with
    `Blocks` neither divides N nor is a multiple of N, or when the sequence is split and the input has fewer than three
    dimensions.
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

        `enter_and_multiply` is these two lines in one function, which sends f's message beside the products:

            entered = enter_tensor_parallel(x, mesh)  # f
            y = F.linear(entered, weight, bias)  # X A_i + b_i
        """
        x = x.to(product_dtype(x))
        weight, bias = self.own_weight(x.dtype), self.own_bias(x.dtype)
        (y,) = enter_and_multiply(x, [weight], [bias], mesh=self.mesh, products=self.products)
        return y

    def own_weight(self, dtype: torch.dtype) -> Tensor:
        """The rows of the weight by which this rank multiplies: A_i, transposed."""
        return self._own(self.weight, dtype)

    def own_bias(self, dtype: torch.dtype) -> Tensor | None:
        """The part of the bias that this rank adds: b_i; None without a bias."""
        return None if self.bias is None else self._own(self.bias, dtype)

    def _own(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        if self._own_rows is None:
            return local(parameter, dtype)
        return local_inside(parameter, dtype)[self._own_rows]


def _rows_of_block(out_features: int, num_blocks: int | None, axis: Axis) -> slice | None:
    """The rows of this rank's block where several ranks have the same; None where rows are cut."""
    if num_blocks is None or num_blocks % axis.size == 0:
        return None
    if axis.size % num_blocks:
        raise LayoutError(
            f"The {axis.name} axis must divide the {num_blocks} blocks of a layer or be a multiple of them, but has "
            f"{axis.size} ranks. Choose another layout."
        )
    width, block = out_features // num_blocks, axis.rank * num_blocks // axis.size
    return slice(block * width, (block + 1) * width)


class ColumnParallelLinears(nn.Module):
    """Column-parallel layers with one input, which enters the parallel region once for all of them.

    Input as theirs, output a tuple of theirs, in the order in which they are given; each is a submodule by its name.
    Communication is that of one layer.
    """

    def __init__(self, **layers: ColumnParallelLinear) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._layers = tuple(layers.values())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Enter once (f), then X A_i + b_i for each layer."""
        x = x.to(product_dtype(x))
        weights = [layer.own_weight(x.dtype) for layer in self._layers]
        biases = [layer.own_bias(x.dtype) for layer in self._layers]
        first = self._layers[0]
        return enter_and_multiply(x, weights, biases, mesh=first.mesh, products=first.products)


class RowParallelLinear(nn.Module):
    """Y = g(X_i A_i) + b: the weight cut by rows, its input split by columns, the bias added once, after the sum.

    Input [B, S, I/T], output [B, S, O] (under sequence parallelism [B, S/T, O]). Parameters: `weight` [O, I] as
    Shard(1), `bias` [O] as Replicate; zeros until initialised.

    Forward: all-reduce of the output (sequence parallelism: reduce-scatter). Backward: nothing is sent (sequence
    parallelism: all-gather). Source: paper, section 3, eq. 2. Raises `LayoutError` when the tensor axis does not
    divide I, or when the sequence is split and the input has fewer than three dimensions.
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

        `multiply_and_leave` is these two lines in one function, which takes no copies and sends beside the product:

            left = leave_tensor_parallel(F.linear(x, weight), mesh)  # X_i A_i, then g
            y = left + bias
        """
        x = x.to(product_dtype(x))
        bias = None if self.bias is None else local_on_sequence(self.bias, self.mesh, x.dtype)
        weight = local(self.weight, x.dtype)
        is_needed = not (self._skips_repetition and is_recomputing())
        return multiply_and_leave(x, weight, bias, mesh=self.mesh, products=self.products, is_needed=is_needed)


def is_recomputing() -> bool:
    """Whether this runs inside a backward pass: what a checkpointed module does then, it has done before."""
    return torch._C._current_graph_task_id() != -1
