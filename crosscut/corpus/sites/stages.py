"""The two stages that find the boilerplate of sites.

site-lines          write the hashes of the lines at both ends of each page; a task for each part
site-boilerplate    count the pages of each folder that share a line; a task for each share of the sites

A line is boilerplate in a folder if it is at the ends of at least half of the folder's pages, and of at least
`MIN_PAGES` pages. A share has the pages of whole sites. Memory therefore grows with the largest site, by up to 1 kB for
each page.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from crosscut.corpus.collection import Numbers, first_number
from crosscut.corpus.documents import Part, write_table
from crosscut.corpus.execution.stages import Counts, Output, PlannedStage, Stage, Task, read_records
from crosscut.corpus.parts import PartStage, find_parts
from crosscut.corpus.sites.pages import PageFinder, edge_lines, hash_line

LINES, BOILERPLATE = "site-lines", "site-boilerplate"
"""Names of the two stages."""

MIN_PAGES = 10
"""Minimum number of pages that share a line."""

MIN_SHARE = 0.5
"""Minimum share of the pages of a folder that share a line."""

LINES_PER_TASK = 2_000_000
"""Approximate number of lines that one task counts."""

HASHES = np.dtype([("site", "<u8"), ("row", "<u4"), ("hash", "<u8")])
"""Element type of the files of a part: `PART.folders.npy` has an element for each folder of each page, and
`PART.lines.npy` for each different line at the ends of each page. `site` is the hash of the page's first folder."""

SHARED = pa.schema([("key", pa.uint64()), ("pages", pa.uint32())])
"""Columns of the file with the boilerplate of some sites: the key of a line in a folder (`key_of`), ascending, and the
number of pages in the folder that share the line."""

Hashes = npt.NDArray[np.uint64]


def site_stages(finder: PageFinder, filters: tuple[str, ...]) -> list[Stage]:
    """List the stages that find boilerplate in the documents that the given `filters` kept."""
    return [
        PartStage(
            name=LINES,
            version=1,
            function=write_lines,
            arguments=(finder,),
            settings={"formats": list(map(list, finder.formats))},
            filters=filters,
        ),
        PlannedStage(name=BOILERPLATE, version=1, plan=_plan_boilerplate),
    ]


def write_lines(part: Part, finder: PageFinder, output: Output) -> Counts:
    """Run a task: write the hashes of the folders and of the lines of a part's pages."""
    pages = finder.find(part)
    folders = [(page.folders[0], page.row, folder) for page in pages for folder in page.folders]
    lines = [
        (page.folders[0], page.row, line)
        for page in pages
        for line in dict.fromkeys(hash_line(page.text[start:end]) for start, end in edge_lines(page.text))
    ]
    np.save(output.path(_folders_name(part.name)), np.array(folders, HASHES))
    np.save(output.path(_lines_name(part.name)), np.array(lines, HASHES))
    return {"pages": len(pages), "lines": len(lines)}


def _folders_name(part: str) -> str:
    return f"{part}.folders.npy"


def _lines_name(part: str) -> str:
    return f"{part}.lines.npy"


def _plan_boilerplate(work: Path) -> Sequence[Task]:
    num_lines = sum(record.counts["lines"] for record in read_records(work, LINES))
    num_shares = -(-num_lines // LINES_PER_TASK)
    parts = [part.name for part, _ in find_parts(work)]
    return [
        Task(
            name=f"{share:05}",
            function=partial(find_boilerplate, work / LINES, parts, share, num_shares),
            inputs=tuple(work / LINES / name(part) for part in parts for name in (_folders_name, _lines_name)),
            settings={"shares": num_shares},
        )
        for share in range(num_shares)
    ]


def shared_files(work: Path) -> tuple[Path, ...]:
    """List the files with the boilerplate of all sites. The list is empty if the corpus has no pages."""
    return tuple(work / BOILERPLATE / f"{record.task}.arrow" for record in read_records(work, BOILERPLATE))


def find_boilerplate(folder: Path, parts: Sequence[str], share: int, num_shares: int, output: Output) -> Counts:
    """Run a task: find the boilerplate of one share of the sites, in the files of the stage `site-lines`."""
    pages, folders = _read([folder / _folders_name(part) for part in parts], share, num_shares)
    line_pages, lines = _read([folder / _lines_name(part) for part in parts], share, num_shares)
    keys, counts = shared_lines(pages, folders, line_pages, lines)
    write_table(output.path(f"{share:05}.arrow"), {"key": keys, "pages": counts}, SHARED)
    return {"lines": len(keys)}


def _read(files: Sequence[Path], share: int, num_shares: int) -> tuple[Numbers, Hashes]:
    """Read the elements of one share. Returns the numbers of the pages, ascending, and the hashes."""
    pages, hashes = [], []
    for index, path in enumerate(files):
        own = np.load(path, mmap_mode="r")
        own = own[own["site"] % np.uint64(num_shares) == share]
        pages.append(first_number(index) + own["row"].astype(np.uint64))
        hashes.append(own["hash"])
    return np.concatenate(pages), np.concatenate(hashes)


def shared_lines(
    pages: Numbers, folders: Hashes, line_pages: Numbers, lines: Hashes
) -> tuple[Hashes, npt.NDArray[np.int64]]:
    """Find the lines that are boilerplate. `pages` and `folders` say which page is in which folder, and `line_pages`
    and `lines` which page has which line. All numbers of pages ascend.

    Returns the keys of the lines found (see `key_of`), ascending, and the number of pages with each of them.
    """
    frequent = _is_frequent(folders)
    pages, folders = pages[frequent], folders[frequent]
    frequent = _is_frequent(lines)
    line_pages, lines = line_pages[frequent], lines[frequent]
    starts = np.searchsorted(pages, line_pages)
    num_folders = np.searchsorted(pages, line_pages, side="right") - starts
    ends = np.cumsum(num_folders)
    places = np.arange(num_folders.sum()) + np.repeat(starts - ends + num_folders, num_folders)
    of_line = folders[places]
    keys, first, counts = np.unique(
        key_of(of_line, np.repeat(lines, num_folders)), return_index=True, return_counts=True
    )
    known, sizes = np.unique(folders, return_counts=True)
    size = sizes[np.searchsorted(known, of_line[first])] if len(keys) else counts
    found = (counts >= MIN_PAGES) & (counts >= MIN_SHARE * size)
    return keys[found], counts[found]


def _is_frequent(hashes: Hashes) -> npt.NDArray[np.bool_]:
    _, places, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    return np.asarray(counts[places] >= MIN_PAGES)


def key_of(folders: Hashes, lines: Hashes) -> Hashes:
    """Key of each line in a folder, from the hashes of both."""
    return folders ^ lines
