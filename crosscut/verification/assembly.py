"""The parts that the ranks hold, put together to what the uncut model has.

Parameters say themselves how they are cut. For activations the shapes say it: where the uncut tensor is larger, the
ranks of an axis hold pieces of it, where it is as large, they hold the same; in between, as with heads of keys and
values that are fewer than the ranks, adjacent ranks hold the same piece. Should two arrangements fit the shapes, the
better fitting one is taken: a fault spoils both.

D data ranks, T tensor ranks; rank = data rank x T + tensor rank.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

Grid = list[list[Tensor]]
"""The ranks' parts: [data rank][tensor rank]."""


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise |a - b| in float64, zero where both are the same infinity; complex numbers count by their parts."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    a, b = a.double(), b.double()
    return (a - b).abs().masked_fill(a == b, 0.0)


class Assembled(NamedTuple):
    """Parts put together."""

    whole: Tensor
    """In the uncut tensor's shape, from the first rank of every axis along which the parts are copies."""
    copies_differ: list[tuple[int, int]]
    """Pairs of ranks that should hold the same and do not, the first of each the one that was taken."""
    spread: float = 0.0
    """The largest distance between copies."""


def grid_of(parts: list[Tensor], tensor: int) -> Grid:
    """The parts in the order of all ranks, by data and tensor rank."""
    return [parts[first : first + tensor] for first in range(0, len(parts), tensor)]


def assemble_parameter(grid: Grid, cut_dim: int | None, like: Tensor) -> Assembled | None:
    """A parameter, or what belongs to one, in the shape of `like`; rows that only fill up a vocabulary are left out.

    None where shapes do not allow it. A row that is left out must be zero: what is not shows as an infinite value.
    """
    assembled = _assemble(grid, _Arrangement(None, cut_dim, len(grid[0]) if cut_dim is None else 1))
    whole = assembled.whole
    if cut_dim == 0 and whole.dim() and whole.shape[0] != like.shape[0]:
        whole = _fit_rows(whole, like.shape[0])
    return assembled._replace(whole=whole) if whole.shape == like.shape else None


def _fit_rows(whole: Tensor, rows: int) -> Tensor:
    """The first `rows` rows; missing ones are zeros."""
    kept = whole[:rows].clone()
    if whole[rows:].any():
        kept[-1] = torch.inf
    return torch.cat([kept, kept.new_zeros(rows - kept.shape[0], *kept.shape[1:])])


class _Arrangement(NamedTuple):
    """A possible distribution of a tensor over the ranks."""

    data_dim: int | None
    """The dimension that the data axis cuts."""
    tensor_dim: int | None
    """The dimension that the tensor axis cuts."""
    group: int
    """Number of adjacent tensor ranks that hold the same part."""


def assemble_activation(grid: Grid, like: Tensor, *, is_gradient: bool, is_inside: bool = False) -> Assembled | None:
    """An activation or its gradient in the shape of `like`; None where shapes do not allow it.

    Where data ranks hold the same activation, such as that of a position, each has its own part of the gradient, and
    so have tensor ranks that hold the same piece; or all the same, if it `is_inside` a module, perhaps of a parallel
    region. And a single number that a module returns may be this data rank's part of a loss.
    """
    best: tuple[float, Assembled] | None = None
    for arrangement in _arrangements(grid, like):
        for parts, fitting in _summed_or_not(grid, like, arrangement, is_gradient, is_inside):
            assembled = _assemble(parts, fitting)
            difference = distance(assembled.whole, like).nan_to_num(torch.inf).sum().item()
            if best is None or difference < best[0]:
                best = (difference, assembled)
    return best[1] if best else None


def _summed_or_not(
    grid: Grid, like: Tensor, how: _Arrangement, is_gradient: bool, is_inside: bool
) -> Iterator[tuple[Grid, _Arrangement]]:
    """The parts as they are, and added up where they may be parts of a sum, each with what they then are."""
    sums = is_gradient and how.data_dim is None
    if not sums or like.dim() == 0:
        yield grid, how
    if sums or (how.data_dim is None and like.dim() == 0):
        grid = [[torch.stack(column).sum(0) for column in zip(*grid, strict=True)]]
        yield grid, how
    if is_gradient and how.group > 1 and (is_inside or how.tensor_dim is not None):
        groups = range(0, len(grid[0]), how.group)
        yield [[torch.stack(row[g : g + how.group]).sum(0) for g in groups] for row in grid], how._replace(group=1)


def _arrangements(grid: Grid, like: Tensor) -> Iterator[_Arrangement]:
    """The dimensions along which the data and the tensor axis may have cut a tensor of `like`'s shape."""
    shape = grid[0][0].shape
    if len(shape) != like.dim() or any(part.shape != shape for row in grid for part in row):
        return
    num_data, num_tensor = len(grid), len(grid[0])
    choices = [None, *range(len(shape))]
    for data_dim, tensor_dim in product(choices if num_data > 1 else [None], choices if num_tensor > 1 else [None]):
        sizes = list(shape)
        if data_dim is not None:
            sizes[data_dim] *= num_data
        group = num_tensor
        if tensor_dim is not None and like.shape[tensor_dim]:
            group = max(sizes[tensor_dim] * num_tensor // like.shape[tensor_dim], 1)
            sizes[tensor_dim] = sizes[tensor_dim] * num_tensor // group
        if sizes == list(like.shape) and num_tensor % group == 0 and (tensor_dim is None) == (group == num_tensor):
            yield _Arrangement(data_dim, tensor_dim, group)


def _assemble(grid: Grid, how: _Arrangement) -> Assembled:
    num_tensor = len(grid[0])
    copies: list[tuple[int, int, Tensor, Tensor]] = []
    for data_rank, row in enumerate(grid):
        for t, part in enumerate(row):
            first = t // how.group * how.group
            if t > first:
                copies.append((data_rank * num_tensor + first, data_rank * num_tensor + t, row[first], part))
    if how.data_dim is None:
        for data_rank, row in enumerate(grid[1:], start=1):
            copies += [(t, data_rank * num_tensor + t, grid[0][t], part) for t, part in enumerate(row)]
    rows = [row[0] if how.tensor_dim is None else torch.cat(row[:: how.group], how.tensor_dim) for row in grid]
    different = [(i, j, distance(a, b).nan_to_num(torch.inf)) for i, j, a, b in copies if not torch.equal(a, b)]
    return Assembled(
        rows[0] if how.data_dim is None else torch.cat(rows, how.data_dim),
        [(i, j) for i, j, _ in different],
        max((float(apart.max()) for _, _, apart in different), default=0.0),
    )
