"""Convolutions over images whose directions are divided over ranks.

Every rank holds all weights, and computes the outputs of its own positions: Y_r = W * X_r', where X_r' is the rank's
part with halos. A rank's gradient of the weights covers only its own outputs, so `GradientReducer` sums it over the
grid together with the data ranks. Source: Dryden et al. 2019 (arXiv 1903.06681), sections 3 and 4.

Shapes: B batch, C channels in, F channels out, K kernel sizes.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.spatial.image import CutImage
from crosscut.parallel.spatial.overlap import own_windows
from crosscut.parallel.spatial.parameters import copied_parameter, require_directions_of, require_kind
from crosscut.parallel.spatial.reaches import Spread, Window
from crosscut.parallel.spatial.spans import require_room
from crosscut.parallel.spatial.windows import copy_windows
from crosscut.parallel.state.parameters import local

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


class _Settings:
    """Settings of a convolution of PyTorch."""

    def __init__(self, layer: Any) -> None:
        self.kernel: tuple[int, ...] = layer.kernel_size
        self.stride: tuple[int, ...] = layer.stride
        self.dilation: tuple[int, ...] = layer.dilation
        self.groups: int = layer.groups
        self.mode: str = layer.padding_mode
        self.padding = self._padding(layer.padding)
        self.more: tuple[int, ...] = layer.output_padding

    def _padding(self, padding: str | tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Padding before and after each direction."""
        if padding == "valid":
            return ((0, 0),) * len(self.kernel)
        if padding == "same":
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
            return tuple((total // 2, total - total // 2) for total in totals)
        return tuple((int(amount), int(amount)) for amount in padding)

    @property
    def windows(self) -> list[Window]:
        """Reach of a convolution in each direction."""
        of_directions = zip(self.kernel, self.stride, self.dilation, self.padding, strict=True)
        return [Window(k, s, d, before, after) for k, s, d, (before, after) in of_directions]

    @property
    def spreads(self) -> list[Spread]:
        """Reach of a transposed convolution in each direction."""
        of_directions = zip(self.kernel, self.stride, self.dilation, self.padding, self.more, strict=True)
        return [Spread(k, s, d, before, more) for k, s, d, (before, _), more in of_directions]


class _Convolution(nn.Module, ABC):
    """Convolution with the settings and the weights of a layer of PyTorch."""

    _kind: ClassVar[type[nn.Module]]

    def __init__(self, layer: nn.Module, *, mesh: ParallelMesh) -> None:
        super().__init__()
        require_kind(layer, self._kind)
        self.settings = _Settings(layer)
        self.weight = copied_parameter(layer.weight, mesh)  # type: ignore[arg-type]
        self.bias = None if layer.bias is None else copied_parameter(layer.bias, mesh)  # type: ignore[arg-type]
        self.train(layer.training)

    @abstractmethod
    def forward(self, image: CutImage) -> CutImage:
        """Return this rank's outputs [B, F, ...]. Raises `LayoutError` if the image has another number of directions
        than the layer, or if it is smaller than the kernel or the padding that repeats the image.
        """

    def _own(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return local(self.weight, dtype), None if self.bias is None else local(self.bias, dtype)


class _Direct(_Convolution):
    def forward(self, image: CutImage) -> CutImage:
        settings = self.settings
        require_directions_of(self._kind, len(image.spans))
        for size, (before, after) in zip(image.sizes, settings.padding, strict=True):
            require_room(size, before, after, settings.mode)
        weight, bias = self._own(image.x.dtype)
        convolve = _CONVOLUTIONS[len(settings.kernel) - 1]
        options = (settings.dilation, settings.groups)
        own = own_windows(image, settings.windows, weight) if settings.mode == "zeros" else None
        if own is not None:
            with own.windows.saving:
                y = convolve(own.windows.x, weight, bias, settings.stride, own.padding, *options)
            y = own.with_halos(y, lambda x, padding: convolve(x, weight, None, settings.stride, padding, *options))
            return own.windows.result(y)
        windows = copy_windows(image, settings.windows, mode=settings.mode)
        x = windows.at_least([window.extent for window in settings.windows])
        with windows.saving:
            y = convolve(x, weight, bias, settings.stride, 0, *options)
        return windows.result(y)


class _Transposed(_Convolution):
    def forward(self, image: CutImage) -> CutImage:
        settings, spreads = self.settings, self.settings.spreads
        require_directions_of(self._kind, len(image.spans))
        windows = copy_windows(image, spreads)
        x = windows.at_least([1] * len(spreads))
        of_directions = list(zip(spreads, windows.reads, windows.outputs, strict=True))
        ends = [spread.first(read.stop - 1) + spread.extent for spread, read, _ in of_directions]
        more = [max(part.stop - end, 0) * (part.size > 0) for part, end in zip(windows.outputs, ends, strict=True)]
        convolve = _TRANSPOSED[len(spreads) - 1]
        weights = self._own(x.dtype)
        with windows.saving:
            y = convolve(x, *weights, settings.stride, 0, more, settings.groups, settings.dilation)
        return windows.result(y, [spread.first(read.start) for spread, read, _ in of_directions])


@final
class SpatialConv1d(_Direct):
    """Convolution of sequences [B, C, W] that ranks share; see `SpatialConv2d`."""

    _kind = nn.Conv1d


@final
class SpatialConv2d(_Direct):
    """Convolution of images [B, C, H, W] that ranks share, with the settings and the weights of `layer`: any kernel,
    stride, padding, `padding_mode`, dilation and groups.

    Parameters: `weight` [F, C / groups, K] and, if the layer has one, `bias` [F] as Replicate. Forward: for each
    direction, one message to each rank that needs positions of this rank. Backward: as many messages with the gradients
    of these positions. For the backward pass, the rank's part and its halos are saved. Large parts are convolved
    while the halos of the last direction travel (`overlap`).

    Raises `LayoutError` if `layer` is not an `nn.Conv2d`. Source: Dryden et al. 2019, section 3.1.
    """

    _kind = nn.Conv2d


@final
class SpatialConv3d(_Direct):
    """Convolution of volumes [B, C, D, H, W] that ranks share; see `SpatialConv2d`."""

    _kind = nn.Conv3d


@final
class SpatialConvTranspose1d(_Transposed):
    """Transposed convolution of sequences [B, C, W] that ranks share; see `SpatialConvTranspose2d`."""

    _kind = nn.ConvTranspose1d


@final
class SpatialConvTranspose2d(_Transposed):
    """Transposed convolution of images [B, C, H, W] that ranks share, with the settings and the weights of `layer`.

    Parameters: `weight` [C, F / groups, K] and, if the layer has one, `bias` [F] as Replicate. Forward: for each
    direction, one message to each rank whose outputs need positions of this rank; none if the kernel is as large as the
    stride and nothing is padded. Backward: as many messages with the gradients of these positions. For the backward
    pass, the rank's part with halos is saved. Raises `LayoutError` if `layer` is not an `nn.ConvTranspose2d`.
    """

    _kind = nn.ConvTranspose2d


@final
class SpatialConvTranspose3d(_Transposed):
    """Transposed convolution of volumes [B, C, D, H, W] that ranks share; see `SpatialConvTranspose2d`."""

    _kind = nn.ConvTranspose3d
