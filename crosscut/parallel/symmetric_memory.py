r"""Matrix products that overlap, piece by piece, with the gather of their input or the scatter of their output.

PyTorch's symmetric memory lets the tensor ranks access each other's memory. A rank then need not wait for the whole
gathered sequence: the rank multiplies one piece of the sequence while it copies the next piece from another rank. The
rank also sends each piece of a product as soon as the piece is computed (Wang et al. 2023; PyTorch calls this
asynchronous tensor parallelism). Two conjugate operators suffice:

    gather and multiply:   X = gather(x),  y = X W^T        backward: multiply and scatter
    multiply and scatter:  y = scatter(x W^T)               backward: gather and multiply

Both operators need sequence parallelism. The gradient of the weight needs the whole sequence. The first operator
therefore gathers the sequence again in its backward pass, overlapped with the product that computes the input's
gradient. The backward pass of the second operator gathers the sequence anyway.

Shapes: B batch, S sequence, I in, O out, T tensor ranks.
"""

import os
import warnings
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import _symmetric_memory  # registers the operators, and names a group that may use them

from crosscut.config import Layout, LayoutError
from crosscut.kernels.functions import AutogradContext, run
from crosscut.kernels.products import ORDINARY
from crosscut.parallel.halves import finish_gather, start_gather_again
from crosscut.parallel.mesh import Axis, ParallelMesh
from crosscut.parallel.operators import SEQUENCE_DIM

_ops = torch.ops.symm_mem


class _ProductContext(AutogradContext[tuple[Tensor, ...]], Protocol):
    mesh: ParallelMesh


class _GatherAndMultiply(Function):
    @staticmethod
    def forward(ctx: _ProductContext, x: Tensor, mesh: ParallelMesh, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.mesh = mesh
        _, products = _gathered_products(x, [weight.t() for weight in weights], mesh.tensor, keep=False)
        return tuple(products)

    @staticmethod
    @once_differentiable
    def backward(ctx: _ProductContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad
        entering = start_gather_again(x, grads[0], ctx.mesh) if any(needs) else None
        grad_x = None
        if needs_x:
            one = len(weights) == 1
            grad, weight = (grads[0], weights[0]) if one else (torch.cat(grads, -1), torch.cat(weights))
            grad_x = _scattered_product(grad, weight, ctx.mesh.tensor)
        if entering is None:
            return grad_x, None, *(None for _ in weights)
        whole = finish_gather(entering, ctx.mesh)
        of_weights = (ORDINARY.weight_gradient(g, whole) if n else None for g, n in zip(grads, needs, strict=True))
        return grad_x, None, *of_weights


class _MultiplyAndScatter(Function):
    @staticmethod
    def forward(ctx: _ProductContext, x: Tensor, weight: Tensor, mesh: ParallelMesh) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mesh = mesh
        return _scattered_product(x, weight.t(), mesh.tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: _ProductContext, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        whole, (grad_x,) = _gathered_products(grad, [weight], ctx.mesh.tensor, keep=needs_weight)
        grad_weight = None if whole is None else ORDINARY.weight_gradient(whole, x)
        return grad_x if needs_x else None, grad_weight, None


def gather_and_multiply(x: Tensor, weights: Sequence[Tensor], mesh: ParallelMesh) -> tuple[Tensor, ...]:
    """Gather the sequence of `x` [B, S/T, I] and multiply the result by each weight [O, I]. Returns one output [B, S,
    O] per weight.

    Forward: an all-gather, in pieces. Backward: a product with a reduce-scatter in pieces, and an all-gather that
    overlaps with this product.
    """
    return run(_GatherAndMultiply, x, mesh, *weights)


def multiply_and_scatter(x: Tensor, weight: Tensor, mesh: ParallelMesh) -> Tensor:
    """Multiply `x` [B, S, I] by `weight` [O, I], sum the product over the tensor ranks, and keep this rank's part of
    the sequence: [B, S/T, O].

    Forward: a reduce-scatter, in pieces. Backward: an all-gather, in pieces.
    """
    return run(_MultiplyAndScatter, x, weight, mesh)


def _gathered_products(
    x: Tensor, matrices: list[Tensor], axis: Axis, *, keep: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Return the gathered sequence and the list of its products with `matrices` [K, N]. Without `keep`, return None
    instead of the sequence.

    PyTorch's operator makes no copies if the sequence is the outermost dimension of `x` in memory.
    """
    x = _symmetric_memory.restride_A_shard_for_fused_all_gather_matmul(x, SEQUENCE_DIM)
    whole, products = _ops.fused_all_gather_matmul(x, matrices, SEQUENCE_DIM, axis.group_name, return_A=keep)
    return whole, products


def _scattered_product(x: Tensor, matrix: Tensor, axis: Axis) -> Tensor:
    x = _symmetric_memory.restride_A_for_fused_matmul_reduce_scatter(x, SEQUENCE_DIM)
    scattered: Tensor = _ops.fused_matmul_reduce_scatter(x, matrix, "sum", SEQUENCE_DIM, axis.group_name)
    return scattered


def enable_symmetric_memory(mesh: ParallelMesh) -> None:
    """Prepare the tensor ranks of the mesh for access to each other's memory. Does nothing on the CPU, or if the layout
    does not use symmetric memory. Every rank must call this function.
    """
    if not mesh.symmetric_memory or mesh.device.type != "cuda":
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions of PyTorch warn that the call is not needed
        _symmetric_memory.enable_symm_mem_for_group(mesh.tensor.group_name)  # type: ignore[arg-type]


def require_symmetric_memory(layout: Layout, device: torch.device) -> None:
    """Raise `LayoutError` if the layout uses symmetric memory but the tensor ranks cannot share memory."""
    if layout.symmetric_memory and (reason := _reason_against(layout, device)):
        raise LayoutError(
            f"`layout.symmetric_memory` must be false here, but is true. {reason}. Set "
            "layout.symmetric_memory=false. Messages then still overlap with matrix products, but in larger pieces."
        )


def _reason_against(layout: Layout, device: torch.device) -> str:
    if device.type != "cuda":
        return "Symmetric memory needs GPUs, but the run is on the CPU"
    num_ranks, own = layout.tensor, os.environ.get("LOCAL_RANK")
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size))
    if on_this_machine % num_ranks:
        return f"The {num_ranks} tensor ranks are not all on one machine (this machine runs {on_this_machine} ranks)"
    # A rank checks its own GPU. The process that starts the ranks checks all GPUs.
    for one in range(on_this_machine) if own is None else [int(own)]:
        first = one // num_ranks * num_ranks
        for other in range(first, first + num_ranks):
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                return f"GPU {one} cannot access the memory of GPU {other}. This needs NVLink or peer-to-peer PCIe"
    return ""
