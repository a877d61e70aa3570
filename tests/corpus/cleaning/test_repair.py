"""`repair` is `ftfy.fix_text` with the same steps, shown on real texts, on mojibake, and by what ftfy's heuristic
consists of.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import ftfy
import pytest
from ftfy.badness import BADNESS_RE
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.config.corpora import CleaningConfig
from crosscut.config.errors import DataError
from crosscut.corpus.cleaning import repair as module
from crosscut.corpus.cleaning.repair import (
    DOUBLE_QUOTES,
    EASY,
    LONE_SIGNS,
    MAX_LINE,
    SIGNS,
    SINGLE_QUOTES,
    ftfy_settings,
    repair,
)

PARTS = (
    *"aZ1 .'\"<>&;\n\r\t\x0c\x00\x1a\x1b\x7f\x80\x85\x9d\xa0\xad\u00c2\u00c3\u00e2\u20ac\u2122\u0153\u0152\u00e9\u00df",
    *"\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f\u02bc\u2013\u2014\u2026\u00ab\u00bb\u00a3\u00bd\u00b0\u0301",
    *"\u0130\u0133\u01c4\ufb01\ufb06\u3000\uff21\uff71\uff9f\uac00\u1100\u1161\u2028\u2029\ufeff\ufffd\ufffc\u206a",
    *"\u0392\u03b2\u0412\u0413\u0432\u0402\u0101\u221a\u2020\u4e00\u05d0\u05b8\U0001f600\ud83d\ude00",
    *("&amp;", "&lt;", "&nbsp;", "&#8217;", "&#13;", "&EACUTE;", "&no", "\uff06amp\uff1b", "\x1b[31m", "\r\n"),
    *("\u00e2\u20ac\u2122", "\u00c3\u00a9", "\u00c3 ", "a\u0300", "\u00e0\u00b2", "\u0432\u0402\u201c"),
)


EVERYTHING, DEFAULT = CleaningConfig.all_or_none(True), CleaningConfig()
NOTHING = CleaningConfig.all_or_none(False)
STEPS = st.sampled_from(
    [
        DEFAULT,
        *(replace(NOTHING, **{key: getattr(EVERYTHING, key)}) for key in EVERYTHING.repairs),
        *(replace(EVERYTHING, **{key: getattr(NOTHING, key)}) for key in EVERYTHING.repairs),
    ]
)
"""The defaults, each step alone, and all steps but one."""


def assert_repaired(text: str, *configs: CleaningConfig) -> None:
    for config in configs or (EVERYTHING, DEFAULT):
        assert repair(text, config) == ftfy.fix_text(text, ftfy.TextFixerConfig(**ftfy_settings(config)))


def test_all_keys_are_ftfys_own_defaults() -> None:
    assert ftfy.TextFixerConfig(**ftfy_settings(EVERYTHING)) == ftfy.TextFixerConfig()
    assert set(EVERYTHING.repairs) == {field.name for field in fields(CleaningConfig)}


@settings(max_examples=200)
@given(text=st.lists(st.sampled_from(PARTS), max_size=30).map("".join), config=STEPS)
def test_any_mixture_of_what_ftfy_looks_for(text: str, config: CleaningConfig) -> None:
    assert_repaired(text, EVERYTHING, config)


@settings(max_examples=100)
@given(text=st.text(max_size=60), config=STEPS)
def test_any_text(text: str, config: CleaningConfig) -> None:
    assert_repaired(text, EVERYTHING, config)


@settings(max_examples=150)
@given(
    text=st.text(
        st.sampled_from(
            "na\u00efve \u00e9t\u00e9 \u201cquoted\u201d \u2014 \u2019s \u0434\u0430 \u03b1\u03b2 \u20ac5\n"
        ),
        max_size=40,
    ),
    codec=st.sampled_from(
        ["latin-1", "cp1252", "cp1251", "cp1250", "cp1253", "cp1254", "cp1257", "mac-roman", "cp437"]
    ),
    rounds=st.integers(1, 2),
    config=STEPS,
)
def test_text_that_was_decoded_wrongly(text: str, codec: str, rounds: int, config: CleaningConfig) -> None:
    for _ in range(rounds):
        text = text.encode("utf-8").decode(codec, errors="replace")
    assert_repaired(text, EVERYTHING, config)
    assert_repaired(f"An honest line.\r\n{text}\n\u201cAnother one.\u201d", EVERYTHING, config)


@pytest.mark.parametrize(
    "text",
    [
        "x & y &amp; z\n<b>&amp;</b>\n&amp;\n",  # HTML entities stay from the first line with a bracket on
        "&lt;b&gt;\n&amp;lt;\n",  # resolved brackets are not HTML
        "a\r\nb\rc\r\r\nd\r",
        "a&#13;\r\nb",
        "e\u0301\n\u201cn\u0303\u201d\nplain\n",
        "\ufeffTitle\n\x00\x07\x7f text\ufffc",
        "one\u2028two\u2029three\x85four",
        "\ud83d\ude00 \ude00\ud83d",
        "\u00c3 la mode\n\u00c2 \nl'\u0153il, \u0153 .",
        "\ufb01ne \uff21\uff22\u3000\uff76\uff9e",
        "\uff06lt\uff1b",  # an entity only after its width is mended
        "",
        "\n",
        "\r\n" * 3,
    ],
)
def test_what_ftfy_does_line_by_line(text: str) -> None:
    assert_repaired(text)


@pytest.mark.parametrize("cut", range(-3, 4))
def test_long_lines_are_cut_where_ftfy_cuts_them(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE", 50)
    config = ftfy.TextFixerConfig(max_decode_length=50, explain=False)
    wrong, line = "\u00e2\u20ac\u2122", "x" * (50 + cut)
    texts = [
        f"{line[:-1]}{wrong}{end}{other}" for end in ("", "\n", "\r\n") for other in ("", line * 3, "<\n&lt;" * 20)
    ]
    for text in (*texts, f"{line}\r\n" * 5, "\n" * 120, f"{line}<{line}&amp;{wrong}"):
        assert repair(text, EVERYTHING) == ftfy.fix_text(text, config)
    assert ftfy.TextFixerConfig().max_decode_length == MAX_LINE


def test_what_does_not_change_stays_the_same_object() -> None:
    for text in ("", "Plain.\n", "\u00e9t\u00e9 \u2014 \u4e00\u4e8c <b>&amp;</b>\n", "\u0434\u0430 " * 1000):
        assert repair(text, EVERYTHING) is text
        assert repair(text, DEFAULT) is text


def test_only_suspicious_lines_go_through_ftfy(monkeypatch: pytest.MonkeyPatch) -> None:
    mended: list[str] = []
    engine = module._engine(EVERYTHING)
    monkeypatch.setattr(
        engine, "_mend", lambda line, config: mended.append(line) or ftfy.fix_text_segment(line, config)
    )
    easy = "\u201cIt\u2019s na\u00efve\u201d \u2014 he\u2019d said\u2026\r\n"
    repair(easy * 50 + "voil\u00c3\u00a0 &amp; more\n" + easy * 50, EVERYTHING)
    assert mended == ["voil\u00c3\u00a0 &amp; more\n"]


def test_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ftfy", None)
    with pytest.raises(DataError, match=r"needs the package ftfy.*Run `.* -m pip install -e .*\[corpus\]'`"):
        module._engine.__wrapped__(DEFAULT)


# The conditions of the search follow from the expression by which ftfy tells mojibake: here from its parts.


def alternatives() -> list[list[frozenset[str]]]:
    """The ways to match ftfy's expression, each as the sets of characters that it takes one after another."""
    parsed = re._parser.parse(BADNESS_RE.pattern, BADNESS_RE.flags)
    return [sequence for sequence in sequences(list(parsed)) if sequence]


UNIVERSE = frozenset(map(chr, range(0x10000)))
SPACES, WORD = (frozenset(filter(re.compile(kind).match, UNIVERSE)) for kind in (r"\s", r"\w"))


def sequences(items: Sequence[tuple]) -> Iterator[list[frozenset[str]]]:
    if not items:
        yield []
        return
    (operation, argument), rest = items[0], items[1:]
    for tail in sequences(rest):
        match str(operation):
            case "BRANCH":
                for branch in argument[1]:
                    yield from ([*head, *tail] for head in sequences(list(branch)))
            case "MAX_REPEAT":
                least, most, inner = argument
                for count in range(least, most + 1):
                    yield from ([*head, *tail] for head in sequences(list(inner) * count))
            case "AT":
                yield tail
            case _:
                yield [characters(str(operation), argument), *tail]


def characters(operation: str, argument: object) -> frozenset[str]:
    match operation:
        case "LITERAL":
            return frozenset(chr(argument))
        case "NOT_LITERAL":
            return UNIVERSE - {chr(argument)}
        case "RANGE":
            return frozenset(map(chr, range(argument[0], argument[1] + 1)))
        case "ANY":
            return UNIVERSE - {"\n"}
        case "CATEGORY":
            return {"CATEGORY_SPACE": SPACES, "CATEGORY_WORD": WORD}[str(argument)]
        case "IN":
            negated = str(argument[0][0]) == "NEGATE"
            taken = frozenset().union(*(characters(str(kind), value) for kind, value in argument[negated:]))
            return UNIVERSE - taken if negated else taken
    raise AssertionError(operation)


def test_every_sign_of_mojibake_is_one_that_the_search_sees() -> None:
    lone = {*map(chr, range(0x80, 0xA0)), *LONE_SIGNS}
    signs = frozenset(filter(re.compile(f"[{SIGNS}]").match, UNIVERSE))
    easy = frozenset(EASY)
    ways = alternatives()
    assert len(ways) > 30
    for way in ways:
        beside = (one | two <= signs and not (one & easy and two & easy) for one, two in pairwise(way))
        assert any(taken <= lone for taken in way) or any(beside), way


def test_straight_quotes_and_newlines_are_no_sign_where_curly_ones_and_carriage_returns_were_none() -> None:
    for taken in {taken for way in alternatives() for taken in way}:
        assert '"' not in taken or taken >= set(DOUBLE_QUOTES)
        assert "'" not in taken or taken >= set(SINGLE_QUOTES)
        assert "\n" not in taken or "\r" in taken


def test_ftfy_has_the_steps_that_the_search_was_made_for() -> None:
    encoding = {"restore_byte_a0", "replace_lossy_sequences", "decode_inconsistent_utf8"}
    lines = {"fix_line_breaks", "fix_surrogates", "remove_terminal_escapes", "remove_control_chars", "uncurl_quotes"}
    tables = {"unescape_html", "fix_c1_controls", "fix_latin_ligatures", "fix_character_width"}
    assert set(ftfy.FIXERS) == encoding | lines | tables
    assert ftfy.chardata.DOUBLE_QUOTE_RE.fullmatch("\u201c")
    quotes = {character for character in UNIVERSE if ftfy.fixes.uncurl_quotes(character) != character}
    assert quotes == {*DOUBLE_QUOTES, *SINGLE_QUOTES}


SPECIAL = [*range(0x600), *range(0x2000, 0x2300), *range(0xD7F0, 0xD810), *range(0xDFF0, 0xE010)]
SCRIPTS = [*range(0x600, 0x2000), *range(0x2300, 0x3100), *range(0xAC00, 0xAC40), *range(0xD810, 0xDFF0)]


@pytest.mark.parametrize(
    "code_points",
    [
        pytest.param([*SPECIAL, *range(0xFAF0, 0xFB10), *range(0xFEF0, 0x10010)], id="special"),
        pytest.param([*SCRIPTS, *range(0xF8F0, 0xFEF0)], id="scripts", marks=pytest.mark.slow),
    ],
)
def test_every_character_by_itself_and_beside_others(code_points: list[int]) -> None:
    for code in code_points:
        assert_repaired(f"a{chr(code)}b {chr(code)}\u2019{chr(code)}.\n")


def cases(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        for case in content if isinstance(content, list) else [content]:
            yield from (value for value in case.values() if isinstance(value, str))


def test_ftfys_own_cases(shared: Path) -> None:
    texts = list(cases(shared / "data" / "ftfy-test-cases"))
    assert len(texts) > 100
    for text in texts:
        assert_repaired(text)
        assert_repaired(f"A line before.\r\n{text}\r\n\u201cAnd after.\u201d")


@pytest.mark.slow
def test_sentences_of_twenty_languages_and_their_mojibake(shared: Path) -> None:
    chosen = random.Random(0)
    for path in sorted((shared / "data" / "lingua-sentences").glob("*.txt")):
        sentences = path.read_text(encoding="utf-8").splitlines(keepends=True)
        assert_repaired("".join(sentences))
        for codec in ("latin-1", "cp1252", "cp1251", "mac-roman", "cp437"):
            wrong = [
                one.encode("utf-8").decode(codec, errors="replace") if chosen.random() < 0.2 else one
                for one in sentences[:300]
            ]
            assert_repaired("".join(wrong))
