"""Render templates of dates and of periods, such as {{birth date|1950|1|2}} and {{circa|300}}."""

import re
from collections.abc import Sequence
from datetime import date

from crosscut.corpus.readers.wikitext.markup import Renderer, TemplateCall

_MONTHS = {
    "en": "January February March April May June July August September October November December",
    "de": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
    "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    "es": "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
    "it": "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre",
    "pt": "janeiro fevereiro março abril maio junho julho agosto setembro outubro novembro dezembro",
    "nl": "januari februari maart april mei juni juli augustus september oktober november december",
    "sv": "januari februari mars april maj juni juli augusti september oktober november december",
    "pl": "stycznia lutego marca kwietnia maja czerwca lipca sierpnia września października listopada grudnia",
    "ru": "января февраля марта апреля мая июня июля августа сентября октября ноября декабря",
    "uk": "січня лютого березня квітня травня червня липня серпня вересня жовтня листопада грудня",
}
"""Names of the months as they stand in a date."""

_ORDERS = {
    "en": "{month} {day}, {year}", "de": "{day}. {month} {year}", "es": "{day} de {month} de {year}",
    "pt": "{day} de {month} de {year}", "ja": "{year}年{number}月{day}日", "zh": "{year}年{number}月{day}日",
}  # fmt: skip
"""Order of a date's parts, by language. Other languages write the day, the month and the year."""


def write_date(call: TemplateCall, parts: Sequence[str]) -> str:
    """Write a date. `parts` are the year, the month and the day. The month and the day may be missing.

    The argument `df` or `mf` of a template says whether English puts the day or the month first.
    """
    year, month, day = (part.strip() for part in [*parts, "", "", ""][:3])
    language = "en" if call.wiki.is_english else call.wiki.language
    names = _MONTHS.get(language, _MONTHS["en"]).split()
    number = _whole(month)
    name = names[number - 1] if 1 <= number <= len(names) else month
    if not name or not year:
        return year
    day = str(_whole(day) or day)
    if not day:
        return f"{name} {year}" if language not in ("ja", "zh") else f"{year}年{number}月"
    order = _ORDERS.get(language, "{day} {month} {year}")
    if (language == "en" and (call.is_on("df") or call["df"] == "dmy")) or not number:
        order = "{day} {month} {year}"
    return order.format(year=year, month=name, number=number, day=day)


def _whole(text: str) -> int:
    """Read the number of a year, a month or a day. Returns 0 if the text is not a number of at most four digits."""
    return int(text) if text.isdecimal() and len(text) <= 4 else 0


def single_date(call: TemplateCall) -> str:
    """Render a template that holds one date, such as {{birth date}}, {{start date}} or {{birth date and age}}.

    A date that is written in one argument is shown as it is. The present age is left out, because the date of the dump
    is unknown.
    """
    parts = call.numbered()
    return write_date(call, parts[:3]) if parts and parts[0].lstrip("-").isdecimal() else call[1]


def death_date_and_age(call: TemplateCall) -> str:
    """Render {{death date and age|YEAR|MONTH|DAY|YEAR|MONTH|DAY}}, where the second date is the date of birth."""
    parts = call.numbered()
    shown = single_date(call)
    age = _years(parts[3:6], parts[:3])
    return f"{shown} (aged {age})" if age and call.wiki.is_english else shown


def age(call: TemplateCall) -> str:
    """Render {{Age}} if it gives both dates. If it gives only the date of birth, the result is empty."""
    parts = call.numbered()
    return _years(parts[:3], parts[3:6])


def _years(first: Sequence[str], last: Sequence[str]) -> str:
    """Number of whole years between two dates, as text. Empty if a date is incomplete."""
    try:
        start, end = (date(*(int(part) for part in parts)) for parts in (first, last))
    except (TypeError, ValueError):
        return ""
    return str(end.year - start.year - ((end.month, end.day) < (start.month, start.day)))


def year_span(call: TemplateCall) -> str:
    """Render {{death year and age|YEAR OF DEATH|YEAR OF BIRTH}}."""
    last, first = call[1], call[2]
    if not (_whole(first) and _whole(last) and call.wiki.is_english):
        return last
    years = _whole(last) - _whole(first)
    return f"{last} (aged {years - 1}–{years})"


def film_dates(call: TemplateCall) -> str:
    """Render {{film date|YEAR|MONTH|DAY|PLACE|YEAR|...}}."""
    parts = call.numbered()
    shown = []
    for start in range(0, len(parts), 4):
        place = parts[start + 3] if len(parts) > start + 3 else ""
        day = write_date(call, parts[start : start + 3])
        shown.append(f"{day} ({place})" if place else day)
    return ", ".join(filter(None, shown))


def as_of(call: TemplateCall) -> str:
    """Render {{as of|YEAR|MONTH|DAY}} as "As of 5 March 2014"."""
    if call["alt"]:
        return call["alt"]
    start = "since" if call.is_on("since") else "as of"
    number = _whole(call[2])
    month = _MONTHS["en"].split()[number - 1] if 1 <= number <= 12 else call[2]
    day = f"{month} {call[3]}, {call[1]}" if call["df"].lower() == "us" and call[3] else ""
    shown = day or " ".join(filter(None, (call[3], month, call[1])))
    return f"{start if call.is_on('lc') else start.capitalize()} {shown}{call['post']}"


def about(mark: str) -> Renderer:
    """Make a renderer that writes a mark such as "c." before a year or before both years of a period."""

    def render(call: TemplateCall) -> str:
        years = [year for year in call.numbered() if year]
        return " – ".join(f"{mark} {year}" for year in years) if years else mark

    return render


def period(mark: str) -> Renderer:
    """Make a renderer that writes a mark such as "r." before a period."""

    def render(call: TemplateCall) -> str:
        return f"{mark} {'–'.join(year for year in call.numbered()[:2] if year)}".strip()

    return render


def old_style(call: TemplateCall) -> str:
    """Render {{OldStyleDate|February 2|1905|January 20}}."""
    return f"{call[1]} [O.S. {call[3]}] {call[2]}" if call[3] else f"{call[1]} {call[2]}"


def day_month_year(call: TemplateCall) -> str:
    """Render the dates of other languages, whose arguments are the day, the month and the year."""
    parts = [part for part in call.numbered()[:3] if part]
    if len(parts) == 3:
        return write_date(call, [re.sub(r"^0+(?=\d)", "", parts[2]), parts[1], parts[0]])
    return " ".join(parts)
