"""Check encoded conversations before anything is trained: decode the answers again, and find the token that ends them.

A model that has learned an answer perfectly writes the tokens that the loss covers, up to the first id that stops
generation. This text must contain the answer. If there is no such id, the model never stops.

A chat template often ends a turn with a token that is no stop of the model, such as `<|im_end|>` with a base model. If
all answers end with the same special token, this token becomes a stop of the run.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

import numpy as np

from crosscut.config import DataError
from crosscut.config.checks import listed, shown
from crosscut.config.system.terminal import echo
from crosscut.config.system.wording import counted
from crosscut.data import Tokenizer
from crosscut.finetuning.chat.masking import EncodedAnswer, EncodedConversation, Ids, squeezed
from crosscut.pretrained.companions import Speech


@dataclass(frozen=True)
class Allowed:
    """Faults of conversations that the user allows."""

    endless: bool = False
    """Answers that end without an id that stops generation."""
    changed: bool = False
    """Messages that the chat template or the tokenizer changes."""


@dataclass(frozen=True)
class _Fault:
    """Message that does not come back as it was written."""

    place: str
    index: int
    text: str
    """Text of the message."""
    found: str
    """Text that the model learns instead."""

    def __str__(self) -> str:
        return f"`messages[{self.index}]` of {self.place}"


@dataclass(frozen=True)
class AnswerCheck:
    """Check of a run's conversations."""

    conversations: Sequence[EncodedConversation]
    tokenizer: Tokenizer
    spoken: Speech
    """Ids that stop the model, and the id that begins its texts."""
    vocab_size: int
    """Number of tokens of the model."""

    def run(self, allowed: Allowed, *, is_marked: bool) -> int | None:
        """Return the id that becomes a stop of the run, or None if no id does. `is_marked` says whether the template
        marks answers. Faults that are allowed, changed spaces and normalized characters are told in a line each.

        Raises `DataError` for a token that the model does not have, for answers without a stop, and for changed
        messages, unless they are allowed.
        """
        self._require_known()
        known = self.spoken.ends
        end, *others = {answer.end for _, answer in self._answers()}
        new = () if others or end is None or end in known or end in self._beginnings else (end,)
        self._require_ends((*known, *new), allowed.endless, is_marked=is_marked)
        self._require_texts((*known, *new), allowed.changed)
        if not new:
            return None
        echo(f"All answers end with {self._name(new[0])}. This token becomes a stop of the run.", err=True)
        return new[0]

    def _answers(self) -> Iterator[tuple[EncodedConversation, EncodedAnswer]]:
        return ((each, answer) for each in self.conversations for answer in each.answers)

    @property
    def _number(self) -> int:
        """Number of answers."""
        return sum(len(answer.texts) for _, answer in self._answers())

    @cached_property
    def _beginnings(self) -> set[int]:
        """Ids that precede the first visible character of every conversation, and the one that begins texts. An answer
        must not end with them: the next message, or the next prompt, would then begin without them.
        """
        begin = [
            set(takewhile(lambda token: not self.tokenizer.decode([token]).strip(), each.ids.tolist()))
            for each in self.conversations
        ]
        own = self.spoken.begin_of_text
        return set.intersection(*begin) | (set() if own is None else {own})

    def _possible(self, tokens: Iterable[int | None]) -> list[int]:
        """Tokens that may end an answer."""
        return [token for token in dict.fromkeys(tokens) if token is not None and token not in self._beginnings]

    def _name(self, token: int) -> str:
        return f"`{self.tokenizer.decode([token], with_special=True)}`"

    def _require_known(self) -> None:
        """Raise `DataError` for a token that the tokenizer has, but the model does not have."""
        for each in self.conversations:
            if (largest := int(each.ids.max())) >= self.vocab_size:
                raise DataError(
                    f"{each.place}: The conversation must have only tokens that the model has (ids from 0 to "
                    f"{self.vocab_size - 1}), but has {self._name(largest)}, which only the tokenizer has (id "
                    f"{largest}). Change the chat template, or enlarge the embedding of the model."
                )

    def _require_ends(self, stops: Sequence[int], is_allowed: bool, *, is_marked: bool) -> None:
        """Raise `DataError` if answers lack an id of `stops`, unless they are allowed."""
        endless = [
            (each, answer) for each, answer in self._answers() if len(_places(each, answer, stops)) < len(answer.texts)
        ]
        if not endless:
            return
        lacking, (first, answer) = sum(len(each.texts) for _, each in endless), endless[0]
        if is_allowed:
            echo(
                f"{lacking} of {counted(self._number, 'answer')} do not end with a token that stops generation.",
                err=True,
            )
            return
        tail = self.tokenizer.decode(_learned(first, answer).tolist()[-8:], with_special=True)
        names = listed(self._name(stop) for stop in stops)
        raise DataError(
            f"Every answer must end with a token that stops generation ({names}) and that the loss covers, but "
            f"{lacking} of {counted(self._number, 'answer')} do not. In the first, {first.place}, the loss ends with "
            f"{shown(tail)}. {self._remedy(endless, stops, is_marked=is_marked)} Or pass --allow-endless: the model "
            "will then not learn where to stop."
        )

    def _remedy(
        self, endless: Sequence[tuple[EncodedConversation, EncodedAnswer]], stops: Sequence[int], *, is_marked: bool
    ) -> str:
        """Return the sentence that says how to give the answers an end."""
        ends = self._possible(answer.end for _, answer in self._answers())
        if all(answer.end in ends for _, answer in endless):
            names = ", ".join(map(self._name, ends))
            return (
                f"They end with special tokens that do not stop the model ({names}). Add the ids of those that end a "
                "turn to `eos_token_id` in the model's `generation_config.json`."
            )
        followers = self._possible(answer.follower for _, answer in endless)
        is_shared = len({answer.follower for _, answer in endless}) == len(followers) == 1
        if is_marked and is_shared:
            return f"In the chat template, move `{{% endgeneration %}}` behind {self._name(followers[0])}."
        good = [each for each in followers if is_shared or each in stops]
        name = self._name([*good, *ends, stops[0]][0])
        before = ", before `{% endgeneration %}`" if is_marked else ""
        return f"Let the chat template write {name} at the end of each answer{before}."

    def _require_texts(self, stops: Sequence[int], is_allowed: bool) -> None:
        """Raise `DataError` if the model does not read a message, or does not learn an answer, as it was written,
        unless this is allowed.
        """
        lost = [_Fault(each.place, *item, "") for each in self.conversations for item in each.lost.items()]
        spaced, normalized, changed = 0, 0, []
        for each, answer in self._answers():
            found = self._written(each, answer, stops)
            bare = squeezed(found)
            for index, text in answer.texts.items():
                if text.strip() in found:
                    continue
                if squeezed(text) in bare:
                    spaced += 1
                elif squeezed(self.tokenizer.normalized(text)) in squeezed(self.tokenizer.normalized(found)):
                    normalized += 1
                else:
                    changed.append(_Fault(each.place, index, text, found))
        for number, what in (
            (spaced, "The chat template or the tokenizer changes spaces or line breaks"),
            (normalized, "The normalizer of the tokenizer changes characters"),
        ):
            if number:
                echo(f"{what} of {counted(number, 'answer')}.", err=True)
        self._require_unchanged(changed, lost, is_allowed)

    def _require_unchanged(self, changed: Sequence[_Fault], lost: Sequence[_Fault], is_allowed: bool) -> None:
        """Raise `DataError` for changed answers and lost messages, unless they are allowed."""
        if is_allowed:
            if lost or changed:
                told = f"{counted(len(changed), 'answer')} and {counted(len(lost), 'other message')}"
                echo(f"The chat template or the tokenizer changes {told}.", err=True)
            return
        if changed:
            raise DataError(
                "What the model learns to write, up to the first token that stops generation, must contain the answer, "
                f"but {len(changed)} of {counted(self._number, 'answer')} do not come back. The first, {changed[0]}, "
                f"is {shown(changed[0].text)}, and the model would learn {shown(changed[0].found)}. Write the answers "
                "as the chat template and the tokenizer keep them, correct the template, or pass --allow-changed."
            )
        if lost:
            raise DataError(
                "The chat template must render the text of every message, but changes or leaves out "
                f"{counted(len(lost), 'message')}. The first, {lost[0]}, is {shown(lost[0].text)}. Write the messages "
                "as the template expects them, correct the template, or pass --allow-changed."
            )

    def _written(self, each: EncodedConversation, answer: EncodedAnswer, stops: Sequence[int]) -> str:
        """Text that a model writes that has learned an answer."""
        places = _places(each, answer, stops)[: len(answer.texts)]
        end = places[-1] if len(places) == len(answer.texts) else None
        return self.tokenizer.decode(_learned(each, answer)[:end].tolist())


def _learned(each: EncodedConversation, answer: EncodedAnswer) -> Ids:
    """Ids of an answer that the loss covers."""
    place = slice(answer.start, answer.stop)
    return each.ids[place][each.mask[place]]


def _places(each: EncodedConversation, answer: EncodedAnswer, stops: Sequence[int]) -> list[int]:
    """Indices of the stops among the ids of an answer that the loss covers."""
    found: list[int] = np.isin(_learned(each, answer), stops).nonzero()[0].tolist()
    return found
