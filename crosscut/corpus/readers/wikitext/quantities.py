"""Render templates of numbers, fractions and chemical formulas."""

import re
from collections.abc import Sequence

from crosscut.corpus.readers.wikitext.markup import Renderer, TemplateCall
from crosscut.corpus.readers.wikitext.numbers import clean, group, power_of_ten

_OPERATOR = re.compile(r"[\s+−–-]")
_CHARGE = re.compile(r"\d*[+−–-]")
_POWER = re.compile(r"[-−]?\d")
_COUNT = re.compile(r"\d+(?:\.\d+)?")


def format_number(call: TemplateCall) -> str:
    """Render {{formatnum:1234567}}. With the argument R, the number is written without separators."""
    return clean(call[1]) if call[2].upper() == "R" else _grouped(call[1], call.wiki.language)


def value(call: TemplateCall) -> str:
    """Render {{val|1.5|0.2|e=6|u=m/s}} as "1.5±0.2×10⁶ m/s"."""
    language = call.wiki.language
    number = _grouped(call[1], language)
    first, second = call[2], call[3]
    if first.startswith("("):
        number += first
    elif first and second:
        number += f"+{first.lstrip('+')}−{second.lstrip('-−')}"
    elif first:
        number += f"±{_grouped(first, language)}"
    number += power_of_ten(call["e"]) if call["e"] else ""
    unit = call.first("u", "ul", "upl")
    below = call.first("up", "upl")
    unit += f"/{below}" if below and below != unit else ""
    shown = f"{call.first('p', 'pre')}{number} {unit}".rstrip()
    return f"{shown}{call.first('s', 'suf', 'end')}"


def _grouped(number: str, language: str) -> str:
    plain = clean(number)
    return group(plain, language) if _COUNT.fullmatch(plain.lstrip("-")) else number


def exponent(call: TemplateCall) -> str:
    """Render {{e|24}}, a power of ten."""
    return power_of_ten(call[1]) if call[1] else ""


def fraction(call: TemplateCall) -> str:
    """Render {{frac|1|2}} as 1/2, {{frac|3}} as 1/3, and {{frac|4|1|2}} as 4 1/2."""
    parts = [part for part in call.numbered()[:3] if part]
    if not parts:
        return "/"
    if len(parts) == 3:
        return f"{parts[0]} {parts[1]}/{parts[2]}"
    above, below = parts if len(parts) == 2 else ("1", parts[0])
    return f"{_enclosed(above)}/{_enclosed(below)}"


def _enclosed(term: str) -> str:
    """Put a sum into brackets."""
    return f"({term})" if _OPERATOR.search(term.strip("−-")) and not term.startswith("(") else term


def formula(call: TemplateCall) -> str:
    """Render {{chem|SO|4|2-}}, whose arguments are symbols, numbers of atoms and charges."""
    shown = []
    for number, part in enumerate(call.numbered()):
        if _CHARGE.fullmatch(part):
            shown.append(f"<sup>{part}</sup>")
        else:
            shown.append(f"<sub>{part}</sub>" if number % 2 and part else part)
    return "".join(shown)


def formula_in_line(call: TemplateCall) -> str:
    """Render {{chem2|SO4(2-)}}, whose charge stands in brackets."""
    text = re.sub(r"\((\d*[+-])\)|\^(\d*[+-])", lambda found: f"<sup>{found[1] or found[2]}</sup>", call[1])
    return text.replace("->", "→").replace("<-", "←")


def quantity(unit: str = "") -> Renderer:
    """Make a renderer for a number and its units, such as {{unité|1234|km}} and {{unité/2|9,81|m||s|-2}}.

    A power may follow each unit, and the argument `e` is a power of ten. `unit` names the argument that holds the unit,
    if the unit is not the second argument.
    """

    def render(call: TemplateCall) -> str:
        number = call[1]
        mantissa, _, power = clean(number.replace(",", ".") if "." not in number else number).partition("e")
        shown = group(mantissa, call.wiki.language) if _COUNT.fullmatch(mantissa.lstrip("-")) else number
        power = call["e"] or power
        shown += power_of_ten(power) if power else ""
        return f"{shown} {call[unit] if unit else _units(call.numbered(2))}".strip()

    return render


def _units(parts: Sequence[str]) -> str:
    """Write units. Each unit in `parts` may be followed by its power."""
    text = ""
    for part in parts:
        is_power = text and _POWER.fullmatch(part)
        text += f"<sup>{part}</sup>" if is_power else f" {part}" if text and part else part
    return text


def currency(sign: str) -> Renderer:
    """Make a renderer for an amount of money: {{US$|5 million}} becomes "US$5 million"."""

    def render(call: TemplateCall) -> str:
        amount = call[1]
        plain = clean(amount)
        return f"{sign}{group(plain) if _COUNT.fullmatch(plain) else amount}"

    return render
