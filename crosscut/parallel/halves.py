"""Start and end of the messages of `enter_tensor_parallel` and `leave_tensor_parallel`, as separate functions.

One function starts a message and returns immediately, and another function waits for the result. Matrix products can
run between the two calls. Entering and leaving a parallel region are conjugate operators: the backward message of one
operator is the forward message of the other operator. Two messages therefore serve both operators:

| message | with sequence parallelism | without sequence parallelism | sent when entering | sent when leaving |
|---------|---------------------------|------------------------------|--------------------|-------------------|
| gather  | all-gather                | nothing                      | forward            | backward          |
| sum     | reduce-scatter            | all-reduce                   | backward           | forward           |

A gather joins tensors along dimension 0, so its result is the parts of all sequences, sorted by rank: [T B, S/T, H]. To
put the tokens of several sequences into their order [B, S, H], or back, is a copy (`from_parts`, `to_parts`). A layer
may copy the wide tensor that is sent or the narrow tensor on the other side of its product.

Shapes: B batch, S sequence, H hidden, T tensor ranks.
"""

import torch
from torch import Tensor

from crosscut.parallel.collectives import (
    require_divisible,
    start_all_gather,
    start_all_reduce_owned,
    start_reduce_scatter,
    wait,
    wait_and_join,
)
from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.operators import SEQUENCE_DIM


def start_gather(x: Tensor, mesh: ParallelMesh) -> Tensor:
    """Start gathering the sequence of `x` [B, S/T, H]. `finish_gather` returns the result. Without sequence
    parallelism, return `x` unchanged.
    """
    return start_all_gather(x, mesh.tensor) if mesh.sequence_parallel else x


def start_gather_again(x: Tensor, grad: Tensor, mesh: ParallelMesh) -> Tensor:
    """Start gathering the sequence of `x` [B, S/T, H] again in the backward pass, so that the sequence gathered in the
    forward pass need not stay in memory. `finish_gather` returns the result. Without sequence parallelism, return `x`
    unchanged.

    `grad` is any gradient of this backward pass. The dependency on `grad` keeps `torch.compile` from moving the gather
    to the forward pass.
    """
    if not mesh.sequence_parallel:
        return x
    if torch.compiler.is_compiling():  # otherwise, the compiler would keep the result of the forward pass
        x = _after(x, grad)
    return start_all_gather(x, mesh.tensor)


def finish_gather(started: Tensor, mesh: ParallelMesh, *, in_parts: bool = False) -> Tensor:
    """Wait for the result of `start_gather` or `start_gather_again` and return the whole sequence [B, S, H]; or, with
    `in_parts`, the parts of all ranks [T B, S/T, H], without a copy.
    """
    if in_parts:
        return wait(started, mesh.tensor)
    return wait_and_join(started, mesh.tensor, SEQUENCE_DIM) if mesh.sequence_parallel else started


def start_sum(product: Tensor, mesh: ParallelMesh, *, in_parts: bool = False) -> Tensor:
    """Start summing `product` [B, S, H] over the tensor ranks. `collectives.wait` returns the sum [B, S, H]. Under
    sequence parallelism, `wait` returns only this rank's part of the sum [B, S/T, H]. With `in_parts`, `product` is [T
    B, S/T, H], and is not copied.

    The sum may overwrite `product`, so no other code may hold `product`.
    """
    if mesh.sequence_parallel:
        return start_reduce_scatter(product, mesh.tensor, 0 if in_parts else SEQUENCE_DIM)
    return start_all_reduce_owned(product, mesh.tensor)


def works_on_parts(mesh: ParallelMesh, *, inside: int, sent: int, keeps: bool = False) -> bool:
    """Whether a product works on parts of sequences (`to_parts`). Both ways copy tensors in both passes: without
    parts, the tensors of f or g, `sent` columns in total; with parts, the tensors inside the region, `inside` columns.

    | operator | copied without parts                           | copied with parts                              |
    |----------|------------------------------------------------|------------------------------------------------|
    | f        | input, input in the backward pass, its gradient | outputs, their gradients                       |
    | g        | output, its gradient                           | input, input in the backward pass, its gradient |

    A compiler fuses the copies inside the region with other operators, so compiled code always works on parts, except
    where it would keep the parts for the backward pass beside the tensor itself (`keeps`).
    """
    if not mesh.sequence_parallel or mesh.tensor.size == 1:
        return False
    return not keeps if torch.compiler.is_compiling() else inside < sent


def to_parts(x: Tensor, mesh: ParallelMesh, num_pieces: int = 1) -> Tensor:
    """Copy whole sequences [B, S, ...] into the order of their parts [T B, S/T, ...]. If the batch is sent in pieces,
    the parts of each piece follow each other.
    """
    require_divisible(x, mesh.tensor, SEQUENCE_DIM)
    by_piece = x.unflatten(SEQUENCE_DIM, (mesh.tensor.size, -1)).unflatten(0, (num_pieces, -1))  # [P, B/P, T, S/T, ...]
    parts: Tensor = by_piece.transpose(1, 2).flatten(0, 2)
    return parts


def from_parts(parts: Tensor, mesh: ParallelMesh) -> Tensor:
    """Copy parts [T B, S/T, ...] into the order of their sequences [B, S, ...]."""
    return _by_sequence(parts, mesh).flatten(1, 2).contiguous()  # `flatten` of parts of one token is a view


def write_from_parts(out: Tensor, parts: Tensor, mesh: ParallelMesh) -> None:
    """Do what `from_parts` does, and write the result into `out` [B, S, ...], whose memory is contiguous."""
    out.unflatten(SEQUENCE_DIM, (mesh.tensor.size, -1)).copy_(_by_sequence(parts, mesh))


def _by_sequence(parts: Tensor, mesh: ParallelMesh) -> Tensor:
    by_sequence: Tensor = parts.unflatten(0, (mesh.tensor.size, -1)).transpose(0, 1)
    return by_sequence


def summed_shape(x: Tensor, mesh: ParallelMesh) -> tuple[int, ...]:
    """Return the leading dimensions (B, S) of the sum that `start_sum` computes for a product of `x` [B, S, I]. Under
    sequence parallelism, they are (B, S/T).
    """
    parts = mesh.tensor.size if mesh.sequence_parallel else 1
    return tuple(size // parts if dim == SEQUENCE_DIM else size for dim, size in enumerate(x.shape[:-1]))


@torch.library.custom_op("crosscut::after", mutates_args=())
def _after(x: Tensor, _grad: Tensor) -> Tensor:
    """Copy `x`. The copy depends on a gradient, so it can only be made in the backward pass.

    A compiler sees the forward and the backward pass together. Both passes gather `x`, so the compiler would gather
    only once and keep the result in memory. The dependency on the gradient prevents this.
    """
    return x.clone(memory_format=torch.contiguous_format)


@_after.register_fake
def _like(x: Tensor, _grad: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
