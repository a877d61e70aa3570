"""Quality of deduplication: planted pairs that are found, dropped documents that are wrong, similar pairs that stay."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.corpus.deduplicating.corpus import NGRAM, Corpus, pairs_of_sample
from crosscut.corpus.documents import INGEST, read_drops, read_table
from crosscut.corpus.duplicates.clusters import CLUSTERS, NEAR
from crosscut.corpus.duplicates.planted import exact_jaccard
from crosscut.corpus.duplicates.similarity import SIMILAR
from crosscut.corpus.duplicates.stages import EXACT
from crosscut.corpus.execution.stages import read_records
from crosscut.corpus.parts import find_parts

JACCARD = 0.7
SAMPLED = 400
GOALS = {"recall": 0.99, "recall 0.7 to 0.8": 0.97, "precision": 1.0}

Pair = tuple[int, int]


def judge(corpus: Corpus, folder: Path, peers: Sequence[str]) -> dict[str, Any]:
    """Compute recall and precision of Crosscut and of the peers, and read the seconds of Crosscut's stages."""
    similar, gone = read_ours(corpus, folder / "work")
    first = {text: number for number, text in reversed(list(enumerate(corpus.texts)))}
    same = [first[text] for text in corpus.texts]  # exact copies share one search for near-duplicates
    found = {(min(pair), max(pair)) for pair in similar}

    def is_found(pair: Pair) -> bool:
        one, other = sorted(same[number] for number in pair)
        return one == other or (one, other) in found

    dropped = {"crosscut": set(gone)}
    for name in peers:
        dropped[name] = set(map(int, (folder / f"{name}.txt").read_text().split()))
    right = sum(
        exact_jaccard(corpus.texts[number], corpus.texts[other], NGRAM) >= JACCARD for number, other in gone.items()
    )
    return {
        "planted": by_tenth(corpus, is_found),
        "one goes": {
            name: by_tenth(corpus, lambda pair, some=some: bool(some & set(pair))) for name, some in dropped.items()
        },
        "dropped": {"documents": len(gone), "right": right},
        "sample": judge_sample(corpus, is_found, dropped),
        "stages": json.loads((folder / "crosscut.json").read_text()),
    }


def judge_sample(corpus: Corpus, is_found: Any, dropped: dict[str, set[int]]) -> dict[str, Any]:
    """Compare a sample of documents with all documents. Count the similar pairs, those that Crosscut finds, and those
    that lose a document.

    Crosscut does not find all pairs of a large group, but at least one document of each such pair is dropped.
    """
    sample = random.Random(2).sample(range(len(corpus.texts)), min(SAMPLED, len(corpus.texts)))
    pairs = pairs_of_sample(corpus.texts, sample, JACCARD)
    planted = {(min(pair), max(pair)) for pair in corpus.pairs}
    return {
        "documents": len(sample),
        "pairs": len(pairs),
        "not planted": len([pair for pair in pairs if pair not in planted]),
        "found": sum(map(is_found, pairs)),
        "one goes": {name: sum(bool(some & set(pair)) for pair in pairs) for name, some in dropped.items()},
    }


def read_ours(corpus: Corpus, work: Path) -> tuple[list[Pair], dict[int, int]]:
    """Read Crosscut's results: the pairs that it found similar, and the match of every document that it drops."""
    names = [part.name for part, _ in find_parts(work)]
    ids = [read_table(work / INGEST / f"{name}.arrow")["id"].to_pylist() for name in names]
    assert sum(map(len, ids)) == len(corpus.texts)
    pairs = []
    for record in read_records(work, SIMILAR):
        table = read_table(work / SIMILAR / f"{record.task}.arrow").to_pydict()
        for left, right in zip(table["left"], table["right"], strict=True):
            one, other = (int(ids[number >> 32][number & 0xFFFFFFFF]) for number in (left, right))
            pairs.append((one, other))
    gone = {}
    for place, name in enumerate(names):
        for stage in (EXACT, NEAR):
            for drop in read_drops(work, stage, name).to_pylist():
                gone[int(ids[place][drop["row"]])] = int(drop["other"])
    return pairs, gone


def same_results(one: Path, other: Path) -> bool:
    """Whether two work folders have the same clusters and drops, byte for byte."""
    files = {path.relative_to(one) for stage in (EXACT, CLUSTERS, NEAR) for path in one.glob(f"{stage}/*.arrow")}
    return all((one / path).read_bytes() == (other / path).read_bytes() for path in files)


def by_tenth(corpus: Corpus, is_found: Any) -> dict[str, list[int]]:
    """Count planted pairs by tenth of similarity: how many were found, and how many there are."""
    everything = Counter(f"{int(jaccard * 10) / 10:.1f}" for jaccard in corpus.pairs.values())
    found = Counter(f"{int(jaccard * 10) / 10:.1f}" for pair, jaccard in corpus.pairs.items() if is_found(pair))
    return {tenth: [found[tenth], everything[tenth]] for tenth in sorted(everything)}


def show_quality(quality: dict[str, Any]) -> None:
    """Print the seconds of the stages, recall by similarity, precision, and the sample."""
    for name, stage in quality["stages"].items():
        print(f"{name:<16}{stage['elapsed']:>8.2f} s elapsed{stage['cpu']:>8.2f} s of the main process's CPU time")
    if quality["planted"]:
        _show_planted(quality)
    dropped, sample = quality["dropped"], quality["sample"]
    precision = dropped["right"] / max(1, dropped["documents"])
    print(f"precision: {precision:.4f} of {dropped['documents']:,} dropped documents (goal {GOALS['precision']})")
    losing = ", ".join(f"{name} {count / max(1, sample['pairs']):.4f}" for name, count in sample["one goes"].items())
    print(
        f"of {sample['documents']} documents compared with all: {sample['pairs']} pairs at {JACCARD} and above, "
        f"{sample['not planted']} not planted, {sample['found']} found\n"
        f"share of these pairs with a dropped document: {losing}"
    )


def _show_planted(quality: dict[str, Any]) -> None:
    print(f"\n{'similarity':<12}{'planted':>9}{'found':>8}{'recall':>9}   pairs with a dropped document:")
    for tenth, (found, planted) in quality["planted"].items():
        peers = ", ".join(f"{name} {some[tenth][0] / planted:.3f}" for name, some in quality["one goes"].items())
        print(f"{tenth:<12}{planted:>9}{found:>8}{found / planted:>9.4f}   {peers}")
    high = [row for tenth, row in quality["planted"].items() if float(tenth) >= JACCARD]
    found, planted = map(sum, zip(*high, strict=True))
    low, all_low = quality["planted"].get("0.7", [1, 1])
    print(f"recall at {JACCARD} and above: {found / planted:.4f} (goal {GOALS['recall']}), ", end="")
    print(f"0.7 to 0.8: {low / all_low:.4f} (goal {GOALS['recall 0.7 to 0.8']})")
