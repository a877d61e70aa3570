"""Read classification examples from tables: a `.tsv` file with a header, or a `.jsonl` file with one object per
line.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from crosscut.config.checks import shown
from crosscut.config.errors import DataError
from crosscut.config.system.files import parse_json, read_lines
from crosscut.finetuning.tasks.labels import Row, Rows, class_labels, numbers


class TableColumns(NamedTuple):
    """Names of the columns that are read."""

    text: str
    """Column of the text, or of the first of two texts."""

    pair: str = ""
    """Column of the second text. Empty for tasks with one text."""

    label: str = ""
    """Column of the label. Empty for files without labels."""


@dataclass(frozen=True, kw_only=True)
class TextExample:
    """A text, or a pair of texts, with a label."""

    text: str
    """The text, or the first of two texts."""

    pair: str | None
    """The second text. None for tasks with one text."""

    label: int | None
    """Index of the label. None in a file without labels, and for a task with numbers."""

    number: float | None = None
    """Number to predict. None in a file without numbers."""

    @property
    def is_labelled(self) -> bool:
        """Whether the example has a label or a number."""
        return self.label is not None or self.number is not None


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Examples of a file."""

    examples: tuple[TextExample, ...]
    """Examples in the order of the file."""

    labels: tuple[str, ...]
    """Names of the labels, by index. Empty for numbers."""

    skipped: int = 0
    """Number of lines that were left out because columns are missing. Published files of some tasks have such lines."""


def read_table(path: Path, *, columns: TableColumns, labels: Sequence[str] = (), are_numbers: bool = False) -> Examples:
    """Read a `.tsv` or `.jsonl` file. Fields of a `.tsv` file are taken as they are: quotes have no special meaning.

    `labels` are the names of the labels, by index. By default, these are the labels that occur in the file: numbers in
    numeric order, then texts in alphabetical order. With `are_numbers`, the labels are numbers to predict, not names.
    Raises `DataError` for a file that cannot be read, a missing column, and the errors of `class_labels` and `numbers`.
    """
    if path.suffix == ".jsonl":
        rows = list(_json_rows(path, columns))
    elif path.suffix == ".tsv":
        rows = list(_tsv_rows(path, columns))
    else:
        raise DataError(f"A file of examples must end in .tsv or .jsonl, but is `{path}`. Rename or convert the file.")
    return to_examples(path, rows, columns, labels, are_numbers=are_numbers)


def column_names(path: Path) -> list[str]:
    """Return the columns of a `.tsv` file, or of the first object of a `.jsonl` file. Raises `DataError` if the file
    cannot be read.
    """
    first = next((line for line in lines_of(path) if line.strip()), "")
    if path.suffix != ".jsonl":
        return first.split("\t")
    row = next((row for _, row in _json_rows(path, TableColumns(""))), {})
    return list(row)


def to_examples(
    path: Path, rows: Rows, columns: TableColumns, labels: Sequence[str], *, are_numbers: bool = False
) -> Examples:
    """Make examples from `rows`. The labels are those of `class_labels` or, with `are_numbers`, of `numbers`. Raises
    their errors.
    """
    known, indexes, values = tuple(labels), None, None
    if columns.label and are_numbers:
        values = numbers(path, rows, columns.label)
    elif columns.label:
        known, indexes = class_labels(path, rows, columns.label, labels)
    examples = (
        TextExample(
            text=str(row[columns.text]),
            pair=str(row[columns.pair]) if columns.pair else None,
            label=indexes[place] if indexes else None,
            number=values[place] if values else None,
        )
        for place, (_, row) in enumerate(rows)
    )
    return Examples(examples=tuple(examples), labels=known)


def lines_of(path: Path) -> list[str]:
    """Return the lines of a text file in UTF-8. Only line feeds end a line. Raises `DataError` if the file cannot be
    read.
    """
    try:
        return list(read_lines(path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"`{path}` must be a readable file, but is not: {reason}. Check the path.") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"`{path}` must be UTF-8, but byte {error.start:,} is not. Convert the file to UTF-8."
        ) from None


def require_columns(path: Path, line: int, columns: TableColumns, found: Sequence[str]) -> None:
    """Raise `DataError` unless `found`, the columns in a line of the file, includes all of `columns`."""
    if missing := [name for name in columns if name and name not in found]:
        raise DataError(
            f"Line {line} of `{path}` must have the columns {_joined(missing)}, but has "
            f"{_joined(found) or 'no columns'}. Correct the file, or the names of the columns."
        )


def _tsv_rows(path: Path, columns: TableColumns) -> Iterator[tuple[int, Row]]:
    lines = lines_of(path)
    header = lines[0].split("\t") if lines else []
    require_columns(path, 1, columns, header)
    for number, line in enumerate(lines[1:], start=2):
        fields = line.split("\t")
        if len(fields) != len(header):
            raise DataError(
                f"Line {number} of `{path}` must have {len(header)} columns, like the first line, but has "
                f"{len(fields)}. Correct the line."
            )
        yield number, dict(zip(header, fields, strict=True))


def _json_rows(path: Path, columns: TableColumns) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(lines_of(path), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"Line {number} of `{path}` must be JSON, but is not: {error}. Correct the line.") from None
        if not isinstance(row, dict):
            raise DataError(f"Line {number} of `{path}` must be a JSON object, but is {shown(row)}. Correct the line.")
        require_columns(path, number, columns, list(row))
        for name in (columns.text, columns.pair):
            if name and not isinstance(row[name], str):
                raise DataError(
                    f"`{name}` in line {number} of `{path}` must be a string, but is {shown(row[name])}. Correct the "
                    "line."
                )
        yield number, row


def _joined(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
