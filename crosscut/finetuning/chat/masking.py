"""Encode a conversation as tokens, with a mask of the tokens that the loss covers.

The chat template of the model renders the conversation. There are two ways to find the answers in the rendered text:

- The template marks answers with `{% generation %}`. The mask covers what the template writes between the marks, as in
  TRL (`assistant_only_loss`).
- The template has no marks. An answer then reaches from the end of its prompt (the earlier messages, rendered with the
  generation prompt) to the end of its message (the messages up to the answer, rendered without the generation prompt).
  Both renderings must be prefixes of the whole text.

A token belongs to an answer if its text overlaps with the answer.
"""

import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crosscut.config import ConfigError, DataError
from crosscut.finetuning.chat.conversations import ANSWER, Conversation
from crosscut.serving.protocol.chat import ChatTemplate
from crosscut.serving.protocol.refusals import Refusal

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Span = tuple[int, int]
"""Index of an answer's first character in the rendered text, and the index after its last character."""


@dataclass(frozen=True, eq=False)
class EncodedConversation:
    """Tokens of a conversation."""

    place: str
    """File and line of the conversation."""
    ids: Ids
    """Token ids, [tokens]."""
    mask: Mask
    """Whether the loss covers each token, [tokens]."""


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
        mask, starts, ends = np.zeros(len(found.ids), dtype=np.bool_), found.starts, found.ends
        for first, end in spans:
            inside = ((starts < ends) & (starts < end) & (ends > first)).nonzero()[0]
            if len(inside):  # some tokens between, such as trimmed spaces, may have no characters
                mask[inside[0] : inside[-1] + 1] = True
        if not mask[1:].any():
            raise DataError(
                f"{conversation.place}: The answers must have at least one token, but the chat template renders none. "
                "Write an answer, or remove the line."
            )
        return EncodedConversation(conversation.place, found.ids.astype(np.int64), mask)

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
