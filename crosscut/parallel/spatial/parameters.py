"""Parameters of spatial layers, which every rank of a grid holds whole."""

from typing import Any

from torch import Tensor, nn

from crosscut.config import LayoutError
from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.state.parameters import local_part, replicated_parameter


def copied_parameter(source: Tensor, mesh: ParallelMesh) -> nn.Parameter:
    """Create a replicated parameter with the shape, the element type and the values of `source`. If `source` is on the
    device `meta`, the parameter is created as in all other layers, with zeros.
    """
    device = mesh.parameter_device if source.is_meta else mesh.device
    parameter = replicated_parameter(tuple(source.shape), mesh.tensor, dtype=source.dtype, device=device)
    if not source.is_meta:
        local_part(parameter.detach()).copy_(source.detach())
    return parameter


def require_kind(layer: Any, kind: type[Any] | tuple[type[Any], ...]) -> None:
    """Raise `LayoutError` if a layer does not have the kind that a spatial layer replaces."""
    if not isinstance(layer, kind):
        names = " or ".join(f"`nn.{each.__name__}`" for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise LayoutError(
            f"The layer must have the type {names}, but has the type `{type(layer).__name__}`. Use the spatial layer "
            "of this type."
        )
