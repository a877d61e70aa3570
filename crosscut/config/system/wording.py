"""Words for figures, and tables in Markdown."""

from collections.abc import Sequence

_LETTERS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def counted(number: int, noun: str, plural: str = "") -> str:
    """Count with its noun: `1 file`, `1,200 files`. By default, the plural of the noun ends with `s`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


RATES = ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"), (0.0, " "))
"""Units of rates, such as FLOP/s, before the name of the unit."""


def short(number: float, letters: Sequence[tuple[float, str]] = _LETTERS) -> str:
    """Format a number with up to three significant digits and a unit letter, such as 812K, 2.6M or 8.3B. `letters` has
    the units, the largest first.
    """
    number = float(f"{number:.3g}")  # so that 999,999 is 1M
    size, letter = next(((size, letter) for size, letter in letters if number >= size), (1.0, ""))
    return f"{number / size:.3g}{letter}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    heading, *lines = (f"| {' | '.join(row)} |" for row in (header, *rows))
    return [heading, f"|{'---|' * len(header)}", *lines]
