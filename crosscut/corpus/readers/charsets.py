"""Decode the bytes of web pages and mails, whose declared charset may be wrong or missing."""

import codecs

from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

MAX_REPLACED = 0.05
"""Maximum share of undecodable characters in a text. A text with a larger share is rejected."""

_WIDE = ("utf-16", "utf-32")
_MULTIBYTE = ("big5", "cp932", "cp949", "euc", "gb", "hz", "iso2022", "iso-2022", "shift", "utf-7", "utf7", *_WIDE)


def decode(data: bytes, declared: str = "") -> tuple[str, bool] | None:
    """Decode bytes. Returns the text, and whether a charset other than the declared one was used.

    Returns None if no charset fits. UTF-8 is tried before a declared single-byte charset, because non-ASCII bytes in
    another charset are hardly ever valid UTF-8. If neither charset fits, the charset is guessed from the bytes, and
    undecodable bytes become U+FFFD.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace"), False
    name = declared.strip().lower()
    known = map_encoding_to_html5(name, fallback_utf8=False) or "" if name else ""
    multibyte = name.startswith(_MULTIBYTE)
    for charset in (name if multibyte else "utf-8-sig", "utf-8-sig" if multibyte else known):
        text = _strict(data, charset)
        if text is not None:
            is_declared = not name or data.isascii() or charset != "utf-8-sig" or known == "utf-8"
            return text, not is_declared
    guessed = detect_encoding(data) or "cp1252"
    text = data.decode(guessed, "replace")
    return None if text.count("\ufffd") > MAX_REPLACED * len(text) else (text, bool(name))


def _strict(data: bytes, charset: str) -> str | None:
    try:
        return data.decode(charset) if charset else None
    except (UnicodeError, LookupError):
        return None
