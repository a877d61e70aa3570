"""Convolutions that overlap with the exchange of their halos.

    own part with zeros around it    .|--------|.      computed while the halos are on their way
    halos with zeros in their place   |.      .|       added to the outputs that read halos

A convolution is linear, so the sum is the convolution of the part with halos. No copy joins the part with the halos of
the last direction that is divided. The backward pass does the same in reverse order: the gradients of halos travel
while the rank computes the gradients of its weights and of its part. Halos of the directions before are copied first,
since the last direction's halos contain corners. Source: Dryden et al. 2019 (arXiv 1903.06681), section 4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.parallel.exchange import Flight, Range, finish_fetch, start_fetch
from crosscut.parallel.spatial.image import CutImage
from crosscut.parallel.spatial.plan import Step, halos_of, plan_halos, plan_step
from crosscut.parallel.spatial.reaches import Window
from crosscut.parallel.spatial.saving import Padding, saves_halos
from crosscut.parallel.spatial.windows import Windows, copy_directions

Convolve = Callable[[Tensor, Sequence[int]], Tensor]
"""Convolution of inputs, with zeros before and after each direction, without a bias."""


def overlap_pays(part: Tensor, weight: Tensor) -> bool:
    """Whether overlap is faster than a copy of the part with its halos. Overlap computes the gradient of the weight a
    second time, from the halos; that costs more than it saves if the weight is large against the part (measured in
    decision 85). Ranks may decide differently, because the messages are the same.
    """
    return part.numel() >= 8 * weight.numel()


@dataclass(frozen=True, eq=False)
class OwnWindows:
    """Inputs of a convolution without the halos of one direction, which are on their way."""

    windows: Windows
    reaches: Sequence[Window]
    paddings: Sequence[int | None]
    """Zeros with which the convolution itself pads both sides of each direction. None for directions that are copied
    with halos and padding.
    """
    late: int
    """Direction whose halos are on their way."""
    ticket: Tensor
    flight: Flight

    @property
    def padding(self) -> list[int]:
        """Zeros with which the convolution itself pads both sides of each direction."""
        return [padding or 0 for padding in self.paddings]

    def with_halos(self, y: Tensor, convolve: Convolve) -> Tensor:
        """Wait for the halos, and add what they contribute to the outputs `y` of this rank's own positions."""
        image, steps, i = self.windows.image, self.windows.steps, self.late
        dim, rank, reach = image.directions[i], image.grid.place[i], self.reaches[i]
        halos = finish_fetch(self.ticket, self.flight)
        after = [j for j, padding in enumerate(self.paddings) if padding is None and j > i]
        halos = copy_directions(image, halos, steps, after)
        sides, outputs = halos_of(steps[i], rank), steps[i].outputs.part(rank)
        padding = [0 if j == i else amount for j, amount in enumerate(self.padding)]
        for side, halo in zip(sides, halos.split([each.size for each in sides], dim), strict=True):
            readers = reach.readers(side, outputs)
            if readers.size and side.size:
                read, amounts = reach.reads(readers), [(0, 0)] * len(steps)
                amounts[i] = (side.start - read.start, read.stop - side.stop)
                zeros = Padding([(max(before, 0), max(after, 0)) for before, after in amounts], 0.0)
                held = [side if j == i else Range(0, size) for j, size in enumerate(halo.shape[2:])]
                x, reads = Padding(amounts, 0.0).around(halo), [*held[:i], read, *held[i + 1 :]]
                with saves_halos(x, halo, reads, held, zeros):
                    terms = convolve(x, padding)
                y = _Added.apply(y, terms, dim, readers.start - outputs.start)
        return y


class _AddedContext(Protocol):
    place: tuple[int, int, int]

    def mark_dirty(self, x: Tensor) -> None: ...


class _Added(Function):
    """Add terms to a range of the outputs in place: the outputs have no other reader."""

    @staticmethod
    def forward(ctx: _AddedContext, y: Tensor, terms: Tensor, dim: int, start: int) -> Tensor:
        ctx.place = (dim, start, terms.shape[dim])
        ctx.mark_dirty(y)
        y.narrow(*ctx.place).add_(terms)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: _AddedContext, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return grad, grad.narrow(*ctx.place), None, None


def own_windows(image: CutImage, reaches: Sequence[Window], weight: Tensor) -> OwnWindows | None:
    """Return the inputs of a convolution that pads with zeros, and start the exchange of the last divided direction's
    halos. None if this does not pay, if nothing is sent, or if no padding on both sides of this rank's positions gives
    its outputs. The messages are those of `copy_windows`.
    """
    place, axes = image.grid.place, image.grid.axes
    steps = [plan_step(span, reach) for span, reach in zip(image.spans, reaches, strict=True)]
    late = max((i for i, step in enumerate(steps) if step.exchange.sent), default=0)
    paddings = [
        _padding(*each) if i >= late else None for i, each in enumerate(zip(steps, reaches, place, strict=True))
    ]
    has_outputs = all(step.outputs.part(rank).size for step, rank in zip(steps, place, strict=True))
    if paddings[late] is None or not (has_outputs and steps[late].exchange.sent and overlap_pays(image.x, weight)):
        return None
    copied = [i for i, padding in enumerate(paddings) if padding is None]
    x = copy_directions(image, image.x, steps, [i for i in copied if i < late])
    flight = Flight(axes[late], image.directions[late], plan_halos(steps[late]))
    x, ticket = start_fetch(x, flight)
    x = copy_directions(image, x, steps, [i for i in copied if i > late])
    amounts = [(0, 0)] * len(steps)
    for i, (axis, step) in enumerate(zip(axes, steps, strict=True)):
        if i in copied:
            amounts[i] = (step.wants[axis.rank].num_before, step.wants[axis.rank].num_after)
        else:
            steps[i] = step._replace(reads=tuple(map(step.held.part, range(axis.size))))
    windows = Windows(image, x, tuple(steps), Padding(amounts, 0.0))
    return OwnWindows(windows, reaches, paddings, late, ticket, flight)


def _padding(step: Step, reach: Window, rank: int) -> int | None:
    """Number of zeros on both sides of a rank's own positions with which a convolution gives the rank's outputs, and no
    more. None if there is no such number.
    """
    held, read = step.held.part(rank), step.reads[rank]
    before, after = held.start - read.start, read.stop - held.stop
    room = held.size + 2 * before - reach.extent
    fits = before >= max(after, 0) and room // reach.stride + 1 == step.outputs.part(rank).size
    return before if fits else None
