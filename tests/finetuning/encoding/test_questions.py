"""Questions about a text, in windows, and answers from the scores of spans."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosscut.config import ConfigError, DataError
from crosscut.finetuning.encoding import questions
from crosscut.finetuning.encoding.answer_tokens import Question, find_answer
from crosscut.finetuning.encoding.answers import LONGEST_ANSWER, AnswerSpan, best_answers
from crosscut.finetuning.encoding.questions import encode_questions
from crosscut.finetuning.encoding.rows import EncodedRows
from crosscut.finetuning.tasks import SpanExample, exact_match_and_f1, read_squad
from tests.finetuning.encoding.conftest import TEXT, encoder_of

QUESTION = "In what country is Normandy?"
FRANCE = TEXT.index("France")


def question(*, answer: str = "France", start: int = FRANCE, name: str = "q") -> SpanExample:
    return SpanExample(
        id=name, context=TEXT, question=QUESTION, answers=(answer,) if answer else (), starts=(start,) if answer else ()
    )


def encode(
    path: Path, examples: list[SpanExample], *, length: int = 32, stride: int = 6, causal: bool = False
) -> EncodedRows:
    encoder = encoder_of(path, length=length, is_causal=causal)
    return encode_questions(encoder, examples, name="dev.json", stride=stride).rows


def test_windows_equal_those_of_transformers(wordpiece: Path) -> None:
    from transformers import BertTokenizerFast

    theirs = BertTokenizerFast(tokenizer_file=str(wordpiece))(
        [QUESTION] * 2, [TEXT, TEXT[:60]], truncation="only_second", max_length=32, stride=6,
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    short = SpanExample(id="short", context=TEXT[:60], question=QUESTION, answers=(), starts=())
    ours = encode(wordpiece, [question(), short])
    assert ours.sources.tolist() == theirs["overflow_to_sample_mapping"]
    assert len(ours.sources) > 3
    for number, ids in enumerate(theirs["input_ids"]):
        row = ours.row(number)
        assert ours.ids[row].tolist() == ids
        assert ours.types[row].tolist() == theirs["token_type_ids"][number]
        text = [i == 1 for i in theirs.sequence_ids(number)]
        wanted = [list(o) if t else [-1, -1] for o, t in zip(theirs["offset_mapping"][number], text, strict=True)]
        assert ours.offsets[row].tolist() == wanted


@pytest.mark.parametrize("causal", [False, True])
def test_labels_are_the_tokens_of_the_answer_or_the_summary_token(
    wordpiece: Path, bytes_pairs: Path, causal: bool
) -> None:
    examples = [question(), question(answer="", name="none")]
    path, length = (bytes_pairs, 60) if causal else (wordpiece, 32)
    rows = encode(path, examples, length=length, causal=causal)
    found = 0
    for window, (first, last) in enumerate(rows.labels.tolist()):
        offsets = rows.offsets[rows.row(window)]
        if first == last == (len(offsets) - 1 if causal else 0):
            inside = offsets[offsets[:, 0] >= 0]
            assert rows.sources[window] == 1 or inside[0, 0] > FRANCE or inside[-1, 1] < FRANCE + 6
        else:
            assert TEXT[offsets[first, 0] : offsets[last, 1]] == "France"
            found += 1
    assert found >= 1


def rows_of(offsets: list[list[int]], *ends: int) -> EncodedRows:
    """Windows of one question, which have only offsets."""
    return EncodedRows(
        ids=np.zeros(len(offsets), dtype=np.int32),
        types=np.zeros(len(offsets), dtype=np.uint8),
        ends=np.array(ends),
        labels=np.zeros((len(ends), 2), dtype=np.int64),
        sources=np.zeros(len(ends), dtype=np.int64),
        offsets=np.array(offsets),
    )


def offsets_from(first: int) -> list[list[int]]:
    """Offsets of a window of three special tokens and 37 characters."""
    return [[-1, -1]] * 3 + [[first + i, first + i + 1] for i in range(37)]


def test_the_best_span_of_all_windows_answers() -> None:
    generator = np.random.default_rng(0)
    rows = rows_of([*offsets_from(0), *offsets_from(30)], 40, 80)
    context = "".join(chr(65 + i % 26) for i in range(70))
    scores = [generator.normal(size=(40, 2)) for _ in range(2)]
    best = best_answers(rows, scores, {0: context}, is_causal=False)[0]
    spans = {}
    for window, own in enumerate(scores):
        for first in range(3, 40):
            for last in range(first, min(40, first + LONGEST_ANSWER)):
                place = (first - 3 + 30 * window, last - 2 + 30 * window)
                spans[place] = max(spans.get(place, -np.inf), own[first, 0] + own[last, 1])
    (start, end), score = max(spans.items(), key=lambda item: item[1])
    assert best.answers[0] == AnswerSpan(text=context[start:end], start=start, score=score)
    taken = [range(answer.start, answer.start + len(answer.text)) for answer in best.answers]
    assert len({place for one in taken for place in one}) == sum(map(len, taken)), "answers do not overlap"
    assert [answer.score for answer in best.answers] == sorted((a.score for a in best.answers), reverse=True)
    assert best.no_answer == pytest.approx(min(own[0].sum() for own in scores))
    assert best.chosen(may_be_empty=False).text == context[start:end]
    margin = best.no_answer - score
    assert best.chosen(may_be_empty=True, threshold=margin - 0.1).text == ""
    assert best.chosen(may_be_empty=True, threshold=margin + 0.1).text == context[start:end]


def test_no_answer_is_longer_than_thirty_tokens() -> None:
    size = 50
    rows = rows_of([[-1, -1]] + [[i, i + 1] for i in range(size - 1)], size)
    scores = np.zeros((size, 2))
    scores[1, 0], scores[LONGEST_ANSWER + 1, 1], scores[LONGEST_ANSWER, 1] = 9.0, 9.0, 5.0
    context = "x" * size
    (best, *_) = best_answers(rows, [scores], {0: context}, is_causal=False)[0].answers
    assert (best.start, len(best.text), best.score) == (0, LONGEST_ANSWER, 14.0)


def test_labels_as_scores_answer_the_questions_of_xquad(shared: Path, wordpiece: Path) -> None:
    examples = read_squad(shared / "data" / "bert-tasks" / "xquad.en.json")
    rows = encode(wordpiece, list(examples), length=384, stride=128)
    scores = []
    for window, (first, last) in enumerate(rows.labels.tolist()):
        place = rows.row(window)
        own = np.zeros((place.stop - place.start, 2))
        own[first, 0] = own[last, 1] = 1.0 if first else -1.0
        scores.append(own)
    contexts = {number: example.context for number, example in enumerate(examples)}
    best = best_answers(rows, scores, contexts, is_causal=False, number=1)
    predicted = {each.id: best[number].chosen(may_be_empty=False).text for number, each in enumerate(examples)}
    found = exact_match_and_f1(predicted, examples)
    assert found.exact > 0.8, "this tiny vocabulary splits long answers into more than 30 tokens"
    assert found.f1 > 0.9


def test_a_question_is_dropped_when_its_rows_are_made(wordpiece: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's tokens of a question take ten times the memory of its rows."""
    made: list[weakref.ref[Question]] = []

    def find(*arguments: Any, **options: Any) -> Question:
        assert sum(each() is not None for each in made) <= 1
        question = find_answer(*arguments, **options)
        made.append(weakref.ref(question))
        return question

    monkeypatch.setattr(questions, "find_answer", find)
    encode(wordpiece, [question()] * 5)
    assert len(made) == 5


def test_questions_must_leave_room_for_the_text(wordpiece: Path) -> None:
    with pytest.raises(DataError, match=r"must leave room for a window of more than 20 tokens .* but 1 of 1 do not"):
        encode(wordpiece, [question()], length=28, stride=20)
    with pytest.raises(ConfigError, match=r"`--stride` must be at least 0 and below 28 .*, but is 28"):
        encode(wordpiece, [question()], stride=28)
