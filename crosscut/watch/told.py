"""Messages to the page: the list of runs, and what is new in each of them.

A page asks with a cursor for each run. The cursor says how much of each series the page has, and has a checksum of each
part, such as the config. So only new points travel, unless points that the page has were thinned or undone: then the
series is sent as a whole.

Points travel as base64 of little-endian float64 (steps) and float32 (figures), which a browser reads at once, with NaN.
Series with the same steps share one column of steps.
"""

from __future__ import annotations

import base64
import json
import secrets
import sys
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from crosscut.watch.source import Source

_SESSION = secrets.token_hex(4)
"""Name of this process in all cursors, because another process counts generations anew."""


@dataclass
class ToldRun:
    """One run as the page knows it."""

    id: str
    name: str
    source: Source
    _sums: dict[str, tuple[object, int]] = field(default_factory=dict)
    """Parts with their checksums. A part that is the same object as before is not encoded again."""

    def listed(self) -> dict[str, object]:
        """Entry of the list of runs."""
        return {"id": self.id, "name": self.name, **self.source.listed()}

    def tell(self, cursor: str) -> dict[str, object]:
        """Return what is new since `cursor`. An empty or old cursor gets everything."""
        seen = _Cursor.read(cursor)
        parts = self.source.parts
        sums = {name: self._sum(name, part) for name, part in parts.items()}
        columns, told = _Columns(), {}
        for i, (name, of) in enumerate(self.source.series.items()):
            known, count = seen.series[i] if i < len(seen.series) else (-1, 0)
            start = count if known == of.generation else 0
            if known != of.generation or count < len(of.steps):
                told[name] = (start, *columns.add(of.steps[start:], of.values[start:]))
        positions = [(of.generation, len(of.steps)) for of in self.source.series.values()]
        return {
            "fresh": seen.session != _SESSION,
            "cursor": _Cursor(_SESSION, positions, sums).written(),
            "series": told,
            "columns": columns.encoded,
            "parts": {name: part for name, part in parts.items() if seen.sums.get(name) != sums[name]},
        }

    def _sum(self, name: str, part: object) -> int:
        before = self._sums.get(name)
        if before is None or before[0] is not part:
            self._sums[name] = before = (part, zlib.crc32(json.dumps(part).encode()))
        return before[1]


@dataclass(frozen=True)
class _Cursor:
    """Content of a run that a page has."""

    session: str = ""
    series: list[tuple[int, int]] = field(default_factory=list)
    """Generation and number of points of each series, in the order in which the series appeared."""
    sums: Mapping[str, int] = field(default_factory=dict)

    def written(self) -> str:
        series = "-".join(f"{generation}:{count}" for generation, count in self.series)
        return f"{self.session}.{series}.{'-'.join(f'{name}:{value}' for name, value in self.sums.items())}"

    @classmethod
    def read(cls, text: str) -> _Cursor:
        """Read a cursor. A cursor that this process has not written is empty."""
        try:
            session, series, sums = text.split(".")
            found = [(int(generation), int(count)) for generation, count in _pairs(series)]
            cursor = cls(session, found, {name: int(value) for name, value in _pairs(sums)})
        except ValueError:
            return cls()
        return cursor if session == _SESSION and all(count >= 0 for _, count in found) else cls()


def _pairs(text: str) -> list[list[str]]:
    return [pair.split(":", 1) for pair in text.split("-") if pair]


class _Columns:
    """Columns of numbers of one answer. Equal columns are sent once."""

    def __init__(self) -> None:
        self.encoded: dict[str, str] = {}
        self._steps: dict[bytes, str] = {}

    def add(self, steps: array[int], values: array[float]) -> tuple[str, str]:
        """Add a series. Returns the keys of its columns: `s...` holds float64, `v...` float32."""
        raw = _little(array("d", steps))
        if raw not in self._steps:
            self._steps[raw] = f"s{len(self._steps)}"
            self.encoded[self._steps[raw]] = base64.b64encode(raw).decode("ascii")
        key = f"v{len(self.encoded)}"
        self.encoded[key] = base64.b64encode(_little(array("f", values))).decode("ascii")
        return self._steps[raw], key


def _little(numbers: array[float]) -> bytes:
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return numbers.tobytes()
