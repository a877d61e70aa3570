"""Reader for the folders of the RACE dataset: questions about a passage, each with four options."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crosscut.config.errors import DataError
from crosscut.config.system.files import read_json

_LETTERS = "ABCD"


@dataclass(frozen=True, kw_only=True)
class ChoiceExample:
    """A question with several options, of which one is right."""

    passage: str
    """Text that the question is about."""

    question: str
    """The question. It may have a blank `_`, which the option fills."""

    options: tuple[str, ...]
    """Possible answers."""

    label: int
    """Index of the right option."""


def read_race(folder: Path) -> tuple[ChoiceExample, ...]:
    """Read the questions of a RACE folder, such as `RACE/train/high`, or of all its subfolders, as in `RACE/train`. The
    files are read in the order of their names.

    Raises `DataError` if the folder has no passages, or if a file has another format.
    """
    files = sorted(folder.rglob("*.txt"))
    if not files:
        raise DataError(
            f"`{folder}` must be a RACE folder that has .txt files, or whose subfolders have .txt files, but there is "
            "no .txt file. Check the path."
        )
    return tuple(example for file in files for example in _examples(file))


def _examples(file: Path) -> Iterator[ChoiceExample]:
    table = read_json(file, DataError, remedy="Check that this is a file of RACE.")
    columns = [table.get(name) for name in ("questions", "options", "answers")]
    is_text = isinstance(table.get("article"), str)
    if not is_text or not all(isinstance(column, list) and len(column) == len(columns[0] or []) for column in columns):
        raise DataError(
            f"`{file}` must have a string as `article`, and lists of equal length as `questions`, `options` and "
            "`answers`, but does not. Check that this is a file of RACE."
        )
    for number, (question, options, answer) in enumerate(zip(*columns, strict=True), start=1):
        is_list = isinstance(options, list) and all(isinstance(option, str) for option in options)
        if not is_list or not isinstance(question, str) or answer not in list(_LETTERS[: len(options)]):
            raise DataError(
                f"Question {number} in `{file}` must have a text, a list of options and an answer from A to D, but "
                f"the question {question!r:.60} has the answer {answer!r:.20}. Correct the file."
            )
        yield ChoiceExample(
            passage=table["article"], question=question, options=tuple(options), label=_LETTERS.index(answer)
        )
