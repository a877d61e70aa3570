"""Recorder of the collectives that a running program sends, in the order in which they are sent.

The planner (`planner.messages`) computes the same list from formulas, and the tests compare the two lists.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from crosscut.config.axes import is_folded
from crosscut.parallel.mesh import Axis, ParallelMesh
from crosscut.parallel.owners.traced_experts import SENDING


class Sent(NamedTuple):
    """One recorded collective."""

    operation: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `shift` or `send`. A shift sends a
    tensor to the next rank of the axis. A send passes a tensor to one other rank: the next or the previous stage of a
    pipeline, or a rank that needs a halo of an image.
    """
    axis: str
    """Name of the axis, such as `tensor`, `data` or `pipeline`. If the data axis is split in two, the name may also be
    `replica` or `shard`.
    """
    elements: int
    """Number of elements of one rank's largest tensor: the output of an all-gather, or the input of any other
    operation.
    """


_OPERATIONS = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_gather_into_tensor_out": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_out": "reduce_scatter",
}

_EXCHANGE = "_c10d_functional::all_to_all_single"
"""Operator that sends different elements to each rank of the group. If all elements of a rank go to one other rank, the
recorder lists the operator as a shift.
"""

_DIRECT_OPERATIONS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
}
"""Operators that `fully_shard` calls. They differ from `_OPERATIONS` in their arguments: the group is an object, and
the output precedes the input.
"""

_OTHER_OPERATIONS = {
    "c10d::allgather_": "all_gather",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
}
"""Operators that other code may call. They have the same arguments as `_DIRECT_OPERATIONS`, but may have lists of
tensors. They are recorded only if they send floating-point numbers, because they also send Python's objects, as bytes.
"""

_SEND = "c10d::send"
"""Operator that sends a tensor to one rank."""

_FUSED = {
    "symm_mem::fused_all_gather_matmul": ("all_gather", 3),
    "symm_mem::fused_matmul_reduce_scatter": ("reduce_scatter", 4),
}
"""Operators that multiply matrices and send the messages of a collective in pieces. Each operator is mapped to the
collective that sends the same elements in one message, and to the position of the group among the operator's arguments.
"""


def comes_again(types: Sequence[type]) -> bool:
    """Whether PyTorch will pass an operator with arguments of these types to the dispatch mode again. If an argument is
    a distributed tensor, PyTorch splits the operator into operators on the local tensors, and passes these to the
    dispatch mode.
    """
    return any(issubclass(kind, DTensor) for kind in types)


class CollectiveRecorder(TorchDispatchMode):
    """Context that records, in the list `sent`, all collectives that send tensors, including those of the backward
    pass. A message between pipeline stages is recorded only on the rank that sends the message.

    The recorder finds the axis of a collective by its process group. If the group belongs to no axis of the mesh, the
    name of the group is recorded instead of the name of an axis. `grid` lists the axes of a grid of ranks that share
    images (`spatial.ImageGrid`): an exchange along such an axis is recorded as one send to each rank that gets
    elements. `more` lists further axes, such as those of a teacher.
    """

    supports_higher_order_operators = True
    """Whether PyTorch may call this dispatch mode for higher-order operators. True, because compiled code uses such
    operators to keep random states. The recorder does not record these operators.
    """

    def __init__(self, mesh: ParallelMesh, *, grid: Iterable[Axis] = (), more: Iterable[Axis] = ()) -> None:
        super().__init__()
        self.sent: list[Sent] = []
        self.element_bytes: list[int] = []
        """Number of bytes per element of each collective, in the order of `sent`."""
        axes = (*mesh.groups, *more)
        self._sizes = {axis.group_name: axis.size for axis in axes}
        self._axis_of = {axis.group_name: axis.name for axis in axes}
        self._of_grid = {axis.group_name: axis.name for axis in grid}
        self._axis_of |= self._of_grid
        if mesh.channels is not None:
            self._axis_of |= dict.fromkeys(mesh.channels.group_names, "pipeline")

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return true, so that compiled code stays compiled. Collectives of compiled code are recorded nevertheless."""
        return True

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Record the operator if it is a collective, then run it."""
        if comes_again(types):
            return NotImplemented
        name = getattr(func, "name", lambda: "")().split(".")[0]
        if name in _FUSED:
            operation, position = _FUSED[name]
            (x, y), group = args[:2], args[position]
            gathers = operation == "all_gather"
            elements = x.numel() * self._sizes[group] if gathers else x.shape[:-1].numel() * y.shape[1]
            self._note(operation, group, elements, x)
        elif name in _OPERATIONS:
            operation = _OPERATIONS[name]
            elements = args[0].numel() * (args[1] if operation == "all_gather" else 1)  # args[1]: ranks of the group
            self._note(operation, args[-1], elements, args[0])
        elif name == _EXCHANGE and args[-1] in self._of_grid:
            for elements in filter(None, args[2]):  # args[2]: elements for each rank of the group
                self._note("send", args[-1], elements, args[0])
        elif name == _EXCHANGE:
            # args[1] and args[2]: rows from and for each rank of the group
            is_even = not is_folded(self._axis_of.get(args[-1], ""))  # experts may have rows of one rank only
            is_shift = is_even and all(sum(rows > 0 for rows in split) == 1 for split in args[1:3])
            self._note("shift" if is_shift else "all_to_all", args[-1], args[0].numel(), args[0])
        elif name in SENDING:
            self._note("all_to_all", args[-1], args[0].numel(), args[0])
        elif name in _DIRECT_OPERATIONS:
            self._note_direct(_DIRECT_OPERATIONS[name], args)
        elif name in _OTHER_OPERATIONS and any(map(torch.is_floating_point, _pytree.tree_leaves(args[:1]))):
            self._note_direct(_OTHER_OPERATIONS[name], args)
        elif name == _SEND:
            (sent,), group = args[:2]
            self._note("send", ProcessGroup.unbox(group).group_name, sent.numel(), sent)
        return func(*args, **(kwargs or {}))

    def _note_direct(self, operation: str, args: Sequence[Any]) -> None:
        if operation in ("all_reduce", "broadcast"):
            largest, group = args[:2]
            sent = largest[0]
        else:
            output, sent, group = args[:3]
            largest = output if operation == "all_gather" else sent
        elements = sum(tensor.numel() for tensor in _pytree.tree_leaves(largest))
        self._note(operation, ProcessGroup.unbox(group).group_name, elements, _pytree.tree_leaves(sent)[0])

    def _note(self, operation: str, group: str, elements: int, sent: Tensor) -> None:
        self.sent.append(Sent(operation, self._axis_of.get(group, group), elements))
        self.element_bytes.append(sent.element_size())
