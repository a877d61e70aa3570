"""Deduplication of real text: recall and precision on planted copies, speed compared with daft and datatrove, memory.

    python benchmarks/corpus/deduplicate.py BOOKS.jsonl.zst [--peers PYTHON]
    python benchmarks/corpus/deduplicate.py --manuals FOLDER [--peers PYTHON] [--before CHECKOUT]

Books are cut into pages of 1 to 20 KB. Some pages get an exact copy, others an edited copy: words are replaced,
inserted and removed, or blocks are moved. The Jaccard similarity of an edited copy is between 0.5 and 0.98 and is
computed exactly on the sets of 5-grams. Recall is the share of planted pairs that are found, by similarity. Precision
is the share of dropped documents whose match is the same text or similar enough. To measure pairs that were not
planted, a sample of documents is compared with all documents.

With `--manuals`, technical manuals are measured too, whole and without planted copies. Manuals share templates, so they
have far more pairs of similar documents than books. `benchmarks/corpus/manuals.py` downloads the manuals into FOLDER,
unless they are already there.

Contenders run in turns on the same documents. Each is a program timed from start to exit:

    crosscut    all stages of duplicates with the default settings (0.7 at recall 0.99), every pair checked exactly,
                from the cleaned parts to the list of drops; the stage `planted` only measures and is left out
    before      the same stages, with the code of the checkout of Crosscut that `--before` names
    daft        MinHash with 128 values in 16 bands of 8, then joined groups; no pair is checked
    daft-exact  daft with the bands of Crosscut (17 of 4), and then the exact check of Crosscut on the candidates
    datatrove   MinHash signatures, buckets and clusters with their defaults (14 bands of 8); no pair is checked, and
                the last step, which writes the remaining text, is left out

The peers need an environment of their own, because daft needs an older pyarrow. `--peers` names the Python of that
environment; without `--peers`, Crosscut runs alone. The packages of the environment are those of the extra
`benchmarks-corpus`:

    python -m venv .venv-peers && .venv-peers/bin/pip install daft 'datatrove[io,processing]'

CPU time is the sum over all processes of a program. Other work on the machine changes the CPU time less than the
seconds. With `--workers 1`, Crosscut works in one process, and the CPU time of each stage is printed too.

Memory is the sum over all processes of a program; a page shared by n processes counts 1/n in each (PSS). On books,
Crosscut is measured again on twice the text.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import ROOT, aligned, command_line, write_figures
from benchmarks.corpus.deduplicating.corpus import Corpus, make_corpus, read_corpus, write_corpus
from benchmarks.corpus.deduplicating.quality import judge, same_results, show_quality
from benchmarks.corpus.manuals import build_manuals
from benchmarks.machine import describe_machine
from benchmarks.processes import measure_command
from benchmarks.turns import alternate
from crosscut.corpus.documents import CLEANING, INGEST

PEERS = ("daft", "daft-exact", "datatrove")
WORKERS = 2
GOALS = {"daft": 0.8, "datatrove": 3.0, "memory": 1.5e9}
COLUMNS = ("", "median s", "min s", "CPU s", "min CPU s", "MB/s", "MB/CPU s", "peak MB",
           "of crosscut's: seconds (median, minimum), CPU time (median, minimum)")  # fmt: skip

HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    print(describe_machine("crosscut", "numpy", "pyarrow"))
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="crosscut-deduplicate-", dir=options.scratch) as temporary:
        folder = Path(temporary)
        if options.books:
            corpus = make_corpus(options.books, options.megabytes, seed=1)
            figures["books"] = measure("books", corpus, folder / "books", options)
            del corpus
            megabytes = prepare(make_corpus(options.books, 2 * options.megabytes, seed=1), folder / "twice")
            figures["twice"] = {"megabytes": megabytes, **run("crosscut", folder / "twice", options)}
            show_twice(figures["twice"], figures["books"])
        if options.manuals:
            corpus = read_corpus(build_manuals(options.manuals))
            figures["manuals"] = measure("manuals", corpus, folder / "manuals", options)
    write_figures(options.json, figures)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__, figures="write")
    parser.add_argument("books", type=Path, nargs="?", help="jsonl file, plain or .zst, with texts under `text`")
    parser.add_argument("--manuals", type=Path, help="folder with the manuals, or to download the manuals into")
    parser.add_argument("--before", type=Path, help="another checkout of Crosscut that takes part")
    parser.add_argument("--peers", type=Path, help="Python of the environment with daft and datatrove")
    parser.add_argument("--beside", nargs="+", choices=PEERS, default=PEERS, help="peers that take part")
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes of Crosscut")
    parser.add_argument("--megabytes", type=float, default=130, help="text of the books, copies included")
    parser.add_argument("--turns", type=int, default=5, help="runs of each contender")
    parser.add_argument("--tiny", action="store_true", help="one megabyte and two turns, to check that everything runs")
    parser.add_argument("--scratch", type=Path, help="folder for temporary files")
    options = parser.parse_args(arguments)
    if not options.books and not options.manuals:
        parser.error("`books` must be a jsonl file with texts, but is missing. Name a file, or use --manuals.")
    if options.tiny:
        options.megabytes, options.turns = 1, 2
    options.beside = list(options.beside) if options.peers else []
    options.contenders = ["crosscut", *(["before"] if options.before else []), *options.beside]
    return options


def prepare(corpus: Corpus, folder: Path) -> float:
    """Write the documents of a corpus, and return their megabytes."""
    write_corpus(corpus, folder)
    print(f"{corpus.megabytes:.1f} MB in {len(corpus.texts):,} documents, {len(corpus.pairs):,} planted pairs")
    return corpus.megabytes


def measure(name: str, corpus: Corpus, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all contenders on a corpus, and print the figures."""
    print(f"\n{name}: ", end="")
    figures: dict[str, Any] = {"megabytes": prepare(corpus, folder), "documents": len(corpus.texts)}
    if options.before:
        shutil.copytree(folder / "work", folder / "before" / "work")
    figures["turns"] = take_turns(folder, options)
    figures["quality"] = judge(corpus, folder, options.beside)
    show_quality(figures["quality"])
    show_turns(figures["turns"], figures["megabytes"], GOALS if name == "books" else {})
    if options.before:
        figures["same as before"] = same_results(folder / "work", folder / "before" / "work")
        print(f"crosscut drops the same documents for the same reasons as before: {figures['same as before']}")
    return figures


def take_turns(folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Measure the seconds and bytes of every contender in each turn. Each turn starts with another contender."""

    def one(name: str) -> dict[str, float]:
        used = run(name, folder, options)
        print(f"{name} {used['seconds']:.2f} s, CPU {used['cpu']:.2f} s", flush=True)
        return used

    return alternate({name: partial(one, name) for name in options.contenders}, options.turns)


def run(name: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Run a contender. Returns the seconds, and the CPU seconds and peak memory in bytes of all its processes."""
    environment = dict(os.environ)
    if name in ("crosscut", "before"):
        folder = folder / "before" if name == "before" else folder
        for stage in (folder / "work").iterdir():
            if stage.is_dir() and stage.name not in (INGEST, CLEANING):
                shutil.rmtree(stage)
        environment["PYTHONPATH"] = str(ROOT if name == "crosscut" else options.before.resolve())
        command = [sys.executable, str(HERE / "deduplicating" / "run.py"), str(folder), str(options.workers)]
    else:
        command = [str(options.peers), str(HERE / "deduplicating" / "peers.py"), name, str(folder)]
    return measure_command(command, environment=environment, quiet=True)._asdict()


def show_turns(turns: dict[str, list[dict[str, float]]], megabytes: float, goals: dict[str, float]) -> None:
    """Print seconds, CPU time, MB/s and memory of each contender, and the ratios to Crosscut's times.

    `goals` maps the names of contenders to goals for the ratios of the seconds.
    """
    ours, table = turns["crosscut"], [[*COLUMNS]]
    for name, rows in turns.items():
        times = {key: [row[key] for row in rows] for key in ("seconds", "cpu")}
        median = {key: statistics.median(some) for key, some in times.items()}
        peak = max(row["peak_bytes"] for row in rows) / 1e6
        cells = (median["seconds"], min(times["seconds"]), median["cpu"], min(times["cpu"]))
        speeds = (megabytes / median["seconds"], megabytes / median["cpu"], peak)
        ratios = []
        for key, some in times.items():
            least = min(some) / min(row[key] for row in ours)
            ratios += [statistics.median(row[key] / own[key] for row, own in zip(rows, ours, strict=True)), least]
        compared = ", ".join(f"{ratio:.2f}" for ratio in ratios) if name != "crosscut" else ""
        goal = f" (goal {goals[name]})" if name in goals else ""
        table.append([name, *(f"{cell:.1f}" for cell in (*cells, *speeds)), f"{compared}{goal}"])
    print(f"\n{aligned(table)}")


def show_twice(twice: dict[str, float], once: dict[str, Any]) -> None:
    """Print the speed and memory of Crosscut on twice the text."""
    peak = max(row["peak_bytes"] for row in once["turns"]["crosscut"])
    print(
        f"crosscut on {twice['megabytes']:.0f} MB: {twice['megabytes'] / twice['seconds']:.1f} MB/s, "
        f"peak {twice['peak_bytes'] / 1e6:.0f} MB, {twice['peak_bytes'] / peak:.2f} of the peak on half the text "
        f"(goal: under {GOALS['memory'] / 1e6:,.0f} MB and a ratio of 1)"
    )


if __name__ == "__main__":
    main()
