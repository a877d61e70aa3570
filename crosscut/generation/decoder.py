"""Many texts at once: every text has a row of one cache, and all rows grow by a token in each step.

A text waits until a row is free, has its prompt read, some hundred tokens a step so that the others are not kept
waiting, and then takes part in every step until it ends; its row is the next one's. No text depends on what else is
written: choices are a function of its own scores and its own numbers (`sampling`).

A text of n tokens that outgrows the window of W sees its last tokens only. Their positions change then, learned or
rotary, so that nothing of the cache can stay: half the window is forgotten at once and the rest is read again, every
W / 2 tokens. What a text sees is so a function of its length alone:

    it begins at token 0 up to n = W, and at ceil((n - W) / (W / 2)) W / 2 after that.

Every rank makes the same calls in the same order. Shapes: B rows, S tokens read at once, V vocabulary.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from crosscut.config import ConfigError
from crosscut.data import Tokenizer
from crosscut.generation.sampling import Numbers, Sampling, choose, likelihood_of
from crosscut.generation.streaming import TextStream
from crosscut.model import GPT, KeyValueCache
from crosscut.parallel import ParallelMesh, reshard
from crosscut.parallel.collectives import all_reduce

_TOKENS_AT_ONCE = 512
"""Prompt tokens, filled-up ones among them, that a step reads beside the running texts."""

_FIRST_CAPACITY = 64
"""Tokens of each row that the cache has room for at first; half as much again when a row needs more, up to the
window."""

Finish = Literal["", "stop", "length"]


@dataclass(frozen=True)
class Piece:
    """One more token of one text."""

    number: int
    """Which text: what `Decoder.add` gave."""
    token: int
    """Its id, also of the token that ends the text."""
    text: str = ""
    """New text that is safe to show: whole characters, and nothing that may be the start of a stop string."""
    logprob: float | None = None
    """Natural logarithm of the probability that the model gave the token, where `Sampling.alternatives` asks for it."""
    alternatives: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and theirs, likeliest first."""
    finish: Finish = ""
    """Why the text ends with this token: an end of text or a stop string came, or there is no room for more."""


class _Text:
    """A prompt and what has been written after it."""

    def __init__(self, number: int, prompt: Sequence[int], sampling: Sampling, sample: int, stream: TextStream | None):
        self.number, self.sampling, self.stream = number, sampling, stream
        self.tokens, self.numbers = list(prompt), Numbers(sampling.seed, sample, prompt)
        self.most_tokens = len(prompt) + sampling.num_tokens
        self.seen = set(prompt) if sampling.repetition_penalty != 1.0 else set()
        self.first = 0
        """The token that it sees first."""
        self.num_read = 0
        """Tokens that its row of the cache holds, from `first` on."""

    @property
    def unread(self) -> int:
        """Tokens that are still to be read before the next one can be chosen."""
        return len(self.tokens) - self.first - self.num_read

    def choose(self, scores: Tensor) -> int:
        """The next token by the scores [V]."""
        return choose(scores, self.sampling, seen=self.seen, number=self.numbers.next())

    def append(self, token: int, *, is_end: bool) -> tuple[str, Finish]:
        """Add a token: what that adds to the text, and whether it ends it."""
        self.tokens.append(token)
        self.numbers.add(token)
        if self.sampling.repetition_penalty != 1.0:
            self.seen.add(token)
        if is_end:
            return "", "stop"
        shown = "" if self.stream is None else self.stream.push(token)
        if self.stream is not None and self.stream.has_stopped:
            return shown, "stop"
        return shown, "length" if len(self.tokens) == self.most_tokens else ""

    def rest(self) -> str:
        """What was held back of a text that ends, and no stop string has ended."""
        return "" if self.stream is None or self.stream.has_stopped else self.stream.finish()


class Decoder:
    """Writes many texts with one model; see the module's docstring.

    `stops` are ids that end a text beside the tokenizer's end of text. `slide` lets texts outgrow the window. Without a
    tokenizer there are tokens only. The model is left in evaluation mode.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer | None,
        *,
        num_rows: int,
        stops: Collection[int] = (),
        slide: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.slide = model.eval(), tokenizer, slide
        self.window = model.config.max_sequence_length
        """Tokens that the model can see."""
        self.stops = frozenset(stops) | (set() if tokenizer is None else {tokenizer.end_of_text})
        self._cache = KeyValueCache(model, num_rows=num_rows, capacity=min(_FIRST_CAPACITY, self.window))
        self._rows: list[_Text | None] = [None] * num_rows
        self._waiting: deque[_Text] = deque()
        self._num_added = 0

    @property
    def is_idle(self) -> bool:
        """Whether no text is running or waiting."""
        return not self._waiting and not any(self._rows)

    def add(self, prompt: Sequence[int], sampling: Sampling, *, sample: int = 0) -> int:
        """Queue a text that goes on after the ids of `prompt`; its number. `sample` tells texts of one seed apart.

        Raises `ConfigError` for an empty prompt, for an id that is not in the vocabulary, for one longer than the
        window unless texts may slide, and for stop strings without a tokenizer.
        """
        self._check(prompt, sampling)
        stream = None if self.tokenizer is None else TextStream(self.tokenizer, prompt, sampling.stop)
        text = _Text(self._num_added, prompt, sampling, sample, stream)
        text.first = self._first_seen(len(prompt))
        self._waiting.append(text)
        self._num_added += 1
        return text.number

    def cancel(self, number: int) -> None:
        """Forget a text, wherever it is; one that has ended already is no mistake."""
        self._waiting = deque(text for text in self._waiting if text.number != number)
        for row, text in enumerate(self._rows):
            if text is not None and text.number == number:
                self._free(row)

    @torch.no_grad()
    def step(self) -> list[Piece]:
        """Write at most one token of each running text, and read a part of the prompts that wait for it."""
        for row, text in enumerate(self._rows):
            if text is None and self._waiting:
                self._rows[row] = self._waiting.popleft()
        # Both are found before either is done, so that no text gets two tokens in one step.
        steps = [rows for rows in (self._writing(), self._reading()) if rows]
        pieces = [piece for rows in steps for piece in self._advance(rows)]
        if self.is_idle:
            reshard(self.model)
        return pieces

    def run(self) -> Iterator[Piece]:
        """Step until all texts have ended."""
        while not self.is_idle:
            yield from self.step()

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        if not prompt:
            raise ConfigError("A prompt must have at least one token, but has none. Begin with the end of text.")
        if not 0 <= min(prompt) <= max(prompt) < self.model.config.vocab_size:
            raise ConfigError(
                f"A prompt's token ids must be from 0 to {self.model.config.vocab_size - 1}, the last of the model's "
                f"vocabulary, but are from {min(prompt)} to {max(prompt)}. Use this model's tokenizer."
            )
        if len(prompt) > self.window and not self.slide:
            raise ConfigError(
                f"A prompt must be at most as long as the model's window ({self.window} tokens), but is {len(prompt)}. "
                "Shorten it, or let the window slide."
            )
        if sampling.stop and self.tokenizer is None:
            raise ConfigError("`stop` must be left out where tokens are not decoded, but is given. Pass a tokenizer.")

    def _first_seen(self, length: int) -> int:
        """Where what a text of `length` tokens sees begins."""
        drop = self.window - self.window // 2
        return max(0, -(-(length - self.window) // drop) * drop)

    def _writing(self) -> dict[int, int]:
        """The rows whose last token alone is unread: how many tokens each reads."""
        return {row: 1 for row, text in enumerate(self._rows) if text is not None and text.unread == 1}

    def _reading(self) -> dict[int, int]:
        """The row that has waited longest for its prompt and its neighbours that can be read along with it."""
        waiting = {row: text for row, text in enumerate(self._rows) if text is not None and text.unread > 1}
        if not waiting:
            return {}
        row = min(waiting, key=lambda row: waiting[row].number)
        counts = {row: min(waiting[row].unread, _TOKENS_AT_ONCE)}
        while (row := row + 1) in waiting:
            length = max(*counts.values(), waiting[row].unread)
            room = self.window - max(waiting[near].num_read for near in (*counts, row))
            if length * (len(counts) + 1) > _TOKENS_AT_ONCE or length > room:
                break
            counts[row] = waiting[row].unread
        return counts

    def _advance(self, counts: dict[int, int]) -> list[Piece]:
        """Read so many tokens of each row, in one pass from the first row to the last; the tokens that follow."""
        rows, length = range(min(counts), max(counts) + 1), max(counts.values())
        ids, ends = [], []
        for row in rows:
            unread = self._unread(row, counts.get(row, 0))
            ids.append(unread + [0] * (length - len(unread)))
            ends.append(max(1, len(unread)))  # a row that has no part in this reads a token and forgets it again
        before = [self._cache.lengths[row] for row in rows]
        self._make_room(max(before) + length)
        tokens = torch.tensor(ids, device=self.model.mesh.device)
        logits = self.model.next_logits(tokens, self._cache, counts=ends, first_row=rows.start)
        for row, num_read in zip(rows, before, strict=True):
            if row not in counts:
                self._cache.set_length(row, num_read)
        return self._follow(counts, {row: logits[row - rows.start].float() for row in counts})

    def _unread(self, row: int, count: int) -> list[int]:
        text = self._rows[row]
        if text is None:
            return []
        start = text.first + text.num_read
        return text.tokens[start : start + count]

    def _make_room(self, num_tokens: int) -> None:
        if num_tokens > self._cache.capacity:
            self._cache.grow(min(self.window, max(num_tokens, self._cache.capacity * 3 // 2)))

    def _follow(self, counts: dict[int, int], scores: dict[int, Tensor]) -> list[Piece]:
        """Choose the next token of each row that has now been read."""
        ready: list[tuple[int, _Text]] = []
        for row, count in counts.items():
            text = self._rows[row]
            assert text is not None
            text.num_read += count
            if not text.unread:
                ready.append((row, text))
        choices = [
            choose(scores[row], text.sampling, seen=text.seen, number=text.numbers.next()) for row, text in ready
        ]
        return [
            self._extend(row, text, token, scores[row])
            for (row, text), token in zip(ready, _agreed(choices, self.model.mesh), strict=True)
        ]

    def _extend(self, row: int, text: _Text, token: int, scores: Tensor) -> Piece:
        """Add a token to a text; the row is free again where that ends it."""
        shown, finish = text.append(token, is_end=token in self.stops)
        if not finish and len(text.tokens) > self.window and not self.slide:
            finish = "length"
        if finish:
            shown += text.rest()
            self._free(row)
        elif (first := self._first_seen(len(text.tokens))) != text.first:
            text.first, text.num_read = first, 0
            self._cache.set_length(row, 0)
        if text.sampling.alternatives is None:
            return Piece(text.number, token, shown, finish=finish)
        found = likelihood_of(scores, token, text.sampling.alternatives)
        return Piece(text.number, token, shown, found.logprob, found.alternatives, finish)

    def _free(self, row: int) -> None:
        self._rows[row] = None
        self._cache.set_length(row, 0)


def _agreed(choices: list[int], mesh: ParallelMesh) -> list[int]:
    """The same choices on all ranks that gather layers together: other kinds of devices may round a close call
    otherwise.
    """
    if mesh.sharding is None or not choices:
        return choices
    agreed: list[int] = all_reduce(torch.tensor(choices, device=mesh.device), mesh.data, "max").tolist()
    return agreed
