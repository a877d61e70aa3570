"""Parameters as distributed tensors, and the local tensors that arithmetic is done on.

Every parameter is a `DTensor` on the tensor axis: `Shard(0)` for columns of the paper's A (PyTorch keeps a linear
weight transposed, [out, in]), `Shard(1)` for its rows, `Replicate()` for what every rank holds whole. So the optimizer,
checkpoints and resharding are PyTorch's. The forward pass calls `local` and sees ordinary tensors.

A replicated parameter that is used on a split sequence gets only a part of its gradient on each rank.
`local_on_sequence` says so in the gradient's own placement, `Partial`; `gradients.GradientReducer` sums exactly these.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from crosscut.config import LayoutError
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
    return nn.Parameter(DTensor.from_local(local_tensor, axis.device_mesh, [Replicate()], run_check=False))


def local(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """This rank's part of a sharded parameter, or a replicated one used on whole sequences, cast to `dtype`.

    The cast is part of the graph: with float32 parameters and bfloat16 activations, gradients arrive as float32.
    """
    assert isinstance(parameter, DTensor)
    return parameter.to_local().to(dtype)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of any tensor of a run's state: of a distributed one its shard, of another one all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local_part(tensor: Tensor, part: Tensor) -> Tensor:
    """A tensor placed as `tensor`, of which this rank holds `part`, also in other memory than that of its mesh."""
    if not isinstance(tensor, DTensor):
        return part
    # `DTensor.from_local` would take the part to the mesh's device. PyTorch's own offload makes them like this, too.
    return DTensor(part, tensor._spec, requires_grad=False)


def placement_of(tensor: Tensor) -> str:
    """How a tensor is cut, in words such as `Shard(0) over tensor=2`; `whole` for one that every rank holds so."""
    if not isinstance(tensor, DTensor):
        return "whole"
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"axis {i}" for i in range(mesh.ndim))
    placements = zip(tensor.placements, names, strict=True)
    return ", ".join(f"{_word(place)} over {name}={mesh.size(i)}" for i, (place, name) in enumerate(placements))


def _word(placement: Placement) -> str:
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else type(placement).__name__


def local_on_sequence(parameter: Tensor, mesh: ParallelMesh, dtype: torch.dtype) -> Tensor:
    """A replicated parameter used between the parallel regions, where the sequence may be split.

    Under sequence parallelism its gradient is `Partial`: each rank has seen a part of the tokens.
    """
    assert isinstance(parameter, DTensor)
    placements = [Partial()] if mesh.sequence_parallel else [Replicate()]
    return parameter.to_local(grad_placements=placements).to(dtype)


def cut_dim(parameter: Tensor) -> int | None:
    """The dimension along which a parameter is cut over the tensor axis; None where every rank holds it whole."""
    assert isinstance(parameter, DTensor)
    placement = parameter.placements[0]
    return placement.dim if isinstance(placement, Shard) else None
