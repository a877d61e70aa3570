"""Counts what is really sent: the collectives of everything that runs inside, in their order.

The same account as the planner's (`planner.messages.traffic`), taken from the program instead of from formulas.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from crosscut.parallel.mesh import ParallelMesh


class Sent(NamedTuple):
    """One collective."""

    operation: str
    """`all_reduce`, `all_gather` or `reduce_scatter`."""
    axis: str
    """`tensor` or `data`; `replica` or `shard` where the data axis is these two."""
    elements: int
    """Elements of the whole tensor on one rank: the reduced one, the gathered output, the input to be scattered."""


_OPERATIONS = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_gather_into_tensor_out": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_out": "reduce_scatter",
}


_DIRECT_OPERATIONS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
}
"""Operators that `fully_shard` calls: the group comes as an object, the output before the input."""

_FUSED = {
    "symm_mem::fused_all_gather_matmul": ("all_gather", 3),
    "symm_mem::fused_matmul_reduce_scatter": ("reduce_scatter", 4),
}
"""Matrix products that send in pieces, by operator: the collective that sends the same at once, and the position of the
group among the arguments."""


def comes_again(types: Sequence[type]) -> bool:
    """Whether an operator is on distributed tensors, which turn it into operators on local ones that are seen later."""
    return any(issubclass(kind, DTensor) for kind in types)


class CollectiveRecorder(TorchDispatchMode):
    """A context that records every collective of Crosscut inside it, the backward pass included, in `sent`.

    Mesh axes are told apart by their groups.
    """

    supports_higher_order_operators = True
    """Such as those that compiled code keeps random states with; they pass."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.sent: list[Sent] = []
        self.element_bytes: list[int] = []
        """Bytes per element of each collective in `sent`."""
        self._sizes = {axis.group_name: axis.size for axis in mesh.groups}
        self._axis_of = {axis.group_name: axis.name for axis in mesh.groups}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled inside: the collectives in it pass here like any others."""
        return True

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let the operator run, and note it if it is a collective."""
        if comes_again(types):
            return NotImplemented
        name = getattr(func, "name", lambda: "")().split(".")[0]
        if name in _FUSED:
            operation, position = _FUSED[name]
            group = args[position]
            gathers = operation == "all_gather"
            elements = (
                args[0].numel() * self._sizes[group] if gathers else args[0].shape[:-1].numel() * args[1].shape[1]
            )
            self._note(operation, group, elements, args[0])
        if name in _OPERATIONS:
            operation = _OPERATIONS[name]
            elements = args[0].numel() * (args[1] if operation == "all_gather" else 1)  # args[1]: ranks of the group
            self._note(operation, args[-1], elements, args[0])
        elif name in _DIRECT_OPERATIONS:
            self._note_direct(_DIRECT_OPERATIONS[name], args)
        return func(*args, **(kwargs or {}))

    def _note_direct(self, operation: str, args: tuple[Any, ...]) -> None:
        if operation == "all_reduce":
            tensors, group = args[:2]
            elements, sent = sum(tensor.numel() for tensor in tensors), tensors[0]
        else:
            output, scattered, group = args[:3]
            elements, sent = (output if operation == "all_gather" else scattered).numel(), scattered
        self._note(operation, ProcessGroup.unbox(group).group_name, elements, sent)

    def _note(self, operation: str, group: str, elements: int, sent: Tensor) -> None:
        self.sent.append(Sent(operation, self._axis_of.get(group, group), elements))
        self.element_bytes.append(sent.element_size())
