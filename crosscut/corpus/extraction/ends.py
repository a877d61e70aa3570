"""Leave out the lines around the main text that only their words tell apart from it: labels, buttons, lines about
rights.

A label such as "Mehr zum Thema" opens a list of links. After the last line of prose, everything from a label on is left
out. Between lines of prose, the label and the items below it are. The words are in
`crosscut/corpus/lists/boilerplate.toml`.
"""

import re
from collections.abc import Iterable

from crosscut.corpus.extraction.words import BUTTONS, LABELS, RIGHTS_BEGIN, RIGHTS_END, SENTENCE_ENDS, plain

PROSE_BYTES = 90
"""Minimum size of a line of prose in bytes. Chinese and Japanese need few characters, but three bytes for each."""
LABEL_CHARACTERS, REMARK_CHARACTERS = 60, 300
"""Maximum lengths of a label, and of a line that begins with a label or is about rights."""
IDEOGRAMS = 4
"""Minimum length of a Chinese or Japanese label before a colon. In other languages, such a label has two words, because
"Werbung: ..." may be a sentence."""
LAST_LINES = 15
"""Number of lines at the end in which a line about rights is looked for."""

_TITLED = re.compile(rf"([^:\uff1a]{{1,{LABEL_CHARACTERS}}})[:\uff1a]")
_ITEM = re.compile(r"\s*(?:[•·-]|\d+\.)\s")
_BLANK_LINES = re.compile(r"\n{3,}")


def without_ends(text: str) -> str:
    """Return a main text without labels and what they open, and without buttons and lines about rights at its ends.

    A text without prose stays as it is, and so does one of which less than half would remain.
    """
    lines = text.split("\n")
    first = _find_prose(enumerate(lines))
    if first is None:
        return text
    last = _find_prose(reversed(list(enumerate(lines)))) or first
    kept = _without_buttons(lines[:first])
    kept += _without_items(lines[first : last + 1])
    kept += _without_buttons(_before_label(lines[last + 1 :]))
    _drop_rights(kept)
    if len(kept) == len(lines) and kept == lines:
        return text
    result = _BLANK_LINES.sub("\n\n", "\n".join(kept)).strip()
    return result if 2 * len(result) >= len(text) else text


def is_prose(line: str) -> bool:
    """Whether a line is long and ends like a sentence."""
    is_long = len(line) >= PROSE_BYTES or len(line.encode("utf-8", "replace")) >= PROSE_BYTES
    return is_long and line.rstrip().endswith(SENTENCE_ENDS)


def _find_prose(lines: Iterable[tuple[int, str]]) -> int | None:
    return next((number for number, line in lines if is_prose(line)), None)


def _without_buttons(lines: list[str]) -> list[str]:
    return [line for line in lines if len(line) > LABEL_CHARACTERS or plain(line) not in BUTTONS]


def _before_label(lines: list[str]) -> list[str]:
    return lines[: next((number for number, line in enumerate(lines) if line and _is_label(line)), len(lines))]


def _without_items(lines: list[str]) -> list[str]:
    """Leave out labels, and the items of a list below them."""
    kept = []
    is_below = False
    for line in lines:
        if line and _is_label(line):
            is_below = True
        elif is_below and (not line or _ITEM.match(line)):
            kept.append("")
        else:
            is_below = False
            kept.append(line)
    return kept


def _is_label(line: str) -> bool:
    """Whether a line is a label, or one that a title follows, as in "Lesen Sie auch: Der Hafen"."""
    if len(line) > REMARK_CHARACTERS:
        return False
    if len(line) <= LABEL_CHARACTERS and plain(line) in LABELS:
        return True
    titled = _TITLED.match(line)
    if titled is None:
        return False
    label = plain(titled[1])
    is_phrase = " " in label or len(label.encode("utf-8", "replace")) == 3 * len(label) >= 3 * IDEOGRAMS
    return is_phrase and label in LABELS


def _drop_rights(lines: list[str]) -> None:
    for number in range(max(len(lines) - LAST_LINES, 0), len(lines)):
        line = lines[number].strip().casefold()
        is_about_rights = line.startswith(RIGHTS_BEGIN) or line.rstrip(" .").endswith(RIGHTS_END)
        if is_about_rights and len(line) <= REMARK_CHARACTERS:
            lines[number] = ""
