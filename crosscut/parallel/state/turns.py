"""Exchange of parts for whole tensors. Several tensors of the same shape are cut over ranks, and each rank gets one
whole tensor to work on.

With all-gathers, every rank would get every whole tensor, and all ranks would do the same work. In a *turn*, the ranks
instead exchange the parts of a few tensors, at most one tensor per rank, so that each rank works on a different tensor:

    rank 0 holds    a0 b0            a0 a1    and, after its work on a,    a0 b0
    rank 1 holds    a1 b1            b0 b1    and, after its work on b,    a1 b1

The function `taken` is the exchange on the left, and `given_back` is the exchange on the right. On two ranks, both
exchanges together send as many elements as all-gathers would; on more ranks, they send fewer. In a turn with fewer
tensors than ranks, zeros are sent in place of the missing tensors, so that all messages have the same size.
"""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from crosscut.parallel.collectives import all_to_all
from crosscut.parallel.mesh import Axis
from crosscut.parallel.state.parameters import cuts_of


def num_holders(like: Tensor) -> int:
    """Return the number of ranks over which a tensor is cut, which is the maximum number of tensors in a turn."""
    return prod(cut.num_parts for cut in cuts_of(like)) if isinstance(like, DTensor) else 1


def taken(parts: Iterable[Tensor], like: Tensor) -> Tensor | None:
    """Exchange `parts`, this rank's parts of several tensors, for one whole tensor. Returns None if this rank gets no
    tensor, because there are fewer tensors than ranks.

    The tensors have the shape of the distributed tensor `like` and are cut in the same way. There are at most
    `num_holders(like)` tensors. Every rank that holds parts must call this function. Communication: an all-to-all along
    each axis that cuts `like`: first over data ranks, then over the tensor axis.
    """
    held = list(parts)
    empty = held[0].new_empty(0)
    for level in _levels(like):
        held = level.taken(held, empty)
    return held[0] if held else None


def given_back(whole: Tensor | None, like: Tensor, number: int, dtype: torch.dtype) -> list[Tensor]:
    """Exchange `whole`, the tensor that this rank got from `taken`, for this rank's parts of all `number` tensors.
    `dtype` is the element type of the tensors. This function undoes `taken`.

    Communication: an all-to-all along each axis that cuts `like`, in the reverse order of `taken`.
    """
    held = [] if whole is None else [whole]
    for level in reversed(_levels(like)):
        held = level.given_back(held, torch.empty(0, dtype=dtype, device=like.device))
    return held[:number]


class _Level(NamedTuple):
    """Exchange along one of the axes that cut the tensors."""

    axis: Axis
    dim: int
    """Dimension that the axis cuts."""
    shape: tuple[int, ...]
    """Shape that a tensor has before it is cut over this axis."""
    number: int
    """Maximum number of tensors that each rank of the axis holds after the exchange."""

    def taken(self, held: list[Tensor], empty: Tensor) -> list[Tensor]:
        """Send this rank's parts to the ranks that get the tensors. Return the tensors that this rank gets, joined
        along this axis. `empty` has the element type and the device of the tensors.
        """
        present = len(held)
        sent = empty.new_zeros(self.axis.size * self.number, *self._even_part())
        for place, part in zip(sent, held, strict=False):
            place.narrow(self.dim, 0, part.shape[self.dim]).copy_(part)
        held.clear()
        parts = all_to_all(sent, self.axis).unflatten(0, (self.axis.size, self.number))
        del sent
        joined = [self._joined(of_one) for of_one in parts.unbind(1)]
        return joined[: max(0, present - self.axis.rank * self.number)]

    def given_back(self, held: list[Tensor], empty: Tensor) -> list[Tensor]:
        """Send back, in parts, the tensors that this rank got from `taken`, and return this rank's parts of all
        tensors. `empty` has the element type and the device of the tensors.
        """
        sent = empty.new_zeros(self.axis.size, self.number, *self._even_part())
        for place, tensor in zip(sent.unbind(1), held, strict=False):
            for part, values in zip(place, tensor.split(sent.shape[2 + self.dim], self.dim), strict=False):
                part.narrow(self.dim, 0, values.shape[self.dim]).copy_(values)
        held.clear()
        parts = all_to_all(sent.flatten(0, 1), self.axis)
        even = parts.shape[1 + self.dim]
        size = min(even, max(0, self.shape[self.dim] - self.axis.rank * even))
        return list(parts.narrow(1 + self.dim, 0, size))

    def _joined(self, parts: Tensor) -> Tensor:
        """Join the parts [ranks, ...] of one tensor."""
        joined = parts.flatten(0, 1) if self.dim == 0 else torch.cat(tuple(parts), self.dim)
        return joined.narrow(self.dim, 0, self.shape[self.dim])

    def _even_part(self) -> list[int]:
        """Return the shape of the largest part. The parts of the last ranks may be smaller, and are padded for the
        message.
        """
        shape = list(self.shape)
        shape[self.dim] = -(-shape[self.dim] // self.axis.size)
        return shape


def _levels(like: Tensor) -> list[_Level]:
    """Return the exchanges of a turn, one for each axis that cuts `like`, in the order in which `taken` runs them."""
    if not isinstance(like, DTensor):
        return []
    cuts, levels = [cut for cut in reversed(cuts_of(like)) if cut.num_parts > 1], []
    for index, cut in enumerate(cuts):
        inner, shape = cuts[index + 1 :], list(like.shape)
        for other in inner:
            shape[other.dim] //= other.num_parts
        places = prod(other.num_parts for other in inner)
        levels.append(_Level(Axis.of(like.device_mesh, cut.axis), cut.dim, tuple(shape), places))
    return levels
