"""Samples for masked language modelling, as a pure function of the seed and the sample's index.

A row of tokens (a pair of segments, or a part of packed documents) comes from a sampler of rows. Everything else is
drawn from (seed, index): whether the two segments are swapped, with probability 1/2, and which words are masked. A
batch is therefore the same on every layout and after a resume, and every epoch masks different words.

Packed documents have the form of RoBERTa's (section 4.2 there, FULL-SENTENCES): `[CLS]` at the start of a row, then
documents one after another, each followed by `[SEP]`. A document may begin or end in the middle of a row.

Legend: B batch, S sequence.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import numpy as np

from crosscut.architecture.inputs import Inputs
from crosscut.config import IGNORED
from crosscut.config.data import DataConfig
from crosscut.config.errors import DataError
from crosscut.data.masked.draws import key_of, random_bits
from crosscut.data.masked.masking import Masking
from crosscut.data.masked.pairs import PairSampler
from crosscut.data.masked.vocabulary import Flags, Vocabulary, vocabulary_of
from crosscut.data.mixture import MixedSampler, Tokens, folders_of, named_folder
from crosscut.data.sampler import Arrays, Ids, Sampler, SampleRows, share_of_batch
from crosscut.data.shards.reading import Shard, TokenFolder

_MASKS_KEY, _VALIDATION_KEY = 10, 11


@final
class MaskedSampler:
    """Samples for masked language modelling, made from the rows of another sampler, in the order of these rows."""

    def __init__(self, rows: SampleRows, vocabulary: Vocabulary, masking: Masking, *, pairs: bool, seed: int) -> None:
        """`rows` is a `PairSampler` if `pairs` is true, and otherwise a `Sampler`. For a mixture, `rows` is a
        `MixedSampler` of one such sampler per folder.
        """
        self.pairs = pairs
        """Whether a sample is a pair of segments. Otherwise, a sample is a row of packed documents."""
        self.sequence_length = rows.row_length
        """Number of tokens of a sample."""
        self._rows, self._vocabulary, self._masking = rows, vocabulary, masking
        self._key = key_of(seed, _MASKS_KEY)

    def batch_at(self, first_sample: int, count: int) -> Arrays:
        """Return `count` consecutive samples, starting at sample `first_sample`, counted over all epochs.

        Pairs have segments, a mask and the order of the segments. The first segment, `[CLS]`, the first `[SEP]` and
        padding have the segment 0. Packed documents have documents, counted from 0 in each row, and positions. `[CLS]`
        belongs to the first document of a row, and a `[SEP]` to the document before it.
        """
        num_draws = 1 + self._masking.num_draws(self.sequence_length)
        bits = random_bits(self._key, np.arange(count) + first_sample, num_draws)
        rows, special = self._rows.batch_at(first_sample, count), self._vocabulary.special
        if self.pairs:
            order = (bits[:, 0] & np.uint64(1)).astype(np.int64)
            rows, segments, mask = _arranged(rows, order, separator=special.separator, padding=special.padding)
            read, targets = self._masking(rows, bits[:, 1:])
            return Inputs(tokens=read, targets=targets, segments=segments, mask=mask, order=order)
        rows[:, 1:] = rows[:, :-1]
        rows[:, 0] = special.begin
        documents, positions = _documents(rows, separator=special.separator)
        read, targets = self._masking(rows, bits[:, 1:])
        every = np.ones(rows.shape, dtype=np.bool_)
        whole = {"segments": np.zeros_like(rows), "mask": every}
        return Inputs(tokens=read, targets=targets, documents=documents, positions=positions, **whole)

    def batch_from(self, first_sample: int, *, batch_size: int, rank: int = 0, size: int = 1) -> Arrays:
        """Return this rank's slice of the batch that starts at sample `first_sample`: [B / size, S].

        The batch is divided among `size` ranks, and `rank` is the index of this rank. Slices are consecutive. Raises
        `DataError` unless `size` divides `batch_size`.
        """
        local, first = share_of_batch(batch_size, rank, size)
        return self.batch_at(first_sample + first, local)

    def documents(self, index: int) -> list[tuple[str, int]]:
        """Return the documents of sample `index`, each as (name of the file, record number in the file)."""
        return self._rows.documents(index)

    def epochs(self, num_samples: int) -> tuple[float, ...]:
        """Return the number of epochs of each token folder that the first `num_samples` samples cover, [folders]."""
        return self._rows.epochs(num_samples)


@final
class MaskedValidation:
    """Samples for validation. Every validation pass reads the same samples, with the same masks."""

    def __init__(self, sampler: MaskedSampler, num_samples: int) -> None:
        self._sampler, self.num_samples = sampler, num_samples

    def count(self, limit: int) -> int:
        """Return the number of samples that a validation pass reads. `limit` is the maximum; 0 means no limit."""
        return min(limit, self.num_samples) if limit else self.num_samples

    def batches(self, *, batch_size: int, rank: int = 0, size: int = 1, limit: int = 0) -> Iterator[Arrays]:
        """Yield this rank's slice of every batch, [B / size, S]. All ranks get the same number of batches of the same
        shape. In rows that pad the last batch, all targets and the order are `IGNORED`.
        """
        local, first = share_of_batch(batch_size, rank, size)
        num_samples = self.count(limit)
        for start in range(0, num_samples, batch_size):
            batch = self._sampler.batch_at(start + first, local)
            beyond = np.arange(start + first, start + first + local) >= num_samples
            for predicted in (batch.targets, batch.order):
                if predicted is not None:
                    predicted[beyond] = IGNORED
            yield batch


def masked_samples(tokens: Tokens, config: DataConfig, *, sequence_length: int, seed: int) -> MaskedSampler:
    """Return the training samples of a run. Raises `DataError` if a folder has no special tokens, no sentences for
    pairs, or too little text.
    """
    parts = {folder: folder.train for folder in folders_of(tokens)}
    rows = _rows(tokens, config, parts, sequence_length=sequence_length, seed=seed)
    return _sampler(tokens, config, rows, seed)


def masked_validation(tokens: Tokens, config: DataConfig, *, sequence_length: int, seed: int) -> MaskedValidation:
    """Return the validation samples of a run. Each folder of a mixture gives a share of the samples in proportion to
    its weight. Without a limit, the number of samples is the largest number for which no folder runs out of samples.
    Raises the same errors as `masked_samples`.
    """
    seed = int(key_of(seed, _VALIDATION_KEY))
    parts = {folder: (folder.validation,) for folder in folders_of(tokens)}
    rows = _rows(tokens, config, parts, sequence_length=sequence_length, seed=seed)
    shares = folders_of(tokens).values()
    most = min(one.samples_per_epoch / share for one, share in zip(rows, shares, strict=True))
    return MaskedValidation(_sampler(tokens, config, rows, seed), int(most))


def _rows(
    tokens: Tokens,
    config: DataConfig,
    parts: Mapping[TokenFolder, Sequence[Shard]],
    *,
    sequence_length: int,
    seed: int,
) -> list[PairSampler | Sampler]:
    """Make a sampler of rows for the chosen shards of each folder."""
    special = tokens.tokenizer().special_tokens()
    rows: list[PairSampler | Sampler] = []
    for folder, shards in parts.items():
        with named_folder(folder):
            if config.pairs:
                rows.append(PairSampler(shards, sequence_length=sequence_length, seed=seed, special=special))
            else:
                _require_a_row(shards, sequence_length)
                rows.append(Sampler(shards, sequence_length=sequence_length - 1, seed=seed))
    return rows


def _sampler(tokens: Tokens, config: DataConfig, rows: Sequence[PairSampler | Sampler], seed: int) -> MaskedSampler:
    vocabulary = vocabulary_of(tokens.tokenizer())
    masking = Masking(vocabulary, fraction=config.mask_fraction, max_words=config.mask_words)
    mixed = rows[0] if isinstance(tokens, TokenFolder) else MixedSampler(rows, tokens.weights, seed=seed)
    return MaskedSampler(mixed, vocabulary, masking, pairs=config.pairs, seed=seed)


def _require_a_row(shards: Sequence[Shard], sequence_length: int) -> None:
    most = max((shard.num_tokens for shard in shards), default=0)
    if most < sequence_length:
        raise DataError(
            f"A shard must have at least `training.sequence_length` ({sequence_length:,}) tokens, but the largest "
            f"shard of `{shards[0].name.partition('-')[0]}` has {most:,}. Provide more text, or lower "
            "`training.sequence_length` or `data.num_shards`."
        )


def _arranged(rows: Ids, order: Ids, *, separator: int, padding: int) -> tuple[Ids, Ids, Flags]:
    """Swap the segments of the pairs whose `order` is 1. Returns the rows, the segments and the mask, each [B, S].

    A row `[CLS] A [SEP] B [SEP]` becomes `[CLS] B [SEP] A [SEP]`.
    """
    mask = rows != padding
    places = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
    border = (rows == separator).argmax(axis=1)[:, None]  # number of tokens of A, plus 1
    last = mask.sum(axis=1)[:, None] - 1
    of_b = last - border  # number of tokens of B, plus 1
    moved = np.where(places < of_b, places + border, np.where(places == of_b, last, places - of_b))
    is_inner = (places > 0) & (places < last)
    rows = np.take_along_axis(rows, np.where(is_inner & (order[:, None] == 1), moved, places), axis=1)
    middle = np.where(order[:, None] == 1, of_b, border)
    segments = ((places > middle) & (places <= last)).astype(np.int64)
    return rows, segments, mask


def _documents(rows: Ids, *, separator: int) -> tuple[Ids, Ids]:
    """Return the index of each token's document in the row, and the token's position in the document, each [B, S]."""
    begins = np.zeros_like(rows)
    begins[:, 1:] = rows[:, :-1] == separator
    places = np.arange(rows.shape[1])
    positions = places - np.maximum.accumulate(begins * places, axis=1)
    return begins.cumsum(axis=1), positions
