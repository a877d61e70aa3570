"""Labels of the rows of a file: names of classes, or numbers to predict."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from math import isfinite
from pathlib import Path

from crosscut.config.checks import listed, shown
from crosscut.config.errors import DataError

Row = Mapping[str, object]
Rows = Sequence[tuple[int, Row]]
"""Pairs of a line number and a row."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,9})?")
_MISSING = frozenset({"", "na", "n/a", "nan", "none", "null"})
"""Spellings of a missing value, in lower case. A column of numbers stays one if some of its values are missing."""


def class_labels(path: Path, rows: Rows, column: str, labels: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """Return the names of all classes, and the index of each row's class. The names are `labels` or, if there are none,
    the values of the column: integers and other numbers in numeric order, then texts in alphabetical order.

    Raises `DataError` for a row without a label, for an unknown label and, if there are no `labels` and all values are
    numbers, for a number with a fraction and for a number with two spellings.
    """
    names = [(line, _named(path, line, column, row[column])) for line, row in rows]
    known = tuple(labels) or _found(path, column, names)
    indexes = {name: index for index, name in enumerate(known)}
    if unknown := [(line, name) for line, name in names if name not in indexes]:
        line, name = unknown[0]
        raise DataError(
            f"`{column}` in `{path}` must be {listed(repr(one) for one in known)}, but is {name!r:.60} in line "
            f"{line} ({len(unknown):,} such lines). Correct the file, or name all labels."
        )
    return known, [indexes[name] for _, name in names]


def numbers(path: Path, rows: Rows, column: str) -> list[float]:
    """Return the number in the column of each row. Raises `DataError` for a value that is not a finite number."""
    found = [_number(row[column]) for _, row in rows]
    if wrong := [place for place, value in enumerate(found) if value is None]:
        line, row = rows[wrong[0]]
        raise DataError(
            f"`{column}` in `{path}` must be a finite number, but is {shown(row[column]):.60} in line {line} "
            f"({len(wrong):,} such lines). Correct the file."
        )
    return [value for value in found if value is not None]


def _found(path: Path, column: str, names: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """Return the labels that occur in a file, in order. `names` are the line and the label of each row."""
    lines: dict[str, int] = {}
    for line, name in names:
        lines.setdefault(name, line)
    values = {name: Decimal(name) for name in lines if _NUMBER.fullmatch(name)}
    only_numbers = all(name in values or name.strip().casefold() in _MISSING for name in lines)
    if only_numbers and (broken := [name for name, value in values.items() if value != value.to_integral_value()]):
        raise DataError(
            f"`{column}` in `{path}` must hold labels, but holds numbers with fractions, such as {broken[0]!r:.60} in "
            f"line {lines[broken[0]]}. Pass --regression to predict the number, or name the classes with --labels."
        )
    missing = [name for name in lines if not name or (only_numbers and values and name not in values)]
    if missing:
        raise DataError(
            f"`{column}` in `{path}` must hold a label in every line, but is {missing[0]!r} in line "
            f"{lines[missing[0]]}. Correct the file, or name all labels with --labels."
        )
    spellings: dict[Decimal, str] = {}
    for name, value in values.items():
        if only_numbers and (other := spellings.setdefault(value, name)) != name:
            raise DataError(
                f"`{column}` in `{path}` must write a number in one way, but has {other!r:.60} and {name!r:.60}. "
                "Correct the file, or name all labels with --labels."
            )
    return tuple(sorted(lines, key=lambda name: (name not in values, values.get(name, Decimal()), name)))


def _named(path: Path, line: int, column: str, label: object) -> str:
    """Return the name of a label: a string unchanged, and a number or a Boolean value as JSON writes it."""
    if isinstance(label, str):
        return label
    if isinstance(label, int) or (isinstance(label, float) and isfinite(label)):
        return shown(label)
    raise DataError(
        f"`{column}` in line {line} of `{path}` must be one label, but is {shown(label):.60}. Correct the line."
    )


def _number(value: object) -> float | None:
    """Return the finite number that a value of a file is or spells. None if it is anything else."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if isfinite(value) else None
    except OverflowError:  # an integer of over 308 digits
        return None
