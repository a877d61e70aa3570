r"""Patterns for the names of modules, as PEFT's `rank_pattern` and `alpha_pattern` have them.

PEFT takes the first key that matches a module's name by `re.match(rf"(.*\.)?({key})$", name)`. A key is usually the end
of a name, and sometimes a regular expression. Python's engine backtracks: a key of twenty characters from an unknown
source can run for years. This matcher keeps the set of all places in the name that a part of the key can reach, so it
tries nothing twice, and it counts its steps. It supports characters, `.`, classes, groups, `|`, `*`, `+`, `?`, `{m,n}`,
`^` and `$`.
"""

import re
from collections.abc import Callable, Iterable

from crosscut.config.checks import shown

_MOST_STEPS = 3_000_000
"""Steps for all keys and all names of an adapter: about two seconds. Adapters of the largest models need a tenth."""
_STEPS_TO_PARSE = 10
"""Steps for each character of a key."""
_MOST_LENGTH = 1000
_DEEPEST = 30
_PLAIN = re.compile(r"(?:[\w.-]|\\\.)*", re.ASCII)
"""Keys without quantifiers and groups, which Python's engine matches without backtracking."""
_TOKEN = re.compile(
    r"(?P<one>\\[dswDSW]|\\[^a-zA-Z0-9]|\.|\[\^?\]?(?:\\.|(?!--)[^\]\\\[&~|])*\])"
    r"|(?P<times>[*+?]\??|\{(?:\d+(?:,\d*)?|,\d*)\}\??)"
    r"|(?P<open>\((?:\?:)?)|(?P<close>\))|(?P<or>\|)|(?P<edge>[\^$])"
    r"|(?P<wrong>[\[\\])|(?P<plain>.)",
    re.DOTALL,
)

Places = frozenset[int]
_Part = Callable[[str, Places], Places]
"""Part of a pattern: maps a name and the places where the part may begin to the places where it may end."""


class ModulePatterns:
    """Keys of one of PEFT's tables. Creating and matching them raises `ValueError` with the reason if a key is no
    supported pattern, or if all keys together take too many steps. With `whole`, a key must match the whole name, as in
    PEFT's `target_modules`.
    """

    def __init__(self, keys: Iterable[str], *, whole: bool = False) -> None:
        self._keys, self._whole = tuple(keys), whole
        self._steps = 0
        self._matchers = tuple(self._matcher(key) for key in self._keys)

    def first(self, name: str) -> str | None:
        """Return the first key that matches a module's name. None if no key matches."""
        return next((key for key, fits in zip(self._keys, self._matchers, strict=True) if fits(name)), None)

    def _matcher(self, key: str) -> Callable[[str], bool]:
        if len(key) > _MOST_LENGTH:
            raise ValueError(f"a key has {len(key):,} characters")
        self._count(_STEPS_TO_PARSE * len(key))
        if _PLAIN.fullmatch(key):
            plain = re.compile(key if self._whole else rf"(?:.*\.)?(?:{key})")

            def fits_plain(name: str) -> bool:
                self._count(1)
                return plain.fullmatch(name) is not None

            return fits_plain
        part = _Parser(key, self._count).whole()

        def fits(name: str) -> bool:
            later = () if self._whole else (place + 1 for place, character in enumerate(name) if character == ".")
            return len(name) in part(name, frozenset([0, *later]))

        return fits

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise ValueError(f"its keys take more than {_MOST_STEPS:,} steps to match")


class _Parser:
    """Parser of one key. `count` is called with the number of steps that a part takes."""

    def __init__(self, key: str, count: Callable[[int], None]) -> None:
        self._key, self._count = key, count
        self._tokens = [(str(match.lastgroup), match[0]) for match in _TOKEN.finditer(key)][::-1]

    def whole(self) -> _Part:
        part = self._choice(0)
        if self._tokens:
            raise self._wrong()
        return part

    def _wrong(self) -> ValueError:
        return ValueError(f"{shown(self._key)} is not a pattern that Crosscut supports")

    def _next_kind(self) -> str:
        return self._tokens[-1][0] if self._tokens else ""

    def _choice(self, depth: int) -> _Part:
        """Parse alternatives, which `|` separates."""
        if depth > _DEEPEST:
            raise self._wrong()
        parts = [self._sequence(depth)]
        while self._next_kind() == "or":
            self._tokens.pop()
            parts.append(self._sequence(depth))
        if len(parts) == 1:
            return parts[0]
        return lambda name, places: frozenset().union(*(part(name, places) for part in parts))

    def _sequence(self, depth: int) -> _Part:
        parts: list[_Part] = []
        while self._next_kind() not in ("", "or", "close"):
            part = self._single(depth)
            if self._next_kind() == "times":
                part = self._repeated(part, *_bounds(self._tokens.pop()[1]))
            parts.append(part)

        def sequence(name: str, places: Places) -> Places:
            for part in parts:
                if not places:
                    break
                places = part(name, places)
            return places

        return sequence

    def _single(self, depth: int) -> _Part:
        kind, text = self._tokens.pop()
        if kind == "open":
            inside = self._choice(depth + 1)
            if self._next_kind() != "close":
                raise self._wrong()
            self._tokens.pop()
            return inside
        if kind == "edge":
            return lambda name, places: places & {0 if text == "^" else len(name)}
        if kind not in ("one", "plain"):
            raise self._wrong()
        try:
            fits = re.compile(text).fullmatch if kind == "one" else text.__eq__
        except re.error:
            raise self._wrong() from None
        return lambda name, places: frozenset(
            place + 1 for place in self._counted(places) if place < len(name) and fits(name[place])
        )

    def _counted(self, places: Places) -> Places:
        self._count(1 + len(places))
        return places

    def _repeated(self, part: _Part, least: int, most: float) -> _Part:
        """Return a part that matches `part` at least `least` and at most `most` times."""

        def repeated(name: str, places: Places) -> Places:
            for _ in range(least):
                self._count(1)
                before, places = places, part(name, places)
                if places in (before, frozenset()):
                    break
            reached, times = places, least
            while places and times < most:
                self._count(1)
                places = part(name, places) - reached
                reached, times = reached | places, times + 1
            return reached

        return repeated


def _bounds(quantifier: str) -> tuple[int, float]:
    """Smallest and largest number of repetitions of a quantifier, such as `*` or `{2,3}`."""
    kind = quantifier[:1]
    if kind != "{":
        return int(kind == "+"), 1 if kind == "?" else float("inf")
    least, comma, most = quantifier.rstrip("?")[1:-1].partition(",")
    return int(least or 0), float(most or "inf") if comma else int(least)
