"""Render the template Convert: {{convert|2381741|km2|sqmi}} becomes "2,381,741 square kilometres (919,595 sq mi)".

The rules are those of Template:Convert of the English Wikipedia. A result has as many significant digits as the value
that it comes from, and at least two. Wikis in other languages get symbols instead of the English names.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crosscut.corpus.readers.wikitext.markup import TemplateCall
from crosscut.corpus.readers.wikitext.numbers import (
    MAX_LENGTH,
    clean,
    group,
    parse,
    power_of_ten,
    round_to,
    significant,
)
from crosscut.corpus.readers.wikitext.units import PAIRS, PARTS, MeasureUnit, find_unit

_RANGES = {
    "to": (" to ", " to "), "-": ("–", "–"), "–": ("–", "–"), "to(-)": (" to ", "–"), "to-": (" to ", "–"),
    "and": (" and ", " and "), "and(-)": (" and ", "–"), "or": (" or ", " or "), "by": (" by ", " by "),
    "x": (" × ", " × "), "×": (" × ", " × "), "xx": (" × ", " × "), "*": (" × ", " × "), "+/-": (" ± ", " ± "),
    "±": (" ± ", " ± "), "+": (" + ", " + "), ",": (", ", ", "), "/": (" / ", " / "), ",and": (", and ", ", and "),
    "to about": (" to about ", " to about "), "and about": (" and about ", " and about "),
}  # fmt: skip
"""Words between the values of a range, keyed by the code in a page: the words outside brackets, and the words inside
brackets."""

_JOINS = {
    "or": (" or ", ""), "comma": (", ", ""), "sqbr": (" [", "]"), "slash": ("/", ""), "x": ("", ""),
    "semicolon": ("; ", ""),
}  # fmt: skip
"""Text before and after a result, for each value of the argument `disp` that does not put the result into brackets."""

MAX_TARGETS = 8
"""Maximum number of units into which a value is converted."""

_FRACTION = re.compile(r"([-−]?)(?:(\d+)(?:\s*\+\s*|\s+|&nbsp;))?(\d+)\s*[/⁄]+\s*(\d+)")
_INTEGER = re.compile(r"[-−]?\d{1,2}")


@dataclass
class _ReadValue:
    """A number, as written in the page."""

    number: float
    text: str
    precision: float
    """Number of decimals. A negative number counts the zeros at the end of a whole number."""

    @classmethod
    def read(cls, text: str, language: str) -> "_ReadValue | None":
        fraction = _FRACTION.fullmatch(text.strip()) if len(text) <= MAX_LENGTH else None
        if fraction and int(fraction[4]):
            number = int(fraction[2] or 0) + int(fraction[3]) / int(fraction[4])
            shown = f"{fraction[2]} " if fraction[2] else ""
            sign = "−" if fraction[1] else ""
            precision = max(math.log10(int(fraction[4])), 1.0)
            return cls(-number if sign else number, f"{sign}{shown}{fraction[3]}/{fraction[4]}", precision)
        number_or_none = parse(text)
        if number_or_none is None:
            return None
        mantissa, _, exponent = clean(text).lower().partition("e")
        shown = group(mantissa.removesuffix("."), language) + (power_of_ten(exponent) if exponent else "")
        return cls(number_or_none, shown, _decimals(mantissa) - int(exponent or 0))


def _decimals(mantissa: str) -> int:
    whole, point, decimals = mantissa.partition(".")
    return len(decimals) if point else len(whole.rstrip("0")) - len(whole)


@dataclass
class _Conversion:
    """One use of the template, with its parsed arguments."""

    values: list[_ReadValue]
    words: list[str]
    """Words between the values."""
    unit: MeasureUnit
    code: str
    part: tuple[_ReadValue, MeasureUnit, int] | None = None
    """Second part of a value such as 5 feet 3 inches: its number (3), its unit (inch), and how many of these units make
    one of the first unit (12)."""
    targets: list[str] = field(default_factory=list)
    precision: int | None = None
    rest: list[str] = field(default_factory=list)
    """Remaining arguments, such as the words of `adj=mid`."""


def convert(call: TemplateCall) -> str:
    """Render the template Convert. If the unit is unknown, the value is shown with the code of the unit."""
    conversion = _read(call)
    if conversion is None:
        return " ".join(call.numbered()[:2])
    style = _Style.of(call, conversion)
    shown = _input(conversion, style)
    results = [result for code in conversion.targets if (result := _result(conversion, code, style, call))]
    if style.only_result:
        return results[0] if results else shown
    if not results or style.only_input:
        return shown
    if style.is_flipped:
        first, *others = results
        return f"{first} ({'; '.join([shown, *others])})"
    before, after = style.join
    return f"{shown}{before}{(' or ' if style.is_or else '; ').join(results)}{after}"


def _read(call: TemplateCall) -> _Conversion | None:
    """Read the arguments. Returns None if they hold no value or no known unit."""
    language = call.wiki.language
    waiting = call.numbered()[::-1]
    values: list[_ReadValue] = []
    words: list[str] = []
    while waiting:
        value = _ReadValue.read(waiting.pop(), language)
        if value is None:
            return None
        values.append(value)
        if not waiting or waiting[-1] not in _RANGES:
            break
        words.append(waiting.pop())
    code = waiting.pop() if waiting else ""
    unit = find_unit(code)
    if unit is None or len(words) == len(values):
        return None
    conversion = _Conversion(values, words, unit, code)
    conversion.part = _read_part(waiting, code, language)
    if waiting and waiting[-1] and not _INTEGER.fullmatch(waiting[-1]):
        target = waiting.pop()
        several = target.replace("+", " ").split(maxsplit=MAX_TARGETS)[:MAX_TARGETS]
        conversion.targets = [target] if find_unit(target) or target in PAIRS else several
    conversion.targets = conversion.targets or unit.to.split()
    if waiting and _INTEGER.fullmatch(waiting[-1]):
        conversion.precision = int(clean(waiting.pop()))
    conversion.rest = waiting[::-1]
    return conversion


def _read_part(waiting: list[str], code: str, language: str) -> tuple[_ReadValue, MeasureUnit, int] | None:
    """Read the second part of a value such as 5 feet 3 inches."""
    if len(waiting) < 2:
        return None
    number, unit = PARTS.get((code, waiting[-2])), find_unit(waiting[-2])
    value = _ReadValue.read(waiting[-1], language)
    if not number or not unit or not value:
        return None
    del waiting[-2:]
    return value, unit, number


@dataclass
class _Style:
    """The page's options for how values are written."""

    language: str
    names_in: bool
    """Whether the value's unit is written as a name, and not as a symbol."""
    names_out: bool
    join: tuple[str, str]
    rename: Callable[[str], str]
    """Function that writes a unit's name in the page's spelling."""
    is_adjective: bool = False
    middle: str = ""
    """Text after the unit, as in "10-metre-long"."""
    is_flipped: bool = False
    is_or: bool = False
    only_result: bool = False
    only_input: bool = False

    @classmethod
    def of(cls, call: TemplateCall, conversion: _Conversion) -> "_Style":
        disp, adjective = call["disp"], call["adj"]
        is_flipped = disp == "flip" or call["order"] == "flip"
        abbreviated = call.first("abbr", "abbr1") or ("on" if call.name == "cvt" or not call.wiki.is_english else "out")
        names_in, names_out = _names(abbreviated, is_or=disp == "or")
        if is_flipped and abbreviated in ("in", "out"):
            names_in, names_out = names_out, names_in
        return cls(
            language=call.wiki.language,
            names_in=names_in,
            names_out=names_out,
            join=_JOINS.get(disp, (" (", ")")),
            rename=_american if call["sp"] == "us" else str,
            is_adjective=adjective in ("on", "mid", "1", "y"),
            middle=conversion.rest[0] if adjective == "mid" and conversion.rest else "",
            is_flipped=is_flipped,
            is_or=disp in ("or", "(or)"),
            only_result=disp in ("out", "output only", "number", "output number only"),
            only_input=call["disp"] == "in",
        )

    def write(self, numbers: str, unit: MeasureUnit, *, is_name: bool, is_one: bool, is_first: bool) -> str:
        """Write a number with its unit."""
        if not is_name or unit.is_symbol:
            return f"{numbers} {unit.symbol}" if not unit.symbol.startswith("/") else f"{numbers}{unit.symbol}"
        if self.is_adjective and is_first:
            return f"{numbers} {self.rename(unit.name)}".replace(" ", "-") + self.middle
        return f"{numbers} {self.rename(unit.name if is_one else unit.plural)}"


def _names(abbreviated: str, *, is_or: bool) -> tuple[bool, bool]:
    """Return whether the unit of the value is written as a name, and whether the unit of the result is."""
    if abbreviated in ("off", "none"):
        return True, True
    if abbreviated == "in":
        return False, True
    return abbreviated == "out", abbreviated == "out" and is_or


def _american(name: str) -> str:
    return name.replace("metre", "meter").replace("litre", "liter").replace("tonne", "metric ton")


def _input(conversion: _Conversion, style: _Style) -> str:
    """Write the values as given in the page, with their unit."""
    is_first = not style.is_flipped
    numbers = _joined([value.text for value in conversion.values], conversion.words, 0 if is_first else 1)
    is_one = len(conversion.values) == 1 and _is_one(conversion.values[0])
    shown = style.write(numbers, conversion.unit, is_name=style.names_in, is_one=is_one, is_first=is_first)
    if conversion.part is None:
        return shown
    value, unit, _ = conversion.part
    last = style.write(value.text, unit, is_name=style.names_in, is_one=_is_one(value), is_first=is_first)
    return f"{shown}{'-' if style.is_adjective and style.names_in else ' '}{last}"


def _is_one(value: _ReadValue) -> bool:
    return value.number == 1 or ("/" in value.text and abs(value.number) < 1)


def _joined(numbers: Sequence[str], words: Sequence[str], place: int) -> str:
    """Join the numbers of a range. `place` is 0 outside brackets and 1 inside brackets."""
    pairs = zip(words, numbers[1:], strict=True)
    return numbers[0] + "".join(f"{_RANGES[word][place]}{number}" for word, number in pairs)


def _result(conversion: _Conversion, code: str, style: _Style, call: TemplateCall) -> str:
    """Write the values in another unit. Returns an empty string if the unit is unknown or measures something else."""
    pair = PAIRS.get(code)
    unit = find_unit(pair[1] if pair else code)
    if unit is None or unit.dimension != conversion.unit.dimension:
        return ""
    number = conversion.part[2] if conversion.part else 1
    extra = conversion.part[0].number / number if conversion.part else 0.0
    amounts = [conversion.unit.convert(value.number + extra, unit) for value in conversion.values]
    texts = _rounded(conversion, amounts, unit, call)
    if pair:
        return _in_pair(texts[0], pair, style)
    is_first = style.is_flipped
    numbers = _joined([group(text, style.language) for text in texts], conversion.words, 0 if is_first else 1)
    if call["disp"] in ("number", "output number only"):
        return numbers
    is_one = len(texts) == 1 and float(texts[0]) == 1
    return style.write(numbers, unit, is_name=style.names_out, is_one=is_one, is_first=is_first)


def _rounded(conversion: _Conversion, amounts: Sequence[float], unit: MeasureUnit, call: TemplateCall) -> list[str]:
    """Round the results as the page specifies. If the page specifies nothing, they get the precision of the page's
    values.
    """
    digits, step = parse(call["sigfig"]), parse(call["round"])
    if conversion.precision is None and digits and digits >= 1:
        return [_signed(amount, significant(abs(amount), int(digits))) for amount in amounts]
    if conversion.precision is None and step and step > 0:
        return [_signed(amount, f"{round(abs(amount) / step) * step:g}") for amount in amounts]
    precision = conversion.precision
    if precision is None:
        pairs = zip(conversion.values, amounts, strict=True)
        precision = max(_precision(conversion, value, amount, unit) for value, amount in pairs)
    return [_signed(amount, round_to(abs(amount), precision)) for amount in amounts]


def _signed(amount: float, text: str) -> str:
    return f"-{text}" if amount < 0 and float(text) else text


def _precision(conversion: _Conversion, value: _ReadValue, amount: float, unit: MeasureUnit) -> int:
    """Number of decimals that makes a result as precise as the value that it comes from.

    If the result is between 1/50 and 1/5 of the value, it has one decimal more than the value. For every further factor
    of 10, the number of decimals changes by one. A result has at least two significant digits. A temperature is at
    least as precise as three significant digits of its value in kelvins.
    """
    source = conversion.unit
    if source.is_temperature:
        kelvins = abs((value.number - source.offset) * source.scale)
        least = 2 - math.floor(math.log10(kelvins) + 1e-14) if kelvins > 1e-8 else 2
        return max(math.floor(value.precision + math.log10(2)), least)
    if not amount or not value.number:
        return 0
    least = 1 - math.floor(math.log10(abs(amount)) + 1e-14)
    if conversion.part:  # the smaller unit tells how precise the value is
        part, smaller, number = conversion.part
        inches = unit.scale * 100 if smaller.name == "inch" else abs((value.number * number + part.number) / amount)
        return max(math.floor(max(part.precision, 0) + math.log10(inches) + math.log10(2)), least)
    change = math.log10(abs(value.number / amount)) + math.log10(2)
    return max(math.floor(value.precision + change), least)


def _in_pair(text: str, pair: tuple[str, str], style: _Style) -> str:
    """Write a number of small units, such as 63 inches, in a pair of units: 5 ft 3 in."""
    number = PARTS[pair]
    whole, rest = divmod(abs(float(text)), number)
    sign = "−" if text.startswith("-") else ""
    parts = []
    for amount, code in ((whole, pair[0]), (rest, pair[1])):
        unit = find_unit(code)
        if unit and (amount or code == pair[1]):
            shown = group(f"{amount:.6f}".rstrip("0").rstrip("."), style.language)
            parts.append(style.write(shown, unit, is_name=style.names_out, is_one=amount == 1, is_first=False))
    return sign + " ".join(parts)
