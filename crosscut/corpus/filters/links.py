"""Join documents to lists of links by URL, and drop documents whose links have few votes (paper, section 4.1.2).

The paper collected "all the outgoing URLs with at least 3 karma" of a forum, and read their pages. Here the pages are
the documents of a source, and `sources.links` names the lists: on each line a URL, a tab and the karma (number of
votes). Further columns are ignored. URLs are joined in their canonical spelling (`canonical_url`). If a URL has several
lines, the highest karma counts.

The stage `link-lists` reads each list once, and writes the hashes of the URLs in ascending order and their karma: 16
bytes for each URL. Every process maps these files into memory. Hashes have 64 bits, so a document gets the karma of
another URL with a probability below 1e-11 for a list of a hundred million URLs.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from crosscut.config.corpora import CorpusConfig
from crosscut.config.errors import DataError
from crosscut.config.system.files import require_regular
from crosscut.corpus.documents import Document, Drop, Judgement
from crosscut.corpus.execution.stages import Counts, Output, PlannedStage, StageTask
from crosscut.corpus.filters.urls import canonical_url
from crosscut.corpus.readers.files import COMPRESSIONS, File
from crosscut.data.text.lines import Line, read_lines
from crosscut.data.text.sources import unreadable

LINK_LISTS, LINKS = "link-lists", "links"
"""Names of the stages that read the lists, and that drop documents."""

URLS_SUFFIX, KARMA_SUFFIX = ".urls.npy", ".karma.npy"
"""Suffixes of a list's files with the hashes of its URLs, ascending, and their karma."""

MOST_LINE_BYTES = 1 << 16
"""Maximum length of a line of a list."""

SHOWN_LINES = 3
"""Maximum number of damaged lines that a message names."""

_NUMBER = re.compile(r"[+-]?[0-9]{1,15}(?:\.[0-9]{1,15})?")

Hashes = npt.NDArray[np.uint64]


class LinkList(NamedTuple):
    """A list of links, and the names of the stage's files about it."""

    file: File
    task: str

    def files(self, work: Path) -> tuple[Path, Path]:
        """Files of the stage `link-lists` with the hashes of the URLs, and with their karma."""
        return work / LINK_LISTS / f"{self.task}{URLS_SUFFIX}", work / LINK_LISTS / f"{self.task}{KARMA_SUFFIX}"


class LinksOfSource(NamedTuple):
    """Lists of links that belong to a source."""

    source: str
    required: bool
    """Whether a document without a link is dropped."""

    files: tuple[tuple[Path, Path], ...]
    """Hashes and karma of each list (`LinkList.files`)."""


def find_lists(config: CorpusConfig) -> dict[str, LinkList]:
    """Find the lists of links of all sources, by their names in the config. Raises `DataError` if a file cannot be
    read.
    """
    names = dict.fromkeys(name for source in config.sources for name in source.links)
    return {name: LinkList(_describe(name), f"{number:06}") for number, name in enumerate(names)}


def _describe(name: str) -> File:
    try:
        require_regular(Path(name))
        status = Path(name).stat()
    except OSError as error:
        raise unreadable(name, error) from None
    compression = next((suffix for suffix in COMPRESSIONS if name.lower().endswith(suffix)), "")
    version = str(status.st_mtime_ns)
    return File(name=name, url=name, format="links", compression=compression, size=status.st_size, version=version)


def lists_stage(lists: Sequence[LinkList], min_karma: float) -> PlannedStage:
    """Make the stage that reads the lists, with one task for each list."""
    tasks = [
        StageTask(
            name=one.task,
            function=partial(read_list, one, min_karma),
            settings={"file": [one.file.name, one.file.size, one.file.version], "min_karma": min_karma},
            size=one.file.size,
        )
        for one in lists
    ]
    return PlannedStage(name=LINK_LISTS, version=1, plan=partial(_planned, tasks))


def _planned(tasks: Sequence[StageTask], _work: Path) -> Sequence[StageTask]:
    return tasks


def read_list(one: LinkList, min_karma: float, output: Output) -> Counts:
    """Run a task: read a list of links, and write the hashes of its URLs with their karma.

    Raises `DataError` with the numbers of damaged lines, or if the file has no URL or cannot be read.
    """
    hashes, votes = array("Q"), array("d")
    damaged: list[Line] = []
    num_damaged = 0
    for line in read_lines(one.file.chunks(), MOST_LINE_BYTES):
        if not line.data.strip():
            continue
        if (link := _parse(line)) is None:
            damaged += [line] if num_damaged < SHOWN_LINES else []
            num_damaged += 1
        else:
            hashes.append(hash_url(link[0]))
            votes.append(link[1])
    if damaged:
        raise _damaged(one.file.name, damaged, num_damaged)
    if not hashes:
        raise DataError(
            f"`{one.file.name}` must list links, one on each line, but has none. Check the file, or remove it from "
            "`sources.links`."
        )
    urls, karma = np.frombuffer(hashes, np.uint64), np.frombuffer(votes, np.float64)
    order = np.lexsort((karma, urls))
    urls, karma = urls[order], karma[order]
    last = np.append(urls[1:] != urls[:-1], True)[: len(urls)]  # of several lines with a URL, the one with most votes
    urls, karma = urls[last], karma[last]
    np.save(output.path(f"{one.task}{URLS_SUFFIX}"), urls)
    np.save(output.path(f"{one.task}{KARMA_SUFFIX}"), karma)
    return {
        "lists": {one.file.name: {"lines": len(order), "urls": len(urls), "enough": int((karma >= min_karma).sum())}}
    }


def _parse(line: Line) -> tuple[str, float] | None:
    try:
        url, *columns = line.data.decode("utf-8").strip().split("\t")
    except UnicodeDecodeError:
        return None
    url, karma = url.strip(), columns[0].strip() if columns else ""
    is_url = not line.too_long and url and not re.search(r"\s", url)
    return (url, float(karma)) if is_url and _NUMBER.fullmatch(karma) else None


def _damaged(name: str, first: Sequence[Line], number: int) -> DataError:
    shown = [f"line {line.number} (`{line.data[:60].decode('utf-8', 'replace')}`)" for line in first]
    more = f" and {number - len(shown):,} more" if number > len(shown) else ""
    return DataError(
        f"`{name}` must have a URL, a tab and a number of votes on each line, but has not on {', '.join(shown)}{more}. "
        "Correct or remove the damaged lines."
    )


def hash_url(url: str) -> int:
    """Hash of a URL, the same for all of its spellings."""
    digest = hashlib.blake2b(canonical_url(url).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class LinkFilter:
    """Filter that drops documents by the karma of their links. Only documents of sources with lists are judged.

    The rules are `karma`, if the highest karma of a document's URL is below `min_karma`, and `no link`, if no list has
    its URL and a link is required. The measurement `karma` is the karma of each document, or null without a link.
    """

    def __init__(self, min_karma: float, sources: Sequence[LinksOfSource]) -> None:
        self._min_karma = min_karma
        self._sources = {one.source: one for one in sources}
        self._lists = {
            pair: tuple(np.load(path, mmap_mode="r") for path in pair) for one in sources for pair in one.files
        }

    def __call__(self, documents: Sequence[Document]) -> Judgement:
        """Drop documents with too few votes, and documents without a link if a link is required."""
        drops: list[Drop] = []
        found: list[float | None] = []
        joined = {name: {"documents": 0, "with_link": 0} for name in self._sources}
        for document in documents:
            source = self._sources.get(document.id.partition("/")[0])
            karma = self._karma(document, source) if source else None
            found.append(karma)
            if source is None:
                continue
            joined[source.source]["documents"] += 1
            joined[source.source]["with_link"] += karma is not None
            if karma is None and source.required:
                drops.append(Drop(document.row, "no link"))
            elif karma is not None and karma < self._min_karma:
                drops.append(Drop(document.row, "karma", f"{karma:g}"))
        return Judgement(drops, {"karma": pa.array(found, pa.float64())}, {"joined": joined})

    def _karma(self, document: Document, source: LinksOfSource) -> float | None:
        if not document.url:
            return None
        wanted = np.uint64(hash_url(document.url))
        known: list[float] = []
        for pair in source.files:
            urls, karma = self._lists[pair]
            place = int(np.searchsorted(urls, wanted))
            if place < len(urls) and urls[place] == wanted:
                known.append(float(karma[place]))
        return max(known, default=None)
