"""Languages: who stays, what is measured, and on what part of a text."""

import re
from collections import Counter
from pathlib import Path

import pytest

from crosscut.config import ConfigError
from crosscut.config.corpora import LanguageConfig
from crosscut.corpus.documents import Judgement
from crosscut.corpus.filters.language import PASSAGE, LanguageFilter, passages
from tests.corpus.conftest import documents
from tests.refusals import refusal

ENGLISH = "The house stands at the end of the street, and nobody has lived there since the old man went away."
GERMAN = "Das Haus steht am Ende der Strasse, und niemand wohnt dort, seit der alte Mann fortgegangen ist."
FRENCH = "La maison se trouve au bout de la rue et personne n'y habite depuis que le vieil homme est parti."
CHINESE = (
    "\u8fd9\u5ea7\u623f\u5b50\u5728\u8857\u7684\u5c3d\u5934\uff0c\u8001\u4eba\u8d70\u540e\u65e0\u4eba\u5c45\u4f4f\u3002"
)
DETECTORS = ("eldc", "langdetect")


def judge(*texts: str, **config: object) -> Judgement:
    return LanguageFilter(LanguageConfig(**config))(documents(*texts))


@pytest.mark.parametrize("detector", DETECTORS)
def test_documents_in_other_languages_go(detector: str) -> None:
    judgement = judge(ENGLISH, GERMAN, FRENCH, CHINESE, detector=detector)
    assert judgement.marks["language"].to_pylist() == ["en", "de", "fr", "zh"]
    scores = judgement.marks["score"].to_pylist()
    assert all(0.5 < score <= 1 for score in scores)
    expected = [(row, "language", f"{code} {scores[row]:.2f}") for row, code in ((1, "de"), (2, "fr"), (3, "zh"))]
    assert [drop[:3] for drop in judgement.drops] == expected


@pytest.mark.parametrize("detector", DETECTORS)
def test_any_set_of_languages_stays(detector: str) -> None:
    drops = judge(ENGLISH, GERMAN, FRENCH, CHINESE, detector=detector, keep=("fr", "zh")).drops
    assert [drop.row for drop in drops] == [0, 1]


@pytest.mark.parametrize("detector", DETECTORS)
@pytest.mark.parametrize("text", ["", "3.14 2,71 * 100", "\n\n --- \n", "\U0001f600" * 20])
def test_a_text_without_letters_is_of_no_language_and_goes(detector: str, text: str) -> None:
    (drop,) = judge(text, detector=detector).drops
    assert drop.detail == "und 0.00"


def test_uncertain_ones_go_where_a_score_is_asked_for() -> None:
    (score,) = judge(ENGLISH).marks["score"].to_pylist()
    assert judge(ENGLISH, min_score=score - 0.01).drops == []
    assert [drop.detail for drop in judge(ENGLISH, min_score=score + 0.01).drops] == [f"en {score:.2f}"]


def test_nothing_is_detected_where_all_languages_stay() -> None:
    assert judge(ENGLISH, GERMAN, keep=()) == Judgement()


def test_marks_of_no_documents_have_their_types() -> None:
    marks = judge().marks
    assert [str(marks[name].type) for name in ("language", "score")] == ["string", "float"]


def test_the_beginning_the_middle_and_the_end_of_a_long_text_are_looked_at() -> None:
    assert passages("a" * PASSAGE) == ["a" * PASSAGE]
    text = "a" * PASSAGE + "-" * 5000 + "b" * PASSAGE + "-" * 5000 + "c" * PASSAGE
    assert passages(text) == [letter * PASSAGE for letter in "abc"]


@pytest.mark.parametrize("detector", DETECTORS)
def test_a_notice_at_the_top_does_not_decide(detector: str) -> None:
    marks = judge(ENGLISH * 11 + GERMAN * 1000, GERMAN * 1000, detector=detector).marks
    assert marks["language"].to_pylist() == ["de", "de"]
    mixed, pure = marks["score"].to_pylist()
    assert mixed == pytest.approx(2 / 3 * pure, rel=0.05)


def test_a_nul_does_not_end_the_text() -> None:
    assert judge("\0" + ENGLISH).marks["language"].to_pylist() == ["en"]


@pytest.mark.parametrize("detector", DETECTORS)
def test_a_text_is_told_the_same_language_each_time(detector: str) -> None:
    texts = [ENGLISH, "cat", "no", "hotel bar", GERMAN, "Hamlet prince"]
    first = judge(*texts, detector=detector).marks
    again = judge(*reversed(texts), detector=detector).marks
    assert first["language"].to_pylist() == again["language"].to_pylist()[::-1]
    assert first["score"].to_pylist() == again["score"].to_pylist()[::-1]


def test_a_language_that_the_detector_does_not_know_is_told() -> None:
    told = refusal(ConfigError, LanguageFilter, LanguageConfig(keep=("en", "eng")))
    assert re.match(r"`language\.keep` must hold codes of languages that eldc knows \(am, .*\), but has", told)


@pytest.mark.slow
@pytest.mark.parametrize(("detector", "least"), [("eldc", 0.95), ("langdetect", 0.85)])
def test_english_is_told_from_nineteen_languages(shared: Path, detector: str, least: float) -> None:
    """Single sentences, the hardest case; `benchmarks/corpus/clean.py` prints the figures."""
    right: Counter[bool] = Counter()
    filtered = LanguageFilter(LanguageConfig(detector=detector))
    for path in sorted((shared / "data" / "lingua-sentences").glob("*.txt")):
        sentences = path.read_text(encoding="utf-8").splitlines()[: 1000 if detector == "eldc" else 40]
        dropped = len(filtered(documents(*sentences)).drops)
        kept = len(sentences) - dropped
        right[True] += kept if path.stem == "en" else dropped
        right[False] += dropped if path.stem == "en" else kept
    assert right[True] / right.total() > least
