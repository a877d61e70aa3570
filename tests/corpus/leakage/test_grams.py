"""N-grams of test sets: all of them, whose they are, and nothing else however hashes fall."""

import json
from pathlib import Path

import numpy as np
import pytest

from crosscut.corpus.execution.stages import Output
from crosscut.corpus.leakage import grams as grams_module
from crosscut.corpus.leakage.grams import Grams, gather, open_grams
from crosscut.corpus.words.ngrams import Hashed, hash_words, ngrams


def make(folder: Path, *items: str, n: int = 3, **others: list[str]) -> Grams:
    """The grams of a test set of these items, and of other sets by name."""
    files = []
    for name, texts in {"first": list(items), **others}.items():
        files.append(str(folder / f"{name}.jsonl"))
        Path(files[-1]).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    gather(files, "text", n, 1e-3, Output(folder))
    return Grams.open(folder, n)


def hashes_of(text: str, n: int = 3) -> np.ndarray:
    return ngrams(hash_words([text]), n).hashes


def test_every_gram_is_found_with_its_words_and_its_items(tmp_path: Path) -> None:
    grams = make(tmp_path, "One two, three four!", "zero one TWO three", other=["two three four"])
    places, numbers, _ = grams.look_up(hashes_of("zero one two three four five"))
    assert places.tolist() == [0, 1, 2]
    assert grams.texts.take(numbers).to_pylist() == ["zero one two", "one two three", "two three four"]
    hits, items = grams.items_of(numbers)
    assert list(zip(hits.tolist(), items.tolist(), strict=True)) == [(0, 1), (1, 0), (1, 1), (2, 0), (2, 2)]
    assert grams.set_names == ("first.jsonl", "other.jsonl")
    assert [grams.set_names[place] for place in grams.set_of_item] == ["first.jsonl", "first.jsonl", "other.jsonl"]
    assert (grams.numbers.tolist(), grams.sizes.tolist()) == ([1, 2, 1], [2, 2, 1])


def test_a_text_of_fewer_words_has_no_gram_and_is_counted(tmp_path: Path) -> None:
    grams = make(tmp_path, "one two", "one two three", "")
    assert grams.sizes.tolist() == [0, 1, 0]
    assert len(grams.look_up(hashes_of("one two"))[0]) == 0
    twice = [str(tmp_path / "first.jsonl")] * 2
    counts = gather(twice, "text", 3, 1e-3, Output(tmp_path))
    assert counts == {"test_sets": {"first.jsonl": {"items": 3}}, "grams": 1, "too_short": 2}


def test_a_test_set_without_any_gram_finds_nothing(tmp_path: Path) -> None:
    grams = make(tmp_path, "one two")
    assert len(grams) == 0
    assert [len(found) for found in grams.look_up(hashes_of("one two three four"))[:2]] == [0, 0]


def test_no_gram_reaches_over_an_unknown_word(tmp_path: Path) -> None:
    grams = make(tmp_path, "one two <unk> three four five")
    assert grams.texts.to_pylist() == ["three four five"]


def test_false_positives_of_the_filter_are_as_many_as_asked_for(tmp_path: Path) -> None:
    grams = make(tmp_path, " ".join(f"w{number}" for number in range(5000)))
    asked = np.random.default_rng(0).integers(0, 2**64, 200_000, dtype=np.uint64)
    _, numbers, by_chance = grams.look_up(asked)
    assert len(numbers) == 0
    assert 0.5e-3 < by_chance / len(asked) < 2e-3


def test_words_of_the_same_hash_are_not_taken_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A bad day: all n-grams have one hash.
    def same(hashed: Hashed, n: int) -> Hashed:
        grams = ngrams(hashed, n)
        return grams._replace(hashes=np.full_like(grams.hashes, 7))

    monkeypatch.setattr(grams_module, "ngrams", same)
    grams = make(tmp_path, "one two three", "four five six", "one two three")
    assert grams.texts.to_pylist() == ["one two three"]
    assert grams.items_of(np.array([0]))[1].tolist() == [0, 2]


def test_files_are_the_same_every_time_and_opened_anew_when_they_change(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        make(folder, "one two three four")
    for name in grams_module.FILES:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    assert open_grams(folders[0], 3) is open_grams(folders[0], 3)
    (folders[0] / "first.jsonl").unlink()
    before = open_grams(folders[0], 3)
    make(folders[0], "nothing of that")
    assert open_grams(folders[0], 3) is not before
