"""Terminals are Unicode's, and a text ends a sentence if its last visible character, apart from quotes, is one."""

import sys
import unicodedata

import pytest

from crosscut.data.text.terminals import ADDED, ends_sentence, terminals


def test_terminals_are_those_of_unicode() -> None:
    regex = pytest.importorskip("regex", reason="the package regex, which transformers needs, is not installed")
    characters = "".join(map(chr, range(sys.maxunicode + 1)))
    expected = {*regex.findall(r"\p{Sentence_Terminal}", characters)}
    found = {*terminals().all} - {*ADDED}
    # Two libraries may have two versions of Unicode. Python's is older than both.
    assert {one for one in found ^ expected if unicodedata.category(one) != "Cn"} == set()
    assert len(found) > 150
    assert expected.isdisjoint(ADDED)


def test_every_terminal_is_in_one_of_two_groups() -> None:
    marks = terminals()
    assert len(set(marks.all)) == len(marks.all)
    assert {*".!?\u2026\u203d\u2e2e"} <= {*marks.spaced}
    assert {*"\u3002\uff01\uff1f\uff61\u061f\u06d4\u0964\u0965\u0589\u1362\u17d4\u0f0d\u104b"} <= {*marks.own}
    assert {*marks.only_closing} < {*marks.closing}
    assert {*marks.all}.isdisjoint(marks.closing)


@pytest.mark.parametrize(
    "text",
    [
        "One.",
        "One!?  \n",
        'He said "no."',
        "(One.)",
        "\u201eJa.\u201c",  # German
        "\u00bbJa.\u00ab",
        "\u00ab Oui ! \u00bb",  # French
        "\u300c\u597d\u3002\u300d",  # Japanese
        "\u300e\u4f55\uff1f\u300f\u3000",
        "\uff08\u597d\uff01\uff09",  # Chinese
        "\uff76\uff65\uff76\uff61",  # half-width katakana
        "\u0643\u064a\u0641\u061f\u200f",  # Arabic, with a mark of direction
        "\u06a9\u06cc\u0627\u06d4",  # Urdu
        "\u092f\u0939 \u0939\u0948\u0964",  # Hindi
        "\u0965 \u0967\u0965",  # Sanskrit
        "\u0562\u0561\u0580\u0565\u0582\u0589",  # Armenian
        "\u1230\u120b\u121d\u1362",  # Amharic
        "\u179f\u17bd\u179f\u17d2\u178f\u17b8\u17d4",  # Khmer
        "\u0f56\u0f7c\u0f51\u0f0d",  # Tibetan
        "\u1019\u1004\u103a\u104b",  # Burmese
        "\u03c4\u03b9\u037e",  # Greek
        "Well\u2026",
        "Wow\u203c\ufe0f",  # an emoji
        "What\u203d\u2019\u201d",
    ],
)
def test_sentences_end(text: str) -> None:
    assert ends_sentence(text)


@pytest.mark.parametrize("text", ["", " ", "One", "One,", "One:", "\u4e00\u3001", "\u060c", "1.5", ". one", '""'])
def test_other_texts_do_not(text: str) -> None:
    assert not ends_sentence(text)
