"""Decode the bytes of web pages and emails. Their declared charset may be wrong or missing."""

import codecs
import re
from collections.abc import Sequence
from typing import NamedTuple

from resiliparse.parse.encoding import detect_encoding

from crosscut.corpus.readers.labels import UNREADABLE, Charset, count_non_ascii, find_charset

MAX_REPLACED = 0.05
"""Maximum share of undecodable characters in a text. A text with a larger share is rejected."""
MAX_MISFITS, MAX_MISFITS_UTF8 = 0.02, 0.2
"""Maximum share of undecodable places among the non-ASCII bytes of a text that nearly fits a charset. Bytes of another
charset are hardly ever valid UTF-8, so UTF-8 may have more (docs/decisions/0067-charsets-of-the-web.md)."""

_UTF8 = Charset("utf-8")
_MARKS = {
    codecs.BOM_UTF8: Charset("utf-8-sig"),
    codecs.BOM_UTF32_LE: Charset("utf-32"),
    codecs.BOM_UTF32_BE: Charset("utf-32"),
    codecs.BOM_UTF16_LE: Charset("utf-16"),
    codecs.BOM_UTF16_BE: Charset("utf-16"),
}
"""Charsets by their byte-order marks. The mark of UTF-32 begins with that of UTF-16."""
_SHIFT = b"\x1b$"
"""Beginning of the sequences by which the charsets ISO-2022 switch to characters of two bytes."""

_COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
_DECLARATION = re.compile(rb"(<meta\b[^>]*+)|\A\s*+<\?xml[^<>]*+", re.IGNORECASE)
_IN_META = re.compile(rb"\bcharset\s*+=\s*+(?:[\"']\s*+)?([\w.:-]+)", re.IGNORECASE)
_IN_XML = re.compile(rb"\bencoding\s*+=\s*+[\"']([\w.:-]+)", re.IGNORECASE)
_IN_PAGE_BYTES = 1024
"""Number of bytes at the beginning of a page that are searched for its charset declaration. HTML requires that the
declaration is within these bytes."""


class Decoded(NamedTuple):
    """Text of bytes whose charset was found."""

    text: str

    is_other: bool
    """Whether another charset than the first declared one was used."""

    num_replaced: int = 0
    """Number of places that the charset cannot decode."""


def charset_in_page(data: bytes) -> str:
    """Return the charset that an HTML page declares for itself, or an empty text."""
    for tag in _DECLARATION.finditer(_COMMENT.sub(b"", data[:_IN_PAGE_BYTES])):
        found = (_IN_META if tag[1] else _IN_XML).search(tag[0])
        if found:
            name = found[1].decode("ascii", "replace").lower()
            charset = find_charset(name)
            if charset and charset.is_wide:  # the declaration could not be found in a page of UTF-16
                return "utf-8"
            return "windows-1252" if name == "x-user-defined" else name
    return ""


def decode(data: bytes, *declared: str) -> Decoded | None:
    """Decode bytes. `declared` lists the labels of the declared charsets, such as those of the HTTP header and of the
    page itself. Empty labels are ignored. Returns None if no charset fits.

    A byte-order mark decides. UTF-8 is tried before a declared single-byte charset, because non-ASCII bytes in another
    charset are hardly ever valid UTF-8. A multibyte charset is tried before a single-byte charset, which fits almost
    any bytes. Of two declared single-byte charsets that fit, the first is used, unless the bytes look like the second.
    If no charset fits, a charset that nearly fits is used, otherwise the one that the bytes look like. U+FFFD replaces
    undecodable bytes.
    """
    labels = [label.strip().lower() for label in declared if label.strip()]
    if any(label in UNREADABLE for label in labels) and _SHIFT in data:
        return None
    marked = marked_charset(data)
    if marked:
        return _unless_broken(*marked.decode(data), is_other=False)
    found = [find_charset(label) for label in labels]
    charsets = [charset for charset in found if charset]
    misfits = []
    for charset in _candidates(data, charsets):
        text, num_replaced = charset.decode(data)
        is_other = bool(found) and charset != found[0] and not data.isascii()
        if not num_replaced:
            return Decoded(text, is_other)
        misfits.append((charset, text, num_replaced, is_other))
        if _is_shifted(charset, data):  # the bytes are ASCII, which would fit each charset
            return _unless_broken(text, num_replaced, is_other=is_other)
    non_ascii = count_non_ascii(data)
    for charset, text, num_replaced, is_other in misfits:
        if num_replaced <= non_ascii * (MAX_MISFITS_UTF8 if charset == _UTF8 else MAX_MISFITS):
            return _unless_broken(text, num_replaced, is_other=is_other)
    guessed = _guess(data) or Charset("cp1252")
    return _unless_broken(*guessed.decode(data), is_other=bool(found) and guessed != found[0])


def marked_charset(data: bytes) -> Charset | None:
    """Return the charset that a byte-order mark declares."""
    return next((charset for mark, charset in _MARKS.items() if data.startswith(mark)), None)


def _unless_broken(text: str, num_replaced: int, *, is_other: bool) -> Decoded | None:
    return None if num_replaced > MAX_REPLACED * len(text) else Decoded(text, is_other, num_replaced)


def _candidates(data: bytes, charsets: Sequence[Charset]) -> list[Charset]:
    """List charsets in the order in which they are tried."""
    multibyte = [charset for charset in charsets if charset.is_multibyte]
    single = [charset for charset in charsets if not charset.is_multibyte and charset != _UTF8]
    if len(set(single)) > 1 and _guess(data) == single[1]:
        single.reverse()
    if not multibyte and data.isascii() and (b"\x1b$B" in data or b"\x1b$@" in data):
        return [Charset("iso2022_jp"), _UTF8]
    is_first = bool(multibyte) and charsets[0] == multibyte[0]
    if is_first and _UTF8 not in charsets and (b"\0" in data or not multibyte[0].is_wide):
        return [multibyte[0], _UTF8, *multibyte[1:], *single]
    return [_UTF8, *multibyte, *single]


def _is_shifted(charset: Charset, data: bytes) -> bool:
    return charset.codec.startswith("iso2022") and _SHIFT in data and data.isascii()


def _guess(data: bytes) -> Charset | None:
    return find_charset(detect_encoding(data) or "")
