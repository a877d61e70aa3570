"""Texts in charsets that are declared rightly, wrongly or not at all."""

import pytest

from crosscut.corpus.readers.charsets import charset_in_page, decode
from tests.timing import quickest

FRENCH = "Le café était fermé, et le garçon s'en allait à l'école."
RUSSIAN = "Лишь жить в себе самом умей; есть целый мир в душе твоей таинственно-волшебных дум."  # noqa: RUF001 - letters of Russian
CHINESE = "这是一个用来测试编码的中文句子它的长度应当足够让检测器认出它来。"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。"


@pytest.mark.parametrize(
    ("text", "charset"),
    [
        ("plain", "us-ascii"),
        (FRENCH, "utf-8"),
        (FRENCH, "iso-8859-1"),
        (FRENCH, "windows-1252"),
        (RUSSIAN, "koi8-r"),
        (CHINESE, "gb2312"),
        (CHINESE, "big5hkscs"),
        (JAPANESE, "iso-2022-jp"),
        (JAPANESE, "shift_jis"),
    ],
)
def test_declared_charset_that_fits_is_taken(text: str, charset: str) -> None:
    encoded = text.encode(charset, "ignore")
    assert decode(encoded, charset) == (encoded.decode(charset), False, 0)


@pytest.mark.parametrize("declared", ["us-ascii", "iso-8859-1", "no-such-charset"])
def test_utf8_is_known_whatever_was_declared(declared: str) -> None:
    assert decode(FRENCH.encode(), declared) == (FRENCH, True, 0)


def test_utf8_needs_no_declaration() -> None:
    assert decode(FRENCH.encode()) == (FRENCH, False, 0)
    assert decode(b"\xef\xbb\xbfplain") == ("plain", False, 0)
    assert decode("plain".encode("utf-16")) == ("plain", False, 0)


def test_charset_that_lies_is_guessed_and_told() -> None:
    assert decode(CHINESE.encode("gb2312", "ignore"), "utf-8") == (CHINESE, True, 0)
    assert decode(FRENCH.encode("windows-1252"), "utf-8") == (FRENCH, True, 0)


def test_ascii_is_ascii_in_all_charsets() -> None:
    assert decode(b"plain", "no-such-charset") == ("plain", False, 0)


def test_bytes_of_no_charset_are_no_text() -> None:
    assert decode(b"\x81\x8d\x8f\x90\x9d" * 100, "utf-8") is None


@pytest.mark.parametrize(
    "start", [b"<meta ", b"<meta charset= ", b"<meta charset=' ", b"<?xml encoding= ", b"<meta a="]
)
def test_declaration_is_searched_once(start: bytes) -> None:
    def search() -> None:
        for data in (start * 1000, start + b" " * 1000, start * 20 + b" " * 1000):
            for _ in range(20):
                charset_in_page(data)

    assert quickest(search, limit=0.2) < 0.2


def test_second_declaration_is_found() -> None:
    assert (
        charset_in_page(b"<?xml version='1.0'?><meta name=a><META http-equiv=b content='c; charset=koi8-r'>")
        == "koi8-r"
    )
    assert charset_in_page(b"<?xml version='1.0' encoding='latin-1'?><meta charset=koi8-r>") == "latin-1"
