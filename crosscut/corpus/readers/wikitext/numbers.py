"""Read and write numbers as the wikis do: 1,234.5 in English, 1.234,5 in German, and 1 234,5 in French."""

import math
import re

_POINTS = {
    ("\u00a0", ","): "fr ru uk be bg cs sk sv no nb nn fi hu pl es eo et lv lt",
    (".", ","): "de it pt nl da tr id el ro ca vi hr sr sl gl eu is",
}
"""Separators of thousands and of decimals, each pair with the languages that use it."""

_SEPARATORS = {code: pair for pair, codes in _POINTS.items() for code in codes.split()}
_NO_FOUR = frozenset(["es", "pl", "pt", "bg"])
"""Languages that write numbers of four digits without a separator."""

MAX_LENGTH = 60
"""Maximum length of a number."""

_PLAIN = re.compile(r"[-−+]?[\d,]*\.?\d+(?:[eE][-−+]?\d+)?\.?")


def group(number: str, language: str = "en") -> str:
    """Write a number's digits in groups of three. `number` is plain, as in `-1234.5`."""
    thousands, point = _SEPARATORS.get(language, (",", "."))
    sign = "−" if number[:1] in "-−" else ""
    whole, dot, decimals = number.lstrip("-−+").partition(".")
    is_short = len(whole) < (5 if language in _NO_FOUR else 4)
    if whole.isdigit() and not is_short:
        parts = [whole[max(end - 3, 0) : end] for end in range(len(whole), 0, -3)]
        whole = thousands.join(reversed(parts))
    return f"{sign}{whole}{point if dot else ''}{decimals}"


def parse(text: str) -> float | None:
    """Read a number as it is written in English. Returns None for any other text."""
    plain = clean(text)
    if len(plain) > MAX_LENGTH or not _PLAIN.fullmatch(plain):
        return None
    try:
        value = float(plain)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def clean(text: str) -> str:
    """Remove spaces and thousands separators from a number."""
    return re.sub(r"[\s,\u00a0]|&nbsp;|&thinsp;", "", text).replace("−", "-").replace("&minus;", "-")


def power_of_ten(exponent: str) -> str:
    """Markup of a power of ten."""
    return f"×10<sup>{exponent.strip().replace('-', '−')}</sup>"


def round_to(value: float, precision: int) -> str:
    """Round to `precision` decimals. A negative precision rounds to tens, hundreds and so on."""
    if precision >= 0:
        return f"{value + 2e-14:.{min(precision, 12)}f}"
    step = 10**-precision
    return str(int(f"{value / step:.0f}") * step)


def significant(value: float, digits: int) -> str:
    """Round to `digits` significant digits."""
    if not value:
        return "0"
    return round_to(value, digits - 1 - math.floor(math.log10(value) + 1e-14))
