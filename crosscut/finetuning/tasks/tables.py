"""Read classification examples from tables: a `.tsv` file with a header, or a `.jsonl` file with one object per
line.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from crosscut.config.checks import listed, shown
from crosscut.config.errors import DataError
from crosscut.config.system.files import parse_json, read_lines

Row = Mapping[str, object]


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
    """Index of the label. None in a file without labels."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Examples of a file."""

    examples: tuple[TextExample, ...]
    """Examples in the order of the file."""

    labels: tuple[str, ...]
    """Names of the labels, by index."""

    skipped: int = 0
    """Number of lines that were left out because columns are missing. Published files of some tasks have such lines."""


def read_table(path: Path, *, columns: TableColumns, labels: Sequence[str] = ()) -> Examples:
    """Read a `.tsv` or `.jsonl` file. Fields of a `.tsv` file are taken as they are: quotes have no special meaning.

    `labels` are the names of the labels, by index. By default, these are the labels that occur in the file, in
    alphabetical order. Raises `DataError` for a file that cannot be read, a missing column, and an unknown label.
    """
    if path.suffix == ".jsonl":
        rows = list(_json_rows(path, columns))
    elif path.suffix == ".tsv":
        rows = list(_tsv_rows(path, columns))
    else:
        raise DataError(f"A file of examples must end in .tsv or .jsonl, but is `{path}`. Rename or convert the file.")
    return to_examples(path, rows, columns, labels)


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
    path: Path, rows: Sequence[tuple[int, Row]], columns: TableColumns, labels: Sequence[str], *, skipped: int = 0
) -> Examples:
    """Make examples from `rows`, which are pairs of a line number and a row. Raises `DataError` for an unknown
    label.
    """
    names = [_named(row[columns.label]) for _, row in rows] if columns.label else []
    known = tuple(labels) or tuple(sorted(set(names)))
    numbers = {name: number for number, name in enumerate(known)}
    unknown = [(line, name) for (line, _), name in zip(rows, names, strict=False) if name not in numbers]
    if unknown:
        line, name = unknown[0]
        raise DataError(
            f"`{columns.label}` in `{path}` must be {listed(repr(one) for one in known)}, but is {name!r:.60} in line "
            f"{line} ({len(unknown):,} such lines). Correct the file, or name all labels."
        )
    examples = (
        TextExample(
            text=str(row[columns.text]),
            pair=str(row[columns.pair]) if columns.pair else None,
            label=numbers[names[place]] if names else None,
        )
        for place, (_, row) in enumerate(rows)
    )
    return Examples(examples=tuple(examples), labels=known, skipped=skipped)


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


def _named(label: object) -> str:
    """Return the name of a label: a string unchanged, and a number or a Boolean value as JSON writes it."""
    return label if isinstance(label, str) else shown(label)
