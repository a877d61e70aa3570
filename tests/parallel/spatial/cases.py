"""Random layers of PyTorch on random images, and their comparison with the spatial layer on a grid of ranks."""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from crosscut.config import Layout
from crosscut.parallel import GradientReducer, ParallelMesh, make_mesh
from crosscut.parallel.spatial import (
    CutImage,
    ImageGrid,
    Span,
    SpatialAdaptiveAvgPool,
    SpatialAdaptiveMaxPool,
    SpatialAvgPool,
    SpatialBatchNorm,
    SpatialConv1d,
    SpatialConv2d,
    SpatialConv3d,
    SpatialConvTranspose1d,
    SpatialConvTranspose2d,
    SpatialConvTranspose3d,
    SpatialGroupNorm,
    SpatialMaxPool,
    SpatialUpsample,
    make_grid,
    overlap,
    scatter_image,
)
from tests.parallel.twins import CPU

SPATIAL: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.Conv1d: SpatialConv1d,
    nn.Conv2d: SpatialConv2d,
    nn.Conv3d: SpatialConv3d,
    nn.ConvTranspose1d: SpatialConvTranspose1d,
    nn.ConvTranspose2d: SpatialConvTranspose2d,
    nn.ConvTranspose3d: SpatialConvTranspose3d,
    nn.BatchNorm1d: SpatialBatchNorm,
    nn.BatchNorm2d: SpatialBatchNorm,
    nn.BatchNorm3d: SpatialBatchNorm,
    nn.GroupNorm: SpatialGroupNorm,
}
WITHOUT_PARAMETERS: dict[str, Callable[..., nn.Module]] = {
    "MaxPool": SpatialMaxPool,
    "AvgPool": SpatialAvgPool,
    "AdaptiveAvgPool": SpatialAdaptiveAvgPool,
    "AdaptiveMaxPool": SpatialAdaptiveMaxPool,
    "Upsample": SpatialUpsample,
}
CHANNELS = 4
GRIDS = [(2,), (3,), (4,), (1, 2), (2, 1), (2, 2), (1, 4), (3, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1)]


class Case(NamedTuple):
    """A layer of PyTorch, an image and its division."""

    layer: nn.Module
    x: Tensor
    spans: tuple[Span, ...]


def spatial(layer: nn.Module, mesh: ParallelMesh) -> nn.Module:
    """The spatial layer for a layer of PyTorch."""
    if type(layer) in SPATIAL:
        return SPATIAL[type(layer)](layer, mesh=mesh)
    return WITHOUT_PARAMETERS[type(layer).__name__.rstrip("123d")](layer)


def part_of(x: Tensor, spans: tuple[Span, ...], grid: ImageGrid) -> Tensor:
    """This rank's part of a whole tensor."""
    for dim, (span, rank) in enumerate(zip(spans, grid.place, strict=True), 2):
        x = x.narrow(dim, span.bounds[rank], span.bounds[rank + 1] - span.bounds[rank])
    return x


class Draw:
    """Random choices for one case."""

    def __init__(self, seed: int, grid: tuple[int, ...]) -> None:
        self.random, self.grid, self.num = random.Random(seed), grid, len(grid)

    def case(self) -> Case:
        """A layer that has an output for the drawn image."""
        make = self.random.choice([self._conv] * 4 + [self._transposed] * 2 + [self._pool, self._pool, self._adaptive])
        make = make if self.random.random() < 0.8 else self.random.choice([self._upsample, self._norm])
        while True:
            sizes = [self.random.randint(1, 13 if self.num < 3 else 8) for _ in self.grid]
            x = torch.randn(2, CHANNELS, *sizes, dtype=torch.float64)
            if self.random.random() < 0.2:
                x = x.round()  # equal values, of which a maximum's gradient goes to the first
            try:
                layer = make().double()
                y = layer(x)
            except (RuntimeError, ValueError):
                continue
            if y.numel() and y[0, 0].numel() > 1:
                return Case(layer, x, tuple(self._span(*each) for each in zip(sizes, self.grid, strict=True)))

    def _span(self, size: int, num_ranks: int) -> Span:
        """Even parts, or parts of any lengths, also of length 0."""
        if self.random.random() < 0.4:
            return Span.even(size, num_ranks)
        return Span((0, *sorted(self.random.randint(0, size) for _ in range(num_ranks - 1)), size))

    def _each(self, low: int, high: int) -> tuple[int, ...]:
        return tuple(self.random.randint(low, high) for _ in self.grid)

    def _of(self, name: str) -> Any:
        return getattr(nn, f"{name}{self.num}d")

    def _conv(self) -> nn.Module:
        kernel, stride, dilation = self._each(1, 5), self._each(1, 3), self._each(1, 3)
        mode = self.random.choice(["zeros", "zeros", "reflect", "replicate", "circular"])
        padding = self._each(0, 6)
        options = {"groups": self.random.choice([1, 2, 4]), "bias": self.random.random() < 0.5, "padding_mode": mode}
        if self.random.random() < 0.2:
            return self._of("Conv")(CHANNELS, 4, kernel, padding="same", dilation=dilation, **options)
        return self._of("Conv")(CHANNELS, 8, kernel, stride, padding, dilation, **options)

    def _transposed(self) -> nn.Module:
        kernel, stride, dilation, more = self._each(1, 4), self._each(1, 3), self._each(1, 2), self._each(0, 2)
        groups, bias = self.random.choice([1, 2]), self.random.random() < 0.5
        return self._of("ConvTranspose")(CHANNELS, 4, kernel, stride, self._each(0, 3), more, groups, bias, dilation)

    def _pool(self) -> nn.Module:
        kernel, stride, is_ceil = self._each(1, 5), self._each(1, 3), self.random.random() < 0.5
        padding = tuple(self.random.randint(0, k // 2) for k in kernel)
        if self.random.random() < 0.5:
            return self._of("MaxPool")(kernel, stride, padding, self._each(1, 2), ceil_mode=is_ceil)
        divisor = self.random.choice([(), (None,), (5,)]) if self.num > 1 else ()
        return self._of("AvgPool")(kernel, stride, padding, is_ceil, self.random.random() < 0.5, *divisor)

    def _adaptive(self) -> nn.Module:
        return self._of(self.random.choice(["AdaptiveAvgPool", "AdaptiveMaxPool"]))(self._each(1, 5))

    def _upsample(self) -> nn.Module:
        smooth = ["linear", "bilinear", "trilinear"][self.num - 1]
        mode = self.random.choice(["nearest", "nearest-exact", smooth, "bicubic" if self.num == 2 else smooth])
        aligned = None if mode.startswith("nearest") else self.random.random() < 0.5
        if self.random.random() < 0.5:
            return nn.Upsample(self._each(1, 16), mode=mode, align_corners=aligned)
        scale = tuple(self.random.choice([0.5, 1.5, 2.0, 2.7]) for _ in self.grid)
        rounds = self.random.choice([None, True])
        return nn.Upsample(scale_factor=scale, mode=mode, align_corners=aligned, recompute_scale_factor=rounds)

    def _norm(self) -> nn.Module:
        is_affine, momentum, tracks = (self.random.choice(two) for two in ((True, False), (0.2, None), (True, False)))
        if self.random.random() < 0.5:
            layer = self._of("BatchNorm")(CHANNELS, 1e-3, momentum, is_affine, tracks)
        else:
            layer = nn.GroupNorm(2, CHANNELS, affine=is_affine)
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        return layer


def drawn(seed: int, grid: tuple[int, ...]) -> Case:
    """The case of a seed. All ranks draw the same case."""
    torch.manual_seed(seed)
    return Draw(seed, grid).case()


def differences(case: Case, mesh: ParallelMesh, grid: ImageGrid) -> Iterator[tuple[str, float]]:
    """Largest differences between a spatial layer and PyTorch's layer on one rank, for outputs and gradients."""
    layer = spatial(case.layer, mesh)
    x = case.x.clone().requires_grad_()
    y = case.layer(x)
    grad = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    y.backward(grad)
    image = scatter_image(case.x, grid, case.spans)
    image = CutImage(image.x.requires_grad_(), image.spans, grid)
    found = layer(image)
    reducer = GradientReducer(layer.parameters(), mesh)
    reducer.arm()
    found.x.backward(part_of(grad, found.spans, grid))
    reducer.finish()
    yield "sizes", float(found.sizes != tuple(y.shape[2:]))
    yield "outputs", _difference(found.x.detach(), part_of(y.detach(), found.spans, grid))
    yield "gradient of the image", _difference(image.x.grad, part_of(x.grad, case.spans, grid))
    for name, parameter in layer.named_parameters():
        yield f"gradient of {name}", _difference(parameter.grad.full_tensor(), case.layer.get_parameter(name).grad)
    for name, buffer in layer.named_buffers():
        yield name, _difference(buffer.double(), case.layer.get_buffer(name).double())


def _difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference, as a part of the largest value; infinite if the shapes differ."""
    if found.shape != expected.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    difference = (found - expected).abs().max() / expected.abs().max().clamp(min=1.0)
    return float(difference.nan_to_num(nan=float("inf")))


@contextmanager
def overlapped(always: bool = True) -> Iterator[None]:
    """Let convolutions of all sizes overlap with their messages, or none."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(overlap, "overlap_pays", lambda *_: always)
        yield


def compare(sizes: tuple[int, ...], seeds: list[int], overlaps: bool) -> list[tuple[str, float]]:
    """Job of a rank: the largest difference of each seed's case, and its description. Convolutions overlap with their
    messages, or not.
    """
    warnings.filterwarnings("ignore", "Using padding='same'")  # PyTorch copies its input for even kernels
    mesh = make_mesh(Layout(context=torch.Size(sizes).numel()), CPU)
    grid = make_grid(mesh, *sizes)
    results = []
    for seed in seeds:
        case = drawn(seed, sizes)
        with overlapped(overlaps):
            name, worst = max(differences(case, mesh, grid), key=lambda each: each[1])
        results.append((f"{case.layer} on {tuple(case.x.shape)} {case.spans}, seed {seed}: {name}", worst))
    return results
