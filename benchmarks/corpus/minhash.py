"""Speed and error of Crosscut's MinHash values, compared with rensa and datasketch if these are installed.

    python benchmarks/corpus/minhash.py BOOKS.jsonl.zst

Pages of books and their copies, edited to a Jaccard similarity of about 0.7, get a sketch of 128 values each. The
estimate is the share of equal values, and the error is its difference from the exact similarity J. With independent
values the standard deviation of the error would be sqrt(J (1 - J) / 128). All contenders get the same documents.
Crosscut starts from the text; the libraries start from 5-grams of the same words, joined by spaces, and hash them.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line
from benchmarks.corpus.deduplicating.corpus import NGRAM, cut
from benchmarks.machine import print_machine
from crosscut.corpus.duplicates.planted import plant
from crosscut.corpus.duplicates.sketches import SketchSettings, minhash
from crosscut.corpus.words.ngrams import hash_words, ngrams, words

VALUES = 128
JACCARD = 0.7


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("books", type=Path, help="jsonl file, plain or .zst, with texts under `text`")
    parser.add_argument("--pairs", type=int, default=1000, help="pages, each with an edited copy")
    parser.add_argument("--turns", type=int, default=3, help="runs of each contender")
    options = parser.parse_args()
    print_machine("numpy", "rensa", "datasketch")
    chance = random.Random(0)
    pages = [page for page, _ in zip(cut(options.books, chance), range(options.pairs), strict=False)]
    copies = [plant(page, JACCARD, NGRAM, pages, chance) for page in pages]
    texts = [*pages, *(copy.text for copy in copies)]
    truth = np.array([copy.jaccard for copy in copies])
    expected = np.sqrt(np.mean(truth * (1 - truth)) / VALUES)
    print(f"{len(pages)} pairs, similarity {truth.mean():.3f}, error of independent values {expected:.4f}")
    makers = {"ours": ours, "rensa": rensa, "datasketch": datasketch}
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    errors: dict[str, Any] = {}
    for _ in range(options.turns):
        for name, make in makers.items():
            try:
                started = time.process_time()
                values = make(texts)
                seconds[name].append(time.process_time() - started)
            except ImportError:
                continue
            errors[name] = (values[: len(pages)] == values[len(pages) :]).mean(axis=1) - truth
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    for name, error in errors.items():
        rate = megabytes / statistics.median(seconds[name])
        print(f"{name:<12}{rate:>7.1f} MB/s of one core   error {error.mean():+.4f} ± {error.std():.4f}")


def ours(texts: Sequence[str]) -> Any:
    batches = [texts[start : start + 64] for start in range(0, len(texts), 64)]
    settings = SketchSettings(NGRAM, VALUES, 1)
    return np.concatenate([minhash(ngrams(hash_words(batch), NGRAM), settings) for batch in batches])


def rensa(texts: Sequence[str]) -> Any:
    from rensa import RMinHash

    return _values(texts, lambda: RMinHash(num_perm=VALUES, seed=1), lambda sketch: sketch.digest())


def datasketch(texts: Sequence[str]) -> Any:
    from datasketch import MinHash

    def update(sketch: Any, grams: list[str]) -> None:
        sketch.update_batch([gram.encode() for gram in grams])

    return _values(texts, lambda: MinHash(num_perm=VALUES, seed=1), lambda sketch: sketch.hashvalues, update)


def _values(
    texts: Sequence[str],
    make: Callable[[], Any],
    read: Callable[[Any], Any],
    update: Callable[[Any, list[str]], None] = lambda sketch, grams: sketch.update(grams),
) -> Any:
    found = []
    for text in texts:
        said = words(text)
        sketch = make()
        update(sketch, [" ".join(said[start : start + NGRAM]) for start in range(max(1, len(said) - NGRAM + 1))])
        found.append(read(sketch))
    return np.array(found)


if __name__ == "__main__":
    main()
