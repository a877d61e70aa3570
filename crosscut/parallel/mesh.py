"""The arrangement of ranks as each rank sees it.

A layout becomes one `DeviceMesh` with the axes ("data", "tensor"): tensor groups are adjacent ranks, data groups stride
across them (paper, Figure 5). Everything else in Crosscut is handed an `Axis` or the whole `ParallelMesh`; there is no
global group.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from crosscut.config import Layout, LayoutError


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh, seen from one rank."""

    name: str
    device_mesh: DeviceMesh
    """The ranks of this axis, one-dimensional."""
    rank: int
    """This rank's place along the axis, from 0."""
    size: int
    """Ranks along the axis. At size 1 every collective is the identity."""
    group_name: str

    @classmethod
    def of(cls, device_mesh: DeviceMesh, name: str) -> "Axis":
        """The axis `name` of a mesh."""
        line = device_mesh[name]
        group = line.get_group()
        return cls(name, line, line.get_local_rank(), line.size(), group.group_name)


@dataclass(frozen=True)
class ParallelMesh:
    """All axes of a layout, and how the tensor axis is used between the parallel regions."""

    tensor: Axis
    data: Axis
    device: torch.device
    sequence_parallel: bool = False

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is the one that prints and writes what is written once."""
        return self.tensor.rank == 0 and self.data.rank == 0


def make_mesh(layout: Layout, device: torch.device) -> ParallelMesh:
    """Arrange the running processes as `layout` says.

    Needs an initialised process group (see `processes`). Raises `LayoutError` when the number of processes is not
    tensor x data.
    """
    if dist.get_world_size() != layout.world_size:
        raise LayoutError(world_size_message(layout, dist.get_world_size()))
    device_mesh = init_device_mesh(device.type, (layout.data, layout.tensor), mesh_dim_names=("data", "tensor"))
    return ParallelMesh(
        tensor=Axis.of(device_mesh, "tensor"),
        data=Axis.of(device_mesh, "data"),
        device=device,
        sequence_parallel=layout.sequence_parallel and layout.tensor > 1,
    )


def make_lone_mesh(device: torch.device) -> ParallelMesh:
    """The mesh of a rank that is alone on every axis, for an uncut model beside a cut one. Every rank calls it."""
    names = ("rank", "data", "tensor")
    alone = init_device_mesh(device.type, (dist.get_world_size(), 1, 1), mesh_dim_names=names)["data", "tensor"]
    return ParallelMesh(tensor=Axis.of(alone, "tensor"), data=Axis.of(alone, "data"), device=device)


def world_size_message(layout: Layout, world_size: int) -> str:
    """What to tell a user whose number of processes does not fit the layout."""
    return (
        f"`layout.tensor` x `layout.data` must be the number of processes ({world_size}), but is {layout.tensor} x "
        f"{layout.data} = {layout.world_size}. Start {layout.world_size} processes or change the layout."
    )
