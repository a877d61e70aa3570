"""Recording of the messages that `fully_shard` sends: all-gathers of parameters, and sums of gradients.

PyTorch sends these messages itself. This module wraps the objects that send them, so that the record of this process
(`flight.record`) lists each message, its axis, and the layer whose parameters or gradients the message carries. The
wrapped objects get the same arguments as without the wrapper, so the results are bit-identical. A *unit* is a module
that `fully_shard` gathers as a whole, such as a layer.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from crosscut.flight import RECORD, MessageKind
from crosscut.parallel.collectives import begin_blocking
from crosscut.parallel.mesh import Sharding

if TYPE_CHECKING:  # an internal module of PyTorch, which another version may lack
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def record_messages(group: "FSDPParamGroup", sharding: Sharding, place: int) -> None:
    """Make the record of this process list the messages of `group`, a group of parameters of a unit. PyTorch keeps the
    objects that send the messages in the group, since a unit with experts has two groups. `sharding` has the axes of
    the messages, and `place` is the unit's place in the model (`flight.places`).

    If a version of PyTorch keeps these objects elsewhere, its messages are not recorded.
    """
    gather, scatter = (getattr(group, f"_{name}_comm", None) for name in ("all_gather", "reduce_scatter"))
    if gather is None or scatter is None:
        return
    over_copies = None
    if sharding.replica is not None:
        over_copies = _SumOverCopies(group, sharding.replica.name, place)
        group._all_reduce_hook = over_copies.end
    axis = sharding.shard.name
    group._all_gather_comm = _Recorded(gather, MessageKind.ALL_GATHER, axis, place)  # type: ignore[assignment]
    group._reduce_scatter_comm = _Recorded(scatter, MessageKind.REDUCE_SCATTER, axis, place, over_copies)  # type: ignore[assignment]


class _SumOverCopies:
    """Recorder of the all-reduce that sums the gradients of a unit over the copies of the model.

    PyTorch starts this all-reduce right after the unit's reduce-scatter, and calls `end` after the all-reduce.
    """

    def __init__(self, group: "FSDPParamGroup", axis: str, place: int) -> None:
        self._group, self._axis, self._place = group, axis, place
        self._number = 0

    def begin(self, shard: Tensor) -> None:
        """Record the start of the all-reduce of `shard`. Do nothing if this backward pass does not sum over the
        copies.
        """
        if self._group.all_reduce_grads:
            sums = self._group._all_reduce_process_group
            self._number = begin_blocking(MessageKind.ALL_REDUCE, sums, self._axis, shard.numel(), self._place)

    def end(self, _: Tensor) -> None:
        """Record the end of the all-reduce."""
        if self._number:
            RECORD.waited(self._number)


class _Recorded:
    """Wrapper of the object that sends the all-gathers, or the reduce-scatters, of a unit. It also records each
    message.

    Forward and backward: the wrapped object `send` sends the same messages as without the wrapper. After each message,
    `then.begin` is called with the result, if `then` is given.
    """

    def __init__(self, send: Any, kind: MessageKind, axis: str, place: int, then: _SumOverCopies | None = None) -> None:
        self._send, self._kind, self._axis, self._place, self._then = send, kind, axis, place, then

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for a message."""
        memory: Tensor = self._send.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, **options: object) -> object:
        """Send a message, and record it."""
        number = begin_blocking(self._kind, group, self._axis, input_tensor.numel(), self._place)
        work = self._send(output_tensor=output_tensor, input_tensor=input_tensor, group=group, **options)
        if number:
            RECORD.waited(number)
        if self._then is not None:
            self._then.begin(output_tensor)
        return work
