"""Find the answer to a question from the scores of spans: the best span over all windows, or "no answer".

The score of a span is the sum of the scores of its first and of its last token. A span lies inside the text and has at
most 30 tokens. In each window, the score of "no answer" is the sum of both scores of the summary token. The smallest of
these sums counts for the question, as in BERT's program for SQuAD 2.0: a question has no answer only if no window has
an answer.

Shapes: S tokens of a window.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crosscut.finetuning.encoding.rows import EncodedRows

Scores = npt.NDArray[np.float64]

LONGEST_ANSWER = 30
"""Maximum number of tokens of an answer."""


@dataclass(frozen=True, kw_only=True)
class AnswerSpan:
    """A span of a text that may answer a question."""

    text: str
    """Characters of the span. Empty for "no answer"."""
    start: int
    """Index of the span's first character in the text. -1 for "no answer"."""
    score: float
    """Sum of the scores of the first and of the last token."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """Candidate answers to one question."""

    answers: tuple[AnswerSpan, ...]
    """Spans that do not overlap, the best one first."""
    no_answer: float
    """Score of "no answer"."""

    def chosen(self, *, may_be_empty: bool, threshold: float = 0.0) -> AnswerSpan:
        """Return the best span. Return "no answer" if there is no span, or if `may_be_empty` is true and the score of
        "no answer" exceeds the score of the best span by more than `threshold`.
        """
        empty = AnswerSpan(text="", start=-1, score=self.no_answer)
        if not self.answers:
            return empty
        best = self.answers[0]
        return empty if may_be_empty and self.no_answer - best.score > threshold else best


def best_answers(
    rows: EncodedRows, scores: Sequence[Scores], contexts: Mapping[int, str], *, is_causal: bool, number: int = 20
) -> dict[int, Best]:
    """Return the answers to each question, keyed by the question's index in the file: up to `number` spans that do not
    overlap.

    `scores` holds one array [S, 2] for each window: the scores of each token as the first and as the last token of a
    span. `contexts` maps a question's index to the text that the question is about. The summary token is a window's
    last token if `is_causal` is true, and otherwise its first token.
    """
    found: dict[int, list[tuple[float, int, int]]] = {}
    empty: dict[int, float] = {}
    for window, own in enumerate(scores):
        source, place = int(rows.sources[window]), rows.row(window)
        offsets, summary = rows.offsets[place], (place.stop - place.start - 1 if is_causal else 0)
        empty[source] = min(empty.get(source, np.inf), float(own[summary].sum()))
        found.setdefault(source, []).extend(_spans(own, offsets, number))
    return {
        source: Best(answers=_without_overlap(spans, contexts[source], number), no_answer=empty[source])
        for source, spans in found.items()
    }


def _spans(scores: Scores, offsets: npt.NDArray[np.int32], number: int) -> list[tuple[float, int, int]]:
    """Return the best spans of a window, each as (score, index of the first character, index after the last
    character).
    """
    inside = (offsets[:, 0] >= 0).nonzero()[0]
    starts, ends = scores[inside, 0], scores[inside, 1]
    most = LONGEST_ANSWER
    later = np.concatenate([ends, np.full(most - 1, -np.inf)])
    table = starts[:, None] + np.lib.stride_tricks.sliding_window_view(later, most)[: len(starts)]
    flat = table.ravel()
    best = np.argpartition(-flat, min(number, len(flat)) - 1)[:number] if len(flat) else np.empty(0, dtype=np.int64)
    found = []
    for place in best.tolist():
        first, more = divmod(place, most)
        if np.isfinite(flat[place]):
            begin, end = inside[first], inside[first + more]
            found.append((float(flat[place]), int(offsets[begin, 0]), int(offsets[end, 1])))
    return found


def _without_overlap(spans: list[tuple[float, int, int]], context: str, number: int) -> tuple[AnswerSpan, ...]:
    kept: list[tuple[int, int]] = []
    answers: list[AnswerSpan] = []
    for score, start, end in sorted(spans, key=lambda span: (-span[0], span[1], span[2])):
        if len(answers) < number and all(end <= other or start >= stop for other, stop in kept):
            kept.append((start, end))
            answers.append(AnswerSpan(text=context[start:end], start=start, score=score))
    return tuple(answers)
