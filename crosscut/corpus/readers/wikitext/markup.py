"""Match the brackets of a page, and render its templates from the outside in.

MediaWiki expands a template's arguments only where the template uses them. This module does the same: it never reads
the content of a removed template, and it renders a template inside an argument when the argument is read.
"""

import re
from collections.abc import Callable, Mapping

from crosscut.corpus.readers.steps import Steps
from crosscut.corpus.readers.wikitext.wiki import Wiki

GAP = "\x01"
"""Mark of a removed part within a line. XML cannot contain this character, so it never comes from a dump. The spaces,
commas and brackets around a mark are tidied at the end."""

MAX_DEPTH = 40
"""Maximum nesting of templates. MediaWiki has the same limit."""

MAX_ARGUMENTS = 500
"""Maximum number of arguments of a template. A template with more arguments is a list of data, and is removed."""

STEPS_PER_CHARACTER, STEPS = 100, 1_000_000
"""Maximum number of characters of templates that are read and written for a page: for each character of the page, and
besides. A template inside another counts again."""

_SPECIAL = re.compile(r"[\[\]{}|'<>&=*#:;_!-]")
_BRACES = re.compile(r"\{\{|\}\}")
_PARAMETER = re.compile(r"\{\{\{[^{}]*\}\}\}")
_SPLIT = re.compile(r"\{\{|\[\[|\]\]|\|")
_KEY = re.compile(r"\s*+([\w.'-](?:[\w .'-]{0,38}[\w.'-])?)\s*+=|[^\S ]*+( )\s*+=")
_FUNCTION = re.compile(r"\s*+(?:(?:subst|safesubst|msg|raw|template):\s*+)*[^:]*:", re.IGNORECASE)
_PREFIX = re.compile(r"^(?:(?:subst|safesubst|msg|raw|template): ?)+", re.IGNORECASE)


class TemplateCall:
    """One use of a template: its name and its arguments. Templates inside the arguments are already rendered."""

    def __init__(self, name: str, arguments: Mapping[str, str], wiki: Wiki, title: str) -> None:
        self.name = name
        """Name in lower case."""
        self.arguments = arguments
        """Arguments, keyed by name. Arguments without a name are called `1`, `2` and so on."""
        self.wiki = wiki
        self.title = title
        """Title of the page."""

    def __getitem__(self, key: int | str) -> str:
        """Value of an argument, without the spaces around it. Empty if the argument is missing."""
        return self.arguments.get(str(key), "")

    def first(self, *keys: int | str) -> str:
        """Value of the first of the given arguments that is not empty."""
        return next((value for key in keys if (value := self[key])), "")

    def numbered(self, start: int = 1) -> list[str]:
        """Values of the arguments without names, from number `start` up to the first missing number."""
        values = []
        while str(start) in self.arguments:
            values.append(self.arguments[str(start)])
            start += 1
        return values

    def is_on(self, key: str) -> bool:
        """Return whether an argument means yes, as in `df=y`."""
        return self[key].lower() in ("y", "yes", "on", "1", "true")


Renderer = Callable[[TemplateCall], str]
"""A function that returns the text of a template. An empty text means that the template is removed."""

Finder = Callable[[str], Renderer | None]
"""A function that finds the renderer of a template by its name in lower case."""


class Templates:
    """The templates of a page."""

    def __init__(self, markup: str, find: Finder, wiki: Wiki, title: str) -> None:
        self._text = _PARAMETER.sub("", markup) if "{{{" in markup else markup
        self._ends = match(self._text, _BRACES)
        self._find = find
        self._wiki = wiki
        self._title = title
        self._depth = 0
        self._steps = Steps("expanding templates", len(markup), per_unit=STEPS_PER_CHARACTER, at_least=STEPS)

    def render(self) -> str:
        """Return the page's markup with its templates rendered or removed. Braces without a partner are removed.

        Raises `TooComplexError` if the templates take too many steps.
        """
        return self._expand(0, len(self._text)).replace("}}", "")

    def _expand(self, start: int, end: int) -> str:
        text = self._text
        pieces = []
        position = start
        while (at := text.find("{{", position, end)) >= 0:
            pieces.append(text[position:at])
            stop = self._ends.get(at)
            if stop is None or stop > end:  # these braces are never closed
                position = at + 2
            else:
                pieces.append(self._render(at + 2, stop - 2) or GAP)
                position = stop
        pieces.append(text[position:end])
        return "".join(pieces)

    def _render(self, start: int, end: int) -> str:
        """Render a template. The markup from `start` to `end` is the content of its braces."""
        bar = self._text.find("|", start, end)
        head = self._text[start : bar if bar >= 0 else end]
        name = _PREFIX.sub("", " ".join(head.replace("_", " ").split()).lower())
        function, colon, _ = name.partition(":")
        first = bar + 1
        prefix = _FUNCTION.match(head) if colon else None
        if prefix:  # a function of the parser, such as {{formatnum:1234}}
            name, first = f"{function}:", start + prefix.end()
        renderer = self._find(name)
        if renderer is None or self._depth > MAX_DEPTH:
            return ""
        spans = self._split(first, end) if prefix or bar >= 0 else []
        if len(spans) > MAX_ARGUMENTS:
            return ""
        self._depth += 1
        self._steps.take(end - start)
        text = renderer(TemplateCall(name, self._arguments(spans, are_named=not prefix), self._wiki, self._title))
        self._steps.take(len(text))
        self._depth -= 1
        return text

    def _split(self, start: int, end: int) -> list[tuple[int, int]]:
        """Find the start and the end of each argument. A bar inside a link or an inner template does not end an
        argument.
        """
        spans = []
        position, links = start, 0
        while mark := _SPLIT.search(self._text, position, end):
            position = mark.end()
            if mark[0] == "{{":
                position = self._ends.get(mark.start(), position)
            elif mark[0] == "|":
                if not links:
                    spans.append((start, mark.start()))
                    start = mark.end()
            else:
                links = max(links + (1 if mark[0] == "[[" else -1), 0)
        return [*spans, (start, end)]

    def _arguments(self, spans: list[tuple[int, int]], *, are_named: bool) -> dict[str, str]:
        """Read arguments. If `are_named` is false, an equals sign is part of a value, as in {{lc:A=B}}."""
        arguments: dict[str, str] = {}
        number = 0
        for start, end in spans:
            key = _KEY.match(self._text, start, end) if are_named else None
            if key:
                arguments[key[1] or key[2]] = self._expand(key.end(), end).strip()
            else:
                number += 1
                arguments[str(number)] = self._expand(start, end).strip()
        return arguments


def match(text: str, brackets: re.Pattern[str]) -> dict[int, int]:
    """Match brackets. Returns a map from the start of each pair to its end. Brackets without a partner are left out."""
    ends = {}
    opened = []
    for bracket in brackets.finditer(text):
        if bracket[0][0] in "{[":
            opened.append(bracket.start())
        elif opened:
            ends[opened.pop()] = bracket.end()
    return ends


def escape(text: str) -> str:
    """Replace characters that are special in markup with entities."""
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", text)
