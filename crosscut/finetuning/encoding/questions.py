"""Encode questions about a text in overlapping windows. The answers are spans of the text.

    [CLS] question [SEP] part of the text [SEP]

A text that is longer than a row is read in several windows. Successive windows share `stride` tokens of the text. Each
window is an example for the model. A window's label holds the positions of the answer's first and last token. If the
answer is not in the window, both are the position of the summary token. The rules are those of BERT (Devlin et al.
2019) for SQuAD.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from crosscut.config.errors import ConfigError, DataError
from crosscut.finetuning.encoding.rows import EncodedRow, EncodedRows, Numbers
from crosscut.finetuning.encoding.tokens import TextEncoder
from crosscut.finetuning.tasks.spans import SpanExample

if TYPE_CHECKING:
    import tokenizers


STRIDE = 128
"""Default number of tokens that successive windows of a text share."""


def encode_questions(
    encoder: TextEncoder, examples: Sequence[SpanExample], *, name: str, stride: int = STRIDE
) -> EncodedRows:
    """Encode questions in windows. Successive windows of a text share `stride` tokens. `name` is the name of the file,
    for error messages.

    Raises `DataError` if a question is so long that a window has no room for more than `stride` tokens of the text, and
    `ConfigError` if rows are too short for `stride`.
    """
    questions = [example.question.lstrip() for example in examples]
    _require_room(encoder, questions, name, stride)
    pairs = [(question, example.context) for question, example in zip(questions, examples, strict=True)]
    found = encoder.encode(pairs, cut="only_second", stride=stride)
    rows, labels, sources, offsets = [], [], [], []
    for index, (example, first) in enumerate(zip(examples, found, strict=True)):
        for window in (first, *first.overflowing):
            places = _places(window)
            rows.append(EncodedRow.of(window))
            labels.append(_label(places, example, 0 if not encoder.model.is_causal else len(window.ids) - 1))
            sources.append(index)
            offsets.append(places)
    return replace(EncodedRows.of(rows, labels, sources), offsets=np.concatenate(offsets))


def _places(window: "tokenizers.Encoding") -> Numbers:
    """Return the index of each token's first character in the text, and the index after its last character, [tokens,
    2]. Both are -1 for tokens of the question and for special tokens.
    """
    places = np.array(window.offsets, dtype=np.int32).reshape(-1, 2)
    belongs = np.array([number == 1 for number in window.sequence_ids], dtype=np.bool_)
    places[~belongs] = -1
    return places


def _label(places: npt.NDArray[np.int32], example: SpanExample, summary: int) -> tuple[int, int]:
    """Return the positions of the first and last token of a question's first answer. If the answer is not in the
    window, both are `summary`, the position of the summary token.
    """
    inside = (places[:, 0] >= 0).nonzero()[0]
    if not example.answers or not len(inside):
        return summary, summary
    start, end = example.starts[0], example.starts[0] + len(example.answers[0])
    starts, ends = places[inside, 0], places[inside, 1]
    if start < starts[0] or end > ends[-1]:
        return summary, summary
    first = int(starts.searchsorted(start, side="right")) - 1
    last = int(ends.searchsorted(end, side="left"))
    return int(inside[first]), int(inside[max(first, last)])


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
