"""Where a sentence begins: after its end mark, and not after an abbreviation."""

import itertools
import os
from pathlib import Path

import pytest

from crosscut.data.text.sentences import sentence_starts


def split(text: str) -> list[str]:
    places = [0, *sentence_starts(text), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


@pytest.mark.parametrize(
    "sentences",
    [
        ["One is here. ", "Two is there! ", "Three? ", "4 is last"],
        ['"Stop!" ', "He stopped.  ", "(He did.) ", "\u201cWhy?\u201d"],
        ["Dr. Watson met Prof. Moriarty in St. James, cf. Fig. 2 and J. R. R. Tolkien. ", "He left."],
        ['"Oh! what a day," he said. ', "It was 3.14 by e.g. his watch\u2026 ", "Then night."],
        ["A title without a mark\n\n", "A paragraph. ", "It ends here.\n \n\n", "another one"],
        ["\u4eca\u5929\u5f88\u597d\u3002", "\u660e\u5929\u5462\uff1f\u201d", "\u4e0d\u77e5\u9053\u3002"],
        ["Senjutsu is an album .\n ", "It has ten songs , and is loud . ", "The end"],
        ["\u092f\u0939 \u090f\u0915 \u0939\u0948\u0964 ", "\u092f\u0939 \u0926\u094b \u0939\u0948\u0964"],
        [""],
        ["..."],
        [" . "],
        ["\n\n Blank lines come first. ", "One. "],
    ],
)
def test_sentences_are_found(sentences: list[str]) -> None:
    assert split("".join(sentences)) == sentences


@pytest.mark.parametrize(
    ("language", "recall", "precision"),
    [("en", 0.92, 0.97), ("de", 0.99, 0.93), ("fr", 0.91, 0.96), ("ru", 0.95, 0.98), ("zh", 0.93, 0.95)],
)
def test_real_sentences_are_found_in_several_languages(language: str, recall: float, precision: float) -> None:
    if "CROSSCUT_SHARED" not in os.environ:
        pytest.skip("CROSSCUT_SHARED names no folder with published files")
    file = Path(os.environ["CROSSCUT_SHARED"]) / "data" / "lingua-sentences" / f"{language}.txt"
    blank = "" if language == "zh" else " "
    sentences = [f"{line}{blank}" for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    expected, place = set(), 0
    for sentence in sentences[:-1]:
        place += len(sentence)
        expected.add(place)
    found = set(sentence_starts("".join(sentences)))
    assert len(found & expected) / len(expected) >= recall
    assert len(found & expected) / len(found) >= precision
