"""Right text of twenty languages stays as it is, and mojibake in them is repaired as ftfy repairs it."""

from pathlib import Path

import ftfy
import pytest

from benchmarks.corpus.languages import is_faulty, measure_ends, measure_repairs, plant, read_languages
from crosscut.config.corpora import CleaningConfig
from crosscut.corpus.cleaning.repair import repair

LANGUAGES = (
    *("ar", "cs", "de", "el", "en", "es", "fi", "fr", "hi", "it"),
    *("ja", "ko", "la", "nl", "pl", "pt", "ru", "sv", "tr", "zh"),
)
STEP = 5
"""Of the planted sentences, every fifth is repaired: `clean.py --by-language` repairs all."""


@pytest.fixture(scope="module")
def languages(shared: Path) -> dict[str, list[str]]:
    return read_languages(shared / "data" / "lingua-sentences")


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_right_sentence_is_changed(languages: dict[str, list[str]], language: str) -> None:
    sentences = languages[language]
    right = [one for one in sentences if not is_faulty(one)]
    config = CleaningConfig()
    assert [one for one in right if repair(one, config) != one] == []
    assert len(right) >= 0.8 * len(sentences) > 300
    text = "\n".join(right)
    assert repair(text, config) is text


def test_all_steps_change_right_sentences(languages: dict[str, list[str]]) -> None:
    everything = CleaningConfig.all_or_none(True)
    changed = {
        name: sum(repair(one, everything) != one for one in languages[name]) for name in ("zh", "ko", "ja", "hi", "it")
    }
    assert changed == {"zh": 680, "ko": 233, "ja": 53, "hi": 102, "it": 286}


@pytest.mark.parametrize("language", LANGUAGES)
def test_planted_mojibake_is_repaired_as_by_ftfy(languages: dict[str, list[str]], language: str) -> None:
    right = [one for one in languages[language] if not is_faulty(one)]
    counts = measure_repairs(right[::STEP])
    assert (counts.changed, counts.differ) == (0, 0)
    assert counts.restored >= counts.restored_by_ftfy
    if counts.planted > 100:
        assert counts.restored > 0.4 * counts.planted


def test_sentences_that_are_faulty_are_told_apart() -> None:
    faulty = ["d\u00c3\u00a9j\u00e0", "a\x92b", "a &eacute; b", "\ufeffa", "Pr\u0139\u2122edn\u0102\xadm"]
    right = ["d\u00e9j\u00e0 vu", "AT&T, x", "\u201eJa\u201c", "\u597d\u3002", "\u0434\u0430", "a\tb"]
    assert [is_faulty(one) for one in faulty] == [True] * len(faulty)
    assert [is_faulty(one) for one in right] == [False] * len(right)
    ((sentence, wrong),) = plant(["plain", "d\u00e9j\u00e0"])
    assert (sentence, wrong) == ("d\u00e9j\u00e0", "d\u00c3\u00a9j\u00c3\u00a0")
    assert ftfy.fix_text(wrong) == sentence


def test_ends_of_sentences_are_counted(languages: dict[str, list[str]]) -> None:
    ends = measure_ends("zh", languages["zh"])
    assert (ends.sentences, ends.end) == (729, 729)
    assert measure_ends("en", ["One is here.", "Two is here.", "three"]) == (3, 2, 1, 0, 0)
