"""Words by which boilerplate is found, by language, from `crosscut/corpus/lists/boilerplate.toml`."""

import tomllib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

WORDS = Path(__file__).parents[1] / "lists" / "boilerplate.toml"

_TABLE: dict[str, Any] = tomllib.loads(WORDS.read_text(encoding="utf-8"))
_AROUND = " \t\n\r\xa0" + _TABLE["signs"]["around"]

SENTENCE_ENDS = tuple(_TABLE["signs"]["sentence_ends"])
"""Signs at the end of a line of prose."""


def plain(text: str) -> str:
    """Return a label in lower case and without the signs around it, such as a colon, an arrow or a count."""
    label = text.strip(_AROUND)
    if label[-1:].isdecimal() and (counted := label.rstrip("0123456789"))[-1:] in ("(", "["):
        label = counted.rstrip(_AROUND)
    if "  " in label or "\n" in label or "\t" in label:
        label = " ".join(label.split())
    return label.casefold()


def _all(words_of_language: Mapping[str, list[str]]) -> set[str]:
    return set(chain.from_iterable(words_of_language.values()))


NAMES = {rule: _all(words) for rule, words in _TABLE["names"].items()}
"""Words in classes and ids by the rule that they belong to, in all languages."""
LABELS = frozenset(map(plain, _all(_TABLE["labels"])))
"""Labels that open a part which is not main text, as `plain` writes them."""
BUTTONS = frozenset(map(plain, _all(_TABLE["buttons"])))
"""Lines that are left out at both ends of the main text, as `plain` writes them."""
RIGHTS_BEGIN = tuple(map(str.casefold, _TABLE["rights"]["begin"]))
RIGHTS_END = tuple(map(str.casefold, _TABLE["rights"]["end"]))
"""Words with which a line about rights begins or ends, in lower case."""
