"""Assembly of one tensor from its parts on all ranks. The result is then compared with the uncut model's tensor. The
uncut model is the whole model on one rank.

A parameter's placement says how the parameter is sharded. An activation has no placement, so the assembly compares
shapes: if a dimension of the uncut tensor is larger than on one rank, the ranks of an axis hold shards along this
dimension. If no dimension is larger, the ranks hold copies. Adjacent ranks may also hold copies of the same shard, for
example if there are fewer key and value heads than ranks. If two arrangements fit the shapes, the assembly takes the
arrangement whose result is closer to the uncut tensor. If there is a bug, both results differ from the uncut tensor.

The ranks form a grid over the layout's axes (`Layout.axes`). By default, the axes are data and tensor, and a rank's
number is its data rank x the number of tensor ranks + its tensor rank. Each axis has a role (`config.axes`): ranks
along an axis shard either the model's matrices or the tokens of a batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from types import EllipsisType
from typing import NamedTuple

import torch
from torch import Tensor

from crosscut.config.axes import AxisRole, role_of
from crosscut.parallel.context import join_zigzag

Place = tuple[slice | EllipsisType | Sequence[int], ...]
"""Place of a part in a whole tensor, as an index: `whole[place]` is the part. The place `()` is the whole tensor."""


@dataclass(frozen=True)
class Grid:
    """Parts of one tensor on all ranks. A part is a shard, a copy or a summand of the tensor."""

    axes: Mapping[str, int]
    """Number of ranks along each axis, by the axis's name, outermost axis first."""
    parts: list[Tensor]
    """Tensor of each rank, in the order of the ranks."""

    def groups(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ only in their position along an axis. In a group, the ranks are sorted
        by this position.
        """
        stride, size = self._stride(axis), self.axes[axis]
        firsts = (rank for rank in range(len(self.parts)) if rank // stride % size == 0)
        return [[rank + place * stride for place in range(size)] for rank in firsts]

    def line(self, role: AxisRole) -> list[Tensor]:
        """Return the parts along the axes with the role `role`, in the order of the ranks. On all other axes, only the
        ranks at position 0 are taken.
        """
        others = [(self._stride(name), size) for name, size in self.axes.items() if role_of(name) is not role]
        ranks = range(len(self.parts))
        return [self.parts[rank] for rank in ranks if all(rank // stride % size == 0 for stride, size in others)]

    def _stride(self, axis: str) -> int:
        names = list(self.axes)
        return prod(self.axes[name] for name in names[names.index(axis) + 1 :])

    def reduced(self, axis: str, parts: list[Tensor], size: int = 1) -> "Grid":
        """Return a grid in which ranks of this grid have been combined, so that `axis` has `size` ranks. `parts` are
        the tensors of the new grid's ranks, in the order of the new ranks.
        """
        return Grid({**self.axes, axis: size}, parts)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the elementwise |a - b| in float64. Equal elements have distance zero, even if they are infinite. The real
    and imaginary parts of complex tensors are compared separately.
    """
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    a, b = a.double(), b.double()
    return (a - b).abs().masked_fill(a == b, 0.0)


class Assembled(NamedTuple):
    """Tensor that was assembled from all ranks."""

    whole: Tensor
    """Assembled tensor in the uncut tensor's shape. If several ranks hold copies, the first rank's copy is taken."""
    copies_differ: list[tuple[int, int]]
    """Pairs of ranks with different copies. The first rank of each pair holds the copy that was taken."""
    spread: float = 0.0
    """Largest difference between two copies."""


def assemble_places(parts: Sequence[Tensor], places: Sequence[Place], like: Tensor) -> Assembled | None:
    """Assemble a tensor in the shape of `like` from the parts of all ranks, whose places in the whole tensor are known.
    Several ranks may hold the same elements, of which the first rank's are taken. Returns None if a part does not fit
    its place, or if no rank holds some of the elements.
    """
    whole, holder = like.new_zeros(like.shape), torch.full(like.shape, -1)
    different: list[tuple[int, int]] = []
    spread = 0.0
    for rank, (part, place) in enumerate(zip(parts, places, strict=True)):
        try:
            before, held = whole[place], holder[place]
        except IndexError:
            return None
        if before.shape != part.shape:
            return None
        apart = distance(before, part).nan_to_num(torch.inf).masked_fill(held < 0, 0.0)
        if apart.any():
            different.append((int(held[apart > 0].min()), rank))
            spread = max(spread, float(apart.max()))
        whole[place] = torch.where(held >= 0, before, part)
        holder[place] = held.masked_fill(held < 0, rank)
    return Assembled(whole, different, spread) if bool((holder >= 0).all()) else None


def assemble_columns(
    parts: Sequence[Tensor], columns: Sequence[Sequence[int]], like: Tensor, *, is_gradient: bool
) -> Assembled | None:
    """Assemble an activation or its gradient from the columns of all ranks, which are indices of the last dimension of
    `like`. Ranks with the same columns hold copies of an activation, but summands of its gradient. Returns None if the
    shapes do not fit, or if no rank holds some of the columns.
    """
    if not is_gradient:
        return assemble_places(parts, [(..., list(held)) for held in columns], like)
    whole, lacks = like.new_zeros(like.shape), {*range(like.shape[-1])}.difference(*columns)
    if lacks or any(part.shape != (*like.shape[:-1], len(held)) for part, held in zip(parts, columns, strict=True)):
        return None
    for part, held in zip(parts, columns, strict=True):
        whole.index_add_(-1, torch.tensor(held, dtype=torch.long), part)
    return Assembled(whole, [])


def assemble_parameter(grid: Grid, cuts: Mapping[str, int], like: Tensor) -> Assembled | None:
    """Assemble a parameter, or its gradient, in the shape of `like`, without the padding rows of a vocabulary.
    `cuts` maps the names of the axes that shard the parameter to the dimensions that they shard.

    Returns None if the shapes do not fit. If a padding row is not zero, the result contains an infinite value, so that
    the comparison with the uncut tensor fails.
    """
    how = {name: _AxisShare(None, size) for name, size in grid.axes.items()}
    how |= {name: _AxisShare(dim, 1) for name, dim in cuts.items() if name in grid.axes}
    assembled = _assemble(grid, how)
    whole = assembled.whole
    if 0 in cuts.values() and whole.dim() and whole.shape[0] != like.shape[0]:
        whole = _fit_rows(whole, like.shape[0])
    return assembled._replace(whole=whole) if whole.shape == like.shape else None


def _fit_rows(whole: Tensor, rows: int) -> Tensor:
    """Return the first `rows` rows of a tensor. If the tensor has fewer rows, rows of zeros are appended. If it has
    more, and one of the further rows is not zero, the last returned row becomes infinite.
    """
    kept = whole[:rows].clone()
    if whole[rows:].any():
        kept[-1] = torch.inf
    return torch.cat([kept, kept.new_zeros(rows - kept.shape[0], *kept.shape[1:])])


class _AxisShare(NamedTuple):
    """Distribution of a tensor along one axis."""

    dim: int | None
    """Dimension that the axis cuts; None if the axis cuts no dimension."""
    group: int
    """Number of adjacent ranks on the axis that hold the same part."""


_Arrangement = Mapping[str, _AxisShare]
"""Possible distribution of a tensor over the ranks, by axis."""


def assemble_activation(grid: Grid, like: Tensor, *, is_gradient: bool, is_inside: bool = False) -> Assembled | None:
    """Assemble an activation or its gradient in the shape of `like`. Returns None if the shapes do not fit.

    A gradient may have to be summed over ranks. Data ranks may hold copies of an activation, such as the position
    embeddings; each data rank then holds a summand of the gradient. Tensor ranks with the same shard of an activation
    may hold summands of the shard's gradient. If the tensor was seen inside a module (`is_inside`), even tensor ranks
    with the whole activation may hold summands. A scalar that a module returns may be a summand of the loss on each
    data rank.
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
    """Yield the grids to try, each with its arrangement. In most cases, one of the grids holds the parts unchanged. If
    the parts may be summands, other grids have sums of the parts. If data ranks hold copies of an activation that is
    not a scalar, the parts of its gradient must be summands, so only sums are yielded.
    """
    whole = [name for name, share in how.items() if role_of(name) is AxisRole.TOKENS and share.dim is None]
    sums = is_gradient and bool(whole)
    if not sums or like.dim() == 0:
        yield grid, how
    if sums or (whole and like.dim() == 0):
        for name in whole:
            grid, how = _summed(grid, name, how, len_of_group=grid.axes[name])
        yield grid, how
    for name, share in how.items():
        if role_of(name) is AxisRole.CUTS and is_gradient and share.group > 1 and (is_inside or share.dim is not None):
            yield _summed(grid, name, how, len_of_group=share.group)
            if is_inside:
                yield _summed(grid, name, how, len_of_group=share.group, only_different=True)


def _summed(
    grid: Grid, axis: str, how: _Arrangement, *, len_of_group: int, only_different: bool = False
) -> tuple[Grid, _Arrangement]:
    """Sum the parts of adjacent ranks along an axis. With `only_different`, elements that are equal on the ranks are
    copies: a part of the columns of a tensor, such as the shared part of latent attention's keys, may enter a region
    that the others do not enter.
    """
    groups = (ranks[i : i + len_of_group] for ranks in grid.groups(axis) for i in range(0, len(ranks), len_of_group))
    stacks = [torch.stack([grid.parts[rank] for rank in group]) for group in sorted(groups)]
    sums = [
        torch.where((each == each[0]).all(0), each[0], each.sum(0)) if only_different else each.sum(0)
        for each in stacks
    ]
    return grid.reduced(axis, sums, grid.axes[axis] // len_of_group), {**how, axis: _AxisShare(how[axis].dim, 1)}


def _arrangements(grid: Grid, like: Tensor) -> Iterator[_Arrangement]:
    """Yield the possible distributions of a tensor of `like`'s shape over the axes."""
    shape = grid.parts[0].shape
    if len(shape) != like.dim():
        return
    if any(part.shape != shape for part in grid.parts):
        yield from _uneven_arrangement(grid, like)
        return
    choices = [None, *range(len(shape))]
    for dims in product(*(choices if size > 1 else [None] for size in grid.axes.values())):
        sizes = list(shape)
        how: dict[str, _AxisShare] = {}
        for (name, num_ranks), dim in zip(grid.axes.items(), dims, strict=True):
            group = num_ranks
            if dim is not None and role_of(name) is not AxisRole.CUTS:
                group = 1
            elif dim is not None and like.shape[dim]:
                group = max(sizes[dim] * num_ranks // like.shape[dim], 1)
            if dim is not None:
                sizes[dim] = sizes[dim] * num_ranks // group
            how[name] = _AxisShare(dim, group)
        if sizes == list(like.shape) and all(_is_possible(how[name], size) for name, size in grid.axes.items()):
            yield how


def _uneven_arrangement(grid: Grid, like: Tensor) -> Iterator[_Arrangement]:
    """Yield the distribution of a tensor whose parts have different sizes along one dimension, if only one axis has
    several ranks and the parts add up to the uncut size. Otherwise, nothing is yielded.
    """
    axes = [name for name, size in grid.axes.items() if size > 1]
    for dim, size in enumerate(like.shape):
        others = {part.shape[:dim] + part.shape[dim + 1 :] for part in grid.parts}
        fits = others == {like.shape[:dim] + like.shape[dim + 1 :]} and all(p.dim() == like.dim() for p in grid.parts)
        if len(axes) == 1 and fits and sum(part.shape[dim] for part in grid.parts) == size:
            whole = {name: _AxisShare(None, ranks) for name, ranks in grid.axes.items()}
            yield {**whole, axes[0]: _AxisShare(dim, 1)}
            return


def _is_possible(share: _AxisShare, num_ranks: int) -> bool:
    return num_ranks % share.group == 0 and (share.dim is None) == (share.group == num_ranks)


def _assemble(grid: Grid, how: _Arrangement) -> Assembled:
    """Join the parts along one axis after the other, innermost first, and compare all copies."""
    different: list[tuple[int, int, Tensor]] = []
    joined = grid
    for name in reversed(list(grid.axes)):
        dim, group = how[name]
        pairs = (
            (rank, ranks[place // group * group]) for ranks in grid.groups(name) for place, rank in enumerate(ranks)
        )
        for rank, first in sorted(pairs):
            if not torch.equal(grid.parts[first], grid.parts[rank]):
                apart = distance(grid.parts[first], grid.parts[rank]).nan_to_num(torch.inf)
                different.append((first, rank, apart))
        lines = [[joined.parts[rank] for rank in ranks[::group]] for ranks in joined.groups(name)]
        joined = joined.reduced(name, [_joined(name, line, dim) for line in lines])
    return Assembled(
        joined.parts[0],
        [(i, j) for i, j, _ in different],
        max((float(apart.max()) for _, _, apart in different), default=0.0),
    )


def _joined(axis: str, parts: list[Tensor], dim: int | None) -> Tensor:
    """Join the parts along an axis. Context ranks divide a sequence in zigzag order, in two pieces each. Parts that
    cannot be halved are no parts of a sequence, such as one head of each rank.
    """
    if dim is None:
        return parts[0]
    is_zigzag = axis == "context" and parts[0].shape[dim] % 2 == 0
    return join_zigzag(parts, dim) if is_zigzag else torch.cat(parts, dim)
