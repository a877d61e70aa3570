"""N-grams of all test sets.

The n-grams are gathered once and written to a file. Every process that searches for the n-grams maps this file into
memory.

An n-gram of a document counts as a hit only if it passes three checks: the Bloom filter, which all n-grams of test sets
and few others pass; a look-up in the sorted hashes; and a comparison of the words. False positives of the Bloom filter
and equal hashes of different n-grams therefore cost time but never cause a false hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from abloom import BloomFilter

from crosscut.corpus.documents import read_table, write_table
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.leakage.test_sets import Item, read_test_set, set_names
from crosscut.corpus.words.ngrams import Hashes, Places, hash_words, ngrams, words

GRAMS_NAME, ITEMS_NAME, FILTER_NAME = FILES = "grams.arrow", "items.arrow", "grams.bloom"

GRAMS = pa.schema([("hash", pa.uint64()), ("gram", pa.large_string()), ("items", pa.large_list(pa.uint32()))])
"""Columns of the file with the distinct n-grams, ascending by hash. `items` lists the texts that contain the n-gram, as
row numbers of the table `ITEMS`."""

ITEMS = pa.schema([("test_set", pa.string()), ("number", pa.uint32()), ("title", pa.string()), ("grams", pa.uint32())])
"""Columns of the file with the items (the texts) of the test sets. `number` counts from 1 within a test set; `grams` is
the number of distinct n-grams of the item."""

Numbers = npt.NDArray[np.int64]


def gather(files: Sequence[str], text_key: str, n: int, false_positives: float, output: Output) -> Counts:
    """Run the task of the stage `test-sets`: write the n-grams of the test sets, the items, and the Bloom filter.

    An item (a text of a test set) with fewer than `n` words has no n-gram, so the search cannot find the item. The
    count `too_short` says how many items have no n-gram.
    """
    files = list(dict.fromkeys(files))
    sets = [
        (name, read_test_set(Path(file), text_key=text_key)) for name, file in zip(set_names(files), files, strict=True)
    ]
    items = [item for _, of_set in sets for item in of_set]
    gathered = _gather(items, n)
    num_grams = np.bincount(gathered.items, minlength=len(items))
    columns = {
        "test_set": [name for name, of_set in sets for _ in of_set],
        "number": [number for _, of_set in sets for number in range(1, len(of_set) + 1)],
        "title": [item.title for item in items],
        "grams": num_grams.tolist(),
    }
    write_table(output.path(ITEMS_NAME), columns, ITEMS)
    lists = pa.LargeListArray.from_arrays(gathered.starts, pa.array(gathered.items, pa.uint32()))
    hashes = pa.array(gathered.hashes)
    write_table(output.path(GRAMS_NAME), {"hash": hashes, "gram": gathered.texts, "items": lists}, GRAMS)
    bloom = BloomFilter(max(len(gathered.hashes), 1), false_positives, serializable=True)
    bloom.update(gathered.hashes.tolist())
    output.path(FILTER_NAME).write_bytes(bloom.to_bytes())
    return {
        "test_sets": {name: {"items": len(of_set)} for name, of_set in sets},
        "grams": len(gathered.hashes),
        "too_short": int((num_grams == 0).sum()),
    }


class _GramTable(NamedTuple):
    hashes: Hashes  # distinct, ascending
    texts: list[str]
    starts: Places  # index of each gram's first item, [grams + 1]
    items: Numbers


def _gather(items: Sequence[Item], n: int) -> _GramTable:
    spoken, places, owners, hashes = _all_grams(items, n)
    distinct, firsts, numbers = np.unique(hashes, return_index=True, return_inverse=True)
    texts = [" ".join(spoken[place : place + n]) for place in places[firsts].tolist()]
    # If different n-grams have the same hash, only the first n-gram is kept, and the search ignores the others.
    again = np.flatnonzero(firsts[numbers] != np.arange(len(numbers)))
    same = np.ones(len(numbers), dtype=np.bool_)
    same[again] = [
        " ".join(spoken[place : place + n]) == texts[number]
        for place, number in zip(places[again].tolist(), numbers[again].tolist(), strict=True)
    ]
    pairs = np.unique(numbers[same] * len(items) + owners[same])
    starts = np.searchsorted(pairs, np.arange(len(distinct) + 1) * len(items))
    return _GramTable(distinct, texts, starts, pairs % max(len(items), 1))


def _all_grams(items: Sequence[Item], n: int) -> tuple[list[str], Places, Numbers, Hashes]:
    """Return all words in order, and for each n-gram the index of its first word, its item, and its hash."""
    spoken: list[str] = []
    known: dict[str, str] = {}  # one shared string per distinct word, to save memory
    segments: list[str] = []
    begins: list[int] = []
    owners: list[int] = []
    for number, item in enumerate(items):
        for segment in item.segments:
            own = words(segment)
            if len(own) >= n:
                segments.append(segment)
                begins.append(len(spoken))
                owners.append(number)
                spoken += [known.setdefault(word, word) for word in own]
    grams = ngrams(hash_words(segments), n)
    counts = np.diff(grams.starts)
    places = np.arange(len(grams.hashes)) + np.repeat(np.array(begins, np.int64) - grams.starts[:-1], counts)
    return spoken, places, np.repeat(np.array(owners, np.int64), counts), grams.hashes


@dataclass(frozen=True, eq=False, kw_only=True)
class Grams:
    """N-grams of all test sets, memory-mapped from files. An item is a text of a test set."""

    n: int
    """Number of words in an n-gram."""

    hashes: Hashes
    """Distinct hashes of the n-grams, ascending, [grams]."""

    texts: pa.ChunkedArray
    """Words of each n-gram, [grams]."""

    items: npt.NDArray[np.uint32]
    """Items that contain each n-gram, concatenated. The items of n-gram i are the elements `starts[i]` to `starts[i +
    1] - 1`."""

    starts: Places
    """Index in `items` of each n-gram's first item, [grams + 1]."""

    set_names: tuple[str, ...]
    """Names of the test sets."""

    set_of_item: Numbers
    """Index in `set_names` of each item's test set, [items]."""

    numbers: Numbers
    """Number of each item in its test set, from 1, [items]."""

    sizes: Numbers
    """Number of distinct n-grams of each item, [items]."""

    titles: tuple[str, ...]
    """Title of each item, or an empty string if the item is not an article, [items]."""

    bloom: BloomFilter
    """Bloom filter of all n-gram hashes."""

    @classmethod
    def open(cls, folder: Path, n: int) -> Grams:
        """Map the files that the stage `test-sets` wrote into `folder`."""
        grams, items = read_table(folder / GRAMS_NAME), read_table(folder / ITEMS_NAME)
        lists = grams["items"].combine_chunks()
        sets = items["test_set"].to_pylist()
        names = tuple(dict.fromkeys(sets))
        return cls(
            n=n,
            hashes=grams["hash"].to_numpy(),
            texts=grams["gram"],
            items=np.asarray(lists.values),
            starts=np.asarray(lists.offsets),
            set_names=names,
            set_of_item=np.array([names.index(name) for name in sets], dtype=np.int64),
            numbers=items["number"].to_numpy().astype(np.int64),
            sizes=items["grams"].to_numpy().astype(np.int64),
            titles=tuple(items["title"].to_pylist()),
            bloom=BloomFilter.from_bytes((folder / FILTER_NAME).read_bytes()),
        )

    def __len__(self) -> int:
        return len(self.hashes)

    def look_up(self, hashes: Hashes) -> tuple[Places, Numbers, int]:
        """Look up hashes of n-grams in the test sets.

        Returns the indices of the hashes that were found, the n-gram number of each found hash, and the number of false
        positives. A false positive is a hash that passes the Bloom filter but belongs to no n-gram of a test set.
        """
        bloom = self.bloom
        let_through = np.flatnonzero(np.array([value in bloom for value in hashes.tolist()], dtype=np.bool_))
        asked = hashes[let_through]
        numbers = np.searchsorted(self.hashes, asked)
        found = numbers < len(self)
        found[found] = self.hashes[numbers[found]] == asked[found]
        return let_through[found], numbers[found], int((~found).sum())

    def items_of(self, numbers: Numbers) -> tuple[Places, Numbers]:
        """Find the items that contain the given n-grams.

        Returns two arrays with one element for each pair of an n-gram and an item: the index of the n-gram in
        `numbers`, and the item. Pairs are ordered by index and then by item.
        """
        begins, ends = self.starts[numbers], self.starts[numbers + 1]
        counts = ends - begins
        places = np.repeat(np.arange(len(numbers)), counts)
        within = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
        return places, self.items[begins[places] + within].astype(np.int64)


def open_grams(folder: Path, n: int) -> Grams:
    """Open the files as `Grams.open` does, and cache the result until the files change."""
    return _opened(folder, n, (folder / GRAMS_NAME).stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _opened(folder: Path, n: int, _modified: int) -> Grams:
    return Grams.open(folder, n)
