"""Saving of copied inputs for the backward pass. The layer before usually saves the rank's own part, too, so an
operator saves this part and the halos instead of a copy of both.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from crosscut.parallel.exchange import Range


class Padding(NamedTuple):
    """Padding with one value."""

    amounts: Sequence[tuple[int, int]]
    """Number of positions before and after the image, for each direction."""
    fill: float

    def around(self, x: Tensor) -> Tensor:
        """Return `x` with the padding."""
        pairs = [amount for pair in reversed(self.amounts) for amount in pair]  # PyTorch begins with the last direction
        return F.pad(x, pairs, value=self.fill) if any(pairs) else x


class _Halos(NamedTuple):
    """Copied inputs as a rank's own part and the halos around it, without padding."""

    own: Tensor
    """Positions of the part that were copied: a view of the part."""
    version: int
    around: list[tuple[Tensor, Tensor]]
    """Halos before and after, for each direction."""
    padding: Padding

    def joined(self) -> Tensor:
        """Return the copied inputs. Raises `RuntimeError` if the part was changed in the meantime."""
        if self.own._version != self.version:
            raise RuntimeError(
                "An image must not be changed in place before the backward pass of the layer that has read it, but was "
                "changed. Use a function that returns a new tensor."
            )
        x = self.own
        for dim, (before, after) in reversed(list(enumerate(self.around, 2))):
            x = torch.cat((before, x, after), dim) if before.shape[dim] + after.shape[dim] else x
        return self.padding.around(x)


def saves_halos(
    copied: Tensor, part: Tensor, reads: Sequence[Range], held: Sequence[Range], padding: Padding
) -> AbstractContextManager[object]:
    """Return a context in which autograd saves `copied` as halos around the rank's part. `reads` are the positions of
    `copied` in each direction, including `padding`, which is not saved, and `held` those of `part`. If other hooks for
    saved tensors are active, as while activations are recomputed, the context does nothing, since PyTorch calls only
    the innermost hooks.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return nullcontext()
    place, shape, is_copy = copied.data_ptr(), copied.shape, copied is not part  # PyTorch keeps `pack` with its values

    def pack(saved: Tensor) -> Tensor | _Halos:
        if not is_copy or saved.data_ptr() != place or saved.shape != shape:
            return saved
        own, inner, around = part.detach(), saved.detach(), []
        insides = [
            Range(r.start + before, r.stop - after) for r, (before, after) in zip(reads, padding.amounts, strict=True)
        ]
        for dim, (inside, (before, _)) in enumerate(zip(insides, padding.amounts, strict=True), 2):
            inner = inner.narrow(dim, before, inside.size)
        for dim, (inside, has) in enumerate(zip(insides, held, strict=True), 2):
            both = inside.overlap(has)
            first, last = both.start - inside.start, both.stop - inside.start
            halos = inner.narrow(dim, 0, first), inner.narrow(dim, last, inside.size - last)
            around.append((halos[0].clone(), halos[1].clone()))
            inner = inner.narrow(dim, first, both.size)
            own = own.narrow(dim, both.start - has.start if both.size else 0, both.size)
        return _Halos(own, own._version, around, padding)

    return saved_tensors_hooks(pack, lambda saved: saved.joined() if isinstance(saved, _Halos) else saved)
