"""Parameters of spatial layers, which every rank of a grid holds whole."""

from typing import Any

import torch
from torch import Tensor, nn

from crosscut.config import LayoutError
from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.state.parameters import ParameterMaker, local_part


def copied_parameter(source: Tensor, mesh: ParallelMesh) -> nn.Parameter:
    """Create a replicated parameter with the shape, the element type and the values of `source`. With sharding, and if
    `source` has no values, the parameter is on the device `meta` or zero.
    """
    parameter = ParameterMaker(mesh, source.dtype).replicated(*source.shape)
    if not (parameter.is_meta or source.is_meta):
        with torch.no_grad():
            local_part(parameter).copy_(source)
    return parameter


def require_kind(layer: Any, kind: type[Any] | tuple[type[Any], ...]) -> None:
    """Raise `LayoutError` if a layer does not have the kind that a spatial layer replaces."""
    if not isinstance(layer, kind):
        names = " or ".join(f"`nn.{each.__name__}`" for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise LayoutError(
            f"The layer must have the type {names}, but has the type `{type(layer).__name__}`. Use the spatial layer "
            "of this type."
        )
