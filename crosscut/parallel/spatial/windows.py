"""Windows of a divided image: for each operator, a rank copies the inputs that its outputs read, and then computes its
outputs alone.

    own part         |--------|
    copied inputs  ..|--------|..        with halos from other ranks, and with padding at the edges of the image
    outputs          |--------|

The directions are exchanged one after another. Each exchange includes the halos of the directions before it, so corners
arrive in two messages instead of one from a diagonal neighbour. Source: Dryden et al. 2019 (arXiv 1903.06681), section
4.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.parallel.exchange import Range, fetched
from crosscut.parallel.spatial.image import CutImage
from crosscut.parallel.spatial.plan import Step, plan_step
from crosscut.parallel.spatial.reaches import Reach
from crosscut.parallel.spatial.saving import Padding, saves_halos
from crosscut.parallel.spatial.spans import Wanted, require_directions


@dataclass(frozen=True, eq=False)
class Windows:
    """Inputs that this rank has copied for its outputs of one operator."""

    image: CutImage
    x: Tensor
    """Copied inputs [B, C, ...], with padding: exactly the range `reads` in each direction."""
    steps: tuple[Step, ...]
    padding: Padding
    """Padding of `x`, unless it repeats positions of the image."""

    @property
    def outputs(self) -> tuple[Range, ...]:
        """This rank's outputs in each direction."""
        return tuple(step.outputs.part(rank) for step, rank in zip(self.steps, self.image.grid.place, strict=True))

    @property
    def reads(self) -> tuple[Range, ...]:
        """Positions of `x` in each direction. They may be outside of the image."""
        return tuple(step.reads[rank] for step, rank in zip(self.steps, self.image.grid.place, strict=True))

    @property
    def saving(self) -> AbstractContextManager[object]:
        """Context for the computation of the outputs: autograd saves the halos instead of all copied inputs."""
        of_directions = zip(self.image.spans, self.image.grid.place, strict=True)
        held = [span.part(rank) for span, rank in of_directions]
        return saves_halos(self.x, self.image.x, self.reads, held, self.padding)

    def at_least(self, sizes: Sequence[int]) -> Tensor:
        """Return the copied inputs, with zeros behind them if a direction is shorter than `sizes`: a rank without
        outputs computes on zeros, keeps nothing of the result, and takes part in the backward pass as all ranks do.
        """
        lacks = [max(least - size, 0) for least, size in zip(sizes, self.x.shape[2:], strict=True)]
        return Padding([(0, lack) for lack in lacks], 0.0).around(self.x)

    def result(self, y: Tensor, firsts: Sequence[int] | None = None) -> CutImage:
        """Return this rank's outputs, given outputs that begin with the output `firsts` of each direction, by default
        with this rank's first one, and that may go on behind its last one.
        """
        own = y
        for i, (dim, part) in enumerate(zip(self.image.directions, self.outputs, strict=True)):
            start = part.start - firsts[i] if firsts is not None and part.size else 0
            own = own.narrow(dim, start, part.size)
        y = y if own.shape == y.shape else own.clone()  # without the memory of the other outputs
        return CutImage(y, tuple(step.outputs for step in self.steps), self.image.grid)


def copy_windows(image: CutImage, reaches: Sequence[Reach], *, mode: str = "zeros", fill: float = 0.0) -> Windows:
    """Copy the inputs that this rank's outputs read, given the reach of the operator in each direction.

    `mode` names the padding as in `torch.nn.Conv2d`; with "zeros", the padding is `fill`. Forward and backward: one
    message to each rank that needs positions of this rank, for each direction.
    """
    steps = tuple(plan_step(span, reach, mode) for span, reach in zip(image.spans, reaches, strict=True))
    x = copy_directions(image, image.x, steps, range(len(steps)), mode, fill)
    wants = [step.wants[rank] for step, rank in zip(steps, image.grid.place, strict=True)]
    amounts = [(want.num_before, want.num_after) if mode == "zeros" else (0, 0) for want in wants]
    return Windows(image, x, steps, Padding(amounts, fill))


def copy_directions(
    image: CutImage, x: Tensor, steps: Sequence[Step], directions: Iterable[int], mode: str = "zeros", fill: float = 0.0
) -> Tensor:
    """Copy the inputs along some directions, one after another."""
    for i in directions:
        axis, dim = image.grid.axes[i], image.directions[i]
        x = _padded(fetched(x, axis, dim, steps[i].exchange), dim, steps[i].wants[axis.rank], mode, fill)
    return x


def per_direction(value: Any, num: int) -> tuple[Any, ...]:
    """Return an option of a layer, one value or one per direction, as a value for each of `num` directions. Raises
    `LayoutError` if there is another number of values.
    """
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,) * num
    require_directions(f"The option {value} of a layer", len(values), num)
    return values


def _padded(copied: Tensor, dim: int, want: Wanted, mode: str, fill: float) -> Tensor:
    """Arrange the copied positions: those that padding repeats, before and after those inside of the image."""
    if not (want.num_before or want.num_after):
        return copied
    if mode == "zeros":
        rest = copied.dim() - 1 - dim
        return F.pad(copied, (*(0, 0) * rest, want.num_before, want.num_after), value=fill)
    before, inside, after = copied.split([part.size for part in want[:3]], dim)
    if mode == "reflect":
        before, after = before.flip(dim), after.flip(dim)
    elif mode == "replicate":
        before, after = _repeated(before, dim, want.num_before), _repeated(after, dim, want.num_after)
    return torch.cat((before, inside, after), dim)


def _repeated(x: Tensor, dim: int, times: int) -> Tensor:
    """Repeat the only position of a dimension; without any position, `times` is 0."""
    return x.expand([times if i == dim else size for i, size in enumerate(x.shape)])
