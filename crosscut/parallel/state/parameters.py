"""Parameters as distributed tensors, and the local tensors that arithmetic is done on.

Every parameter is a `DTensor` on the tensor axis: `Shard(0)` for columns of the paper's A (PyTorch keeps a linear
weight transposed, [out, in]), `Shard(1)` for its rows, `Replicate()` for what every rank holds whole. So the optimizer,
checkpoints and resharding are PyTorch's. The forward pass calls `local` and sees ordinary tensors.

A replicated parameter that is used on a split sequence, or inside a parallel region, gets only a part of its gradient
on each rank. `local_on_sequence` and `local_inside` say so in the gradient's own placement, `Partial`;
`gradients.GradientReducer` sums exactly these.

Where data ranks share one copy (`sharding`), a parameter at rest is cut once more, the tensor rank's part in rows over
the shard group. Its mesh then has the data axes before the tensor axis. While a layer runs, its parameters are gathered
and have the tensor axis alone. So axes are found by their names and their roles in the table of axes (`cuts_of`), never
by their place in a mesh.
"""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from crosscut.config import LayoutError
from crosscut.config.axes import Role, role_of
from crosscut.parallel.collectives import all_gather
from crosscut.parallel.mesh import Axis, ParallelMesh


def sharded_parameter(
    shape: tuple[int, ...], axis: Axis, *, dim: int, dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """A parameter of global `shape`, cut along `dim` over the axis, of zeros until initialised.

    Raises `LayoutError` when the axis does not divide the dimension.
    """
    if shape[dim] % axis.size:
        raise LayoutError(
            f"The {axis.name} axis must divide dimension {dim} of a parameter of shape {shape}, but has {axis.size} "
            "ranks. Choose a size that divides it, or pad the dimension."
        )
    local_shape = list(shape)
    local_shape[dim] //= axis.size
    local_tensor = torch.zeros(local_shape, dtype=dtype, device=device)
    return nn.Parameter(DTensor.from_local(local_tensor, axis.device_mesh, [Shard(dim)], run_check=False))


def replicated_parameter(
    shape: tuple[int, ...], axis: Axis, *, dtype: torch.dtype, device: torch.device, value: float = 0.0
) -> nn.Parameter:
    """A parameter that every rank of the axis holds whole, filled with `value`."""
    local_tensor = torch.full(shape, value, dtype=dtype, device=device)
    parameter = nn.Parameter(DTensor.from_local(local_tensor, axis.device_mesh, [Replicate()], run_check=False))
    parameter.initial_value = value  # type: ignore[attr-defined]  # what `meta` forgets, see `initial_value_of`
    return parameter


def initial_value_of(parameter: Tensor) -> float:
    """Value with which a new parameter is filled."""
    value: float = getattr(parameter, "initial_value", 0.0)
    return value


def local(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """This rank's part of a sharded parameter, or a replicated one used on whole sequences, cast to `dtype`.

    The cast is part of the graph: with float32 parameters and bfloat16 activations, gradients arrive as float32.
    """
    return _own_part(parameter, None, dtype)


def _own_part(parameter: Tensor, gradient: tuple[Placement, ...] | None, dtype: torch.dtype) -> Tensor:
    assert isinstance(parameter, DTensor)
    if torch.compiler.is_compiling():  # a compiler knows `to_local`, and runs its checks once
        return parameter.to_local(grad_placements=gradient).to(dtype)
    if torch.is_grad_enabled() and parameter.requires_grad:
        part: Tensor = _OwnPart.apply(parameter, gradient)
    else:
        part = parameter._local_tensor
    return part if part.dtype == dtype else part.to(dtype)


class _OwnPart(torch.autograd.Function):
    """A parameter's part, with a gradient that is placed as said: what `DTensor.to_local` does, in a third of the time.

    PyTorch's makes every gradient a distributed tensor by way of `from_local`, which works out and checks what the
    parameter knows.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, gradient: tuple[Placement, ...] | None) -> Tensor:
        spec = parameter._spec
        if gradient is not None and gradient != spec.placements:
            spec = DTensorSpec(spec.mesh, gradient, tensor_meta=spec.tensor_meta)
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        return parameter._local_tensor.view_as(parameter._local_tensor)  # a tensor of its own, for autograd's notes

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        if gradient is None:
            return None, None
        if gradient.is_contiguous():
            return DTensor(gradient, ctx.spec, requires_grad=False), None
        return DTensor.from_local(gradient, ctx.spec.mesh, ctx.spec.placements, run_check=False), None


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of any tensor of a run's state: of a distributed one its shard, of another one all of it."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if torch.is_grad_enabled() and tensor.requires_grad else tensor._local_tensor


def with_local_part(tensor: Tensor, part: Tensor) -> Tensor:
    """A tensor placed as `tensor`, of which this rank holds `part`, also in other memory than that of its mesh."""
    if not isinstance(tensor, DTensor):
        return part
    # `DTensor.from_local` would take the part to the mesh's device. PyTorch's own offload makes them like this, too.
    return DTensor(part, tensor._spec, requires_grad=False)


def placement_of(tensor: Tensor) -> str:
    """Description of a tensor's placement, such as `Shard(0) over tensor=2`; `whole` where each rank holds all."""
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
    """The dimension that a placement cuts, None if it cuts none.

    PyTorch has a second kind of `Shard` for a dimension that two axes cut, the later axis first.
    """
    dim: int | None = getattr(placement, "dim", None)
    return dim


def local_on_sequence(parameter: Tensor, mesh: ParallelMesh, dtype: torch.dtype) -> Tensor:
    """A replicated parameter used between the parallel regions, where the sequence may be split.

    Under sequence parallelism its gradient is `Partial`: each rank has seen a part of the tokens.
    """
    return _own_part(parameter, (Partial(),) if mesh.sequence_parallel else (Replicate(),), dtype)


def local_inside(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A replicated parameter used inside a parallel region, where each rank has a part of the work.

    Its gradient is `Partial`: each rank has used it on what is its own.
    """
    return _own_part(parameter, (Partial(),), dtype)


class Cut(NamedTuple):
    """Cut of a distributed tensor over one axis of its mesh."""

    axis: str
    """Name of the axis."""
    mesh_dim: int
    """Place of the axis in the mesh."""
    dim: int
    """The dimension that is cut."""
    num_parts: int
    """Ranks along the axis; 1 where the axis would cut the tensor if it had several."""

    @property
    def is_of_model(self) -> bool:
        """Whether the axis cuts parameters by its role; along the other axes ranks store slices of what is left."""
        return role_of(self.axis) is Role.CUTS


def cuts_of(tensor: Tensor) -> list[Cut]:
    """Cuts of a distributed tensor in the order in which they are made: over the tensor axis, then over data axes."""
    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    assert mesh.mesh_dim_names is not None
    cuts = [
        Cut(name, i, dim, mesh.size(i))
        for i, (name, placement) in enumerate(zip(mesh.mesh_dim_names, tensor.placements, strict=True))
        if (dim := dim_cut_by(placement)) is not None
    ]
    return [*(cut for cut in cuts if cut.is_of_model), *(cut for cut in reversed(cuts) if not cut.is_of_model)]


def cut_dim(parameter: Tensor) -> int | None:
    """The dimension along which a parameter is cut over the tensor axis; None where every rank holds it whole."""
    return next((cut.dim for cut in cuts_of(parameter) if cut.is_of_model), None)


def local_offsets(tensor: Tensor) -> list[int]:
    """Where this rank's part of a distributed tensor begins in the whole, by dimension."""
    assert isinstance(tensor, DTensor)
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    for cut in cuts_of(tensor):
        rank = tensor.device_mesh.get_local_rank(cut.mesh_dim)
        first, sizes[cut.dim] = _chunk(sizes[cut.dim], cut.num_parts, rank)
        offsets[cut.dim] += first
    return offsets


def _chunk(size: int, num_parts: int, index: int) -> tuple[int, int]:
    """Start and length of a part, as `torch.chunk` cuts: the last ones may be short or empty."""
    length = -(-size // num_parts)
    first = min(size, index * length)
    return first, min(length, size - first)


def whole(tensor: Tensor) -> Tensor:
    """All of a distributed tensor, on every rank of its mesh, for writing it down; every one calls it.

    Communication: an all-gather along each axis that cuts it.
    """
    assert isinstance(tensor, DTensor)
    gathered: Tensor = tensor.full_tensor()
    return gathered


def gathered_over_data(tensor: Tensor) -> Tensor:
    """This rank's part on the tensor axis: the shares that data ranks hold of it, put together; a copy.

    For looking at parameters and gradients, not for training. Communication: an all-gather where it is shared.
    """
    assert isinstance(tensor, DTensor)
    local, cuts = local_part(tensor).detach(), cuts_of(tensor)
    for cut in reversed(cuts):
        if not cut.is_of_model:
            rows = tensor.shape[0] // prod(other.num_parts for other in cuts if other.is_of_model and other.dim == 0)
            padded = local.new_zeros(-(-rows // cut.num_parts), *local.shape[1:])
            padded[: local.shape[0]] = local
            local = all_gather(padded, Axis.of(tensor.device_mesh, cut.axis), 0)[:rows]
    return local.clone()
