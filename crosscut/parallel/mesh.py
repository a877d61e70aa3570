"""The arrangement of ranks as each rank sees it.

A layout becomes one `DeviceMesh` with the axes ("data", "tensor"): tensor groups are adjacent ranks, data groups stride
across them (paper, Figure 5). Where groups of data ranks each share one copy of the model, the data axis is two,
("replica", "shard"), and both together are still the axis over which batches are split. Everything else in Crosscut is
handed an `Axis` or the whole `ParallelMesh`; there is no global group.
"""

from dataclasses import dataclass, replace
from math import prod

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
        return cls.along(device_mesh[name], name)

    @classmethod
    def along(cls, line: DeviceMesh, name: str) -> "Axis":
        """The axis that a one-dimensional mesh is."""
        group = line.get_group()
        return cls(name, line, line.get_local_rank(), line.size(), group.group_name)


@dataclass(frozen=True)
class Sharding:
    """Axes over which data ranks share one copy of the model (`sharding.shard_model`)."""

    shard: Axis
    """The ranks that share a copy."""
    replica: Axis | None
    """The ranks of different copies that hold the same part; None where there is one copy."""
    device_mesh: DeviceMesh
    """Mesh of both axes, ("replica", "shard"), or of the shard axis alone where there is one copy."""
    keeps_weights: bool
    """Whether gathered weights stay until the backward pass has used them (ZeRO-2), or go with each layer's use."""


@dataclass(frozen=True)
class ParallelMesh:
    """All axes of a layout, and how the tensor axis is used between the parallel regions."""

    tensor: Axis
    data: Axis
    """All data ranks, over which batches are split."""
    device: torch.device
    sequence_parallel: bool = False
    sharding: Sharding | None = None
    """None where every data rank holds a whole copy."""
    symmetric_memory: bool = False
    """Whether products run in pieces beside what is gathered for them (`symmetric_memory`)."""

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is the one that prints and writes what is written once."""
        return self.tensor.rank == 0 and self.data.rank == 0

    @property
    def copies(self) -> Axis | None:
        """The axis along which ranks hold the same part of every parameter; None where no data ranks do."""
        return self.data if self.sharding is None else self.sharding.replica

    @property
    def parameter_device(self) -> torch.device:
        """Where layers make their parameters: where they are to hold only shares of them, on `meta`, which takes no
        memory; `sharding.shard_model` then makes the shares.
        """
        return self.device if self.sharding is None else torch.device("meta")


def make_mesh(layout: Layout, device: torch.device) -> ParallelMesh:
    """Arrange the running processes as `layout` says.

    Needs an initialised process group (see `processes`). Raises `LayoutError` when the number of processes is not
    tensor x data.
    """
    if dist.get_world_size() != layout.world_size:
        raise LayoutError(world_size_message(layout, dist.get_world_size()))
    return make_repeated_mesh(layout, device)


def make_repeated_mesh(layout: Layout, device: torch.device) -> ParallelMesh:
    """Arrange the running processes as `layout` says, as often as they allow: the first tensor x data ranks, the next
    as many, and so on, which send each other nothing. Every rank calls it.

    Raises `LayoutError` when the number of processes is no multiple of tensor x data.
    """
    if dist.get_world_size() % layout.world_size:
        raise LayoutError(world_size_message(layout, dist.get_world_size()))
    return replace(_arranged(layout, device), symmetric_memory=layout.symmetric_memory)


def _arranged(layout: Layout, device: torch.device) -> ParallelMesh:
    sequence_parallel = layout.sequence_parallel and layout.tensor > 1
    if layout.shard_size > 1 and layout.num_replicas > 1:
        return _make_hybrid_mesh(layout, device, sequence_parallel)
    device_mesh = _device_mesh(device, {"data": layout.data, "tensor": layout.tensor})
    data = Axis.of(device_mesh, "data")
    sharding = Sharding(data, None, data.device_mesh, layout.sharding == "zero2") if layout.shard_size > 1 else None
    return ParallelMesh(Axis.of(device_mesh, "tensor"), data, device, sequence_parallel, sharding)


def _make_hybrid_mesh(layout: Layout, device: torch.device, sequence_parallel: bool) -> ParallelMesh:
    """The ranks of a shard group are adjacent data ranks, such as those of a node."""
    axes = {"replica": layout.num_replicas, "shard": layout.shard_size, "tensor": layout.tensor}
    device_mesh = _device_mesh(device, axes)
    both = device_mesh["replica", "shard"]
    sharding = Sharding(
        shard=Axis.of(device_mesh, "shard"),
        replica=Axis.of(device_mesh, "replica"),
        device_mesh=both,
        keeps_weights=layout.sharding == "zero2",
    )
    data = Axis.along(both._flatten("data"), "data")
    return ParallelMesh(Axis.of(device_mesh, "tensor"), data, device, sequence_parallel, sharding)


def _device_mesh(device: torch.device, axes: dict[str, int]) -> DeviceMesh:
    """The mesh of these axes and, in front of them where there are more processes, of its repetitions."""
    repetitions = dist.get_world_size() // prod(axes.values())
    axes = {"repetition": repetitions, **axes} if repetitions > 1 else axes
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def layout_of(mesh: ParallelMesh) -> Layout:
    """A layout that makes such a mesh."""
    sharding = mesh.sharding
    return Layout(
        tensor=mesh.tensor.size,
        data=mesh.data.size,
        sequence_parallel=mesh.sequence_parallel,
        sharding="none" if sharding is None else "zero2" if sharding.keeps_weights else "zero3",
        shard_group=0 if sharding is None or sharding.replica is None else sharding.shard.size,
        symmetric_memory=mesh.symmetric_memory,
    )


def make_lone_mesh(device: torch.device) -> ParallelMesh:
    """The mesh of a rank that is alone on every axis, for an uncut model beside a cut one. Every rank calls it."""
    return make_repeated_mesh(Layout(), device)


def world_size_message(layout: Layout, world_size: int) -> str:
    """Error message for a number of processes that does not fit the layout."""
    return (
        f"`layout.tensor` x `layout.data` must be the number of processes ({world_size}), but is {layout.tensor} x "
        f"{layout.data} = {layout.world_size}. Start {layout.world_size} processes or change the layout."
    )
