"""Reader for the files of SQuAD 1.1 and 2.0: questions that are answered by a span of a text, or have no answer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosscut.config.errors import DataError
from crosscut.config.system.files import read_json


@dataclass(frozen=True, kw_only=True)
class SpanExample:
    """A question about a text."""

    id: str
    """Id of the question in the file. Predictions refer to the question by this id."""

    context: str
    """Text that the question is about. It contains the answers."""

    question: str
    """Question."""

    answers: tuple[str, ...]
    """Answers that people gave. Empty if the text does not answer the question, which occurs in SQuAD 2.0."""

    starts: tuple[int, ...]
    """Index of each answer's first character in `context`."""

    @property
    def label(self) -> int:
        """1 if the question has an answer, and otherwise 0."""
        return int(bool(self.answers))


def read_squad(path: Path) -> tuple[SpanExample, ...]:
    """Read a JSON file of SQuAD 1.1 or 2.0. The questions are in the order of the file.

    Raises `DataError` if the file cannot be read, has another format or has no question, or if an answer does not occur
    in the text at the position that the file gives.
    """
    table = read_json(path, DataError, remedy="Check the path.")
    try:
        examples = tuple(_examples(table))
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"`{path}` must have SQuAD's format (data, paragraphs, qas, answers), but does not: "
            f"{type(error).__name__} at {error}. Check that this is a SQuAD 1.1 or 2.0 file."
        ) from None
    if not examples:
        raise DataError(f"`{path}` must have at least one question, but has none. Check that this is a SQuAD file.")
    wrong = [
        (example.id, answer)
        for example in examples
        for answer, start in zip(example.answers, example.starts, strict=True)
        if start < 0 or not example.context.startswith(answer, start)
    ]
    if wrong:
        raise DataError(
            f"Every answer in `{path}` must occur in the text at `answer_start`, but {len(wrong):,} do not. The first "
            f"of them is {wrong[0][1]!r:.60}, an answer to question {wrong[0][0]!r:.60}. Correct the file."
        )
    return examples


def _examples(table: Mapping[str, Any]) -> Iterator[SpanExample]:
    for article in table["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                answers = [] if question.get("is_impossible", False) else question["answers"]
                yield SpanExample(
                    id=_text(question["id"]),
                    context=_text(paragraph["context"]),
                    question=_text(question["question"]),
                    answers=tuple(_text(answer["text"]) for answer in answers),
                    starts=tuple(_place(answer["answer_start"]) for answer in answers),
                )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60}, which is not a string")
    return value


def _place(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r:.60}, which is not a whole number")
    return value
