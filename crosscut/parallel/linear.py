r"""The two cuts of the paper's section 3: a matrix cut by columns, then one cut by rows.

        X --f--> X A_1 --GeLU--> Y_1 B_1 --\
                                            g--> sum_i Y_i B_i + bias
        X --f--> X A_2 --GeLU--> Y_2 B_2 --/

The first product needs no communication forward, the second sums once. Shapes: B batch, S sequence, I in, O out, T
tensor ranks. PyTorch keeps weights as [O, I], so the paper's columns are dimension 0 here and its rows dimension 1.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.config import LayoutError
from crosscut.config.conventions import num_pieces
from crosscut.kernels.functions import run
from crosscut.kernels.products import ORDINARY, Products, add_product, as_rows, multiply_into
from crosscut.parallel.collectives import wait
from crosscut.parallel.mesh import Axis, ParallelMesh
from crosscut.parallel.operators import (
    finish_enter_forward,
    finish_leave_backward,
    left_shape,
    require_sequence,
    start_enter_again,
    start_enter_backward,
    start_enter_forward,
    start_leave_backward,
    start_leave_forward,
)
from crosscut.parallel.state.parameters import (
    local,
    local_inside,
    local_on_sequence,
    replicated_parameter,
    sharded_parameter,
)
from crosscut.parallel.symmetric_memory import gather_and_multiply, multiply_and_scatter


class _EnterAndMultiply(Function):
    """`F.linear(enter_tensor_parallel(x), weight, bias)` for each of several layers, which enters x once.

    It keeps `x` as it came, not what was gathered from it. Backward, what is sent runs beside the products: the gather
    of x beside the input's gradient, the reduction of that one beside the weights' gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: ParallelMesh, products: Products, *layers: Tensor | None) -> Any:
        weights, biases = _halves(layers)
        ctx.save_for_backward(x, *weights)
        ctx.mesh, ctx.products, ctx.has_bias = mesh, products, [bias is not None for bias in biases]
        pieces = _pieces(x, mesh, products, x.numel() * mesh.tensor.size)
        entering = [start_enter_forward(piece, mesh) for piece in pieces]
        if len(entering) == 1:
            whole = finish_enter_forward(entering[0], mesh)
            return tuple(products.output(whole, *layer) for layer in zip(weights, biases, strict=True))
        shape = (x.shape[0], x.shape[1] * mesh.tensor.size, *x.shape[2:-1])
        outputs = tuple(x.new_empty(*shape, weight.shape[0]) for weight in weights)
        for i, piece in enumerate(entering):
            whole = finish_enter_forward(piece, mesh)
            for y, weight, bias in zip(outputs, weights, biases, strict=True):
                multiply_into(y.chunk(len(entering))[i], whole, weight, bias)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        mesh, products = ctx.mesh, ctx.products
        needs_x, _, _, *needs = ctx.needs_input_grad
        needs_weights, needs_biases = _halves(needs)
        entering = start_enter_again(x, grads[0], mesh) if any(needs_weights) else None
        pending = start_enter_backward(_input_gradient(products, grads, weights), mesh) if needs_x else None
        grad_biases = [
            _over_tokens(grad) if has_bias and wanted else None
            for grad, has_bias, wanted in zip(grads, ctx.has_bias, needs_biases, strict=True)
        ]
        grad_weights: list[Tensor | None] = [None] * len(weights)
        if entering is not None:
            whole = finish_enter_forward(entering, mesh)
            grad_weights = [
                products.weight_gradient(grad, whole) if wanted else None
                for grad, wanted in zip(grads, needs_weights, strict=True)
            ]
        grad_x = None if pending is None else wait(pending, mesh.tensor)
        return grad_x, None, None, *grad_weights, *grad_biases


class _MultiplyAndLeave(Function):
    """`leave_tensor_parallel(F.linear(x, weight)) + bias`, without a copy for g and for the bias.

    Where the result `is_needed` by nobody, it is zeros and nothing is sent.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mesh: ParallelMesh,
        products: Products,
        is_needed: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mesh, ctx.products, ctx.has_bias = mesh, products, bias is not None
        if not is_needed:
            return x.new_zeros(*left_shape(x, mesh), weight.shape[0])
        pieces = _pieces(x, mesh, products, x.shape[:-1].numel() * weight.shape[0])
        leaving = [start_leave_forward(products.output(piece, weight), mesh) for piece in pieces]
        done = [wait(piece, mesh.tensor) for piece in leaving]
        y = done[0] if len(done) == 1 else torch.cat(done)
        if bias is None:
            return y
        # PyTorch 2.11 compiles a result that was changed in place to one without a gradient, and does not say so.
        return y + bias if torch.compiler.is_compiling() else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        products = ctx.products
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_bias = _over_tokens(grad) if ctx.has_bias and needs_bias else None
        pieces = _pieces(grad, ctx.mesh, products, grad.numel() * ctx.mesh.tensor.size)
        leaving = [start_leave_backward(piece, ctx.mesh) for piece in pieces]
        if len(leaving) == 1:
            whole = finish_leave_backward(leaving[0], ctx.mesh)
            grad_x = products.input_gradient(whole, weight) if needs_x else None
            grad_weight = products.weight_gradient(whole, x) if needs_weight else None
            return grad_x, grad_weight, grad_bias, None, None, None
        grad_x = x.new_empty(x.shape) if needs_x else None  # rows that lie together, however those of x do
        grad_weight = torch.empty_like(weight) if needs_weight else None
        for i, piece in enumerate(leaving):
            whole = finish_leave_backward(piece, ctx.mesh)
            if grad_x is not None:
                multiply_into(grad_x.chunk(len(leaving))[i], whole, weight.t())
            if grad_weight is not None:
                add_product(grad_weight, as_rows(whole).t(), as_rows(x.chunk(len(leaving))[i]), is_first=i == 0)
        return grad_x, grad_weight, grad_bias, None, None, None


def _pieces(x: Tensor, mesh: ParallelMesh, products: Products, elements: int) -> list[Tensor]:
    """`x` in the pieces in which its product runs, so that one is sent while another is multiplied.

    Only where the sequence is split: f and g stay one all-reduce. Pieces in 8 bits would be cast one by one.
    """
    if not mesh.sequence_parallel or products is not ORDINARY:
        return [x]
    return list(x.chunk(num_pieces(x.shape[0], elements)))


def _input_gradient(products: Products, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The gradient of an input that several layers share, their sum."""
    total: Tensor | None = None
    for grad, weight in zip(grads, weights, strict=True):
        total = products.input_gradient(grad, weight, total)
    assert total is not None
    return total


def _halves(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Split `values` into the half of the weights and the half of the biases."""
    return values[: len(values) // 2], values[len(values) // 2 :]


def _over_tokens(grad: Tensor) -> Tensor:
    """The bias's gradient [O] from [..., O]."""
    return as_rows(grad).sum(0)


def _product_dtype(x: Tensor) -> torch.dtype:
    """The type to multiply in: under `torch.autocast` the one that it asks for, as for any product of PyTorch's."""
    is_cast = x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype


def use_products(model: nn.Module, products: Products) -> None:
    """From now on let the linear layers of a model multiply with `products`; at first they use `ORDINARY`."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.products = products


class ColumnParallelLinear(nn.Module):
    """Y_i = f(X) A_i + b_i: the weight cut by columns, the output left split.

    Input [B, S, I] (under sequence parallelism [B, S/T, I]), output [B, S, O/T]. Parameters: `weight` [O, I] and `bias`
    [O] as Shard(0); zeros until initialised.

    With `num_blocks` the output is that many blocks of equal width, such as heads, which are not cut themselves. Where
    there are fewer of them than ranks, each is the output of T / `num_blocks` adjacent ranks: [B, S, O / `num_blocks`].
    Parameters are then Replicate and their gradients partial, since a rank uses only its block's.

    Forward: nothing is sent (sequence parallelism: all-gather). Backward: all-reduce of the input's gradient (sequence
    parallelism: reduce-scatter), which runs while the weight's gradient is computed; under sequence parallelism the
    input is kept split and gathered once more, while the input's gradient is computed. Source: paper, section 3, eq. 3;
    Korthikanti et al. 2022, section 4.2.2. Raises `LayoutError` when the tensor axis divides neither O nor, with
    `num_blocks`, is a multiple of these, or when the sequence is split and the input has fewer than three dimensions.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        mesh: ParallelMesh,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
        num_blocks: int | None = None,
    ) -> None:
        super().__init__()
        self.mesh, self.products = mesh, ORDINARY
        self._own_rows = _rows_of_block(out_features, num_blocks, mesh.tensor)
        place: Any = {"dtype": dtype, "device": mesh.parameter_device}
        make = partial(sharded_parameter, dim=0) if self._own_rows is None else replicated_parameter
        self.weight = make((out_features, in_features), mesh.tensor, **place)
        self.bias = make((out_features,), mesh.tensor, **place) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: [B, S, I] (or [B, S/T, I]) to [B, S, O/T]."""
        return _multiply_entered(x, [self])[0]

    def own(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """The part of one of the layer's parameters by which this rank multiplies, or which it adds."""
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
        """Multiply by each."""
        return _multiply_entered(x, self._layers)


def _multiply_entered(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    mesh = layers[0].mesh
    require_sequence(x, mesh)
    x = x.to(_product_dtype(x))
    weights = [layer.own(layer.weight, x.dtype) for layer in layers]
    biases = [None if layer.bias is None else layer.own(layer.bias, x.dtype) for layer in layers]
    if mesh.symmetric_memory:
        products = gather_and_multiply(x, weights, mesh)
        return tuple(y if bias is None else y + bias for y, bias in zip(products, biases, strict=True))
    outputs: tuple[Tensor, ...] = run(_EnterAndMultiply, x, mesh, layers[0].products, *weights, *biases)
    return outputs


class RowParallelLinear(nn.Module):
    """Y = g(X_i B_i) + b: the weight cut by rows, its input split by columns, the bias added once, after the sum.

    Input [B, S, I/T], output [B, S, O] (under sequence parallelism [B, S/T, O]). Parameters: `weight` [O, I] as
    Shard(1), `bias` [O] as Replicate; zeros until initialised.

    Forward: all-reduce of the output (sequence parallelism: reduce-scatter). Backward: nothing is sent (sequence
    parallelism: all-gather). Source: paper, section 3, eq. 2. Raises `LayoutError` when the tensor axis does not
    divide I, or when the sequence is split and the input has fewer than three dimensions.
    """

    ends_recomputation = False
    """Whether nobody looks at the result when this layer runs again inside a backward pass: then it keeps its input,
    multiplies nothing, sends nothing and gives zeros."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        mesh: ParallelMesh,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.mesh, self.products = mesh, ORDINARY
        place: Any = {"dtype": dtype, "device": mesh.parameter_device}
        self.weight = sharded_parameter((out_features, in_features), mesh.tensor, dim=1, **place)
        self.bias = replicated_parameter((out_features,), mesh.tensor, **place) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply and sum over the ranks: [B, S, I/T] to [B, S, O] (or [B, S/T, O])."""
        require_sequence(x, self.mesh)
        x = x.to(_product_dtype(x))
        bias = None if self.bias is None else local_on_sequence(self.bias, self.mesh, x.dtype)
        is_needed = not (self.ends_recomputation and is_recomputing())
        weight = local(self.weight, x.dtype)
        if self.mesh.symmetric_memory and is_needed:
            product = multiply_and_scatter(x, weight, self.mesh)
            return product if bias is None else product + bias
        y: Tensor = run(_MultiplyAndLeave, x, weight, bias, self.mesh, self.products, is_needed)
        return y


def is_recomputing() -> bool:
    """Whether this runs inside a backward pass: what a checkpointed module does then, it has done before."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
