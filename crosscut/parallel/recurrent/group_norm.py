"""RMS norm of gated outputs over groups of columns, with the columns divided over the tensor ranks.

    n = y silu(gate) / root of the mean square of y silu(gate) over a group        result = n w

If there are more tensor ranks than groups, the ranks of a group sum their squares: g and then f of [B, S, G] elements.

Shapes: B batch, S sequence, D columns, G groups, T tensor ranks.
"""

from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.kernels.functions import AutogradContext, run
from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.mesh import Axis, ParallelMesh
from crosscut.parallel.operators import copy_to_tensor_parallel, reduce_from_tensor_parallel
from crosscut.parallel.state.parameters import ParameterMaker, local


class Groups(NamedTuple):
    """Groups of columns, divided over the ranks of an axis."""

    number: int
    width: int
    """Columns of a group, on all ranks together."""
    axis: Axis

    @property
    def own(self) -> int:
        """Number of groups of which this rank has columns."""
        return max(self.number // self.axis.size, 1)

    @property
    def is_shared(self) -> bool:
        """Whether several ranks have columns of the same group."""
        return self.axis.size > self.number

    def slots(self, sums: Tensor) -> Tensor:
        """Put this rank's sum [B, S, 1] into the place of its group among zeros [B, S, G]."""
        before = self.place
        return F.pad(sums, (before, self.number - 1 - before))

    @property
    def place(self) -> int:
        """Index of the group that this rank shares."""
        return self.axis.rank * self.number // self.axis.size

    def summed(self, sums: Tensor) -> Tensor:
        """Sum over the ranks that share this rank's group: [B, S, own groups]."""
        if not self.is_shared:
            return sums
        return all_reduce(self.slots(sums), self.axis)[..., self.place, None]


@final
class GatedGroupNorm(nn.Module):
    """RMS norm of y silu(gate) over groups of columns: two inputs [B, S, D/T], and output [B, S, D/T].

    Parameter: `weight` [D] as Shard(0); zeros until initialised. Communication: if there are more ranks than groups, an
    all-reduce of B S G elements in the forward and in the backward pass; otherwise none. For the backward pass, the
    inputs and one number per token and group are saved. Source: Dao and Gu 2024 (arXiv 2405.21060), section 7.
    """

    def __init__(
        self, size: int, num_groups: int, *, mesh: ParallelMesh, epsilon: float, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.groups, self.epsilon = Groups(num_groups, size // num_groups, mesh.tensor), epsilon
        self.weight = ParameterMaker(mesh, dtype).sharded(size, dim=0)

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """Gate `y`, normalise each group and multiply by the weight."""
        return run(_Norm, y, gate, local(self.weight, y.dtype), self.groups, self.epsilon, twin=_plain)


def normal_gradient(of_normal: Tensor, normal: Tensor, *, root: Tensor, mean: Tensor) -> Tensor:
    """Return the gradient of x from that of n = x `root`, where `root` is the inverse root of the mean square of x, and
    `mean` the mean of n times its gradient.
    """
    return (of_normal - normal * mean) * root


def _gated(y: Tensor, gate: Tensor, groups: Groups) -> Tensor:
    """Return y silu(gate) in float32 or wider, cut into groups: [B, S, own groups, width]."""
    wide = torch.promote_types(y.dtype, torch.float32)
    gated: Tensor = (y.to(wide) * F.silu(gate.to(wide))).unflatten(-1, (groups.own, -1))
    return gated


def _plain(y: Tensor, gate: Tensor, weight: Tensor, groups: Groups, epsilon: float) -> Tensor:
    gated = _gated(y, gate, groups)
    squares = gated.square().sum(-1)
    if groups.is_shared:
        everywhere = reduce_from_tensor_parallel(groups.slots(squares), groups.axis)  # g
        squares = copy_to_tensor_parallel(everywhere, groups.axis)[..., groups.place, None]  # f
    root = torch.rsqrt(squares / groups.width + epsilon)
    return (gated * root.unsqueeze(-1)).flatten(-2).to(y.dtype) * weight


_Saved = tuple[Tensor, Tensor, Tensor, Tensor]
"""Outputs of the mixer, gate, weight, and the inverse root of each token and group."""


class _Context(AutogradContext[_Saved]):
    groups: Groups


class _Norm(Function):
    @staticmethod
    def forward(ctx: _Context, y: Tensor, gate: Tensor, weight: Tensor, groups: Groups, epsilon: float) -> Tensor:
        gated = _gated(y, gate, groups)
        root = torch.rsqrt(groups.summed(gated.square().sum(-1)) / groups.width + epsilon)
        ctx.save_for_backward(y, gate, weight, root)
        ctx.groups = groups
        return gated.mul_(root.unsqueeze(-1)).flatten(-2).to(y.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> Any:
        y, gate, weight, root = ctx.saved_tensors
        groups, root = ctx.groups, root.unsqueeze(-1)
        normal = _gated(y, gate, groups) * root
        of_weight = (grad * normal.flatten(-2)).sum((0, 1)).to(weight.dtype)
        of_normal = (grad * weight).to(root.dtype).unflatten(-1, (groups.own, -1))
        shared = groups.summed((of_normal * normal).sum(-1)).unsqueeze(-1) / groups.width
        of_gated = normal_gradient(of_normal, normal, root=root, mean=shared).flatten(-2)
        wide = gate.to(root.dtype)
        of_gate = torch.ops.aten.silu_backward(of_gated * y, wide)
        return (of_gated * F.silu(wide)).to(y.dtype), of_gate.to(gate.dtype), of_weight, None, None
