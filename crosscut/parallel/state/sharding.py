"""Data ranks that share one copy of the model between them: PyTorch's `fully_shard` on top of the tensor axis.

At rest every parameter, its gradient and its optimizer state are cut over the shard group, in rows of the tensor rank's
part. A *unit*, one layer of the model, is gathered before it runs; what is gathered has the type of the products. Its
gradients are summed over the group and scattered in one message, at every backward pass, so that no rank ever holds
more whole gradients than a unit's and the root's. With several copies (`layout.shard_group`) the shares are then summed
over these, once a step.

What belongs to no unit, such as embeddings tied with the output and the last norm, is one more unit, the root. It stays
gathered from the forward pass to the end of the backward pass, and in float32: tokens that are looked up often add up
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
"""Whether gradients are summed also of parameters that a backward pass reaches on some ranks only: from torch 2.12."""


def shard_model(
    model: nn.Module,
    mesh: ParallelMesh,
    *,
    units: Iterable[nn.Module],
    compute_dtype: torch.dtype | None = None,
    always_used: bool = False,
) -> None:
    """Cut a model over the shard groups of the mesh, in place; leaves it alone where the layout shards nothing.

    `units` are submodules that are gathered as wholes, in the order in which they run. `compute_dtype` is the type in
    which their parameters are gathered, by default their own; gradients are summed in the type of the parameters.
    `always_used` says that every backward pass of every rank reaches every parameter: PyTorch before 2.12 can sum no
    others.

    Layers make their parameters on `meta` on such a mesh, so that no rank ever holds the whole. Afterwards they have
    memory and their first values (zeros, ones for norms): give them theirs now (`normal_`), and make reducer and
    optimizer now, since the parameters are new objects. Outside a unit's forward pass `named_parameters` gives the
    shares, but those of the root only after a backward pass or `reshard`. Every rank calls it. Raises `LayoutError`
    for a parameter that is not a `DTensor` on the tensor axis, for one without a dimension, for a buffer on `meta`, and
    with PyTorch before 2.12 unless parameters are `always_used`.
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
        unit.set_gradient_divide_factor(1.0)  # gradients are sums
        unit.set_force_sum_reduction_for_comms(True)  # a plain sum, which every backend has
        if _SUMS_UNUSED:
            unit.set_reduce_scatter_unused_params(True, recurse=False)
    model._apply(lambda tensor: torch.empty_like(tensor, device=mesh.device) if tensor.is_meta else tensor)
    for name, parameter in model.named_parameters():
        if name in values:
            local_part(parameter.detach()).fill_(values[name])


def _require_sums(always_used: bool) -> None:
    if not (always_used or _SUMS_UNUSED):
        raise LayoutError(
            "A sharded model must be `always_used` with PyTorch before 2.12, which sums wrongly what some ranks do not "
            f"use, but this is {torch.__version__} and nothing is said of it. Install a later one, or pass "
            "always_used=True where every backward pass reaches every parameter."
        )


def _require_shareable(parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
    require_distributed(parameters.values())
    for name, buffer in buffers.items():
        if buffer.is_meta:
            raise LayoutError(
                f"`{name}` must have its values before the model is sharded, but is a buffer on `meta`. Make it on the "
                "mesh's `device`."
            )
    for name, parameter in parameters.items():
        if not parameter.dim():
            raise LayoutError(
                f"`{name}` must have a dimension along which data ranks can share it, but is a scalar. Give it the "
                "shape (1,)."
            )


def reshard(model: nn.Module) -> None:
    """Give back what forward passes without gradient have gathered, so that parameters are shares again.

    A forward pass with a backward pass does so by itself.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Reducer(Protocol):
    """Sums the gradients of a step over all ranks that have a part in them.

    With gradient accumulation `arm` comes before the last backward pass of a step, `finish` after it.
    """

    def arm(self) -> None:
        """Let the next backward pass complete the sums."""

    def finish(self) -> None:
        """Wait for what was sent and leave the summed gradients in `.grad`."""


class ShardedReducer:
    """The `Reducer` of a model that `shard_model` has cut.

    Each backward pass leaves sums over the shard group, each rank its share; the armed one also sums over copies. Under
    ZeRO-2 gathered weights stay until then. Parameters that need no gradient are left alone; one that no backward pass
    reaches gets a gradient of zeros, and one that only some data ranks use gets their sum (on a torch that has
    `FSDPModule.set_reduce_scatter_unused_params`; on an older one all must use the same).
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh) -> None:
        if not isinstance(model, FSDPModule):
            raise LayoutError(
                "A model must be sharded as its mesh says before it is trained, but this one is not. Call "
                "`shard_model` after it is built and before its weights are set."
            )
        assert mesh.sharding is not None
        self.model: FSDPModule = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.keeps_weights = mesh.sharding.keeps_weights
        self._set_last(False)

    def arm(self) -> None:
        """Let the next backward pass complete the sums."""
        self._set_last(True)

    def finish(self) -> None:
        """Leave the summed gradients in `.grad`; what was sent is waited for by the backward pass."""
        self._set_last(False)
        for parameter in self.parameters:
            if parameter.grad is None:  # on every layout alike: an optimizer passes over what has no gradient
                parameter.grad = torch.zeros_like(parameter)

    def _set_last(self, is_last: bool) -> None:
        self.model.set_requires_all_reduce(is_last)
        if self.keeps_weights:
            self.model.set_reshard_after_backward(is_last)


def make_reducer(model: nn.Module, mesh: ParallelMesh) -> Reducer:
    """Reducer that sums the gradients of a model on this mesh.

    Raises `LayoutError` as `GradientReducer` does, and where the mesh shards but the model is not sharded.
    """
    return GradientReducer(model.parameters(), mesh) if mesh.sharding is None else ShardedReducer(model, mesh)
