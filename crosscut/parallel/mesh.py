"""Mesh of ranks: the axes of a layout as each rank sees them.

A layout becomes one `DeviceMesh`. The order of the mesh's axes follows the table in `config/axes.py`; by default the
axes are ("data", "tensor"). The ranks along the tensor axis are therefore adjacent (paper, Figure 5). If there are
several groups of data ranks, and the ranks of each group share one copy of the model, the data axis is split into two
axes, ("replica", "shard"). Each batch is then split over the ranks of both axes. Layers receive an `Axis` or the whole
`ParallelMesh` as an argument, and use no global variable.

If several ranks share the experts of a layer, a second `DeviceMesh` arranges the same ranks along the axes of the
experts, by default ("expert_data", "expert", "tensor"). Two axes may then consist of the same ranks. Each of the two
axes has a process group with a name of its own, so the name of a message's group is also the name of its axis.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from crosscut.config import Layout, LayoutError, ZeroStage
from crosscut.config.axes import is_folded
from crosscut.config.layouts.ranks import Line, RankPlan
from crosscut.parallel.owners.stages import Channels, make_channels, make_ends


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
        group_name = name_of_group(name, line.get_group().group_name)
        return cls(name, line, line.get_local_rank(), line.size(), group_name)

    def alone(self, name: str) -> "Axis":
        """Return an axis called `name` that contains only this rank. The axis has no process group, and its collectives
        send nothing.
        """
        return Axis(name, self.device_mesh, 0, 1, "")

    def apart_from(self, names: Collection[str]) -> "Axis":
        """Return the axis with a group name that is not in `names`. If the name of the axis's process group is in
        `names`, the group gets a second name.
        """
        if self.group_name not in names:
            return self
        name = f"{self.name}/{self.group_name}"
        if not _is_registered(name):
            _register_process_group(name, self.device_mesh.get_group())  # type: ignore[arg-type]
        return replace(self, group_name=name)


def name_of_group(axis: str, group_name: str) -> str:
    """Return the name of a process group as the group of this axis. An axis of experts may have a second name for a
    group that another axis also uses (`Axis.apart_from`).
    """
    second = f"{axis}/{group_name}"
    return second if is_folded(axis) and _is_registered(second) else group_name


def _is_registered(group_name: str) -> bool:
    """Whether a process group has this name."""
    try:
        _resolve_process_group(group_name)  # type: ignore[arg-type]
    except RuntimeError:
        return False
    return True


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
class PlanAxes:
    """Axes over which ranks hold the parameters of one plan (`RankPlan`), as one rank sees them."""

    ranks: RankPlan
    cuts: DeviceMesh
    """Mesh on which layers create the parameters: the axes that cut parameters, ("tensor",) or ("expert", "tensor")."""
    tokens: Axis
    """Ranks that hold the same parameters, or store slices of them, and see different tokens. Gradients are summed over
    this axis."""
    copies: Axis | None
    """Ranks that hold the same part of every parameter. None if no two ranks hold the same part."""
    sharding: Sharding | None
    """Sharding of the parameters over these ranks; None if every rank holds whole parameters, or its cut of them."""
    named: tuple[Axis, ...]
    """All axes of the plan."""


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
    context: Axis
    """Ranks that share each sequence. Attention communicates along this axis."""
    expert: Axis
    """Ranks that share the experts of a layer. They see different tokens, and send these tokens to the experts."""
    pipeline: Axis
    """Ranks that share the model's layers, in stages."""
    dense: PlanAxes
    """Axes of all parameters that are not experts."""
    experts: PlanAxes
    """Axes of the experts. With one expert rank, these are the axes of all other parameters."""
    device: torch.device
    """Device on which this rank computes."""
    layout: Layout
    """Layout from which the mesh was made."""
    sequence_parallel: bool = False
    """Whether each tensor rank holds only a part of the sequence outside the parallel regions
    (`Layout.splits_sequence`).
    """
    ends: Axis | None = None
    """First and last rank of the pipeline, which both hold a copy of a tied embedding. None on the other ranks, and
    without a pipeline.
    """
    channels: Channels | None = None
    """Channels to the neighbouring ranks of the pipeline; None without a pipeline."""
    symmetric_memory: bool = False
    """Whether the tensor ranks use symmetric memory, so that products overlap piece by piece with messages (see the
    module `symmetric_memory`).
    """

    @property
    def tokens(self) -> Axis:
        """All ranks that see different tokens. Losses, token counts and gradients are summed over this axis."""
        return self.dense.tokens

    @property
    def copies(self) -> Axis | None:
        """Ranks that hold the same part of every parameter that is not an expert. None if no two ranks do."""
        return self.dense.copies

    @property
    def sharding(self) -> Sharding | None:
        """Sharding of the model over the data ranks; None if every data rank holds a whole copy of the model."""
        return self.dense.sharding

    @property
    def plans(self) -> tuple[PlanAxes, ...]:
        """Axes of the two plans, or of the only plan if all parameters have the same."""
        return (self.dense,) if self.experts is self.dense else (self.dense, self.experts)

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
    def is_staged(self) -> bool:
        """Whether several ranks share the model's layers, in stages."""
        return self.pipeline.size > 1

    @property
    def shares_layers(self) -> bool:
        """Whether ranks that see different tokens need each other to compute a layer, because they share its weights
        or its experts.
        """
        return self.sharding is not None or self.expert.size > 1

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes the loss. In a pipeline, only the last stage computes it."""
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def without_tensor(self) -> "ParallelMesh":
        """Mesh on which a layer sends nothing over the tensor ranks, and the sequence is not split."""
        alone = self.tensor.alone(self.tensor.name)
        return replace(self, tensor=alone, sequence_parallel=False, symmetric_memory=False)

    @property
    def owners(self) -> tuple[Axis, ...]:
        """Axes along which each rank has parameters of its own, under names of their own."""
        return (self.pipeline,)

    @property
    def groups(self) -> tuple[Axis, ...]:
        """All axes with more than one rank. If axes share a process group, only one of these axes is included."""
        of_plans = (axis for plan in self.plans for axis in plan.named)
        every = (*self.axes, *of_plans, self.ends)
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
    lines = _Lines(layout.ranks, device)
    axes = {option: lines.joined(_mesh_axes_of(option, layout.ranks), option) for option in layout.axes}
    alone = axes["tensor"].alone
    pipeline = axes.get("pipeline") or alone("pipeline")
    channels, ends = (None, None) if pipeline.size == 1 else _stages(layout, lines.device_mesh, pipeline, device)
    dense = experts = _plan_axes(layout, lines)
    expert = alone("expert")
    if expert_lines := _expert_lines(layout, lines, device):
        experts, expert = _plan_axes(layout, expert_lines), expert_lines.joined(("expert",), "expert")
    return ParallelMesh(
        axes=tuple(axes.values()),
        tensor=axes["tensor"],
        data=axes["data"],
        context=axes.get("context") or alone("context"),
        expert=expert,
        pipeline=pipeline,
        dense=dense,
        experts=experts,
        device=device,
        layout=layout,
        sequence_parallel=layout.splits_sequence,
        ends=ends,
        channels=channels,
        symmetric_memory=layout.symmetric_memory,
    )


def _expert_lines(layout: Layout, lines: "_Lines", device: torch.device) -> "_Lines | None":
    """Make the device mesh of the experts; None if experts are arranged like all other parameters."""
    return None if layout.expert_ranks is layout.ranks else _Lines(layout.expert_ranks, device, apart_from=lines)


def _plan_axes(layout: Layout, lines: "_Lines") -> PlanAxes:
    """Return the axes of a plan whose process groups `lines` makes."""
    ranks = lines.ranks
    for name in ranks.mesh_axes:
        lines.joined((name,), name)
    return PlanAxes(
        ranks=ranks,
        cuts=lines.device_mesh[ranks.cut_axes],
        tokens=lines.along(ranks.tokens) or lines.joined((ranks.tokens.name,), ranks.tokens.name),
        copies=lines.along(ranks.copies),
        sharding=_sharding(layout, lines),
        named=lines.made,
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
    """Make the sharding axes of a plan; None if the layout does not shard. A shard group consists of adjacent data
    ranks, such as the ranks of one node. Experts of which each rank has a whole copy form shard groups of one rank.
    """
    if layout.ranks.slices.size == 1:
        return None
    ranks = lines.ranks
    of_data = _mesh_axes_of(next(row.option for row in ranks.rows if row.stores_slices), ranks)
    shard = lines.along(ranks.slices) or lines.joined(of_data[-1:], of_data[-1])
    replica = None if len(of_data) == 1 else lines.joined(of_data[:1], of_data[0])
    mesh = shard.device_mesh if replica is None else lines.device_mesh[of_data]
    return Sharding(shard, replica, mesh, layout.sharding is ZeroStage.ZERO2)


def _mesh_axes_of(option: str, ranks: RankPlan) -> tuple[str, ...]:
    """Return the names of the device mesh's axes that belong to one field of the layout, such as `data`."""
    rows = {row.name for row in ranks.rows if row.option == option}
    return tuple(name for name in ranks.mesh_axes if name in {option, *rows})


class _Lines:
    """Axes made from the device mesh of a plan. Each axis is one axis of the device mesh, or joins several of its axes.
    Each process group is created only once.
    """

    def __init__(self, ranks: RankPlan, device: torch.device, *, apart_from: "_Lines | None" = None) -> None:
        """`apart_from` are the axes of another plan. No axis of this plan has the group name of one of them."""
        self.ranks, self.device_mesh = ranks, _device_mesh(device, ranks.mesh_axes)
        self._made: dict[tuple[str, ...], Axis] = {}
        self._taken = () if apart_from is None else {axis.group_name for axis in apart_from.made}

    @property
    def made(self) -> tuple[Axis, ...]:
        """All axes made so far."""
        return tuple(self._made.values())

    def along(self, line: Line) -> Axis | None:
        """Return the axis of a line of the plan, or None if the line has one rank."""
        return self.joined(line.axes, line.name) if line.axes else None

    def joined(self, names: tuple[str, ...], joined_name: str) -> Axis:
        """Return one axis that joins the axes with these names, outermost first. For a single name, this is the device
        mesh's own axis. For several names, it is a new axis called `joined_name`.
        """
        if names not in self._made:
            if len(names) == 1:
                axis = Axis.of(self.device_mesh, names[0])
            else:
                axis = Axis.along(self.device_mesh[names]._flatten(joined_name), joined_name)
            self._made[names] = axis.apart_from(self._taken)
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
