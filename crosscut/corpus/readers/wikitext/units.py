"""Units of the template Convert, by the codes that pages use.

A code names a unit of `crosscut/corpus/lists/units.toml`, a unit with a prefix (`km`), a multiple of a unit (`e6acre`,
a million acres), or a quotient of two units (`PD/sqmi`).
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

UNITS = Path(__file__).parents[2] / "lists" / "units.toml"

MAX_CODE = 30
"""Maximum length of a unit's code."""

_PREFIXES = {
    "Y": ("yotta", 1e24), "Z": ("zetta", 1e21), "E": ("exa", 1e18), "P": ("peta", 1e15), "T": ("tera", 1e12),
    "G": ("giga", 1e9), "M": ("mega", 1e6), "k": ("kilo", 1e3), "h": ("hecto", 1e2), "da": ("deca", 10.0),
    "d": ("deci", 1e-1), "c": ("centi", 1e-2), "m": ("milli", 1e-3), "µ": ("micro", 1e-6), "μ": ("micro", 1e-6),
    "u": ("micro", 1e-6), "n": ("nano", 1e-9), "p": ("pico", 1e-12), "f": ("femto", 1e-15),
}  # fmt: skip

_COUNTS = {"e3": ("thousand", 1e3), "e6": ("million", 1e6), "e9": ("billion", 1e9), "e12": ("trillion", 1e12)}

PARTS = {
    ("ft", "in"): 12, ("yd", "ft"): 3, ("mi", "yd"): 1760, ("mi", "ft"): 5280, ("mi", "chain"): 80, ("st", "lb"): 14,
    ("lb", "oz"): 16, ("LT", "cwt"): 20, ("m", "cm"): 100, ("km", "m"): 1000, ("h", "min"): 60, ("min", "s"): 60,
}  # fmt: skip
"""Pairs of units that together write one value, as in 5 feet 3 inches. The number says how many of the second unit make
one of the first."""

PAIRS = {"ftin": ("ft", "in"), "stlb": ("st", "lb"), "lboz": ("lb", "oz"), "ydft": ("yd", "ft")}
"""Pairs of units into which a value can be converted, keyed by the code of the pair."""


@dataclass(frozen=True, kw_only=True)
class MeasureUnit:
    """A unit of measurement."""

    dimension: str
    scale: float
    """Size in the basic unit of the dimension."""
    name: str
    plural: str
    symbol: str
    to: str = ""
    """Codes of the units into which a value is converted by default, separated by spaces."""
    offset: float = 0.0
    """Zero point of the basic unit, as a value in this unit. For temperatures, the zero point is absolute zero."""
    is_symbol: bool = False
    """Whether the unit is written as a symbol even where other units are written as names."""

    @property
    def is_temperature(self) -> bool:
        """Whether the unit measures temperature, and so may have its own zero point."""
        return self.dimension == "temperature"

    def convert(self, value: float, other: "MeasureUnit") -> float:
        """Convert a value of this unit into another unit of the same dimension."""
        return (value - self.offset) * (self.scale / other.scale) + other.offset


@lru_cache(maxsize=1 << 12)
def find_unit(code: str) -> MeasureUnit | None:
    """Find a unit by its code."""
    if len(code) > MAX_CODE:
        return None
    units, to, also = _tables()
    code = also.get(code, code)
    unit = units.get(code) or _counted(code) or _quotient(code)
    return replace(unit, to=to[code]) if unit and code in to else unit


def _counted(code: str) -> MeasureUnit | None:
    """Find a unit like e6acre, a million acres."""
    for prefix, (name, number) in _COUNTS.items():
        unit = find_unit(code.removeprefix(prefix)) if code.startswith(prefix) else None
        if unit:
            return replace(
                unit,
                scale=unit.scale * number,
                name=f"{name} {unit.plural}",
                plural=f"{name} {unit.plural}",
                symbol=f"{name} {unit.symbol}",
                to=" ".join(f"{prefix}{to}" for to in unit.to.split()),
            )
    return None


def _quotient(code: str) -> MeasureUnit | None:
    """Find a unit like PD/sqmi, inhabitants per square mile."""
    above, slash, below = code.partition("/")
    first, second = (find_unit(above), find_unit(below)) if slash else (None, None)
    if not first or not second:
        return None
    return MeasureUnit(
        dimension=f"{first.dimension}/{second.dimension}",
        scale=first.scale / second.scale,
        name=f"{first.name} per {second.name}",
        plural=f"{first.plural} per {second.name}",
        symbol=f"{first.symbol if above != 'PD' else ''}/{second.symbol}",
    )


@cache
def _tables() -> tuple[dict[str, MeasureUnit], dict[str, str], dict[str, str]]:
    """Read the tables of units: the units by code, the default targets of conversions by code, and the main code for
    each alternative code.
    """
    tables = tomllib.loads(UNITS.read_text(encoding="utf-8"))
    to, also = tables.pop("to"), tables.pop("also")
    units: dict[str, MeasureUnit] = {}
    for dimension, rows in tables.items():
        for code, row in rows.items():
            also |= dict.fromkeys(row.get("also", ()), code)
            units |= dict(_read(dimension, code, row))
    return units, to, also


def _read(dimension: str, code: str, row: dict[str, Any]) -> Iterator[tuple[str, MeasureUnit]]:
    """Yield a unit and, if it takes prefixes such as kilo, the unit with each prefix. Each comes with its code."""
    plural = row.get("plural", f"{row['name']}s")
    symbol = row.get("symbol", code)
    facts = {key: row[key] for key in ("to", "offset", "is_symbol") if key in row}
    unit = MeasureUnit(dimension=dimension, scale=row["scale"], name=row["name"], plural=plural, symbol=symbol, **facts)
    yield code, unit
    *power, _ = row["name"].split()  # a prefix stands after "square" and "cubic"
    start = "".join(f"{word} " for word in power)
    exponent = {"square": 2, "cubic": 3}.get(start.strip(), 1)
    for prefix, (word, size) in _PREFIXES.items() if row.get("prefixes") else ():
        yield (
            prefix + code,
            replace(
                unit,
                scale=unit.scale * size**exponent,
                name=f"{start}{word}{unit.name.removeprefix(start)}",
                plural=f"{start}{word}{unit.plural.removeprefix(start)}",
                symbol=prefix + symbol,
            ),
        )
