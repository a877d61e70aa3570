"""Sharding of one model copy over data ranks: PyTorch's `fully_shard` on top of the tensor axis.

The data ranks that share one copy of the model form a *shard group*. While a parameter is not in use, the parameter,
its gradient and its optimizer state are cut over the shard group, along the rows of the tensor rank's part. A *unit* is
one layer of the model. Before a unit runs, the unit's parameters are gathered in the element type of the products. In
every backward pass, one reduce-scatter sums the unit's gradients over the shard group. At any time, a rank therefore
holds the whole gradients of at most one unit and of the root. If there are several copies of the model
(`layout.shard_group`), the gradients of the shards are also summed over the copies, once per step.

Experts that several ranks share are sharded over the ranks that hold the same experts (`PlanAxes.sharding`). A unit
with experts has two groups of parameters, each of which is gathered and reduced over its own ranks.

The *root* is an additional unit with the parameters outside of all layers, such as tied embeddings and the last norm.
The root's parameters stay gathered from the forward pass to the end of the backward pass. They are gathered in float32,
because the embedding of a frequent token sums many gradients. Parameters of layers that are used in float32 in every
precision, such as decay rates, also belong to the root.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from crosscut.config import LayoutError
from crosscut.flight import ModelPart
from crosscut.flight.places import place_of
from crosscut.parallel.mesh import ParallelMesh, Sharding
from crosscut.parallel.state.gradients import GradientReducer, require_distributed
from crosscut.parallel.state.parameters import (
    initial_value_of,
    is_expert,
    is_wide,
    local_part,
    plan_of,
    require_gradients_to_sum,
)
from crosscut.parallel.state.sharded_messages import record_messages

if TYPE_CHECKING:  # internal modules of PyTorch, which another version may lack
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

_SUMS_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether PyTorch can also sum the gradients of parameters that the backward pass reaches on some ranks only. True for
PyTorch 2.12 and later.
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

    - `units` are the submodules to gather one at a time, in the order in which they run.
    - `compute_dtype` is the element type in which the parameters of units are gathered; None keeps the parameters' own
      type. Gradients are summed in the parameters' own type.
    - `always_used` promises that every backward pass reaches every parameter on every rank. PyTorch before 2.12 needs
      this promise.

    On a mesh that shards, layers create their parameters on `meta`, so no rank ever holds the whole model. This call
    allocates memory for the shards and fills the shards with default values (ones for the weights of norms, zeros for
    all others). The parameters are new objects: set their initial values (`normal_`) and create the reducer and the
    optimizer only after this call. While a unit does not run, `named_parameters` returns the shards of the unit. For
    the root, `named_parameters` returns shards only after a backward pass or `reshard`.

    Every rank must call this function. Raises `LayoutError` if a parameter is not a `DTensor`, if the backward pass of
    the model sums gradients itself, if a parameter is a scalar, if a buffer is on `meta`, or, with PyTorch before 2.12,
    if `always_used` is false.
    """
    require_gradients_to_sum(model)
    if mesh.sharding is None:
        return
    parameters = dict(model.named_parameters())
    _require_shareable(parameters, dict(model.named_buffers()))
    _require_sums(always_used)
    values = {name: initial_value_of(parameter) for name, parameter in parameters.items() if parameter.is_meta}
    reduce_dtype = next(iter(parameters.values())).dtype
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    _shard_root_and_units(model, [*units], mesh, policy, compute_dtype)
    model._apply(lambda tensor: torch.empty_like(tensor, device=mesh.device) if tensor.is_meta else tensor)
    for name, parameter in model.named_parameters():
        if name in values:
            local_part(parameter.detach()).fill_(values[name])


def _shard_root_and_units(
    model: nn.Module,
    units: Sequence[nn.Module],
    mesh: ParallelMesh,
    policy: MixedPrecisionPolicy,
    compute_dtype: torch.dtype | None,
) -> None:
    of_units = {p for unit in units for p in unit.parameters() if not is_wide(p)}
    # The root comes first: `fully_shard` does not look for parameters inside of units.
    _shard_unit(model, mesh, policy, place_of(ModelPart.ROOT), of_others=of_units, is_root=True)
    of_root = {*model.parameters()} - of_units
    for unit, place in _with_places(model, units):
        _shard_unit(unit, mesh, replace(policy, param_dtype=compute_dtype), place, of_others=of_root)


def _with_places(model: nn.Module, units: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, int]]:
    """Yield each unit and its place in the model. Reports about hangs name this place. The number of a layer is the
    last part of the layer's name.
    """
    names = {module: name for name, module in model.named_modules()}
    for unit in units:
        number = names[unit].rpartition(".")[2]
        yield unit, place_of(ModelPart.LAYER, int(number)) if number.isdecimal() else place_of(ModelPart.NONE)


def _shard_unit(
    unit: nn.Module,
    mesh: ParallelMesh,
    policy: MixedPrecisionPolicy,
    place: int,
    *,
    of_others: set[nn.Parameter],
    is_root: bool = False,
) -> None:
    """Shard one unit. `place` is the unit's place in the model, and `of_others` are the parameters of other units.
    Experts form a group of parameters of their own, which is gathered and reduced over other ranks, together with the
    unit.
    """
    sharding = mesh.sharding
    assert sharding is not None
    fully_shard(
        unit,
        mesh=sharding.device_mesh,
        reshard_after_forward=not is_root and not sharding.keeps_weights,
        mp_policy=policy,
        ignored_params=of_others,
        shard_placement_fn=_placement_of_experts(mesh.experts.sharding) if len(mesh.plans) > 1 else None,
    )
    assert isinstance(unit, FSDPModule)
    unit.set_gradient_divide_factor(1.0)  # gradients are sums, not averages
    unit.set_force_sum_reduction_for_comms(True)  # a plain sum, which every backend supports
    if _SUMS_UNUSED:
        unit.set_reduce_scatter_unused_params(True, recurse=False)
    for group in param_groups_of(fully_shard.state(unit)):  # type: ignore[attr-defined]
        of_group = plan_of(group.fsdp_params[0].sharded_param, mesh).sharding
        assert of_group is not None
        record_messages(group, of_group, place)


def _placement_of_experts(sharding: Sharding | None) -> Callable[[nn.Parameter], Any]:
    """Return a function that tells `fully_shard` over which ranks it shards a parameter: over `sharding` if the
    parameter stacks experts, otherwise over the ranks of the unit (None).
    """
    assert sharding is not None
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
    except ImportError:
        raise LayoutError(
            f"PyTorch must be 2.13 or newer to shard experts, but is {torch.__version__}. Install PyTorch 2.13, or "
            'set layout.sharding="none" or layout.expert=1.'
        ) from None
    mesh = sharding.device_mesh
    of_copies = partial(HSDPMeshInfo, replicate_mesh_dim=0)
    info = FSDPMeshInfo(mesh, shard_mesh_dim=0) if sharding.replica is None else of_copies(mesh, shard_mesh_dim=1)
    own = ShardPlacementResult(placement=None, mesh_info=info)
    return lambda parameter: own if is_expert(parameter) else None


def _require_sums(always_used: bool) -> None:
    if not (always_used or _SUMS_UNUSED):
        raise LayoutError(
            "`always_used` must be true with PyTorch before 2.12, but is false. This is PyTorch "
            f"{torch.__version__}, which sums gradients wrongly if a parameter is unused on some ranks. Install "
            "PyTorch 2.12, or pass always_used=True if every backward pass reaches every parameter on every rank."
        )


def _require_shareable(parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
    require_distributed(parameters.values())
    for name, buffer in buffers.items():
        if buffer.is_meta:
            raise LayoutError(
                f"The buffer `{name}` must have values before the model is sharded, but is on `meta`. Create the "
                "buffer on the mesh's `device`."
            )
    for name, parameter in parameters.items():
        if not parameter.dim():
            raise LayoutError(
                f"`{name}` must have at least one dimension, but is a scalar. Data ranks cannot shard a scalar. Give "
                "the parameter the shape (1,)."
            )


def reshard(model: nn.Module) -> None:
    """Release all gathered parameters, so that each rank holds only its shards again.

    Call this function after a forward pass without a backward pass. A backward pass releases the parameters itself.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Reducer(Protocol):
    """Interface of an object that sums a step's gradients over the ranks.

    Call `begin` before the first forward pass of a step, `arm` before the last backward pass, and `finish` after all
    backward passes.
    """

    def begin(self) -> None:
        """Prepare a step. Call this method before the first forward pass of the step."""

    def arm(self) -> None:
        """Make the next backward pass complete the sum of the gradients over all ranks. Call this method before the
        last backward pass of a step.
        """

    def finish(self) -> None:
        """Wait for all messages and store the summed gradients in each parameter's `.grad`."""


class ShardedReducer:
    """`Reducer` for a model that `shard_model` has sharded.

    Each backward pass sums the gradients over the shard group, and each rank keeps one shard of the sum. The backward
    pass after `arm` also sums the gradients over the copies of the model. Under ZeRO-2, gathered weights stay in memory
    until the end of this last backward pass.

    Parameters that do not require a gradient are ignored. A parameter that no backward pass reaches gets a gradient of
    zeros. If only some data ranks use a parameter, the gradient is the sum over these ranks. PyTorch before 2.12
    (without `FSDPModule.set_reduce_scatter_unused_params`) requires all ranks to use the same parameters.

    Raises `LayoutError` if the model is not sharded.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh) -> None:
        if not isinstance(model, FSDPModule):
            raise LayoutError(
                "The model must be sharded before it is trained on a mesh with sharding, but is not. Call "
                "`shard_model` after you build the model and before you set its weights."
            )
        assert mesh.sharding is not None
        self.model: FSDPModule = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.keeps_weights = mesh.sharding.keeps_weights
        self._set_last(False)

    def begin(self) -> None:
        """Do nothing: this reducer needs no preparation at the start of a step."""

    def arm(self) -> None:
        """Make the next backward pass also sum the gradients over the copies of the model. Call this method before the
        last backward pass of a step.
        """
        self._set_last(True)

    def finish(self) -> None:
        """Set the gradients of unused parameters to zeros. All other parameters already have the sum in `.grad`,
        because the backward pass has waited for all messages.
        """
        self._set_last(False)
        for parameter in self.parameters:
            if parameter.grad is None:  # zeros on every layout: an optimizer skips parameters without a gradient
                parameter.grad = torch.zeros_like(parameter)

    def _set_last(self, is_last: bool) -> None:
        self.model.set_requires_all_reduce(is_last)
        if self.keeps_weights:
            self.model.set_reshard_after_backward(is_last)


class ShardedStageReducer:
    """`Reducer` for pipeline stages that `shard_model` has sharded.

    In each step, the ranks gather the weights of each unit once, at the unit's first forward pass, and sum the
    gradients once, after all backward passes. Between these two points, a rank holds the whole weights and gradients of
    its stages. If each backward pass summed gradients instead, there would be messages for each micro-batch, and the
    sums would lack the weight gradients that a schedule computes after the last backward pass.

    Raises `LayoutError` if the model is not sharded.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh) -> None:
        self._reducer = ShardedReducer(model, mesh)
        self.model = self._reducer.model
        self.model.set_reshard_after_forward(False)

    def begin(self) -> None:
        """Make all passes of the step keep the gathered weights and the whole gradients."""
        self._set_last(False)

    def arm(self) -> None:
        """Do nothing: no backward pass sends gradients."""

    def finish(self) -> None:
        """Sum the gradients of all units over the shard group and over the copies of the model. Then release the
        gathered weights.
        """
        self._set_last(True)
        root: FSDPState = fully_shard.state(self.model)  # type: ignore[attr-defined]
        for state in root._state_ctx.all_states:  # as PyTorch's own pipelining does
            for group in param_groups_of(state):
                group.post_backward()
        root._root_post_backward_final_callback()
        self._reducer.finish()

    def _set_last(self, is_last: bool) -> None:
        self.model.set_is_last_backward(is_last)
        self.model.set_reshard_after_backward(is_last)
        self.model.set_requires_gradient_sync(is_last)


def param_groups_of(state: "FSDPState") -> "list[FSDPParamGroup]":
    """Return the parameter groups of a unit, given the unit's state in `fully_shard`. `fully_shard` gathers the
    parameters of one group together. Older versions of PyTorch have at most one group per unit.
    """
    groups: list[FSDPParamGroup] | None = getattr(state, "_fsdp_param_groups", None)
    return [group for group in [state._fsdp_param_group] if group is not None] if groups is None else groups


def make_reducer(model: nn.Module, mesh: ParallelMesh, *, apart: Collection[str] = ()) -> Reducer:
    """Return a new reducer that sums the gradients of `model` on this mesh. Without sharding, the reducer leaves out
    the gradients of the parameters whose names are in `apart`.

    Raises `LayoutError` if a parameter is not a `DTensor`, or if the mesh shards the model but `shard_model` was not
    called, or if the backward pass of the model sums gradients itself.
    """
    require_gradients_to_sum(model)
    if mesh.sharding is None:
        return GradientReducer((p for name, p in model.named_parameters() if name not in apart), mesh)
    return ShardedStageReducer(model, mesh) if mesh.is_staged else ShardedReducer(model, mesh)
