"""Norms of images whose directions are divided over ranks: statistics over all ranks, whatever part each rank has.

    n = (x - mean) / sqrt(variance + epsilon)        y = n w + b

Each rank computes its count, its mean and its sum of centred squares. The ranks gather these numbers and merge them, so
no large numbers are subtracted (Chan et al. 1979). The backward pass needs two sums over all ranks.

Shapes: B batch, C channels, G groups, R ranks, N positions over which a statistic is taken.
"""

from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.kernels.functions import AutogradContext
from crosscut.parallel.collectives import all_gather, all_reduce
from crosscut.parallel.mesh import Axis, ParallelMesh
from crosscut.parallel.spatial.image import CutImage, pointwise
from crosscut.parallel.spatial.parameters import copied_parameter, require_directions_of, require_kind
from crosscut.parallel.state.parameters import local


class _Rule(NamedTuple):
    """Rule of a norm."""

    axis: Axis
    """Ranks whose positions belong to the statistics."""
    epsilon: float
    saves_result: bool = False
    """Whether the normal values are saved for the backward pass, in place of the image. Only for a norm without weight
    and bias, whose result is not changed in place."""
    sums_gradients: bool = False
    """Whether the gradients of the weight and the bias are the sums over all ranks. Otherwise, they are this rank's
    terms."""


class _Statistics(NamedTuple):
    """Statistics over all ranks."""

    mean: Tensor
    """Mean of each channel: [C]."""
    squares: Tensor
    """Sum of centred squares: [C]."""
    number: Tensor
    """N."""

    @property
    def variance(self) -> Tensor:
        """Mean of the centred squares."""
        return self.squares / self.number


def _gathered(x: Tensor, rule: _Rule) -> _Statistics:
    """Return the statistics of `x` [B, C, ...] on all ranks. Communication: an all-gather of 2 C + 1 numbers."""
    dims = (0, *range(2, x.dim()))
    num = x.new_tensor(float(x.numel() // x.shape[1]))
    mean = x.sum(dims) / num.clamp(min=1)
    squares = (x - _of_channels(mean, x)).square_().sum(dims)
    of_ranks = all_gather(torch.cat((mean, squares, num.view(1))), rule.axis, 0).view(rule.axis.size, -1)
    counts = of_ranks[:, -1:]
    means, all_squares = of_ranks[:, :-1].chunk(2, 1)
    total = (counts * means).sum(0) / counts.sum()
    squares = (all_squares + counts * (means - total).square()).sum(0)
    return _Statistics(total, squares, counts.sum())


def _of_channels(values: Tensor, x: Tensor) -> Tensor:
    """View one value per channel [C] so that it meets the channels of `x` [B, C, ...]."""
    return values.view(-1, *[1] * (x.dim() - 2))


class _Affine(NamedTuple):
    """Normalisation with fixed statistics, in one pass: (x - mean) / sqrt(variance + epsilon) w + b."""

    mean: Tensor
    variance: Tensor
    epsilon: float

    def apply(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y: Tensor = torch.native_batch_norm(x, weight, bias, self.mean, self.variance, False, 0.0, self.epsilon)[0]
        return y

    def sums(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of `grad`, and of `grad` times the normal values, over this rank's positions: [C]."""
        if not x.numel():
            return torch.zeros_like(self.mean), torch.zeros_like(self.mean)
        backward = torch.ops.aten.native_batch_norm_backward
        fixed = (self.mean, self.variance, None, None, False, self.epsilon)
        _, along, total = backward(grad, x, None, *fixed, [False, True, True])
        return total, along


class _Context(AutogradContext[tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]]):
    rule: _Rule


class _Normalised(Function):
    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, weight: Tensor | None, bias: Tensor | None, rule: _Rule
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        found = _gathered(x, rule)
        y = _Affine(found.mean, found.variance, rule.epsilon).apply(x, weight, bias)
        ctx.save_for_backward(y if rule.saves_result else x, weight, found.mean, found.variance, found.number)
        ctx.rule = rule
        ctx.mark_non_differentiable(*found)  # type: ignore[attr-defined]
        return y, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor, *_of_statistics: Tensor) -> Any:
        x, weight, mean, variance, number = ctx.saved_tensors
        normal = _Affine(torch.zeros_like(mean), torch.ones_like(variance), 0.0)
        affine = normal if ctx.rule.saves_result else _Affine(mean, variance, ctx.rule.epsilon)
        total, along = affine.sums(grad, x)
        factor = torch.rsqrt(variance + ctx.rule.epsilon) * (1.0 if weight is None else weight)
        sums = all_reduce(torch.stack((total, along)), ctx.rule.axis)
        mean_total, mean_along = (sums / number).unbind()
        of_x = affine.apply(x, -factor * mean_along, -factor * mean_total)
        of_x.addcmul_(grad, _of_channels(factor, grad))
        total, along = sums.unbind() if ctx.rule.sums_gradients else (total, along)
        _, of_weight, of_bias, _ = ctx.needs_input_grad
        return of_x, along if of_weight else None, total if of_bias else None, None


def _normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, rule: _Rule) -> tuple[Tensor, _Statistics]:
    """Return `x` [B, C, ...] with mean 0 and variance 1 over all ranks, times the weight [C] and plus the bias [C], and
    the statistics.

    Forward: an all-gather of 2 C + 1 numbers. Backward: an all-reduce of 2 C numbers. For the backward pass, `x` or the
    result is saved.
    """
    y, *found = _Normalised.apply(x, weight, bias, rule)
    return y, _Statistics(*found)


class _Norm(nn.Module):
    """Norm with the weight and the bias of a layer of PyTorch, if it has them."""

    def __init__(self, layer: Any, *, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh, self.epsilon = mesh, layer.eps
        self.weight = None if layer.weight is None else copied_parameter(layer.weight, mesh)
        self.bias = None if layer.bias is None else copied_parameter(layer.bias, mesh)
        self.train(layer.training)

    def own(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return the weight and the bias in an element type."""
        weight, bias = (None if each is None else local(each, dtype) for each in (self.weight, self.bias))
        return weight, bias


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@final
class SpatialBatchNorm(_Norm):
    """Batch norm of images that ranks share, with the settings, weights and running statistics of `layer`: an
    `nn.BatchNorm1d`, `2d` or `3d`.

    The statistics of training are over all samples and positions, also those of other data ranks, so a layer computes
    what it computes on one rank. Parameters: `weight` and `bias` [C] as Replicate; buffers as in PyTorch, the same on
    all ranks. In training, forward: an all-gather of 2 C + 1 numbers over all ranks that see different tokens.
    Backward: an all-reduce of 2 C. Otherwise, sends nothing. For the backward pass, the image is saved. Raises
    `LayoutError` if `layer` is another layer. Source: Dryden et al. 2019 (arXiv 1903.06681), section 4.
    """

    sums_gradients = False
    """Whether the backward pass also sums the gradients of weight and bias over the ranks of the statistics. It sends
    these sums anyway. A reducer must not sum them again.
    """
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, layer: nn.Module, *, mesh: ParallelMesh) -> None:
        kind = require_kind(layer, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        super().__init__(layer, mesh=mesh)
        self.kind = kind
        self.momentum: float | None = None
        self.tracks = True
        self.follow(layer)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            buffer = getattr(layer, name)
            self.register_buffer(name, None if buffer is None else buffer.clone())

    def follow(self, layer: nn.Module) -> None:
        """Take over the settings of `layer`, which a program may have changed, such as `momentum` for `update_bn`."""
        self.epsilon, self.momentum, self.tracks = layer.eps, layer.momentum, layer.track_running_stats  # type: ignore[assignment]

    @property
    def takes_statistics(self) -> bool:
        """Whether the norm takes statistics of the image, and does not use running statistics."""
        return self.training or self.running_mean is None or self.running_var is None

    def forward(self, image: CutImage) -> CutImage:
        """Return this rank's positions [B, C, ...], normalised for each channel."""
        require_directions_of(self.kind, len(image.spans))
        return pointwise(lambda x: self._normal(_wide(x)).to(x.dtype), image)

    def _normal(self, x: Tensor) -> Tensor:
        weight, bias = self.own(x.dtype)
        if self.takes_statistics:
            rule = _Rule(self.mesh.tokens, self.epsilon, sums_gradients=self.sums_gradients)
            y, found = _normalised(x, weight, bias, rule)
            if self.training:
                self._track(found)
            return y
        return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, eps=self.epsilon)

    @torch.no_grad()
    def _track(self, found: _Statistics) -> None:
        """Let the running statistics follow the statistics of a batch."""
        if not self.tracks or self.running_mean is None or self.running_var is None:
            return
        share: Tensor | float = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
            if self.momentum is None:
                share = self.num_batches_tracked.to(self.running_mean).reciprocal()
        unbiased = found.squares / (found.number - 1).clamp(min=1)
        self.running_mean.lerp_(found.mean.to(self.running_mean), share)
        self.running_var.lerp_(unbiased.to(self.running_var), share)


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
        return pointwise(lambda x: self._normal(_wide(x)).to(x.dtype), image)

    def _normal(self, x: Tensor) -> Tensor:
        num_statistics = x.shape[0] * self.num_groups  # each group of a sample is a channel of one sample
        grouped = x.reshape(1, num_statistics, x.shape[1] // self.num_groups, *x.shape[2:])
        weight, bias = (None if each is None else _of_channels(each, x) for each in self.own(x.dtype))
        rule = _Rule(self.mesh.context, self.epsilon, saves_result=weight is not None)
        normal = _normalised(grouped, None, None, rule)[0].view_as(x)
        if weight is None:
            return normal
        return normal * weight if bias is None else torch.addcmul(bias, normal, weight)
