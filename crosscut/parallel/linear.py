r"""The two cuts of the paper's section 3: a matrix cut by columns, then one cut by rows.

        X --f--> X A_1 --GeLU--> Y_1 B_1 --\
                                            g--> sum_i Y_i B_i + bias
        X --f--> X A_2 --GeLU--> Y_2 B_2 --/

The first product needs no communication forward, the second sums once. Shapes: B batch, S sequence, I in, O out, T
tensor ranks. PyTorch keeps weights as [O, I], so the paper's columns are dimension 0 here and its rows dimension 1.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.config.conventions import num_pieces
from crosscut.parallel.collectives import wait
from crosscut.parallel.mesh import ParallelMesh
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
from crosscut.parallel.parameters import local, local_on_sequence, replicated_parameter, sharded_parameter
from crosscut.parallel.products import ORDINARY, Products
from crosscut.parallel.symmetric_memory import gather_and_multiply, multiply_and_scatter


class _EnterAndMultiply(Function):
    """`F.linear(enter_tensor_parallel(x), weight, bias)`, which keeps `x` as it came, not what was gathered from it.

    Backward, what is sent runs beside the products: the gather of x beside the input's gradient, the reduction of that
    one beside the weight's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mesh: ParallelMesh, products: Products
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mesh, ctx.products, ctx.has_bias = mesh, products, bias is not None
        pieces = _pieces(x, mesh, products, x.numel() * mesh.tensor.size)
        entering = [start_enter_forward(piece, mesh) for piece in pieces]
        if len(entering) == 1:
            return products.output(finish_enter_forward(entering[0], mesh), weight, bias)
        y = x.new_empty(x.shape[0], x.shape[1] * mesh.tensor.size, *x.shape[2:-1], weight.shape[0])
        for piece, out in zip(entering, y.chunk(len(entering)), strict=True):
            _multiply_into(out, finish_enter_forward(piece, mesh), weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        mesh, products = ctx.mesh, ctx.products
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        entering = start_enter_again(x, grad, mesh) if needs_weight else None
        pending = start_enter_backward(products.input_gradient(grad, weight), mesh) if needs_x else None
        grad_bias = _over_tokens(grad) if ctx.has_bias and needs_bias else None
        grad_weight = None
        if entering is not None:
            grad_weight = products.weight_gradient(grad, finish_enter_forward(entering, mesh))
        grad_x = None if pending is None else wait(pending, mesh.tensor)
        return grad_x, grad_weight, grad_bias, None, None


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
        return y if bias is None else y.add_(bias)

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
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        for i, piece in enumerate(leaving):
            whole = finish_leave_backward(piece, ctx.mesh)
            if grad_x is not None:
                _multiply_into(grad_x.chunk(len(leaving))[i], whole, weight.t(), None)
            if grad_weight is not None:
                grad_weight.addmm_(_rows(whole).t(), _rows(x.chunk(len(leaving))[i]))
        return grad_x, grad_weight, grad_bias, None, None, None


def _pieces(x: Tensor, mesh: ParallelMesh, products: Products, elements: int) -> list[Tensor]:
    """`x` in the pieces in which its product runs, so that one is sent while another is multiplied.

    Only where the sequence is split: f and g stay one all-reduce. A compiler orders what is sent by itself, and pieces
    in 8 bits would be cast one by one.
    """
    if not mesh.sequence_parallel or products is not ORDINARY or torch.compiler.is_compiling():
        return [x]
    return list(x.chunk(num_pieces(x.shape[0], elements)))


def _rows(x: Tensor) -> Tensor:
    """[..., I] as [N, I]."""
    return x.reshape(-1, x.shape[-1])


def _multiply_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Put `F.linear(x, weight, bias)` into `out` [..., O], which is contiguous."""
    if bias is None:
        torch.mm(_rows(x), weight.t(), out=out.view(-1, out.shape[-1]))
    else:
        torch.addmm(bias, _rows(x), weight.t(), out=out.view(-1, out.shape[-1]))


def _over_tokens(grad: Tensor) -> Tensor:
    """The bias's gradient [O] from [..., O]."""
    return _rows(grad).sum(0)


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

    Input [B, S, I] (under sequence parallelism [B, S/T, I]), output [B, S, O/T]. Parameters: `weight` [O, I] as
    Shard(0), `bias` [O] as Shard(0); zeros until initialised.

    Forward: nothing is sent (sequence parallelism: all-gather). Backward: all-reduce of the input's gradient (sequence
    parallelism: reduce-scatter), which runs while the weight's gradient is computed; under sequence parallelism the
    input is kept split and gathered once more, while the input's gradient is computed. Source: paper, section 3, eq. 3;
    Korthikanti et al. 2022, section 4.2.2. Raises `LayoutError` when the tensor axis does not divide O, or when the
    sequence is split and the input has fewer than three dimensions.
    """

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
        place: Any = {"dim": 0, "dtype": dtype, "device": mesh.parameter_device}
        self.weight = sharded_parameter((out_features, in_features), mesh.tensor, **place)
        self.bias = sharded_parameter((out_features,), mesh.tensor, **place) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: [B, S, I] (or [B, S/T, I]) to [B, S, O/T]."""
        require_sequence(x, self.mesh)
        x = x.to(_product_dtype(x))
        bias = None if self.bias is None else local(self.bias, x.dtype)
        weight = local(self.weight, x.dtype)
        if self.mesh.symmetric_memory:
            product = gather_and_multiply(x, weight, self.mesh)
            return product if bias is None else product + bias
        y: Tensor = _EnterAndMultiply.apply(x, weight, bias, self.mesh, self.products)
        return y


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
        y: Tensor = _MultiplyAndLeave.apply(x, weight, bias, self.mesh, self.products, is_needed)
        return y


def is_recomputing() -> bool:
    """Whether this runs inside a backward pass: what a checkpointed module does then, it has done before."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
