"""Columns of figures from the lines of `metrics.jsonl`.

A long file would take seconds as JSON, row by row. Most of its lines are rows of training steps with equal keys, so of
a long text, one regular expression takes out the figures in `WATCHED` of every row. The other figures are read in one
of `_EVERY` rows: that of the slowest step.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import nan

from crosscut.logbook.rows import RULES, Row
from crosscut.logbook.schema import METRICS_FILE

WATCHED = (
    "loss", "gradient_norm", "learning_rate", "largest_load", "seconds", "tokens_per_second", "model_flops_per_second",
    "utilisation", "samples",
)  # fmt: skip
"""Figures of a training step of which a long text gives every value, as a short one does."""
_EVERY = 64
_LONG = 1 << 19
"""Number of characters from which a text is not read row by row."""
_RULE = RULES[METRICS_FILE]


@dataclass(frozen=True)
class Columns:
    """Lines of `metrics.jsonl`, as columns."""

    steps: Sequence[int]
    """Steps of the training steps, in ascending order."""
    watched: dict[str, Sequence[float]]
    """Values of `WATCHED` figures at these steps."""
    rows: Sequence[Row]
    """All other rows, and some rows of training steps for their other figures."""


def read_columns(text: str) -> Iterator[Columns]:
    """Yield the rows in complete lines of `metrics.jsonl`. Lines that no run can have written are left out."""
    found = _long_columns(text) if len(text) > _LONG else None
    if found is not None:
        yield found
        return
    rows = [row for line in text.splitlines(keepends=True) if (row := _RULE.parse(line)) is not None]
    yield Columns((), {}, rows)


def _long_columns(text: str) -> Columns | None:
    """Return the columns of a long text, or None if its rows have to be read one by one."""
    lines = text.split("\n")
    first = next((row for line in lines[:100] if (row := _RULE.parse(f"{line}\n")) and "loss" in row), None)
    if first is None or next(iter(first)) != "step" or not {"loss", "seconds"} <= first.keys():
        return None
    trained = [line for line in lines if '"loss"' in line]
    found = _pattern(first).findall(text)
    try:
        numbers, *values = zip(*found, strict=True)
        steps = list(map(int, numbers))
        columns = {name: _numbers(column) for name, column in zip(_watched(first), values, strict=True)}
        packed = array("q", steps)  # all series copy them at once
    except (OverflowError, ValueError):
        return None
    if len(trained) != len(steps) or sorted(steps) != steps:  # a full disk has kept rows that were undone
        return None
    others = [line for line in lines if '"loss"' not in line] if len(trained) < len(lines) - 1 else []
    return Columns(packed, columns, [*_parsed(others), *_parsed(_slowest(trained, columns["seconds"]))])


def _slowest(lines: Sequence[str], seconds: Sequence[float]) -> list[str]:
    """Return the line of the slowest step of each block of `_EVERY` steps."""
    blocks = (seconds[first : first + _EVERY] for first in range(0, len(lines), _EVERY))
    return [lines[number * _EVERY + list(block).index(max(block))] for number, block in enumerate(blocks)]


def _pattern(row: Row) -> re.Pattern[str]:
    """Return the pattern of a line with the keys of `row`, up to the last watched figure, with a group for the step and
    for each watched figure.
    """
    last = list(row).index(_watched(row)[-1])
    parts = (
        f'"{name}": {"([^,}]*)" if name == "step" or name in WATCHED else "[^,}]*"}' for name in [*row][: last + 1]
    )
    return re.compile(f"^{{{', '.join(parts)}", re.MULTILINE)


def _watched(row: Row) -> list[str]:
    return [name for name in row if name in WATCHED]


def _numbers(column: Iterable[str]) -> Sequence[float]:
    try:
        return array("d", map(float, column))
    except ValueError:
        return array("d", (nan if text == "null" else float(text) for text in column))


def _parsed(lines: Iterable[str]) -> list[Row]:
    return [row for line in lines if line and (row := _RULE.parse(f"{line}\n")) is not None]
