"""Cuts a long text into windows that a model can read (paper, section 4.2.1).

A model of w positions cannot calculate P(t | 0 : t - 1), only P(t | t - w : t - 1), and that for every token would take
a window each. The paper's middle ground, overlapping evaluation: the window moves on by o tokens each time, and only
its last o targets are scored. The first window has nothing before it, so all of its targets are. Every target is scored
once; none but those of the first window has fewer than w - o tokens before it.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Window(NamedTuple):
    """A piece of a text that is read at once, tokens `start` to `stop` - 1 of it."""

    text: int
    """Which text."""
    start: int
    stop: int
    first: int
    """The first token that is scored, given those before it in the window; all that follow it are scored as well."""

    @property
    def length(self) -> int:
        """Tokens that the model reads: all but the last, which is only a target."""
        return self.stop - self.start - 1

    @property
    def num_targets(self) -> int:
        """Tokens that are scored."""
        return self.stop - self.first


def sliding_windows(text: int, length: int, *, window: int, overlap: int) -> Iterator[Window]:
    """The windows over a text of `length` tokens, of which all but the first are scored.

    A window is at most `window` tokens long. The last one ends with the text and is as long as the others, so that it
    may move on by less than `overlap`.
    """
    first, stop = 1, min(length, window + 1)
    while first < stop:
        yield Window(text, max(0, stop - window - 1), stop, first)
        first, stop = stop, min(length, stop + overlap)
