"""Overlap of a corpus with test sets, as the paper measures it, and the speed and memory of finding it.

    python benchmarks/corpus/leakage.py BOOKS.jsonl.zst --test-sets lambada_test.jsonl wiki.test.raw

The command runs the leakage stages of `crosscut prepare` with the paper's settings: 8-grams, a Bloom filter, passages
removed with 200 characters on both sides. For each test set it prints the share of 8-grams that occur in the texts and
the longest common passages. It also prints the 8-grams that occur in most documents, the text that would be removed,
the MB/s, and the peak memory of all processes.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line, write_figures
from benchmarks.machine import describe_machine
from benchmarks.processes import Peak, held_by
from benchmarks.texts import take
from crosscut.config.corpora import EngineConfig, LeakageAction, LeakageConfig
from crosscut.corpus.batches import batches
from crosscut.corpus.documents import DOCUMENTS, INGEST, READ, write_table
from crosscut.corpus.execution.engine import start_engine
from crosscut.corpus.execution.running import StageResult, run_stage
from crosscut.corpus.execution.stages import Counts, Digests, Output, StageTask, execute
from crosscut.corpus.leakage.stages import leakage_stages
from crosscut.data import read_documents
from crosscut.data.progress import ProgressBar

PART_BYTES = 16_000_000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, figures="write")
    parser.add_argument(
        "texts", nargs="+", help="jsonl, txt or parquet files, plain or compressed, with texts under `text`"
    )
    parser.add_argument("--test-sets", nargs="+", required=True, help="files of the test sets")
    pages = "split texts into documents of this many characters; by default a text is one document"
    parser.add_argument("--pages", type=int, default=0, help=pages)
    action = "what happens to shared text (`leakage.action`); articles and report also fill the paper's Bloom filter"
    parser.add_argument("--action", choices=[str(one) for one in LeakageAction], default="passage", help=action)
    parser.add_argument("--megabytes", type=float, default=float("inf"), help="most text to read")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--show", type=int, default=5, help="passages and 8-grams to print")
    options = parser.parse_args(arguments)
    figures: dict[str, Any] = {"machine": describe_machine("crosscut", "abloom", "numpy", "pyarrow")}
    print(figures["machine"])
    with tempfile.TemporaryDirectory(prefix="crosscut-leakage-") as temporary:
        work = Path(temporary)
        documents = take(read(options.texts, options.pages), options.megabytes * 1e6, size=bytes_of)
        digests = ingest(documents, work)
        config = LeakageConfig(test_sets=tuple(options.test_sets), action=options.action)
        figures |= measure(work, config, digests, options.workers)
    show(figures, options.show)
    write_figures(options.json, figures)


def read(files: list[str], page: int) -> Iterator[tuple[str, str]]:
    """Yield the id and text of each document."""
    for document in read_documents(files):
        name = f"texts/{Path(document.source.name).name}"
        step = page or len(document.text)
        for number, start in enumerate(range(0, len(document.text), step), 1):
            suffix = f"-{number}" if page else ""
            yield f"{name}#{document.record}{suffix}", document.text[start : start + step]


def bytes_of(document: tuple[str, str]) -> int:
    """Bytes of a document's text."""
    return len(document[1].encode())


def ingest(documents: Iterable[tuple[str, str]], work: Path) -> Digests:
    """Write documents as parts, like the stage `ingest`."""

    def write(output: Output) -> Counts:
        sizes: dict[str, int] = {}
        for number, part in enumerate(batches(documents, bytes_of, PART_BYTES)):
            name, blank = f"000000-{number:04}", [""] * len(part)
            names, texts = zip(*part, strict=True)
            columns = {"id": names, "text": texts, "url": blank, "karma": [None] * len(texts), "title": blank}
            write_table(output.path(f"{name}.arrow"), columns, DOCUMENTS)
            sizes[name] = sum(map(bytes_of, part))
        return {"parts": sizes}

    digests = Digests()
    digests.learn(work / INGEST, execute(work / INGEST, StageTask(name="000000", function=write), "texts"))
    return digests


def measure(work: Path, config: LeakageConfig, digests: Digests, workers: int) -> dict[str, Any]:
    results: dict[str, StageResult] = {}
    seconds: dict[str, float] = {}
    peak = Peak(os.getpid())
    before = sum(os.times()[:4])
    with start_engine(EngineConfig(workers=workers), work) as engine, ProgressBar(shown=False) as bar:
        for stage in leakage_stages(config, work, READ):
            started = time.monotonic()
            results[stage.name] = run_stage(stage, work, engine=engine, digests=digests, bar=bar)
            seconds[stage.name] = time.monotonic() - started
        held = held_by(os.getpid())  # `Peak` samples every half second, so a short run has no sample
    leakage = results["leakage"]
    return {
        "peak_bytes": max(peak.stop(), held),
        "workers": workers,
        "seconds": seconds,
        "processor_seconds": sum(os.times()[:4]) - before,
        "bytes": leakage.size,
        "mb_per_s": leakage.size / seconds["leakage"] / 1e6,
        "mb_per_s_of_a_process": leakage.size / leakage.seconds / 1e6,
        "gathered": results["test-sets"].counts,
        "removed": leakage.counts,
        "overlap": results["overlap"].counts,
    }


def show(figures: dict[str, Any], most: int) -> None:
    removed = figures["removed"]
    for name, table in figures["overlap"]["test_sets"].items():
        print(
            f"\n{name}: {table['grams_found']:,} of {table['grams']:,} 8-grams found "
            f"({table['grams_found'] / max(table['grams'], 1):.2%}), in {table['documents_touched']:,} of "
            f"{removed['documents_in']:,} documents; {table['items_touched']:,} of {table['items']:,} items overlap, "
            f"{table['items_half_found']:,} by half or more"
        )
        if "grams_let_through" in table:
            left, through = (table[key] / max(table["grams"], 1) for key in ("grams_left", "grams_let_through"))
            print(f"  left: {left:.3%}, confirmed; {through:.3%} by a Bloom filter of the corpus alone")
        for one in table["longest"][:most]:
            print(
                f"  {one['grams']:>4}  item {one['item']}, {one['document']}: {' '.join(one['passage'].split())[:160]}"
            )
    print("\n8-grams in most documents:")
    for one in figures["overlap"]["frequent"][:most]:
        print(f"  {one['documents']:>5}  {one['gram']}  ({', '.join(one['test_sets'])})")
    cut = removed["cut"]
    print(f"\nremoved: {cut['places']:,} passages in {cut['documents']:,} documents, {cut['bytes'] / 1e6:.2f} MB")
    for name, rule in removed["rules"].items():
        print(f"dropped, {name}: {rule['documents']:,} documents, {rule['bytes'] / 1e6:.2f} MB")
    asked, chance = removed["grams_asked"], removed["false_positives"]
    print(f"{asked:,} 8-grams looked up, {chance:,} false positives of the Bloom filter ({chance / max(asked, 1):.2e})")
    print(
        f"{figures['bytes'] / 1e6:.1f} MB, {figures['workers']} processes: {figures['mb_per_s']:.1f} MB/s "
        f"({figures['mb_per_s_of_a_process']:.1f} per process); test sets read in "
        f"{figures['seconds']['test-sets']:.1f} s, corpus filter {figures['seconds'].get('corpus-filter', 0):.1f} s, "
        f"overlap summed in {figures['seconds']['overlap']:.1f} s; "
        f"{figures['processor_seconds']:.1f} s of processor time in all, peak {figures['peak_bytes'] / 1e6:,.0f} MB"
    )


if __name__ == "__main__":
    main()
