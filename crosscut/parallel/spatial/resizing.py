"""Changes of an image's size that are linear along each direction: interpolation, and averages over bins.

    Y = M_height X M_width^T

PyTorch itself gives the matrix of a direction: the result for the columns of the identity. Each rank multiplies by the
rows of its outputs and the columns of the positions that these rows read, so scales, rounding and edges are PyTorch's.
In an average over the whole image, terms of the outputs are fewer than these positions: a rank then multiplies its own
positions, and the ranks of the outputs add the terms.

Shapes: B batch, C channels, L positions of a direction before, M after.
"""

from abc import ABC, abstractmethod
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.parallel.exchange import Range, fetched, summed
from crosscut.parallel.spatial.image import CutImage
from crosscut.parallel.spatial.parameters import require_directions_of, require_kind
from crosscut.parallel.spatial.plan import plan_linear_step
from crosscut.parallel.spatial.reaches import Listed
from crosscut.parallel.spatial.spans import require_directions
from crosscut.parallel.spatial.windows import per_direction

_DIRECTIONS_OF_MODES = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}


class _Resize(NamedTuple):
    """Change of the size of one direction."""

    mode: str
    """Mode of `torch.nn.functional.interpolate`; "area" for averages over bins."""
    size: int | None
    scale: float | None
    aligns_corners: bool | None = None
    rounds_scale: bool | None = None
    """Whether the scale is computed anew from the sizes (`recompute_scale_factor`)."""

    def columns(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return the matrix [M, L] for L positions."""
        options: dict[str, Any] = {"mode": self.mode, "align_corners": self.aligns_corners}
        options |= {"recompute_scale_factor": self.rounds_scale}
        identity = torch.eye(size, dtype=dtype).unsqueeze(1)
        if self.mode != "bicubic":
            return F.interpolate(identity, self.size, self.scale, **options).squeeze(1).T
        sizes, scales = self.size and (self.size, 1), self.scale and (self.scale, 1.0)
        return F.interpolate(identity.unsqueeze(-1), sizes, scales, **options).flatten(1).T  # there is no cubic in 1d


@lru_cache(maxsize=256)
def _matrix(resize: _Resize, size: int, dtype: torch.dtype) -> tuple[Tensor, Listed]:
    """Return the matrix of a direction, and the reach of its rows."""
    with torch.inference_mode(False), torch.no_grad():  # evaluation may be the first to need a matrix of training
        matrix = resize.columns(size, dtype)
    is_read = matrix != 0
    first, last = is_read.byte().argmax(1), size - 1 - is_read.flip(1).byte().argmax(1)
    return matrix, Listed(tuple(Range(a, b + 1) for a, b in zip(first.tolist(), last.tolist(), strict=True)))


class _Resizing(nn.Module, ABC):
    """Change of the size of images that ranks share."""

    @abstractmethod
    def resizes(self, num: int) -> list[_Resize]:
        """Return the change of the size of each of `num` directions."""

    def forward(self, image: CutImage) -> CutImage:
        """Return this rank's outputs [B, C, ...]. Products and sums are at least in float32, also under autocast."""
        wide = torch.promote_types(image.x.dtype, torch.float32)
        resizes = zip(self.resizes(len(image.spans)), image.sizes, strict=True)
        found = [_matrix(resize, size, wide) for resize, size in resizes]
        steps = [plan_linear_step(span, reach) for span, (_, reach) in zip(image.spans, found, strict=True)]
        of_directions = list(zip(image.directions, image.grid.axes, steps, strict=True))
        y = image.x
        for dim, axis, step in of_directions:
            y = fetched(y, axis, dim, step.exchange)
        y = y.to(wide)
        kind = y.device.type
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
            for (dim, axis, step), (matrix, _) in zip(of_directions, found, strict=True):
                result, read = step.results(axis.rank), step.reads[axis.rank]
                own = matrix[result.start : result.stop, read.start : read.stop].to(y)
                y = (y.movedim(dim, -1) @ own.T).movedim(-1, dim)
        for dim, axis, step in of_directions:
            y = y if step.sums is None else summed(y, axis, dim, step.sums)
        y = y.to(image.x.dtype).contiguous()
        return CutImage(y, tuple(step.outputs for step in steps), image.grid)


@final
class SpatialUpsample(_Resizing):
    """Interpolation of images that ranks share, with the settings of `layer`, an `nn.Upsample`: any mode, any size and
    any scale.

    Forward and backward: for each direction, one message to each rank that needs positions of this rank. Raises
    `LayoutError` if `layer` is another layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        require_kind(layer, nn.Upsample)
        self.layer: Any = layer

    def resizes(self, num: int) -> list[_Resize]:
        """Return the change of the size of each of `num` directions."""
        layer = self.layer
        require_directions(f'`mode` "{layer.mode}"', _DIRECTIONS_OF_MODES.get(layer.mode, num), num)
        mode = "linear" if layer.mode in ("bilinear", "trilinear") else layer.mode
        sizes, scales = per_direction(layer.size, num), per_direction(layer.scale_factor, num)
        options = (layer.align_corners, layer.recompute_scale_factor)
        return [_Resize(mode, size, scale, *options) for size, scale in zip(sizes, scales, strict=True)]


@final
class SpatialAdaptiveAvgPool(_Resizing):
    """Averages over bins of images that ranks share, with the output size of `layer`: an `nn.AdaptiveAvgPool1d`, `2d`
    or `3d`.

    Forward and backward: for each direction, one message to each rank whose bins have positions of this rank: with the
    positions or, if these are fewer, with terms of the averages. Raises `LayoutError` if `layer` is another layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.kind = require_kind(layer, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
        self.layer: Any = layer

    def resizes(self, num: int) -> list[_Resize]:
        """Return the change of the size of each of `num` directions."""
        require_directions_of(self.kind, num)
        sizes = per_direction(self.layer.output_size, num)
        return [_Resize("area", size, 1.0 if size is None else None) for size in sizes]
