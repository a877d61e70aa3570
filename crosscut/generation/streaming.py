"""Conversion of a stream of tokens to text that no later token can change.

A token may end in the middle of a character, and a text may end with the beginning of a stop string. The stream
holds back an incomplete character or a possible stop string until later tokens complete it or rule it out. All returned
strings, joined, form the text.
"""

from collections.abc import Sequence

from crosscut.data import Tokenizer

_CONTEXT = 6
"""Number of earlier tokens that are decoded together with new tokens, because some decoders drop a space at the start
of a text."""

_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""Character that decoders return for invalid bytes, such as the first bytes of a longer character."""


class TextStream:
    """Stream that takes the tokens of one continuation, and returns text as soon as later tokens cannot change it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids, self._num_shown = list(prompt), 0
        self._settle()
        self._stops = _Stops(stop)

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string has been found. Text after the stop string is not part of the continuation."""
        return self._stops.found

    def push(self, token: int) -> str:
        """Add the next token. Returns the new text that later tokens cannot change; may be empty."""
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
        """Return the text that was held back, including incomplete characters. Call this function only if no stop
        string has ended the continuation.
        """
        return self._stops.push(self._tokenizer.decode(self._ids)[self._num_shown :]) + self._stops.finish()

    def _settle(self) -> None:
        """Drop tokens whose text has been returned, except for the last few, with which the next tokens are decoded."""
        self._ids = self._ids[-_CONTEXT:]
        self._num_shown = len(self._tokenizer.decode(self._ids).rstrip(_BROKEN))


class _Stops:
    """Search for the first stop string in text that arrives in pieces. The division into pieces does not affect the
    result.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add a piece of text, and return the text that certainly precedes any stop string. Once a stop string is
        complete, the result is always empty.
        """
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
        """Return the text that was held back for a stop string that did not follow."""
        held, self._held = self._held, ""
        return held
