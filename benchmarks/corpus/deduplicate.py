"""Deduplication of real text: recall and precision on planted copies, speed compared with daft and datatrove, memory.

    python benchmarks/corpus/deduplicate.py BOOKS.jsonl.zst [--peers PYTHON]

Books are cut into pages of 1 to 20 KB. Some pages get an exact copy, others an edited copy: words are replaced,
inserted and removed, or blocks are moved. The Jaccard similarity of an edited copy is between 0.5 and 0.98 and is
computed exactly on the sets of 5-grams. Recall is the share of planted pairs that are found, by similarity. Precision
is the share of dropped documents whose match is the same text or similar enough. To measure pairs that were not
planted, a sample of documents is compared with all documents.

Contenders run in turns on the same documents. Each is a program with two workers, timed from start to exit:

    crosscut    all stages of duplicates with the default settings (0.7 at recall 0.99), every pair checked exactly,
                from the cleaned parts to the list of drops; the stage `planted` only measures and is left out
    daft        MinHash with 128 values in 16 bands of 8, then joined groups; no pair is checked
    datatrove   MinHash signatures, buckets and clusters with their defaults (14 bands of 8); no pair is checked, and
                the last step, which writes the remaining text, is left out

The peers need an environment of their own, because daft needs an older pyarrow. `--peers` names the Python of that
environment; without `--peers`, Crosscut runs alone. The packages of the environment are those of the extra
`benchmarks-corpus`:

    python -m venv .venv-peers && .venv-peers/bin/pip install daft 'datatrove[io,processing]'

Memory is the sum over all processes of a program; a page shared by n processes counts 1/n in each (PSS). Crosscut is
measured again on twice the text.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.corpus.deduplicate_corpus import NGRAM, Corpus, make_corpus, pairs_of_sample, write_corpus
from benchmarks.machine import describe_machine
from benchmarks.peak import Peak
from crosscut.config.corpora import CorpusConfig, EngineConfig, SourceConfig
from crosscut.corpus.documents import CLEANING, INGEST, read_drops, read_table
from crosscut.corpus.duplicates.clusters import NEAR
from crosscut.corpus.duplicates.planted import PLANTED, exact_jaccard
from crosscut.corpus.duplicates.similarity import SIMILAR
from crosscut.corpus.duplicates.stages import EXACT, duplicate_stages
from crosscut.corpus.execution.engine import start_engine
from crosscut.corpus.execution.running import run_stage
from crosscut.corpus.execution.stages import Digests, read_records
from crosscut.corpus.parts import find_parts
from crosscut.data.progress import ProgressBar

PEERS = ("daft", "datatrove")
WORKERS = 2
JACCARD = 0.7
SAMPLED = 400
GOALS = {"recall": 0.99, "recall 0.7 to 0.8": 0.97, "precision": 1.0, "daft": 0.8, "datatrove": 3.0, "memory": 1.5e9}
HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.run:
        find_duplicates(options.run)
        return
    print(describe_machine("crosscut", "numpy", "pyarrow"))
    with tempfile.TemporaryDirectory(prefix="crosscut-deduplicate-", dir=options.scratch) as temporary:
        folder = Path(temporary)
        corpus = prepare(options.books, options.megabytes, folder / "once")
        figures: dict[str, Any] = {"megabytes": corpus.megabytes, "documents": len(corpus.texts)}
        figures["turns"] = take_turns(folder / "once", options)
        figures["quality"] = judge(corpus, folder / "once", ["crosscut", *options.contenders[1:]])
        del corpus
        twice = prepare(options.books, 2 * options.megabytes, folder / "twice")
        figures["twice"] = {"megabytes": twice.megabytes, **run(command("crosscut", folder / "twice", options))}
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Recall, precision, speed and memory of finding near-duplicates.")
    parser.add_argument("books", type=Path, nargs="?", help="jsonl file, plain or .zst, with texts under `text`")
    parser.add_argument("--peers", type=Path, help="Python of the environment with daft and datatrove")
    parser.add_argument("--beside", nargs="+", choices=PEERS, default=PEERS, help="peers that take part")
    parser.add_argument("--megabytes", type=float, default=130, help="text of the corpus, copies included")
    parser.add_argument("--turns", type=int, default=5, help="runs of each contender")
    parser.add_argument("--tiny", action="store_true", help="one megabyte and two turns, to check that everything runs")
    parser.add_argument("--scratch", type=Path, help="folder for temporary files")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)  # the program that is timed
    options = parser.parse_args(arguments)
    if not options.run and not options.books:
        parser.error("`books` must be a jsonl file with texts, but is missing. Name a file.")
    if options.tiny:
        options.megabytes, options.turns = 1, 2
    options.contenders = ["crosscut", *(options.beside if options.peers else [])]
    return options


def prepare(books: Path, megabytes: float, folder: Path) -> Corpus:
    corpus = make_corpus(books, megabytes, seed=1)
    write_corpus(corpus, folder)
    print(f"{corpus.megabytes:.1f} MB in {len(corpus.texts):,} documents, {len(corpus.pairs):,} planted pairs")
    return corpus


def find_duplicates(folder: Path) -> None:
    """Run the stages of Crosscut on the cleaned parts."""
    work = folder / "work"
    config = CorpusConfig(
        sources=(SourceConfig(name="books", files=("-",)),), folder=str(folder), engine=EngineConfig(workers=WORKERS)
    )
    digests = Digests()
    for before in (INGEST, CLEANING):
        for record in read_records(work, before):
            digests.learn(work / before, record)
    seconds = {}
    with start_engine(config.engine, work) as engine, ProgressBar(shown=False) as bar:
        for stage in duplicate_stages(config, (), cleaned=True):
            if stage.name != PLANTED:
                start = time.perf_counter()
                result = run_stage(stage, work, engine=engine, digests=digests, bar=bar)
                seconds[stage.name] = {"elapsed": time.perf_counter() - start, "counts": result.counts}
    (folder / "crosscut.json").write_text(json.dumps(seconds))


def command(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    if name == "crosscut":
        return [sys.executable, __file__, "--run", str(folder)]
    return [str(options.peers), str(HERE / "deduplicate_peers.py"), name, str(folder)]


def take_turns(folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Measure the seconds and bytes of every contender in each turn. Each turn starts with another contender."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in options.contenders}
    for turn in range(options.turns):
        shift = turn % len(options.contenders)
        for name in options.contenders[shift:] + options.contenders[:shift]:
            for stage in filter(Path.is_dir, (folder / "work").iterdir()):
                if name == "crosscut" and stage.name not in (INGEST, CLEANING):
                    shutil.rmtree(stage)
            turns[name].append(run(command(name, folder, options)))
            print(f"turn {turn + 1}: {name} {turns[name][-1]['seconds']:.2f} s", flush=True)
    return turns


def run(arguments: list[str]) -> dict[str, float]:
    """Run a program and return its seconds and the peak memory of all its processes, in bytes."""
    started = time.monotonic()
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = Peak(process.pid)
    _, errors = process.communicate()
    seconds = time.monotonic() - started
    if process.returncode:
        sys.exit(f"`{' '.join(arguments)}` must end well, but exited with {process.returncode}:\n{errors}")
    return {"seconds": seconds, "peak_bytes": peak.stop()}


def judge(corpus: Corpus, folder: Path, contenders: Sequence[str]) -> dict[str, Any]:
    """Compute recall and precision of the contenders, and the seconds of Crosscut's stages."""
    pairs, gone = read_ours(corpus, folder / "work")
    first = {text: number for number, text in reversed(list(enumerate(corpus.texts)))}
    same = [first[text] for text in corpus.texts]  # exact copies share one search for near-duplicates
    found = {(min(one, other), max(one, other)) for one, other in pairs}

    def is_found(one: int, other: int) -> bool:
        one, other = sorted((same[one], same[other]))
        return one == other or (one, other) in found

    right = sum(
        exact_jaccard(corpus.texts[number], corpus.texts[other], NGRAM) >= JACCARD for number, other in gone.items()
    )
    sample = random.Random(2).sample(range(len(corpus.texts)), min(SAMPLED, len(corpus.texts)))
    exhaustive = pairs_of_sample(corpus.texts, sample, JACCARD)
    planted = {(min(pair), max(pair)) for pair in corpus.pairs}
    dropped = {"crosscut": set(gone)}
    for name in contenders[1:]:
        dropped[name] = set(map(int, (folder / f"{name}.txt").read_text().split()))
    return {
        "planted": by_tenth(corpus, lambda pair: is_found(*pair)),
        "one goes": {
            name: by_tenth(corpus, lambda pair, some=some: bool(some & set(pair))) for name, some in dropped.items()
        },
        "dropped": {"documents": len(gone), "right": right},
        "sample": {
            "documents": len(sample),
            "pairs": len(exhaustive),
            "not planted": len([pair for pair in exhaustive if pair not in planted]),
            "found": sum(is_found(*pair) for pair in exhaustive),
        },
        "stages": json.loads((folder / "crosscut.json").read_text()),
    }


def read_ours(corpus: Corpus, work: Path) -> tuple[list[tuple[int, int]], dict[int, int]]:
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


def by_tenth(corpus: Corpus, is_found: Any) -> dict[str, list[int]]:
    """Count planted pairs by tenth of similarity: how many were found, and how many there are."""
    everything = Counter(f"{int(jaccard * 10) / 10:.1f}" for jaccard in corpus.pairs.values())
    found = Counter(f"{int(jaccard * 10) / 10:.1f}" for pair, jaccard in corpus.pairs.items() if is_found(pair))
    return {tenth: [found[tenth], everything[tenth]] for tenth in sorted(everything)}


def show(figures: dict[str, Any]) -> None:
    show_quality(figures["quality"])
    turns, megabytes = figures["turns"], figures["megabytes"]
    print(
        f"\n{'':<12}{'median s':>10}{'min s':>9}{'MB/s':>8}{'peak MB':>9}   of crosscut's time: median, minimum (goal)"
    )
    for name, rows in turns.items():
        times = [row["seconds"] for row in rows]
        ratios = [row["seconds"] / ours["seconds"] for row, ours in zip(rows, turns["crosscut"], strict=True)]
        least = min(times) / min(row["seconds"] for row in turns["crosscut"])
        compared = f"   {statistics.median(ratios):.2f}, {least:.2f} ({GOALS[name]})" if name != "crosscut" else ""
        median, peak = statistics.median(times), max(row["peak_bytes"] for row in rows)
        print(f"{name:<12}{median:>10.2f}{min(times):>9.2f}{megabytes / median:>8.1f}{peak / 1e6:>9.0f}{compared}")
    twice = figures["twice"]
    peak = max(row["peak_bytes"] for row in turns["crosscut"])
    print(
        f"crosscut on {twice['megabytes']:.0f} MB: {twice['megabytes'] / twice['seconds']:.1f} MB/s, "
        f"peak {twice['peak_bytes'] / 1e6:.0f} MB, {twice['peak_bytes'] / peak:.2f} of the peak on half the text "
        f"(goal: under {GOALS['memory'] / 1e6:,.0f} MB and a ratio of 1)"
    )


def show_quality(quality: dict[str, Any]) -> None:
    for name, stage in quality["stages"].items():
        print(f"{name:<16}{stage['elapsed']:>7.2f} s")
    print(f"\n{'similarity':<12}{'planted':>9}{'found':>8}{'recall':>9}   pairs with a dropped document:")
    for tenth, (found, planted) in quality["planted"].items():
        peers = ", ".join(f"{name} {some[tenth][0] / planted:.3f}" for name, some in quality["one goes"].items())
        print(f"{tenth:<12}{planted:>9}{found:>8}{found / planted:>9.4f}   {peers}")
    high = [row for tenth, row in quality["planted"].items() if float(tenth) >= JACCARD]
    found, planted = map(sum, zip(*high, strict=True))
    low, all_low = quality["planted"].get("0.7", [1, 1])
    dropped, sample = quality["dropped"], quality["sample"]
    print(f"recall at {JACCARD} and above: {found / planted:.4f} (goal {GOALS['recall']}), ", end="")
    print(f"0.7 to 0.8: {low / all_low:.4f} (goal {GOALS['recall 0.7 to 0.8']})")
    precision = dropped["right"] / max(1, dropped["documents"])
    print(f"precision: {precision:.4f} of {dropped['documents']:,} dropped documents (goal {GOALS['precision']})")
    print(
        f"of {sample['documents']} documents compared with all: {sample['pairs']} pairs at {JACCARD} and above, "
        f"{sample['not planted']} not planted, {sample['found']} found"
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
