"""Parameters of spatial layers, which every rank of a grid holds whole."""

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from crosscut.config import LayoutError
from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.spatial.spans import require_directions
from crosscut.parallel.state.parameters import local_part, replicated_parameter


def copied_parameter(source: Tensor, mesh: ParallelMesh) -> nn.Parameter:
    """Create a replicated parameter with the shape, the element type and the values of `source`, which needs a gradient
    if `source` does. If `source` is on the device `meta`, the parameter is created as in all other layers, with zeros.
    """
    device = mesh.parameter_device if source.is_meta else mesh.device
    parameter = replicated_parameter(tuple(source.shape), mesh.tensor, dtype=source.dtype, device=device)
    if not source.is_meta:
        local_part(parameter.detach()).copy_(source.detach())
    parameter.requires_grad_(source.requires_grad)
    return parameter


def require_kind(layer: Any, *kinds: type[Any]) -> type[Any]:
    """Return the kind of a layer among the kinds that a spatial layer replaces. Raises `LayoutError` if the layer has
    another kind, or does not compute what PyTorch's layer computes from its parameters.
    """
    kind = next((each for each in kinds if isinstance(layer, each)), None)
    if kind is None:
        names = " or ".join(f"`nn.{each.__name__}`" for each in kinds)
        raise LayoutError(
            f"The layer must have the type {names}, but has the type `{type(layer).__name__}`. Use the spatial layer "
            "of this type."
        )
    reason = _change(layer, kind)
    if reason:
        raise LayoutError(
            f"The layer must compute what `nn.{kind.__name__}` computes, but `{type(layer).__name__}` {reason}. Use a "
            "layer of PyTorch without this change."
        )
    return kind


def require_directions_of(kind: type[Any], num: int) -> None:
    """Raise `LayoutError` if layers of a kind are not made for images with `num` directions."""
    require_directions(f"`nn.{kind.__name__}`", int(kind.__name__[-2]), num)  # PyTorch's names end in 1d, 2d or 3d


def _change(layer: Any, kind: type[Any]) -> str | None:
    """Return the way in which a layer changes what its kind computes, or None."""
    for name in ("forward", "_conv_forward"):
        if getattr(getattr(layer, name, None), "__func__", None) is not getattr(kind, name, None):
            return f"has its own `{name}`"
    if is_parametrized(layer):
        return "is parametrised"
    return "has hooks" if layer._forward_pre_hooks or layer._forward_hooks else None  # older norms of weights are hooks
