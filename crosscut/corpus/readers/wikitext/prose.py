"""Turn the markup of a page into prose, step by step."""

import html
import re
from collections.abc import Iterator
from functools import partial

from crosscut.corpus.readers.wikitext.links import show_links
from crosscut.corpus.readers.wikitext.markup import GAP, Templates
from crosscut.corpus.readers.wikitext.removal import (
    read_heading,
    remove_comments,
    remove_elements,
    remove_sections,
    remove_tables,
)
from crosscut.corpus.readers.wikitext.tags import remove_magic_words, remove_quotes, remove_tags
from crosscut.corpus.readers.wikitext.templates import find_renderer
from crosscut.corpus.readers.wikitext.wiki import Wiki

_CONVERTED = frozenset((
    "zh", "gan", "iu", "kk", "ku", "shi", "sr", "tg", "tly", "uz", "wuu", "zh-classical", "zh-yue",
))  # fmt: skip
"""Languages whose pages are written in several scripts, with markup such as -{zh-hans:X; zh-hant:Y}-."""

_CONVERSION = re.compile(r"-\{([^{}]*)\}-")
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_LIST = re.compile(r"[*#:;]+[ \t]*")
_ROW = re.compile(r"\||!.*(?:!!|\|)|\{\|")
_RULE = re.compile(r"-{4,}")
_BLANK_LINES = re.compile(r"\n{3,}")

# These patterns match a run of blanks and marks only from its start. Otherwise, the time of a search would grow with
# the square of the run's length.
_OPEN, _CLOSE = "(（", ")）"
_BETWEEN = r"(?:[\s,;:、；，/\x01–-]|\b(?:or|and|also|pronounced|pronunciation|listen|oder|ou|et|y|o|и|или)\b)*"
_BRACKETS = re.compile(rf"[{_OPEN}]{_BETWEEN}[{_CLOSE}]")
_PRONOUNCED = re.compile(r"\bpronounced[ \t]*\x01(?=[ \t\x01]*[),;])")
_AFTER_OPEN = re.compile(rf"([{_OPEN}])[\s,;:、；，\x01]+")
_BEFORE_CLOSE = re.compile(rf"(?<![\s,;:、；，\x01])[\s,;:、；，\x01]++([{_CLOSE}])")
_SEPARATORS = re.compile(r"([,;、；，])[ \t]*\x01[ \t\x01]*(?=[,;.、；，。])[,;]?")
_BEFORE_POINT = re.compile(r"(?<![ \t\x01])[ \t]++\x01[ \t\x01]*+(?=[.,;:!?、。，；])")


def prose(markup: str, wiki: Wiki | None = None, title: str = "") -> str:
    """Extract the prose of a page's markup. Each heading is a separate line, and so is each item of a list.

    `wiki` gives the language and the names of namespaces (English by default). `title` is the title of the page. Raises
    `TooComplexError` if the templates of the page take too many steps.
    """
    wiki = wiki or Wiki()
    text = remove_comments(markup.replace(GAP, ""))
    text = remove_tables(remove_elements(text))
    text = remove_sections(text, wiki)
    if "{{" in text or "}}" in text:
        text = Templates(text, partial(find_renderer, language=wiki.language), wiki, title).render()
    if wiki.language in _CONVERTED:
        text = _CONVERSION.sub(_choose_script, text)
    text = remove_magic_words(remove_tags(remove_quotes(show_links(text, wiki))))
    text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), "\n".join(_lines(text)))
    return _BLANK_LINES.sub("\n\n", "\n".join(" ".join(line.split()) for line in text.split("\n"))).strip()


def _choose_script(found: re.Match[str]) -> str:
    """Choose the first variant of a conversion such as -{zh-hans:X; zh-hant:Y}-."""
    _, flag, rest = found[1].rpartition("|")
    if flag and found[1].startswith(("T", "H", "-", "D")):  # a rule for the page, which shows nothing
        return ""
    first = rest.split(";")[0]
    code, colon, text = first.partition(":")
    return text.strip() if colon and re.fullmatch(r"\s*[a-z]{2,3}(-[a-z]+)*\s*", code) else rest


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of the prose. Remains of tables are left out, and so are headings without prose below them."""
    waiting: list[tuple[int, str]] = []
    for line in text.split("\n"):
        start = line.lstrip(" \t\x01")
        if not start:
            if GAP not in line:
                yield ""
            continue
        if start[0] == "=" and start.rstrip(" \t\x01").endswith("=") and (heading := read_heading(start))[1]:
            waiting = [other for other in waiting if other[0] < heading[0]]
            waiting.append(heading)
            continue
        if start[0] in "*#:;":
            line = start = _LIST.sub("", start, count=1)
        if GAP in line:
            line = start = _close_gaps(start)
        if not start.strip() or _is_markup(start):
            continue
        for _, name in waiting:
            yield f"\n{name}"
        waiting = []
        yield line


def _is_markup(start: str) -> bool:
    return (start[0] in "|!{" and bool(_ROW.match(start))) or (start[0] == "-" and bool(_RULE.fullmatch(start.strip())))


def _close_gaps(text: str) -> str:
    """Remove the marks of removed parts, together with brackets, commas and spaces that are left without words."""
    for _ in range(2):  # brackets may stand in brackets
        text = _BRACKETS.sub(_drop_empty, text)
    text = _PRONOUNCED.sub(GAP, text)
    text = _AFTER_OPEN.sub(_keep_bracket, text)
    text = _BEFORE_CLOSE.sub(_keep_bracket, text)
    text = _BEFORE_POINT.sub("", _SEPARATORS.sub(r"\1", text))
    return text.replace(GAP, "")


def _drop_empty(found: re.Match[str]) -> str:
    return GAP if GAP in found[0] else found[0]


def _keep_bracket(found: re.Match[str]) -> str:
    return found[1] if GAP in found[0] else found[0]
