"""Division of a long text into windows that a model can read (paper, section 4.2.1).

A model with w positions sees at most w earlier tokens when it predicts a token. To give every token w earlier tokens,
each token would need its own window. The paper's compromise is overlapping evaluation: the window advances by o tokens,
and only the last o tokens of each window are scored. In the first window, all tokens are scored, because no earlier
window scored them. Every token is therefore scored once. Except in the first window, the model sees at least w - o
tokens before each scored token.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Window(NamedTuple):
    """Section of a text that the model reads at once: tokens `start` to `stop` - 1 of the text."""

    text: int
    """Index of the text."""
    start: int
    stop: int
    first: int
    """Index of the first scored token, counted from the start of the text. All later tokens of the window are also
    scored.
    """

    @property
    def length(self) -> int:
        """Number of tokens that the model reads: all tokens of the window except the last, which is only a target."""
        return self.stop - self.start - 1

    @property
    def num_targets(self) -> int:
        """Number of tokens that are scored."""
        return self.stop - self.first


def sliding_windows(text: int, length: int, *, window: int, overlap: int) -> Iterator[Window]:
    """Yield the windows over one text. `text` is the index of the text, and `length` is its number of tokens. All
    tokens of the text except the first token are scored.

    The model reads at most `window` tokens at once, and each window starts `overlap` tokens after the previous window.
    The last window ends at the end of the text. In a text that is longer than one window, the last window is as long as
    the other windows, so it may start less than `overlap` tokens after the previous window.
    """
    first, stop = 1, min(length, window + 1)
    while first < stop:
        yield Window(text, max(0, stop - window - 1), stop, first)
        first, stop = stop, min(length, stop + overlap)
