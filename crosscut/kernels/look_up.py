"""Embedding look-up for a weight that is used a second time, such as tied embeddings. Both uses share one gradient
tensor.

Without this module, autograd would allocate three tensors of the weight's size: a gradient for each of the two uses,
and the sum of the two gradients.
"""

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.kernels.functions import AutogradContext, run


def look_up(weight: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors: the rows of `weight` [V, H] at `index` [...], with the shape [..., H], and the weight [V, H]
    itself for its second use.

    Use the returned weight exactly once. Backward: the gradients of the rows are added in place to the weight's
    gradient from the second use. No other code may hold this gradient.
    """
    return run(_SharedLookUp, weight, index, twin=_plain)


def _plain(weight: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    return F.embedding(index, weight), weight


class _SharedLookUp(Function):
    @staticmethod
    def forward(ctx: AutogradContext[tuple[Tensor]], weight: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(index)
        return F.embedding(index, weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext[tuple[Tensor]], grad_rows: Tensor, grad_weight: Tensor) -> tuple[Tensor, None]:
        index = ctx.saved_tensors[0].flatten()
        total = grad_weight.contiguous()
        rows = grad_rows.reshape(-1, total.shape[1])
        if total.is_cuda:  # adds in the same order each time on CUDA; `index_add_` does not
            return total.index_put_((index,), rows, accumulate=True), None
        return total.index_add_(0, index, rows), None
