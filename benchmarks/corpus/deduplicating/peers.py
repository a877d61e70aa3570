"""Peers of the deduplication benchmark, run with the Python of their own environment.

python benchmarks/corpus/deduplicating/peers.py daft|daft-exact|datatrove FOLDER

The program reads FOLDER/parquet and writes the numbers of the dropped documents, one per line, to FOLDER/PEER.txt. All
peers search with word 5-grams. Only `daft-exact` checks the candidates exactly.
"""

import re
import shutil
import struct
import sys
from collections import defaultdict
from pathlib import Path

WORKERS = 2
NGRAM = 5
JACCARD = 0.7

_BETWEEN_WORDS = re.compile(r"[\W_]+")


def run_daft(folder: Path) -> list[int]:
    """Deduplicate with MinHash of 128 values in 16 bands of 8.

    Documents that share a band form a group, and all but the first document of a group are dropped.
    """
    parents: dict[int, int] = {}

    def root(one: int) -> int:
        while (parent := parents.setdefault(one, one)) != one:
            parents[one] = parents[parent]
            one = parent
        return one

    for members in _daft_groups(folder, bands=16, rows=8):
        first = root(members[0])
        for member in members[1:]:
            other = root(member)
            first, other = min(first, other), max(first, other)
            parents[other] = first
    return [number for number in list(parents) if root(number) != number]


def run_daft_exact(folder: Path) -> list[int]:
    """Deduplicate with the search of Crosscut, and compare the sets of 5-grams of the candidates.

    The sets of all candidates are made once and stay in memory. In each group, the first document is compared with the
    others, and its near-duplicates are dropped from the group; then the next remaining document follows. No pair is
    compared twice.
    """
    groups = _daft_groups(folder, bands=17, rows=4)
    grams = _daft_grams(folder, sorted({member for members in groups for member in members}))
    similar: dict[tuple[int, int], bool] = {}
    dropped: set[int] = set()
    for members in groups:
        left = sorted(members)
        while left:
            first, *left = left
            for other in left:
                if (first, other) not in similar:
                    common = len(grams[first] & grams[other])
                    union = len(grams[first]) + len(grams[other]) - common
                    similar[first, other] = common >= JACCARD * union
            duplicates = {other for other in left if similar[first, other]}
            dropped |= duplicates
            left = [other for other in left if other not in duplicates]
    return list(dropped)


def _daft_groups(folder: Path, *, bands: int, rows: int) -> list[list[int]]:
    """Numbers of the documents that share a band, for all bands with at least two such documents."""
    import daft
    from daft import col, lit
    from daft.functions import chunk, minhash, normalize, to_list

    texts = daft.read_parquet(str(folder / "parquet" / "*.parquet"))
    text = normalize(col("text"), remove_punct=True, lowercase=True, white_space=True)
    values = minhash(text, num_hashes=bands * rows, ngram_size=NGRAM, seed=1, hash_function="xxhash")
    places = to_list(*map(lit, range(bands)))
    found = texts.select("number", chunk(values, rows).alias("values"), places.alias("band"))
    groups: list[list[int]] = (
        found.explode("values", "band")
        .select("number", "band", col("values").hash().alias("key"))
        .groupby("band", "key")
        .agg(col("number").list_agg().alias("members"))
        .where(col("members").list_count() > 1)
        .select("members")
        .to_pydict()["members"]
    )
    return groups


def _daft_grams(folder: Path, numbers: list[int]) -> dict[int, set[int]]:
    """Hashes of the 5-grams of the documents with these numbers. A shorter document has one n-gram of all its words."""
    import daft
    from daft import col
    from daft.functions import is_in

    texts = daft.read_parquet(str(folder / "parquet" / "*.parquet"))
    grams = {}
    for row in texts.where(is_in(col("number"), numbers)).iter_rows():
        words = _BETWEEN_WORDS.sub(" ", row["text"].lower()).split()
        shifted = [words[start:] for start in range(NGRAM)]
        grams[row["number"]] = set(map(hash, zip(*shifted, strict=False))) or {hash(tuple(words))}
    return grams


def run_datatrove(folder: Path) -> list[int]:
    """Deduplicate with the three MinHash stages and their defaults (14 bands of 8).

    Words are split at spaces, which is the fastest tokenizer.
    """
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Blanks(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        sent_tokenize = span_tokenize = word_tokenize  # never called

    files = sorted((folder / "parquet").glob("*.parquet"))
    place = folder / "datatrove"
    shutil.rmtree(place, ignore_errors=True)
    signatures, buckets, removed = (str(place / name) for name in ("signatures", "buckets", "removed"))
    sign = [
        ParquetReader(str(folder / "parquet"), id_key="number"),
        MinhashDedupSignature(signatures, language=Blanks()),
    ]
    steps = [
        (sign, len(files)),
        ([MinhashDedupBuckets(signatures, buckets)], 14),
        ([MinhashDedupCluster(buckets, removed)], 1),
    ]
    for number, (pipeline, tasks) in enumerate(steps):
        logs = str(place / "logs" / str(number))
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=min(WORKERS, tasks), logging_dir=logs).run()
    numbers = defaultdict(list)
    for path in sorted(Path(removed).glob("*.remove")):
        content = path.read_bytes()
        numbers[int(path.stem)] = list(struct.unpack(f"<{len(content) // 4}I", content))
    return _numbers(files, numbers)


def _numbers(files: list[Path], rows: dict[int, list[int]]) -> list[int]:
    import pyarrow.parquet as pq

    found: list[int] = []
    for place, file in enumerate(files):
        numbers = pq.read_table(file, columns=["number"])["number"].to_pylist()
        found += [numbers[row] for row in rows.get(place, [])]
    return found


if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    dropped = {"daft": run_daft, "daft-exact": run_daft_exact, "datatrove": run_datatrove}[name](folder)
    (folder / f"{name}.txt").write_text("".join(f"{number}\n" for number in sorted(dropped)))
