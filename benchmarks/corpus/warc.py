"""Speed of reading WARC and WET files, and agreement with FastWARC on archives that other programs have written.

    python benchmarks/corpus/warc.py --pages FOLDER               # pages of HTML, such as the manual of a program
    python benchmarks/corpus/warc.py --archives FILES-OR-FOLDERS

With `--pages`, the benchmark writes the pages as a large crawl does: a request, a response and metadata for each page,
and each record compressed on its own. It reads the archive with Crosscut and FastWARC (and warcio, if it is installed),
first only the records, and then the documents, with the search for the main text. Times are processor times of one
process. With `--archives`, the records of each file are compared with those of FastWARC, and the documents are counted.
The source distribution of pywb has archives of real crawlers: `pip download --no-deps --no-binary :all: pywb`, folder
`sample_archive/warcs`.
"""

import gzip
import io
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fastwarc.warc import ArchiveIterator

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line
from benchmarks.machine import print_machine
from benchmarks.turns import peak_bytes
from crosscut.config.corpora import SourceConfig
from crosscut.corpus.readers import RawText, ReaderSettings, find_reader
from crosscut.corpus.readers.archives.records import ArchiveRecord, read_records
from crosscut.corpus.readers.files import File, find_source

MAX_BYTES = 64 * 10**6


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--pages", type=Path, help="folder of HTML pages")
    parser.add_argument("--most", type=int, default=4000, help="pages to use, drawn at random (default: %(default)s)")
    parser.add_argument("--archives", type=Path, nargs="*", default=[], help="WARC and WET files, or their folders")
    options = parser.parse_args()
    if not options.pages and not options.archives:
        parser.error("name pages or archives")
    print_machine("crosscut", "fastwarc", "resiliparse", "warcio", "zstandard", "brotli")
    with tempfile.TemporaryDirectory(prefix="crosscut-warc-") as folder:
        made = write_crawl(options.pages, options.most, Path(folder)) if options.pages else []
        for file in made:
            measure(file)
        for path in options.archives:
            for file in find_source(SourceConfig(name="crawl", files=(str(path),))).files:
                compare(file)
                read_documents(file)


def write_crawl(pages: Path, most: int, folder: Path) -> list[File]:
    """Write pages as a WARC file, and their texts as a WET file."""
    paths = sorted(path for path in pages.rglob("*.html") if path.is_file())
    drawn = random.Random(7).sample(paths, min(most, len(paths)))
    with (folder / "CC-MAIN-00000.warc.gz").open("wb") as file:
        for path in drawn:
            for one in crawled(path.relative_to(pages).as_posix(), path.read_bytes()):
                file.write(gzip.compress(one, mtime=0))
    (warc,) = find_source(SourceConfig(name="crawl", files=(str(folder),))).files
    with (folder / "CC-MAIN-00000.warc.wet.gz").open("wb") as file:
        for item in find_reader("warc")(warc, ReaderSettings()):
            if isinstance(item, RawText):
                file.write(gzip.compress(record("conversion", item.url, item.text.encode()), mtime=0))
    return find_source(SourceConfig(name="crawl", files=(str(folder),))).files


def crawled(name: str, page: bytes) -> Iterator[bytes]:
    """Records of one page: request, response and metadata."""
    url = f"https://www.example.org/{name}"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\nX-Crawl-Content-Encoding: gzip\r\n\r\n"
    yield record("request", url, f"GET /{name} HTTP/1.1\r\nHost: www.example.org\r\n\r\n".encode())
    yield record("response", url, head + page)
    yield record("metadata", url, b"fetchTimeMs: 12\r\n\r\n")


def record(kind: str, url: str, content: bytes) -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content + b"\r\n\r\n"


def measure(file: File) -> None:
    """Print the speed of each way to read an archive."""
    unpacked = sum(len(one.content) for one in records_of(file))
    print(f"\n{file.name}: {file.size / 1e6:.1f} MB on disk, {unpacked / 1e6:.1f} MB in records")
    timed("records, Crosscut", file, unpacked, lambda: sum(len(one.content) for one in records_of(file)))
    timed("records, FastWARC", file, unpacked, lambda: sum(len(one.reader.read()) for one in theirs(file)))
    if with_warcio := warcio_reader(file):
        timed("records, warcio", file, unpacked, with_warcio)
    timed("documents, Crosscut", file, unpacked, lambda: read_documents(file))
    print(f"peak memory of this process: {peak_bytes() / 2**20:.0f} MB")


def timed(name: str, file: File, unpacked: int, read: Callable[[], int]) -> None:
    """Print the speed of a function that reads an archive and returns the bytes of its result."""
    started = time.process_time()
    result = read()
    seconds = time.process_time() - started
    on_disk, in_records, out = (num_bytes / 1e6 / seconds for num_bytes in (file.size, unpacked, result))
    print(
        f"{name:<20}{seconds:7.2f} s; MB/s: {on_disk:6.1f} on disk, {in_records:6.1f} in records, {out:6.1f} of result"
    )


def records_of(file: File) -> Iterable[ArchiveRecord]:
    return (one for one in read_records(file, MAX_BYTES) if isinstance(one, ArchiveRecord))


def theirs(file: File) -> Iterable[object]:
    return ArchiveIterator(io.BytesIO(Path(file.url).read_bytes()), parse_http=False)


def warcio_reader(file: File) -> Callable[[], int] | None:
    try:
        from warcio.archiveiterator import ArchiveIterator as Iterator
    except ImportError:
        return None

    def read() -> int:
        with Path(file.url).open("rb") as stream:
            return sum(len(one.raw_stream.read()) for one in Iterator(stream, no_record_parse=True))

    return read


def read_documents(file: File) -> int:
    """Read the documents of an archive, print their number, and return the bytes of their text."""
    rules: Counter[str] = Counter()
    num_bytes = 0
    for item in find_reader(file.format)(file, ReaderSettings(max_bytes=MAX_BYTES)):
        rules["documents" if isinstance(item, RawText) else item.rule] += 1
        num_bytes += len(item.text.encode()) if isinstance(item, RawText) else 0
    print(", ".join(f"{number:,} {rule}" for rule, number in rules.most_common()))
    return num_bytes


def compare(file: File) -> None:
    """Print whether FastWARC finds the same records."""
    ours = [(one.number, one.kind, one.content) for one in records_of(file)]
    try:
        others = [(one.stream_pos, str(one.record_type), one.reader.read()) for one in theirs(file)]  # type: ignore[attr-defined]
    except OSError as error:
        print(f"\n{file.name}: {len(ours):,} records; FastWARC stops with `{error}`")
        return
    same = "the same" if ours == others else f"{len(others):,} others"
    print(f"\n{file.name}: {len(ours):,} records; FastWARC finds {same}")


if __name__ == "__main__":
    main()
