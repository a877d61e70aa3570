"""Collectives of tensors over one axis, and messages with small Python values for all ranks.

Each collective returns a fresh tensor and never changes its argument. (The backward pass of the paper's f,
`copy_to_tensor_parallel`, sums gradients. If it did so in place, the gradient of f(x) + x on two ranks would be 4
instead of 3.) The only exception is `start_all_reduce_owned`, for a tensor that no other code holds. A collective can
be started by one call and awaited by another, so that other work runs in between. On an axis of size 1, both calls
return their argument and send nothing.

The functions call the operators of PyTorch's functional collectives, because `torch.compile` can trace operators and
`CollectiveRecorder` can record them. Outside of compiled code, each message is also listed in the record of this
process (`flight.record`).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from crosscut.config import LayoutError
from crosscut.flight import RECORD, MessageKind
from crosscut.parallel.mesh import Axis, ParallelMesh

_T = TypeVar("_T")

_ops = torch.ops._c10d_functional  # registered by `import torch.distributed`


def start_all_reduce(x: Tensor, axis: Axis, operation: str = "sum") -> Tensor:
    """Start an all-reduce of `x` over the axis. The returned tensor is valid after `wait`. `operation` is "sum" or
    "max".
    """
    if axis.size == 1:
        return x
    return _start(MessageKind.ALL_REDUCE, x, axis, _ops.all_reduce, operation)


def start_all_reduce_owned(x: Tensor, axis: Axis) -> Tensor:
    """Start an all-reduce (sum) of `x` over the axis. The sum overwrites `x` if possible, which saves a copy.

    The caller must hold the only reference to `x` and use only the returned tensor, which is valid after `wait`.
    """
    if axis.size == 1 or torch.compiler.is_compiling():  # in compiled code, the compiler decides which memory is reused
        return start_all_reduce(x, axis)
    return _start(MessageKind.ALL_REDUCE, x, axis, _ops.all_reduce_, "sum")


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Start a reduce-scatter: sum `x` over the axis and keep this rank's part of dimension `dim`. The returned tensor
    is valid after `wait`.

    Raises `LayoutError` if the size of the dimension is not a multiple of the number of ranks on the axis.
    """
    if axis.size == 1:
        return x
    require_divisible(x, axis, dim)
    # The collective splits dimension 0. If all dimensions before `dim` have size 1, a reshape is enough, without a
    # copy.
    if dim and x.shape[:dim].numel() == 1:
        x = x.reshape(axis.size, *x.shape[1:dim], x.shape[dim] // axis.size, *x.shape[dim + 1 :])
    elif dim:
        x = torch.cat(x.chunk(axis.size, dim))
    return _start(MessageKind.REDUCE_SCATTER, x, axis, _ops.reduce_scatter_tensor, "sum", axis.size)


def start_all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Start an all-gather of `x` over the axis. Pass the returned tensor to `wait_and_join` to get the result."""
    if axis.size == 1:
        return x
    return _start(MessageKind.ALL_GATHER, x, axis, _ops.all_gather_into_tensor, axis.size)


def start_all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Start an all-to-all: split `x` along dimension 0 into one part per rank, and send part r to rank r of the axis.
    The returned tensor joins the parts that this rank receives, along dimension 0 and in the order of the ranks. It is
    valid after `wait`.

    Raises `LayoutError` if the size of dimension 0 is not a multiple of the number of ranks on the axis.
    """
    if axis.size == 1:
        return x
    require_divisible(x, axis, 0)
    rows = [x.shape[0] // axis.size] * axis.size
    return _start(MessageKind.ALL_TO_ALL, x, axis, _ops.all_to_all_single, rows, rows)


def start_uneven_all_to_all(x: Tensor, axis: Axis, *, to: list[int], received: list[int]) -> Tensor:
    """Start an all-to-all in which each rank may get another number of rows: `to` lists the rows of `x` for each rank
    of the axis, and `received` the rows that come from each rank. The returned tensor joins the received rows, in the
    order of the ranks. It is valid after `wait`.
    """
    if axis.size == 1:
        return x
    return _start(MessageKind.ALL_TO_ALL, x, axis, _ops.all_to_all_single, received, to)


def all_to_all_in_group(x: Tensor, group_name: str, *, to: list[int], received: list[int]) -> Tensor:
    """Do what `start_uneven_all_to_all` and `wait` do, inside an operator of compiled code. Nothing is recorded."""
    exchanged: Tensor = _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), received, to, group_name))
    return exchanged


def start_shift(x: Tensor, axis: Axis) -> Tensor:
    """Start sending `x` to the next rank of the axis; the last rank sends to the first one. The returned tensor comes
    from the previous rank, and is valid after `wait`.
    """
    if axis.size == 1:
        return x
    to, from_ = [0] * axis.size, [0] * axis.size
    to[(axis.rank + 1) % axis.size] = from_[(axis.rank - 1) % axis.size] = x.shape[0]
    return _start(MessageKind.SHIFT, x, axis, _ops.all_to_all_single, from_, to)


def wait_and_join(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Wait for `x`, a result of `start_all_gather`, and return the tensors of all ranks, concatenated along dimension
    `dim` in the order of the ranks.
    """
    if axis.size == 1:
        return x
    joined = wait(x, axis)
    if dim == 0:
        return joined
    if joined.shape[:dim].numel() == axis.size:  # a reshape joins the parts without a copy
        return joined.reshape(*[1] * dim, axis.size * joined.shape[dim], *joined.shape[dim + 1 :])
    return torch.cat(joined.chunk(axis.size), dim)


def wait(x: Tensor, axis: Axis) -> Tensor:
    """Wait until `x` is valid, and return `x`. `x` is a result of any `start_...` function except `start_all_gather`,
    which needs `wait_and_join`.
    """
    if axis.size == 1:
        return x
    if torch.compiler.is_compiling() or not RECORD.is_open:
        waited: Tensor = _ops.wait_tensor(x)
        return waited
    number = RECORD.wait(id(x))
    waited = _ops.wait_tensor(x)
    RECORD.waited(number)
    return waited


def _start(kind: MessageKind, x: Tensor, axis: Axis, operator: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Call `operator` with `x`, `arguments` and the group of the axis, and record that this rank starts a message. A
    later `wait` for the result finds the message by the identity of the result. In compiled code, nothing is recorded,
    because compiled code runs no Python code.
    """
    if torch.compiler.is_compiling() or not RECORD.is_open:
        return operator(x.contiguous(), *arguments, axis.group_name)
    group = RECORD.group(axis.group_name, axis.name, ranks_of)
    number = RECORD.start(kind, group, x.numel())
    result = operator(x.contiguous(), *arguments, axis.group_name)
    RECORD.started(number, id(result))
    return result


def ranks_of(group_name: str) -> list[int]:
    """Return the global ranks of the processes in a process group."""
    return dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(group_name))  # type: ignore[arg-type]


def begin_blocking(
    kind: MessageKind, group: dist.ProcessGroup | None, axis: str, elements: int, place: int = -1
) -> int:
    """Record that this rank starts a message and waits for its end. Return the number of the message for
    `RECORD.waited`, or 0 if no record is open.

    `place` names the part of the model that the message belongs to (`flight.places`). By default, this is the part that
    the rank is running.
    """
    if not RECORD.is_open or group is None:
        return 0
    in_record = RECORD.group(group.group_name, axis, ranks_of)
    number = RECORD.start(kind, in_record, elements, place)
    RECORD.started(number, number)
    return RECORD.wait(number)


@contextmanager
def recorded_message(kind: MessageKind, group: dist.ProcessGroup | None, axis: str, elements: int) -> Iterator[None]:
    """Context in which the caller sends a message and waits for its end. The context only records the message and the
    wait.
    """
    number = begin_blocking(kind, group, axis, elements)
    yield
    if number:
        RECORD.waited(number)


def all_reduce(x: Tensor, axis: Axis, operation: str = "sum") -> Tensor:
    """Return the sum of `x` over the axis, or the maximum if `operation` is "max". Every rank gets the same result."""
    return wait(start_all_reduce(x, axis, operation), axis)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum `x` over the axis and keep this rank's part of dimension `dim`.

    Raises `LayoutError` if the size of the dimension is not a multiple of the number of ranks on the axis.
    """
    return wait(start_reduce_scatter(x, axis, dim), axis)


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Gather `x` from all ranks, and concatenate the tensors along dimension `dim` in the order of the ranks."""
    return wait_and_join(start_all_gather(x, axis), axis, dim)


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Split `x` along dimension 0 into one part per rank, and send part r to rank r of the axis. Return the parts that
    this rank receives, joined along dimension 0 in the order of the ranks.

    Raises `LayoutError` if the size of dimension 0 is not a multiple of the number of ranks on the axis.
    """
    return wait(start_all_to_all(x, axis), axis)


def split(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's part of `x` along dimension `dim`. Sends nothing. `split` undoes `all_gather`.

    Raises `LayoutError` if the size of the dimension is not a multiple of the number of ranks on the axis.
    """
    if axis.size == 1:
        return x
    require_divisible(x, axis, dim)
    return x.chunk(axis.size, dim)[axis.rank].clone(memory_format=torch.contiguous_format)


def require_divisible(x: Tensor, axis: Axis, dim: int) -> None:
    """Raise `LayoutError` on all ranks if dimension `dim` cannot be split evenly. With uneven parts, ranks could wait
    for each other forever.
    """
    if x.shape[dim] % axis.size:
        raise LayoutError(
            f"To split a tensor over the {axis.name} axis, the size of dimension {dim} must be a multiple of the "
            f"number of ranks ({axis.size}), but is {x.shape[dim]}. Pad the dimension, or choose a layout that divides "
            "it."
        )


def all_gather_objects(value: _T, axis: Axis) -> list[_T]:
    """Gather the small Python value `value` from every rank of the axis, and return the values in the order of the
    ranks. Every rank of the axis must call this function. The values are pickled, so do not pass large tensors.
    """
    if axis.size == 1:
        return [value]
    gathered = [value] * axis.size
    group = axis.device_mesh.get_group()
    with recorded_message(MessageKind.OBJECTS, group, axis.name, 0):
        dist.all_gather_object(gathered, value, group=group)
    return gathered


def from_all_ranks(value: _T, mesh: ParallelMesh) -> list[_T]:
    """Gather the small Python value `value` from every rank of the mesh, and return the values in the order of the
    ranks. Every rank must call this function. The values are pickled, so do not pass large tensors.
    """
    values = [value]
    for axis in reversed(mesh.axes):
        values = list(chain.from_iterable(all_gather_objects(values, axis)))
    return values


def gather_from_all(value: _T) -> list[_T]:
    """Gather the small Python value `value` from every rank, and return the values in the order of the ranks. Unlike
    `from_all_ranks`, this function needs no mesh. Every rank must call this function. Without a process group, the
    caller is the only rank. The values are pickled.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    gathered = [value] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def own_rank() -> int:
    """Return the number of this rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def background_group() -> dist.ProcessGroup:
    """Create a process group of all ranks for the messages of a background thread. Every rank must call this function.

    The group uses gloo on the CPU. Its timeout is one day, because the other ranks may wait while one rank writes to a
    slow disk.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    return group


def share_from_first(value: object, *, is_late: bool = True) -> Any:
    """Return the first rank's `value`, a small Python value, on every rank. The other ranks wait for the first rank,
    for up to a day, or, if the first rank is not late, for as long as for any message, which saves a process group.
    Every rank must call this function; only the first rank's argument matters. The value is pickled, and unpickling a
    value from an untrusted source can run code. A program that answers requests, such as the server, therefore uses
    `share_json_from_first`.
    """
    shared = [value]
    if not is_late:
        dist.broadcast_object_list(shared, src=0)
        return shared[0]
    patient = background_group()
    dist.broadcast_object_list(shared, src=0, group=patient, device=torch.device("cpu"))
    dist.destroy_process_group(patient)
    return shared[0]


def share_json_from_first(value: object) -> Any:
    """Return the first rank's JSON value on every rank, like `share_from_first`, but without pickle. A message
    therefore cannot run code on the rank that receives it.
    """
    line = FirstRankLine[object](lambda shared: json.dumps(shared).encode(), json.loads)
    shared = line.share(value)
    line.close()
    return shared


class FirstRankLine(Generic[_T]):
    """Connection for repeated broadcasts of small values from the first rank to all other ranks. `encode` converts a
    value to bytes (at least one), and `decode` converts the bytes back to the value.

    The messages use the CPU and a separate process group, so they do not interfere with other messages. The other ranks
    wait up to a day for the next value, so the first rank must call `share` at least once a day, with None if there is
    no new value. None costs one message of eight bytes; any other value costs two messages. Every rank must create the
    object, and must call `share` and `close`.
    """

    def __init__(self, encode: Callable[[_T], bytes], decode: Callable[[bytes], _T]) -> None:
        self._encode, self._decode = encode, decode
        self._group = background_group() if dist.get_world_size() > 1 else None

    def share(self, value: _T | None) -> _T | None:
        """Return the first rank's `value` on every rank. The arguments of the other ranks are ignored."""
        if self._group is None:
            return value
        content = b"" if value is None or dist.get_rank() else self._encode(value)
        length = torch.tensor([len(content)])
        dist.broadcast(length, src=0, group=self._group)
        if not length:
            return None
        message = torch.frombuffer(bytearray(content or int(length)), dtype=torch.uint8)
        dist.broadcast(message, src=0, group=self._group)
        return value if content else self._decode(message.numpy().tobytes())

    def close(self) -> None:
        """Destroy the process group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)


def meet(seconds: float) -> None:
    """Wait until every rank calls this function. Raises `RuntimeError` after `seconds`, or if a rank has ended. The
    ranks must be on the CPU.
    """
    dist.monitored_barrier(timeout=timedelta(seconds=seconds))


def gather_to_first(value: _T) -> list[_T] | None:
    """Gather `value` from every rank. On the first rank, return the values in the order of the ranks. On the other
    ranks, return None. Every rank must call this function. The values are pickled, so use this function for inspection,
    not for training.
    """
    gathered = [value] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, gathered, dst=0)
    return gathered
