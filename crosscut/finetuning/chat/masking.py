"""Encode a conversation as tokens, with a mask of the tokens that the loss covers.

The chat template of the model renders the conversation. There are two ways to find the answers in the rendered text:

- The template marks answers with `{% generation %}`. The mask covers what the template writes between the marks, as in
  TRL (`assistant_only_loss`).
- The template has no marks. An answer then reaches from the end of its prompt (the earlier messages, rendered with the
  generation prompt) to the end of its message (the messages up to the answer, rendered without the generation prompt).
  Both renderings must be prefixes of the whole text.

A token belongs to an answer if its text overlaps with the answer. The module `checking` compares the tokens with the
conversation before anything is trained.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crosscut.config import ConfigError, DataError
from crosscut.data.tokenization.long_texts import LongText
from crosscut.finetuning.chat.conversations import ANSWER, Conversation
from crosscut.serving.protocol.chat import ChatTemplate
from crosscut.serving.protocol.refusals import Refusal

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Span = tuple[int, int]
"""Index of an answer's first character in the rendered text, and the index after its last character."""


class EncodedAnswer(NamedTuple):
    """Place of an answer among the tokens of a conversation. If the passages that a template marks do not correspond to
    the answers, all answers of the conversation are one `EncodedAnswer`.
    """

    start: int
    """Index of the first token that the loss covers."""
    stop: int
    """Index after the last token that the loss covers."""
    texts: Mapping[int, str]
    """Texts of the answers, keyed by their indices in the conversation."""
    end: int | None
    """Id of the special token that ends the answer, which is the first one after the last visible character. None if
    the loss covers no such token."""
    follower: int | None
    """Id of a special token that follows directly, and that the loss does not cover. None if there is no such token."""


@dataclass(frozen=True, eq=False)
class EncodedConversation:
    """Tokens of a conversation."""

    place: str
    """File and line of the conversation."""
    ids: Ids
    """Token ids, [tokens]."""
    mask: Mask
    """Whether the loss covers each token, [tokens]."""
    answers: tuple[EncodedAnswer, ...] = ()
    lost: Mapping[int, str] = field(default_factory=dict)
    """Texts of system and user messages that are not in the rendered conversation, keyed by their indices."""


class Masker:
    """Encoder that renders conversations with a model's chat template, and returns their tokens with masks.

    Raises `ConfigError` if the folder of the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Path) -> None:
        found = ChatTemplate.find(tokenizer)
        if found is None:
            raise ConfigError(
                f"`{tokenizer.parent}` must hold a chat template, but has no `chat_template.jinja` and no "
                "`chat_template` in `tokenizer_config.json`. Choose a chat model, or add a template."
            )
        self.template = found

    def encode(self, conversation: Conversation) -> EncodedConversation:
        """Return the tokens of a conversation with their mask. Raises `DataError` if the template rejects the
        conversation or the loss would cover no token. The message gives the file and the line.
        """
        try:
            text, spans = self._answers(conversation)
            found = self.template.encode(text)
        except Refusal as error:
            raise DataError(f"{conversation.place}: {error.message}") from None
        mask, places = np.zeros(len(found.ids), dtype=np.bool_), []
        for first, end in spans:
            inside = ((found.starts < found.ends) & (found.starts < end) & (found.ends > first)).nonzero()[0]
            if len(inside):  # some tokens between, such as trimmed spaces, may have no characters
                mask[inside[0] : inside[-1] + 1] = True
            places.append((int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0))
        if not mask[1:].any():
            raise DataError(
                f"{conversation.place}: The answers must have at least one token, but the chat template renders none. "
                "Write an answer, or remove the line."
            )
        texts = {index: message["content"] for index, message in enumerate(conversation.messages)}
        read = {index: texts[index] for index in texts if conversation.messages[index]["role"] != ANSWER}
        rendered = squeezed(text)
        return EncodedConversation(
            conversation.place,
            found.ids.astype(np.int64),
            mask,
            tuple(self._answer(text, found, *each) for each in _by_answer(places, conversation)),
            {index: content for index, content in read.items() if squeezed(content) not in rendered},
        )

    def _answer(self, text: str, found: LongText, start: int, stop: int, texts: Mapping[int, str]) -> EncodedAnswer:
        """Find the special tokens at the end of an answer and behind it."""
        end, follower = None, None
        for index in range(stop - 1, start - 1, -1):
            if self._is_special(text, found, index):
                end = int(found.ids[index])
            elif _written(text, found, index):
                break
        for index in range(stop, len(found.ids)):
            if self._is_special(text, found, index):
                follower = int(found.ids[index])
            if _written(text, found, index):
                break
        return EncodedAnswer(start, stop, texts, end, follower)

    def _is_special(self, text: str, found: LongText, index: int) -> bool:
        """Whether a token is a special token whose name is in the text. An unknown character has another token."""
        written = _written(text, found, index)
        return bool(written) and self.template.special.get(int(found.ids[index]), "").strip() == written

    @cached_property
    def is_marked(self) -> bool:
        """Whether the template marks answers with `{% generation %}`."""
        return "endgeneration" in self.template.source

    def _answers(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Return the rendered text, and the spans of the answers that the loss covers."""
        return self._marked(conversation) if self.is_marked else self._by_ends(conversation)

    def _marked(self, conversation: Conversation) -> tuple[str, list[Span]]:
        mark = secrets.token_hex(16)  # occurs in no conversation
        pieces = self.template.render(conversation.messages, generation_mark=mark).split(mark)
        text, spans = "", []
        for i, piece in enumerate(pieces):
            if i % 2:  # between a mark before an answer and the mark after the answer
                spans.append((len(text), len(text) + len(piece)))
            text += piece
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == ANSWER]
        if len(spans) != len(answers):
            if len(answers) == len(conversation.answers):
                return text, spans
            raise DataError(
                f"{conversation.place}: The chat template must mark each of the {len(answers)} answers once, but "
                f"marks {len(spans)} passages. Answers of weight 0 can be left out only if every answer "
                "is marked. Remove `weight`, or correct the template."
            )
        return text, [span for i, span in zip(answers, spans, strict=True) if i in conversation.answers]

    def _by_ends(self, conversation: Conversation) -> tuple[str, list[Span]]:
        messages = conversation.messages
        text, spans = self.template.render(messages), []
        for i in conversation.answers:
            prompt = self.template.render(messages[:i], add_generation_prompt=True)
            through = self.template.render(messages[: i + 1])
            if not through.startswith(prompt) or not text.startswith(through):
                raise DataError(
                    f"{conversation.place}: The chat template must render messages in the same way whatever follows "
                    f"them, but renders the messages up to `messages[{i}]` differently. Mark the answers in the "
                    "template with `{% generation %}` and `{% endgeneration %}`."
                )
            spans.append((len(prompt), len(through)))
        return text, spans


def squeezed(text: str) -> str:
    """Return a text without its spaces and line breaks, which many templates trim."""
    return "".join(text.split())


def _written(text: str, found: LongText, index: int) -> str:
    """Characters of a token in the text, without spaces around them."""
    return text[found.starts[index] : found.ends[index]].strip()


def _by_answer(
    places: Sequence[tuple[int, int]], conversation: Conversation
) -> list[tuple[int, int, Mapping[int, str]]]:
    """Return the places of the answers among the tokens, each with the answer's index and text."""
    texts = {index: conversation.messages[index]["content"] for index in conversation.answers}
    if len(places) == len(texts):
        return [(*place, {index: text}) for place, (index, text) in zip(places, texts.items(), strict=True)]
    return [(min(start for start, stop in places if stop), max(stop for _, stop in places), texts)]
