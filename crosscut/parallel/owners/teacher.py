"""Ranks of a teacher as one rank sees them, and the exchange of its inputs and results inside a block of ranks
(`config.teachers.ranks`).

Shapes: B sequences of a rank's micro-batch, S tokens of a sequence, C context ranks, P sequences for which one group of
the teacher's tensor ranks computes the teacher, F fields.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._mode_utils import no_dispatch

from crosscut.config import Layout
from crosscut.config.layouts.ranks import Line
from crosscut.config.teachers import TEACHER, TEACHER_SHARES, TEACHER_TOKENS, TeacherRanks
from crosscut.parallel.collectives import all_gather
from crosscut.parallel.context.zigzag import join_zigzag, split_zigzag
from crosscut.parallel.mesh import Axis, ParallelMesh, make_repeated_mesh

_EXCHANGES = (TEACHER_TOKENS, TEACHER_SHARES)


@dataclass(frozen=True, kw_only=True)
class TeacherMesh:
    """Axes of a teacher on one rank."""

    ranks: TeacherRanks
    trunk: ParallelMesh
    """Mesh of the teacher's layers."""
    head: ParallelMesh
    """Mesh of the teacher's head, which is cut like the head of the model that learns."""
    tokens: Axis
    """Ranks of the block that read different tokens. The context axis is the inner one."""
    shares: Axis
    """Ranks of the block that compute the teacher for different sequences."""

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Axes along which the teacher's messages are sent."""
        return tuple(axis for axis in (self.trunk.tensor, self.tokens, self.shares) if axis.size > 1)

    def gathered(self, fields: Tensor) -> Tensor:
        """Return the fields of this group's sequences [F, P, S], given those of the rank's tokens [F, B, S/C].

        Communication: an all-gather over the ranks of the block that read different tokens.
        """
        context, size = self.ranks.student.context, fields.shape[1]
        of_ranks = all_gather(fields.unsqueeze(0), self.tokens, 0).unflatten(0, (-1, context))
        whole = join_zigzag(of_ranks.unbind(1), 3).transpose(0, 1).flatten(1, 2)
        share = self.ranks.share(size)
        chosen = torch.arange(share, device=fields.device) + self.shares.rank * share
        return whole[:, chosen % whole.shape[1]]

    def returned(self, results: Tensor, size: int) -> Tensor:
        """Return the results of the rank's own tokens [B, S/C, ...], given those of this group's sequences [P, S, ...].
        `size` is B.

        Communication: an all-gather over the groups of the block.
        """
        whole, context = all_gather(results, self.shares, 0), self.ranks.student.context
        reader, place = divmod(self.tokens.rank, context)
        return split_zigzag(whole[reader * size : (reader + 1) * size], context, 1)[place]


def make_teacher_mesh(ranks: TeacherRanks, mesh: ParallelMesh) -> TeacherMesh:
    """Return the axes of the teacher on this rank, beside the axes of the run's model. Every rank must call this
    function, those of other stages of a pipeline included. On a mesh of one rank, nothing is sent.
    """
    device = mesh.device
    if mesh.layout.world_size == 1:
        axes = [mesh.tensor.alone(name) for name in _EXCHANGES]
        return TeacherMesh(ranks=ranks, trunk=mesh, head=mesh, tokens=axes[0], shares=axes[1])
    with no_dispatch():  # a mesh has real numbers, also in a dry run
        trunk = make_repeated_mesh(Layout(tensor=ranks.tensor), device)
        head = make_repeated_mesh(Layout(tensor=ranks.student.tensor), device) if ranks.is_apart else None
        made = [_axis(ranks.lines[name], device) for name in _EXCHANGES]
    taken, axes = {axis.group_name for axis in mesh.groups}, []
    for axis in (replace(trunk.tensor, name=TEACHER), *made):
        axes.append(axis.apart_from(taken))  # two axes may have the same ranks, and messages carry the axis's name
        taken.add(axes[-1].group_name)
    trunk = replace(trunk, tensor=axes[0])
    return TeacherMesh(ranks=ranks, trunk=trunk, head=head or trunk, tokens=axes[1], shares=axes[2])


def _axis(line: Line, device: torch.device) -> Axis:
    """Make the axis of a line."""
    ((size, stride),) = line.steps
    shape = (dist.get_world_size() // (size * stride), size, stride)
    return Axis.of(init_device_mesh(device.type, shape, mesh_dim_names=("block", line.name, "inside")), line.name)
