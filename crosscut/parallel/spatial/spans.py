"""Positions of one direction of an image, divided over the ranks of an axis, and the positions that an operator reads.

A rank holds a range of consecutive positions. The ranks' ranges may have any lengths, also 0. This module imports no
torch, so that plans of messages need none.
"""

from typing import NamedTuple

from crosscut.config import LayoutError
from crosscut.parallel.exchange.plan import Range


class Span(NamedTuple):
    """Division of one direction of an image over ranks: rank r holds the positions from `bounds[r]` up to
    `bounds[r + 1]`.
    """

    bounds: tuple[int, ...]

    @classmethod
    def even(cls, size: int, num_ranks: int) -> "Span":
        """Divide `size` positions into parts whose lengths differ by at most 1."""
        return cls(tuple(size * rank // num_ranks for rank in range(num_ranks + 1)))

    @classmethod
    def of_parts(cls, *lengths: int) -> "Span":
        """Return the span in which rank r holds `lengths[r]` positions."""
        return cls(tuple(sum(lengths[:rank]) for rank in range(len(lengths) + 1)))

    @property
    def size(self) -> int:
        """Number of positions of all ranks."""
        return self.bounds[-1]

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.bounds) - 1

    def part(self, rank: int) -> Range:
        """Positions of a rank."""
        return Range(self.bounds[rank], self.bounds[rank + 1])

    def resized(self, size: int) -> "Span":
        """Divide the `size` outputs of an operator: an output belongs to the rank that holds the input at the output's
        centre. Output o is centred at (o + 1/2) L / size, where L is the number of inputs. Layers that keep the number
        of positions therefore keep the span.
        """
        firsts = (-((self.size - 2 * bound * size) // (2 * self.size)) for bound in self.bounds[1:-1])
        return Span((0, *firsts, size))


class Wanted(NamedTuple):
    """Positions of the image that one rank copies for its outputs. The three ranges follow one another in the copy:
    positions that padding before the image repeats, positions inside, and positions that padding after it repeats.
    """

    before: Range
    inside: Range
    after: Range
    num_before: int = 0
    """Number of positions before the image."""
    num_after: int = 0
    """Number of positions after the image."""

    @property
    def size(self) -> int:
        """Number of positions that the rank copies."""
        return sum(part.size for part in self[:3])


NOTHING = Range(0, 0)


def wanted(read: Range, size: int, mode: str) -> Wanted:
    """Return the positions of an image of `size` positions that fill the range `read`, which may leave the image.
    `mode` fills the outside as `torch.nn.functional.pad` does: "zeros", "reflect", "replicate" or "circular".
    """
    if read.size <= 0:
        return Wanted(NOTHING, NOTHING, NOTHING)
    image = Range(0, size)
    first, last = min(read.stop, 0), max(read.start, size)  # end of the padding before, start of the padding after
    before, after = max(first - read.start, 0), max(read.stop - last, 0)
    inside = read.overlap(image)
    if mode == "zeros":
        return Wanted(NOTHING, inside, NOTHING, before, after)
    sources = {
        "reflect": (Range(1 - first, 1 - read.start), Range(2 * size - 1 - read.stop, 2 * size - 1 - last)),
        "replicate": (Range(0, 1), Range(size - 1, size)),
        "circular": (Range(read.start + size, first + size), Range(last - size, read.stop - size)),
    }[mode]
    return Wanted(sources[0] if before else NOTHING, inside, sources[1] if after else NOTHING, before, after)


def require_room(size: int, before: int, after: int, mode: str) -> None:
    """Raise `LayoutError` if an image of `size` positions has too few positions to be repeated as padding."""
    most = {"reflect": size - 1, "circular": size}.get(mode, max(before, after))
    if max(before, after) > most:
        raise LayoutError(
            f'Padding with `padding_mode` "{mode}" must be at most {most} for an image of {size} positions, but is '
            f'{max(before, after)}. Pad less, or set `padding_mode` to "zeros" or "replicate".'
        )


def require_directions(name: str, given: int, num: int) -> None:
    """Raise `LayoutError` if a layer, an option or a list of spans is not made for the `num` directions of a grid."""
    if given != num:
        raise LayoutError(
            f"{name} must have {num} directions, as the grid of the image has, but has {given}. Use layers, options "
            "and spans with as many directions as the grid."
        )
