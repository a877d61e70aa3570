"""Order of the validation samples. Every validation pass reads the same samples, spread evenly over the held-out text.

Shapes: B batch, S sequence.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import final

import numpy as np

from crosscut.architecture.inputs import Inputs
from crosscut.config import IGNORED
from crosscut.config.errors import DataError
from crosscut.data.sampler import Arrays, Ids, share_of_batch
from crosscut.data.shards.reading import Shard
from crosscut.data.tokenization.tokenizer import Tokenizer

_CONTEXT = 16
"""Number of tokens in front of a sample with which the sample's bytes are counted: more than a character has."""


class ValidationSamples(ABC):
    """Samples for validation, in a fixed order. With a limit, a validation pass reads only a part of the samples, at
    equal distances.
    """

    sequence_length: int
    """Number of tokens of a sample."""

    @abstractmethod
    def count(self, limit: int) -> int:
        """Return the number of samples that a validation pass reads. `limit` is the maximum; 0 means no limit."""

    @abstractmethod
    def sample_at(self, position: int, limit: int) -> tuple[Ids, Ids]:
        """Return the tokens and targets, each [S], of the sample at `position`. `limit` is the limit of the validation
        pass.
        """

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise `DataError` if a file has been written to or truncated since it was opened."""

    @abstractmethod
    def num_bytes(self, tokenizer: Tokenizer, *, limit: int = 0) -> int:
        """Return the size of the text of all targets, in UTF-8 bytes, summed over the batches of all ranks. `limit` has
        the same meaning as in `batches`. `tokenizer` is the tokenizer with which the tokens were made.

        End-of-text tokens have no bytes. The first token of a shard is not a target, so its bytes are not counted.
        """

    def batches(self, *, batch_size: int, rank: int = 0, size: int = 1, limit: int = 0) -> Iterator[Arrays]:
        """Yield this rank's slice of every batch: tokens and targets, each [B / size, S].

        Each batch is divided among `size` ranks, and `rank` is the index of this rank. All ranks get the same number of
        batches, with the same shape. Together, the batches hold each of the `count(limit)` samples once. An incomplete
        last batch is padded with samples whose targets are all `IGNORED`. Raises `DataError` unless `size` divides
        `batch_size`.
        """
        local, first = share_of_batch(batch_size, rank, size)
        num_samples = self.count(limit)
        for start in range(0, num_samples, batch_size):
            places = range(start + first, start + first + local)
            samples = [self.sample_at(i, limit) if i < num_samples else _blank(self.sequence_length) for i in places]
            self.check_unchanged()
            tokens, targets = map(np.stack, zip(*samples, strict=True))
            yield Inputs(tokens=tokens, targets=targets)


@final
class ValidationSampler(ValidationSamples):
    """Samples from the validation shard of one token folder: every token except the first is a target exactly once. The
    last sample is padded if it is short.
    """

    def __init__(self, shard: Shard, *, sequence_length: int) -> None:
        """Raise `DataError` if the shard has no token to predict."""
        if shard.num_tokens < 2:
            raise DataError(
                f"The validation set must have at least 2 tokens, but has {shard.num_tokens}. Provide more text."
            )
        self._shard = shard
        self.sequence_length = sequence_length
        self.num_samples = -(-(shard.num_tokens - 1) // sequence_length)

    def sample(self, index: int) -> tuple[Ids, Ids]:
        """Return the tokens and targets of sample `index`, each [S]. After the shard's end, tokens are 0 and targets
        are `IGNORED`.
        """
        tokens, targets = _blank(self.sequence_length)
        start = index * self.sequence_length
        rows = self._shard.tokens[start : start + self.sequence_length + 1]
        num_targets = max(len(rows) - 1, 0)
        tokens[:num_targets] = rows[:-1]
        targets[:num_targets] = rows[1:]
        return tokens, targets

    def count(self, limit: int) -> int:
        """Return the number of samples that a validation pass reads; see `ValidationSamples.count`."""
        return min(limit, self.num_samples) if limit else self.num_samples

    def sample_at(self, position: int, limit: int) -> tuple[Ids, Ids]:
        """Return the sample at `position` of a validation pass. The samples of a pass have equal distances, up to
        rounding, so that they come from all held-out documents and not only from the first ones.
        """
        return self.sample(self._index(position, self.count(limit)))

    def _index(self, position: int, count: int) -> int:
        """Index of a sample of a pass over `count` samples: the middle of its part of the shard."""
        return (2 * position + 1) * self.num_samples // (2 * count)

    def check_unchanged(self) -> None:
        """Raise `DataError` if a file of the shard has been written to or truncated since it was opened."""
        self._shard.check_unchanged()

    def num_bytes(self, tokenizer: Tokenizer, *, limit: int = 0) -> int:
        """Return the number of bytes of the text of all targets; see `ValidationSamples.num_bytes`."""
        count, ends = self.count(limit), self._shard.ends.astype(np.int64)
        if count == self.num_samples:
            return self._bytes_between(tokenizer, ends, 1, self._shard.num_tokens)
        firsts = [self._index(position, count) * self.sequence_length + 1 for position in range(count)]
        return sum(self._bytes_between(tokenizer, ends, first, first + self.sequence_length) for first in firsts)

    def _bytes_between(self, tokenizer: Tokenizer, ends: Ids, first: int, stop: int) -> int:
        """Number of bytes of the tokens from `first` to `stop` (exclusive). `ends` are the ends of the documents.

        The bytes of a token can depend on the tokens in front of it in its document, such as the first bytes of the
        same character. The count therefore is the difference of two texts that begin at the same earlier token.
        """
        number, last = np.searchsorted(ends, (first, stop - 1), side="right").tolist()
        total, begin, tokens = 0, int(ends[number - 1]) if number else 0, self._shard.tokens
        for end in ends[number : last + 1].tolist():
            start = max(begin, first)
            before = max(begin, start - _CONTEXT)
            total += tokenizer.num_bytes(tokens[before : min(end, stop)]) - tokenizer.num_bytes(tokens[before:start])
            begin = end
        return total


def _blank(length: int) -> tuple[Ids, Ids]:
    """Tokens and targets of a padding sample, which has no token to predict."""
    return np.zeros(length, dtype=np.int64), np.full(length, IGNORED, dtype=np.int64)
