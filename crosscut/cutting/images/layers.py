"""Layers of a cut module that compute on parts of images.

As all layers of a cut module, a layer keeps its class, its attributes and its parameters, and gets another `forward`.
Each rank uses all weights on its own positions, so the gradients of the weights are summed over the ranks of the grid
in the backward pass. Then all gradients are complete, as in any cut module.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from crosscut.config import LayoutError
from crosscut.cutting.images.part import ImagePart, OnGrid, place_of
from crosscut.cutting.images.rules import spatial_layer
from crosscut.cutting.layers import Site, in_order, used_part
from crosscut.cutting.plan import IMAGES, Plan, Style
from crosscut.cutting.resolution import Resolved
from crosscut.parallel import ParallelMesh, copy_to_tensor_parallel
from crosscut.parallel.operators import exchanged
from crosscut.parallel.spatial import CutImage, ImageGrid, SpatialBatchNorm, gather_image, make_grid, scatter_image


@dataclass(eq=False)
class ImageLayer:
    """Layer over images on one rank."""

    name: str
    style: Style
    grid: ImageGrid
    spatial: nn.Module | None
    """Spatial layer with the settings of the layer, without parameters and buffers of its own. None for a module that
    keeps its own code.
    """


def make_image_layers(resolved: Resolved, plan: Plan, mesh: ParallelMesh) -> dict[str, ImageLayer]:
    """Make the layers over images that a plan names, by their names. Every rank must call this function, before the
    module changes. On one context rank, the grid has one rank. Raises `LayoutError` if the grid does not fit the ranks.
    """
    found = {name: layer for name, layer in resolved.layers.items() if layer.rule.style in IMAGES}
    if not found:
        return {}
    grid = make_grid(mesh, *(plan.grid if mesh.context.size > 1 else (1,) * len(plan.grid)))
    return {
        name: ImageLayer(name, layer.rule.style, grid, _bare(spatial_layer(layer.module, mesh), mesh))
        for name, layer in found.items()
    }


def _bare(spatial: nn.Module | None, mesh: ParallelMesh) -> nn.Module | None:
    """Remove the parameters and buffers of a spatial layer, which reads those of the cut layer. A batch norm sums the
    gradients of its weights itself, unless its statistics include other data ranks.
    """
    if spatial is not None:
        spatial._parameters.clear()
        spatial._buffers.clear()
    if isinstance(spatial, SpatialBatchNorm):
        spatial.sums_gradients = mesh.tokens.size == mesh.context.size
    return spatial


def become_image_layer(module: nn.Module, site: Site, layer: ImageLayer) -> None:
    """Turn a module into one that computes on parts of images."""
    kind: Any = type(module)
    module.__class__ = _subclass(kind, layer.style, tuple(module._parameters))
    module.cut_site = site  # type: ignore[assignment]  # not a module
    vars(module)["image_layer"] = layer  # no submodule


@cache
def _subclass(kind: type[nn.Module], style: Style, names: tuple[str, ...]) -> type[nn.Module]:
    """Make the subclass of a module's class. Code reads a weight without f, which follows where it meets a part: the
    gradient of a regulariser is whole on every rank.
    """
    attributes: dict[str, object] = {name: property(partial(used_part, name, enters=False)) for name in names}
    attributes |= {"in_uncut_order": in_order, "forward": _forward_of(kind, style)}
    return type(kind.__name__, (kind,), attributes)


def _forward_of(kind: type[nn.Module], style: Style) -> Callable[..., object]:
    """Return the `forward` of a style. The first argument of the module's own `forward` is the image."""
    first = [*inspect.signature(kind.forward).parameters][1]

    def forward(module: nn.Module, *args: object, **kwargs: object) -> object:
        layer: ImageLayer = vars(module)["image_layer"]
        if not args and first not in kwargs:
            raise _wrong(layer, f"an image as its first argument, `{first}`", "none", "Pass one.")
        with torch._C.DisableTorchFunctionSubclass():
            x = _entering(layer, args[0] if args else kwargs[first])
        if layer.spatial is not None:
            with torch._C.DisableTorchFunctionSubclass():
                y: object = _computed(module, layer.spatial, x, layer.grid)
        elif args:
            y = kind.forward(module, x, *args[1:], **kwargs)
        else:
            y = kind.forward(module, **kwargs | {first: x})
        return gathered(y, layer.name) if style is Style.SPATIAL_GATHER_OUTPUT else y

    return forward


def _entering(layer: ImageLayer, x: object) -> ImagePart:
    """Return the part of images that enters a layer."""
    if layer.style is Style.SPATIAL_SPLIT_INPUT:
        if not isinstance(x, Tensor) or isinstance(x, ImagePart):
            remedy = "Change its style to `spatial`."
            raise _wrong(layer, "whole images, of which it takes a part", _told(x), remedy)
        image = scatter_image(copy_to_tensor_parallel(x, layer.grid.ranks), layer.grid)
        return ImagePart.of(image.x, image.spans, OnGrid(layer.grid))
    if not isinstance(x, ImagePart):
        remedy = "Change its style to `spatial_split_input` if images enter here, or to `replicate`."
        raise _wrong(layer, "a part of images", _told(x), remedy)
    return x


def _wrong(layer: ImageLayer, must_be: str, what: str, remedy: str) -> LayoutError:
    return LayoutError(f"`{layer.name}` with the style `{layer.style}` must get {must_be}, but gets {what}. {remedy}")


def _told(x: object) -> str:
    return (
        "a part of images" if isinstance(x, ImagePart) else "a whole tensor" if isinstance(x, Tensor) else f"{type(x)}"
    )


def _computed(module: nn.Module, spatial: nn.Module, x: ImagePart, grid: ImageGrid) -> ImagePart:
    """Run the spatial layer with the parameters, the buffers and the mode of the cut layer."""
    spatial._buffers, spatial.training = module._buffers, module.training
    if isinstance(spatial, SpatialBatchNorm):
        spatial.follow(module)
    has_sums = isinstance(spatial, SpatialBatchNorm) and spatial.sums_gradients and spatial.takes_statistics
    weights = {name: used_part(name, module, enters=not has_sums) for name in module._parameters}
    try:
        vars(spatial).update(weights)
        y: CutImage = spatial(CutImage(x.plain(), x.spans, grid))
    finally:  # a module with values of a forward pass cannot be copied
        for name in weights:
            vars(spatial).pop(name, None)
    return ImagePart.of(y.x, y.spans, x.sharing)


def gathered(part: object, name: str = "the argument") -> Tensor:
    """Return the whole images [B, C, ...] of a part, on every rank of the grid.

    Forward: each rank sends its part to all others, along one direction after another. Backward: each rank keeps its
    part of the gradient, which must be the same on all ranks. Raises `LayoutError` if `part` is no part of images.
    """
    if not isinstance(part, ImagePart):
        raise LayoutError(
            f"The output of `{name}` must be a part of images to be gathered, but is a {type(part).__name__}. Give "
            "the style `spatial_gather_output` to the last module that returns one image in parts."
        )
    grid, spans = cast(OnGrid, part.sharing).grid, part.spans
    with torch._C.DisableTorchFunctionSubclass():
        return exchanged(
            part.plain(),
            grid.ranks,
            forward=lambda x, _: gather_image(CutImage(x, spans, grid)),
            backward=lambda grad, _: grad[place_of(spans, grid.place)].contiguous(),
        )
