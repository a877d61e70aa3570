"""Which newlines are needless, and which stay."""

import textwrap

import pytest

from crosscut.corpus.cleaning.paragraphs import join_lines

PROSE = """\
It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it was \
the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of Darkness, it \
was the spring of hope, it was the winter of despair.
There were a king with a large jaw and a queen with a plain face, on the throne of England; there were a king with a \
large jaw and a queen with a fair face, on the throne of France.
In both countries it was clearer than crystal to the lords of the State preserves of loaves and fishes, that things in \
general were settled for ever.""".splitlines()

VERSE = """\
Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;"""


def wrapped(paragraphs: list[str], width: int) -> str:
    return "\n\n".join(textwrap.fill(paragraph, width, break_on_hyphens=False) for paragraph in paragraphs)


@pytest.mark.parametrize("width", [45, 60, 72, 80, 120])
def test_wrapped_paragraphs_become_one_line_each(width: int) -> None:
    assert join_lines(wrapped(PROSE, width)) == "\n\n".join(PROSE)


def test_text_that_is_not_wrapped_is_left_as_it_is() -> None:
    for text in ("", "one line", "\n".join(PROSE), "\n\n".join(PROSE), "A line.\n\n\n\nAnother.\n"):
        assert join_lines(text) == text


@pytest.mark.parametrize(
    ("word", "end"),
    [
        ("harbour", "."),
        ("hafen", '!"'),
        ("hafen", ".\u201c"),  # a German quotation mark
        ("\u0939\u0948", "\u0964"),  # Hindi
        ("\u0645\u0627", "\u061f"),  # Arabic
        ("\u1230\u120b", "\u1362"),  # Amharic
    ],
)
def test_lines_that_end_sentences_are_paragraphs(word: str, end: str) -> None:
    first, second = (f"{' '.join([word] * (length // len(word)))}{end}" for length in (70, 66))
    for lines in ([first], [first, second], [first, second, first], [second, first] * 3):
        text = "\n".join(lines)
        assert join_lines(text) == text
    paragraph = f"{first} {second} {first}"
    assert join_lines(wrapped([paragraph] * 3, 50)) == "\n\n".join([paragraph] * 3), "wrapped text is still joined"


def test_lines_without_blanks_between_words_are_not_joined_by_one() -> None:
    line = "\u6e2f\u53e3 " + "\u65e9\u6668\u7684\u9633\u5149\u5f88\u5b89\u9759" * 6
    text = "\n".join([line] * 4)
    assert join_lines(text) == text


def test_blank_lines_keep_their_number() -> None:
    text = f"\n{wrapped(PROSE[:1], 60)}\n\n\n \n{wrapped(PROSE[1:2], 60)}\n"
    assert join_lines(text) == f"\n{PROSE[0]}\n\n\n \n{PROSE[1]}\n"


def test_verse_stays_verse_alone_and_among_prose() -> None:
    assert join_lines(VERSE) == VERSE
    assert join_lines(f"{wrapped(PROSE, 70)}\n\n{VERSE}") == "\n\n".join([*PROSE, VERSE])


def test_verse_in_lower_case_stays_verse_as_its_lines_are_short_for_the_text() -> None:
    verse = "so much depends\nupon\n\na red wheel\nbarrow\n\nglazed with rain\nwater"
    assert join_lines(f"{wrapped(PROSE, 70)}\n\n{verse}") == "\n\n".join([*PROSE, verse])
    assert join_lines(verse) == verse


def test_heading_above_a_paragraph_stays_above_it() -> None:
    text = f"Chapter One\n{wrapped(PROSE[:1], 70)}\n\n{wrapped(PROSE[1:], 70)}"
    assert join_lines(text) == "\n\n".join([f"Chapter One\n{PROSE[0]}", *PROSE[1:]])


def test_items_of_a_list_stay_apart_and_become_one_line_each() -> None:
    items = [textwrap.fill(text, 70, initial_indent="- ", subsequent_indent="  ") for text in PROSE]
    assert join_lines("\n".join(items)) == "\n".join(f"- {text}" for text in PROSE)
    numbered = [textwrap.fill(f"{n}. {text}", 70) for n, text in enumerate(PROSE, start=1)]
    assert join_lines("\n".join(numbered)) == "\n".join(f"{n}. {text}" for n, text in enumerate(PROSE, start=1))


def test_indent_begins_a_paragraph() -> None:
    text = "\n".join(textwrap.fill(text, 70, initial_indent="   ") for text in PROSE)
    assert join_lines(text) == "\n".join(f"   {text}" for text in PROSE)


def test_short_lines_such_as_an_address_stay() -> None:
    address = "Mr. J. Lorry\nTellson's Bank\nTemple Bar, London"
    assert join_lines(f"{wrapped(PROSE, 70)}\n\n{address}") == "\n\n".join([*PROSE, address])


def test_list_of_long_names_stays() -> None:
    names = "\n".join(f"documentation/section-{n:02}/a-tale-of-two-cities/part-{n:02}.html" for n in range(20))
    assert join_lines(names) == names


def test_narrow_quotation_in_a_wide_text_is_joined() -> None:
    quotation = textwrap.fill(PROSE[0], 50, initial_indent="  ", subsequent_indent="  ")
    text = f"{wrapped(PROSE * 3, 78)}\n\n{quotation}"
    assert join_lines(text) == "\n\n".join([*PROSE * 3, f"  {PROSE[0]}"])


def test_table_stays() -> None:
    table = "\n".join(f"{name:<30} of the year of our Lord {year:>12}" for name, year in [("harvests", 1775)] * 5)
    assert join_lines(f"{wrapped(PROSE, 70)}\n\n{table}") == "\n\n".join([*PROSE, table])


def test_hyphen_goes_only_where_the_text_has_the_word_whole() -> None:
    broken = "The committee saw that much of the documen-\ntation was kept by a man who had been self-\ntaught."
    text = f"{wrapped(PROSE, 45)}\n\n{broken}"
    assert "the documen-tation was kept by a man who had been self-taught." in join_lines(text)
    joined = join_lines(f"{text}\n\nDocumentation helps.")
    assert "the documentation was kept by a man who had been self-taught." in joined


def test_dash_at_the_end_of_a_line_is_glued() -> None:
    before = wrapped(PROSE, 60)
    text = (
        f"{before}\n\nHe looked at her for a long time before he said it then--\nas she had known he would--and left."
    )
    assert "said it then--as she" in join_lines(text)
