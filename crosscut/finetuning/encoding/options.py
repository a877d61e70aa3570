"""Encode questions with several options. Each option has one row. The first text of the row is the passage, and the
second text is the question with the option.

    [CLS] passage [SEP] question option [SEP]

If the question has a blank `_`, the option replaces the blank. If a row is too long, only the passage is cut. The
paper's own program uses the same format for fine-tuning on RACE.
"""

from collections.abc import Sequence

from crosscut.config.checks import listed
from crosscut.config.errors import DataError
from crosscut.finetuning.encoding.rows import EncodedRow, EncodedRows
from crosscut.finetuning.encoding.texts import EncodedTask, Long, require_fit
from crosscut.finetuning.encoding.tokens import TextEncoder
from crosscut.finetuning.tasks.choices import ChoiceExample

_BLANK = "_"


def encode_options(encoder: TextEncoder, examples: Sequence[ChoiceExample], *, name: str, long: Long) -> EncodedTask:
    """Encode questions with their options. An example is too long if one of its rows exceeds the maximum length.

    `name` is the name of the files, for error messages. Raises `DataError` if questions have different numbers of
    options, if a question with an option leaves no room for the passage, if examples are too long and `long` is
    "refuse", or if every example is dropped.
    """
    width = _num_options(examples, name)
    texts = [_asked(example.question, option) for example in examples for option in example.options]
    _require_room(encoder, texts, name)
    pairs = [(examples[number // width].passage, text) for number, text in enumerate(texts)]
    rows: list[EncodedRow] = []
    kept, num_long = [], 0
    found = encoder.encode(pairs, cut="only_first")
    for index in range(len(examples)):
        own = [next(found) for _ in range(width)]
        is_long = any(one.overflowing for one in own)
        num_long += is_long
        if not is_long or long is not Long.DROP:
            rows += map(EncodedRow.of, own)
            kept.append(index)
    require_fit(name, num_long, len(examples), encoder.length, long)
    return EncodedTask(EncodedRows.of(rows, [examples[index].label for index in kept], kept), num_long)


def _asked(question: str, option: str) -> str:
    return question.replace(_BLANK, option) if _BLANK in question else f"{question} {option}"


def _num_options(examples: Sequence[ChoiceExample], name: str) -> int:
    numbers = sorted({len(example.options) for example in examples})
    if len(numbers) != 1:
        told = f"have {listed(numbers)} options" if numbers else "there are no questions"
        raise DataError(
            f"All questions of `{name}` must have the same number of options, but {told}. Correct the file."
        )
    return numbers[0]


def _require_room(encoder: TextEncoder, texts: Sequence[str], name: str) -> None:
    room = encoder.length - encoder.num_special(is_pair=True)
    counts = encoder.count(texts)
    if long := sum(count >= room for count in counts):
        raise DataError(
            f"Every question of `{name}`, together with each option, must leave room for the passage in "
            f"`training.sequence_length` ({encoder.length} tokens), but {long:,} of {len(counts):,} do not. The "
            f"longest has {max(counts):,} tokens. Raise `training.sequence_length`."
        )
