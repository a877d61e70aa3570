"""Parameters as distributed tensors, and access to the local tensors that the arithmetic uses.

Every parameter is a `DTensor` on the tensor axis: `Shard(0)` for columns of the paper's A (PyTorch stores a linear
weight transposed, [out, in]), `Shard(1)` for rows of A, and `Replicate()` if every rank holds the whole parameter.
PyTorch's optimizer, checkpoints and resharding therefore work unchanged. The forward pass calls `local` and computes
with ordinary tensors (`leaves`).

If a replicated parameter is used on a split sequence or inside a parallel region, each rank computes only a part of the
gradient. `local_on_sequence` and `local_inside` give such a gradient the placement `Partial`.
`gradients.GradientReducer` sums the gradients with this placement over the tensor axis.

The matrices of experts are stacked in one parameter. If several ranks share the experts, this parameter is a `DTensor`
on the axes ("expert", "tensor") of the experts' device mesh.

If data ranks share one copy of the model (`sharding`), a stored parameter is cut a second time: the rows of the tensor
rank's part are split over the shard group. The mesh of a stored parameter then has the data axes before the tensor
axis. While a layer runs, its parameters are gathered, and the mesh of a gathered parameter has only the tensor axis.
`cuts_of` therefore finds an axis by its name and its role in the table of axes (`config/axes.py`), never by its
position in a mesh.
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from crosscut.config import LayoutError
from crosscut.config.axes import AxisRole, cuts_parameters, is_folded, role_of
from crosscut.parallel.collectives import all_gather
from crosscut.parallel.mesh import Axis, ParallelMesh, PlanAxes
from crosscut.parallel.state.leaves import Leaves, own_part


def sharded_parameter(
    shape: tuple[int, ...], axis: Axis, *, dim: int, dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """Create a parameter of global shape `shape`, cut along dimension `dim` over the axis and filled with zeros.

    Raises `LayoutError` if the size of the dimension is not a multiple of the number of ranks on the axis.
    """
    _require_divisible(shape, axis, dim)
    local_shape = list(shape)
    local_shape[dim] //= axis.size
    local_tensor = torch.zeros(local_shape, dtype=dtype, device=device)
    return nn.Parameter(DTensor.from_local(local_tensor, axis.device_mesh, [Shard(dim)], run_check=False))


def _require_divisible(shape: tuple[int, ...], axis: Axis, dim: int) -> None:
    if shape[dim] % axis.size:
        raise LayoutError(
            f"The size of the {axis.name} axis must divide dimension {dim} of a parameter of shape {shape}, but is "
            f"{axis.size}. Choose a size that divides the dimension, or pad the dimension."
        )


def stacked_parameter(
    shape: tuple[int, ...], mesh: ParallelMesh, *, dim: int, dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """Create the stacked matrices of all experts, of global shape `shape`, filled with zeros. The expert ranks divide
    dimension 0, the experts, and the tensor ranks divide dimension `dim`.

    Raises `LayoutError` if the size of one of the dimensions is not a multiple of the number of ranks.
    """
    if mesh.expert.size == 1:
        return sharded_parameter(shape, mesh.tensor, dim=dim, dtype=dtype, device=device)
    local_shape = list(shape)
    for axis, cut in ((mesh.expert, 0), (mesh.tensor, dim)):
        _require_divisible(shape, axis, cut)
        local_shape[cut] //= axis.size
    local_tensor = torch.zeros(local_shape, dtype=dtype, device=device)
    placements = [Shard(0), Shard(dim)]
    return nn.Parameter(DTensor.from_local(local_tensor, mesh.experts.cuts, placements, run_check=False))


def replicated_parameter(
    shape: tuple[int, ...], axis: Axis, *, dtype: torch.dtype, device: torch.device, value: float = 0.0
) -> nn.Parameter:
    """Create a parameter that every rank of the axis holds whole, filled with `value`."""
    local_tensor = torch.full(shape, value, dtype=dtype, device=device)
    parameter = nn.Parameter(DTensor.from_local(local_tensor, axis.device_mesh, [Replicate()], run_check=False))
    parameter.initial_value = value  # type: ignore[attr-defined]  # `meta` tensors have no values
    return parameter


class ParameterMaker(NamedTuple):
    """Maker of a layer's parameters on the tensor axis of a mesh, in one element type."""

    mesh: ParallelMesh
    dtype: torch.dtype
    is_wide: bool = False
    """Whether layers use the parameters in at least float32, whatever the element type of the products is."""

    @property
    def wide(self) -> "ParameterMaker":
        """Maker of parameters that layers use in at least float32, such as decay rates and routers. Their element type
        is float32 or wider, so that a model in bfloat16 has the values of training.
        """
        return self._replace(dtype=torch.promote_types(self.dtype, torch.float32), is_wide=True)

    def sharded(self, *shape: int, dim: int) -> nn.Parameter:
        """Create a parameter that is cut along dimension `dim`; see `sharded_parameter`."""
        axis, device = self.mesh.tensor, self.mesh.parameter_device
        return self._marked(sharded_parameter(shape, axis, dim=dim, dtype=self.dtype, device=device))

    def stacked(self, *shape: int, dim: int) -> nn.Parameter:
        """Create the stacked matrices of all experts, cut along dimension `dim` over the tensor axis; see
        `stacked_parameter`.
        """
        return stacked_parameter(shape, self.mesh, dim=dim, dtype=self.dtype, device=self.mesh.parameter_device)

    def replicated(self, *shape: int, value: float = 0.0) -> nn.Parameter:
        """Create a parameter that every tensor rank holds whole; see `replicated_parameter`."""
        axis, device = self.mesh.tensor, self.mesh.parameter_device
        return self._marked(replicated_parameter(shape, axis, dtype=self.dtype, device=device, value=value))

    def _marked(self, parameter: nn.Parameter) -> nn.Parameter:
        parameter.is_wide = self.is_wide  # type: ignore[attr-defined]
        return parameter


def own_parameter(part: Tensor, like: Tensor, dim: int | None, axis: Axis) -> nn.Parameter:
    """Make a distributed parameter, in the shape of `like`, of the part that this rank holds: `dim` is the dimension
    that the axis divides, in the order of its ranks. With None, `part` is the whole tensor. Sends nothing.
    """
    placement = Replicate() if dim is None else Shard(dim)
    shape, stride = like.shape, torch.empty(like.shape, device="meta").stride()
    made = DTensor.from_local(
        part.contiguous(), axis.device_mesh, [placement], run_check=False, shape=shape, stride=stride
    )
    return nn.Parameter(made, requires_grad=like.requires_grad)


def note_whole_gradients(module: nn.Module) -> None:
    """Note that the backward pass of a module sums its gradients over the context ranks: no reducer may sum them again.
    The note is on the module, because a parameter loses it when it is converted.
    """
    vars(module)["has_whole_gradients"] = True


def require_gradients_to_sum(model: nn.Module) -> None:
    """Raise `LayoutError` if the backward pass of the model or of one of its modules sums gradients itself, which a
    reducer would sum again.
    """
    for name, module in model.named_modules():
        if getattr(module, "has_whole_gradients", False):
            raise LayoutError(
                "A reducer must get a model whose gradients ranks must still sum, but the backward pass of "
                f"`{name or type(module).__name__}`, whose images are cut, has summed them. Train the module without a "
                "reducer. For several data ranks, call PyTorch's `fully_shard` on `mesh.data.device_mesh`."
            )


def initial_value_of(parameter: Tensor) -> float:
    """Return the value with which a parameter was created: the argument `value` of `replicated_parameter`, or 0 for a
    sharded parameter.
    """
    value: float = getattr(parameter, "initial_value", 0.0)
    return value


def is_wide(parameter: Tensor) -> bool:
    """Whether layers use the parameter in at least float32, whatever the element type of the products is."""
    return getattr(parameter, "is_wide", False)


def local(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return this rank's part of a parameter, cast to `dtype`. Use this function for sharded parameters, and for
    replicated parameters that are used on whole sequences.

    Autograd records the cast. With float32 parameters and bfloat16 activations, the gradients of the parameters are
    therefore float32. An ordinary tensor is cast.
    """
    if isinstance(parameter, (DTensor, Leaves)):
        return own_part(parameter, None, dtype)
    return parameter.to(dtype)


def is_distributed(tensor: object) -> bool:
    """Whether a tensor is spread over ranks (`DTensor`)."""
    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return the local tensor of a distributed tensor on this rank. An ordinary tensor is returned unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if torch.is_grad_enabled() and tensor.requires_grad else tensor._local_tensor


def is_partial(tensor: Tensor | None) -> bool:
    """Whether a distributed tensor has the placement `Partial`: the value is a sum, and each rank holds one term of the
    sum.
    """
    return isinstance(tensor, DTensor) and any(isinstance(placement, Partial) for placement in tensor.placements)


def with_local_part(tensor: Tensor, part: Tensor) -> Tensor:
    """Return a distributed tensor that has the placement and shape of `tensor`, and `part` as its local tensor. If
    `tensor` is an ordinary tensor, return `part`. `part` need not be on the mesh's device; it may be in host memory,
    for example.
    """
    if not isinstance(tensor, DTensor):
        return part
    # `DTensor.from_local` would copy the part to the mesh's device. PyTorch's own offload also calls the constructor.
    return DTensor(part, tensor._spec, requires_grad=False)


def placement_of(tensor: Tensor) -> str:
    """Return a description of a tensor's placement, such as `Shard(0) over tensor=2`, or `whole` for an ordinary
    tensor.
    """
    if not isinstance(tensor, DTensor):
        return "whole"
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"axis {i}" for i in range(mesh.ndim))
    placements = zip(tensor.placements, names, strict=True)
    return ", ".join(f"{_word(place)} over {name}={mesh.size(i)}" for i, (place, name) in enumerate(placements))


def _word(placement: Placement) -> str:
    dim = dim_cut_by(placement)
    return type(placement).__name__ if dim is None else f"Shard({dim})"


def dim_cut_by(placement: Placement) -> int | None:
    """Return the dimension that a placement cuts, or None if the placement cuts no dimension.

    Use this function instead of `isinstance(placement, Shard)`: if two axes cut the same dimension, PyTorch uses a
    second class of placement, `_StridedShard`.
    """
    dim: int | None = getattr(placement, "dim", None)
    return dim


def local_on_sequence(parameter: Tensor, mesh: ParallelMesh, dtype: torch.dtype) -> Tensor:
    """Return the local tensor of a replicated parameter that is used outside the parallel regions, cast to `dtype`.

    Under sequence parallelism, the parameter's gradient is `Partial`, because each rank sees only a part of the tokens.
    """
    return own_part(parameter, (Partial(),) if mesh.sequence_parallel else (Replicate(),), dtype)


def local_inside(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the local tensor of a replicated parameter that is used inside a parallel region, cast to `dtype`.

    The parameter's gradient is `Partial`, because each rank does only a part of the region's work.
    """
    return own_part(parameter, (Partial(),), dtype)


class AxisCut(NamedTuple):
    """Cut of one dimension of a distributed tensor, over one axis of the tensor's mesh."""

    axis: str
    """Name of the axis."""
    mesh_dim: int
    """Index of the axis in the tensor's mesh."""
    dim: int
    """Dimension of the tensor that is cut."""
    num_parts: int
    """Number of parts, which is the number of ranks along the axis. If 1, the tensor is not really cut."""

    @property
    def is_of_model(self) -> bool:
        """Whether the cut is over the tensor or the expert axis, so that each rank computes with its own part. False
        for a cut over data ranks, which only store shards of a tensor rank's part.
        """
        return cuts_parameters(self.axis)


def cuts_of(tensor: Tensor) -> tuple[AxisCut, ...]:
    """Return the cuts of a distributed tensor, in the order in which the tensor is cut: first over the tensor axis,
    then over data axes.
    """
    assert isinstance(tensor, DTensor)
    return _cuts(tensor.device_mesh, tensor.placements)


@lru_cache(maxsize=1024)
def _cuts(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[AxisCut, ...]:
    assert mesh.mesh_dim_names is not None
    cuts = [
        AxisCut(name, i, dim, mesh.size(i))
        for i, (name, placement) in enumerate(zip(mesh.mesh_dim_names, placements, strict=True))
        if (dim := dim_cut_by(placement)) is not None
    ]
    return *(cut for cut in cuts if cut.is_of_model), *(cut for cut in reversed(cuts) if not cut.is_of_model)


def cut_dim(parameter: Tensor) -> int | None:
    """Return the dimension along which a parameter is cut over the tensor axis, or None if the tensor axis does not cut
    the parameter.
    """
    return next((cut.dim for cut in cuts_of(parameter) if role_of(cut.axis) is AxisRole.CUTS), None)


def cuts_of_model(tensor: Tensor) -> dict[str, int]:
    """Return the dimension that each axis of the model cuts (`AxisCut.is_of_model`), keyed by the axis's name."""
    return {cut.axis: cut.dim for cut in cuts_of(tensor) if cut.is_of_model}


def is_expert(tensor: Tensor) -> bool:
    """Whether a distributed tensor is arranged over the axes of experts: some of the ranks that see different tokens
    hold a part of the tensor that the others do not hold. False for an ordinary tensor, which every rank holds whole.
    """
    names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None
    return any(map(is_folded, names or ()))


def plan_of(parameter: Tensor, mesh: ParallelMesh) -> PlanAxes:
    """Return the axes over which ranks hold a parameter."""
    return mesh.experts if is_expert(parameter) else mesh.dense


def local_offsets(tensor: Tensor) -> list[int]:
    """Return, for each dimension, the index in the whole tensor at which this rank's part starts."""
    assert isinstance(tensor, DTensor)
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    for cut in cuts_of(tensor):
        rank = tensor.device_mesh.get_local_rank(cut.mesh_dim)
        first, sizes[cut.dim] = _chunk(sizes[cut.dim], cut.num_parts, rank)
        offsets[cut.dim] += first
    return offsets


def _chunk(size: int, num_parts: int, index: int) -> tuple[int, int]:
    """Return the start and the length of part `index` of a dimension of `size` elements. The dimension is cut in the
    same way as by `torch.chunk`: the last parts may be shorter or empty.
    """
    length = -(-size // num_parts)
    first = min(size, index * length)
    return first, min(length, size - first)


def whole(tensor: Tensor) -> Tensor:
    """Gather the parts of a distributed tensor, and return the whole tensor on every rank of its mesh, for example to
    write the tensor to disk. Every rank of the mesh must call this function.

    Communication: an all-gather along each axis that cuts the tensor.
    """
    assert isinstance(tensor, DTensor)
    gathered: Tensor = tensor.full_tensor()
    return gathered


def gathered_over_data(tensor: Tensor) -> Tensor:
    """Gather this tensor rank's part of a distributed tensor from the shards that the data ranks store, and return a
    copy of the part. Every rank must call this function.

    Use this function to inspect parameters and gradients, not for training. Communication: an all-gather if data ranks
    store shards.
    """
    assert isinstance(tensor, DTensor)
    local = local_part(tensor).detach()
    for cut in reversed(cuts_of(tensor)):
        if not cut.is_of_model:
            local = _gathered_over(cut, local, tensor)
    return local.clone()


def _gathered_over(cut: AxisCut, part: Tensor, like: DTensor) -> Tensor:
    """Gather `part` over the axis of `cut`. `part` is a part of a tensor that is cut in the same way as `like`. The
    cuts that follow `cut` in `cuts_of(like)` must already be undone.

    The parts of the data ranks may differ in size, so they are padded for the message.
    """
    axis = Axis.of(like.device_mesh, cut.axis)
    if cut.is_of_model:
        return all_gather(part, axis, cut.dim)
    rows = like.shape[0] // prod(other.num_parts for other in cuts_of(like) if other.is_of_model and other.dim == 0)
    if part.shape[0] * cut.num_parts == rows:
        return all_gather(part, axis, 0)
    padded = part.new_zeros(-(-rows // cut.num_parts), *part.shape[1:])
    padded[: part.shape[0]] = part
    return all_gather(padded, axis, 0)[:rows]
