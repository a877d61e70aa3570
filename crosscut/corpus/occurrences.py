"""Keep the first document with each key, and drop all later documents with the same key.

The key is the text or the URL. Three stages do this work without holding all keys in memory. The first stage writes the
keys of each part (an Arrow file of documents) as 128-bit hashes. In the second stage, each task sorts one share of the
hashes of all parts, and writes the numbers of the documents that repeat an earlier key. The third stage drops these
documents, with one task per part. Memory is bounded by the size of a share, which does not depend on the size of the
corpus.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from crosscut.corpus.collection import Collection, Numbers, begins_run, collect, first_number
from crosscut.corpus.documents import INGEST, Document, Drop, Lineage, Part, read_table, write_drops, write_table
from crosscut.corpus.execution.stages import CorpusStage, Counts, Output, PlannedStage, StageTask, Yields, read_records
from crosscut.corpus.filters.judging import count_rows
from crosscut.corpus.parts import PartStage, find_parts, task_files

KEYS_PER_TASK = 2_000_000
"""Approximate number of keys in which one task searches for repeats."""

Key = Callable[[Document], str]
"""Function that returns the key of a document. The function must be picklable. A document with an empty key is never
dropped."""

KEYS = np.dtype([("row", "<u4"), ("high", "<u8"), ("low", "<u8")])
"""Element type of the files with keys: a document's row in its part, and both halves of the 128-bit hash of the key."""

REPEATS = pa.schema([("number", pa.uint64()), ("other", pa.string())])
"""Columns of the file with the repeated documents: `number` is the document's number, ascending, and `other` is the id
of the first document with the same key (see `Collection.ids`)."""


def text_key(document: Document) -> str:
    """Return the unchanged text as the key."""
    return document.text


def first_stages(
    name: str,
    *,
    rule: str,
    key: Key,
    lineage: Lineage,
    against: tuple[str, ...] = (),
) -> list[CorpusStage]:
    """Make the stages `NAME-keys`, `NAME-repeats` and `NAME`. The stage `NAME` drops all repeated documents.

    `rule` is the reason that is recorded for each dropped document. `against` lists output folders of earlier runs,
    whose documents count as earlier than all documents of this run. The keys of an earlier run are read from that run's
    folder `NAME-keys`.
    """
    keys, repeats = f"{name}-keys", f"{name}-repeats"
    collected = partial(collect, earlier=against, lineage=lineage)
    return [
        PartStage(
            name=keys,
            version=1,
            function=write_keys,
            arguments=(key,),
            settings={"key": key.__name__},
            lineage=lineage,
        ),
        PlannedStage(name=repeats, version=1, plan=partial(_plan_repeats, collected, keys)),
        PlannedStage(name=name, version=1, plan=partial(_plan_drops, collected, repeats, rule), yields=Yields.DROPS),
    ]


def write_keys(part: Part, key: Key, output: Output) -> Counts:
    """Run a task: write the hashed keys of a part's documents, in the order of their rows."""
    keys = [(document.row, *_hash(value)) for document in part.documents() if (value := key(document))]
    np.save(output.path(f"{part.name}.npy"), np.array(keys, KEYS))
    return {"keys": len(keys)}


def _hash(key: str) -> tuple[int, int]:
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _plan_repeats(collected: Callable[[Path], Collection], stage: str, work: Path) -> Sequence[StageTask]:
    collection = collected(work)
    num_keys = sum(record.counts["keys"] for record in read_records(work, stage))
    num_shares = max(1, -(-num_keys // KEYS_PER_TASK))
    own = collection.own
    settings = {"shares": num_shares, "earlier": collection.earlier_digests()}
    return [
        StageTask(
            name=f"{share:05}",
            function=partial(find_repeats, collection, stage, share, num_shares),
            inputs=(*(part.file(stage, ".npy") for part in own), *(part.file(INGEST) for part in own)),
            settings=settings,
        )
        for share in range(num_shares if own else 0)
    ]


def find_repeats(collection: Collection, stage: str, share: int, num_shares: int, output: Output) -> Counts:
    """Run a task: in one share of the keys, find the documents of this run that repeat an earlier document's key."""
    numbers, keys = [], []
    for index, part in enumerate(collection.parts):
        own = np.load(part.file(stage, ".npy"), mmap_mode="r")
        own = own[own["low"] % np.uint64(num_shares) == share]
        if index < collection.num_earlier:
            own = own[~np.isin(own["row"], part.dropped())]
        numbers.append(collection.numbers(index, own["row"]))
        keys.append(own)
    repeats, firsts = match_first(np.concatenate(numbers), np.concatenate(keys))
    new = ~collection.is_earlier(repeats)
    repeats, firsts = repeats[new], firsts[new]
    write_table(output.path(f"{share:05}.arrow"), {"number": repeats, "other": collection.ids(firsts)}, REPEATS)
    return {"repeats": len(repeats)}


def match_first(numbers: Numbers, keys: npt.NDArray[np.void]) -> tuple[Numbers, Numbers]:
    """Find the documents that have the same key as an earlier document.

    `numbers` (ascending) and `keys` have one element per document. Returns two arrays with one element per document
    found: the document's own number, ascending, and the number of the first document with the same key.
    """
    order = np.lexsort((keys["low"], keys["high"]))  # stable: numbers ascend within a key
    numbers, keys = numbers[order], keys[order]
    is_new = begins_run(keys["high"], keys["low"])
    first = np.maximum.accumulate(np.where(is_new, np.arange(len(keys)), 0))
    repeats = np.flatnonzero(~is_new)
    repeats = repeats[np.argsort(numbers[repeats])]
    return numbers[repeats], numbers[first[repeats]]


def _plan_drops(collected: Callable[[Path], Collection], stage: str, rule: str, work: Path) -> Sequence[StageTask]:
    return drop_tasks(collected(work), work, task_files(work, stage), rule, settings={"rule": rule})


def drop_tasks(
    collection: Collection, work: Path, files: tuple[Path, ...], rule: str, *, settings: Mapping[str, object]
) -> Sequence[StageTask]:
    """List the tasks that drop the documents in `files`, with one task per part of this run."""
    return [
        StageTask(
            name=part.name,
            function=partial(drop_listed, part, collection.num_earlier + place, files, rule),
            inputs=(*part.files, *files),
            settings={**settings, "earlier": collection.num_earlier},
            size=size,
        )
        for place, (part, (_, size)) in enumerate(zip(collection.own, find_parts(work), strict=True))
    ]


def drop_listed(part: Part, index: int, files: Sequence[Path], rule: str, output: Output) -> Counts:
    """Run a task: drop the documents of the part at `index` that `files` list. The files have the columns `REPEATS`,
    and may have a column `jaccard` with the similarity of the two documents.
    """
    drops: list[Drop] = []
    for path in files:
        table = rows_of_part(read_table(path), index)
        rows = (table["number"].to_numpy() - first_number(index)).tolist()
        has_details = "jaccard" in table.schema.names
        details = map("{:.2f}".format, table["jaccard"].to_pylist()) if has_details else repeat("")
        drops += map(Drop, rows, repeat(rule), details, table["other"].to_pylist())
    write_drops(output, part.name, drops)
    return count_rows(part.sizes(), drops)


def rows_of_part(table: pa.Table, index: int) -> pa.Table:
    """Select the rows for documents of the part at `index` from a table that is ordered by its column `number`."""
    bounds = np.array([first_number(index), first_number(index + 1)])
    start, stop = np.searchsorted(table["number"].to_numpy(), bounds).tolist()
    return table.slice(start, stop - start)
