"""Join the lines of hard-wrapped paragraphs, as the paper does for CC-Stories (4.1.2).

A wrapped line ends because the next word does not fit. A newline is therefore removed if the first word of the next
line would exceed the width of the text. If the word would fit, the newline is kept, because the line then ends for
another reason, as in verse, addresses and tables of contents. If most lines of a text end with the end of a sentence,
each line is a paragraph, and no newline is removed. In case of doubt, the newline is kept.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from crosscut.data.text.terminals import ends_sentence

JOIN_LINES_VERSION = 2
"""Version of `join_lines`. Increase it with every change that alters the resulting texts. Version 1 joined the lines of
short texts in which each line is a paragraph."""

MIN_WIDTH = 40
"""Minimum width of hard-wrapped text, in characters. The lines of narrower texts are not joined."""

MAX_WIDTH = 130
"""Maximum width of hard-wrapped text, in characters. A longer line counts as a whole paragraph."""

SLACK = 6
"""Number of characters by which a line may fall short of the width of the text and still count as full. Some programs
prefer lines of even length to full lines."""

MIN_FULL = 0.6
"""Minimum share of full lines in hard-wrapped text. The last line of each paragraph is not counted."""

MIN_CAPITALS = 0.75
"""If at least this share of the lines of a block begin with a capital letter, the block counts as verse or as a list.
The lines of verse and lists are not joined."""

MAX_SENTENCE_ENDS = 0.5
"""If more than this share of the lines of a text ends with the end of a sentence, the text is not hard-wrapped. The
last line of each paragraph is not counted."""

_BLANK = re.compile(r"\n(?:[^\S\n]*\n)+")
_ITEM = re.compile(r"\s*(?:[-*+•·‣>#|]|\(?(?:\d{1,3}|[a-zA-Z]|[ivxlIVXL]{1,5})[.)])(?:\s|$)")
_COLUMNS = re.compile(r"\S(?:\s{3,}|\t|\s*\|\s)\S")
_RULE = re.compile(r"\W*$")
_NO_BLANK_AFTER = ("-", "\N{EM DASH}", "\N{EN DASH}")
_WORD = re.compile(r"[^\W\d_]+")
_UNSPACED = re.compile("[\u0e00-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uff9f]")
"""Characters of scripts without spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, Japanese and Chinese."""


def join_lines(text: str) -> str:
    """Replace the newlines inside hard-wrapped paragraphs with spaces.

    Newlines stay at blank lines, in verse, lists, headings and tables, and at indented lines such as code. A word that
    is split at a hyphen is joined if the text contains the whole word elsewhere. If not, the hyphen stays, because the
    word may be spelled with a hyphen, as in `self-taught`.
    """
    if "\n" not in text:
        return text
    blocks = [block.split("\n") for block in _BLANK.split(text)]
    between = [*_BLANK.findall(text), ""]
    width = _width(blocks)
    known = frozenset(_WORD.findall(text.lower())) if "-\n" in text else frozenset()
    joined = [_join(lines, width, _own_width(lines), known) for lines in blocks]
    return "".join(part for pair in zip(joined, between, strict=True) for part in pair)


def _width(blocks: Sequence[Sequence[str]]) -> int:
    """Width to which a text is wrapped, or 0 if the text is not wrapped."""
    pairs = [(line, after) for lines in blocks for line, after in _pairs(lines)]
    lengths = sorted(len(line) for line, _ in pairs)
    if not lengths:
        return 0
    width = lengths[int(0.9 * (len(lengths) - 1))]
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        return 0
    full = sum(_is_full(line, after, width) for line, after in pairs)
    is_wrapped = full >= MIN_FULL * len(pairs) and not _is_verse([after for _, after in pairs])
    return width if is_wrapped and not _are_sentences([line for line, _ in pairs]) else 0


def _own_width(lines: Sequence[str]) -> int:
    """Width of a block with its own wrapping, such as a quotation, or 0 if the block shows no clear width."""
    if len(lines) < 4 or _is_verse(lines[1:]):
        return 0
    width = max(map(len, lines[:-1]))
    full = MIN_WIDTH <= width <= MAX_WIDTH and all(_is_full(line, after, width) for line, after in _pairs(lines))
    return width if full and not _are_sentences(lines[:-1]) else 0


def _pairs(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    stripped = [line.rstrip() for line in lines]
    return pairwise(stripped)


def _is_full(line: str, after: str, width: int) -> bool:
    first, _, _ = after.lstrip().partition(" ")
    return len(line) + 1 + len(first) > width - SLACK


def _is_verse(lines: Sequence[str]) -> bool:
    return len(lines) > 2 and sum(line.lstrip()[:1].isupper() for line in lines) >= MIN_CAPITALS * len(lines)


def _are_sentences(lines: Sequence[str]) -> bool:
    return sum(map(ends_sentence, lines)) > MAX_SENTENCE_ENDS * len(lines)


def _join(lines: Sequence[str], width: int, own: int, known: frozenset[str]) -> str:
    widths = [one for one in (width, own) if one]
    if not widths or _is_verse(lines[1:]):
        return "\n".join(lines)
    pieces = [lines[0].rstrip()]
    for line, after in _pairs(lines):
        goes_on = len(line) <= MAX_WIDTH and any(_is_full(line, after, one) for one in widths)
        if goes_on and not _stands_alone(line, after):
            after = after.lstrip()
            if _is_broken(line, after, known):
                pieces[-1] = pieces[-1][:-1]
            glued = line.endswith(_NO_BLANK_AFTER) and not line[-2:-1].isspace()
            pieces += ("" if glued else " ", after)
        else:
            pieces += ("\n", after)
    return "".join(pieces)


def _stands_alone(line: str, after: str) -> bool:
    """Whether the newline between `line` and `after` must stay, because `after` does not continue `line`, or because
    one of the two lines is not prose.
    """
    indent, indent_after = (len(one) - len(one.lstrip()) for one in (line, after))
    return bool(
        _ITEM.match(after)
        or " " not in line.strip()  # an entry of a list of names
        or _is_unspaced(line, after)  # a space between the lines would be wrong
        or (indent_after > indent and not _ITEM.match(line))
        or indent_after >= 4 > indent
        or "\t" in line[:1]
        or _has_columns(line)
        or _has_columns(after)
        or _RULE.match(line)
        or _RULE.match(after)
    )


def _is_unspaced(line: str, after: str) -> bool:
    """Whether the end of `line` or the beginning of `after` is in a script that puts no spaces between words."""
    is_ascii = line.isascii() and after.isascii()
    return not is_ascii and any(map(_UNSPACED.match, (line[-1:], after.lstrip()[:1])))


def _has_columns(line: str) -> bool:
    return any(mark in line for mark in ("   ", "\t", "|")) and _COLUMNS.search(line) is not None


def _is_broken(line: str, after: str, known: frozenset[str]) -> bool:
    """Whether the hyphen at the end of a line splits a word that occurs elsewhere in the text without a hyphen."""
    if not line.endswith("-"):
        return False
    start = _WORD.match(after)
    end = _WORD.fullmatch(line[:-1].rpartition(" ")[2])
    return bool(start and end and start[0].islower() and (end[0] + start[0]).lower() in known)
