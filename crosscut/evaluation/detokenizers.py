"""Conversion of WikiText's words, which are separated by spaces, to ordinary text (paper, section 4.2.1).

There are two detokenizers:

- `paper` applies the rules of the paper's authors. Later evaluations use the same rules. With GPT-2's tokenizer, the
  test set has 270,329 tokens, as in the paper. The paper calls its detokenizers invertible, but the authors' rules
  cannot be inverted. The rules treat every second apostrophe of the whole text as an opening quotation mark and the
  other apostrophes as closing quotation marks, and remove the spaces beside these marks.
- `invertible` loses no information: `restore` returns the original file byte by byte, so the probability of the text
  equals the probability of the words. If the words of a line could not be restored, the line is kept unchanged and
  marked with a tab at its start.
"""

import re
from collections.abc import Iterator
from types import MappingProxyType


def detokenize(text: str, detokenizer: str) -> str:
    """Convert a WikiText file to text with the detokenizer `paper` or `invertible`."""
    return by_the_paper(text) if detokenizer == "paper" else invertibly(text)


_IN_TURN = (
    ("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."),
    (" : ", ": "), (" ; ", "; "), (" . ", ". "), (" ! ", "! "), (" ? ", "? "), (" , ", ", "),
)  # fmt: skip
_PAIRS = tuple(
    (re.compile(rf"{first}\s*([^{last}]*?)\s*{last}"), rf"{first[-1]}\1{last[-1]}")
    for first, last in ((r"\(", r"\)"), (r"\[", r"\]"), ("{", "}"), ('"', '"'), ("'", "'"))
)
_AT_LAST = (
    ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°"), (" \n", "\n"), ("\n ", "\n"),
    (" N ", " 1 "), (" 's", "'s"),
)  # fmt: skip


def by_the_paper(text: str) -> str:
    """Strip leading and trailing whitespace from a text, and apply the rules of the paper's authors to the whole text,
    in the order in which the authors applied them.
    """
    text = text.strip()
    for old, new in _IN_TURN:
        text = text.replace(old, new)
    for pattern, new in _PAIRS:
        text = pattern.sub(new, text)
    for old, new in _AT_LAST:
        text = text.replace(old, new)
    return text


_VERBATIM = "\t"
_INNER = MappingProxyType({"@-@": "-", "@,@": ",", "@.@": "."})
_CLOSING = frozenset(",;:!?.)]}")
_OPENING = frozenset("([{")
_SUFFIX = re.compile(r"'[^\W\d_]")
"""Suffix that follows a word without a space, such as the end of `it's`."""
_ABBREVIATION = re.compile(
    r"(?:(?:[A-Z]\.)+|[eip]\.[ge]\.|Nos?\.|Col\.|St\.|vs\.|Gen\.|Dr\.|Mrs?\.|Ms\.|Sr\.|Bros\.|Capt\.|Maj\.|Lt\.|"
    r"Sgt\.|Rev\.|Prof\.|Gov\.|Sen\.|Mt\.|pp?\.|v\.|\.+)$"
)
"""Abbreviations: words whose final period does not end a sentence."""
_BETWEEN = re.compile(r"(?<=[^\s@])(-|(?<=\d)[.,](?=\d))(?=[^\s@])")
"""Hyphen within a word, or period or comma between digits. WikiText writes such a hyphen as ` @-@ `."""


def invertibly(text: str) -> str:
    """Convert a file to text from which `restore` can recover the file."""
    *lines, last = text.split("\n")
    return "\n".join([*map(_join_line, lines), _VERBATIM + last if last else last])


def restore(text: str) -> str:
    """Return the original file from a text that `invertibly` returned."""
    *lines, last = text.split("\n")
    return "\n".join([*map(_split_line, lines), last.removeprefix(_VERBATIM)])


def _join_line(line: str) -> str:
    """Convert a line to ordinary text, or mark it as unchanged if the conversion could not be undone."""
    if line == " ":
        return ""
    joined = "".join(_joined(line[1:-1].split(" ")))
    return joined if joined and _split_line(joined) == line else _VERBATIM + line


def _split_line(line: str) -> str:
    if line.startswith(_VERBATIM):
        return line.removeprefix(_VERBATIM)
    return f" {' '.join(_split(line))} " if line else " "


def _joined(words: list[str]) -> Iterator[str]:
    """Yield the words of a line, each preceded by a space where ordinary text has a space."""
    num_quotes, before, glued = 0, "", True
    for word in words:
        glue_next = word in _OPENING or word in _INNER
        if word == '"':
            num_quotes += 1
            glue_next = num_quotes % 2 == 1
            glued |= not glue_next
        heading = word == before == "="
        suffix = bool(before[-1:].isalpha() and _SUFFIX.match(word)) or (word == "'" and before[-1:] in ("s", "z", "x"))
        if word in _CLOSING or word in _INNER or heading or suffix:
            glued = True
        yield _INNER.get(word, word) if glued else f" {_INNER.get(word, word)}"
        before, glued = word, glue_next


def _split(line: str) -> Iterator[str]:
    """Undo `_joined`: yield the words of a line of ordinary text."""
    for piece in re.split(r'[ ]|(")', line):
        if piece == '"':
            yield piece
        elif piece:
            yield from _words(piece)


def _words(chunk: str) -> Iterator[str]:
    """Yield the words in a chunk. A chunk is the text between two spaces or quotation marks."""
    while chunk and chunk[0] in _OPENING:
        yield chunk[0]
        chunk = chunk[1:]
    tail = []
    while chunk and chunk[-1] in _CLOSING and not _ABBREVIATION.match(chunk):
        tail.append(chunk[-1])
        chunk = chunk[:-1]
    if set(chunk) == {"="}:
        yield from chunk
    elif chunk:
        yield from _inner_words(chunk)
    yield from reversed(tail)


def _inner_words(chunk: str) -> Iterator[str]:
    """Yield the words of a chunk whose brackets and final punctuation have been removed."""
    for piece in _BETWEEN.sub(r" @\1@ ", chunk).split(" "):
        word, apostrophe, suffix = piece.partition("'")
        yield from (word, apostrophe + suffix) if word and apostrophe else (piece,)
