"""Labels of the encoding standard, and texts that Python's codecs of the same names cannot read."""

import base64
from typing import Any

import pytest

from crosscut.corpus.readers.charsets import charset_in_page, decode
from crosscut.corpus.readers.labels import find_charset

STANDARD = """
utf-8: unicode-1-1-utf-8 unicode11utf8 unicode20utf8 utf-8 utf8 x-unicode20utf8
ibm866: 866 cp866 csibm866 ibm866
iso-8859-2: csisolatin2 iso-8859-2 iso-ir-101 iso8859-2 iso88592 iso_8859-2 iso_8859-2:1987 l2 latin2
iso-8859-3: csisolatin3 iso-8859-3 iso-ir-109 iso8859-3 iso88593 iso_8859-3 iso_8859-3:1988 l3 latin3
iso-8859-4: csisolatin4 iso-8859-4 iso-ir-110 iso8859-4 iso88594 iso_8859-4 iso_8859-4:1988 l4 latin4
iso-8859-5: csisolatincyrillic cyrillic iso-8859-5 iso-ir-144 iso8859-5 iso88595 iso_8859-5 iso_8859-5:1988
iso-8859-6: arabic asmo-708 csiso88596e csiso88596i csisolatinarabic ecma-114 iso-8859-6 iso-8859-6-e iso-8859-6-i
  iso-ir-127 iso8859-6 iso88596 iso_8859-6 iso_8859-6:1987
iso-8859-7: csisolatingreek ecma-118 elot_928 greek greek8 iso-8859-7 iso-ir-126 iso8859-7 iso88597 iso_8859-7
  iso_8859-7:1987 sun_eu_greek
iso-8859-8: csiso88598e csisolatinhebrew hebrew iso-8859-8 iso-8859-8-e iso-ir-138 iso8859-8 iso88598 iso_8859-8
  iso_8859-8:1988 visual
iso-8859-8-i: csiso88598i iso-8859-8-i logical
iso-8859-10: csisolatin6 iso-8859-10 iso-ir-157 iso8859-10 iso885910 l6 latin6
iso-8859-13: iso-8859-13 iso8859-13 iso885913
iso-8859-14: iso-8859-14 iso8859-14 iso885914
iso-8859-15: csisolatin9 iso-8859-15 iso8859-15 iso885915 iso_8859-15 l9
iso-8859-16: iso-8859-16
koi8-r: cskoi8r koi koi8 koi8-r koi8_r
koi8-u: koi8-ru koi8-u
macintosh: csmacintosh mac macintosh x-mac-roman
windows-874: dos-874 iso-8859-11 iso8859-11 iso885911 tis-620 windows-874
windows-1250: cp1250 windows-1250 x-cp1250
windows-1251: cp1251 windows-1251 x-cp1251
windows-1252: ansi_x3.4-1968 ascii cp1252 cp819 csisolatin1 ibm819 iso-8859-1 iso-ir-100 iso8859-1 iso88591 iso_8859-1
  iso_8859-1:1987 l1 latin1 us-ascii windows-1252 x-cp1252
windows-1253: cp1253 windows-1253 x-cp1253
windows-1254: cp1254 csisolatin5 iso-8859-9 iso-ir-148 iso8859-9 iso88599 iso_8859-9 iso_8859-9:1989 l5 latin5
  windows-1254 x-cp1254
windows-1255: cp1255 windows-1255 x-cp1255
windows-1256: cp1256 windows-1256 x-cp1256
windows-1257: cp1257 windows-1257 x-cp1257
windows-1258: cp1258 windows-1258 x-cp1258
x-mac-cyrillic: x-mac-cyrillic x-mac-ukrainian
gbk: chinese csgb2312 csiso58gb231280 gb2312 gb_2312 gb_2312-80 gbk iso-ir-58 x-gbk
gb18030: gb18030
big5: big5 big5-hkscs cn-big5 csbig5 x-x-big5
euc-jp: cseucpkdfmtjapanese euc-jp x-euc-jp
iso-2022-jp: csiso2022jp iso-2022-jp
shift_jis: csshiftjis ms932 ms_kanji shift-jis shift_jis sjis windows-31j x-sjis
euc-kr: cseuckr csksc56011987 euc-kr iso-ir-149 korean ks_c_5601-1987 ks_c_5601-1989 ksc5601 ksc_5601 windows-949
utf-16be: unicodefffe utf-16be
utf-16le: csunicode iso-10646-ucs-2 ucs-2 unicode unicodefeff utf-16 utf-16le
x-user-defined: x-user-defined
replacement: csiso2022kr hz-gb-2312 iso-2022-cn iso-2022-cn-ext iso-2022-kr replacement
"""
"""Labels of each charset in the standard (https://encoding.spec.whatwg.org/#names-and-labels)."""
CODECS = {
    "big5": "big5hkscs",
    "euc-jp": "euc_jp",
    "euc-kr": "cp949",
    "gbk": "gb18030",
    "ibm866": "cp866",
    "iso-2022-jp": "iso2022_jp",
    "iso-8859-8-i": "iso8859-8",
    "macintosh": "mac-roman",
    "shift_jis": "cp932",
    "utf-16be": "utf-16-be",
    "utf-16le": "utf-16-le",
    "windows-874": "cp874",
    "x-mac-cyrillic": "mac-cyrillic",
    "x-user-defined": "cp1252",
}
"""Python's codecs of the charsets that are not named as in the standard, or whose codec is wider than the name."""
REPLACED = {"csiso2022kr": "iso2022_kr", "hz-gb-2312": "hz", "iso-2022-kr": "iso2022_kr"}
"""Labels that browsers refuse, with the codecs that read them here."""


def labels() -> list[tuple[str, str]]:
    lines = STANDARD.replace("\n  ", " ").strip().splitlines()
    return [(label, line.split(": ")[0]) for line in lines for label in line.split(": ")[1].split()]


def test_labels_are_those_of_the_standard() -> None:
    assert len(labels()) == 228
    for label, name in labels():
        charset = find_charset(f" {label.upper()}\n")
        if name == "replacement":
            assert (charset.codec if charset else "") == REPLACED.get(label, ""), label
        else:
            codec = CODECS.get(name, name.replace("windows-", "cp").replace("iso-8859-", "iso8859-"))
            assert charset is not None, label
            assert charset.codec == codec, label


@pytest.mark.parametrize(
    ("label", "codec"),
    [("latin-1", "cp1252"), ("cp850", "cp850"), ("uhc", "cp949"), ("eucjp", "euc_jp"), ("utf_8", "utf-8")],
)
def test_other_names_are_those_of_python(label: str, codec: str) -> None:
    charset = find_charset(label)
    assert charset is not None
    assert charset.codec == codec


@pytest.mark.parametrize(
    "label", ["", "rot13", "base64", "unicode_escape", "idna", "cp500", "no-such", "é", "\udce9", "x" * 10**5]
)
def test_names_that_are_no_charsets_are_unknown(label: str) -> None:
    assert find_charset(label) is None


SAMPLES = [
    ("shift_jis", "cp932", "①株式会社㈱髙島屋"),
    ("euc-kr", "cp949", "똠방각하 펲시콜라"),
    ("ks_c_5601-1987", "cp949", "똠방각하 펲시콜라"),
    ("big5", "big5hkscs", "香港嘅嘢啲咗"),
    ("tis-620", "cp874", "ภาษาไทย “อ้างอิง” €"),
    ("gb2312", "gb18030", "朱镕基总理 囍"),
    ("iso-8859-1", "cp1252", "“café” • 5 €"),
    ("iso-8859-9", "cp1254", "“İstanbul” • 5 €"),
    ("x-mac-cyrillic", "mac-cyrillic", "Привет, мир"),
    ("koi8-u", "koi8-u", "Українська мова є ґанок"),
    ("utf-16", "utf-16-le", "déjà vu"),
    ("iso-2022-kr", "iso2022_kr", "한국어 문장"),
    ("hz-gb-2312", "hz", "这是中文"),
]


@pytest.mark.parametrize(("label", "codec", "text"), SAMPLES)
def test_label_means_what_browsers_take_it_for(label: str, codec: str, text: str) -> None:
    assert decode(text.encode(codec), label) == (text, False, 0)


def vendor_texts() -> list[tuple[str, bytes, str]]:
    """Return texts with characters that Python's codecs lack or map otherwise, by label."""
    rows = "名①㈱～－∥￢髙".encode("cp932")  # noqa: RUF001 - characters of vendors
    pairs = [rows[at : at + 2] for at in range(0, len(rows), 2)]
    euc = b"".join(bytes([*_to_euc(*pair)]) for pair in pairs)
    text = "名①㈱～－∥￢髙"  # noqa: RUF001 - as above
    return [
        ("euc-jp", euc, text),
        ("iso-2022-jp", b"a\x1b$B" + bytes(byte & 0x7F for byte in euc[:-2]) + b"\x1b(B\n", "a" + text[:-1] + "\n"),
        ("iso-2022-jp", b"\x1b(I1\x1b(J\\5\x1b(B\\", "ｱ¥5\\"),
        ("gb2312", "中文".encode("gb18030") + b"\x80\xa6\xd9", "中文€\ufe10"),
        ("big5", "中文".encode("big5") + b"\xa1\x45\xa2\x46", "中文\u2027￠"),
        ("koi8-u", "ў".encode("cp1251").replace(b"\xa2", b"\xae"), "ў"),
        ("euc-jp", b"\xa2\xaf \x8e\x80 \x8f\xa1\xa1 \x8f\xa2\xb7", "\ufffd \ufffd \ufffd \uff5e"),
        ("iso-2022-jp", b"\x1b$B\x22\x2f\x1b(I\x60\x61\x1b(B", "\ufffd\ufffd\ufffd"),
    ]


def _to_euc(lead: int, trail: int) -> tuple[int, int]:
    row = (lead - (0x81 if lead < 0xA0 else 0xC1)) * 2 + (trail >= 0x9F)
    cell = trail - 0x9F if trail >= 0x9F else trail - 0x40 - (trail > 0x7F)
    return row + 0xA1, cell + 0xA1


@pytest.mark.parametrize(("label", "data", "text"), vendor_texts())
def test_characters_of_vendors_are_read(label: str, data: bytes, text: str) -> None:
    charset = find_charset(label)
    assert charset is not None
    assert charset.decode(data) == (text, text.count("\ufffd"))


@pytest.mark.slow  # starts a browser; the quick tests above hold the same table and samples
def test_browser_decodes_the_same(browser: Any) -> None:
    page = browser.new_page()
    names = page.evaluate(
        "labels => labels.map(l => new TextDecoder(l).encoding)",
        [label for label, name in labels() if name != "replacement"],
    )
    assert names == [name for _, name in labels() if name != "replacement"]
    decoded = page.evaluate(
        """samples => samples.map(([label, data]) => new TextDecoder(label, {ignoreBOM: true}).decode(
            Uint8Array.from(atob(data), one => one.charCodeAt(0))).split("\\n\\n"))""",
        [(label, base64.b64encode(b"\n\n".join(sequences)).decode()) for label, sequences in sequences_of_bytes()],
    )
    differences: dict[str, list[tuple[bytes, str, str]]] = {}
    for (label, sequences), theirs in zip(sequences_of_bytes(), decoded, strict=True):
        charset = find_charset(label)
        assert charset is not None
        ours = charset.decode(b"\n\n".join(sequences))[0].split("\n\n")
        found = [case for case in zip(sequences, theirs, ours, strict=True) if case[1] != case[2]]
        differences.setdefault(label, []).extend(found)
    slashes = [(b"\xa2\x41", "\u2215", "\uff0f"), (b"\xa2\x42", "\ufe68", "\uff3c")]
    big5 = differences.pop("big5")
    halves = [case for case in big5 if case[1].endswith(("\udf04", "\udf0c"))]  # a fault of Chromium
    assert [ours for _, _, ours in halves] == ["Ê\u0304", "Ê\u030c", "ê\u0304", "ê\u030c"]
    assert [case for case in big5 if "\ufffd" not in case[2] and case not in halves] == slashes
    assert len(big5) == 192 + len(slashes) + len(halves)
    assert {label: found for label, found in differences.items() if found} == {
        "windows-1255": [(b"\xca", "\u05ba", "\ufffd")]
    }


def sequences_of_bytes() -> list[tuple[str, list[bytes]]]:
    """Return all single bytes or all pairs of each charset, the triples of EUC-JP, and samples."""
    names = {name for label, name in labels() if name != "replacement" and label != "x-user-defined"}
    multibyte = ("gbk", "gb18030", "big5", "euc-jp", "shift_jis", "euc-kr")
    high, places = range(0x80, 0x100), range(0x21, 0x7F)
    found = [(name, [bytes([byte]) for byte in high]) for name in sorted(names) if not name.startswith("utf")]
    found += [(name, [bytes([lead, trail]) for trail in range(0x30, 0x100)]) for name in multibyte for lead in high]
    found += [("euc-jp", [bytes([0x8F, lead, trail]) for trail in high]) for lead in high]
    shifted = [b"\x1b$B" + bytes([lead, trail]) + b"\x1b(B" for lead in places for trail in places]
    found += [("iso-2022-jp", shifted), ("iso-2022-jp", [b"\x1b(I" + bytes([one]) + b"\x1b(B" for one in places])]
    found += [(label, [text.encode(codec)]) for label, codec, text in SAMPLES if label not in REPLACED]
    found += [(label, [data]) for label, data, _ in vendor_texts()]
    found += [(label, [b"ab \x81\xff\x80 c\xa0d \xfd\x41"]) for label in ("shift_jis", "euc-kr", "big5")]
    return [*found, ("utf-8", [b"caf\xe9 \xe2\x82 x"])]


def test_declared_charset_that_nearly_fits_is_kept_and_broken_places_are_counted() -> None:
    japanese = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。" * 4
    for label, codec in (("shift_jis", "cp932"), ("euc-jp", "euc_jp"), ("utf-8", "utf-8")):
        encoded = japanese.encode(codec)
        assert decode(encoded + b"\xff", label) == (japanese + "\ufffd", False, 1)
    assert decode("“quotes” • ".encode() * 3 + b"caf\xe9", "utf-8") == ("“quotes” • " * 3 + "caf\ufffd", False, 1)
    assert decode("Ångström • ".encode("cp1252") * 30 + b"\x9d", "latin1") == ("Ångström • " * 30 + "\x9d", False, 1)


def test_replacement_characters_of_the_author_are_text() -> None:
    text = "naïve \ufffd words"
    for labels in (("",), ("utf-8", "windows-1251"), ("windows-1251",)):
        assert decode(text.encode(), *labels) == (text, labels == ("windows-1251",), 0)
    assert decode(("“”" * 9 + text).encode() + b"\xe9", "utf-8") == ("“”" * 9 + text + "\ufffd", False, 1)
    assert decode(text.encode("utf-16")) == (text, False, 0)


def test_wrong_labels_and_broken_bytes_do_not_make_other_text() -> None:
    german, japanese = "Grüße aus Köln. " * 20, "日本語のメール" * 9
    chinese, russian = "这是一个测试网站", "Все люди рождаются свободными. "  # noqa: RUF001 - letters of Russian
    quotes = "It’s fine, and goes on for a while, as articles do. " * 20  # noqa: RUF001 - a quote of cp1252
    cases = [
        (chinese.encode(), ("gb2312",), chinese, True, 0),
        (german.encode() + b"\xc3 x", ("iso-8859-1", "utf-8"), german + "\ufffd x", True, 1),
        (russian.encode() * 9 + b"\xd0 x", ("windows-1251",), russian * 9 + "\ufffd x", True, 1),
        (japanese.encode("cp932") + b"\xff", ("shift_jis", "iso-8859-1"), japanese + "\ufffd", False, 1),
        (quotes.encode("cp1252"), (), quotes, False, 0),
        (quotes.encode("cp1252"), ("utf-8",), quotes, True, 0),
        ("The first © of 2026. ©".encode()[:-1], ("utf-8",), "The first © of 2026. \ufffd", False, 1),
        (b"\xef\xbb\xbf" + russian.encode("cp1251"), ("windows-1251",), russian, False, 0),
        (japanese.encode("iso2022_jp") + b" \xb1", ("iso-2022-jp",), japanese + " \ufffd", False, 1),
        (japanese.encode("iso2022_jp") + b" \xb1", (), japanese + " \ufffd", False, 1),
        (chinese.encode("hz") * 9 + b" \xb1", ("hz-gb-2312",), chinese * 9 + " \ufffd", False, 1),
        (german.encode("utf-16-le")[:-1], ("utf-16le",), german[:-1] + "\ufffd", False, 1),
        ("“Escapes” begin with \x1b$B.".encode(), ("us-ascii",), "“Escapes” begin with \x1b$B.", True, 0),
        ((german + "\0").encode(), ("utf-16",), german + "\0", True, 0),
    ]
    for data, labels, text, is_other, num_replaced in cases:
        assert decode(data, *labels) == (text, is_other, num_replaced), (text, labels)


def test_unfinished_character_at_the_end_is_counted() -> None:
    korean = "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. " * 3  # a page that was cut off
    assert decode(korean.encode("cp949") + b"\xb0", "euc-kr") == (korean + "\ufffd", False, 1)


def test_charset_that_escapes_is_not_taken_for_ascii() -> None:
    japanese = "日本語のメール".encode("iso2022_jp")
    for label in ("", "us-ascii", "utf-8", "iso-2022-jp"):
        decoded = decode(japanese, label)
        assert decoded is not None
        assert decoded.text == "日本語のメール"
    assert decode(b"\x1b$)A\x0eVPND\x0f", "iso-2022-cn") is None
    assert decode(b"plain", "iso-2022-cn") == ("plain", False, 0)


def test_byte_order_mark_comes_before_the_declaration() -> None:
    for codec in ("utf-8-sig", "utf-16", "utf-32"):
        assert decode("“中文”".encode(codec), "gb2312", "iso-8859-1") == ("“中文”", False, 0)


def test_declaration_in_a_comment_or_of_an_unknown_charset_is_none() -> None:
    assert charset_in_page(b"<!-- <meta charset=big5> --><meta charset=euc-kr>") == "euc-kr"
    assert charset_in_page(b"<!-- <meta charset=big5>") == ""
    assert charset_in_page(b"<meta charset=no-such><meta charset=euc-kr>") == "euc-kr"
    assert charset_in_page(b"<meta charset=no-such>") == "no-such"
    assert charset_in_page(b"<meta charset=iso-2022-cn><meta charset=euc-kr>") == "iso-2022-cn"
    assert charset_in_page(b"<meta charset=unicode>") == "utf-8"
