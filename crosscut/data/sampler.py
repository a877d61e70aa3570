"""Order of the training samples. Each epoch contains every sample once, in an order that depends only on (seed, epoch).

Every epoch follows section 4.1.3 of the paper. The order of the shards is shuffled. Within each shard, the documents
are shuffled, concatenated and cut into portions of the sequence length, and the portions are shuffled. A portion and
the token after the portion are one sample. Sample `index` is a pure function of the seed and the index. A run can
therefore resume at any sample, and a batch does not depend on the number of ranks that share the batch. Only the order
of one shard is in memory: about 24 bytes per document and 8 bytes per portion.

Shapes: B batch, S sequence.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from crosscut.architecture.inputs import Inputs
from crosscut.config.errors import DataError
from crosscut.data.shards.reading import Shard

SHARDS_KEY, DOCUMENTS_KEY, PORTIONS_KEY = 2, 3, 4  # key 1 belongs to the split

Ids = npt.NDArray[np.int64]
Arrays = Inputs[npt.NDArray[Any]]
"""Batch of NumPy arrays."""


class _Arrangement(NamedTuple):
    """Order of one shard in one epoch."""

    epoch: int
    shard: int
    documents: Ids
    """Shuffled document numbers, [documents]."""

    starts: Ids
    """Start of each shuffled document in the concatenation of the shuffled documents, followed by the end of the last
    document, [documents + 1]."""

    places: Ids
    """Start of each shuffled document in the shard's file of tokens, [documents]."""

    portions: Ids
    """Shuffled portion numbers, [portions]."""


class SampleRows(ABC):
    """Rows of token ids, reproducible from the seed and the row's index. One row is one sample."""

    sequence_length: int
    """Number of tokens of a sample, excluding the token after the sample."""

    row_length: int
    """Number of tokens of a row: S + 1 if a row ends with the token after the sample, and otherwise S."""

    @abstractmethod
    def batch_at(self, first_sample: int, count: int) -> Ids:
        """Return `count` consecutive rows, [count, `row_length`], starting at sample `first_sample`.

        `first_sample` is the number of samples consumed so far, counted over all epochs. A batch may start at any
        sample and cross the ends of shards and epochs.
        """

    @abstractmethod
    def documents(self, index: int) -> list[tuple[str, int]]:
        """Return the documents from which the tokens of sample `index` come, each as (name of the file, record number
        in the file).
        """

    @abstractmethod
    def epochs(self, num_samples: int) -> tuple[float, ...]:
        """Return the number of epochs of each token folder that the first `num_samples` samples cover, [folders]."""


class FolderRows(SampleRows):
    """Rows of one token folder. Each epoch contains every row once, shard by shard. The order of the shards depends
    only on (seed, epoch).
    """

    samples_per_epoch: int
    """Number of samples of an epoch of the folder."""

    _seed: int
    _shards_key: int
    """Key of the random numbers that order the shards."""
    _rows_of_shards: Sequence[int]
    """Number of rows of each shard, [shards]."""

    def epochs(self, num_samples: int) -> tuple[float, ...]:
        """Return the number of epochs of the folder that `num_samples` samples cover."""
        return (num_samples / self.samples_per_epoch,)

    def _find_shard(self, index: int) -> tuple[int, int, int]:
        """Return the epoch of a sample, the index of its shard, and its position among the shard's rows."""
        epoch, within = divmod(index, self.samples_per_epoch)
        order = shuffled(len(self._rows_of_shards), self._seed, self._shards_key, epoch).tolist()
        starts = [0, *accumulate(self._rows_of_shards[shard] for shard in order)]
        place = bisect_right(starts, within) - 1
        return epoch, order[place], within - starts[place]


class Samples(SampleRows):
    """Samples for causal language modelling. A row is a sample and the token after it, [S + 1]."""

    def sample(self, index: int) -> Ids:
        """Return the S + 1 tokens of one sample: a portion of S tokens, and the token after the portion."""
        sample: Ids = self.batch_at(index, 1)[0]
        return sample

    def batch(self, step: int, *, batch_size: int, rank: int = 0, size: int = 1) -> Arrays:
        """Return this rank's slice of the batch of one step: tokens and targets, each [B / size, S].

        `step` is the number of the step, from 0. The batch is divided among `size` ranks, and `rank` is the index of
        this rank. Slices are consecutive: concatenated in the order of the ranks, they are the whole batch. Raises
        `DataError` unless `size` divides `batch_size`.
        """
        return self.batch_from(step * batch_size, batch_size=batch_size, rank=rank, size=size)

    def batch_from(self, first_sample: int, *, batch_size: int, rank: int = 0, size: int = 1) -> Arrays:
        """Return this rank's slice of the batch that starts at sample `first_sample`, in the form that `batch` returns.
        Use this method if the batch size grows during the run, because the first sample then does not follow from the
        step and the batch size.
        """
        local, first = share_of_batch(batch_size, rank, size)
        rows = self.batch_at(first_sample + first, local)
        return Inputs(tokens=rows[:, :-1], targets=rows[:, 1:])


@final
class Sampler(Samples, FolderRows):
    """Training samples from the shards of one token folder."""

    _shards_key = SHARDS_KEY

    def __init__(self, shards: Sequence[Shard], *, sequence_length: int, seed: int) -> None:
        """Raise `DataError` if no shard fills one sequence."""
        self.sequence_length, self.row_length = sequence_length, sequence_length + 1
        self._seed = seed
        self._shards = tuple(shards)
        # A portion needs one token more than its length, because every token has a target.
        self._rows_of_shards = [max(shard.num_tokens - 1, 0) // sequence_length for shard in self._shards]
        self.samples_per_epoch = sum(self._rows_of_shards)
        self._arrangement: _Arrangement | None = None
        if not self.samples_per_epoch:
            tokens = [shard.num_tokens for shard in self._shards]
            raise DataError(
                f"A training shard must have at least `training.sequence_length` + 1 = {sequence_length + 1:,} tokens, "
                f"but the largest has {max(tokens, default=0):,} (shards: {len(tokens)}, tokens in all shards: "
                f"{sum(tokens):,}). Provide more text, or lower `training.sequence_length` or `data.num_shards`."
            )

    def batch_at(self, first_sample: int, count: int) -> Ids:
        """Return consecutive samples; see `SampleRows.batch_at`."""
        rows = np.empty((count, self.sequence_length + 1), dtype=np.int64)
        done = 0
        while done < count:
            arrangement, slot = self._locate(first_sample + done)
            portions = arrangement.portions[slot : slot + count - done]
            self._gather(arrangement, portions, rows[done : done + len(portions)])
            self._shards[arrangement.shard].check_unchanged()
            done += len(portions)
        return rows

    def documents(self, index: int) -> list[tuple[str, int]]:
        """Return the documents of a sample; see `SampleRows.documents`."""
        arrangement, slot = self._locate(index)
        start = int(arrangement.portions[slot]) * self.sequence_length
        first, last = _span(arrangement.starts, start, start + self.sequence_length)
        shard = self._shards[arrangement.shard]
        return [shard.origin(int(number)) for number in arrangement.documents[first : last + 1]]

    def _locate(self, index: int) -> tuple[_Arrangement, int]:
        """Return the arrangement that holds a sample, and the sample's index in the shuffled portions."""
        epoch, shard, slot = self._find_shard(index)
        return self._arrange(epoch, shard), slot

    def _arrange(self, epoch: int, shard: int) -> _Arrangement:
        current = self._arrangement
        if current is None or (current.epoch, current.shard) != (epoch, shard):
            self._arrangement = None  # free the old arrangement before the new one is made
            documents = shuffled(self._shards[shard].num_documents, self._seed, DOCUMENTS_KEY, epoch, shard)
            ends = self._shards[shard].ends.astype(np.int64)
            lengths = np.diff(ends, prepend=0)
            ends -= lengths
            places = ends[documents]
            starts = np.concatenate([np.zeros(1, dtype=np.int64), lengths[documents].cumsum()])
            portions = shuffled(self._rows_of_shards[shard], self._seed, PORTIONS_KEY, epoch, shard)
            current = self._arrangement = _Arrangement(epoch, shard, documents, starts, places, portions)
        return current

    def _gather(self, arrangement: _Arrangement, portions: Ids, rows: Ids) -> None:
        """Copy the tokens of each portion, and the token after the portion, into a row of `rows` [portions, S + 1]."""
        tokens = self._shards[arrangement.shard].tokens
        begins = portions * self.sequence_length
        firsts, lasts = _span(arrangement.starts, begins, begins + self.sequence_length)
        for row, begin, first, last in zip(rows, begins.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
            # Lists, because reading single numbers from an array is slow.
            starts, places = (
                arrangement.starts[first : last + 2].tolist(),
                arrangement.places[first : last + 1].tolist(),
            )
            filled = 0
            for start, end, place in zip(starts[:-1], starts[1:], places, strict=True):
                skipped = begin + filled - start
                count = min(end - start - skipped, len(row) - filled)
                row[filled : filled + count] = tokens[place + skipped : place + skipped + count]
                filled += count


def share_of_batch(batch_size: int, rank: int, size: int) -> tuple[int, int]:
    """Return the number of samples in one rank's slice of a batch, and the position of the first of these samples in
    the batch.

    The batch is divided among `size` ranks. Raises `DataError` unless `size` divides `batch_size`.
    """
    if batch_size % size:
        raise DataError(
            f"`batch_size` must be a multiple of the number of ranks that share a batch ({size}), but is {batch_size}. "
            f"Try {batch_size // size * size + size}."
        )
    return batch_size // size, batch_size // size * rank


def shuffled(count: int, *key: int) -> Ids:
    """Return a permutation of `count` numbers, drawn from `key`.

    The order results from sorting random bits. NumPy guarantees that the bits of a bit generator never change (NEP 19),
    but not the results of `Generator.permutation`. The low bits of each random number are replaced by the position of
    the number. All numbers are then distinct, so the fastest sort, which is not stable, gives the same order
    everywhere.
    """
    keys: npt.NDArray[np.uint64] = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    low = np.uint64(max(count - 1, 0).bit_length())
    keys >>= low
    keys <<= low
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << low) - np.uint64(1)
    return keys.view(np.int64)


def _span(starts: Ids, begins: npt.ArrayLike, ends: npt.ArrayLike) -> tuple[Ids, Ids]:
    """Return the first and the last document that contain tokens from position `begins` to position `ends`, inclusive.
    The positions count tokens in the concatenation of the shuffled documents, and the results are indices in the
    shuffled order.
    """
    return np.searchsorted(starts, begins, side="right") - 1, np.searchsorted(starts, ends, side="right") - 1
