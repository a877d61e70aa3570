"""Decode the bytes of web pages and emails. Their declared charset may be wrong or missing."""

import codecs
import re

from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

from crosscut.data.text.json_text import encodable

MAX_REPLACED = 0.05
"""Maximum share of undecodable characters in a text. A text with a larger share is rejected."""

_UTF16_OR_32 = ("utf-16", "utf-32", "utf16", "utf32")
_MULTIBYTE = (
    "big5",
    "cp932",
    "cp949",
    "euc",
    "gb",
    "hz",
    "iso2022",
    "iso-2022",
    "shift",
    "utf-7",
    "utf7",
    *_UTF16_OR_32,
)

_DECLARATION = re.compile(rb"(<meta\b[^>]*+)|\A\s*+<\?xml[^<>]*+", re.IGNORECASE)
_IN_META = re.compile(rb"\bcharset\s*+=\s*+(?:[\"']\s*+)?([\w.:-]+)", re.IGNORECASE)
_IN_XML = re.compile(rb"\bencoding\s*+=\s*+[\"']([\w.:-]+)", re.IGNORECASE)
_IN_PAGE_BYTES = 1024
"""Number of bytes at the beginning of a page that are searched for its charset declaration. HTML requires that the
declaration is within these bytes."""


def charset_in_page(data: bytes) -> str:
    """Return the charset that an HTML page declares for itself, or an empty text."""
    for tag in _DECLARATION.finditer(data, 0, _IN_PAGE_BYTES):
        found = (_IN_META if tag[1] else _IN_XML).search(tag[0])
        if found:
            name = found[1].decode("ascii", "replace").lower()
            # the declaration could not be found in a page of UTF-16
            return "utf-8" if name.startswith(_UTF16_OR_32) else name
    return ""


def decode(data: bytes, *declared: str) -> tuple[str, bool] | None:
    """Decode bytes. Returns the text, and whether a charset other than the first declared one was used.

    `declared` lists the declared charsets, such as those of the HTTP header and of the page itself. Empty names are
    ignored. Returns None if no charset fits.

    UTF-8 is tried before a declared single-byte charset, because non-ASCII bytes in another charset are hardly ever
    valid UTF-8. A multibyte charset is tried before a single-byte charset, which fits almost any bytes. Of two declared
    single-byte charsets that fit, the first is used, unless the bytes look like the second. If no declared charset
    fits, the charset is guessed from the bytes, and undecodable bytes become U+FFFD.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace"), False
    names = [name.strip().lower() for name in declared if name.strip()]
    for name, codec in _candidates(data, names):
        text = _strict(data, codec)
        if text is not None:
            is_first = not names or name == names[0] or "" != _standard(name) == _standard(names[0])
            return text, not (is_first or data.isascii())
    guessed = detect_encoding(data) or "cp1252"
    text = data.decode(guessed, "replace")
    return None if text.count("\ufffd") > MAX_REPLACED * len(text) else (text, bool(names))


def _candidates(data: bytes, names: list[str]) -> list[tuple[str, str]]:
    """List charsets in the order in which they are tried, each with its name and the name of its codec."""
    multibyte = [(name, name) for name in names if name.startswith(_MULTIBYTE)]
    single = [(name, _standard(name)) for name in names if not name.startswith(_MULTIBYTE)]
    single = [(name, codec) for name, codec in single if codec not in ("", "utf-8")]
    if len({codec for _, codec in single}) > 1 and detect_encoding(data) == single[1][1]:
        single.reverse()
    utf8 = [("utf-8", "utf-8-sig")]
    is_utf8 = any(_standard(name) == "utf-8" for name in names)
    is_multibyte = bool(multibyte) and multibyte[0][0] == names[0]
    if is_multibyte and not is_utf8 and (b"\0" in data or not names[0].startswith(_UTF16_OR_32)):
        return [multibyte[0], *utf8, *multibyte[1:], *single]
    return [*utf8, *multibyte, *single]


def _standard(name: str) -> str:
    """Return the HTML standard's name for a charset, or an empty text if the standard does not list the charset."""
    return map_encoding_to_html5(name, fallback_utf8=False) or ""


def _strict(data: bytes, charset: str) -> str | None:
    try:
        text = data.decode(charset)
    except (UnicodeError, LookupError):
        return None
    is_broken = charset.startswith(("utf-7", "utf7")) and not encodable(text)  # half of a surrogate pair
    return None if is_broken else text
