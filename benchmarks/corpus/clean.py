"""Speed of text repair and language detection, and a comparison of every repaired text with ftfy.

    python benchmarks/corpus/clean.py --books BOOKS.jsonl.zst --mail FOLDER --sentences FOLDER

`--books` is a jsonl file with the texts under `text`, `--mail` is a folder of messages, `--sentences` is a folder with
a file for each language, one sentence per line. Every text goes through `repair` with the default steps and then
through `ftfy.fix_text` with the same steps, in the same process. With `--all-steps`, these are all steps, which are
ftfy's defaults. Two variants of every text also go through both functions: one with the quotes and dashes of a printed
book, and one in which every tenth non-ASCII line was decoded with a wrong codec, a different one each time. Rates use
processor time and count all workers together. The language filter runs on the texts, and each detector on the
sentences, whose language is known.

    python benchmarks/corpus/clean.py --sentences FOLDER --by-language

prints, for each language, how many right sentences the cleaning changes, how much planted mojibake it repairs, and how
many ends of sentences are found, and nothing else (`languages.py`).
"""

import argparse
import multiprocessing
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import aligned, command_line, write_figures
from benchmarks.corpus.languages import show_languages
from benchmarks.machine import print_machine
from benchmarks.texts import read_texts, take
from crosscut.config.corpora import CleaningConfig, LanguageConfig
from crosscut.config.system.machine import available_cores
from crosscut.corpus.batches import batches
from crosscut.corpus.cleaning.repair import ftfy_settings, repair
from crosscut.corpus.documents import Document
from crosscut.corpus.filters.language import LanguageFilter

CODECS = ("latin-1", "cp1252", "cp1251", "cp1250", "cp1253", "cp1254", "cp1257", "iso-8859-2", "mac-roman", "cp437")
BATCH_CHARACTERS = 1_000_000
SLOW_SENTENCES = 50


@dataclass(kw_only=True)
class Figures:
    """Counts and seconds of repairing some texts."""

    documents: int = 0
    num_bytes: int = 0
    changed: int = 0
    differ: int = 0
    seconds: float = 0.0
    reference_seconds: float = 0.0

    def add(self, other: "Figures") -> None:
        """Add the figures of other texts."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, figures="write")
    parser.add_argument("--books", type=Path, help="jsonl file with texts under `text`")
    parser.add_argument("--mail", type=Path, help="folder of messages")
    parser.add_argument("--sentences", type=Path, help="folder of files named by language, a sentence per line")
    parser.add_argument("--by-language", action="store_true", help="print only the tables by language of --sentences")
    parser.add_argument("--all-steps", action="store_true", help="repair with all steps, as ftfy does by default")
    parser.add_argument("--megabytes", type=float, default=float("inf"), help="most text of each kind")
    parser.add_argument("--workers", type=int, default=available_cores(), help="processes")
    options = parser.parse_args(arguments)
    print_machine("ftfy", "eldc", "langdetect")
    figures: dict[str, object]
    if options.by_language:
        if not options.sentences:
            parser.error("--by-language needs --sentences")
        figures = {"by language": show_languages(options.sentences)}
    else:
        figures = {"repair": measure_repair(options), "language": measure_language(options)}
        if options.sentences:
            figures["accuracy"] = [measure_accuracy(options.sentences, name) for name in ("eldc", "langdetect")]
    write_figures(options.json, figures)


def kinds(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Iterator[str]]]]:
    """Yield the name of each kind that was given, and a function that reads its texts."""
    if options.books:
        yield "books", lambda: read_texts(str(options.books))
    if options.mail:
        yield "mail", lambda: map(read_message, sorted(options.mail.rglob("*.txt")))
    if options.sentences:
        yield "sentences", lambda: (path.read_text("utf-8") for path in sorted(options.sentences.glob("*.txt")))


def read_message(path: Path) -> str:
    """Read a message with its headers, as UTF-8 or else as Latin-1."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def totals_of(
    work: Callable[[list[str]], dict[str, Figures]], options: argparse.Namespace
) -> Iterator[tuple[str, Figures]]:
    """Let the workers measure all texts. Yields the figures of each kind and variant of texts, by their title."""
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for name, texts in kinds(options):
            totals: defaultdict[str, Figures] = defaultdict(Figures)
            parts = batches(take(texts(), options.megabytes * 1e6), len, BATCH_CHARACTERS)
            for done in pool.imap_unordered(work, parts):
                for variant, figures in done.items():
                    totals[name + variant].add(figures)
            yield from totals.items()


def measure_repair(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure the MB/s of the repair and of ftfy, and count the documents that they repair differently."""
    found = {}
    rows: list[list[object]] = [["repair", "documents", "MB", "changed", "differ", "MB/s", "ftfy MB/s"]]
    config = CleaningConfig.all_or_none(True) if options.all_steps else CleaningConfig()
    work = partial(compare, config)
    for title, figures in totals_of(work, options):
        rate, reference = (
            figures.num_bytes / 1e6 / seconds * options.workers if seconds else float("nan")
            for seconds in (figures.seconds, figures.reference_seconds)
        )
        found[title] = {**vars(figures), "mb_per_second": rate, "reference_mb_per_second": reference}
        counts = (figures.documents, f"{figures.num_bytes / 1e6:.1f}", figures.changed, figures.differ)
        rows.append([title, *counts, f"{rate:.1f}", f"{reference:.1f}"])
    print(f"\n{aligned(rows)}", flush=True)
    return found


def compare(config: CleaningConfig, texts: list[str]) -> dict[str, Figures]:
    """Repair each variant of the texts with `repair` and with ftfy."""
    import ftfy

    reference = partial(ftfy.fix_text, config=ftfy.TextFixerConfig(**ftfy_settings(config)))
    return {variant: repair_all(config, list(make(texts)), reference) for variant, make in VARIANTS.items()}


def repair_all(config: CleaningConfig, texts: Sequence[str], reference: Callable[[str], str]) -> Figures:
    """Repair texts and compare the result with that of a reference function."""
    repair("", config)  # loads the tables before the clock starts
    start = time.process_time()
    repaired = [repair(text, config) for text in texts]
    seconds = time.process_time() - start
    expected = [reference(text) for text in texts]
    return Figures(
        documents=len(texts),
        num_bytes=sum(len(text.encode("utf-8", "surrogatepass")) for text in texts),
        changed=sum(one != text for one, text in zip(repaired, texts, strict=True)),
        differ=sum(one != other for one, other in zip(repaired, expected, strict=True)),
        seconds=seconds,
        reference_seconds=time.process_time() - start - seconds,
    )


def misdecoded(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts with every tenth non-ASCII line decoded by a wrong codec."""
    number = 0
    for text in texts:
        lines = text.split("\n")
        for place, line in enumerate(lines):
            if not line.isascii():
                if number % 10 == 0:
                    codec = CODECS[number // 10 % len(CODECS)]
                    lines[place] = line.encode("utf-8", "surrogatepass").decode(codec, errors="replace")
                number += 1
        yield "\n".join(lines)


def typeset(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts with curly quotes and dashes."""
    for text in texts:
        opened = text.replace(' "', " \u201c").replace('\n"', "\n\u201c").replace('"', "\u201d")
        yield opened.replace("'", "\u2019").replace("--", "\u2014")


VARIANTS = {"": iter, ", typeset": typeset, ", mis-decoded": misdecoded}
"""Changes to the texts before they are repaired, by the suffix of their title."""


def measure_language(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure the MB/s of the default detector."""
    found = {}
    rows: list[list[object]] = [["language (eldc)", "documents", "MB", "MB/s"]]
    for name, figures in totals_of(tell_languages, options):
        rate = figures.num_bytes / 1e6 / figures.seconds * options.workers
        rows.append([name, figures.documents, f"{figures.num_bytes / 1e6:.1f}", f"{rate:.0f}"])
        found[name] = {**vars(figures), "mb_per_second": rate}
    print(f"\n{aligned(rows)}", flush=True)
    return found


def tell_languages(texts: list[str]) -> dict[str, Figures]:
    judge = LanguageFilter(LanguageConfig())
    documents = [Document(row, "", text) for row, text in enumerate(texts)]
    start = time.process_time()
    drops = judge(documents).drops
    seconds = time.process_time() - start
    num_bytes = sum(document.num_bytes for document in documents)
    return {"": Figures(documents=len(texts), num_bytes=num_bytes, changed=len(drops), seconds=seconds)}


def measure_accuracy(folder: Path, detector: str) -> dict[str, object]:
    """Measure the accuracy of the filter for English on single sentences and on groups of ten."""
    judge = LanguageFilter(LanguageConfig(detector=detector))
    files = sorted(folder.glob("*.txt"))
    found: dict[str, object] = {"detector": detector}
    for title, length in (("sentences", 1), ("ten sentences", 10)):
        kept: Counter[str] = Counter()
        total: Counter[str] = Counter()
        exact = 0
        for path in files:
            lines = path.read_text(encoding="utf-8").splitlines()
            texts = [" ".join(lines[at : at + length]) for at in range(0, len(lines) - length + 1, length)]
            texts = texts if detector == "eldc" else texts[:SLOW_SENTENCES]
            judgement = judge([Document(row, "", text) for row, text in enumerate(texts)])
            total[path.stem] += len(texts)
            kept[path.stem] += len(texts) - len(judgement.drops)
            exact += judgement.marks["language"].to_pylist().count(path.stem)
        foreign = total.total() - total["en"]
        figures = {
            "documents": total.total(),
            "english_kept": kept["en"] / total["en"],
            "foreign_passed": (kept.total() - kept["en"]) / foreign,
            "exact": exact / total.total(),
        }
        print(
            f"{detector}, {title}: {figures['documents']} documents, {figures['english_kept']:.3f} of English kept, "
            f"{figures['foreign_passed']:.4f} of others passed, {figures['exact']:.3f} told exactly"
        )
        found[title] = figures
    return found


if __name__ == "__main__":
    main()
