"""Where a sentence begins: after its end mark, and not after an abbreviation."""

import itertools
import time

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
        ["\u092f\u0939 \u0939\u0948\u0964", "iPhone \u0939\u0948\u0964"],  # without a blank, before lower case
        ["\u201eEr ging.\u201c ", "\u00bbWann?\u00ab ", "Danach."],  # German
        ["\u00ab Oui !\u00a0\u00bb ", "Il part."],  # French
        ["\u00bbJoo.\u00bb ", "\u00bbEi.\u00bb"],  # Finnish
        [
            "\u4ed6\u8bf4\u3002",
            "\u201c\u597d\u3002\u201d",
            "\u300c\u5bf9\uff1f\uff01\u300d",
            "\u597d\u2026\u2026\u3002",
        ],
        ["\u597d\u3002", "\u2026\u2026\u5bf9"],  # an ellipsis may begin a sentence
        ["\u6570\u5b57\uff13\uff0e\uff11\u548c\u5217\uff0e\u4f0a\u3002"],  # points in a number and a name
        ["\u3067\u3042\u308b\uff0e", "\u3053\u308c\u306f"],  # a point after hiragana
        ["\u597d\u3002", "\uff0e\u5bf9"],
        ["\uff76\uff76\uff61", "\uff77\uff77"],
        ["\u0643\u064a\u0641\u061f! ", "\u0644\u0627\u061f", "\u0646\u0639\u0645"],  # Arabic
        ["\u06a9\u06cc\u0627\u06d4 ", "\u06a9\u06cc\u0627"],  # Urdu
        ["\u0915\u0965\u0967\u0965 ", "\u0916\u0965\u0968\u0965"],  # verses of Sanskrit
        ["\u0562\u0561\u0589 ", "\u0562\u0561"],  # Armenian
        ["\u1230\u120b\u121d\u1362", "\u1230\u120b\u121d\u1367 ", "\u1230"],  # Amharic
        ["\u179f\u17bd\u17d4 ", "\u179f\u17bd\u17d4\u17d4", "\u179f"],  # Khmer
        ["\u0f56\u0f7c\u0f51\u0f0d \u0f0d", "\u0f56\u0f7c\u0f51"],  # Tibetan: two strokes with a blank between them
        ["\u1019\u1004\u103a\u104b ", "\u1019\u1004\u103a"],  # Burmese
        ["\u03c4\u03b9\u037e ", "\u039d\u03b1\u03b9."],  # Greek
        ["Wow\u203c\ufe0f ", "Yes."],
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
    [
        ("ar", 0.94, 0.97), ("cs", 0.95, 0.93), ("de", 0.99, 0.93), ("el", 0.98, 0.92), ("en", 0.92, 0.97),
        ("es", 0.99, 0.97), ("fi", 0.96, 0.95), ("fr", 0.91, 0.96), ("hi", 0.99, 0.97), ("it", 0.99, 0.99),
        ("ja", 0.99, 0.98), ("ko", 0.92, 0.97), ("la", 0.92, 0.98), ("nl", 0.99, 0.96), ("pl", 0.99, 0.91),
        ("pt", 0.99, 0.98), ("ru", 0.95, 0.98), ("sv", 0.94, 0.97), ("tr", 0.96, 0.95), ("zh", 0.93, 0.95),
    ],
)  # fmt: skip
def test_real_sentences_are_found_in_several_languages(shared, language, recall, precision):
    file = shared / "data" / "lingua-sentences" / f"{language}.txt"
    blank = "" if language in ("ja", "zh") else " "
    sentences = [f"{line}{blank}" for line in file.read_bytes().decode().split("\n") if line.strip()]
    expected, place = set(), 0
    for sentence in sentences[:-1]:
        place += len(sentence)
        expected.add(place)
    found = set(sentence_starts("".join(sentences)))
    assert len(found & expected) / len(expected) >= recall
    assert len(found & expected) / len(found) >= precision


@pytest.mark.parametrize("run", ["." * 100_000, "\u0964\u2026" * 50_000, "\u0964" + "\u2026" * 100_000, "\n" * 100_000])
def test_time_does_not_grow_with_the_square_of_a_run_of_marks(run: str) -> None:
    started = time.process_time()
    assert len(sentence_starts(f"Chapter 1 {run}x")) <= 1
    assert time.process_time() - started < 5  # a search that tries each mark of the run takes minutes
