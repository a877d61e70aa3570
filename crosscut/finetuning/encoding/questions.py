"""Encode questions about a text in overlapping windows. The answers are spans of the text.

    [CLS] question [SEP] part of the text [SEP]

A text that is longer than a row is read in several windows. Successive windows share `stride` tokens of the text. Each
window is an example for the model. A window's label holds the positions of the answer's first and last token. If the
answer is not in the window, both are the position of the summary token. The rules are those of BERT (Devlin et al.
2019) for SQuAD, except for the tokens of an answer (`answer_tokens`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from crosscut.config.conventions import IGNORED
from crosscut.config.errors import ConfigError, DataError
from crosscut.finetuning.encoding.answer_tokens import REFUSED, AnswerCounts, find_answer
from crosscut.finetuning.encoding.rows import EncodedRow, EncodedRows
from crosscut.finetuning.encoding.tokens import TextEncoder
from crosscut.finetuning.tasks.spans import SpanExample

STRIDE = 128
"""Default number of tokens that successive windows of a text share."""


class EncodedQuestions(NamedTuple):
    """Encoded questions, and the numbers of their answers by their fit to the tokens."""

    rows: EncodedRows
    counts: AnswerCounts


def encode_questions(
    encoder: TextEncoder, examples: Sequence[SpanExample], *, name: str, stride: int = STRIDE, is_trained: bool = False
) -> EncodedQuestions:
    """Encode questions in windows. Successive windows of a text share `stride` tokens. `name` is the name of the file,
    for error messages.

    A question whose answer has no tokens that pass the checks of `answer_tokens` gets no label. If the rows are for
    training (`is_trained`), the question is left out. Raises `DataError` if a question is so long that a window has no
    room for more than `stride` tokens of the text, or if every question is left out, and `ConfigError` if rows are too
    short for `stride`.
    """
    texts = [example.question.lstrip() for example in examples]
    _require_room(encoder, texts, name, stride)
    pairs = [(text, example.context) for text, example in zip(texts, examples, strict=True)]
    found = encoder.encode(pairs, cut="only_second", stride=stride)
    windows = ((first, *first.overflowing) for first in found)
    spelling, fits = encoder.spelling(), Counter[str]()
    rows, labels, sources, places = [], [], [], []
    for index, each in enumerate(zip(examples, windows, strict=True)):
        question = find_answer(spelling, *each, is_causal=encoder.model.is_causal)
        is_refused = question.fit in REFUSED
        fits.update([question.fit] if question.fit else [])
        for window in () if is_trained and is_refused else question.windows:
            rows.append(EncodedRow.of(window.tokens))
            labels.append((IGNORED, IGNORED) if is_refused else window.label)
            sources.append(index)
            places.append(window.places)
    if not rows:
        raise DataError(
            f"`{name}` must have a question whose answer is in the tokens of its text, but none of its "
            f"{len(examples):,} answers is. Check that `{encoder.path}` belongs to the model, and raise "
            "`training.sequence_length` if answers are longer than a row."
        )
    encoded = replace(EncodedRows.of(rows, labels, sources), offsets=np.concatenate(places))
    return EncodedQuestions(encoded, AnswerCounts(**fits))


def _require_room(encoder: TextEncoder, questions: Sequence[str], name: str, stride: int) -> None:
    room = encoder.length - encoder.num_special(is_pair=True)
    if not 0 <= stride < room - 1:
        raise ConfigError(
            f"`--stride` must be at least 0 and below {room - 1} (`training.sequence_length` minus the special tokens "
            f"and minus one question token), but is {stride}. Lower --stride, or raise `training.sequence_length`."
        )
    counts = encoder.count(questions)
    if long := sum(count >= room - stride for count in counts):
        raise DataError(
            f"Every question of `{name}` must leave room for a window of more than {stride} tokens in "
            f"`training.sequence_length` ({encoder.length} tokens), but {long:,} of {len(counts):,} do not. The "
            f"longest has {max(counts):,} tokens. Raise `training.sequence_length`, or lower --stride."
        )
