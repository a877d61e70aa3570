"""The whole of `crosscut prepare` on one folder of web pages, a dump in pieces, mail, text, web archives and damage.

    python benchmarks/corpus/mixed.py --folder FOLDER

The folder has the pages of `benchmarks/extract.py`, which are in 22 languages, the articles of
`benchmarks/corpus/wikipedia_dump.py`, the mails with which CPython tests its module `email`, the State of the Union
addresses, and `DAMAGE`. One source with the format `auto` reads everything, and the three languages with the most pages
are kept. The benchmark prints the seconds of each stage and every loss with its reason, and fails if a damage is not
reported as expected, or if the figures of the report do not add up. `--folder` keeps the corpus and its page.
"""

import bz2
import gzip
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from test import test_email  # mails of all kinds, valid and invalid

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line, work_folder
from benchmarks.corpus.extraction.fetch import default_cache, fetch
from benchmarks.corpus.extraction.pages import read_pages
from benchmarks.corpus.prepare import measure
from benchmarks.corpus.warc import crawled
from benchmarks.corpus.wikipedia import CACHE
from benchmarks.corpus.wikipedia_dump import build_dump
from benchmarks.machine import print_machine
from benchmarks.texts import addresses
from crosscut.corpus.audit.rejects import read_rejects
from crosscut.corpus.origins import read_skipped

LANGUAGES = ("en", "es", "ja")
NOISE = random.Random(7).randbytes(50_000)
PAGE = b"<html><body><p>" + b"A page of a crawl. " * 100 + b"</p></body></html>"
ROWS = "".join(f'{{"text": "Row {number}: {"some words of a row, and no others. " * 40}"}}\n' for number in range(500))
DUMP = (
    '<mediawiki xml:lang="en"><siteinfo><dbname>enwiki</dbname></siteinfo>\n'
    + "".join(
        f"<page><title>T{number}</title><ns>0</ns><id>{number}</id><revision><text>{'Some words. ' * 90}</text>"
        "</revision></page>\n"
        for number in range(500)
    )
    + "</mediawiki>\n"
)

DAMAGE: dict[str, tuple[bytes, str]] = {
    "truncated.jsonl.gz": (gzip.compress(ROWS.encode())[:-900], "damaged"),
    "enwiki-20240101-pages-articles3.xml-p151574p311329.bz2": (bz2.compress(DUMP.encode())[:-900], "damaged"),
    "truncated.warc.gz": (gzip.compress(b"".join(crawled("a", PAGE)))[:-50], "damaged"),
    "broken.jsonl": (b'{"text": broken\n{"text": "\\ud800"}\n{"text": 7}\n', "rejected"),
    "noise.html": (NOISE, "rejected"),
    "noise.txt": (NOISE, "rejected"),
    "large.html": (b"<p>" + b"words " * 3_000_000, "rejected"),
    "frames.html": (b"<html><frameset><frame src=a.html></frameset></html>", "frameset"),
    "empty.html": (b"<html><body></body></html>", "blank"),
    "menu.html": (b"<html><body><nav><a href=a>The whole page is a menu</a></nav></body></html>", "no main text"),
    "picture.png": (b"\x89PNG\r\n\x1a\n" + NOISE, "left out"),
}
"""Damaged files, and where the report must show them: among the damaged files, the rejects, the records that a rule
skipped, or the files that were left out."""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of downloads; default: %(default)s")
    parser.add_argument("--folder", type=Path, help="keep the sources and the corpus in this new folder")
    options = parser.parse_args()
    print_machine("crosscut", "resiliparse", "ftfy", "eldc", "pyarrow")
    with work_folder(options.folder) as folder:
        num_files = write_sources(folder / "sources", options.cache)
        report = measure(describe(folder), folder / "corpus.toml")["report"]
        work = folder / "corpus" / "work"
        print(f"\n{num_files:,} files, {report['summary']['read']['documents']:,} documents read")
        faults = [*show_losses(report, work), *check_damage(report, work), *check_sums(report)]
    sys.exit("\n".join(faults) if faults else 0)


def write_sources(folder: Path, cache: Path) -> int:
    """Write the folder of sources, and return the number of its files."""
    pages = read_pages()
    for page, path in zip(pages, fetch(pages, default_cache()).values(), strict=True):
        _copy(path, folder / "pages" / page.site / path.name)
    build_dump(folder / "wikipedia", cache)
    for path in sorted(Path(test_email.__file__).parent.glob("data/msg_*.txt")):
        _copy(path, folder / "mail" / f"{path.stem}.eml")
    contents = {f"text/{number:03}.txt": text.encode() for number, text in enumerate(addresses())}
    contents |= {f"damage/{name}": content for name, (content, _) in DAMAGE.items()}
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return sum(path.is_file() for path in folder.rglob("*"))


def _copy(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)


def describe(folder: Path) -> dict[str, Any]:
    """Build the config: one source that reads all files of the folder."""
    return {
        "folder": str(folder / "corpus"),
        "sources": [{"name": "all", "files": [str(folder / "sources")]}],
        "ingest": {"max_damaged_files": 3, "max_rejects": 0.1},
        "language": {"keep": list(LANGUAGES)},
        "tokens": {"vocab_size": 8192},
    }


def show_losses(report: dict[str, Any], work: Path) -> Iterator[str]:
    """Print the documents that each rule took, with a sample, and every record that could not be read. Yields a line
    for each loss without an example.
    """
    print(f"\n{'stage':<16}{'rule':<18}{'documents':>10}{'MB':>8}  example")
    for entry in report["flow"]:
        for rule, figures in entry["rules"].items():
            size = figures["documents"], figures.get("bytes", 0) / 1e6
            sample = next(iter(figures["samples"]), None)
            told = f"{sample['id']}: {sample['detail'] or sample['other']}" if sample else ""
            print(f"{entry['stage']:<16}{rule:<18}{size[0]:>10,}{size[1]:>8.2f}  {told[:100]}")
            if not sample:
                yield f"The rule `{rule}` of `{entry['stage']}` must show an example of its losses, but shows none."
        if entry.get("changed"):
            print(
                f"{entry['stage']:<16}changed: {', '.join(f'{n:,} by {name}' for name, n in entry['changed'].items())}"
            )
    print("\nrecords that could not be read:")
    for reject in read_rejects(work):
        print(f"  {Path(reject['file']).name}, {reject['place']}: {reject['rule']}: {reject['reason'][:90]}")
    print(f"files that were left out: {report['left_out']}")


def check_damage(report: dict[str, Any], work: Path) -> Iterator[str]:
    """Yield a line for each file of `DAMAGE` that is not where it must be."""
    found = {(Path(one["name"]).name, "damaged") for one in report["damaged"]}
    found |= {(Path(one["file"]).name, "rejected") for one in read_rejects(work)}
    found |= {(Path(one.name).name, one.rule) for one in read_skipped(work)}
    found |= {("picture.png", "left out")} if ".png" in report["left_out"].get("all", {}) else set()
    for name, (_, expected) in DAMAGE.items():
        if (name, expected) not in found:
            yield f"`{name}` must be shown as `{expected}`, but is not."


def check_sums(report: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each stage whose losses are not the difference between its input and its output."""
    for before, after in zip(report["flow"], report["flow"][1:], strict=False):
        if before["out"]["documents"] != after["in"]["documents"]:
            yield f"`{after['stage']}` must begin with the documents that `{before['stage']}` left."
    for entry in report["flow"]:
        lost = sum(rule["documents"] for rule in entry["rules"].values())
        if entry["in"]["documents"] - entry["out"]["documents"] != lost:
            yield f"The rules of `{entry['stage']}` must sum up to its losses, but sum up to {lost:,}."


if __name__ == "__main__":
    main()
