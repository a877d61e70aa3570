"""Check that replicas of a parameter still have identical bits on all ranks.

Replicas start with the same values and take the same steps. They can differ only if memory or a device fails, or if a
bug gives the ranks different gradients. After such a failure, the ranks train different models, and the loss does not
show the problem. The table of axes (`config/axes.py`) says which ranks hold the same bits:

- Data ranks and context ranks hold the same part of every parameter, unless they share one copy of the model.
- If several groups of data ranks each share a copy, the ranks with the same shard hold the same bits.
- Ranks that share the experts of a layer hold different experts. The ranks with the same experts hold the same bits.
- Tensor ranks hold the same bits of every parameter that the tensor axis does not cut. (If data ranks share a copy,
  this holds only for tensor ranks with the same position in the shard group.)
- The first and the last stage of a pipeline hold the same bits of a tied embedding.

Each rank hashes its part of every parameter into one int64, on its device, and the ranks compare the hashes. For each
axis, one all-reduce with 16 bytes per parameter computes the maximum of the hashes h and the maximum of ~h. The hashes
are equal exactly if the second maximum is the bitwise complement of the first. Let x_i be the bits of element i as an
integer, and let A and B be odd numbers. All arithmetic is modulo 2^64:

    m_i = (x_i + A i) B        h = sum over i of (m_i xor (m_i >> 32)) B

Each term of the sum is one-to-one in x_i, so a difference in a single element always changes the hash. The position i
enters each term, so swapping two elements changes the hash, too. -0.0 and 0.0 count as different.

AdamW's moments are not compared, because a difference in the moments changes the parameter one step later.

This module also sends decisions that must be the same on all ranks, such as a rollback to an earlier state
(`FirstRankNews`).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from crosscut.config import Layout
from crosscut.parallel.collectives import all_gather_objects, all_reduce, background_group, from_all_ranks
from crosscut.parallel.mesh import Axis, ParallelMesh
from crosscut.parallel.state.parameters import cut_dim, cuts_of, is_expert, local_part, plan_of

_POSITION = 0x9E3779B97F4A7C15 - (1 << 64)
_SPREAD = 0xD6E8FEB86659FD93 - (1 << 64)
_LOW_HALF = (1 << 32) - 1

_ELEMENTS_AT_ONCE = 1 << 22
"""Number of elements that are hashed at once. The intermediate integers take 32 MiB."""

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Drift(NamedTuple):
    """Report about replicas that differ although they should be equal. It describes the first parameter whose replicas
    differ.
    """

    name: str
    ranks: tuple[int, ...]
    """Ranks that differ from the majority. If there is no majority, all ranks that should hold the same values."""
    others: tuple[int, ...]
    """Ranks of the majority. They hold the most common values. Empty if there is no majority."""
    size: float = 0.0
    """Largest difference between the ranks in any element, divided by the largest finite absolute value of the
    parameter. Infinite if the ranks differ in an element that is NaN or infinite on some rank.
    """
    num_parameters: int = 1
    """Number of parameters that differ. A difference between tensor ranks spreads to other parameters in the following
    steps.
    """


@torch.no_grad()
def find_drift(parameters: Mapping[str, Tensor], mesh: ParallelMesh) -> Drift | None:
    """Compare the replicas of all parameters. Return a description of the first parameter whose replicas differ, or
    None if all replicas agree. Every rank must call this function, and every rank gets the same result.

    `parameters` maps names to distributed tensors, with the same names in the same order on all ranks of a pipeline
    stage. If data ranks share one copy of the model, call `sharding.reshard` first and pass the shards.

    Communication if all replicas agree (an axis of size 1 sends nothing):

    - over the ranks that hold copies: an all-reduce of two int64 per parameter;
    - over the ranks that hold copies of the same experts, if several ranks share the experts: an all-reduce of two
      int64 per parameter of experts, and one more int64 in the all-reduce above;
    - over the tensor axis: an all-reduce of two int64 per replicated parameter, and one more int64;
    - over the shard group, if the model is sharded: an all-reduce of one int64;
    - over the first and the last stage of a pipeline: an all-reduce of two int64 per parameter that both hold, and over
      all stages an all-reduce of one int64.

    If replicas differ, the ranks also send all hashes. In addition, for the first differing parameter, they send twice
    its local size over each axis along which it has replicas. If all replicas agree, the host waits for the device
    once.
    """
    of_copies = [plan.copies for plan in mesh.plans]
    if not parameters or (mesh.tensor.size == 1 and not mesh.is_staged and not any(of_copies)):
        return None
    names = list(parameters)
    hashes = torch.stack([hash_of(parameter) for parameter in parameters.values()])
    on_both = _on_both_ends(names, mesh)
    if not _any_differs(hashes, mesh, list(parameters.values()), tied=[names.index(name) for name in on_both]):
        return None
    held = {name: (found, _cut_by(parameters[name])) for name, found in zip(names, hashes.tolist(), strict=True)}
    drift = _describe(held, mesh)
    return drift._replace(size=_difference(parameters.get(drift.name), mesh, is_tied=drift.name in on_both))


def _any_differs(hashes: Tensor, mesh: ParallelMesh, parameters: Sequence[Tensor], *, tied: list[int]) -> bool:
    """Whether ranks that should have equal hashes differ in any hash. All ranks get the same answer. `tied` lists the
    indices of the parameters that the first and the last stage of a pipeline both hold.
    """

    def chosen(indices: list[int]) -> Tensor:
        return hashes[torch.tensor(indices, dtype=torch.int64, device=hashes.device)]

    experts = [i for i, parameter in enumerate(parameters) if is_expert(parameter)]
    dense = [i for i in range(len(parameters)) if i not in set(experts)]
    drifted: Tensor | None = None
    if experts and mesh.experts.copies is not None:
        drifted = _differs(chosen(experts), mesh.experts.copies).any()
    # The ranks of other groups do not know of a drift in one group. Share it, so that all ranks take the same branch in
    # `find_drift`.
    if mesh.copies is not None:
        drifted = _differs(chosen(dense) if experts else hashes, mesh.copies, also=drifted).any()
    if drifted is None:
        drifted = torch.zeros((), dtype=torch.bool, device=hashes.device)
    replicated = [i for i, parameter in enumerate(parameters) if cut_dim(parameter) is None]
    drifted = _differs(chosen(replicated), mesh.tensor, also=drifted).any()
    if mesh.ends is not None and tied:
        drifted = _differs(chosen(tied), mesh.ends, also=drifted).any()
    shard = None if mesh.sharding is None else mesh.sharding.shard
    for axis in (shard, *mesh.owners):
        if axis is not None:
            drifted = all_reduce(drifted.to(torch.int64).view(1), axis, "max") > 0
    return bool(drifted)


def _on_both_ends(names: list[str], mesh: ParallelMesh) -> list[str]:
    """Return the names of the parameters that the first and the last stage of a pipeline both hold. Empty on other
    stages.
    """
    if mesh.ends is None:
        return []
    first, last = all_gather_objects(names, mesh.ends)
    return [name for name in first if name in set(last)]


def hash_of(tensor: Tensor) -> Tensor:
    """Return a hash of the bits of this rank's part of a tensor, as an int64 scalar on the tensor's device."""
    local = local_part(tensor)
    bits = local.detach().contiguous().view(-1).view(_INTEGERS[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    places: Tensor | None = None
    for start in range(0, bits.numel(), _ELEMENTS_AT_ONCE):
        piece = bits[start : start + _ELEMENTS_AT_ONCE]
        if places is None:
            places = torch.arange(piece.numel(), device=bits.device).mul_(_POSITION)
        mixed = (places[: piece.numel()] + piece).add_(_wrapped(start * _POSITION)).mul_(_SPREAD)
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_LOW_HALF))
        total += mixed.mul_(_SPREAD).sum()
    return total


def _wrapped(number: int) -> int:
    """Convert a number modulo 2^64 to a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _differs(hashes: Tensor, axis: Axis, *, also: Tensor | None = None) -> Tensor:
    """Return, for each hash, whether it differs along the axis. With `also`, the result has one more element at the
    end: whether `also` is true on any rank of the axis.
    """
    flag = [] if also is None else [also.to(torch.int64).view(1)]
    highest = all_reduce(torch.cat([hashes, ~hashes, *flag]), axis, "max")
    count = hashes.numel()
    different = highest[:count] != ~highest[count : 2 * count]
    return torch.cat([different, highest[2 * count :] > 0])


def _difference(parameter: Tensor | None, mesh: ParallelMesh, *, is_tied: bool) -> float:
    """Compare the ranks that should hold the same values of a parameter. Return the largest difference in any element,
    divided by the largest finite absolute value in the parameter. `parameter` is None on stages of a pipeline that do
    not hold the parameter. `is_tied` is true if both the first and the last stage hold the parameter.
    """
    apart = largest = 0.0
    axes, local = list[Axis](), torch.empty(0)
    if parameter is not None:
        tensor, ends = mesh.tensor if cut_dim(parameter) is None else None, mesh.ends if is_tied else None
        axes = [axis for axis in (plan_of(parameter, mesh).copies, tensor, ends) if axis is not None]
        local = local_part(parameter).detach().reshape(-1)
    for piece in local.split(_ELEMENTS_AT_ONCE) if local.numel() else ():
        piece = piece.nan_to_num(torch.inf, torch.inf, -torch.inf)  # the maximum may ignore NaN
        edges = torch.stack([piece, -piece])
        for axis in axes:
            edges = all_reduce(edges, axis, "max")
        edges = edges.double()
        # Maximum minus minimum. Where all ranks have the same infinity, the difference is 0.
        between = edges.sum(0).nan_to_num(0.0, torch.inf)
        finite = edges.abs().nan_to_num(posinf=0.0)
        apart, largest = max(apart, between.max().item()), max(largest, finite.max().item())
    told = from_all_ranks((apart, largest), mesh)
    apart, largest = max(apart for apart, _ in told), max(largest for _, largest in told)
    return apart if apart == math.inf else apart / (largest or 1.0)


def _cut_by(parameter: Tensor) -> tuple[str, ...]:
    """Return the names of the axes of which each rank holds another part of a parameter."""
    return tuple(cut.axis for cut in cuts_of(parameter) if cut.num_parts > 1)


def _describe(mine: dict[str, tuple[int, tuple[str, ...]]], mesh: ParallelMesh) -> Drift:
    """Gather all hashes and describe the first parameter that differs. `mine` maps the name of each parameter of this
    rank to its hash, and to the axes that cut the parameter. Every rank must call this function.
    """
    held_by = from_all_ranks(mine, mesh)
    found: list[Drift] = []
    for name, cut_by in {name: cut_by for of_rank in held_by for name, (_, cut_by) in of_rank.items()}.items():
        for group in _same_ranks(mesh.layout, cut_by):
            held = {rank: held_by[rank][name][0] for rank in group if name in held_by[rank]}
            counts = Counter(held.values()).most_common(2)
            if len(counts) > 1:
                most = counts[0][0] if counts[0][1] > counts[1][1] else None
                others = tuple(rank for rank in held if held[rank] == most)
                found.append(Drift(name, tuple(rank for rank in held if held[rank] != most), others))
                break
    return found[0]._replace(num_parameters=len(found))


@lru_cache(maxsize=64)
def _same_ranks(layout: Layout, cut_by: tuple[str, ...]) -> list[list[int]]:
    """Divide the ranks of the layout into groups. If several ranks of one group hold a parameter, they should hold the
    same bits of it. `cut_by` names the axes that cut the parameter.
    """
    lines = [layout.line(name) for name in cut_by]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        groups.setdefault(tuple(line.place_of(rank) for line in lines), []).append(rank)
    return list(groups.values())


class FirstRankNews:
    """Repeated one-byte messages by which the first rank tells the other ranks whether an event has happened.

    A message is an all-reduce (max) over all ranks, in a separate group on the CPU. It therefore neither waits for a
    device nor mixes with other messages. The first rank decides for all ranks, because the other ranks might decide
    differently: two ranks that add up a loss in different orders may get results that differ in the last bit. A single
    rank sends nothing.
    """

    def __init__(self) -> None:
        """Create the group. Every rank must create the object."""
        self._group = background_group() if dist.get_world_size() > 1 else None
        self._sent: tuple[dist.Work, Tensor] | None = None

    def pass_on(self, happened: bool) -> bool:
        """Start sending the first rank's `happened` to all ranks, and return the value that the previous call sent. On
        a single rank, return `happened` itself. Only the first rank's argument matters. Every rank must call this
        method.
        """
        if self._group is None:
            return happened
        earlier = self._read()
        mine = torch.tensor([happened and dist.get_rank() == 0], dtype=torch.uint8)
        self._sent = (dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group, async_op=True), mine)
        return earlier

    def settle(self, happened: bool) -> bool:
        """Return true if the event has happened on the first rank, or if the previous call of `pass_on` sent true.
        Waits for the message. Every rank must call this method.
        """
        earlier = self.pass_on(happened)
        return (self._read() or earlier) if self._group is not None else happened

    def any_of(self, happened: bool) -> bool:
        """Return whether `happened` is true on any rank. Waits for the message. Every rank must call this method."""
        if self._group is None:
            return happened
        self.discard()
        mine = torch.tensor([happened], dtype=torch.uint8)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group)
        return bool(mine.item())

    def discard(self) -> None:
        """Wait for a message whose value no call has returned yet, and discard the value."""
        self._read()

    def _read(self) -> bool:
        if self._sent is None:
            return False
        (work, news), self._sent = self._sent, None
        work.wait()
        return bool(news.item())
