"""Encode a task's examples as token ids with special tokens and labels, and find answers from the scores of spans.

The package needs no torch (docs/tasks.md).
"""

from crosscut.finetuning.encoding.answers import AnswerSpan, Best, best_answers
from crosscut.finetuning.encoding.options import encode_options
from crosscut.finetuning.encoding.questions import STRIDE, encode_questions
from crosscut.finetuning.encoding.rows import EncodedRows, Padded
from crosscut.finetuning.encoding.texts import EncodedTask, Long, encode_texts
from crosscut.finetuning.encoding.tokens import Special, TextEncoder

__all__ = [
    "STRIDE",
    "AnswerSpan",
    "Best",
    "EncodedRows",
    "EncodedTask",
    "Long",
    "Padded",
    "Special",
    "TextEncoder",
    "best_answers",
    "encode_options",
    "encode_questions",
    "encode_texts",
]
