"""Pooling of images whose directions are divided over ranks.

Maxima are over windows whose padding is -inf. An average is the mean of a window that is padded with 0, times the size
of the window and divided by the number of positions that PyTorch counts. None of the layers has parameters.

Shapes: B batch, C channels.
"""

from math import prod
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.config import LayoutError
from crosscut.parallel.exchange import Range
from crosscut.parallel.spatial.image import IMAGE_DIM, CutImage, pointwise
from crosscut.parallel.spatial.parameters import require_directions_of, require_kind
from crosscut.parallel.spatial.reaches import Window, bins
from crosscut.parallel.spatial.windows import copy_windows, per_direction

_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_AVG_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_ADAPTIVE_MAX_POOLS = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
_MAX = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_AVG = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


def _windows(layer: Any, num: int) -> list[Window]:
    """Return the reach of pooling in each direction. Raises `LayoutError` if a window could lie in the padding."""
    kernels, paddings = per_direction(layer.kernel_size, num), per_direction(layer.padding, num)
    strides = per_direction(layer.stride, num)
    dilations = per_direction(getattr(layer, "dilation", 1), num)
    for kernel, padding in zip(kernels, paddings, strict=True):
        if 2 * padding > kernel:
            raise LayoutError(
                f"`padding` of pooling must be at most half of `kernel_size` ({kernel}), but is {padding}. Pad less, "
                "or choose a larger kernel."
            )
    of_directions = zip(kernels, strides, dilations, paddings, strict=True)
    return [Window(k, s, d, padding, padding, layer.ceil_mode) for k, s, d, padding in of_directions]


def _require_values_only(layer: Any) -> None:
    if layer.return_indices:
        raise LayoutError(
            "`return_indices` of pooling must be false for images that ranks share, but is true. Indices count the "
            "positions of a whole image. Remove the option."
        )


@final
class SpatialMaxPool(nn.Module):
    """Maxima over windows of images that ranks share, with the settings of `layer`: an `nn.MaxPool1d`, `2d` or `3d`.

    Forward and backward: for each direction, one message to each rank that needs positions of this rank. If all values
    of a window are -inf, the gradient may go to the padding. Raises `LayoutError` if `layer` is another layer or
    returns indices, or if its padding is more than half of its kernel.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.kind = require_kind(layer, *_MAX_POOLS)
        _require_values_only(layer)
        self.layer = layer

    def forward(self, image: CutImage) -> CutImage:
        """Return this rank's outputs [B, C, ...]."""
        num = len(image.spans)
        require_directions_of(self.kind, num)
        reaches = _windows(self.layer, num)
        windows = copy_windows(image, reaches, fill=float("-inf"))
        x = windows.at_least([reach.extent for reach in reaches])
        kernels, strides, dilations, *_ = zip(*reaches, strict=True)
        with windows.saving:
            y = _MAX[num - 1](x, kernels, strides, 0, dilations)
        return windows.result(y)


@final
class SpatialAvgPool(nn.Module):
    """Averages over windows of images that ranks share, with the settings of `layer`: an `nn.AvgPool1d`, `2d` or `3d`.

    Forward and backward: for each direction, one message to each rank that needs positions of this rank. Raises
    `LayoutError` if `layer` is another layer, or if its padding is more than half of its kernel.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.kind = require_kind(layer, *_AVG_POOLS)
        self.layer: Any = layer

    def forward(self, image: CutImage) -> CutImage:
        """Return this rank's outputs [B, C, ...]."""
        num = len(image.spans)
        require_directions_of(self.kind, num)
        reaches = _windows(self.layer, num)
        windows = copy_windows(image, reaches)
        x = windows.at_least([reach.extent for reach in reaches])
        kernels, strides, *_ = zip(*reaches, strict=True)
        with windows.saving:
            y = _AVG[num - 1](x, kernels, strides)
        wide = torch.promote_types(x.dtype, torch.float32)
        of_directions = zip(reaches, windows.outputs, image.sizes, strict=True)
        counts = [self._counts(*each, device=x.device).to(wide) for each in of_directions]
        divisor = getattr(self.layer, "divisor_override", None) or _outer(counts)
        factor = prod(kernels) / divisor
        return pointwise(lambda y: (y * factor).to(x.dtype), windows.result(y))

    def _counts(self, reach: Window, outputs: Range, size: int, *, device: torch.device) -> Tensor:
        """Return the number of positions along one direction that PyTorch counts for each output."""
        starts = torch.arange(outputs.start, outputs.stop, device=device) * reach.stride - reach.before
        if self.layer.count_include_pad:
            return (starts + reach.kernel).clamp(max=size + reach.after) - starts
        return (starts + reach.kernel).clamp(max=size) - starts.clamp(min=0)


def _outer(factors: list[Tensor]) -> Tensor:
    """Return the products of one number of each list: [n_0, n_1, ...]."""
    product = factors[0]
    for factor in factors[1:]:
        product = product.unsqueeze(-1) * factor
    return product


@final
class SpatialAdaptiveMaxPool(nn.Module):
    """Maxima over bins of images that ranks share, with the output size of `layer`: an `nn.AdaptiveMaxPool1d`, `2d` or
    `3d`.

    Forward and backward: for each direction, one message to each rank whose bins have positions of this rank. Raises
    `LayoutError` if `layer` is another layer or returns indices.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.kind = require_kind(layer, *_ADAPTIVE_MAX_POOLS)
        _require_values_only(layer)
        self.layer: Any = layer

    def forward(self, image: CutImage) -> CutImage:
        """Return this rank's outputs [B, C, ...]."""
        num = len(image.spans)
        require_directions_of(self.kind, num)
        lengths = zip(per_direction(self.layer.output_size, num), image.sizes, strict=True)
        reaches = [bins(size if length is None else length, size) for length, size in lengths]
        windows = copy_windows(image, reaches)
        x = windows.x
        for i in reversed(range(num)):  # a row's first maximum before a column's, as PyTorch chooses among equals
            own = reaches[i].of_outputs[slice(*windows.outputs[i])]
            x = _maxima(x, i, own, windows.reads[i].start)
        return windows.result(x)


def _maxima(x: Tensor, direction: int, own: tuple[Range, ...], first: int) -> Tensor:
    """Return the maximum of each of this rank's bins along one direction. `x` begins at the position `first`."""
    dim, num = IMAGE_DIM + direction, x.dim() - IMAGE_DIM
    columns = [x.narrow(dim, each.start - first, each.size) for each in own]
    sizes = [[each.size if i == direction else 1 for i in range(num)] for each in own]
    if 0 in x.shape:  # no output of this rank has a value
        pooled = [column.narrow(dim, 0, 1) for column in columns]
    else:
        pooled = [_MAX[num - 1](column, size) for column, size in zip(columns, sizes, strict=True)]
    return torch.cat([x.narrow(dim, 0, 0), *pooled], dim)
