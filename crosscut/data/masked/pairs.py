"""Pairs of consecutive segments of one document, for masked language modelling with sentence order.

The sentences of every document are grouped, in order, into pairs that fit a sequence. A pair is cut at random, between
two of its sentences, into segments A and B. The pair then becomes

    [CLS] A [SEP] B [SEP] [PAD] ...

A tenth of the pairs are shorter, with a random length, so that a model also meets short texts (BERT, appendix A.2).
Every sentence is in exactly one pair of an epoch, but documents with a single sentence are left out. The pairs of a
folder are the same in every epoch. Their order is drawn from (seed, epoch), and the cut of each pair from (seed,
index).

Memory holds 24 bytes for each pair of the current shard and, while the pairs are found, 8 bytes for each sentence of
the shard.
"""

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np

from crosscut.config.errors import DataError
from crosscut.data.masked.draws import key_of, random_bits, to_uniform
from crosscut.data.sampler import FolderRows, Ids, shuffled
from crosscut.data.shards.reading import Shard
from crosscut.data.tokenization.special_tokens import SpecialTokens

SHORT = 0.1
"""Share of pairs with a random length."""

NUM_SPECIAL = 3
"""Number of special tokens of a pair: `[CLS]` and two `[SEP]`."""

_LENGTHS_KEY, _CUTS_KEY, _SHARDS_KEY, _PAIRS_KEY = 6, 7, 8, 9  # the split, `Sampler` and mixtures use the keys 1 to 5


class Pairs(NamedTuple):
    """Pairs of a shard, in the order of the shard. Each array is [pairs]."""

    begins: Ids
    """Index of each pair's first token among the tokens of the shard."""

    firsts: Ids
    """Index of each pair's first sentence among the sentences of the shard."""

    counts: Ids
    """Number of sentences of each pair, at least 2."""


def find_pairs(shard: Shard, *, room: int, key: np.uint64) -> Pairs:
    """Group the sentences of a shard into pairs of at most `room` tokens. A pair may be longer if it has only two
    sentences, or if it consists of the last three sentences of a document.
    """
    assert shard.sentences is not None
    ends: Ids = shard.sentences[:].astype(np.int64)
    documents = shard.ends.astype(np.int64)
    begins = np.concatenate([np.zeros(1, dtype=np.int64), documents[:-1]])[: len(documents)]
    cursors = np.searchsorted(ends, begins, side="right")
    stops = np.searchsorted(ends, documents, side="left")
    long_enough = stops - cursors >= 2
    begins, cursors, stops = begins[long_enough], cursors[long_enough], stops[long_enough]
    found = [Pairs(begins[:0], cursors[:0], stops[:0])]
    while len(cursors):  # the next pair of every document that has sentences left
        until = np.searchsorted(ends, begins + _lengths(cursors, room, key), side="right")
        until = np.minimum(np.maximum(until, cursors + 2), stops)
        # A single last sentence is not a pair: it gets a sentence from the previous pair, or is added to that pair.
        alone = stops - until == 1
        until = np.where(alone, np.where(until - cursors > 2, until - 1, stops), until)
        found.append(Pairs(begins, cursors, until - cursors))
        left = until < stops
        cursors, stops = until[left], stops[left]
        begins = ends[cursors - 1]
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    order = np.argsort(columns[1])
    return Pairs(*(column[order] for column in columns))


def _lengths(cursors: Ids, room: int, key: np.uint64) -> Ids:
    """Maximum number of tokens of each pair, [pairs]: `room` or, for a fraction `SHORT` of the pairs, a random number.

    `cursors` holds the index of each pair's first sentence in the shard, [pairs]. The random numbers depend only on
    `key` and on this index.
    """
    draws = to_uniform(random_bits(key, cursors, 2))
    short = 2 + (draws[:, 1] * (room - 1)).astype(np.int64)
    return np.where(draws[:, 0] < SHORT, short, room)


@final
class PairSampler(FolderRows):
    """Sampler of pairs of segments from the shards of one token folder. A row holds the two segments of a pair in the
    order of the text.
    """

    _shards_key = _SHARDS_KEY

    def __init__(self, shards: Sequence[Shard], *, sequence_length: int, seed: int, special: SpecialTokens) -> None:
        """Raise `DataError` if the shards have no index of sentences, or no document with two sentences."""
        self.sequence_length = self.row_length = sequence_length
        self._shards, self._seed, self._special = tuple(shards), seed, special
        if any(shard.sentences is None for shard in shards):
            raise DataError(
                "Pairs of segments need tokens with an index of sentences, but these tokens have none. Prepare the "
                'tokens again with data.objective="masked".'
            )
        self._found: tuple[int, Pairs] | None = None
        self._order: tuple[tuple[int, int], Ids] | None = None
        self._rows_of_shards = [len(self._pairs(number).begins) for number in range(len(self._shards))]
        self.samples_per_epoch = sum(self._rows_of_shards)
        if not self.samples_per_epoch:
            raise DataError(
                "Pairs of segments need a document with at least 2 sentences, but the tokenized text contains no such "
                "document. Provide longer documents, or set data.pairs=false."
            )

    def batch_at(self, first_sample: int, count: int) -> Ids:
        """Return consecutive rows, [count, S]; see `SampleRows.batch_at`."""
        rows = np.full((count, self.row_length), self._special.padding, dtype=np.int64)
        cuts = to_uniform(random_bits(key_of(self._seed, _CUTS_KEY), np.arange(count) + first_sample, 1))[:, 0]
        done = 0
        while done < count:
            number, order, slot = self._locate(first_sample + done)
            pairs, chosen = self._pairs(number), order[slot : slot + count - done]
            for row, pair, cut in zip(rows[done:], chosen.tolist(), cuts[done:].tolist(), strict=False):
                place = (int(pairs.begins[pair]), int(pairs.firsts[pair]), int(pairs.counts[pair]))
                self._fill(row, self._shards[number], place, cut)
            self._shards[number].check_unchanged()
            done += len(chosen)
        return rows

    def documents(self, index: int) -> list[tuple[str, int]]:
        """Return the document of a sample; see `SampleRows.documents`."""
        number, order, slot = self._locate(index)
        shard = self._shards[number]
        place = int(self._pairs(number).begins[order[slot]])
        return [shard.origin(int(np.searchsorted(shard.ends.astype(np.int64), place, side="right")))]

    def _locate(self, index: int) -> tuple[int, Ids, int]:
        """Return the index of a sample's shard, the order of the shard's pairs in the sample's epoch, and the sample's
        position in this order.
        """
        epoch, number, slot = self._find_shard(index)
        if self._order is None or self._order[0] != (epoch, number):
            order = shuffled(self._rows_of_shards[number], self._seed, _PAIRS_KEY, epoch, number)
            self._order = (epoch, number), order
        return number, self._order[1], slot

    def _pairs(self, number: int) -> Pairs:
        if self._found is None or self._found[0] != number:
            self._found = None  # free the old pairs before new ones are found
            key, room = key_of(self._seed, _LENGTHS_KEY, number), self.sequence_length - NUM_SPECIAL
            self._found = number, find_pairs(self._shards[number], room=room, key=key)
        return self._found[1]

    def _fill(self, row: Ids, shard: Shard, place: tuple[int, int, int], cut: float) -> None:
        """Write a pair into a row. If the pair is too long, the segments are cut at their outer ends, the longer
        segment first, so that the segments remain adjacent.
        """
        begin, first, count = place
        assert shard.sentences is not None
        ends = shard.sentences[first : first + count]
        border, end = int(ends[int(cut * (count - 1))]), int(ends[-1])
        room = len(row) - NUM_SPECIAL
        a = min(border - begin, max(room - (end - border), room // 2))
        b = min(end - border, room - a)
        row[0] = self._special.begin
        row[1 : 1 + a] = shard.tokens[border - a : border]
        row[1 + a] = self._special.separator
        row[2 + a : 2 + a + b] = shard.tokens[border : border + b]
        row[2 + a + b] = self._special.separator
