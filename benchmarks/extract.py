"""Main text of real HTML pages: Crosscut's extraction beside resiliparse, trafilatura and readability-lxml.

    python benchmarks/extract.py

The pages and the strings that their main text must and must not contain come from `benchmarks/corpus/extraction/`;
missing pages are fetched. A string to keep that is found is a true positive, and one that is not found is a false
negative. A string to drop that is found is a false positive. This is how trafilatura's own evaluation counts. A string
is found if the extracted text contains it after all whitespace was removed from both, because extractors break lines
at different places. Every contender gets the decoded page. Rates are processor time of this process, and the
contenders take turns on every page. Peers that are not installed are left out.
"""

import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.commands import command_line
from benchmarks.corpus.extraction.fetch import default_cache, fetch
from benchmarks.corpus.extraction.pages import HALVES, Expected, Page, read_expected, read_pages
from benchmarks.machine import print_machine
from crosscut.config.corpora import Extraction
from crosscut.config.errors import DataError
from crosscut.corpus.readers.charsets import charset_in_page, decode
from crosscut.corpus.readers.html import extract, extract_page

Extractor = Callable[[str], str]
Texts = dict[str, dict[str, str]]
"""Text without whitespace by contender and page."""
Seconds = dict[str, dict[str, list[float]]]
"""Seconds of each repeat by contender and half of the pages."""


@dataclass(frozen=True)
class Case:
    """A page with its markup and the strings by which its extracted text is judged."""

    page: Page
    markup: str
    expected: Expected


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of the pages; default: %(default)s")
    parser.add_argument("--half", choices=HALVES, help="measure only this half of the pages")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure only these contenders")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each contender; default: %(default)s")
    parser.add_argument("--languages", action="store_true", help="also print the figures of each language")
    options = parser.parse_args()
    try:
        cases = read_cases([page for page in read_pages() if options.half in (None, page.half)], options.cache)
    except DataError as error:
        sys.exit(f"error: {error}")
    contenders = {name: one for name, one in installed().items() if options.only is None or name in options.only}
    print_machine("resiliparse", "trafilatura", "readability-lxml")
    texts, rates = measure(contenders, cases, options.repeats)
    for half in HALVES:
        of_half = [case for case in cases if case.page.half == half]
        print_figures(f"half {half}", of_half, texts, rates)
        for name, of_group in by_language(of_half, each=options.languages).items():
            print_figures(f"half {half}, {name}", of_group, texts, {})


def read_cases(pages: Sequence[Page], cache: Path) -> list[Case]:
    """Read the pages, after fetching those that the folder lacks, and decode them as the reader of HTML does."""
    expected = read_expected()
    files = fetch(pages, cache)
    cases = []
    for page in pages:
        data = files[page.id].read_bytes()
        decoded = decode(data, charset_in_page(data))
        if decoded is None:
            raise DataError(f"`{page.id}` must be a page in a known charset, but no charset fits its bytes.")
        cases.append(Case(page, decoded[0], expected[page.id]))
    return cases


def installed() -> dict[str, Extractor]:
    """Return the contenders whose packages are installed, and print a line for each missing package."""
    contenders: dict[str, Extractor] = {"crosscut": lambda markup: extract(markup, main_content=True)[1]}
    peers = {"resiliparse": resiliparse, "trafilatura": trafilatura, "readability-lxml": readability}
    for package, make in peers.items():
        try:
            contenders |= make()
        except ImportError:
            print(f"{package} is left out, because it is not installed")
    return contenders


def resiliparse() -> dict[str, Extractor]:
    html2text, html = import_module("resiliparse.extract.html2text"), import_module("resiliparse.parse.html")
    options = {"main_content": True, "alt_texts": False}
    return {"resiliparse": lambda markup: html2text.extract_plain_text(html.HTMLTree.parse(markup), **options)}


def trafilatura() -> dict[str, Extractor]:
    extracted = import_module("trafilatura").extract
    options = {"include_comments": False, "include_tables": True}
    return {
        "crosscut-careful": lambda markup: extract_page(markup, Extraction.CAREFUL)[1],
        "trafilatura": lambda markup: extracted(markup, **options) or "",
        "trafilatura-fast": lambda markup: extracted(markup, fast=True, **options) or "",
    }


def readability() -> dict[str, Extractor]:
    document, parsed = import_module("readability").Document, import_module("lxml.html").fromstring
    return {"readability": lambda markup: parsed(document(markup).summary()).text_content()}


def measure(contenders: dict[str, Extractor], cases: Sequence[Case], repeats: int) -> tuple[Texts, Seconds]:
    """Return the text of every page, and the seconds of every repeat over each half, of each contender."""
    texts: Texts = {name: {} for name in contenders}
    seconds: Seconds = {name: {half: [] for half in HALVES} for name in contenders}
    for _ in range(repeats):
        total: defaultdict[tuple[str, str], float] = defaultdict(float)
        for number, case in enumerate(cases):
            order = list(contenders)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                start = time.process_time()
                text = extracted(contenders[name], case.markup)
                total[name, case.page.half] += time.process_time() - start
                texts[name][case.page.id] = "".join(text.split())
        for name, half in total:
            seconds[name][half].append(total[name, half])
    return texts, seconds


def extracted(extractor: Extractor, markup: str) -> str:
    """Return the text of a page. A contender that fails on a page has found nothing there."""
    try:
        return extractor(markup)
    except Exception:
        return ""


def by_language(cases: Sequence[Case], *, each: bool) -> dict[str, list[Case]]:
    """Return the English pages and the others. If `each` is true, the pages of each other language are added."""
    groups: dict[str, list[Case]] = {"English": [], "other languages": []}
    for case in cases:
        groups["English" if case.page.language == "en" else "other languages"].append(case)
    if each:
        for language in sorted({case.page.language for case in cases} - {"en"}):
            groups[language] = [case for case in cases if case.page.language == language]
    return groups


def print_figures(title: str, cases: Sequence[Case], texts: Texts, seconds: Seconds) -> None:
    if not cases:
        return
    num_bytes = sum(len(case.markup.encode("utf-8", "replace")) for case in cases)
    print(f"\n{title}: {len(cases)} pages, {num_bytes / 1e6:.1f} MB")
    print(f"{'':<18}{'F1':>7}{'precision':>11}{'recall':>8}{'empty':>7}{'MB/s':>9}  slowest to fastest")
    for name, of_page in texts.items():
        counts = count(cases, of_page)
        precision = counts["true positive"] / max(counts["true positive"] + counts["false positive"], 1)
        recall = counts["true positive"] / max(counts["true positive"] + counts["false negative"], 1)
        f1 = 2 * precision * recall / max(precision + recall, 1e-9)
        rates = sorted(num_bytes / 1e6 / one for one in seconds.get(name, {}).get(cases[0].page.half, []))
        speed = f"{statistics.median(rates):>9.2f}  {rates[0]:.2f} to {rates[-1]:.2f}" if rates else ""
        print(f"{name:<18}{f1:>7.3f}{precision:>11.3f}{recall:>8.3f}{counts['empty']:>7}{speed}")


def count(cases: Sequence[Case], texts: dict[str, str]) -> Counter[str]:
    """Count the strings of all pages that are found and not found, and the pages without text."""
    counts: Counter[str] = Counter()
    for case in cases:
        text = texts[case.page.id]
        counts["empty"] += not text
        counts.update("true positive" if found(one, text) else "false negative" for one in case.expected.keep)
        counts.update("false positive" if found(one, text) else "true negative" for one in case.expected.drop)
    return counts


def found(string: str, text: str) -> bool:
    return "".join(string.split()) in text


if __name__ == "__main__":
    main()
