"""The two stages that find the boilerplate of sites.

site-lines          write the hashes of the lines at both ends of each page; a task for each part
site-boilerplate    count, for each folder, the pages that share a line; a task for each share of the sites

A line is boilerplate in a folder if at least half of the folder's pages, and at least `MIN_PAGES`, have it among their
first or last lines. Pages with the same lines count once, because copies of a page say nothing about the site. Each
share consists of whole sites, so memory grows with the largest site.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from crosscut.corpus.collection import Numbers, first_number
from crosscut.corpus.documents import Lineage, Part, write_table
from crosscut.corpus.execution.stages import CorpusStage, Counts, Output, PlannedStage, StageTask, read_records
from crosscut.corpus.parts import PartStage, find_parts, task_files
from crosscut.corpus.sites.pages import PageFinder, edge_lines, hash_line

LINES, BOILERPLATE = "site-lines", "site-boilerplate"
"""Names of the two stages."""

MIN_PAGES = 10
"""Minimum number of a folder's pages that must share a line."""

MIN_SHARE = 0.5
"""Minimum fraction of a folder's pages that must share a line."""

LINES_PER_TASK = 2_000_000
"""Approximate number of lines that one task counts."""

FOLDERS = np.dtype([("site", "<u8"), ("row", "<u4"), ("depth", "u1"), ("hash", "<u8")])
"""Element type of `PART.folders.npy`, which has an element for each folder of each page. `site` is the hash of the
page's first folder."""

LINES_OF_PAGES = np.dtype([("site", "<u8"), ("row", "<u4"), ("hash", "<u8")])
"""Element type of `PART.lines.npy`, which has an element for each distinct line at the ends of each page."""

FOLDERS_SUFFIX, LINES_SUFFIX = ".folders.npy", ".lines.npy"
"""Suffixes of a part's files with the elements `FOLDERS` and `LINES_OF_PAGES`."""

SHARED = pa.schema([("key", pa.uint64())])
"""Columns of the file with the boilerplate of some sites: the key of a line in a folder (`key_of`), ascending."""

Hashes = npt.NDArray[np.uint64]
Columns = Mapping[str, npt.NDArray[np.unsignedinteger]]
"""Arrays of equal length by name."""


def site_stages(finder: PageFinder, lineage: Lineage) -> list[CorpusStage]:
    """List the stages that find boilerplate in documents of the given lineage."""
    return [
        PartStage(
            name=LINES,
            version=1,
            function=write_lines,
            arguments=(finder,),
            settings={"formats": finder.settings},
            lineage=lineage,
        ),
        PlannedStage(name=BOILERPLATE, version=1, plan=_plan_boilerplate),
    ]


def write_lines(part: Part, finder: PageFinder, output: Output) -> Counts:
    """Run a task: write the hashes of the folders and of the lines of a part's pages."""
    pages = finder.find(part)
    folders = [(page.folders[0].hash, page.row, *folder) for page in pages for folder in page.folders]
    lines = [
        (page.folders[0].hash, page.row, line)
        for page in pages
        for line in dict.fromkeys(hash_line(page.text[start:end]) for start, end in edge_lines(page.text))
        if line
    ]
    np.save(output.path(f"{part.name}{FOLDERS_SUFFIX}"), np.array(folders, FOLDERS))
    np.save(output.path(f"{part.name}{LINES_SUFFIX}"), np.array(lines, LINES_OF_PAGES))
    return {"pages": len(pages), "lines": len(lines)}


def _plan_boilerplate(work: Path) -> Sequence[StageTask]:
    num_lines = sum(record.counts["lines"] for record in read_records(work, LINES))
    num_shares = -(-num_lines // LINES_PER_TASK)
    parts = [part for part, _ in find_parts(work)]
    return [
        StageTask(
            name=f"{share:05}",
            function=partial(find_boilerplate, parts, share, num_shares),
            inputs=tuple(part.file(LINES, suffix) for part in parts for suffix in (FOLDERS_SUFFIX, LINES_SUFFIX)),
            settings={"shares": num_shares},
        )
        for share in range(num_shares)
    ]


def find_boilerplate(parts: Sequence[Part], share: int, num_shares: int, output: Output) -> Counts:
    """Run a task: find the boilerplate of one share of the sites, from the files of the stage `site-lines`."""
    folders = _read([part.file(LINES, FOLDERS_SUFFIX) for part in parts], share, num_shares)
    lines = _read([part.file(LINES, LINES_SUFFIX) for part in parts], share, num_shares)
    keys = shared_lines(folders, lines)
    write_table(output.path(f"{share:05}.arrow"), {"key": keys}, SHARED)
    return {"lines": len(keys)}


def _read(files: Sequence[Path], share: int, num_shares: int) -> Columns:
    """Read the elements of one share as one array per field. The array `page` has the numbers of the pages."""
    found = []
    for index, path in enumerate(files):
        own = np.load(path, mmap_mode="r")
        own = own[own["site"] % np.uint64(num_shares) == share]
        found.append((first_number(index) + own["row"].astype(np.uint64), own))
    elements = np.concatenate([own for _, own in found])
    columns = {name: elements[name].copy() for name in elements.dtype.names or () if name not in ("site", "row")}
    return {"page": np.concatenate([pages for pages, _ in found]), **columns}


def shared_lines(folders: Columns, lines: Columns) -> Hashes:
    """Find the lines that are boilerplate. `folders` has the columns `page`, `depth` and `hash`, with a row for each
    folder of each page. `lines` has the columns `page` and `hash`, with a row for each line. In both tables, page
    numbers ascend.

    Returns the keys of the lines found (see `key_of`), ascending.
    """
    is_first = _is_first_of_its_lines(lines["page"], lines["hash"])
    frequent = is_first & _is_frequent(lines["hash"])
    copies = np.unique(lines["page"][~is_first])
    pages, hashes = lines["page"][frequent], lines["hash"][frequent]
    found = [np.empty(0, np.uint64)]
    for depth in np.unique(folders["depth"]):
        here = (folders["depth"] == depth) & ~np.isin(folders["page"], copies)
        found.append(_shared_in(folders["page"][here], folders["hash"][here], pages, hashes))
    return np.unique(np.concatenate(found))


def _shared_in(pages: Numbers, folders: Hashes, line_pages: Numbers, lines: Hashes) -> Hashes:
    """Find the keys of the boilerplate in folders of one depth. `pages` ascend, and `folders` has one folder for each
    page.
    """
    at = np.searchsorted(pages, line_pages)
    is_here = at < len(pages)
    is_here[is_here] = pages[at[is_here]] == line_pages[is_here]
    of_line = folders[at[is_here]]
    keys, first, counts = np.unique(key_of(of_line, lines[is_here]), return_index=True, return_counts=True)
    known, sizes = np.unique(folders, return_counts=True)
    enough = np.flatnonzero(counts >= MIN_PAGES)
    size = sizes[np.searchsorted(known, of_line[first[enough]])]
    return np.asarray(keys[enough][counts[enough] >= MIN_SHARE * size])


def _is_first_of_its_lines(pages: Numbers, lines: Hashes) -> npt.NDArray[np.bool_]:
    """Return one boolean per line: whether the line's page is the first page with exactly the same lines."""
    if not len(pages):
        return np.empty(0, dtype=bool)
    starts = np.flatnonzero(np.diff(pages, prepend=pages[0] + np.uint64(1)))
    sums = np.add.reduceat(lines, starts)  # wraps around, and does not depend on the order
    _, first = np.unique(sums, return_index=True)
    is_first = np.zeros(len(starts), dtype=bool)
    is_first[first] = True
    return np.repeat(is_first, np.diff([*starts, len(pages)]))


def _is_frequent(hashes: Hashes) -> npt.NDArray[np.bool_]:
    _, places, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    return np.asarray(counts[places] >= MIN_PAGES)


def key_of(folders: Hashes, lines: Hashes) -> Hashes:
    """Compute one key for each pair of a folder and a line, from the hashes of both."""
    return folders ^ lines


class SiteBoilerplate(NamedTuple):
    """The boilerplate of the sites of a corpus."""

    finder: PageFinder

    files: tuple[Path, ...]
    """The files of the stage `site-boilerplate`."""

    parts: frozenset[str]
    """Names of the parts that have pages."""

    @classmethod
    def read(cls, work: Path, finder: PageFinder) -> SiteBoilerplate:
        """Read the results of the stages `site-lines` and `site-boilerplate`."""
        parts = frozenset(record.task for record in read_records(work, LINES) if record.counts["pages"])
        return cls(finder, task_files(work, BOILERPLATE), parts)
