"""Part of images as a tensor that knows its positions.

A plain module adds images, joins their channels and applies activations to them. It therefore gets a tensor. The
functions that a part accepts are those that compute each position on its own; all others are refused with their place
in the user's code.
"""

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree

from crosscut.config import LayoutError
from crosscut.cutting.images.places import told_place
from crosscut.cutting.images.positions import PositionsKept
from crosscut.parallel import copy_to_tensor_parallel
from crosscut.parallel.spatial import CutImage, ImageGrid, Span, move_image

_LEAVING = {
    *("__array__", "__dlpack__", "allclose", "equal", "is_nonzero", "numpy", "storage", "to_dlpack", "tolist"),
    *("typed_storage", "untyped_storage"),
}
"""Functions that pass values to code that nobody watches."""
_S = TypeVar("_S", bound=Tensor)
_TOLD = ("__format__", "__repr__", "__str__")

Place = tuple[EllipsisType | slice, ...]
"""Index of a part in the whole tensor."""


class Sharing(Protocol):
    """Ranks that share images."""

    def entered(self, x: Tensor) -> Tensor:
        """Pass a whole tensor into code that runs on parts."""

    def moved(self, x: Tensor, spans: tuple[Span, ...], to: tuple[Span, ...]) -> Tensor:
        """Divide an image anew."""

    def places(self, spans: tuple[Span, ...]) -> list[Place]:
        """Return the places of the parts of all ranks."""


class OnGrid:
    """Ranks of a grid."""

    def __init__(self, grid: ImageGrid) -> None:
        self.grid = grid

    def entered(self, x: Tensor) -> Tensor:
        """Apply the paper's f over the ranks of the grid. Backward: all-reduce of the gradient."""
        return copy_to_tensor_parallel(x, self.grid.ranks)

    def moved(self, x: Tensor, spans: tuple[Span, ...], to: tuple[Span, ...]) -> Tensor:
        """Send each rank its new positions (`move_image`)."""
        return move_image(CutImage(x, spans, self.grid), to).x

    def places(self, spans: tuple[Span, ...]) -> list[Place]:
        """Return the places in the order of the ranks of the grid."""
        return [place_of(spans, at) for at in ranks_of([axis.size for axis in self.grid.axes])]


def ranks_of(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Position along each axis of all ranks of a grid, in the order of the ranks."""
    return [tuple(at) for at in torch.cartesian_prod(*map(torch.arange, sizes)).view(-1, len(sizes)).tolist()]


def place_of(spans: Sequence[Span], at: Sequence[int]) -> Place:
    """Place of a rank's part in the whole images."""
    return (..., *(slice(*span.part(rank)) for span, rank in zip(spans, at, strict=True)))


class ImagePart(Tensor):
    """Part of images [B, C, own positions]: an ordinary tensor with the division of the whole images. Only the last
    dimensions, the directions of the image, are divided.

    Functions that compute each position on its own return parts. In the backward pass, the gradients of whole tensors
    that they combine with parts are summed over the ranks. Parts with other positions of images of the same size are
    moved to the positions of the first part. Raises `LayoutError` for all other functions.
    """

    spans: tuple[Span, ...]
    sharing: Sharing

    @staticmethod
    def of(x: Tensor, spans: tuple[Span, ...], sharing: Sharing) -> "ImagePart":
        """Make a tensor a part, given its positions. A view of it would lose its hooks when it is changed in place."""
        x.__class__ = ImagePart
        part = cast(ImagePart, x)
        part.spans, part.sharing = spans, sharing
        return part

    def plain(self) -> Tensor:
        """Return the positions as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def as_subclass(self, cls: type[_S]) -> _S:
        """Raise `LayoutError`: a tensor of another class would lose its positions. PyTorch calls no
        `__torch_function__` for this method.
        """
        if torch._C._is_torch_function_enabled():
            raise _leaving("as_subclass")
        return super().as_subclass(cls)

    def uncut_places(self) -> list[Place]:
        """Return the places of the parts of all ranks in the whole images. `verification` calls this method."""
        return self.sharing.places(self.spans)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        _types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call a function on this rank's positions."""
        if isinstance(func, OpOverload) and torch._C._current_graph_task_id() >= 0:
            with torch._C.DisableTorchFunctionSubclass():  # a dispatch mode of the backward pass calls the operator
                return func(*args, **(kwargs or {}))
        first = next(each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, ImagePart))
        name = func.__name__
        if name in _TOLD:
            return f"ImagePart({tuple(first.shape)} of {[span.size for span in first.spans]})"
        _require_known(name, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            given, options = _pytree.tree_map(lambda each: _aligned(name, each, first), (args, kwargs or {}))
            parts = [each for each in _pytree.tree_leaves((given, options)) if isinstance(each, ImagePart)]
            entered, chosen = _pytree.tree_map(lambda each: _entered(each, first), (given, options))
            with PositionsKept(name, parts, len(first.spans)) as kept:
                result = func(*entered, **chosen)
            tensors = [each for each in _pytree.tree_leaves(result) if isinstance(each, Tensor)]
            if tensors and not any(kept.has(each) for each in tensors):
                return func(*given, **options)  # as in `scale.to(part)`: f follows where the result meets a part
            return _pytree.tree_map(lambda each: _wrapped(each, kept, first), result)


def _require_known(name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Raise `LayoutError` for functions whose effect cannot be watched."""
    is_in_place = name.endswith("_") and not name.endswith("__")
    changed = args[0] if args else kwargs.get("input")
    gets_out = kwargs.get("out") is not None
    if name in _LEAVING or gets_out or (is_in_place and not isinstance(changed, ImagePart)):
        raise _leaving(name)


def _leaving(name: str) -> LayoutError:
    return LayoutError(
        f"`{name}` must not pass parts of an image to values that are no parts, but does, {told_place()}. Use a "
        "function that returns a new tensor, or gather the image before (`spatial_gather_output`)."
    )


def _entered(value: object, first: ImagePart) -> object:
    """Apply the paper's f to a whole tensor that needs a gradient."""
    if not isinstance(value, Tensor) or isinstance(value, ImagePart) or not value.requires_grad:
        return value
    return first.sharing.entered(value)


def _aligned(name: str, value: object, first: ImagePart) -> object:
    """Return a part with the positions of the first part, and other arguments as they are."""
    if not isinstance(value, ImagePart) or value.spans == first.spans:
        return value
    sizes, wanted = ([span.size for span in each.spans] for each in (value, first))
    if sizes != wanted:
        raise LayoutError(
            f"`{name}` must combine images of the same size, but combines {sizes} with {wanted}, {told_place()}. "
            "Gather the smaller image before (`spatial_gather_output`), or change its size in a layer."
        )
    return ImagePart.of(first.sharing.moved(value.plain(), value.spans, first.spans), first.spans, first.sharing)


def _wrapped(value: object, kept: PositionsKept, first: ImagePart) -> object:
    """Return a result as a part if it has positions of the image."""
    if not isinstance(value, Tensor) or isinstance(value, ImagePart) or not kept.has(value):
        return value
    return ImagePart.of(value, first.spans, first.sharing)
