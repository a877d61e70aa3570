"""Norms of images whose directions are divided over ranks: statistics over all ranks, whatever part each rank has.

    n = (x - mean) / sqrt(variance + epsilon)        y = n w + b

Each rank computes its count, its mean and its sum of centred squares. The ranks gather these numbers and merge them, so
no large numbers are subtracted (Chan et al. 1979). The backward pass needs two sums over all ranks.

Shapes: B batch, C channels, G groups, R ranks, N positions over which a statistic is taken.
"""

from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.kernels.functions import AutogradContext
from crosscut.parallel.collectives import all_gather, all_reduce
from crosscut.parallel.mesh import Axis, ParallelMesh
from crosscut.parallel.spatial.image import IMAGE_DIM, CutImage, pointwise
from crosscut.parallel.spatial.parameters import copied_parameter, require_directions_of, require_kind
from crosscut.parallel.state.parameters import local


class _Rule(NamedTuple):
    """Rule of a norm."""

    axis: Axis
    """Ranks whose positions belong to the statistics."""
    dims: tuple[int, ...]
    """Dimensions over which statistics are taken."""
    epsilon: float


class _Statistics(NamedTuple):
    """Statistics over all ranks."""

    mean: Tensor
    squares: Tensor
    """Sum of centred squares."""
    number: Tensor
    """N."""

    @property
    def variance(self) -> Tensor:
        """Mean of the centred squares."""
        return self.squares / self.number


def _gathered(x: Tensor, rule: _Rule) -> _Statistics:
    """Return the statistics of `x` on all ranks. Communication: an all-gather of two numbers per statistic and one."""
    num = x.new_tensor(float(torch.Size(x.shape[dim] for dim in rule.dims).numel()))
    mean = x.sum(rule.dims, keepdim=True) / num.clamp(min=1)
    squares = (x - mean).square().sum(rule.dims, keepdim=True)
    own = torch.cat((mean.flatten(), squares.flatten(), num.view(1)))
    of_ranks = all_gather(own, rule.axis, 0).view(rule.axis.size, -1)
    counts = of_ranks[:, -1:]
    means, all_squares = of_ranks[:, :-1].chunk(2, 1)
    total = (counts * means).sum(0) / counts.sum()
    squares = (all_squares + counts * (means - total).square()).sum(0)
    return _Statistics(total.view_as(mean), squares.view_as(mean), counts.sum())


class _Context(AutogradContext[tuple[Tensor, Tensor, Tensor]]):
    rule: _Rule


class _Normalised(Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, rule: _Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        found = _gathered(x, rule)
        root = torch.rsqrt(found.variance + rule.epsilon)
        normal = (x - found.mean) * root
        ctx.save_for_backward(normal, root, found.number)
        ctx.rule = rule
        ctx.mark_non_differentiable(*found)  # type: ignore[attr-defined]
        return normal, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor, *_of_statistics: Tensor) -> Any:
        normal, root, count = ctx.saved_tensors
        sums = torch.stack([part.sum(ctx.rule.dims, keepdim=True) for part in (grad, grad * normal)])
        mean, along = (all_reduce(sums, ctx.rule.axis) / count).unbind()
        return (grad - mean - normal * along) * root, None


def _normalised(x: Tensor, rule: _Rule) -> tuple[Tensor, _Statistics]:
    """Return `x` with mean 0 and variance 1 over all ranks, and the statistics.

    Forward: an all-gather of two numbers per statistic and one. Backward: an all-reduce of two numbers per statistic.
    """
    normal, *found = _Normalised.apply(x, rule)
    return normal, _Statistics(*found)


class _Norm(nn.Module):
    """Norm with the weight and the bias of a layer of PyTorch, if it has them."""

    def __init__(self, layer: Any, *, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh, self.epsilon = mesh, layer.eps
        self.weight = None if layer.weight is None else copied_parameter(layer.weight, mesh)
        self.bias = None if layer.bias is None else copied_parameter(layer.bias, mesh)
        self.train(layer.training)

    def scaled(self, normal: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the normal values [B, C, ...], times the weight and plus the bias, in an element type."""
        shape = [-1 if dim == 1 else 1 for dim in range(normal.dim())]
        if self.weight is not None:
            normal = normal * local(self.weight, normal.dtype).view(shape)
        if self.bias is not None:
            normal = normal + local(self.bias, normal.dtype).view(shape)
        return normal.to(dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@final
class SpatialBatchNorm(_Norm):
    """Batch norm of images that ranks share, with the settings, weights and running statistics of `layer`: an
    `nn.BatchNorm1d`, `2d` or `3d`.

    The statistics of training are over all samples and positions, also those of other data ranks, so a layer computes
    what it computes on one rank. Parameters: `weight` and `bias` [C] as Replicate; buffers as in PyTorch, the same on
    all ranks. In training, forward: an all-gather of 2 C + 1 numbers over all ranks that see different tokens.
    Backward: an all-reduce of 2 C. Otherwise, sends nothing. For the backward pass, the normal values are saved. Raises
    `LayoutError` if `layer` is another layer. Source: Dryden et al. 2019 (arXiv 1903.06681), section 4.
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, layer: nn.Module, *, mesh: ParallelMesh) -> None:
        kind = require_kind(layer, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        super().__init__(layer, mesh=mesh)
        self.kind = kind
        self.momentum: float | None = layer.momentum  # type: ignore[assignment]
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            buffer = getattr(layer, name)
            self.register_buffer(name, None if buffer is None else buffer.clone())

    def forward(self, image: CutImage) -> CutImage:
        """Return this rank's positions [B, C, ...], normalised for each channel."""
        require_directions_of(self.kind, len(image.spans))
        return pointwise(lambda x: self.scaled(self._normal(_wide(x)), x.dtype), image)

    def _normal(self, x: Tensor) -> Tensor:
        if self.training or self.running_mean is None or self.running_var is None:
            dims = (0, *range(IMAGE_DIM, x.dim()))
            normal, found = _normalised(x, _Rule(self.mesh.tokens, dims, self.epsilon))
            if self.training:
                self._track(found)
            return normal
        shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        mean, variance = self.running_mean.view(shape), self.running_var.view(shape)
        return (x - mean) * torch.rsqrt(variance + self.epsilon)

    @torch.no_grad()
    def _track(self, found: _Statistics) -> None:
        """Let the running statistics follow the statistics of a batch."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        counted = self.num_batches_tracked.to(self.running_mean)
        share = counted.reciprocal() if self.momentum is None else self.momentum
        unbiased = found.squares / (found.number - 1).clamp(min=1)
        self.running_mean.lerp_(found.mean.flatten().to(self.running_mean), share)
        self.running_var.lerp_(unbiased.flatten().to(self.running_var), share)


@final
class SpatialGroupNorm(_Norm):
    """Group norm of images that ranks share, with the settings and the weights of `layer`, an `nn.GroupNorm`.

    Parameters: `weight` and `bias` [C] as Replicate. Forward: an all-gather of 2 B G + 1 numbers over the ranks of the
    grid. Backward: an all-reduce of 2 B G. For the backward pass, the normal values are saved. Raises `LayoutError` if
    `layer` is another layer.
    """

    def __init__(self, layer: nn.Module, *, mesh: ParallelMesh) -> None:
        require_kind(layer, nn.GroupNorm)
        super().__init__(layer, mesh=mesh)
        self.num_groups: int = layer.num_groups  # type: ignore[assignment]

    def forward(self, image: CutImage) -> CutImage:
        """Return this rank's positions [B, C, ...], normalised for each sample and group of channels."""
        return pointwise(lambda x: self.scaled(self._normal(_wide(x)), x.dtype), image)

    def _normal(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(1, (self.num_groups, -1))
        rule = _Rule(self.mesh.context, tuple(range(2, grouped.dim())), self.epsilon)
        return _normalised(grouped, rule)[0].flatten(1, 2)
