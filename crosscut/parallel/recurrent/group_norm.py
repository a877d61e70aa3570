"""RMS norm with a gate over groups of columns, with the columns divided over the tensor ranks. The gate is before the
norm, as in Mamba-2, or after the norm, as in the gated delta net:

    before    n = y silu(gate) / root of the mean square of y silu(gate) over a group    result = n w
    after     n = y / root of the mean square of y over a group                          result = n w silu(gate)

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
from crosscut.parallel.linear import Blocks
from crosscut.parallel.mesh import Axis, ParallelMesh
from crosscut.parallel.operators import copy_to_tensor_parallel, reduce_from_tensor_parallel
from crosscut.parallel.state.parameters import ParameterMaker, local, local_inside


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


class Gating(NamedTuple):
    """Place of the gate, and weights of a gated norm."""

    is_last: bool = False
    """Whether the gate is after the norm and the weight."""
    shares_weight: bool = False
    """Whether all groups have the same weight."""


GATE_FIRST, GATE_OF_HEADS = Gating(), Gating(is_last=True, shares_weight=True)
"""Gating of Mamba-2, and of the heads of a gated delta net."""


@final
class GatedGroupNorm(nn.Module):
    """RMS norm over groups of columns, with a gate: two inputs [B, S, D/T], and output [B, S, D/T].

    Parameter: `weight` [D] as Shard(0) or, if the groups share the weight, [D/G] as Replicate; zeros until initialised.
    The gradient of a shared weight is partial, since a rank has only its own groups. Communication: if there are more
    ranks than groups, an all-reduce of B S G elements in the forward and in the backward pass; otherwise none. For the
    backward pass, the inputs and one number per token and group are saved. Sources: Dao and Gu 2024 (arXiv 2405.21060),
    section 7; Yang et al. 2024 (arXiv 2412.06464), section 3.
    """

    def __init__(
        self,
        groups: Blocks,
        *,
        mesh: ParallelMesh,
        epsilon: float,
        gating: Gating = GATE_FIRST,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.groups, self.epsilon, self.gating = Groups(*groups, mesh.tensor), epsilon, gating
        make, size = ParameterMaker(mesh, dtype), groups.number * groups.width
        self.weight = make.replicated(groups.width) if gating.shares_weight else make.sharded(size, dim=0)

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """Normalise each group, multiply by the weight, and gate before or after."""
        if self.gating.shares_weight:
            weight = local_inside(self.weight, y.dtype)
        else:
            weight = local(self.weight, y.dtype).unflatten(0, (self.groups.own, -1))
        return run(_Norm, y, gate, weight, _Rule(self.groups, self.epsilon, self.gating.is_last), twin=_plain)


def normal_gradient(of_normal: Tensor, normal: Tensor, *, root: Tensor, mean: Tensor) -> Tensor:
    """Return the gradient of x from that of n = x `root`, where `root` is the inverse root of the mean square of x, and
    `mean` the mean of n times its gradient.
    """
    return (of_normal - normal * mean) * root


class _Rule(NamedTuple):
    """Settings of a norm with a gate."""

    groups: Groups
    epsilon: float
    gate_is_last: bool

    def cut(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return `y`, or y silu(gate), in float32 or wider, cut into groups: [B, S, own groups, width]."""
        wide = torch.promote_types(y.dtype, torch.float32)
        gated = y.to(wide) if self.gate_is_last else y.to(wide) * F.silu(gate.to(wide))
        cut: Tensor = gated.unflatten(-1, (self.groups.own, -1))
        return cut

    def root(self, squares: Tensor) -> Tensor:
        """Return the inverse root of the mean square, from the sums of the squares of each group."""
        return torch.rsqrt(squares / self.groups.width + self.epsilon)

    def result(self, normal: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """Return the result [B, S, D/T] from the normal values [B, S, own groups, width]."""
        result = (normal.to(weight.dtype) * weight).flatten(-2)
        return (result * F.silu(gate.to(normal.dtype))).to(weight.dtype) if self.gate_is_last else result


def _plain(y: Tensor, gate: Tensor, weight: Tensor, rule: _Rule) -> Tensor:
    gated, groups = rule.cut(y, gate), rule.groups
    squares = gated.square().sum(-1)
    if groups.is_shared:
        everywhere = reduce_from_tensor_parallel(groups.slots(squares), groups.axis)  # g
        squares = copy_to_tensor_parallel(everywhere, groups.axis)[..., groups.place, None]  # f
    return rule.result(gated * rule.root(squares).unsqueeze(-1), gate, weight)


_Saved = tuple[Tensor, Tensor, Tensor, Tensor]
"""Outputs of the mixer, gate, weight, and the inverse root of each token and group."""


class _Context(AutogradContext[_Saved]):
    rule: _Rule


class _Norm(Function):
    @staticmethod
    def forward(ctx: _Context, y: Tensor, gate: Tensor, weight: Tensor, rule: _Rule) -> Tensor:
        gated = rule.cut(y, gate)
        root = rule.root(rule.groups.summed(gated.square().sum(-1)))
        ctx.save_for_backward(y, gate, weight, root)
        ctx.rule = rule
        # Without a gate before the norm, `gated` may be `y` itself.
        normal = gated * root.unsqueeze(-1) if rule.gate_is_last else gated.mul_(root.unsqueeze(-1))
        return rule.result(normal, gate, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> Any:
        y, gate, weight, root = ctx.saved_tensors
        rule, root, wide = ctx.rule, root.unsqueeze(-1), gate.to(root.dtype)
        normal = rule.cut(y, gate) * root
        of_result = (grad * F.silu(wide) if rule.gate_is_last else grad).unflatten(-1, (rule.groups.own, -1))
        of_weight = (of_result * normal).sum((0, 1)).sum_to_size(weight.shape).to(weight.dtype)
        of_normal = (of_result * weight).to(root.dtype)
        shared = rule.groups.summed((of_normal * normal).sum(-1)).unsqueeze(-1) / rule.groups.width
        of_y = normal_gradient(of_normal, normal, root=root, mean=shared).flatten(-2)
        of_gate = torch.ops.aten.silu_backward(
            grad * (normal * weight).flatten(-2) if rule.gate_is_last else of_y * y, wide
        )
        of_y = of_y if rule.gate_is_last else of_y * F.silu(wide)
        return of_y.to(y.dtype), of_gate.to(gate.dtype), of_weight, None
