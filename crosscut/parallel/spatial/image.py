"""Images whose directions are divided over the ranks of a grid.

    grid of 2 x 2 ranks over height and width        CutImage of rank 1: x [B, C, H_0, W_1]

    |  rank 0: H_0 x W_0  |  rank 1: H_0 x W_1  |    and the spans of the whole image, (H_0, H_1) and (W_0, W_1)
    |  rank 2: H_1 x W_0  |  rank 3: H_1 x W_1  |

The ranks of the grid are the context ranks of a layout: they share each image as they would share each sequence. Each
rank sees different positions, holds all parameters, and computes its term of the loss. `GradientReducer` therefore sums
the gradients over the grid together with the data ranks.

Shapes: B batch, C channels, and the directions of an image, depth, height and width or the last ones of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree

from crosscut.config import LayoutError
from crosscut.parallel.exchange import ExchangePlan, fetched
from crosscut.parallel.mesh import Axis, ParallelMesh
from crosscut.parallel.spatial.plan import DIRECTIONS, plan_gather, plan_move
from crosscut.parallel.spatial.spans import Span, require_directions

IMAGE_DIM = 2
"""First dimension that is a direction of the image."""


@dataclass(frozen=True)
class ImageGrid:
    """Ranks that share each image, as one rank sees them."""

    axes: tuple[Axis, ...]
    """One axis for each direction of an image: `depth`, `height` and `width`, or the last ones of them."""
    ranks: Axis
    """All ranks of the grid: the context axis of the layout."""

    @property
    def place(self) -> tuple[int, ...]:
        """Position of this rank along each axis."""
        return tuple(axis.rank for axis in self.axes)


def make_grid(mesh: ParallelMesh, *sizes: int) -> ImageGrid:
    """Arrange the context ranks of a mesh as a grid, with the number of ranks along each direction of an image: two
    sizes for images with height and width. A direction of one rank is not divided. The ranks along the last direction
    are adjacent. Every rank must call this function.

    Raises `LayoutError` if there are not one to three sizes, or if their product is not the number of context ranks.
    """
    text = " x ".join(map(str, sizes))
    if not 1 <= len(sizes) <= len(DIRECTIONS):
        raise LayoutError(
            f"A grid must have one to three sizes, one for each direction of an image, but has {len(sizes)}. Pass one "
            "number of ranks per direction."
        )
    if min(sizes) < 1 or prod(sizes) != mesh.context.size:
        raise LayoutError(
            f"The sizes of a grid must multiply to `layout.context` ({mesh.context.size}), but are {text} = "
            f"{prod(sizes)}. Change the sizes or the layout."
        )
    named = dict(zip(DIRECTIONS[-len(sizes) :], sizes, strict=True))
    lines = _device_mesh(mesh, {name: size for name, size in named.items() if size > 1})
    taken = {axis.group_name for axis in mesh.groups}  # PyTorch may give a direction the group of all context ranks
    axes = (
        mesh.context.alone(name) if size == 1 else Axis.of(lines, name).apart_from(taken)
        for name, size in named.items()
    )
    return ImageGrid(tuple(axes), mesh.context)


def _device_mesh(mesh: ParallelMesh, sizes: dict[str, int]) -> DeviceMesh:
    """Make the device mesh of the axes with several ranks. The context ranks of all other ranks are arranged alike."""
    if not sizes:
        return mesh.context.device_mesh
    stride = mesh.layout.ranks.line(mesh.context.name).stride
    ranks = torch.arange(dist.get_world_size()).view(-1, mesh.context.size, stride).movedim(1, 2)
    return DeviceMesh(mesh.device.type, ranks.reshape(-1, *sizes.values()), mesh_dim_names=("others", *sizes))


@dataclass(frozen=True, eq=False)
class CutImage:
    """Images [B, C, ...] of which this rank has a part, with the spans of the whole images.

    Each layer of this package takes and returns a `CutImage`. `pointwise` applies functions of single
    positions.
    """

    x: Tensor
    """This rank's part: [B, C, own positions of each direction]. A part may be empty."""
    spans: tuple[Span, ...]
    """Division of each direction over the ranks."""
    grid: ImageGrid

    @property
    def directions(self) -> range:
        """Dimensions of `x` that are directions of the image."""
        return range(IMAGE_DIM, self.x.dim())

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of the whole image in each direction."""
        return tuple(span.size for span in self.spans)


_pytree.register_pytree_node(
    CutImage,
    lambda image: ([image.x], (image.spans, image.grid)),
    lambda parts, context: CutImage(*parts, *context),
)  # `fully_shard` looks for tensors in the arguments and the result of a layer


def scatter_image(x: Tensor, grid: ImageGrid, spans: Sequence[Span] | None = None) -> CutImage:
    """Keep this rank's part of images [B, C, ...] that every rank of the grid has. Without `spans`, the parts are as
    equal as possible.

    Forward and backward: sends nothing. The gradient of `x` covers only this rank's part.

    Raises `LayoutError` if the images do not have the directions of the grid, or if a span does not fit the image or
    the axis.
    """
    num = len(grid.axes)
    if x.dim() != IMAGE_DIM + num:
        raise LayoutError(
            f"Images on this grid must have {num} directions after batch and channels, but have the shape "
            f"{tuple(x.shape)}. Make a grid with one size per direction."
        )
    sizes = x.shape[IMAGE_DIM:]
    spans = spans or [Span.even(size, axis.size) for size, axis in zip(sizes, grid.axes, strict=True)]
    _require_spans(spans, grid, sizes)
    for dim, (span, rank) in enumerate(zip(spans, grid.place, strict=True), IMAGE_DIM):
        x = x.narrow(dim, span.part(rank).start, span.part(rank).size)
    return CutImage(x.contiguous(), tuple(spans), grid)


def _require_spans(spans: Sequence[Span], grid: ImageGrid, sizes: Sequence[int]) -> None:
    require_directions("`spans`", len(spans), len(grid.axes))
    for span, axis, size in zip(spans, grid.axes, sizes, strict=True):
        _require_span(span, axis, size)


def _require_span(span: Span, axis: Axis, size: int) -> None:
    is_sorted = list(span.bounds) == sorted(span.bounds) and span.bounds[0] == 0
    if size < 1 or span.size != size or span.num_ranks != axis.size or not is_sorted:
        raise LayoutError(
            f"The span along {axis.name} must divide at least one position, here {size}, into {axis.size} parts, but "
            f"has the bounds {span.bounds}. Make the span with `Span.even` or `Span.of_parts`."
        )


def gather_image(image: CutImage) -> Tensor:
    """Return the whole images [B, C, ...] on every rank of the grid.

    Forward: each rank sends its part to all others, along one direction after another. Backward: the gradients of all
    ranks are returned to the parts and added. The loss is then the sum over the ranks: if all ranks compute the same
    loss from the whole image, divide it by the number of ranks of the grid.
    """
    return _moved(image, [plan_gather(span) for span in image.spans])


def move_image(image: CutImage, spans: Sequence[Span]) -> CutImage:
    """Divide the images anew, for example to add or join images with different spans.

    Forward: one message to each rank that needs positions of this rank, along one direction after another. Backward: as
    many messages, in the other direction. Raises `LayoutError` if a span does not fit the image or the axis.
    """
    _require_spans(spans, image.grid, image.sizes)
    plans = [plan_move(held, to) for held, to in zip(image.spans, spans, strict=True)]
    return CutImage(_moved(image, plans), tuple(spans), image.grid)


def _moved(image: CutImage, plans: Sequence[ExchangePlan]) -> Tensor:
    x = image.x
    for dim, axis, plan in zip(image.directions, image.grid.axes, plans, strict=True):
        x = fetched(x, axis, dim, plan)
    return x


def pointwise(function: Callable[..., Tensor], *images: CutImage) -> CutImage:
    """Apply a function that computes each position on its own to the parts of one or several images: an activation, a
    sum, a concatenation of channels. Sends nothing.

    Raises `LayoutError` if the images have different spans (`move_image` changes the spans of an image), or if the
    result has other positions.
    """
    first, *others = images
    for other in others:
        if other.spans != first.spans:
            raise LayoutError(
                f"Images must have the same spans to be combined, but have {_bounds(first)} and {_bounds(other)}. Call "
                "`move_image` with the spans of one image on the other."
            )
    y = function(*(image.x for image in images))
    if y.shape[IMAGE_DIM:] != first.x.shape[IMAGE_DIM:]:
        raise LayoutError(
            f"A function of `pointwise` must keep the positions of each part, but changes the shape "
            f"{tuple(first.x.shape)} to {tuple(y.shape)}. Use a spatial layer for functions that mix positions."
        )
    return CutImage(y, first.spans, first.grid)


def _bounds(image: CutImage) -> list[tuple[int, ...]]:
    return [span.bounds for span in image.spans]
