"""Whether the ranks that hold the same parameter still hold the same bits.

Replicas start alike and take the same steps, so they never differ, unless memory or a device fails, or a program error
gives ranks different gradients; then every rank trains a model of its own, and no loss tells. Which ranks hold the same
bits follows from the table of axes (`ParallelMesh.copies`): data ranks hold the same part of every parameter, unless
they share one copy; then only the same shares of different copies are the same. Tensor ranks hold the same of those
parameters that the tensor axis does not cut, or the same share of it.

Each rank hashes its parameters where they are, into one int64 each, and the ranks compare the hashes: one all-reduce of
16 bytes a parameter along each axis, the maximum of h and of ~h, which agree exactly when all h are equal. With the
bits of element i as an integer x_i and odd numbers A, B, all arithmetic modulo 2^64:

    m_i = (x_i + A i) B        h = sum over i of (m_i xor (m_i >> 32)) B

Each term is one-to-one in x_i, so a difference in one element always shows; that the position goes in before the mixing
makes two swapped elements show, too. -0.0 and 0.0 differ.

AdamW's moments are not compared: what differs in them differs in the parameter a step later.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.config.axes import AXES, Role
from crosscut.parallel.collectives import all_reduce, from_all_ranks
from crosscut.parallel.mesh import Axis, ParallelMesh, layout_of
from crosscut.parallel.state.parameters import cut_dim, local_part

_POSITION = 0x9E3779B97F4A7C15 - (1 << 64)
_SPREAD = 0xD6E8FEB86659FD93 - (1 << 64)
_LOW_HALF = (1 << 32) - 1

_ELEMENTS_AT_ONCE = 1 << 22
"""Elements that are hashed together: 32 MiB for their integers."""

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Drift(NamedTuple):
    """First parameter that differs between ranks that should hold the same values."""

    name: str
    ranks: tuple[int, ...]
    """The ranks that differ from the majority of ranks that should agree; all such ranks where there is no majority."""
    others: tuple[int, ...]
    """The ranks that agree with the majority; empty where there is no majority."""
    size: float = 0.0
    """The largest difference of an element between ranks that should hold the same, relative to the largest finite one;
    infinite where one that is not finite differs."""
    num_parameters: int = 1
    """Number of parameters that differ: at the next steps a drift spreads, between tensor ranks to all parameters."""


@torch.no_grad()
def find_drift(parameters: Mapping[str, Tensor], mesh: ParallelMesh) -> Drift | None:
    """The first of the parameters that replicas do not agree on, the same on every rank; None where they all agree.

    `parameters` are distributed tensors by name, the same names in the same order on every rank, which all call it.
    Where data ranks share one copy, give the shares (`sharding.reshard`). Communication: an all-reduce of two int64 a
    parameter over the ranks that hold copies, which is the data axis, and one of two for each parameter that is whole
    on the tensor ranks, and one more, over the tensor axis; where shards are compared one element more over the shard
    group; only after a drift the hashes themselves and, over each axis, twice the parameter. An axis of one rank sends
    nothing. Waits for the device once where there is no drift.
    """
    copies, shard = mesh.copies, None if mesh.sharding is None else mesh.sharding.shard
    if (mesh.tensor.size == 1 and copies is None) or not parameters:
        return None
    names = list(parameters)
    hashes = torch.stack([hash_of(parameter) for parameter in parameters.values()])
    replicated = [i for i, parameter in enumerate(parameters.values()) if cut_dim(parameter) is None]
    drifted = torch.zeros((), dtype=torch.bool, device=hashes.device)
    if copies is not None:
        drifted = _differs(hashes, copies).any()
    # The ranks of one group know of a drift that the others do not: all take the same way from here on.
    chosen = hashes[torch.tensor(replicated, dtype=torch.int64, device=hashes.device)]
    drifted = _differs(chosen, mesh.tensor, also=drifted).any()
    if shard is not None:
        drifted = all_reduce(drifted.to(torch.int64).view(1), shard, "max") > 0
    if not bool(drifted):
        return None
    drift = _describe(names, set(replicated), hashes.tolist(), mesh)
    return drift._replace(size=_difference(parameters[drift.name], mesh))


def hash_of(tensor: Tensor) -> Tensor:
    """A hash of the bits of this rank's part of a tensor, an int64 scalar on the tensor's device."""
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
    """The number modulo 2^64, as a signed one."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _differs(hashes: Tensor, axis: Axis, *, also: Tensor | None = None) -> Tensor:
    """Which hashes are not the same along the axis, and, last, whether `also` is true on any of its ranks."""
    flag = [] if also is None else [also.to(torch.int64).view(1)]
    highest = all_reduce(torch.cat([hashes, ~hashes, *flag]), axis, "max")
    count = hashes.numel()
    different = highest[:count] != ~highest[count : 2 * count]
    return torch.cat([different, highest[2 * count :] > 0])


def _difference(parameter: Tensor, mesh: ParallelMesh) -> float:
    """By how much the ranks that should hold the same of a parameter are apart, relative to its largest element."""
    axes = [axis for axis in (mesh.copies, mesh.tensor if cut_dim(parameter) is None else None) if axis is not None]
    local = local_part(parameter).detach().reshape(-1)
    apart = largest = 0.0
    for piece in local.split(_ELEMENTS_AT_ONCE) if local.numel() else ():
        piece = piece.nan_to_num(torch.inf, torch.inf, -torch.inf)  # a maximum may pass over what is no number
        edges = torch.stack([piece, -piece])
        for axis in axes:
            edges = all_reduce(edges, axis, "max")
        edges = edges.double()
        between = edges.sum(0).nan_to_num(
            0.0, torch.inf
        )  # the highest less the lowest; the same infinity is no way off
        finite = edges.abs().nan_to_num(posinf=0.0)
        apart, largest = max(apart, between.max().item()), max(largest, finite.max().item())
    told: list[tuple[float, float]] = from_all_ranks((apart, largest), mesh)
    apart, largest = max(apart for apart, _ in told), max(largest for _, largest in told)
    return apart if apart == math.inf else apart / (largest or 1.0)


def _describe(names: list[str], replicated: set[int], mine: list[int], mesh: ParallelMesh) -> Drift:
    """Gather all hashes and find the first parameter that differs, and where."""
    held_by: list[list[int]] = from_all_ranks(mine, mesh)
    groups = {is_replicated: _same_ranks(layout_of(mesh), is_replicated) for is_replicated in (False, True)}
    found: list[Drift] = []
    for i, name in enumerate(names):
        for group in groups[i in replicated]:
            held = {rank: held_by[rank][i] for rank in group}
            counts = Counter(held.values()).most_common(2)
            if len(counts) > 1:
                most = counts[0][0] if counts[0][1] > counts[1][1] else None
                others = tuple(rank for rank in group if held[rank] == most)
                found.append(Drift(name, tuple(rank for rank in group if held[rank] != most), others))
                break
    return found[0]._replace(num_parameters=len(found))


def _same_ranks(layout: Layout, is_replicated: bool) -> list[list[int]]:
    """Groups of ranks that should hold the same bits of a parameter, which the tensor axis cuts or not."""
    distinct = [row.name for row in AXES if not (row.holds_copies or (is_replicated and row.role is Role.CUTS))]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        place = layout.place_of(rank)
        groups.setdefault(tuple(place[name] for name in distinct if name in place), []).append(rank)
    return list(groups.values())
