"""A text is the parts that its tokens add to it."""

import pytest

from crosscut.serving.tokens import parts_of, surplus_of


@pytest.mark.parametrize(
    ("text", "spelled", "parts"),
    [
        ("We go", [b"We", b" go"], ["We", " go"]),
        ("We go", [b"<s>", b" We", b" go"], ["", "We", " go"]),  # what comes before a text spells nothing of it
        ("<s>We go", [b"<s>", b"We", b" go"], ["<s>", "We", " go"]),
        ("", [b"<s>"], [""]),
        ("ü€!", [b"\xc3", b"\xbc\xe2", b"\x82", b"\xac!"], ["", "ü", "", "€!"]),
        ("a\N{REPLACEMENT CHARACTER}", [b"a", b"\xe2\x82"], ["a", "\N{REPLACEMENT CHARACTER}"]),
        ("a  b", [b"a", b"b"], ["a  ", "b"]),  # a tokenizer that drops spaces: all of the text is told at least
    ],
)
def test_a_text_is_cut_into_what_its_tokens_add(text: str, spelled: list[bytes], parts: list[str]):
    surplus = surplus_of(text, spelled)
    assert list(parts_of(text, spelled, count=len(spelled), surplus=surplus)) == parts
    assert "".join(parts) == text
