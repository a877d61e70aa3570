"""Corpus of the deduplication benchmark: pages of real text with planted duplicates, and the true similarities."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.texts import read_texts, take
from crosscut.corpus.batches import batches
from crosscut.corpus.documents import CLEANING, DOCUMENTS, INGEST, TEXTS, write_table
from crosscut.corpus.duplicates.planted import HIGHEST, LOWEST, plant
from crosscut.corpus.execution.stages import TaskRecord
from crosscut.corpus.words.ngrams import hash_words, ngrams
from crosscut.data.hashing import sha256

NGRAM = 5
PAGE_BYTES = (1_000, 20_000)
NEAR, EXACT = 0.15, 0.03
"""Number of near-duplicates and of exact copies for each page."""

PART_BYTES = 16_000_000


@dataclass(frozen=True)
class Corpus:
    """Documents by number, and the planted pairs."""

    texts: Sequence[str]
    pairs: dict[tuple[int, int], float]
    """Exact similarity of each pair, by the numbers of the original and its edited copy."""

    @property
    def megabytes(self) -> float:
        """Megabytes of all texts in UTF-8."""
        return sum(len(text.encode()) for text in self.texts) / 1e6


def make_corpus(books: Path, megabytes: float, seed: int) -> Corpus:
    """Build a corpus of about `megabytes`: pages and copies of some pages, in random order."""
    chance = random.Random(seed)
    pages = list(take(cut(books, chance), megabytes * 1e6 / (1 + NEAR + EXACT)))
    near = chance.sample(range(len(pages)), int(NEAR * len(pages)))
    copies = [plant(pages[place], chance.uniform(LOWEST, HIGHEST), NGRAM, pages, chance) for place in near]
    exact = [pages[place] for place in chance.sample(range(len(pages)), int(EXACT * len(pages)))]
    texts = [*pages, *(copy.text for copy in copies), *exact]
    order = list(range(len(texts)))
    chance.shuffle(order)
    number = {place: at for at, place in enumerate(order)}
    pairs = {
        (number[place], number[len(pages) + at]): copy.jaccard
        for at, (place, copy) in enumerate(zip(near, copies, strict=True))
    }
    return Corpus([texts[place] for place in order], pairs)


def cut(books: Path, chance: random.Random) -> Iterator[str]:
    """Yield pages of books. The logarithms of their lengths are uniformly distributed."""
    least, most = map(math.log, PAGE_BYTES)
    for text in read_texts(str(books)):
        start = 0
        while start < len(text):
            stop = start + int(math.exp(chance.uniform(least, most)))
            if len(text) - stop < PAGE_BYTES[0]:
                stop = len(text)
            yield text[start:stop]
            start = stop


def read_corpus(path: Path) -> Corpus:
    """Read a jsonl file as a corpus: its texts are the documents, as they are, and no duplicates are planted."""
    return Corpus(list(read_texts(str(path))), {})


def write_corpus(corpus: Corpus, folder: Path) -> None:
    """Write the documents twice: as cleaned parts for Crosscut to `work`, and for the peers to `parquet`."""
    ingest, cleaning = folder / "work" / INGEST, folder / "work" / CLEANING
    ingest.mkdir(parents=True)
    cleaning.mkdir()
    (folder / "parquet").mkdir()
    sizes = {}
    parts = batches(range(len(corpus.texts)), lambda place: len(corpus.texts[place]), PART_BYTES)
    for number, places in enumerate(parts):
        name = f"000000-{number:04}"
        texts = [corpus.texts[place] for place in places]
        empty = [""] * len(texts)
        columns = {"id": [str(place) for place in places], "text": texts, "url": empty, "title": empty}
        write_table(ingest / f"{name}.arrow", {**columns, "karma": [None] * len(texts)}, DOCUMENTS, packed=True)
        write_table(cleaning / f"{name}.arrow", {"row": list(range(len(texts))), "text": texts}, TEXTS)
        pq.write_table(pa.table({"number": places, "text": texts}), folder / "parquet" / f"{name}.parquet")
        sizes[name] = sum(len(text.encode()) for text in texts)
    for stage in (ingest, cleaning):
        written = sorted(stage.iterdir())
        record = TaskRecord(
            task="000000", key="", seconds=0, size=0, files={path.name: sha256(path) for path in written},
            sizes={path.name: path.stat().st_size for path in written}, counts={"parts": sizes},
        )  # fmt: skip
        (stage / "000000.json").write_text(record.content())


def pairs_of_sample(texts: Sequence[str], sample: Sequence[int], jaccard: float) -> set[tuple[int, int]]:
    """Find all pairs of a sampled document and another document whose similarity is at least `jaccard`, by exact
    comparison.
    """
    sets = [np.unique(ngrams(hash_words([texts[number]]), NGRAM).hashes) for number in sample]
    grams = np.concatenate(sets)
    owners = np.repeat(np.arange(len(sets)), list(map(len, sets)))[np.argsort(grams, kind="stable")]
    grams.sort()
    found = set()
    for number, text in enumerate(texts):
        own = np.unique(ngrams(hash_words([text]), NGRAM).hashes)
        starts, stops = np.searchsorted(grams, own, "left"), np.searchsorted(grams, own, "right")
        hits = np.flatnonzero(stops > starts)
        shared = np.concatenate([np.empty(0, int), *(owners[starts[hit] : stops[hit]] for hit in hits)])
        common = np.bincount(shared, minlength=len(sets))
        for place in np.flatnonzero(common).tolist():
            similarity = common[place] / (len(own) + len(sets[place]) - common[place])
            if similarity >= jaccard and sample[place] != number:
                found.add((min(sample[place], number), max(sample[place], number)))
    return found
