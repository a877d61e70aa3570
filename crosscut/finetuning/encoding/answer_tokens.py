"""Find the tokens of an answer in the windows of its text, and check them.

The tokenizers library gives each token the characters of the text from which it was made. Blanks at either end are not
part of a token here, whatever the tokenizer does with them, and the marks of a letter are part of its token. The tokens
of an answer are those that share a character with it. They are checked in two ways: their characters must contain the
answer, and the tokens must spell these characters (`spelling`).

Shapes: S tokens of a window.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from crosscut.finetuning.encoding.answers import LONGEST_ANSWER
from crosscut.finetuning.encoding.rows import Mask, Numbers
from crosscut.finetuning.encoding.spelling import Spelling
from crosscut.finetuning.tasks.spans import SpanExample

if TYPE_CHECKING:
    import tokenizers

_BLANKS = np.array([code for code in range(0x3001) if chr(code).isspace()], dtype=np.uint32)


class AnswerCounts(NamedTuple):
    """Numbers of questions with an answer, by the fit of their first answer to the tokens."""

    exact: int = 0
    """The tokens are the answer, so a perfect model predicts it exactly."""
    inside: int = 0
    """The answer begins or ends inside a token, or with a character that the normalizer removes."""
    long: int = 0
    """The answer has more than `LONGEST_ANSWER` tokens."""
    lost: int = 0
    """No window has tokens that contain the whole answer."""
    garbled: int = 0
    """The tokens spell another text than the one at their place."""

    def notice(self, name: str, *, is_trained: bool) -> str:
        """Sentence about the questions in the file `name` whose first answer no prediction can equal. Empty if there
        are none. `is_trained` says whether the file is for training.
        """
        reasons = {
            "do not begin and end at borders of tokens": self.inside,
            "are longer": self.long,
            "have a beginning or an end that no token of their row holds": self.lost,
            "differ from the text of their tokens": self.garbled,
        }
        if not (wrong := sum(reasons.values())):
            return ""
        told = ", ".join(f"{number:,} {reason}" for reason, number in reasons.items() if number)
        left = self.lost + self.garbled if is_trained else 0
        more = f" {left:,} of these questions are left out." if left else ""
        return (
            f"The first answer of {wrong:,} of {sum(self):,} questions in `{name}` is not a span of at most "
            f"{LONGEST_ANSWER} tokens: {told}.{more}"
        )


REFUSED = frozenset({"lost", "garbled"})
"""Fields of `AnswerCounts` whose questions have no label."""


@dataclass(frozen=True)
class Window:
    """Part of a text that the model reads at once."""

    tokens: "tokenizers.Encoding"
    characters: Numbers
    """Index of each token's first character in the text, and index after its last character [S, 2]. Both are -1 for
    tokens of the question and for special tokens.
    """
    places: Numbers
    """The same without blanks at either end of a token."""
    label: tuple[int, int]
    """Positions of the first and last token of the answer, or twice the position of the summary token."""

    @property
    def size(self) -> int:
        """Number of tokens from the first to the last one of the label."""
        return self.label[1] - self.label[0] + 1

    @property
    def span(self) -> tuple[int, int]:
        """Index of the first character of the label's tokens, and index after the last one."""
        return int(self.places[self.label[0], 0]), int(self.places[self.label[1], 1])


@dataclass(frozen=True)
class Question:
    """A question with the windows of its text."""

    example: SpanExample
    windows: tuple[Window, ...]
    fit: str = ""
    """Field of `AnswerCounts` that counts the question. Empty for a question without an answer."""

    @property
    def labelled(self) -> list[Window]:
        """Windows that hold the answer."""
        return [each for each in self.windows if each.places[each.label[0], 0] >= 0]


def find_answer(
    spelling: Spelling, example: SpanExample, windows: Sequence["tokenizers.Encoding"], *, is_causal: bool
) -> Question:
    """Label the windows of a question. A window holds the answer if no other window has more tokens of it. The summary
    token is a window's last token if `is_causal` is true, and otherwise its first token.
    """
    characters = _mended(list(map(_characters, windows)), example.context)
    places = _trimmed(characters, example.context)
    start, end = _stripped(example)
    shared = [_shared(each, start, end) for each in places]
    most = max(map(len, shared)) if start < end else 0
    labelled = []
    for window, own, tokens, whole in zip(windows, places, shared, characters, strict=True):
        label = _summary(own, is_causal)
        if 0 < most == len(tokens):
            label = _narrowed(spelling, window.ids, own[tokens], tokens, (start, end), example.context)
        labelled.append(Window(window, whole, own, label))
    question = Question(example, tuple(labelled))
    return replace(question, fit=_fit(spelling, question, start, end)) if example.answers else question


def _fit(spelling: Spelling, question: Question, start: int, end: int) -> str:
    found, context = question.labelled, question.example.context
    spans = {window.span for window in found}
    kept = [place for place in range(start, end) if not spelling.is_removed(context[place])]
    if not found or not kept or not all(first <= kept[0] and kept[-1] < last for first, last in spans):
        return "lost"
    if not all(spelling.agrees(context, each.tokens.ids, each.characters, each.label) for each in found):
        return "garbled"
    if spans != {(start, end)}:
        return "inside"
    return "long" if max(window.size for window in found) > LONGEST_ANSWER else "exact"


def _narrowed(
    spelling: Spelling, ids: Sequence[int], places: Numbers, tokens: Numbers, answer: tuple[int, int], context: str
) -> tuple[int, int]:
    """First and last token of those that share a character with the answer. A token that has more characters is left
    out if the others spell the answer: a normalizer may have put blanks around a character, as BERT's does around
    Chinese ones, and a blank at the end of a token then counts as this character.
    """
    start, end = answer
    inner = tokens[(places[:, 0] >= start) & (places[:, 1] <= end)]
    if 0 < len(inner) < len(tokens) and spelling.spells(ids[inner[0] : inner[-1] + 1], context[start:end]):
        tokens = inner
    return int(tokens[0]), int(tokens[-1])


def _stripped(example: SpanExample) -> tuple[int, int]:
    """First character of the first answer and the one after its last character, without blanks at either end."""
    if not example.answers:
        return 0, 0
    start, answer = example.starts[0], example.answers[0]
    return start + len(answer) - len(answer.lstrip()), start + len(answer.rstrip())


def _shared(places: Numbers, start: int, end: int) -> Numbers:
    """Positions of the tokens that share a character with the range from `start` to `end`."""
    is_shared: Mask = (places[:, 0] < end) & (places[:, 1] > start) & (places[:, 0] < places[:, 1])
    return is_shared.nonzero()[0].astype(np.int32)


def _summary(places: Numbers, is_causal: bool) -> tuple[int, int]:
    summary = len(places) - 1 if is_causal else 0
    return summary, summary


def _characters(window: "tokenizers.Encoding") -> Numbers:
    """Characters of each token in the text, as the library gives them [S, 2]. Both are -1 for other tokens."""
    raw = np.array(window.offsets, dtype=np.int32).reshape(-1, 2)
    raw[[number != 1 for number in window.sequence_ids]] = -1
    return raw


def _mended(raw: Sequence[Numbers], context: str) -> list[Numbers]:
    """Extend tokens over the marks that follow them and that belong to no token. Where a normalizer composes a letter
    and its marks, or removes the marks, the library gives a token the letter only.
    """
    if context.isascii():
        return list(raw)
    steps, size = np.zeros(len(context) + 1, dtype=np.int32), len(context)
    for each in raw:
        places = each[each[:, 0] >= 0]
        np.add.at(steps, places[:, 0], 1)
        np.add.at(steps, places[:, 1], -1)
    ends = np.arange(size + 1, dtype=np.int32)
    for place in (steps.cumsum()[:size] == 0).nonzero()[0][::-1].tolist():
        if _is_mark(context[place]):
            ends[place] = ends[place + 1]
    return [np.stack([each[:, 0], np.where(each[:, 1] < 0, -1, ends[each[:, 1]])], axis=1) for each in raw]


def _is_mark(character: str) -> bool:
    """Whether a normalizer may compose a character with the one before it: a mark, or a vowel or final consonant of
    Hangul, also in a compatibility form such as half width.
    """
    first = unicodedata.normalize("NFKD", character)[0]
    return unicodedata.category(first)[0] == "M" or "\u1160" <= first <= "\u11ff"


def _trimmed(raw: Sequence[Numbers], context: str) -> list[Numbers]:
    """Remove the blanks at either end of each token."""
    codes = np.frombuffer(context.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    size, is_blank = len(codes), np.isin(codes, _BLANKS)
    numbers = np.arange(size, dtype=np.int32)
    following = np.minimum.accumulate(np.append(np.where(is_blank, size, numbers), size)[::-1])[::-1]
    preceding = np.maximum.accumulate(np.append(0, np.where(is_blank, 0, numbers + 1)))
    trimmed = []
    for each in raw:
        starts = np.minimum(following[each[:, 0]], each[:, 1])
        places = np.stack([starts, np.maximum(preceding[each[:, 1]], starts)], axis=1).astype(np.int32)
        trimmed.append(np.where(each < 0, -1, places).astype(np.int32))
    return trimmed
