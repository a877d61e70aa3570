"""Norm of all gradients of a model, gradient clipping, and the verdict on whether all gradients are finite.

The norm is the square root of the sum of all squares, and every element counts once. If an axis cuts a gradient, the
squares are summed over the ranks of this axis. If ranks hold copies of a gradient, each rank counts its own copy, so
all these ranks compute the same norm.

If the memory of one rank fails, the gradients may be NaN on this rank only, and the copies then disagree. Each rank
therefore also returns `GradientNorm.own`, which is finite only if all values on this rank are finite. The caller sends
`GradientNorm.verdict` over the other axes, together with the loss.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.mesh import Axis, name_of_group
from crosscut.parallel.state.parameters import AxisCut, cuts_of, is_partial, local_part

NORM_PIECE = 1 << 16
"""Number of elements in one partial norm on the CPU. With pieces of this length, float32 rounding changes the norm by
less than a millionth.
"""


class GradientNorm(NamedTuple):
    """Norm of all gradients, and this rank's contribution to it."""

    norm: Tensor
    """2-norm of all gradients of the whole model: a float64 scalar. It is the same on all ranks along the axes that cut
    parameters, and along `owners`.
    """
    own: Tensor
    """Sum of the squares of this rank's gradients: a float64 scalar. NaN or infinite if a value on this rank is not
    finite, or if the squares overflow.
    """

    @property
    def verdict(self) -> Tensor:
        """0 if the norm is finite, otherwise NaN: a float64 scalar. A sum of the verdicts of several ranks is 0 only if
        all these ranks have a finite norm.
        """
        return self.norm * 0.0


def global_gradient_norm(parameters: Sequence[nn.Parameter], owners: Iterable[Axis] = ()) -> Tensor:
    """Return the 2-norm of all gradients of the whole model: a float64 scalar, the same on every rank. See
    `measure_gradients`.
    """
    return measure_gradients(parameters, owners).norm


def measure_gradients(
    parameters: Sequence[nn.Parameter], owners: Iterable[Axis] = (), *, also: Sequence[Tensor] = ()
) -> GradientNorm:
    """Compute the 2-norm of all gradients of the whole model.

    Call this function after the reducer's `finish`, which sums the gradients. Every element counts once: for a
    replicated gradient, each rank counts its own copy, and for a sharded gradient, the squares of all shards are summed
    over the axes that cut the gradient. `owners` are axes along which ranks hold different parameters
    (`ParallelMesh.owners`); the gradients of all these parameters count. `also` lists values that do not add to the
    norm, such as the loss. If any of these values is not finite, the norm is NaN.

    Squares are summed in float64. On the CPU, the sum is computed from the norms of short pieces. PyTorch's own norm of
    20 million float32 elements has a relative error of a thousandth on the CPU, and this error depends on the layout.
    Communication: an all-reduce of one element over each axis that cuts gradients (the tensor axis, the expert axis
    and, with sharding, data axes), and over each axis of `owners`. If experts and other parameters are sharded over
    different ranks, there are two all-reduces over the tensor axis.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    assert not any(map(is_partial, gradients)), "gradients must be summed before their norm is taken"
    by_cuts = _by_cuts(gradients)
    sums = {cuts: _sum_of_squares([local_part(g) for g in alike]) for cuts, alike in by_cuts.items()}
    like = {name: alike[0] for cuts, alike in by_cuts.items() for name in cuts}
    nothing = torch.zeros((), dtype=torch.float64, device=also[0].device if also else None)
    uncounted = _sum_of_squares([local_part(value) for value in also]) * 0.0 if also else nothing
    own = sum(sums.values(), uncounted)
    spread = own * 0.0  # this spreads a NaN or infinity from one replica to all replicas
    while cuts := max(sums, key=len, default=()):  # sum over one axis, then add to the sum for the other axes
        squares = all_reduce(sums.pop(cuts) + spread, _axis(like[cuts[0]], cuts[0]))
        sums[cuts[1:]] = squares + sums.get(cuts[1:], 0.0)
    total = sums.get((), nothing) + uncounted
    for axis in owners:
        total = all_reduce(total, axis)
    return GradientNorm(total.sqrt(), own)


def _axis(gradient: Tensor, name: str) -> Axis:
    """Return the axis called `name` of a gradient's mesh. `Axis.of` would create a submesh, which takes longer than
    sending a number.
    """
    assert isinstance(gradient, DTensor)
    mesh = gradient.device_mesh
    assert mesh.mesh_dim_names is not None
    i = mesh.mesh_dim_names.index(name)
    group_name = name_of_group(name, mesh.get_group(i).group_name)
    return Axis(name, mesh, mesh.get_local_rank(i), mesh.size(i), group_name)


def _by_cuts(gradients: Iterable[Tensor]) -> dict[tuple[str, ...], list[Tensor]]:
    """Group gradients by the axes that cut them."""
    found: dict[tuple[str, ...], list[Tensor]] = {}
    for gradient in gradients:
        found.setdefault(_axes_that_cut(cuts_of(gradient)), []).append(gradient)
    return found


@lru_cache
def _axes_that_cut(cuts: tuple[AxisCut, ...]) -> tuple[str, ...]:
    return tuple(cut.axis for cut in cuts if cut.num_parts > 1)


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Return the sum of all squares as a float64 scalar. On the CPU, the sum is computed from the norms of short
    pieces. PyTorch's CPU kernel adds up the elements one after another, which is inaccurate for long tensors.
    """
    if tensors[0].device.type == "cpu":
        flat = [tensor.reshape(-1) for tensor in tensors]
        tensors = [piece for row in flat for piece in (row.split(NORM_PIECE) if row.numel() > NORM_PIECE else (row,))]
    tensors = [t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in tensors]
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        norms = torch.stack(torch._foreach_norm([t for t in tensors if t.dtype == dtype]))
        total = total + norms.double().square().sum()
    return total


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor by which gradients with the global norm `norm` are multiplied to clip them to `max_norm`: a
    scalar, at most 1, in the element type of `norm`.
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clip_gradients_(parameters: Sequence[nn.Parameter], norm: Tensor | float, max_norm: float) -> None:
    """Clip the gradients: if `norm` is larger than `max_norm`, scale all gradients down to a global norm of `max_norm`
    (paper, section 4.1.1).

    `norm` is the result of `global_gradient_norm`, as a tensor or as a float. With a tensor, the host does not wait for
    the device. If no scaling is needed, the gradients stay bit-identical. The arithmetic is the same as in PyTorch's
    `clip_grad_norm_`.
    """
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if isinstance(norm, Tensor):
        factor = clip_factor(norm, max_norm)
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            torch._foreach_mul_([g for g in gradients if g.dtype == dtype], factor.to(dtype))
    elif max_norm / (norm + 1e-6) < 1.0:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
