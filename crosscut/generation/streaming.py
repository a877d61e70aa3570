"""Convert a stream of tokens to text that no later token can change.

A token may end in the middle of a character, and a text may end with the beginning of a stop string. The stream holds
back an incomplete character or a possible stop string until later tokens complete it or rule it out. All returned
strings, joined, form the text. The work for a token depends neither on the length of the text nor on the length of the
stop strings.
"""

from collections.abc import Sequence

from crosscut.data import Tokenizer

_CONTEXT = 6
"""Number of earlier tokens that are decoded together with new tokens, because some decoders drop a space at the start
of a text."""

_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""Character that decoders return for invalid bytes, such as the first bytes of a longer character."""

_MOST_UNSETTLED = 64
"""Number of successive tokens after which incomplete bytes are returned as invalid. A character has at most four bytes,
so valid text never has so many tokens without a complete character."""


class TextStream:
    """Stream that takes the tokens of one continuation, and returns text as soon as later tokens cannot change it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids, self._num_unsettled = list(prompt[-_CONTEXT:]), 0
        self._num_shown = len(tokenizer.decode(self._ids).rstrip(_BROKEN))
        self._stops = _Stops(stop)

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string has been found. Text after the stop string is not part of the continuation."""
        return self._stops.found

    def push(self, token: int) -> str:
        """Add the next token. Returns the new text that later tokens cannot change, which may be empty."""
        self._ids.append(token)
        self._num_unsettled += 1
        text = self._tokenizer.decode(self._ids)
        whole = text if self._num_unsettled > _MOST_UNSETTLED else text.rstrip(_BROKEN)
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
        """Drop tokens whose text has been returned, except for the last few tokens, which are decoded together with the
        next tokens.
        """
        self._ids, self._num_unsettled = self._ids[-_CONTEXT:], 0
        self._num_shown = len(self._tokenizer.decode(self._ids))


class _Stops:
    """Search for the first stop string in text that arrives in pieces. The division into pieces does not affect the
    result.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._matches = [_Match(stop) for stop in stops]
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add a piece of text, and return the text that certainly precedes any stop string. Once a stop string is
        complete, the result is always empty.
        """
        if self.found or not text:
            return ""
        if not self._matches:
            return text
        first, text = len(self._held), self._held + text
        for end, character in enumerate(text[first:], first + 1):
            if complete := [len(match.string) for match in self._matches if match.push(character)]:
                self.found, self._held = True, ""
                return text[: end - max(complete)]
        final = len(text) - max(match.length for match in self._matches)
        self._held = text[final:]
        return text[:final]

    def finish(self) -> str:
        """Return the text that was held back as the possible beginning of a stop string."""
        held, self._held = self._held, ""
        return held


class _Match:
    """Search for one string in text that arrives character by character (Knuth, Morris and Pratt, 1977).

    The number of operations is proportional to the length of the text, however long the string is, because the table of
    borders covers only the part of the string that the text has reached.
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self.length = 0
        """Length of the longest prefix of the string with which the text ends."""
        self._borders = [0]
        """Entry k - 1 is the length of the longest proper prefix of the string's first k characters that is also a
        suffix of these characters.
        """

    def push(self, character: str) -> bool:
        """Add a character, and return whether the text now ends with the whole string. If it does, no further character
        may be added.
        """
        self.length = self._longer(self.length, character)
        if self.length > len(self._borders):
            self._borders.append(self._longer(self._borders[-1], character))
        return self.length == len(self.string)

    def _longer(self, length: int, character: str) -> int:
        """Return the length of the match after `character`, given that `length` characters matched before
        `character`.
        """
        while length and self.string[length] != character:
            length = self._borders[length - 1]
        return length + (self.string[length] == character)
