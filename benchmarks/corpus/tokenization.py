"""Speed and memory of turning text into token shards, compared with the tokenizer library alone.

    python benchmarks/corpus/tokenization.py --memory                                  # the built-in corpus
    python benchmarks/corpus/tokenization.py --engines --text BOOKS.jsonl.zst --tokenizer gpt2/tokenizer.json


Crosscut does all of `prepare` with a given tokenizer: it hashes and reads the text, starts the workers, encodes,
splits, writes and hashes shards. The library alone runs `encode_batch_fast` on lists in memory, with as many threads,
and drops the results. Both run in turns, and the medians count.

With `--engines` the command compares two engines on every document instead: `DocumentEncoder.encode`, which uses
gigatoken if it supports the tokenizer, and the library alone. They encode each batch in turn, in processes of one
thread. All ids are compared. Rates use processor time and count all processes together.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line, write_figures
from benchmarks.machine import describe_machine, print_machine
from benchmarks.processes import Peak
from benchmarks.texts import read_texts
from benchmarks.turns import alternate, peak_bytes
from crosscut.config import DataConfig
from crosscut.config.system.machine import available_cores
from crosscut.corpus.batches import batches
from crosscut.data import Tokenizer, prepare

MEGABYTE = 1_000_000
LIBRARY_BATCH_CHARACTERS = 4 * MEGABYTE  # smaller and larger batches were not faster
LIBRARIES = ("tokenizers", "gigatoken", "numpy", "zstandard")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    options = _parse(arguments)
    os.environ["RAYON_NUM_THREADS"] = str(options.workers)  # threads of the library
    report: dict[str, Any] = {"machine": describe_machine(*LIBRARIES), "workers": options.workers}
    print_machine(*LIBRARIES)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder = Path(scratch)
        tokenizer = options.tokenizer or _train_tokenizer(options.text, folder / "tokenizer.json")
        if options.engines:
            report["engines"] = compare_engines(options.text, tokenizer, workers=options.workers)
        else:
            text = write_text(options.text, options.megabytes, folder / "text.jsonl")
            report["speed"] = measure_speed(text, tokenizer, turns=options.turns, workers=options.workers)
        if options.memory:
            report["memory"] = measure_memory(
                options.text, tokenizer, folder, sizes=options.memory_megabytes, workers=options.workers
            )
    write_figures(options.json, report)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__, figures="write")
    parser.add_argument(
        "--text", nargs="+", default=["builtin:state-of-the-union"], help="texts to encode, named as in `data.text`"
    )
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; by default one is trained on the text")
    parser.add_argument(
        "--megabytes", type=float, default=100, help="text of a turn; the corpus is repeated to fill it"
    )
    parser.add_argument("--turns", type=int, default=5, help="runs of each contender")
    parser.add_argument(
        "--workers", type=int, default=available_cores(), help="processes of Crosscut and threads of the library"
    )
    parser.add_argument("--engines", action="store_true", help="compare the engines on the whole text, id by id")
    parser.add_argument("--memory", action="store_true", help="also measure peak memory")
    sizes = "megabytes of text to measure memory on"
    parser.add_argument("--memory-megabytes", type=float, nargs="+", default=[10, 100, 1000], help=sizes)
    parser.add_argument("--scratch", type=Path, help="folder for temporary files")
    return parser.parse_args(arguments)


def _train_tokenizer(patterns: Sequence[str], path: Path) -> Path:
    Tokenizer.train(read_texts(*patterns), vocab_size=8192).save(path)
    return path


def write_text(patterns: Sequence[str], megabytes: float, path: Path) -> Path:
    """Write a jsonl file of `megabytes` of text. The corpus is repeated to fill it."""
    left = int(megabytes * MEGABYTE)
    with path.open("w", encoding="utf-8") as file:
        while left > 0:
            for whole in read_texts(*patterns):
                text = whole[:left]
                left -= len(text.encode("utf-8"))
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                if left <= 0:
                    break
    return path


def measure_speed(text: Path, tokenizer: Path, *, turns: int, workers: int) -> dict[str, Any]:
    """Measure the MB/s of Crosscut and of the library alone, in turns, and the ratio of the medians."""
    megabytes = sum(len(one.encode("utf-8")) for one in read_texts(str(text))) / MEGABYTE

    def rate(name: str, encode: Callable[[Path, Path, int], float]) -> float:
        found = megabytes / encode(text, tokenizer, workers)
        print(f"{name} {found:.2f} MB/s", flush=True)
        return found

    contenders = {"crosscut": encode_with_ours, "library alone": encode_with_library}
    ours, library = alternate({name: partial(rate, name, one) for name, one in contenders.items()}, turns).values()
    medians = statistics.median(ours), statistics.median(library)
    ratio = medians[0] / medians[1]
    print(
        f"medians of {turns} turns of {megabytes:.1f} MB on {workers} cores: crosscut {medians[0]:.2f} MB/s, "
        f"library alone {medians[1]:.2f} MB/s, ratio {ratio:.2f}"
    )
    rates = {"ours_mb_per_s": ours, "library_mb_per_s": library}
    return {"megabytes": megabytes, **rates, "median_ours": medians[0], "median_library": medians[1], "ratio": ratio}


def encode_with_ours(text: Path, tokenizer: Path, workers: int) -> float:
    """Time `prepare` from a file of text to a folder of tokens."""
    folder = text.parent / "tokens"
    shutil.rmtree(folder, ignore_errors=True)
    start = time.perf_counter()
    prepare(DataConfig(text=(str(text),), tokenizer=str(tokenizer)), folder, seed=0, workers=workers, progress=False)
    return time.perf_counter() - start


def encode_with_library(text: Path, tokenizer: Path, workers: int) -> float:  # noqa: ARG001 - set by RAYON_NUM_THREADS
    """Time the encoding of texts that are in memory already."""
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(str(tokenizer))
    texts = list(batches(read_texts(str(text)), len, LIBRARY_BATCH_CHARACTERS))
    start = time.perf_counter()
    for batch in texts:
        inner.encode_batch_fast(batch, add_special_tokens=False)
    return time.perf_counter() - start


class Compared(NamedTuple):
    """Results of both engines on one batch, or on all batches."""

    engine: str
    documents: int
    differ: int
    """Documents whose ids differ."""

    tokens: int
    num_bytes: int
    seconds: float
    library_seconds: float
    peak_bytes: int
    """Peak memory of the process so far."""


def compare_engines(patterns: Sequence[str], tokenizer: Path, *, workers: int) -> dict[str, Any]:
    """Measure the MB/s of both engines and their ratio, and count the documents with different ids."""
    jobs = ((batch, tokenizer) for batch in batches(read_texts(*patterns), len, LIBRARY_BATCH_CHARACTERS))
    with multiprocessing.get_context("spawn").Pool(workers, _one_thread) as pool:
        done = list(pool.imap(_compare, jobs))
    engine = done[0].engine
    total = Compared(engine, *(sum(column) for column in zip(*(one[1:] for one in done), strict=True)))
    ours, library = (total.num_bytes / MEGABYTE / took * workers for took in (total.seconds, total.library_seconds))
    peak = max(one.peak_bytes for one in done)
    print(
        f"{total.documents} documents, {total.num_bytes / MEGABYTE:.1f} MB, {total.tokens / 1e6:.1f} million tokens, "
        f"{workers} processes: {total.engine} {ours:.1f} MB/s, library alone {library:.1f} MB/s, "
        f"ratio {ours / library:.1f}; {total.differ} documents differ; "
        f"peak memory of a process {peak / MEGABYTE:.0f} MB"
    )
    rates = {"mb_per_s": ours, "library_mb_per_s": library, "ratio": ours / library}
    return {**total._asdict(), **rates, "peak_bytes": peak}


def _one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


@cache
def _both(path: Path) -> tuple[Tokenizer, Any]:
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.encode_special_tokens = True
    tokenizer = Tokenizer.load(path)
    tokenizer.documents.encode(["a text"])  # loads the engine
    return tokenizer, inner


def _compare(job: tuple[list[str], Path]) -> Compared:
    texts, path = job
    tokenizer, inner = _both(path)
    start = time.process_time()
    tokens, lengths = tokenizer.documents.encode(texts)
    middle = time.process_time()
    encodings = inner.encode_batch_fast(texts, add_special_tokens=False)
    end = time.process_time()
    expected = (np.array([*encoding.ids, tokenizer.end_of_text]) for encoding in encodings)
    pieces = np.split(tokens, lengths.cumsum()[:-1])
    return Compared(
        engine=tokenizer.documents.engine,
        documents=len(texts),
        differ=sum(not np.array_equal(one, other) for one, other in zip(pieces, expected, strict=True)),
        tokens=len(tokens),
        num_bytes=sum(len(text.encode("utf-8")) for text in texts),
        seconds=middle - start,
        library_seconds=end - middle,
        peak_bytes=peak_bytes(),
    )


def measure_memory(
    patterns: Sequence[str], tokenizer: Path, folder: Path, *, sizes: Sequence[float], workers: int
) -> list[dict[str, float]]:
    """Measure the peak memory of a process that prepares text of each size, its workers included."""
    figures = []
    for megabytes in sizes:
        text = write_text(patterns, megabytes, folder / "memory.jsonl")
        process = multiprocessing.get_context("spawn").Process(target=encode_with_ours, args=(text, tokenizer, workers))
        process.start()
        watched = Peak(process.pid, every=0.05)
        process.join()
        peak = watched.stop()
        if process.exitcode:
            sys.exit(f"Preparing the text must succeed, but ended with exit code {process.exitcode}.")
        print(f"{megabytes:g} MB of text: peak {peak / MEGABYTE:.0f} MB in {workers} workers and their parent")
        figures.append({"megabytes": megabytes, "peak_megabytes": peak / MEGABYTE})
    return figures


if __name__ == "__main__":
    main()
