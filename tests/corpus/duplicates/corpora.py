"""Small corpora: ingested parts, texts with known similarities, and stages run on them."""

import random
from collections.abc import Sequence
from pathlib import Path

from crosscut.config.corpora import CorpusConfig, DuplicatesConfig, SourceConfig
from crosscut.corpus.collection import Collection, collect
from crosscut.corpus.documents import INGEST, READ, Part, read_drops
from crosscut.corpus.duplicates.candidates import preference
from crosscut.corpus.duplicates.planted import exact_jaccard
from crosscut.corpus.execution.stages import Output, StageTask, execute
from crosscut.corpus.parts import find_parts
from tests.corpus.ingested import write_documents

VOCABULARY = [f"word{number}" for number in range(400)]


def ingest(work: Path, parts: Sequence[Sequence[str]], urls: Sequence[Sequence[str]] = (), name: str = "") -> Path:
    """Write parts with these texts, as the stage `ingest` does. The ids consist of `name`, the part and the row."""

    def write(output: Output) -> dict[str, dict[str, int]]:
        for number, texts in enumerate(parts):
            ids = [f"{name}{number}.{row}" for row in range(len(texts))]
            path = output.path(f"000000-{number:04}.arrow")
            write_documents(path, ids, texts, urls=urls[number] if urls else ())
        return {"parts": {f"000000-{number:04}": sum(map(len, texts)) for number, texts in enumerate(parts)}}

    execute(work / INGEST, StageTask(name="000000", function=write), "key")
    return work


def collection_of(work: Path, texts: Sequence[str]) -> Collection:
    """A collection of one part."""
    return collect(ingest(work, [texts]), (), READ)


def corpus_config(folder: Path, **duplicates: object) -> CorpusConfig:
    return CorpusConfig(
        sources=(SourceConfig(name="s", files=("-",)),), folder=str(folder), duplicates=DuplicatesConfig(**duplicates)
    )


def drops(work: Path, stage: str) -> dict[str, tuple[str, str, str]]:
    """Dropped documents by id: the rule, the detail, and the id of the matching document."""
    found = {}
    for part, _ in find_parts(work):
        ids = [document.id for document in Part(work, part.name).documents()]
        for drop in read_drops(work, stage, part.name).to_pylist():
            found[ids[drop["row"]]] = (drop["rule"], drop["detail"], drop["other"])
    return found


def made_texts(chance: random.Random, families: int, copies: int) -> list[str]:
    """Texts of random words and, for each text, copies with some words replaced. The order is random."""
    texts = []
    for _ in range(families):
        words = chance.choices(VOCABULARY, k=chance.randint(30, 90))
        texts.append(" ".join(words))
        for _ in range(chance.randint(0, copies)):
            edited = list(words)
            for _ in range(chance.randint(0, 3)):
                edited[chance.randrange(len(edited))] = chance.choice(VOCABULARY)
            texts.append(" ".join(edited))
    chance.shuffle(texts)
    return texts


def kept_by_all_pairs(texts: Sequence[str], jaccard: float, ngram: int) -> set[int]:
    """Indexes of the texts that are kept if all pairs of texts are compared: the longest text of every cluster, and the
    first of texts with equal lengths.
    """
    import numpy as np

    first = {text: place for place, text in reversed(list(enumerate(texts)))}
    left = sorted(first.values())
    cluster = {place: {place} for place in left}
    for at, one in enumerate(left):
        for other in left[at + 1 :]:
            if exact_jaccard(texts[one], texts[other], ngram) >= jaccard:
                both = cluster[one] | cluster[other]
                for place in both:
                    cluster[place] = both
    kept = set()
    for members in cluster.values():
        numbers = np.array(sorted(members), np.uint64)
        lengths = np.array([len(texts[number]) for number in numbers], np.uint64)
        kept.add(int(numbers[preference(np.zeros(len(numbers), bool), lengths, numbers)[0]]))
    return kept
