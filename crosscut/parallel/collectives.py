"""The only place that sends anything between ranks.

Each collective returns a fresh tensor and never changes its argument: with the paper's f written in place, the gradient
of f(x) + x on two ranks would come out as 4, not 3. The one exception has it in its name: `start_all_reduce_owned`, for
a product that nobody else has seen. A collective is started and waited for separately, so that work can be placed
between. On an axis of size 1 both steps return the tensor itself.

They are PyTorch's functional collectives, called as operators because these are what `torch.compile` traces and what a
`CollectiveRecorder` sees.
"""

import pickle
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crosscut.config import LayoutError
from crosscut.parallel.mesh import Axis, ParallelMesh

_ops = torch.ops._c10d_functional  # registered by `import torch.distributed`


def start_all_reduce(x: Tensor, axis: Axis, operation: str = "sum") -> Tensor:
    """Begin to combine `x` over the axis; the result is there after `wait`. `operation` is "sum" or "max"."""
    if axis.size == 1:
        return x
    reduced: Tensor = _ops.all_reduce(x.contiguous(), operation, axis.group_name)
    return reduced


def start_all_reduce_owned(x: Tensor, axis: Axis) -> Tensor:
    """As `start_all_reduce`, with the sum in the place of `x`: saves a copy where `x` was just made and is held here
    alone.
    """
    if axis.size == 1 or torch.compiler.is_compiling():  # a compiler reuses memory by itself
        return start_all_reduce(x, axis)
    reduced: Tensor = _ops.all_reduce_(x.contiguous(), "sum", axis.group_name)
    return reduced


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Begin to sum `x` over the axis and keep this rank's part of dimension `dim`; there after `wait`.

    Raises `LayoutError` when the axis does not divide the dimension.
    """
    if axis.size == 1:
        return x
    _require_divisible(x, axis, dim)
    # The collective splits dimension 0. Behind a first dimension of one, parts follow each other in memory already.
    if dim and x.shape[:dim].numel() == 1:
        x = x.reshape(axis.size, *x.shape[1:dim], x.shape[dim] // axis.size, *x.shape[dim + 1 :])
    elif dim:
        x = torch.cat(x.chunk(axis.size, dim))
    scattered: Tensor = _ops.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.group_name)
    return scattered


def start_all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Begin to collect the parts `x` of all ranks; they are there, joined, after `wait_and_join`."""
    if axis.size == 1:
        return x
    gathered: Tensor = _ops.all_gather_into_tensor(x.contiguous(), axis.size, axis.group_name)
    return gathered


def wait_and_join(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Wait for what `start_all_gather` returned and join the parts along `dim`, in the order of the ranks."""
    if axis.size == 1:
        return x
    joined = wait(x, axis)
    if dim == 0:
        return joined
    if joined.shape[:dim].numel() == axis.size:  # the parts follow each other already
        return joined.reshape(*[1] * dim, axis.size * joined.shape[dim], *joined.shape[dim + 1 :])
    return torch.cat(joined.chunk(axis.size), dim)


def wait(x: Tensor, axis: Axis) -> Tensor:
    """Wait for what `start_...` returned and return it."""
    return x if axis.size == 1 else _ops.wait_tensor(x)


def all_reduce(x: Tensor, axis: Axis, operation: str = "sum") -> Tensor:
    """Combine `x` over the axis: the same result on every rank."""
    return wait(start_all_reduce(x, axis, operation), axis)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum `x` over the axis and keep this rank's part of dimension `dim`; raises as `start_reduce_scatter` does."""
    return wait(start_reduce_scatter(x, axis, dim), axis)


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Join the parts of all ranks along dimension `dim`, in the order of the ranks."""
    return wait_and_join(start_all_gather(x, axis), axis, dim)


def split(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part of `x` along dimension `dim`: the conjugate of `all_gather`, sends nothing.

    Raises `LayoutError` when the axis does not divide the dimension.
    """
    if axis.size == 1:
        return x
    _require_divisible(x, axis, dim)
    return x.chunk(axis.size, dim)[axis.rank].clone(memory_format=torch.contiguous_format)


def _require_divisible(x: Tensor, axis: Axis, dim: int) -> None:
    """Raise on all ranks alike where parts would be uneven, which would leave ranks waiting for each other."""
    if x.shape[dim] % axis.size:
        raise LayoutError(
            f"Dimension {dim} of a tensor that is split over the {axis.name} axis must be a multiple of its "
            f"{axis.size} ranks, but is {x.shape[dim]}. Pad it, or choose a layout that divides it."
        )


def all_gather_objects(value: object, axis: Axis) -> list[Any]:
    """Every rank's small Python value, in the order of the ranks: for messages to people, not for tensors."""
    if axis.size == 1:
        return [value]
    gathered: list[Any] = [None] * axis.size
    dist.all_gather_object(gathered, value, group=axis.device_mesh.get_group())
    return gathered


def from_all_ranks(value: object, mesh: ParallelMesh) -> list[Any]:
    """Every rank's small Python value, in the order of the mesh's ranks: for messages to people, not for tensors."""
    values = [value]
    for axis in reversed(mesh.axes):
        values = list(chain.from_iterable(all_gather_objects(values, axis)))
    return values


def background_group() -> dist.ProcessGroup:
    """A group of all ranks for messages that another thread sends beside the training's. Every rank calls it alike.

    Over the CPU, and patient for a day: a rank may write to a slow disk while the others wait for it.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    return group


def share_from_first(value: object) -> Any:
    """The first rank's small Python value, on every rank; the others wait for it for up to a day."""
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    shared = [value]
    dist.broadcast_object_list(shared, src=0, group=patient, device=torch.device("cpu"))
    dist.destroy_process_group(patient)
    return shared[0]


class FirstRankLine:
    """A line on which the first rank tells all others a small Python value, again and again.

    Over the CPU, in a group of its own, beside what else is sent; the others wait up to a day for the next value, so
    that a first rank with nothing to say must say so more often. None costs one message of eight bytes, any other value
    a second one. Every rank makes the line and calls `share` and `close` alike.
    """

    def __init__(self) -> None:
        self._group = background_group() if dist.get_world_size() > 1 else None

    def share(self, value: object) -> Any:
        """The first rank's value, on every rank; what the others give is not looked at."""
        if self._group is None:
            return value
        content = bytearray() if value is None or dist.get_rank() else bytearray(pickle.dumps(value))
        length = torch.tensor([len(content)])
        dist.broadcast(length, src=0, group=self._group)
        if not length:
            return None
        message = torch.frombuffer(content or bytearray(int(length)), dtype=torch.uint8)
        dist.broadcast(message, src=0, group=self._group)
        return value if content else pickle.loads(message.numpy().tobytes())  # noqa: S301 - our own first rank's

    def close(self) -> None:
        """Give the line's connections up."""
        if self._group is not None:
            dist.destroy_process_group(self._group)


def gather_to_first(value: object) -> list[Any] | None:
    """Every rank's value, in the order of all ranks, on the first rank; None on the others. For looking at, not for
    training: values travel pickled.
    """
    first = dist.get_rank() == 0
    gathered: list[Any] | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(value, gathered, dst=0)
    return gathered
