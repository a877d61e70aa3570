"""Speed of every stage of `crosscut prepare` on real text, and the peak memory of all its processes.

    python benchmarks/corpus/prepare.py BOOKS.jsonl.zst --mail 'FOLDER/**/*.txt' \
        --test-sets lambada_test.jsonl wiki.test.raw --tokenizer tokenizer.json

The benchmark runs the command like a user, with the paper's settings. It prints for every stage the megabytes of its
input per second, and marks a stage below the goal of 5 MB/s. Memory is the sum over the command and its workers,
measured ten times a second; a page shared by n processes counts 1/n in each (PSS). `--folder` keeps the corpus and its
report.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomli_w

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line, write_figures
from benchmarks.machine import print_machine
from benchmarks.processes import measure_command

GOAL_MB_PER_SECOND = 5.0
GOAL_MEMORY = 2e9


def main() -> None:
    parser = command_line(__doc__, figures="write")
    parser.add_argument("books", type=Path, help="jsonl file, plain or .zst, with texts under `text`")
    parser.add_argument("--mail", type=Path, help="folder of messages, or a glob")
    parser.add_argument("--test-sets", type=Path, nargs="*", default=[], help="files of the test sets")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; by default one is trained")
    parser.add_argument("--folder", type=Path, help="keep the corpus in this folder")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="section.key=value", help="further settings of the corpus"
    )
    options = parser.parse_args()
    print_machine("crosscut", "gigatoken", "ftfy", "eldc", "pyarrow")
    with tempfile.TemporaryDirectory(prefix="crosscut-prepare-") as temporary:
        folder = options.folder or Path(temporary) / "corpus"
        figures = measure(describe(options, folder), Path(temporary) / "corpus.toml", *options.set)
    write_figures(options.json, figures)


def measure(table: dict[str, Any], config: Path, *settings: str) -> dict[str, Any]:
    """Prepare a corpus with the real command, print the figures of its stages, and return them with its report."""
    config.write_text(tomli_w.dumps(table), encoding="utf-8")
    used = measure_command([sys.executable, "-m", "crosscut", "prepare", str(config), *settings])
    folder = Path(table["folder"])
    timings, report = (json.loads((folder / f"{name}.json").read_text()) for name in ("timings", "report"))
    read = report["summary"]["read"]["bytes"]
    stages = [{**one, "bytes": read if one["name"] == "ingest" else one["bytes"]} for one in timings["stages"]]
    figures = {"seconds": used.seconds, "peak_bytes": used.peak_bytes, "stages": stages}
    show(figures)
    return {**figures, "report": report}


def describe(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Build the corpus config from the options."""
    sources = [{"name": "books", "files": [str(options.books.resolve())]}]
    if options.mail:
        sources.append({"name": "mail", "files": [str(options.mail.resolve())], "format": "mail"})
    return {
        "folder": str(folder),
        "sources": sources,
        "ingest": {"max_rejects": 0.2},
        "leakage": {"test_sets": [str(path.resolve()) for path in options.test_sets]},
        "tokens": {"tokenizer": str(options.tokenizer.resolve()) if options.tokenizer else ""},
    }


def show(figures: dict[str, Any]) -> None:
    print(f"\n{'stage':<24}{'MB':>9}{'seconds':>10}{'MB/s':>9}")
    for stage in figures["stages"]:
        size, seconds = stage["bytes"] / 1e6, stage["elapsed"]
        if stage["run"]:
            slow = "  below the goal" if size > 10 and size / seconds < GOAL_MB_PER_SECOND else ""
            print(f"{stage['name']:<24}{size:>9.1f}{seconds:>10.1f}{size / seconds:>9.1f}{slow}")
    print(f"\nin all {figures['seconds']:.0f} s, peak {figures['peak_bytes'] / 1e6:,.0f} MB ", end="")
    print(f"(goals: {GOAL_MB_PER_SECOND:.0f} MB/s for every stage, {GOAL_MEMORY / 1e6:,.0f} MB)")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
