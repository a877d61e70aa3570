"""Requests of OpenAI's embeddings protocol."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from crosscut.data.tokenization.published import PublishedTokenizer
from crosscut.data.tokenization.token_bytes import TokenBytes
from crosscut.serving.news import TextOrder
from crosscut.serving.protocol.fields import Fields, RequestKind, is_text, shown
from crosscut.serving.protocol.model import ServedModel, require_model
from crosscut.serving.protocol.refusals import Refusal, require_bytes
from crosscut.serving.protocol.unsupported import LABELS

if TYPE_CHECKING:
    import tokenizers

MOST_INPUTS = 2048
"""Maximum number of texts per request, as in OpenAI's API."""

_FORMATS = ("float", "base64")


@dataclass(frozen=True, kw_only=True)
class ServedEncoder(ServedModel):
    """The served encoder."""

    size: int
    """Number of elements of an embedding."""
    prompt: str = ""
    """Text that precedes every text. Token ids of a client contain it already."""
    num_skipped: int = 0
    """Number of tokens at the start of a text that are left out of the pooling."""
    lower_case: bool = False
    """Whether texts are put in lower case first."""
    is_published: bool = False
    """Whether the files beside the tokenizer are those of a published model."""

    def load(self, kind: RequestKind) -> None:
        """Load what it takes to read requests to embed texts."""
        assert kind is RequestKind.EMBEDDING
        assert self.longest

    @cached_property
    def inner(self) -> "tokenizers.Tokenizer":
        """Tokenizer that neither truncates nor pads texts."""
        found = PublishedTokenizer(path=self.tokenizer, is_published=self.is_published, lower_case=self.lower_case)
        return found.read()

    @cached_property
    def longest(self) -> int:
        """Number of bytes of the longest token."""
        return TokenBytes(self.inner).longest


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequest:
    """A client's request to embed texts."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each text."""
    is_base64: bool
    """Whether embeddings are returned in base64 (float32, little endian) instead of as lists of numbers."""

    def orders(self) -> Iterator[TextOrder]:
        """Yield the texts to embed."""
        for index, ids in enumerate(self.prompts):
            yield TextOrder(ids, None, 0, index)


def read_embedding(body: object, served: ServedEncoder) -> EmbeddingRequest:
    """Read a request of the embeddings protocol. Raises `Refusal`."""
    fields = Fields(body)
    require_model(fields, served.name)
    fields.only("dimensions", (served.size,), "The model's embeddings have a fixed number of dimensions.")
    form = fields.text("encoding_format") or _FORMATS[0]
    if form not in _FORMATS:
        fields.refuse("encoding_format", f"be {' or '.join(_FORMATS)}")
    for name in LABELS:
        fields.get(name)
    fields.get("input")
    fields.finish()
    return EmbeddingRequest(prompts=_texts(fields, served), is_base64=form == "base64")


def _texts(fields: Fields, served: ServedEncoder) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of the texts in `input`. The field holds one or several texts, either all as strings or all
    as token ids.
    """
    value = fields.get("input")
    inputs = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not inputs:
        fields.refuse("input", "have at least one text")
    if len(inputs) > MOST_INPUTS:
        raise Refusal(
            f"`input` must hold at most {MOST_INPUTS} texts, but has {len(inputs)}. Send several requests.",
            field="input",
        )
    texts = [text for text in inputs if is_text(text)]
    if len(texts) != len(inputs) and not all(map(_is_ids, inputs)):
        fields.refuse("input", "be a string, a list of token ids, a list of strings, or a list of lists of token ids")
    found = []
    for number, one in enumerate(texts or inputs):
        place = f"input[{number}]" if value is inputs else "input"
        found.append(tuple(_encoded(one, place, served) if texts else one))
        _check(found[-1], place, served)
    return tuple(found)


def _encoded(text: str, place: str, served: ServedEncoder) -> list[int]:
    require_bytes(text, place, served.window, served.longest)
    (encoded,) = served.inner.encode_batch_fast([served.prompt + text])
    ids: list[int] = encoded.ids
    return ids


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _check(ids: Sequence[int], place: str, served: ServedEncoder) -> None:
    """Raise `Refusal` for a text that the model cannot read. `place` is the text's path in the request, such as
    `input[2]`.
    """
    if len(ids) <= served.num_skipped:
        beyond = " after the model's prompt" if served.num_skipped else ""
        raise Refusal(f"`{place}` must have at least one token{beyond}, but has none. Remove the text.", field=place)
    if not 0 <= min(ids) <= max(ids) < served.vocab_size:
        bad = next(one for one in ids if not 0 <= one < served.vocab_size)
        raise Refusal(
            f"`{place}` must hold only token ids from 0 to {served.vocab_size - 1}, the ids that the model has, but "
            f"holds the id {shown(bad)}. Remove this id.",
            field=place,
        )
    if len(ids) > served.window:
        raise Refusal(
            f"`{place}` must have at most {served.window} tokens, but has {len(ids)}. Shorten the text, or split it "
            "into several texts.",
            code="context_length_exceeded",
            field=place,
        )
