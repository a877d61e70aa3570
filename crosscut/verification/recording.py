"""Recording of one training step on one rank: outputs, returned gradients and parameter gradients of every module.

The uncut model and every rank of the cut model are recorded in the same way and compared afterwards. Tensors are copied
to host memory during the step. Every micro-batch is recorded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from crosscut.parallel.state.parameters import (
    cuts_of_model,
    gathered_over_data,
    is_distributed,
    is_expert,
    whole,
)
from crosscut.verification.assembly import Place

LOSS = "loss"
"""Name that the report's table gives to the computation after the model's last output."""

INSIDE = " / "
"""Separator in the names of tensors that a module's own code makes or uses, as opposed to the code of its submodules.
The text before the separator names the module and, if the module is called several times, the number of the call.
"""

RECEIVED = f"{INSIDE}gradient of its output"
"""End of the names of gradients that arrive at the output of a part of the whole model, such as a layer. In a pipeline,
another stage may have sent the gradient.
"""

ARRIVED = f"{INSIDE}its input"
"""End of the names of inputs of the whole model's parts, such as layers. In a pipeline, another stage may have sent the
input.
"""

IN_MICRO_BATCH = " in micro-batch "
"""Start of the last part of the names of tensors of all micro-batches except the first. The micro-batches are counted
from 1.
"""


def call_of(name: str) -> str:
    """Return the name of the module call that a recorded tensor belongs to, given the tensor's name. The calls of a
    module in different micro-batches have the same name.
    """
    return in_any_micro_batch(name).partition(INSIDE)[0].partition("[")[0]


def module_of(call: str) -> str:
    """Return the module of a call, given the name of the call."""
    return call.partition(", call ")[0]


def in_any_micro_batch(name: str) -> str:
    """Return the name that a recorded tensor would have in the first micro-batch."""
    return name.partition(IN_MICRO_BATCH)[0]


def micro_batch_of(name: str) -> int:
    """Return the number of the micro-batch, from 1, to which a recorded tensor belongs, given the tensor's name."""
    return int(name.partition(IN_MICRO_BATCH)[2] or 1)


class ParameterShard(NamedTuple):
    """This rank's shard of a parameter, or of a parameter's gradient."""

    tensor: Tensor
    cuts: Mapping[str, int]
    """Dimension that each axis shards, keyed by the axis's name. Axes along which ranks hold copies are left out."""
    is_expert: bool
    """Whether the ranks of the shards are arranged over the axes of experts (`ParallelMesh.experts`)."""
    place: Place | None = None
    """Place of the shard in the whole tensor. None if `cuts` says which shard it is."""

    @classmethod
    def of(cls, _name: str, tensor: Tensor) -> "ParameterShard":
        """Gather a tensor over the data ranks, and copy this tensor rank's part to the host. The tensor must be a
        parameter of Crosscut's layers, or its gradient. Every rank must call this function.
        """
        return cls(gathered_over_data(tensor).cpu(), cuts_of_model(tensor), is_expert(tensor))

    @classmethod
    def of_any(cls, tensor: Tensor, place: Place = ()) -> "ParameterShard":
        """Copy a parameter of any layer, or its gradient, to the host. A distributed tensor is gathered, so every rank
        must call this function. `place` is the place of an ordinary tensor.
        """
        if is_distributed(tensor):
            return cls(whole(tensor.detach()).cpu().clone(), {}, is_expert=False, place=())
        return cls(tensor.detach().cpu().clone(), {}, is_expert=False, place=place)


ShardOf = Callable[[str, Tensor], ParameterShard]
"""Function that copies this rank's shard of a parameter or of its gradient, given the parameter's name. Every rank must
call the function.
"""


Columns = Sequence[Sequence[int]]
"""Indices of columns, by tensor rank."""

Recorded = Tensor | ParameterShard
"""Tensor of a recording: an activation, a gradient of one, or this rank's shard of a parameter."""


def tensor_of(recorded: Recorded) -> Tensor:
    """Return the tensor itself, without the dimension in which it is sharded."""
    return recorded.tensor if isinstance(recorded, ParameterShard) else recorded


class TensorKind(StrEnum):
    """Kinds of recorded tensors, in the order in which they are compared."""

    OUTPUT = "output"
    RETURNED = "returned"
    GRADIENT = "gradient"
    CLIPPED = "clipped"
    PARAMETER = "parameter"
    AVERAGE = "average"
    STATISTIC = "running statistic"

    @property
    def of(self) -> str:
        """Words before the name of a tensor of this kind."""
        return "gradient returned by" if self is TensorKind.RETURNED else f"{self} of"


class StepFailure(NamedTuple):
    """Error that ended the forward or the backward pass."""

    module: str
    """Innermost module whose forward pass had begun but not ended, or `LOSS` if there is no such module."""
    error: str
    """Type and message of the error."""


@dataclass
class Recording:
    """Recording of one step on one rank. Names come from `named_modules`. If a micro-batch calls a module again, the
    call's name has a number, such as `dropout, call 2`. The names of the first micro-batch's tensors do not mention the
    micro-batch; the names of the others end with `IN_MICRO_BATCH` and a number.
    """

    root: str = ""
    """Name of the whole model."""
    loss: float = 0.0
    """Loss over all data ranks."""
    norm: float = 0.0
    """Global gradient norm before clipping."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Outputs of each module call, in chronological order. If a call returns several tensors, their names are
    `call[0]`, `call[1]` and so on. If a module's own code makes the input of a submodule, this input is also recorded.
    """
    returned: dict[str, Tensor] = field(default_factory=dict)
    """Gradients that the backward pass returns: the gradient of each call's first input and, as `model[name]`, of the
    whole model's other inputs that are given by name, the gradient of each output that the calling module's own code
    uses, and the gradients that arrive at the outputs of the whole model's parts (`RECEIVED`). The entries are in the
    order of the backward pass, innermost modules first.
    """
    gradients: dict[str, ParameterShard] = field(default_factory=dict)
    """Gradient of each parameter, after the reduction over all axes."""
    clipped: dict[str, ParameterShard] = field(default_factory=dict)
    """Gradients that the optimizer received."""
    parameters: dict[str, ParameterShard] = field(default_factory=dict)
    """Parameters after the optimizer's step."""
    firsts: dict[str, str] = field(default_factory=dict)
    """For calls with several outputs, maps the name of the first output to the name that it would have as the only
    output.
    """
    averages: dict[str, ParameterShard] = field(default_factory=dict)
    """Moving averages of the parameters after the step, keyed by the parameter's name; empty if the step keeps no
    averages.
    """
    statistics: dict[str, ParameterShard] = field(default_factory=dict)
    """Running statistics of norms after the step, keyed by the buffer's name."""
    places: dict[tuple[TensorKind, str], Sequence[Place]] = field(default_factory=dict)
    """Places of all ranks' parts in the uncut tensor, keyed by the kind and the name of the tensor. Only tensors with a
    method `uncut_places`, and their gradients, have an entry.
    """
    is_copied: bool = False
    """Whether every rank holds the whole of each activation that has no entry in `places`, and of its gradient."""
    origins: dict[str, str] = field(default_factory=dict)
    """Names of the places that made the first inputs of calls, keyed by the call. The gradient that a call returns is
    that of the tensor, which may also have other uses.
    """
    columns: dict[tuple[TensorKind, str], Columns] = field(default_factory=dict)
    """Columns of the uncut tensor (indices of its last dimension) that each tensor rank holds, keyed by the kind and
    the name of the tensor. Only outputs of modules with a method `uncut_columns`, and their gradients, have an entry.
    """
    failure: StepFailure | None = None
    """Error that ended the step on a rank; None if there was no error. After an error, only `outputs` are recorded."""

    def tensors(self, kind: TensorKind) -> Mapping[str, Recorded]:
        """Return the tensors of a kind, keyed by their names."""
        kinds: dict[TensorKind, Mapping[str, Recorded]] = {
            TensorKind.OUTPUT: self.outputs,
            TensorKind.RETURNED: self.returned,
            TensorKind.GRADIENT: self.gradients,
            TensorKind.CLIPPED: self.clipped,
            TensorKind.PARAMETER: self.parameters,
            TensorKind.AVERAGE: self.averages,
            TensorKind.STATISTIC: self.statistics,
        }
        return kinds[kind]

    def with_wholes(self, modules: Sequence[str]) -> "Recording":
        """Return a copy without the tensors from inside `modules`. The inputs and outputs of these modules are kept."""
        insides = tuple(f"{name}{sign}" for name in modules for sign in (".", INSIDE))
        outputs, returned = (
            {name: tensor for name, tensor in seen.items() if not name.startswith(insides)}
            for seen in (self.outputs, self.returned)
        )
        return replace(self, outputs=outputs, returned=returned)

    def of_stages(self, *, has_loss: bool = True) -> "Recording":
        """Return a copy in a form in which pipeline stages and the uncut model can be compared. Tensors that the
        top-level module itself computes are left out. If a call has several outputs, the first is named after the call
        alone. On a stage without the loss (`has_loss` is false), the gradients that the next stage sent are also left
        out.
        """
        outputs, returned = (
            {self.firsts.get(name, name): tensor for name, tensor in seen.items() if not self._is_of_root(name)}
            for seen in (self.outputs, self.returned)
        )
        if not has_loss:
            returned = {name: tensor for name, tensor in returned.items() if in_any_micro_batch(name) != LOSS}
        return replace(self, outputs=outputs, returned=returned)

    def calls(self) -> list[tuple[str, int]]:
        """Return the calls that returned tensors, in the order in which they ended: each call's name, and the number of
        its micro-batch.
        """
        names = (name for name in self.outputs if INSIDE not in name)
        return list(dict.fromkeys((call_of(name), micro_batch_of(name)) for name in names))

    def _is_of_root(self, name: str) -> bool:
        return module_of(call_of(name)) == self.root
