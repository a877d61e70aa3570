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

_UTF8, _CP1252 = Charset("utf-8"), Charset("cp1252")
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
_SURE = 8
"""Number of non-ASCII bytes from which valid UTF-8 is taken for UTF-8, whatever was declared. Four characters of
GB 18030 are valid UTF-8 with a probability of 0.0008, and UTF-8 is valid GB 18030 with one of a half."""
_WIDE_NULS = 0.01
"""Minimum share of NUL in text of UTF-16 and UTF-32 that has spaces or markup."""

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
    unknown = ""
    for tag in _DECLARATION.finditer(_COMMENT.sub(b"", data[:_IN_PAGE_BYTES])):
        found = (_IN_META if tag[1] else _IN_XML).search(tag[0])
        if found:
            name = found[1].decode("ascii", "replace").lower()
            charset = find_charset(name)
            if charset or name in UNREADABLE:
                # the declaration could not be found in a page of UTF-16
                return "utf-8" if charset and charset.is_wide else name
            unknown = unknown or name
    return unknown


def decode(data: bytes, *declared: str) -> Decoded | None:
    """Decode bytes. `declared` lists the labels of the declared charsets, such as those of the HTTP header and of the
    page itself. Empty labels are ignored. Returns None if no charset fits.

    A byte-order mark decides, unless the bytes after it are in another charset. So do escape sequences and NUL, if a
    charset with them is declared. UTF-8 is tried before a declared charset, because bytes in another charset are hardly
    ever valid UTF-8, except for a few characters. A multibyte charset is tried before a single-byte charset, which fits
    almost any bytes. Of two declared single-byte charsets that fit, the first is used, unless the bytes look like the
    second. A charset that nearly fits comes before single-byte charsets. If no charset fits, the bytes are decoded as
    the one that they look like. U+FFFD replaces undecodable bytes.
    """
    labels = [label.strip().lower() for label in declared if label.strip()]
    if any(label in UNREADABLE for label in labels) and _SHIFT in data:
        return None
    marked = marked_charset(data)
    if marked:
        decoded = _unless_broken(*marked.decode(data), is_other=False)
        if decoded:
            return decoded
        data = data.removeprefix(codecs.BOM_UTF8)
    found = [find_charset(label) for label in labels]
    non_ascii = count_non_ascii(data)
    nearly = None
    for charset in _candidates(data, [charset for charset in found if charset]):
        if nearly and not charset.is_multibyte:
            break
        text, num_replaced = charset.decode(data)
        is_other = bool(found) and charset != found[0] and not text.isascii()
        is_utf8 = charset == _UTF8 and num_replaced <= MAX_MISFITS_UTF8 * non_ascii
        if not num_replaced or is_utf8 or _is_shown(charset, data):
            return _unless_broken(text, num_replaced, is_other=is_other)
        if num_replaced <= MAX_MISFITS * non_ascii:
            nearly = nearly or _unless_broken(text, num_replaced, is_other=is_other)
    if nearly:
        return nearly
    guessed = _guess(data) or _CP1252
    if guessed == _UTF8 and _UTF8.decode(data)[1] >= non_ascii / 2:  # the detector takes a few quotes for UTF-8
        guessed = _CP1252
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
    non_ascii = count_non_ascii(data)
    if not multibyte and (b"\x1b$B" in data or b"\x1b$@" in data) and non_ascii <= MAX_REPLACED * len(data):
        escaping = Charset("iso2022_jp")
        return [_UTF8, escaping, *single] if non_ascii else [escaping, _UTF8]
    is_short = non_ascii < _SURE and _UTF8 not in charsets
    early = [one for one in multibyte[:1] if _is_shown(one, data) or (is_short and not one.is_wide)]
    return [*early, _UTF8, *multibyte, *single]


def _is_shown(charset: Charset, data: bytes) -> bool:
    """Whether bytes, which may all be ASCII, show that they are in this charset."""
    if charset.is_wide:
        return data.count(0) > _WIDE_NULS * len(data)
    if charset.codec.startswith("iso2022"):
        return _SHIFT in data or b"\x1b(" in data
    return charset.codec == "hz" and b"~{" in data


def _guess(data: bytes) -> Charset | None:
    return find_charset(detect_encoding(data) or "")
