"""Text from tokens as they come, without what may still change.

A token may end in the middle of a character, and a text may end in the middle of what could become a stop string: such
an end is held back until the next tokens decide. The pieces that are given, joined, are the text.
"""

from collections.abc import Sequence

from crosscut.data import Tokenizer

_CONTEXT = 6
"""Earlier tokens that new ones are decoded with: some decoders drop a space at the very start."""

_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""Character that decoders give for bytes that are no character, such as the first bytes of a longer character."""


class TextStream:
    """The text of one continuation: tokens in, text that is safe to show out."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids, self._num_shown = list(prompt), 0
        self._settle()
        self._stops = _Stops(stop)

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string came; what follows is no part of the text."""
        return self._stops.found

    def push(self, token: int) -> str:
        """Add the next token; returns the text that has become safe to show."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        whole = text.rstrip(_BROKEN)
        new = whole[self._num_shown :]
        if len(whole) == len(text):
            self._settle()
        else:
            self._num_shown = max(self._num_shown, len(whole))
        return self._stops.push(new)

    def finish(self) -> str:
        """The end of a text that no stop string ended: what was held back, broken characters and all."""
        return self._stops.push(self._tokenizer.decode(self._ids)[self._num_shown :]) + self._stops.finish()

    def _settle(self) -> None:
        """Forget tokens whose text has been handed on, but for some that the next ones are decoded with."""
        self._ids = self._ids[-_CONTEXT:]
        self._num_shown = len(self._tokenizer.decode(self._ids).rstrip(_BROKEN))


class _Stops:
    """Looks for the first stop string in text that comes in pieces; how it is cut into pieces makes no difference."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add a piece of text; returns the text sure to precede any stop string, and none once one is complete."""
        if self.found or not text:
            return ""
        text = self._held + text
        ends = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held
