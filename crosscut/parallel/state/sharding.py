"""Sharding of one model copy over data ranks: PyTorch's `fully_shard` on top of the tensor axis.

Between uses, every parameter, its gradient and its optimizer state are cut over the shard group, along the rows of the
tensor rank's part. A *unit* is one layer of the model. A unit's parameters are gathered before it runs, in the element
type of the products. In every backward pass, one reduce-scatter sums the unit's gradients over the group. A rank
therefore never holds whole gradients of more than one unit and the root. With several copies (`layout.shard_group`),
the shards' gradients are then summed over the copies, once per step.

Parameters outside all units, such as tied embeddings and the last norm, form one more unit, the root. The root stays
gathered from the forward pass to the end of the backward pass, in float32, because a token that occurs often adds up
many gradients.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from crosscut.config import LayoutError
from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.state.gradients import GradientReducer, require_distributed
from crosscut.parallel.state.parameters import initial_value_of, local_part

_SUMS_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether PyTorch (2.12 or later) also sums gradients of parameters that the backward pass reaches on some ranks
only.
"""


def shard_model(
    model: nn.Module,
    mesh: ParallelMesh,
    *,
    units: Iterable[nn.Module],
    compute_dtype: torch.dtype | None = None,
    always_used: bool = False,
) -> None:
    """Shard a model over the mesh's shard groups, in place. Does nothing if the layout does not shard.

    `units` are submodules that are gathered as a whole, in the order in which they run. `compute_dtype` is the element
    type in which their parameters are gathered (default: their own); gradients are summed in the parameters' type.
    `always_used` promises that every backward pass reaches every parameter on every rank; PyTorch before 2.12 needs
    this.

    On such a mesh, layers create their parameters on `meta`, so no rank ever holds the whole model. Afterwards the
    parameters have memory and default values (ones for norms, zeros otherwise). Set their initial values (`normal_`)
    and create the reducer and the optimizer after this call, because the parameters are new objects. Outside a unit's
    forward pass, `named_parameters` returns the shards; for the root, only after a backward pass or `reshard`.

    Every rank must call this. Raises `LayoutError` for a parameter that is not a `DTensor` on the tensor axis, a scalar
    parameter, a buffer on `meta`, and, with PyTorch before 2.12, if parameters are not `always_used`.
    """
    if mesh.sharding is None:
        return
    parameters = dict(model.named_parameters())
    _require_shareable(parameters, dict(model.named_buffers()))
    _require_sums(always_used)
    values = {name: initial_value_of(parameter) for name, parameter in parameters.items() if parameter.is_meta}
    reduce_dtype = next(iter(parameters.values())).dtype
    for unit in (*units, model):
        dtype = None if unit is model else compute_dtype
        fully_shard(
            unit,
            mesh=mesh.sharding.device_mesh,
            reshard_after_forward=unit is not model and not mesh.sharding.keeps_weights,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False),
        )
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)  # gradients are sums, not averages
        unit.set_force_sum_reduction_for_comms(True)  # a plain sum, which every backend supports
        if _SUMS_UNUSED:
            unit.set_reduce_scatter_unused_params(True, recurse=False)
    model._apply(lambda tensor: torch.empty_like(tensor, device=mesh.device) if tensor.is_meta else tensor)
    for name, parameter in model.named_parameters():
        if name in values:
            local_part(parameter.detach()).fill_(values[name])


def _require_sums(always_used: bool) -> None:
    if not (always_used or _SUMS_UNUSED):
        raise LayoutError(
            "A sharded model must be `always_used` with PyTorch before 2.12, which sums gradients wrongly if a "
            f"parameter is unused on some ranks, but `always_used` is false and this is PyTorch {torch.__version__}. "
            "Install PyTorch 2.12, or pass always_used=True if every backward pass reaches every parameter."
        )


def _require_shareable(parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
    require_distributed(parameters.values())
    for name, buffer in buffers.items():
        if buffer.is_meta:
            raise LayoutError(
                f"`{name}` must have its values before the model is sharded, but is a buffer on `meta`. Create it on "
                "the mesh's `device`."
            )
    for name, parameter in parameters.items():
        if not parameter.dim():
            raise LayoutError(
                f"`{name}` must have a dimension along which data ranks can shard it, but is a scalar. Give it the "
                "shape (1,)."
            )


def reshard(model: nn.Module) -> None:
    """Release the parameters that a forward pass without gradients has gathered, so that each rank holds only its
    shards again.

    A backward pass does this by itself.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Reducer(Protocol):
    """Sums the gradients of a step over all ranks that contribute to them.

    With gradient accumulation, call `arm` before the last backward pass of a step, and `finish` after it.
    """

    def arm(self) -> None:
        """Make the next backward pass finish the summation of gradients over the ranks."""

    def finish(self) -> None:
        """Wait for all messages and leave the summed gradients in `.grad`."""


class ShardedReducer:
    """`Reducer` of a model that `shard_model` has sharded.

    Each backward pass leaves sums over the shard group, one shard per rank. The armed backward pass also sums over
    copies. Under ZeRO-2, gathered weights stay in memory until then. Parameters that need no gradient are ignored. A
    parameter that no backward pass reaches gets a gradient of zeros. A parameter that only some data ranks use gets
    their sum; PyTorch before 2.12 (without `FSDPModule.set_reduce_scatter_unused_params`) requires all ranks to use the
    same parameters.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh) -> None:
        if not isinstance(model, FSDPModule):
            raise LayoutError(
                "A model must be sharded before it is trained on a mesh that shards, but this model is not. Call "
                "`shard_model` after building the model and before setting its weights."
            )
        assert mesh.sharding is not None
        self.model: FSDPModule = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.keeps_weights = mesh.sharding.keeps_weights
        self._set_last(False)

    def arm(self) -> None:
        """Make the next backward pass finish the summation of gradients over the ranks."""
        self._set_last(True)

    def finish(self) -> None:
        """Leave the summed gradients in `.grad`. The backward pass has already waited for the messages."""
        self._set_last(False)
        for parameter in self.parameters:
            if parameter.grad is None:  # zeros on every layout: an optimizer skips parameters without a gradient
                parameter.grad = torch.zeros_like(parameter)

    def _set_last(self, is_last: bool) -> None:
        self.model.set_requires_all_reduce(is_last)
        if self.keeps_weights:
            self.model.set_reshard_after_backward(is_last)


def make_reducer(model: nn.Module, mesh: ParallelMesh) -> Reducer:
    """Make the reducer that sums the gradients of a model on this mesh.

    Raises `LayoutError` as `GradientReducer` does, or if the mesh shards but the model is not sharded.
    """
    return GradientReducer(model.parameters(), mesh) if mesh.sharding is None else ShardedReducer(model, mesh)
