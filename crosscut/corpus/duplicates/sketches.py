"""Compute the sketches of documents.

A sketch consists of MinHash values. The sketches of two documents give an estimate of the share of n-grams that the
documents have in common.

Sketches and the exact comparison use the same n-grams (`crosscut.corpus.words.ngrams`). Value j of a document is the
smallest hash of the document's n-grams after permutation j of the 32-bit numbers:

    value_j = min over n-grams g of (a_j * (hash(g) >> 32)) mod 2**32,   a_j odd

Multiplication by an odd number is a permutation modulo 2**32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from crosscut.corpus.batches import batches
from crosscut.corpus.collection import NO_NUMBERS, Collection, Numbers, split_by_part
from crosscut.corpus.documents import Part, Rows, read_table
from crosscut.corpus.duplicates.bands import Bands
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.words.ngrams import Hashed, Places, hash_words, ngrams

Values = npt.NDArray[np.uint32]
Lengths = npt.NDArray[np.uint64]

SKETCHES = "sketches"
SEED = 1234
BATCH_CHARACTERS = 400_000
_BLOCK_GRAMS = 1 << 17


class SketchSettings(NamedTuple):
    """Settings of sketches. Only sketches with equal settings can be compared."""

    ngram: int
    bands: int
    rows: int
    seed: int = SEED

    @property
    def shape(self) -> Bands:
        """Shape of the search: the number of bands and of rows."""
        return Bands(self.bands, self.rows)

    def schema(self) -> pa.Schema:
        """Columns of the file with a part's sketches. Each band has its own column, so a task can read one band."""
        bands = [(f"band {band}", pa.list_(pa.uint32(), self.rows)) for band in range(self.bands)]
        columns = [("row", pa.uint32()), ("length", pa.uint64()), *bands]
        return pa.schema(columns, {name: str(value) for name, value in self._asdict().items()})


def read_settings(path: Path) -> SketchSettings:
    """Read the settings of the sketches in a file."""
    with pa.memory_map(str(path)) as source:
        metadata = pa.ipc.open_file(source).schema.metadata
    return SketchSettings(*(int(metadata[name.encode()]) for name in SketchSettings._fields))


def write_sketches(part: Part, settings: SketchSettings, output: Output) -> Counts:
    """Run a task: write the sketches of a part's documents. Documents without words are left out."""
    rows = part.rows()
    texts = part.texts(rows)
    kept: list[npt.NDArray[np.bool_]] = [np.empty(0, np.bool_)]
    values: list[Values] = [np.empty((0, settings.shape.num_hashes), np.uint32)]
    for some in hash_ngrams(texts, settings.ngram):
        kept.append(np.diff(some.starts) > 0)
        values.append(minhash(some, settings))
    has_words = np.concatenate(kept)
    lengths = np.fromiter(map(len, texts), np.uint64, len(texts))
    path = output.path(f"{part.name}.arrow")
    write_values(path, settings, rows[has_words], lengths[has_words], np.concatenate(values))
    return {"sketches": int(has_words.sum())}


def hash_ngrams(texts: Sequence[str], n: int) -> Iterator[Hashed]:
    """Hash the n-grams of texts, in batches of about `BATCH_CHARACTERS` characters."""
    return (ngrams(hash_words(batch), n) for batch in batches(texts, len, BATCH_CHARACTERS))


def write_values(path: Path, settings: SketchSettings, rows: Rows, lengths: Lengths, values: Values) -> None:
    """Write sketches [documents, hashes] to a file. `rows` must be ascending, and `lengths` are in characters."""
    bands = np.split(values, settings.bands, axis=1)
    columns = [pa.array(rows, pa.uint32()), pa.array(lengths, pa.uint64())]
    columns += [pa.FixedSizeListArray.from_arrays(pa.array(band.ravel()), settings.rows) for band in bands]
    schema = settings.schema()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))


def minhash(grams: Hashed, settings: SketchSettings) -> Values:
    """Compute the MinHash values [documents, hashes] of the documents that have n-grams.

    The n-grams are processed in blocks that fit into the processor's cache.
    """
    factors = _factors(settings)
    starts = grams.starts[:-1][np.diff(grams.starts) > 0]
    ends = np.append(starts[1:], len(grams.hashes))
    values = np.empty((settings.shape.num_hashes, len(starts)), np.uint32)
    start = 0
    while start < len(starts):
        stop = max(start + 1, int(np.searchsorted(ends, starts[start] + _BLOCK_GRAMS, "right")))
        hashes = (grams.hashes[starts[start] : ends[stop - 1]] >> np.uint64(32)).astype(np.uint32)
        places = starts[start:stop] - starts[start]
        products = np.empty_like(hashes)
        for value, factor in zip(values, factors, strict=True):
            np.multiply(hashes, factor, out=products)
            np.minimum.reduceat(products, places, out=value[start:stop])
        start = stop
    return np.ascontiguousarray(values.T)


def _factors(settings: SketchSettings) -> Values:
    # numpy's compatibility policy guarantees the raw stream of PCG64, so the factors never change.
    words = np.random.PCG64(settings.seed).random_raw(settings.shape.num_hashes)
    return (np.asarray(words, np.uint64) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


class Sketches(NamedTuple):
    """Sketches of several documents."""

    numbers: Numbers
    lengths: Lengths
    """Lengths of the documents' texts, in characters."""

    values: Values
    """MinHash values [documents, hashes], or the values of a single band [documents, rows]."""

    def at(self, chosen: npt.NDArray[np.bool_]) -> Sketches:
        """Select the sketches of some documents. `chosen` has one boolean per document."""
        return Sketches(self.numbers[chosen], self.lengths[chosen], self.values[chosen])


def read_band(collection: Collection, index: int, band: int) -> Sketches:
    """Read one band of the sketches in the part at `index`. Documents that an earlier run dropped are left out."""
    table = _read(collection.parts[index])
    rows = table["row"].to_numpy()
    sketches = Sketches(collection.numbers(index, rows), table["length"].to_numpy(), _band(table, band))
    if index >= collection.num_earlier:
        return sketches
    kept = ~np.isin(rows, collection.parts[index].dropped())
    return sketches.at(kept)


def read_lengths(collection: Collection, numbers: Numbers) -> Lengths:
    """Read the lengths, in characters, of the texts of documents. The document numbers must be ascending."""
    read = (table["length"].to_numpy()[places] for table, places in _places(collection, numbers))
    return np.concatenate([NO_NUMBERS, *read])


def read_sketches(collection: Collection, numbers: Numbers) -> Sketches:
    """Read the whole sketches of documents. The document numbers must be ascending."""
    lengths, values = [], []
    for table, places in _places(collection, numbers):
        lengths.append(table["length"].to_numpy()[places])
        bands = range(table.num_columns - 2)
        values.append(np.concatenate([_band(table, band)[places] for band in bands], axis=1))
    return Sketches(numbers, np.concatenate(lengths), np.concatenate(values))


def _places(collection: Collection, numbers: Numbers) -> Iterator[tuple[pa.Table, Places]]:
    for index, rows in split_by_part(numbers):
        table = _read(collection.parts[index])
        yield table, np.searchsorted(table["row"].to_numpy(), rows)


def _read(part: Part) -> pa.Table:
    return read_table(part.file(SKETCHES))


def _band(table: pa.Table, band: int) -> Values:
    column = table[f"band {band}"].chunk(0)
    return np.asarray(column.flatten().to_numpy()).reshape(len(column), column.type.list_size)
