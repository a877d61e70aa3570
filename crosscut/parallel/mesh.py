"""Mesh of ranks: the axes of a layout as each rank sees them.

A layout becomes one `DeviceMesh`. The order of the mesh's axes follows the table in `config/axes.py`; by default the
axes are ("data", "tensor"). The ranks along the tensor axis are therefore adjacent (paper, Figure 5). If there are
several groups of data ranks, and the ranks of each group share one copy of the model, the data axis is split into two
axes, ("replica", "shard"). Each batch is then split over the ranks of both axes. Layers receive an `Axis` or the whole
`ParallelMesh` as an argument, and use no global variable.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from crosscut.config import Layout, LayoutError, ZeroStage
from crosscut.config.axes import OPTIONS, AxisRole, role_of
from crosscut.config.layouts.ranks import Line
from crosscut.parallel.channels import Channels, make_channels, make_ends


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, as one rank sees it."""

    name: str
    device_mesh: DeviceMesh
    """One-dimensional mesh of the ranks on this axis."""
    rank: int
    """Position of this rank along the axis, from 0."""
    size: int
    """Number of ranks along the axis. At size 1, every collective is the identity."""
    group_name: str

    @classmethod
    def of(cls, device_mesh: DeviceMesh, name: str) -> "Axis":
        """Return the axis of `device_mesh` that is called `name`."""
        return cls.along(device_mesh[name], name)

    @classmethod
    def along(cls, line: DeviceMesh, name: str) -> "Axis":
        """Return an axis called `name` that consists of the ranks of the one-dimensional mesh `line`."""
        group = line.get_group()
        return cls(name, line, line.get_local_rank(), line.size(), group.group_name)

    def alone(self, name: str) -> "Axis":
        """Return an axis called `name` that contains only this rank. The axis has no process group, and its collectives
        send nothing.
        """
        return Axis(name, self.device_mesh, 0, 1, "")


class Reader(NamedTuple):
    """Place of a rank among the ranks that read different sequences of a batch. Ranks that read the same sequences have
    the same place.
    """

    rank: int
    """Index of the part of each batch that the rank reads, from 0."""
    size: int
    """Number of parts into which each batch is divided."""


@dataclass(frozen=True)
class Sharding:
    """Sharding of the model over data ranks (`sharding.shard_model`), as two axes of the mesh. The ranks of a shard
    group share one copy of the model.
    """

    shard: Axis
    """Axis along which the ranks of a shard group share one copy of the model."""
    replica: Axis | None
    """Axis along which ranks hold the same shard of different copies of the model. None if there is only one copy."""
    device_mesh: DeviceMesh
    """Mesh of both axes, ("replica", "shard"), or of the shard axis alone if there is only one copy."""
    keeps_weights: bool
    """Whether a layer's gathered weights stay in memory until the backward pass has used them (ZeRO-2). If false, the
    gathered weights are released after each use of the layer (ZeRO-3).
    """


@dataclass(frozen=True, kw_only=True)
class ParallelMesh:
    """Axes of a layout as one rank sees them, and the layout's options that change communication."""

    axes: tuple[Axis, ...]
    """Axes of the layout, outermost first, including `tensor` and `data`. The sizes of these axes multiply to the
    number of ranks.
    """
    tensor: Axis
    """Ranks that share the weights of each layer."""
    data: Axis
    """All data ranks. Batches are split over this axis."""
    tokens: Axis
    """All ranks that see different tokens. Losses, token counts and gradients are summed over this axis."""
    context: Axis
    """Ranks that share each sequence. Attention communicates along this axis."""
    copies: Axis | None
    """Ranks that hold the same part of every parameter. None if no two ranks hold the same part."""
    device: torch.device
    """Device on which this rank computes."""
    layout: Layout
    """Layout from which the mesh was made."""
    sequence_parallel: bool = False
    """Whether each tensor rank holds only a part of the sequence outside the parallel regions
    (`Layout.splits_sequence`).
    """
    pipeline: Axis | None = None
    """Ranks that share the model's layers, in stages; None if every rank has all layers."""
    ends: Axis | None = None
    """First and last rank of the pipeline, which both hold a copy of a tied embedding. None on the other ranks, and
    without a pipeline.
    """
    channels: Channels | None = None
    """Channels to the neighbouring ranks of the pipeline; None without a pipeline."""
    sharding: Sharding | None = None
    """Sharding of the model over the data ranks; None if every data rank holds a whole copy of the model."""
    symmetric_memory: bool = False
    """Whether the tensor ranks use symmetric memory, so that products overlap piece by piece with messages (see the
    module `symmetric_memory`).
    """

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is the first rank of the mesh. The first rank prints the output, and writes all files of
        the run except the checkpoints.
        """
        return all(axis.rank == 0 for axis in self.axes)

    @property
    def reader(self) -> Reader:
        """Place of this rank among the ranks that read different sequences of a batch."""
        return Reader(self.data.rank, self.data.size)

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes the loss. In a pipeline, only the last stage computes it."""
        return self.pipeline is None or self.pipeline.rank == self.pipeline.size - 1

    @property
    def without_tensor(self) -> "ParallelMesh":
        """Mesh on which a layer sends nothing over the tensor ranks, and the sequence is not split."""
        alone = self.tensor.alone(self.tensor.name)
        return replace(self, tensor=alone, sequence_parallel=False, symmetric_memory=False)

    @property
    def owners(self) -> tuple[Axis, ...]:
        """Axes along which each rank has parameters of its own, which no other rank on the axis has."""
        return tuple(axis for axis in self.axes if role_of(axis.name) is AxisRole.OWNS)

    @property
    def groups(self) -> tuple[Axis, ...]:
        """All axes with more than one rank. If axes share a process group, only one of these axes is included."""
        sharding = self.sharding
        parts = () if sharding is None else (sharding.shard, sharding.replica)
        every = (*self.axes, *parts, self.tokens, self.copies, self.ends)
        return tuple({axis.group_name: axis for axis in every if axis is not None and axis.size > 1}.values())

    @property
    def parameter_device(self) -> torch.device:
        """Device on which layers create their parameters. With sharding, this device is `meta`, so that parameters take
        no memory until `sharding.shard_model` allocates the shards.
        """
        return self.device if self.sharding is None else torch.device("meta")


def make_mesh(layout: Layout, device: torch.device) -> ParallelMesh:
    """Return the mesh of the layout for the running processes. Every rank must call this function.

    Needs an initialised process group (see `launch.processes`). Raises `LayoutError` if the number of processes differs
    from the layout's number of ranks.
    """
    if dist.get_world_size() != layout.world_size:
        raise LayoutError(world_size_message(layout, dist.get_world_size()))
    return make_repeated_mesh(layout, device)


def make_repeated_mesh(layout: Layout, device: torch.device) -> ParallelMesh:
    """Split the running processes into several meshes of the layout, and return the mesh of this rank. The first ranks
    form the first mesh, the next ranks form the second mesh, and so on. The meshes do not communicate with each other.
    Every rank must call this function.

    Raises `LayoutError` if the number of processes is not a multiple of the layout's number of ranks.
    """
    if dist.get_world_size() % layout.world_size:
        raise LayoutError(world_size_message(layout, dist.get_world_size()))
    return _arranged(layout, device)


def _arranged(layout: Layout, device: torch.device) -> ParallelMesh:
    lines = _Lines(_device_mesh(device, layout.mesh_axes))
    sharding = _sharding(layout, lines)
    axes = {option: lines.joined(_mesh_axes_of(option, layout), option) for option in layout.axes}
    pipeline = axes.get("pipeline")
    channels, ends = (None, None) if pipeline is None else _stages(layout, lines.device_mesh, pipeline, device)
    return ParallelMesh(
        axes=tuple(axes.values()),
        tensor=axes["tensor"],
        data=axes["data"],
        tokens=lines.along(layout.ranks.tokens) or axes["data"],
        context=axes.get("context") or axes["tensor"].alone("context"),
        copies=lines.along(layout.ranks.copies),
        device=device,
        layout=layout,
        sequence_parallel=layout.splits_sequence,
        pipeline=pipeline,
        ends=ends,
        channels=channels,
        sharding=sharding,
        symmetric_memory=layout.symmetric_memory,
    )


def _stages(
    layout: Layout, device_mesh: DeviceMesh, pipeline: Axis, device: torch.device
) -> tuple[Channels, Axis | None]:
    """Make the channels between the ranks of a pipeline, and the axis of the pipeline's first and last rank (None on
    other ranks).
    """
    assert device_mesh.mesh_dim_names is not None
    dim = device_mesh.mesh_dim_names.index("pipeline")
    lines = device_mesh.mesh.movedim(dim, -1).reshape(-1, pipeline.size).tolist()
    channels = make_channels(lines, is_ring=layout.stages_per_rank > 1, device=device)
    if pipeline.size == 2:
        return channels, pipeline
    group = make_ends(lines)
    if group is None:
        return channels, None
    line = DeviceMesh.from_group(group, device.type, mesh_dim_names=("ends",))
    return channels, Axis.along(line, "ends")


def _sharding(layout: Layout, lines: "_Lines") -> Sharding | None:
    """Make the sharding axes of a layout; None if the layout does not shard. A shard group consists of adjacent data
    ranks, such as the ranks of one node.
    """
    if (shard := lines.along(layout.ranks.slices)) is None:
        return None
    of_data = _mesh_axes_of("data", layout)
    replica = None if len(of_data) == 1 else lines.joined(("replica",), "replica")
    mesh = shard.device_mesh if replica is None else lines.device_mesh[of_data]
    return Sharding(shard, replica, mesh, layout.sharding is ZeroStage.ZERO2)


def _mesh_axes_of(option: str, layout: Layout) -> tuple[str, ...]:
    """Return the names of the device mesh's axes that belong to one field of the layout, such as `data`."""
    return tuple(name for name in layout.mesh_axes if name == option or name in {r.name for r in OPTIONS[option]})


class _Lines:
    """Axes made from a device mesh. Each axis is one axis of the device mesh, or joins several of its axes. Each
    process group is created only once.
    """

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self.device_mesh = device_mesh
        self._made: dict[tuple[str, ...], Axis] = {}

    def along(self, line: Line) -> Axis | None:
        """Return the axis of a line of the layout's plan, or None if the line has one rank."""
        return self.joined(line.axes, line.name) if line.axes else None

    def joined(self, names: tuple[str, ...], joined_name: str) -> Axis:
        """Return one axis that joins the axes with these names, outermost first. For a single name, this is the device
        mesh's own axis. For several names, it is a new axis called `joined_name`.
        """
        if names not in self._made:
            if len(names) == 1:
                self._made[names] = Axis.of(self.device_mesh, names[0])
            else:
                self._made[names] = Axis.along(self.device_mesh[names]._flatten(joined_name), joined_name)
        return self._made[names]


def _device_mesh(device: torch.device, axes: dict[str, int]) -> DeviceMesh:
    """Make the device mesh of `axes`, which maps the name of each axis to its size. If there are more processes than
    ranks, an outermost axis `repetition` is added.
    """
    repetitions = dist.get_world_size() // prod(axes.values())
    axes = {"repetition": repetitions, **axes} if repetitions > 1 else axes
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def make_lone_mesh(device: torch.device) -> ParallelMesh:
    """Return a mesh that contains only this rank, so that every axis has size 1. A model on this mesh is not cut, and
    can be compared with a cut model. Every rank must call this function.
    """
    return make_repeated_mesh(Layout(), device)


def world_size_message(layout: Layout, world_size: int) -> str:
    """Return the error message for a layout that does not fit the number of processes `world_size`."""
    sizes = " x ".join(map(str, reversed(layout.axes.values())))
    return (
        f"{layout.names_of_axes} must be the number of processes ({world_size}), but is {sizes} = {layout.world_size}. "
        f"Change the number of processes to {layout.world_size}, or change the layout."
    )
