r"""The two cuts of the paper's section 3: a matrix cut by columns, then one cut by rows.

        X --f--> X A_1 --GeLU--> Y_1 B_1 --\
                                            g--> sum_i Y_i B_i + bias
        X --f--> X A_2 --GeLU--> Y_2 B_2 --/

The first product needs no communication forward, the second sums once. Shapes: B batch, S sequence, I in, O out, T
tensor ranks. PyTorch keeps weights as [O, I], so the paper's columns are dimension 0 here and its rows dimension 1.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.parallel.collectives import wait
from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.operators import enter_forward, leave_backward, leave_forward, start_enter_backward
from crosscut.parallel.parameters import local, local_on_sequence, replicated_parameter, sharded_parameter


class _EnterAndMultiply(Function):
    """`F.linear(enter_tensor_parallel(x), weight, bias)`; f's backward collective runs beside the weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mesh: ParallelMesh) -> Tensor:
        whole = enter_forward(x, mesh)
        ctx.save_for_backward(whole, weight)
        ctx.mesh, ctx.has_bias = mesh, bias is not None
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        whole, weight = ctx.saved_tensors
        pending = start_enter_backward(grad @ weight, ctx.mesh) if ctx.needs_input_grad[0] else None
        grad_weight = _outer(grad, whole) if ctx.needs_input_grad[1] else None
        grad_bias = _over_tokens(grad) if ctx.has_bias and ctx.needs_input_grad[2] else None
        grad_x = wait(pending, ctx.mesh.tensor) if pending is not None else None
        return grad_x, grad_weight, grad_bias, None


class _MultiplyAndLeave(Function):
    """`leave_tensor_parallel(F.linear(x, weight)) + bias`, without a copy for g and for the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mesh: ParallelMesh) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mesh, ctx.has_bias = mesh, bias is not None
        y = leave_forward(F.linear(x, weight), mesh)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        whole = leave_backward(grad, ctx.mesh)
        grad_x = whole @ weight if ctx.needs_input_grad[0] else None
        grad_weight = _outer(whole, x) if ctx.needs_input_grad[1] else None
        grad_bias = _over_tokens(grad) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None


def _outer(grad: Tensor, x: Tensor) -> Tensor:
    """The weight's gradient [O, I] from [..., O] and [..., I]."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _over_tokens(grad: Tensor) -> Tensor:
    """The bias's gradient [O] from [..., O]."""
    return grad.flatten(0, -2).sum(0)


class ColumnParallelLinear(nn.Module):
    """Y_i = f(X) A_i + b_i: the weight cut by columns, the output left split.

    Input [B, S, I] (under sequence parallelism [B, S/T, I]), output [B, S, O/T]. Parameters: `weight` [O, I] as
    Shard(0), `bias` [O] as Shard(0); zeros until initialised.

    Forward: nothing is sent (sequence parallelism: all-gather). Backward: all-reduce of the input's gradient (sequence
    parallelism: reduce-scatter), which runs while the weight's gradient is computed. Source: paper, section 3, eq. 3.
    Raises `LayoutError` when the tensor axis does not divide O.
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
        self.mesh = mesh
        place: Any = {"dim": 0, "dtype": dtype, "device": mesh.parameter_device}
        self.weight = sharded_parameter((out_features, in_features), mesh.tensor, **place)
        self.bias = sharded_parameter((out_features,), mesh.tensor, **place) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: [B, S, I] (or [B, S/T, I]) to [B, S, O/T]."""
        bias = None if self.bias is None else local(self.bias, x.dtype)
        y: Tensor = _EnterAndMultiply.apply(x, local(self.weight, x.dtype), bias, self.mesh)
        return y


class RowParallelLinear(nn.Module):
    """Y = g(X_i B_i) + b: the weight cut by rows, its input split by columns, the bias added once, after the sum.

    Input [B, S, I/T], output [B, S, O] (under sequence parallelism [B, S/T, O]). Parameters: `weight` [O, I] as
    Shard(1), `bias` [O] as Replicate; zeros until initialised.

    Forward: all-reduce of the output (sequence parallelism: reduce-scatter). Backward: nothing is sent (sequence
    parallelism: all-gather). Source: paper, section 3, eq. 2. Raises `LayoutError` when the tensor axis does not
    divide I.
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
        self.mesh = mesh
        place: Any = {"dtype": dtype, "device": mesh.parameter_device}
        self.weight = sharded_parameter((out_features, in_features), mesh.tensor, dim=1, **place)
        self.bias = replicated_parameter((out_features,), mesh.tensor, **place) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply and sum over the ranks: [B, S, I/T] to [B, S, O] (or [B, S/T, O])."""
        bias = None if self.bias is None else local_on_sequence(self.bias, self.mesh, x.dtype)
        y: Tensor = _MultiplyAndLeave.apply(x, local(self.weight, x.dtype), bias, self.mesh)
        return y
