"""Encode texts, or pairs of texts, that have a label."""

from collections.abc import Sequence
from math import nan
from typing import NamedTuple

from crosscut.config.checks import Choice
from crosscut.config.conventions import IGNORED
from crosscut.config.errors import DataError
from crosscut.finetuning.encoding.rows import EncodedRow, EncodedRows
from crosscut.finetuning.encoding.tokens import TextEncoder
from crosscut.finetuning.tasks.tables import TextExample


class Long(Choice):
    """Treatments of examples that are longer than the maximum length."""

    CUT = "cut"
    DROP = "drop"
    REFUSE = "refuse"


class EncodedTask(NamedTuple):
    """Encoded examples, and the number of examples that did not fit."""

    rows: EncodedRows
    num_long: int
    """Number of examples that were cut or dropped."""
    notice: str = ""
    """Sentence about answers that no prediction can equal. Empty if there are none."""


def encode_texts(encoder: TextEncoder, examples: Sequence[TextExample], *, name: str, long: Long) -> EncodedTask:
    """Encode texts with their labels. If a pair is too long, the longer text is cut first.

    `name` is the name of the file, for error messages. Raises `DataError` if examples are too long and `long` is
    "refuse", or if every example is dropped.
    """
    rows, kept, num_long = [], [], 0
    pairs = [(example.text, example.pair) for example in examples]
    for index, found in enumerate(encoder.encode(pairs)):
        num_long += bool(found.overflowing)
        if not found.overflowing or long is not Long.DROP:
            rows.append(EncodedRow.of(found))
            kept.append(index)
    require_fit(name, num_long, len(examples), encoder.length, long)
    return EncodedTask(EncodedRows.of(rows, labels_of([examples[index] for index in kept]), kept), num_long)


def labels_of(examples: Sequence[TextExample]) -> list[int] | list[float]:
    """Return the labels of examples, with `IGNORED` for an example without a label. If examples have numbers, return
    their numbers, with NaN for an example without a number.
    """
    if any(example.number is not None for example in examples):
        return [nan if example.number is None else example.number for example in examples]
    return [IGNORED if example.label is None else example.label for example in examples]


def require_fit(name: str, num_long: int, number: int, length: int, long: Long) -> None:
    """Raise `DataError` if `long` is "refuse" and an example is too long, or if no example is left.

    `num_long` of the `number` examples in the file `name` have more than `length` tokens.
    """
    if long is Long.REFUSE and num_long:
        raise DataError(
            f"Every example of `{name}` must fit into `training.sequence_length` ({length} tokens), but {num_long:,} "
            f"of {number:,} do not. Raise `training.sequence_length`, or pass --long cut or --long drop."
        )
    if not number or (long is Long.DROP and num_long == number):
        told = "all are longer" if number else "there are no examples"
        raise DataError(
            f"`{name}` must hold at least one example of at most {length} tokens, but {told}. Raise "
            "`training.sequence_length`, or add examples."
        )
