"""Measure the recall and the precision of the search on planted duplicates, whose true similarity is known.

Some documents of the corpus are copied. In each copy, some words are changed or some blocks of words are swapped. The
number of edits is chosen so that the similarity of the copy to the original is near a chosen value. The exact
similarity is then computed on the n-grams themselves, without hashes. The functions of the real stages search the
originals and copies for near-duplicates. Recall is the share of the planted pairs that the search finds. Precision is
the share of the found pairs that are similar enough.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from crosscut.config.corpora import DuplicatesConfig
from crosscut.corpus.collection import Collection, first_number
from crosscut.corpus.documents import DOCUMENTS, INGEST, Part, read_table, write_table
from crosscut.corpus.duplicates.candidates import CANDIDATES, GROUPS_SUFFIX, find_candidates, shares
from crosscut.corpus.duplicates.gram_sets import NGRAMS, write_sets
from crosscut.corpus.duplicates.similarity import SIMILAR, check_groups, check_pairs, search_settings, share_groups
from crosscut.corpus.duplicates.sketches import SKETCHES, write_sketches
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.words.ngrams import words

PLANTED = "planted"
SAMPLE = 2000
"""Maximum number of documents that are sampled."""

LOWEST, HIGHEST = 0.5, 0.98
"""Range from which the similarity of each planted copy is chosen."""

_PARTS_READ = 16
_CHARACTERS = (200, 20_000)
_BLOCK_WORDS = 12


class Planted(NamedTuple):
    """An edited copy of a document."""

    text: str
    jaccard: float
    """Exact similarity of the copy to the original."""


def spread_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Choose parts (Arrow files of documents) for the sample, evenly spread over the corpus."""
    count = min(len(parts), _PARTS_READ)
    return tuple(parts[place * len(parts) // count] for place in range(count))


def measure_planted(parts: Sequence[Part], config: DuplicatesConfig, seed: int, output: Output) -> Counts:
    """Run the task: plant duplicates in a sample from `parts`, and search the sample for duplicates. Measure the
    precision of the search, and its recall for each range of similarity.
    """
    del output  # the result contains only counts
    chance = random.Random(seed)  # noqa: S311 - the numbers only choose a sample
    originals = _sample(parts, chance)
    copies = [plant(text, chance.uniform(LOWEST, HIGHEST), config.ngram, originals, chance) for text in originals[::2]]
    texts = [*originals, *(copy.text for copy in copies)]
    truth = {(2 * place, len(originals) + place): copy.jaccard for place, copy in enumerate(copies)}
    found = find_similar(texts, config)
    right = sum(exact_jaccard(texts[left], texts[right], config.ngram) >= config.jaccard for left, right in found)
    all_pairs = Counter(_tenth(jaccard) for jaccard in truth.values())
    found_pairs = Counter(_tenth(jaccard) for pair, jaccard in truth.items() if pair in found)
    return {
        "sample": len(originals),
        "planted": {tenth: all_pairs[tenth] for tenth in sorted(all_pairs)},
        "planted_found": {tenth: found_pairs[tenth] for tenth in sorted(all_pairs)},
        "found": len(found),
        "right": right,
    }


def _sample(parts: Sequence[Part], chance: random.Random) -> list[str]:
    texts: list[str] = []
    least, most = _CHARACTERS
    for part in parts:
        fit = [document.text for document in part.documents() if least <= len(document.text) <= most]
        texts += chance.sample(fit, min(len(fit), SAMPLE // len(parts)))
    return texts


def plant(text: str, jaccard: float, ngram: int, others: Sequence[str], chance: random.Random) -> Planted:
    """Copy a text, and edit the copy so that its similarity to the text is about `jaccard`. The texts `others` supply
    new words.
    """
    pieces = text.split(" ")
    changed = len(words(text)) * (1 - jaccard) / (1 + jaccard)  # n-grams to replace
    if chance.random() < 0.7:
        for _ in range(round(changed / ngram)):
            _edit_word(pieces, chance.choice(others).split(" ", 50)[:50], chance)
    else:
        for _ in range(round(changed / (4 * max(1, ngram - 1)))):
            _swap_blocks(pieces, chance)
    copy = " ".join(pieces)
    return Planted(copy, exact_jaccard(text, copy, ngram))


def _edit_word(pieces: list[str], others: Sequence[str], chance: random.Random) -> None:
    place = chance.randrange(len(pieces))
    draw = chance.random()
    if draw < 0.6:
        pieces[place] = chance.choice(others)
    elif draw < 0.8:
        pieces.insert(place, chance.choice(others))
    elif len(pieces) > 1:
        del pieces[place]


def _swap_blocks(pieces: list[str], chance: random.Random) -> None:
    if len(pieces) < 2 * _BLOCK_WORDS:
        return
    first = chance.randrange(len(pieces) - 2 * _BLOCK_WORDS + 1)
    second = chance.randrange(first + _BLOCK_WORDS, len(pieces) - _BLOCK_WORDS + 1)
    one, other = slice(first, first + _BLOCK_WORDS), slice(second, second + _BLOCK_WORDS)
    pieces[one], pieces[other] = pieces[other], pieces[one]


def exact_jaccard(one: str, other: str, ngram: int) -> float:
    """Compute the Jaccard similarity of two texts from their n-grams, without hashes."""
    left, right = _grams(one, ngram), _grams(other, ngram)
    return len(left & right) / len(left | right) if left or right else 0.0


def _grams(text: str, ngram: int) -> set[tuple[str, ...]]:
    found = words(text)
    return {tuple(found[start : start + ngram]) for start in range(max(len(found) - ngram + 1, min(len(found), 1)))}


def find_similar(texts: Sequence[str], config: DuplicatesConfig) -> dict[tuple[int, int], float]:
    """Use the same functions as the stages to find near-duplicates among texts.

    Returns the Jaccard similarity of each found pair, keyed by the indices of the two texts, with the lower index
    first.
    """
    settings, check = search_settings(config)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        collection = Collection((_write_part(work, texts),))
        num_sketches = write_sketches(collection.parts[0], settings, _output(work, SKETCHES))["sketches"]
        output = _output(work, CANDIDATES)
        names = []
        for number, share in enumerate(shares(num_sketches, settings.bands)):
            names.append(f"{number:05}")
            find_candidates(collection, share, check.least_equal, names[-1], output)
        write_sets(collection, work, config.ngram, 0, _output(work, NGRAMS))
        output = _output(work, SIMILAR)
        check_pairs(collection, check, work, (0, int(first_number(1))), "pairs", output)
        groups = share_groups([work / CANDIDATES / f"{name}{GROUPS_SUFFIX}" for name in names], sys.maxsize)
        for own in groups:
            check_groups(collection, check, work, own, "groups", output)
        found: dict[tuple[int, int], float] = {}
        for name in ("pairs", *(["groups"] if groups else [])):
            table = read_table(output.path(f"{name}.arrow")).to_pydict()
            found.update(zip(zip(table["left"], table["right"], strict=True), table["jaccard"], strict=True))
        return found


def _write_part(work: Path, texts: Sequence[str]) -> Part:
    count = len(texts)
    empty = [""] * count
    ids = [str(number) for number in range(count)]
    columns = {"id": ids, "text": texts, "url": empty, "karma": [None] * count, "title": empty}
    (work / INGEST).mkdir()
    write_table(work / INGEST / "000000-0000.arrow", columns, DOCUMENTS)
    return Part(work, "000000-0000")


def _output(work: Path, stage: str) -> Output:
    (work / stage).mkdir()
    return Output(work / stage)


def _tenth(jaccard: float) -> str:
    return f"{min(int(jaccard * 10 + 1e-9), 9) / 10:.1f}"
