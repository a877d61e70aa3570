"""Answers of all protocols as JSON objects: one object for a whole answer, or one object for each chunk of a stream."""

import base64
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from torch import Tensor

from crosscut.generation import Piece
from crosscut.serving.protocol.embeddings import EmbeddingRequest, ServedEncoder
from crosscut.serving.protocol.requests import Request, ServedDecoder
from crosscut.serving.tokens import parts_of

Json = dict[str, object]

_DEPTH = 4
"""Depth of the lists in an answer that hold one entry per token: below `choices`, a choice and its `logprobs`."""

_AT_ONCE = 1000
"""Number of entries of a list that are encoded at once."""


def to_json(value: object) -> str:
    """Encode a value as JSON. Raises `ValueError` for NaN and infinity, which JSON does not have."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def in_parts(value: object, depth: int = 0) -> Iterator[str]:
    """Encode an answer as JSON in parts. The encoder holds Python's lock until it has encoded its value, so that a
    large value encoded at once would stop other threads. `depth` is the depth of the value in the answer. An iterator
    is encoded as a list, of which only one entry is in memory at a time.
    """
    if depth < _DEPTH and isinstance(value, dict):
        for number, (key, one) in enumerate(value.items()):
            yield f"{',' if number else '{'}{to_json(key)}:"
            yield from in_parts(one, depth + 1)
        yield "}" if value else "{}"
    elif depth < _DEPTH and isinstance(value, list | Iterator):
        yield "["
        for number, one in enumerate(value):
            yield "," if number else ""
            yield from in_parts(one, depth + 1)
        yield "]"
    elif isinstance(value, list):
        for start in range(0, len(value), _AT_ONCE):
            yield ("," if start else "[") + to_json(value[start : start + _AT_ONCE])[1:-1]
        yield "]" if value else "[]"
    else:
        yield to_json(value)


class TextAnswer(ABC):
    """Answer to one request, in the JSON form of one protocol. `spell` is a function that returns the bytes of a
    token.
    """

    prefix: str
    """First part of the answer's id."""
    kind: str
    """Value of `object` in a whole answer."""
    chunk_kind: str
    """Value of `object` in a chunk."""

    def __init__(self, request: Request, served: ServedDecoder, spell: Callable[[int], bytes]) -> None:
        self.request = request
        self.served = served
        self.spell = spell
        self.num_written = 0
        """Number of generated tokens of all choices, including the tokens that end a text."""
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": served.name}

    @abstractmethod
    def opening(self, which: int) -> Json | None:
        """Return the chunk that precedes the tokens of choice number `which`, or None if there is no such chunk."""

    @abstractmethod
    def delta(self, which: int, piece: Piece) -> Json:
        """Return the JSON object for choice number `which` in a chunk of a stream. The object describes only the token
        in `piece`.
        """

    @abstractmethod
    def choice(self, which: int, pieces: Sequence[Piece]) -> Json:
        """Return the JSON object for choice number `which` in an answer that is not streamed."""

    def whole(self, choices: Sequence[Sequence[Piece]]) -> Json:
        """Return the whole answer, with an iterator over its choices: the entries of all tokens at once would be
        millions of objects, in which the garbage collector would search while all clients wait. `choices` holds the
        tokens of each choice.
        """
        self.num_written = sum(not piece.is_prompt for pieces in choices for piece in pieces)
        written = map(self.choice, count(), choices)
        return self._head | {"object": self.kind, "choices": written, "usage": self._usage()}

    def openings(self) -> Iterator[Json]:
        """Yield the chunks that precede all tokens."""
        for which in range(len(self.request.prompts) * self.request.num_choices):
            if (opening := self.opening(which)) is not None:
                yield self._chunk([opening])

    def chunk(self, which: int, piece: Piece) -> Json:
        """Return the chunk for one token of choice number `which`."""
        self.num_written += not piece.is_prompt
        return self._chunk([self.delta(which, piece)])

    def closing(self) -> Iterator[Json]:
        """After all tokens, yield a chunk with the token counts if the client requested them."""
        if self.request.include_usage:
            yield self._chunk([]) | {"usage": self._usage()}

    def _chunk(self, choices: list[Json]) -> Json:
        usage = {"usage": None} if self.request.include_usage else {}
        return self._head | {"object": self.chunk_kind, "choices": choices} | usage

    def _usage(self) -> Json:
        num_read = sum(map(len, self.request.prompts))
        return {
            "prompt_tokens": num_read,
            "completion_tokens": self.num_written,
            "total_tokens": num_read + self.num_written,
        }


class CompletionAnswer(TextAnswer):
    """Answer of /v1/completions."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, request: Request, served: ServedDecoder, spell: Callable[[int], bytes]) -> None:
        super().__init__(request, served, spell)
        self._offsets = [0] * (len(request.prompts) * request.num_choices)
        """Number of characters reported so far, for each choice."""
        self._tells_prompt = request.sampling.tell_prompt
        """Whether the prompts are reported token by token, with their probabilities."""
        told = zip(request.prompts, request.echoed, request.surplus, strict=True) if self._tells_prompt else ()
        self._parts = [
            parts_of(text, map(spell, prompt), count=len(prompt), surplus=surplus)
            for prompt, text, surplus in told
            for _ in range(request.num_choices)
        ]
        """One iterator per choice, over the text of the choice's prompt, token by token."""

    def opening(self, which: int) -> Json | None:
        """Return the entry for the prompt if the prompt is echoed as a whole, otherwise None."""
        prompt = self._prompt(which)
        return {"index": which, "text": prompt, "logprobs": None, "finish_reason": None} if prompt else None

    def delta(self, which: int, piece: Piece) -> Json:
        """Return the entry of a choice for one token."""
        return self._told(which, [piece]) | {"finish_reason": piece.finish or None}

    def choice(self, which: int, pieces: Sequence[Piece]) -> Json:
        """Return the entry for a whole choice."""
        return self._told(which, pieces, self._prompt(which)) | {"finish_reason": pieces[-1].finish}

    def _prompt(self, which: int) -> str:
        """Return the text of the choice's prompt if the prompt is echoed as a whole, otherwise an empty text."""
        if self._tells_prompt or not self.request.echoed:
            return ""
        return self.request.echoed[which // self.request.num_choices]

    def _told(self, which: int, pieces: Sequence[Piece], before: str = "") -> Json:
        """Return the entry of a choice with the text `before` and the text of the `pieces`. If prompts are reported
        token by token, some pieces are tokens of the prompt, and the entry includes their text.
        """
        parts = self._parts[which] if self._tells_prompt else iter(())
        texts = [next(parts, "") if piece.is_prompt else piece.text for piece in pieces]
        return {"index": which, "text": before + "".join(texts), "logprobs": self._logprobs(which, pieces, texts)}

    def _logprobs(self, which: int, pieces: Sequence[Piece], texts: Sequence[str]) -> Json | None:
        if self.request.sampling.alternatives is None:
            return None
        rows = []
        for piece, text in zip(pieces, texts, strict=True):
            if self._tells_prompt or not (piece.is_prompt or piece.token in self.served.stops):
                likeliest, offset = self._likeliest(piece), self._offsets[which]
                rows.append((self._spelled(piece.token), piece.logprob, likeliest, offset))
            self._offsets[which] += len(text)
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[column] for row in rows] for column, name in enumerate(names)}

    def _likeliest(self, piece: Piece) -> dict[str, float] | None:
        """Log probabilities of the likeliest tokens and of the token in `piece`, keyed by spelling. None for the first
        token of a text, which has no probability.
        """
        if piece.logprob is None:
            return None
        own = {self._spelled(piece.token): piece.logprob}
        return own | {self._spelled(token): logprob for token, logprob in reversed(piece.alternatives)}

    def _spelled(self, token: int) -> str:
        """Spelling of a token in this protocol. A token that is not made of whole characters is spelled as its
        bytes.
        """
        content = self.spell(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


class ChatAnswer(TextAnswer):
    """Answer of /v1/chat/completions."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, which: int) -> Json | None:
        """Return the first chunk of the choice, which names the role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": which, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, which: int, piece: Piece) -> Json:
        """Return the entry for one token."""
        return {
            "index": which,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs([piece]),
            "finish_reason": piece.finish or None,
        }

    def choice(self, which: int, pieces: Sequence[Piece]) -> Json:
        """Return the entry with the whole message of a choice."""
        content = "".join(piece.text for piece in pieces)
        return {
            "index": which,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": self._logprobs(pieces),
            "finish_reason": pieces[-1].finish,
        }

    def _logprobs(self, pieces: Sequence[Piece]) -> Json | None:
        if self.request.sampling.alternatives is None:
            return None
        told = [
            self._entry(piece.token, piece.logprob)
            | {"top_logprobs": [self._entry(token, logprob) for token, logprob in piece.alternatives]}
            for piece in pieces
            if piece.token not in self.served.stops
        ]
        return {"content": told, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> Json:
        content = self.spell(token)
        return {"token": content.decode(errors="replace"), "logprob": logprob, "bytes": list(content)}


def embedding_answer(request: EmbeddingRequest, served: ServedEncoder, vectors: Sequence[Tensor]) -> bytes:
    """Return the answer as JSON. `vectors` are the embeddings [H] of the request's texts."""
    num_tokens = sum(map(len, request.prompts))
    data = (
        {"object": "embedding", "index": index, "embedding": _in_base64(one) if request.is_base64 else one.tolist()}
        for index, one in enumerate(vectors)
    )
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    answer = {"object": "list", "data": data, "model": served.name, "usage": usage}
    return "".join(in_parts(answer, depth=1)).encode()


def _in_base64(vector: Tensor) -> str:
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
