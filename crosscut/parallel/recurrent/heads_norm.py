"""RMS norms of all queries and of all keys of a token, with the heads divided over the tensor ranks (OLMo 2).

    n = x / root of the mean square of x over all heads        result = n w

Each rank adds up the squares of its own heads. The ranks sum queries' and keys' numbers in one message: g and then f of
[B, S, 2] elements. If several ranks hold the same key head, the mean is the same, since every head is held equally
often.

Shapes: B batch, S sequence, A heads, D elements of a head, T tensor ranks.
"""

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.kernels.functions import AutogradContext, run
from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.linear import Blocks, rows_of_block
from crosscut.parallel.mesh import Axis, ParallelMesh
from crosscut.parallel.operators import copy_to_tensor_parallel, reduce_from_tensor_parallel
from crosscut.parallel.recurrent.group_norm import normal_gradient
from crosscut.parallel.state.parameters import ParameterMaker, local, local_inside

Pair = tuple[Tensor, Tensor]
"""Queries and keys."""


@final
class HeadsNorm(nn.Module):
    """Parameter of an RMS norm over all heads: `weight` [A D], cut like the outputs of a `ColumnParallelLinear` with
    the output features `heads`; zeros until initialised. Without `affine`, the norm has no weight.

    If there are more ranks than heads, several ranks hold the whole weight and use the rows of the same head. Their
    gradients are then partial.
    """

    def __init__(
        self,
        heads: Blocks,
        *,
        mesh: ParallelMesh,
        epsilon: float,
        affine: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        size, self.axis, self.epsilon = heads.number * heads.width, mesh.tensor, epsilon
        self._own_rows = rows_of_block(size, heads.number, mesh.tensor)
        make = ParameterMaker(mesh, dtype)
        of_rank = make.sharded(size, dim=0) if self._own_rows is None else make.replicated(size)
        self.weight = of_rank if affine else None

    def own(self, heads: Tensor) -> Tensor | None:
        """Return the weight of this rank's heads [A/T, D] in the type of `heads` [B, S, A/T, D]; None without one."""
        if self.weight is None:
            return None
        if self._own_rows is None:
            return local(self.weight, heads.dtype).view(heads.shape[2:])
        return local_inside(self.weight, heads.dtype)[self._own_rows].view(heads.shape[2:])


def normalise_heads(query: Tensor, key: Tensor, query_norm: HeadsNorm, key_norm: HeadsNorm) -> Pair:
    """Normalise all queries [B, S, A/T, D] of each token together, and all its keys [B, S, K/T, D].

    Forward and backward: an all-reduce of 2 B S elements in float32 or wider. For the backward pass, the arguments and
    two numbers per token are saved. Source: Walsh et al. 2024 (arXiv 2501.00656), section 2.1.
    """
    weights = query_norm.own(query), key_norm.own(key)
    return run(_Norms, query, key, *weights, query_norm.axis, query_norm.epsilon, twin=_plain)


def _plain(
    query: Tensor, key: Tensor, of_query: Tensor | None, of_key: Tensor | None, axis: Axis, epsilon: float
) -> Pair:
    wide = _widened(query, key)
    everywhere = reduce_from_tensor_parallel(_means(wide, wide, axis), axis)  # g
    roots = torch.rsqrt(copy_to_tensor_parallel(everywhere, axis) + epsilon)  # f
    q, k = (_of_heads(roots, i) * x for i, x in enumerate(wide))
    return _weighted(q.to(query.dtype), of_query), _weighted(k.to(key.dtype), of_key)


def _widened(*heads: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in heads)


def _means(first: tuple[Tensor, ...], second: tuple[Tensor, ...], axis: Axis) -> Tensor:
    """Return this rank's share of the mean products of queries, and of keys: [B, S, 2]."""
    return torch.stack([(a * b).mean((-2, -1)) / axis.size for a, b in zip(first, second, strict=True)], -1)


def _of_heads(numbers: Tensor, index: int) -> Tensor:
    """Return the numbers of the queries (0) or of the keys (1) in the shape [B, S, 1, 1]."""
    return numbers[..., index, None, None]


def _weighted(normal: Tensor, weight: Tensor | None) -> Tensor:
    return normal if weight is None else normal * weight


_Saved = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]
"""Queries, keys, their weights, and the inverse roots of each token [B, S, 2]."""


class _Context(AutogradContext[_Saved]):
    axis: Axis


class _Norms(Function):
    @staticmethod
    def forward(ctx: _Context, query: Tensor, key: Tensor, *rest: Any) -> Pair:
        of_query, of_key, axis, epsilon = rest
        wide = _widened(query, key)
        roots = torch.rsqrt(all_reduce(_means(wide, wide, axis), axis) + epsilon)
        ctx.save_for_backward(query, key, of_query, of_key, roots)
        ctx.axis = axis
        q, k = ((x * _of_heads(roots, i)).to(query.dtype) for i, x in enumerate(wide))
        return _weighted(q, of_query), _weighted(k, of_key)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *grads: Tensor) -> Any:
        query, key, of_query, of_key, roots = ctx.saved_tensors
        normal = tuple(x * _of_heads(roots, i) for i, x in enumerate(_widened(query, key)))
        weights = of_query, of_key
        of_normal = _widened(*(_weighted(grad, weight) for grad, weight in zip(grads, weights, strict=True)))
        shared = all_reduce(_means(of_normal, normal, ctx.axis), ctx.axis)
        of_heads = [
            normal_gradient(a, n, root=_of_heads(roots, i), mean=_of_heads(shared, i)).to(query.dtype)
            for i, (a, n) in enumerate(zip(of_normal, normal, strict=True))
        ]
        of_weights = [
            None if weight is None else (grad * n).sum((0, 1)).to(weight.dtype)
            for weight, grad, n in zip(weights, grads, normal, strict=True)
        ]
        return *of_heads, *of_weights, None, None
