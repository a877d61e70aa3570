"""Decode many texts at once. Every running text has a row in a shared key-value cache, and each step adds one token to
every row.

A new text waits until a row is free. If a request has many texts, its later texts give way to texts that arrive after
them (`_YIELDED`), so that the request does not delay requests for a single text. When a text gets a row, its prompt is
read in chunks of at most 512 tokens per step, so that a long prompt does not delay the other texts. After the prompt,
the text gets one token per step until it ends. Its row then goes to the next text. A text does not depend on the other
texts, because its tokens are chosen from its own scores and random numbers (`sampling`). If the probabilities of a
prompt's tokens are requested, they are computed for a few tokens at a time while the prompt is read. The scores [S, V]
of the whole prompt are therefore never in memory.

If a text of n tokens is longer than the window W, the model sees only the last tokens of the text. Shifting the window
changes the positions of all tokens, so the whole cache of the row becomes invalid. To limit the cost, the window shifts
by W / 2 tokens at a time, and the remaining tokens are read again. The first visible token therefore depends only on
the text's length:

    token 0 while n <= W, and token ceil((n - W) / (W / 2)) W / 2 for longer texts.

An error in the work for one text ends only that text. All ranks see the same scores, so they all meet the same error.
Running out of memory is different, because it can happen on one rank alone. Only the cache grows with a text, so before
each pass all ranks learn whether every rank could enlarge its cache. If any rank could not, the texts that need more
room end on all ranks. A rank that fails inside a pass cannot tell the other ranks, which wait for it in a collective.
Its error is raised and ends all ranks.

All ranks make the same calls in the same order. Shapes: B rows, S tokens per pass, H hidden, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush

import torch
from torch import Tensor

from crosscut.config import ConfigError, GenerationError
from crosscut.config.generation.sampling import Sampling
from crosscut.data import Tokenizer
from crosscut.generation.running import Piece, Text
from crosscut.generation.sampling import Likelihood, likelihoods_of, not_finite, rows_not_finite
from crosscut.generation.streaming import TextStream
from crosscut.model import GPT, GenerationCache
from crosscut.parallel import ParallelMesh, reshard
from crosscut.parallel.collectives import all_reduce

_TOKENS_AT_ONCE = 512
"""Maximum number of prompt tokens, including padding, that one step reads in addition to one token per running text."""

_SCORED_AT_ONCE = 64
"""Maximum number of prompt tokens whose scores are in memory at once if the probabilities are requested: 13 MB with
GPT-2's vocabulary."""

_FIRST_CAPACITY = 64
"""Initial number of tokens per row in the cache. When a row needs more, the cache grows by half, up to the window."""

_YIELDED = 2048
"""Limit on how many later requests may overtake a waiting text. The first texts of at most `_YIELDED` x i requests
overtake the text with index i in its request, so no text waits forever.
"""

_FAILED = -1
"""Placeholder for the next token if an error was raised when the token was chosen."""


class Decoder:
    """Decoder that generates many texts with one model; see the module's docstring.

    `num_rows` is the number of texts that run at the same time. `stops` are token ids that end a text, in addition to
    the tokenizer's end-of-text token. `slide` lets texts grow longer than the window. Without a tokenizer, the decoder
    returns token ids but no text. The model is put into evaluation mode.
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
        self.window = model.config.generation_length
        """Maximum number of tokens that the model can see."""
        self.stops = frozenset(stops) | (set() if tokenizer is None else {tokenizer.end_of_text})
        self._cache = GenerationCache(
            model.config,
            mesh=model.mesh,
            dtype=model.compute_dtype,
            num_rows=num_rows,
            capacity=min(_FIRST_CAPACITY, self.window),
        )
        self._rows: list[Text | None] = [None] * num_rows
        self._waiting: dict[int, Text] = {}
        """Texts that wait for a row, by number."""
        self._queue: list[tuple[int, int]] = []
        """Heap of (turn, number) for the waiting texts and for texts that were cancelled while they waited. The text
        with the lowest turn starts next.
        """
        self._num_added = self._num_requests = 0
        self._is_alone = all(axis.size == 1 for axis in model.mesh.axes)
        """Whether this rank computes a pass alone. If so, it can abandon a pass after any error."""

    @property
    def is_idle(self) -> bool:
        """Whether no text is running or waiting."""
        return not self._waiting and not any(self._rows)

    def add(self, prompt: Sequence[int], sampling: Sampling, *, sample: int = 0, index: int = 0) -> int:
        """Queue a text that continues the token ids in `prompt`, and return the text's number. Texts with the same
        prompt and seed differ if their `sample` differs. `index` is the text's index in its request.

        Raises `ConfigError` for an empty prompt, for an id outside the vocabulary in `prompt` or `sampling.bias`, for a
        prompt longer than the window (unless `slide` is set and the prompt's probabilities are not requested), and for
        stop strings without a tokenizer.
        """
        self._check(prompt, sampling)
        stream = None if self.tokenizer is None else TextStream(self.tokenizer, prompt, sampling.stop)
        text = Text(self._num_added, prompt, sampling, sample, stream)
        text.first = self._first_seen(len(prompt))
        self._waiting[text.number] = text
        self._num_requests += index == 0  # only requests count, or those with many texts would bring their own forward
        heappush(self._queue, (self._num_requests + _YIELDED * index, text.number))
        self._num_added += 1
        return text.number

    def cancel(self, number: int) -> None:
        """Drop the text with this number, whether the text is waiting or running. Nothing happens if the text has
        already ended.
        """
        self._waiting.pop(number, None)
        for row, text in enumerate(self._rows):
            if text is not None and text.number == number:
                self._free(row)

    @torch.no_grad()
    def step(self) -> list[Piece]:
        """Add at most one token to each running text, and read up to 512 tokens of prompts. Every rank must call this
        function.

        Returns one `Piece` per new token. For each text, the pieces of the prompt come before those of the generated
        text. If a text's own work raises an error, the last piece of the text holds the error, and the other texts
        continue. If the cache cannot grow on some rank, the texts that need more room end with an error on all ranks.
        On a single rank, an error in a pass that several texts share ends only the texts that took part in the pass. On
        several ranks, such an error is raised, because other ranks may not see the error and would wait forever.
        """
        for row, text in enumerate(self._rows):
            if text is None and self._waiting:
                self._rows[row] = self._next_waiting()
        # The rows of both passes are determined before the first pass, so that no text gets two tokens in one step.
        steps = [rows for rows in (self._writing(), self._reading()) if rows]
        pieces = [piece for rows in steps for piece in self._advance(rows)]
        if self.is_idle:
            reshard(self.model)
        return pieces

    def run(self) -> Iterator[Piece]:
        """Run steps until all texts have ended, and yield the pieces of every step. Raises the error of the first text
        that ends with an error, such as `GenerationError` if the model's logits are not finite.
        """
        while not self.is_idle:
            for piece in self.step():
                if piece.error is not None:
                    raise piece.error
                yield piece

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        if not prompt:
            raise ConfigError("A prompt must have at least one token, but has none. Start with the end-of-text token.")
        if not 0 <= min(prompt) <= max(prompt) < self.model.config.vocab_size:
            raise ConfigError(
                f"A prompt's token ids must be from 0 to {self.model.config.vocab_size - 1}, the model's last "
                f"vocabulary entry, but are from {min(prompt)} to {max(prompt)}. Use this model's tokenizer."
            )
        if len(prompt) > self.window and not self.slide:
            raise ConfigError(
                f"A prompt must fit in the model's window ({self.window} tokens), but has {len(prompt)}. "
                "Shorten the prompt, or set `slide`."
            )
        if len(prompt) > self.window and sampling.tell_prompt:
            raise ConfigError(
                f"A prompt whose probabilities are requested must fit in the model's window ({self.window} tokens), "
                f"but has {len(prompt)}. Shorten the prompt, or request only the probabilities of the generated tokens."
            )
        if not all(0 <= token < self.model.config.vocab_size for token, _ in sampling.bias):
            raise ConfigError(
                f"`bias` must have token ids from 0 to {self.model.config.vocab_size - 1}, the model's last "
                f"vocabulary entry, but has {', '.join(str(token) for token, _ in sampling.bias)}. Use this model's "
                "token ids."
            )
        if sampling.stop and self.tokenizer is None:
            raise ConfigError("`stop` needs a tokenizer to decode the tokens, but there is none. Pass a tokenizer.")

    def _first_seen(self, length: int) -> int:
        """Return the first position that the model sees when it chooses the next token of a text of `length` tokens."""
        drop = self.window - self.window // 2
        return max(0, -(-(length - self.window) // drop) * drop)

    def _next_waiting(self) -> Text:
        while (number := heappop(self._queue)[1]) not in self._waiting:
            pass  # cancelled
        return self._waiting.pop(number)

    def _writing(self) -> dict[int, int]:
        """Return the rows that generate, each with its number of tokens to read, which is 1. A row generates if only
        the last token of its text is unread.
        """
        return {row: 1 for row, text in enumerate(self._rows) if text is not None and text.unread == 1}

    def _reading(self) -> dict[int, int]:
        """Return the rows whose prompts are read in the next pass, each with its number of tokens to read. The first is
        the row whose prompt has waited longest. The others are the rows directly after it whose prompts fit in the same
        pass.
        """
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
        """Read the next `counts[row]` tokens of each row in `counts`, in one forward pass over all rows from the first
        to the last of these rows. Return the new pieces.
        """
        failed = self._make_room(counts)
        counts = {row: count for row, count in counts.items() if self._rows[row] is not None}
        return failed + (self._pass(counts) if counts else [])

    def _pass(self, counts: dict[int, int]) -> list[Piece]:
        """Do the forward pass of `_advance`. The cache must already have room for the tokens."""
        rows = range(min(counts), max(counts) + 1)
        try:
            hidden, logits = self._read(rows, counts)
        except Exception as error:
            if not self._is_alone:
                raise
            return [self._fail(row, error) for row in counts]
        states = {row: hidden[row - rows.start, :count] for row, count in counts.items()}
        told = [piece for row in counts for piece in self._tell_prompt(row, states[row])]
        going_on = {row: count for row, count in counts.items() if self._rows[row] is not None}
        return told + self._follow(going_on, logits.float(), first_row=rows.start)

    def _read(self, rows: range, counts: dict[int, int]) -> tuple[Tensor, Tensor]:
        """Read the next tokens of adjacent rows. Return the tokens' last hidden states [B, S or more, H], and the
        scores [B, V] after each row's last token.
        """
        length = max(counts.values())
        unread = [self._unread(row, counts.get(row, 0)) for row in rows]
        tokens = torch.tensor([ids + [0] * (length - len(ids)) for ids in unread], device=self.model.mesh.device)
        read = [len(ids) for ids in unread]
        hidden = self.model.read(tokens, self._cache, counts=read, first_row=rows.start)
        if min(read) == length:
            return hidden, self.model.logits_of(hidden[:, length - 1])
        return hidden, self.model.logits_of(hidden[torch.arange(len(read)), torch.tensor(read).clamp(min=1) - 1])

    def _unread(self, row: int, count: int) -> list[int]:
        text = self._rows[row]
        if text is None:
            return []
        start = text.first + text.num_read
        return text.tokens[start : start + count]

    def _make_room(self, counts: dict[int, int]) -> list[Piece]:
        """Enlarge the cache if the next pass needs more room. If some rank has too little memory, end the texts that do
        not fit, and return their pieces.
        """
        rows, before = range(min(counts), max(counts) + 1), self._cache.capacity
        num_tokens = max(self._cache.lengths[row] for row in rows) + max(counts.values())
        capacity = min(self.window, max(num_tokens, before * 3 // 2))
        if num_tokens <= before or capacity == before:
            return []
        failure: Exception | None = None
        try:
            self._cache.grow(capacity)
        except Exception as error:
            failure = error
        if not self._on_any_rank(failure is not None):
            return []
        self._cache.shrink(before)
        too_long = [row for row in rows if self._cache.lengths[row] + counts.get(row, 0) > before]
        return [self._fail(row, _no_room(before, failure)) for row in too_long if self._rows[row] is not None]

    def _on_any_rank(self, event: bool) -> bool:
        """Whether `event` is true on at least one of the ranks that generate the same texts."""
        mesh = self.model.mesh
        flag = torch.tensor([event], dtype=torch.int32, device=mesh.device)
        for axis in (mesh.tensor, *((mesh.tokens,) if mesh.shares_layers else ())):
            flag = all_reduce(flag, axis, "max")
        return bool(flag)

    def _tell_prompt(self, row: int, hidden: Tensor) -> list[Piece]:
        """Return the pieces for the next prompt tokens of a row, computed from the tokens' last hidden states `hidden`
        [S, H].

        The hidden state of a token gives the likelihood of the next token. A text that generates no tokens ends with
        the last piece of its prompt.
        """
        text = self._rows[row]
        assert text is not None
        num_before = text.first + text.num_read
        begin, end = text.num_told, min(num_before + len(hidden) + 1, text.num_prompt)
        if begin >= end:
            return []
        pieces = []
        if begin == 0:
            pieces.append(Piece(text.number, text.tokens[0], is_prompt=True))
            begin = 1
        states, tokens = hidden[begin - 1 - num_before :], text.tokens[begin:end]
        try:
            found = self._likelihoods(states, tokens, text.sampling.alternatives)
        except Exception as error:
            if not (self._is_alone or isinstance(error, GenerationError)):
                raise
            return [self._fail(row, error)]
        pieces += [
            Piece(text.number, token, "", one.logprob, one.alternatives, is_prompt=True)
            for token, one in zip(tokens, found, strict=True)
        ]
        text.num_told = end
        if text.is_over and end == text.num_prompt:
            pieces[-1] = replace(pieces[-1], finish="length")
            self._free(row)
        return pieces

    def _likelihoods(self, hidden: Tensor, tokens: Sequence[int], num_alternatives: int | None) -> list[Likelihood]:
        """Return the likelihoods of N `tokens`. Row i of the last hidden states `hidden` [at least N, H] gives the
        likelihood of token i. If `num_alternatives` is None, the list holds N times `Likelihood()`, which has no
        probabilities. Raises `GenerationError` if scores are not finite.
        """
        if num_alternatives is None:
            return [Likelihood()] * len(tokens)
        found = []
        for start in range(0, len(tokens), _SCORED_AT_ONCE):
            some = tokens[start : start + _SCORED_AT_ONCE]
            scores = self.model.logits_of(hidden[start : start + len(some)]).float()
            if rows_not_finite(scores):
                raise not_finite(scores, "the prompt")
            found += likelihoods_of(scores, some, num_alternatives)
        return found

    def _follow(self, counts: dict[int, int], scores: Tensor, *, first_row: int) -> list[Piece]:
        """Choose the next token of each row that has no unread token. `scores` [B, V] are the scores of the rows from
        `first_row` on.
        """
        ready: list[int] = []
        for row, count in counts.items():
            text = self._rows[row]
            assert text is not None
            text.num_read += count
            if not text.unread:
                ready.append(row)
        broken = {first_row + index for index in rows_not_finite(scores)} if ready else set()
        of_row = dict(enumerate(scores.unbind(), first_row))
        errors: dict[int, Exception] = {}
        choices = []
        for row in ready:
            try:
                choices.append(self._text(row).choose(of_row[row], is_finite=row not in broken))
            except Exception as error:  # the error ends only this text
                errors[row] = error
                choices.append(_FAILED)
        pieces = []
        for row, token in zip(ready, _agreed(choices, self.model.mesh), strict=True):
            try:
                if token == _FAILED:
                    raise errors[row]
                pieces.append(self._extend(row, token, of_row[row]))
            except Exception as error:
                pieces.append(self._fail(row, error))
        return pieces

    def _extend(self, row: int, token: int, scores: Tensor) -> Piece:
        """Append a token to a row's text. If the token ends the text, the row becomes free."""
        text = self._text(row)
        shown, finish = text.append(token, is_end=token in self.stops)
        if not finish and len(text.tokens) > self.window and not self.slide:
            finish = "length"
        if finish:
            shown += text.rest()
            self._free(row)
        elif (first := self._first_seen(len(text.tokens))) != text.first:
            text.first, text.num_read = first, 0
            self._cache.set_length(row, 0)
        found = Likelihood()
        if text.sampling.alternatives is not None:
            (found,) = likelihoods_of(scores.unsqueeze(0), [token], text.sampling.alternatives)
        return Piece(text.number, token, shown, found.logprob, found.alternatives, finish)

    def _fail(self, row: int, error: Exception) -> Piece:
        """End a row's text with an error, and return the text's last piece."""
        text = self._text(row)
        self._free(row)
        self._cache.clear(row)
        return Piece(text.number, text.tokens[-1], finish="error", error=error)

    def _text(self, row: int) -> Text:
        """Return the text of a row that is not free."""
        text = self._rows[row]
        assert text is not None
        return text

    def _free(self, row: int) -> None:
        self._rows[row] = None
        self._cache.set_length(row, 0)


def _no_room(num_tokens: int, failure: Exception | None) -> GenerationError:
    """Return the error for a text that needs room for more than `num_tokens` tokens. `failure` is this rank's error, if
    any.
    """
    where = "on this rank" if failure else "on another rank"
    reason = f": {str(failure).splitlines()[0]}" if failure and str(failure) else ""
    return GenerationError(
        f"The keys and values of all rows must fit into memory, but {where} there is room for only {num_tokens} tokens "
        f"in each row{reason}. Ask for a shorter text, or use fewer rows."
    )


def _agreed(choices: list[int], mesh: ParallelMesh) -> list[int]:
    """Make all ranks over which the layers are sharded choose the same tokens. Otherwise, different kinds of devices
    might round nearly equal scores differently and choose different tokens.
    """
    if not mesh.shares_layers or not choices:
        return choices
    agreed: list[int] = all_reduce(torch.tensor(choices, device=mesh.device), mesh.tokens, "max").tolist()
    return agreed
