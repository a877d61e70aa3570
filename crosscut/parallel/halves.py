"""The messages of `enter_tensor_parallel` and `leave_tensor_parallel` in two halves, for the products between them.

The first half starts a message and returns at once, the second waits for its result. Entering sends in its backward
pass what leaving sends in its forward pass, and the other way round, so two messages serve both operators:

| message | where the sequence is split | elsewhere  | entering | leaving  |
|---------|-----------------------------|------------|----------|----------|
| gather  | all-gather                  | nothing    | forward  | backward |
| sum     | reduce-scatter              | all-reduce | backward | forward  |

Shapes: B batch, S sequence, H hidden, T tensor ranks.
"""

import torch
from torch import Tensor

from crosscut.parallel.collectives import start_all_gather, start_all_reduce_owned, start_reduce_scatter, wait_and_join
from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.operators import SEQUENCE_DIM


def start_gather(x: Tensor, mesh: ParallelMesh) -> Tensor:
    """Begin to gather the sequence of `x` [B, S/T, H]; an unsplit `x` is returned as it is."""
    return start_all_gather(x, mesh.tensor) if mesh.sequence_parallel else x


def start_gather_again(x: Tensor, grad: Tensor, mesh: ParallelMesh) -> Tensor:
    """Begin to gather, in the backward pass that `grad` has begun, an `x` that the forward pass has gathered before."""
    if not mesh.sequence_parallel:
        return x
    if torch.compiler.is_compiling():  # which would gather once, in the forward pass, and keep the result
        x = _after(x, grad)
    return start_all_gather(x, mesh.tensor)


def finish_gather(started: Tensor, mesh: ParallelMesh) -> Tensor:
    """Wait for the result of `start_gather` or `start_gather_again`: the whole sequence [B, S, H]."""
    return wait_and_join(started, mesh.tensor, SEQUENCE_DIM) if mesh.sequence_parallel else started


def start_sum(product: Tensor, mesh: ParallelMesh) -> Tensor:
    """Begin to sum a product [B, S, H] over the ranks; `collectives.wait` gives the sum, or this rank's [B, S/T, H].

    The sum may take the place of the product, which nobody else may have seen.
    """
    if mesh.sequence_parallel:
        return start_reduce_scatter(product, mesh.tensor, SEQUENCE_DIM)
    return start_all_reduce_owned(product, mesh.tensor)


def summed_shape(x: Tensor, mesh: ParallelMesh) -> tuple[int, ...]:
    """Shape of a summed product of `x` [B, S, ...], without its last dimension."""
    parts = mesh.tensor.size if mesh.sequence_parallel else 1
    return tuple(size // parts if dim == SEQUENCE_DIM else size for dim, size in enumerate(x.shape[:-1]))


@torch.library.custom_op("crosscut::after", mutates_args=())
def _after(x: Tensor, _grad: Tensor) -> Tensor:
    """A copy of `x`, made when the gradient is there.

    A compiler sees both passes at once and what they have in common: it would gather `x` once, in the forward pass, and
    keep the result, which is what the second gather is there to save.
    """
    return x.clone(memory_format=torch.contiguous_format)


@_after.register_fake
def _like(x: Tensor, _grad: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
