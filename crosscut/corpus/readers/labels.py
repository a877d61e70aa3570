"""Charsets by the labels of web pages and emails, decoded as browsers do (https://encoding.spec.whatwg.org).

Many labels mean more than they say: `shift_jis` is Windows' code page 932, and `gb2312` is GB 18030. Python's codecs
lack some characters of these charsets, and map others differently. `Charset.decode` mends both.
"""

import codecs
import re
from dataclasses import dataclass
from encodings import normalize_encoding
from encodings.aliases import aliases
from functools import lru_cache

from resiliparse.parse.encoding import map_encoding_to_html5

from crosscut.data.text.json_text import encodable

REPLACEMENT = "\ufffd"

_WIDER = {"big5": "big5hkscs", "euc_kr": "cp949", "gbk": "gb18030", "iso8859-11": "cp874", "shift_jis": "cp932"}
"""Python's codecs of the charsets to which resiliparse gives a narrower name."""
_LABELS = {
    "csiso2022kr": "iso2022_kr",
    "hz-gb-2312": "hz",
    "iso-2022-kr": "iso2022_kr",
    "x-mac-cyrillic": "mac-cyrillic",
    "x-mac-ukrainian": "mac-cyrillic",
    "x-user-defined": "cp1252",
}
"""Codecs of the standard's labels that resiliparse lacks. Browsers refuse HZ and ISO-2022-KR, because they can hide a
script. Scripts are not run here."""
UNREADABLE = ("iso-2022-cn", "iso-2022-cn-ext")
"""Labels of charsets that neither browsers nor Python decode."""

_MULTIBYTE = ("big5", "cp932", "cp949", "euc", "gb", "hz", "iso2022", "johab", "shift", "utf-16", "utf-32", "utf-7")
_PYTHON = (*_MULTIBYTE, "ascii", "cp", "hp_roman8", "iso8859", "koi8", "kz1048", "latin_1", "mac", "ptcp154", "utf")
_EBCDIC = ("cp037", "cp1026", "cp1140", "cp273", "cp424", "cp500")

_CHANGES = {
    "big5hkscs": (
        "\u2022\uff64\u203e\u223c\u2641\u2609\xa5\xa2\xa3",
        "\u2027\ufe51\xaf\uff5e\u2295\u2299\uffe5\uffe0\uffe1",
    ),
    "cp932": ("\uf8f0\uf8f1\uf8f2\uf8f3", REPLACEMENT * 4),
    "euc_jp": ("\u301c\u2016\u2212\xa2\xa3\xac", "\uff5e\u2225\uff0d\uffe0\uffe1\uffe2"),
    "gb18030": (
        (
            "\ue5e5\ue78d\ue78e\ue78f\ue790\ue791\ue792\ue793\ue794\ue795\ue796"
            "\ue7c7\ue81e\ue826\ue82b\ue82c\ue832\ue843\ue854\ue864"
        ),
        (
            "\u3000\ufe10\ufe12\ufe11\ufe13\ufe14\ufe15\ufe16\ufe17\ufe18\ufe19"
            "\u1e3f\u9fb4\u9fb5\u9fb6\u9fb7\u9fb8\u9fb9\u9fba\u9fbb"
        ),
    ),
    "koi8-u": ("\u255d\u256c", "\u045e\u040e"),
}
"""Characters of Python's codec, and the characters that browsers show in their place."""

_FEW, _FOREIGN = 1000, 0.25
"""Number of undecodable places that are looked at one by one, because this takes about a second for a million, and
their share among the non-ASCII bytes above which a longer text is in another charset."""
_CONTROLS = re.compile("[\x80-\x9f]")
_ESCAPE = re.compile(rb"\x1b(\$[@B]|\([BIJ])")
"""Sequences by which ISO-2022-JP switches between character sets."""
_HIGH = bytes(byte | 0x80 if 0x20 < byte < 0x7F else byte if byte < 0x80 else 0xFF for byte in range(256))
"""Bytes of ISO-2022-JP as bytes of EUC-JP. Bytes of eight bits are invalid."""
_KATAKANA = "".join(
    chr(byte + 0xFF40 if 0x20 < byte < 0x60 else byte if byte <= 0x20 else 0xFFFD) for byte in range(256)
)
"""Characters of the bytes after ESC ( I."""


@dataclass(frozen=True)
class Charset:
    """Charset of the web, or another charset that Python decodes. `codec` is the name of Python's codec."""

    codec: str

    @property
    def is_multibyte(self) -> bool:
        """Whether some characters have several bytes, in another charset than UTF-8."""
        return self.codec.startswith(_MULTIBYTE)

    @property
    def is_wide(self) -> bool:
        """Whether each character has at least two bytes."""
        return self.codec.startswith(("utf-16", "utf-32"))

    def decode(self, data: bytes) -> tuple[str, int]:
        """Decode bytes. Returns the text, and the number of its undecodable places. U+FFFD stands in these places. An
        unused byte of a single-byte charset becomes a control character, as in browsers, and is counted as well.
        """
        if self.codec == "iso2022_jp":
            return _decode_iso2022_jp(data)
        if self.codec == "euc_jp":
            data = data.replace(b"\x8f\xa2\xb7", b"\xa1\xc1")  # Python's codec has an ASCII tilde for the wide one
        codec = "utf-8-sig" if self.codec == "utf-8" else self.codec
        try:
            text, num_unused = data.decode(codec), 0
            num_own = text.count(REPLACEMENT)
        except UnicodeDecodeError:
            text = data.decode(codec, "replace")
            if text.count(REPLACEMENT) <= max(_FEW, _FOREIGN * count_non_ascii(data)):
                text = data.decode(codec, _HANDLER)
            num_own = data.count(REPLACEMENT.encode()) if codec == "utf-8-sig" else 0  # those of the author
            num_unused = 0 if self.is_multibyte or codec.startswith("utf") else len(_CONTROLS.findall(text))
        if codec == "utf-7" and not encodable(text):  # half of a surrogate pair
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        for before, after in zip(*_CHANGES.get(self.codec, ("", "")), strict=True):
            text = text.replace(before, after)
        return text, text.count(REPLACEMENT) - num_own + num_unused


@lru_cache(maxsize=1000)
def find_charset(label: str) -> Charset | None:
    """Return the charset with this label. Labels that are not in the standard are looked up among Python's names."""
    label = label.strip().lower()
    if not label.isascii():
        return None
    codec = _LABELS.get(label) or map_encoding_to_html5(label, fallback_utf8=False)
    if not codec:
        name = normalize_encoding(label)
        name = aliases.get(name, name)
        if name not in aliases.values() or not name.startswith(_PYTHON) or name in _EBCDIC:
            return None
        codec = codecs.lookup(name).name
        codec = map_encoding_to_html5(codec, fallback_utf8=False) or codec
    codec = codecs.lookup(codec).name
    return Charset(_WIDER.get(codec, codec))


def count_non_ascii(data: bytes) -> int:
    """Return the number of bytes that are not ASCII."""
    return len(data.translate(None, bytes(range(0x80))))


def _decode_iso2022_jp(data: bytes) -> tuple[str, int]:
    """Decode ISO-2022-JP with the characters of vendors, such as circled numbers, which Python's codec lacks."""
    first, *parts = _ESCAPE.split(data)
    texts = [first.decode("ascii", "replace")]
    for escape, part in zip(parts[::2], parts[1::2], strict=True):
        if escape.startswith(b"$"):
            texts.append(Charset("euc_jp").decode(part.translate(_HIGH))[0])
        elif escape == b"(I":
            texts.append("".join(_KATAKANA[byte] for byte in part))
        else:
            text = part.decode("ascii", "replace")
            texts.append(text.replace("\\", "\xa5").replace("~", "\u203e") if escape == b"(J" else text)
    text = "".join(texts).replace("\x1b", REPLACEMENT)
    return text, text.count(REPLACEMENT)


def _mend(error: UnicodeError) -> tuple[str, int]:
    """Return the text of bytes that Python's codec cannot decode, and the position after them."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    codec, start = error.encoding, error.start
    lead, trail, last = (*error.object[start : start + 3], 0, 0)[:3]
    if codec == "charmap":
        return chr(lead) if lead < 0xA0 else REPLACEMENT, start + 1
    if codec == "gb18030" and lead == 0x80:
        return "\u20ac", start + 1
    if codec.startswith(_MULTIBYTE) and not codec.startswith(("utf", "iso2022", "hz")):
        is_euc = codec == "euc_jp"
        is_lead = lead in (0x8E, 0x8F) or 0xA0 < lead < 0xFF if is_euc else 0x80 < lead < 0xFF
        is_pair = is_lead and trail >= 0x80
        is_triple = is_euc and lead == 0x8F and 0xA0 < trail < 0xFF and last >= 0x80
        mended = _vendor_character(lead, trail) if is_euc and is_pair else ""
        return mended or REPLACEMENT, start + 1 + is_pair + is_triple
    return REPLACEMENT, error.end


def _vendor_character(lead: int, trail: int) -> str:
    """Return the character of two bytes of EUC-JP by the table of code page 932, which has the same rows."""
    row, cell = lead - 0xA1, trail - 0xA1
    if min(row, cell) < 0 or cell > 93:
        return ""
    place = cell + (0x9F if row % 2 else 0x40 if cell < 63 else 0x41)
    text = bytes([row // 2 + (0x81 if row < 62 else 0xC1), place]).decode("cp932", "replace")
    return text if len(text) == 1 and text != REPLACEMENT else ""


_HANDLER = "crosscut-charset"
codecs.register_error(_HANDLER, _mend)
