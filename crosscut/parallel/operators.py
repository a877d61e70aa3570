"""Operators at which ranks communicate inside a model: the paper's f and g, and their sequence-parallel counterparts.

Two operators are conjugate if the backward pass of each operator is the forward pass of the other. The table has three
conjugate pairs: f and g; `gather_from_sequence_parallel` and `reduce_scatter_to_sequence_parallel`;
`scatter_to_sequence_parallel` and `join_from_sequence_parallel`.

| operator                              | forward        | backward       |
|---------------------------------------|----------------|----------------|
| `copy_to_tensor_parallel` (f)         | identity       | all-reduce     |
| `reduce_from_tensor_parallel` (g)     | all-reduce     | identity       |
| `gather_from_sequence_parallel`       | all-gather     | reduce-scatter |
| `reduce_scatter_to_sequence_parallel` | reduce-scatter | all-gather     |
| `scatter_to_sequence_parallel`        | split          | all-gather     |
| `gather_from_tensor_parallel`         | all-gather     | split          |
| `join_from_sequence_parallel`         | all-gather     | split          |

f and g are from the paper (section 3, Code 1); the sequence-parallel operators are from Korthikanti et al. 2022. f is
the entry into a parallel region, and g is the exit. Between the parallel regions, every rank holds the whole sequence,
or, under sequence parallelism, only a part of it. Layers call `enter_tensor_parallel` and `leave_tensor_parallel`,
which apply f and g or, under sequence parallelism, the gather and the reduce-scatter.

Shapes: B batch, S sequence, H hidden, T tensor ranks. The sequence dimension is 1.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.config import LayoutError
from crosscut.parallel.collectives import all_gather, all_reduce, reduce_scatter, split
from crosscut.parallel.mesh import Axis, ParallelMesh

SEQUENCE_DIM = 1


Exchange = Callable[[Tensor, Axis], Tensor]
"""Function that turns this rank's tensor into another one, with or without a message over the axis."""


class _ExchangeContext(Protocol):
    axis: Axis
    exchange_back: Exchange


class _ExchangeFunction(Function):
    @staticmethod
    def forward(ctx: _ExchangeContext, x: Tensor, axis: Axis, exchange: Exchange, back: Exchange) -> Tensor:
        ctx.axis, ctx.exchange_back = axis, back
        return exchange(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: _ExchangeContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange_back(grad, ctx.axis), None, None, None


def exchanged(x: Tensor, axis: Axis, *, forward: Exchange, backward: Exchange) -> Tensor:
    """Apply `forward` to `x`, and `backward` to the gradient of the result. On an axis of size 1, return `x`."""
    return x if axis.size == 1 else _ExchangeFunction.apply(x, axis, forward, backward)


def _gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    return all_gather(x, axis, SEQUENCE_DIM)


def _scatter_sum(x: Tensor, axis: Axis) -> Tensor:
    return reduce_scatter(x, axis, SEQUENCE_DIM)


def _split_sequence(x: Tensor, axis: Axis) -> Tensor:
    return split(x, axis, SEQUENCE_DIM)


def copy_to_tensor_parallel(x: Tensor, axis: Axis) -> Tensor:
    """Apply the paper's operator f: pass a replicated tensor into a parallel region.

    Forward: identity. Backward: all-reduce, which sums the gradients of all ranks (`x.numel()` elements). Source:
    paper, section 3, Code 1.
    """
    return exchanged(x, axis, forward=lambda x, _: x.view_as(x), backward=all_reduce)


def reduce_from_tensor_parallel(x: Tensor, axis: Axis) -> Tensor:
    """Apply the paper's operator g: sum the partial results of a parallel region.

    Forward: all-reduce of `x.numel()` elements. Backward: identity. Source: paper, section 3.
    """
    return exchanged(x, axis, forward=all_reduce, backward=lambda grad, _: grad)


def gather_from_sequence_parallel(x: Tensor, axis: Axis) -> Tensor:
    """Gather the parts of the sequence from all ranks and join them: [B, S/T, ...] to [B, S, ...].

    Forward: all-gather. Backward: reduce-scatter. Source: Korthikanti et al. 2022, section 4.2.2.
    """
    return exchanged(x, axis, forward=_gather_sequence, backward=_scatter_sum)


def reduce_scatter_to_sequence_parallel(x: Tensor, axis: Axis) -> Tensor:
    """Sum partial results over the ranks and keep this rank's part of the sequence: [B, S, ...] to [B, S/T, ...].

    Forward: reduce-scatter. Backward: all-gather. Source: Korthikanti et al. 2022, section 4.2.2.
    """
    return exchanged(x, axis, forward=_scatter_sum, backward=_gather_sequence)


def scatter_to_sequence_parallel(x: Tensor, axis: Axis) -> Tensor:
    """Keep this rank's part of a replicated sequence: [B, S, ...] to [B, S/T, ...].

    Forward: split, which sends nothing. Backward: all-gather.
    """
    return exchanged(x, axis, forward=_split_sequence, backward=_gather_sequence)


def gather_from_tensor_parallel(x: Tensor, axis: Axis) -> Tensor:
    """Gather the columns from all ranks and join them: [..., V/T] to [..., V].

    Forward: all-gather. Backward: split, which sends nothing. The incoming gradient must be the same on all ranks.
    """
    last = x.dim() - 1
    return exchanged(
        x, axis, forward=lambda x, axis: all_gather(x, axis, last), backward=lambda grad, axis: split(grad, axis, last)
    )


def join_from_sequence_parallel(x: Tensor, axis: Axis) -> Tensor:
    """Gather and join the parts of the sequence outside the parallel regions: [B, S/T, ...] to [B, S, ...].

    Forward: all-gather. Backward: split, which sends nothing. The incoming gradient must be the same on all ranks.
    """
    return exchanged(x, axis, forward=_gather_sequence, backward=_split_sequence)


def counted_once(x: Tensor, axis: Axis) -> Tensor:
    """Return `x`, a term of the loss that all ranks compute alike inside a parallel region.

    f sums the gradients of all ranks, so each rank takes only its share of the term's gradient. Forward: identity.
    Backward: division by the number of ranks, which sends nothing.
    """
    return exchanged(x, axis, forward=lambda x, _: x.clone(), backward=lambda grad, axis: grad / axis.size)


def enter_tensor_parallel(x: Tensor, mesh: ParallelMesh) -> Tensor:
    """Pass `x` into a parallel region with f (`copy_to_tensor_parallel`) or, under sequence parallelism, with
    `gather_from_sequence_parallel`.

    Raises `LayoutError` if, under sequence parallelism, `x` has fewer than three dimensions.
    """
    require_sequence(x, mesh)
    enter = gather_from_sequence_parallel if mesh.sequence_parallel else copy_to_tensor_parallel
    return enter(x, mesh.tensor)


def leave_tensor_parallel(x: Tensor, mesh: ParallelMesh) -> Tensor:
    """Sum the partial results `x` of a parallel region with g (`reduce_from_tensor_parallel`) or, under sequence
    parallelism, with `reduce_scatter_to_sequence_parallel`, which keeps only this rank's part of the sequence.

    Raises `LayoutError` if, under sequence parallelism, `x` has fewer than three dimensions.
    """
    require_sequence(x, mesh)
    leave = reduce_scatter_to_sequence_parallel if mesh.sequence_parallel else reduce_from_tensor_parallel
    return leave(x, mesh.tensor)


def require_sequence(x: Tensor, mesh: ParallelMesh) -> None:
    """Raise `LayoutError` on all ranks if, under sequence parallelism, `x` has fewer than three dimensions."""
    if mesh.sequence_parallel and x.dim() <= SEQUENCE_DIM + 1:
        raise LayoutError(
            "Under sequence parallelism, a tensor that enters or leaves a parallel region must have at least three "
            f"dimensions, [batch, sequence, ...], but has the shape {list(x.shape)}. Add the missing dimensions, or "
            "set layout.sequence_parallel=false."
        )


def part_of_sequence(x: Tensor, mesh: ParallelMesh, dim: int) -> Tensor:
    """Return this rank's part of `x` along `dim`, the sequence dimension. Without sequence parallelism, return `x`
    unchanged. Sends nothing.

    `x` must be the same on all tensor ranks. Raises `LayoutError` if the length of the sequence is not a multiple of
    the number of tensor ranks.
    """
    return split(x, mesh.tensor, dim) if mesh.sequence_parallel else x
