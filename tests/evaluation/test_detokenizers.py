"""From WikiText's words to text, and back."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.data import Tokenizer
from crosscut.evaluation.detokenizers import by_the_paper, invertibly, restore

LINES = (
    "",
    "= = Early life = =",
    "",
    'He had a guest @-@ starring role in " The Bill " ( 2000 ) , and 1 @,@ 024 others ; it \'s 3 @.@ 5 m .',
    'Mr. <unk> of the U.S. said : " Is that so ? " It was not .',
    "The ships ' crews didn 't pay $ 5 / head .",
)
WORDS = "".join(f" {line} \n" if line else " \n" for line in LINES)
TEXT = """
== Early life ==

He had a guest-starring role in "The Bill" (2000), and 1,024 others; it's 3.5 m.
Mr. <unk> of the U.S. said: "Is that so?" It was not.
The ships' crews didn't pay $ 5 / head.
"""


def test_text_is_as_people_write_it() -> None:
    assert invertibly(WORDS) == TEXT
    assert restore(TEXT) == WORDS


def test_the_papers_rules_by_hand() -> None:
    text = by_the_paper(' \n = = Early life = = \n \n A guest @-@ star in " The Bill " ( 2000 ) , 1 @,@ 024 \'s . \n ')
    assert text == '== Early life ==\n\nA guest-star in "The Bill" (2000), 1,024\'s .'


def test_the_papers_rules_cannot_be_undone() -> None:
    """Two files of different words, one text."""
    one, other = (by_the_paper(f"Chang 'an and Kan{blank}'ei") for blank in (" ", ""))
    assert one == other


@pytest.mark.parametrize(
    "line",
    [
        " Electric Co. to break ",  # the point of a word that is no known abbreviation
        " a,b ",
        " x-y ",
        ' " ',
        " ' ",
        "no blanks around",
        "  two  blanks  ",
        "\tbehind a tab",
        " \t ",
        "",
        " = ",
        " @-@ ",
        " @-@ @-@ ",
        " ) ( ",
    ],
)
def test_a_line_that_would_not_come_back_is_left_as_it_is(line: str) -> None:
    for text in (line, f"{line}\n", f"\n{line}\n \n"):
        assert restore(invertibly(text)) == text


@settings(max_examples=50)
@given(st.text(alphabet="ab1. ,-'\"@()=:\n\tÉ", max_size=40))
def test_whatever_it_is_it_comes_back(text: str) -> None:
    assert restore(invertibly(text)) == text


PIECES = ["He", "had", "a", "'s", "'", '"', "(", ")", ",", ".", ":", "@-@", "@,@", "@.@", "1", "U.S.", "Mr.", "=", "\n"]


@settings(max_examples=50)
@given(st.lists(st.sampled_from(PIECES), max_size=30))
def test_words_come_back(words: list[str]) -> None:
    text = f" {' '.join(words)} \n"
    assert restore(invertibly(text)) == text


@pytest.mark.parametrize(
    ("name", "num_left"), [("wiki.test.tokens", 20), ("wiki.test.raw", 39), ("wiki.valid.tokens", 23)]
)
def test_real_files_come_back_byte_by_byte(shared: Path, name: str, num_left: int) -> None:
    text = (shared / "data" / "wikitext-103" / name).read_bytes().decode("utf-8")
    joined = invertibly(text)
    assert restore(joined) == text
    assert sum(line.startswith("\t") for line in joined.split("\n")) == num_left, "lines left as they are"


def test_the_counts_of_the_test_set_are_the_papers(shared: Path, gpt2: Tokenizer) -> None:
    words = (shared / "data" / "wikitext-103" / "wiki.test.tokens").read_bytes().decode("utf-8")
    assert len(words.strip().split(" ")) == 245_566
    assert len(gpt2.encode(by_the_paper(words))) == 270_329
    assert len(gpt2.encode(invertibly(words))) == 270_362
