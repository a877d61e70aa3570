"""Mixture of several token folders: each folder gives a share of the training tokens.

All samples have the same number of tokens, so a folder's share of the tokens is also its share of the samples. The
samples come in blocks. Every block has each folder's share of samples, rounded up or down, in an order that depends
only on (seed, block). The rounding alternates between blocks, so that the shares of the whole run are exact up to a few
samples.

Within a folder, samples come in the order in which `Sampler` gives them to a run on this folder alone. The folder of a
sample, and the sample's position in the folder's order, are a function of the seed, the shares and the sample's index.
A run can therefore resume at any sample, and a batch does not depend on the number of ranks.

Legend: F folders, N samples of a block, S tokens of a sequence.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import fsum
from pathlib import Path
from typing import final

import numpy as np

from crosscut.config.data import DataConfig
from crosscut.config.errors import DataError
from crosscut.data.manifest import TOKENIZER_NAME, TokenManifest
from crosscut.data.sampler import FolderRows, Ids, Sampler, Samples, shuffled
from crosscut.data.shards.reading import TokenFolder
from crosscut.data.tokenization.tokenizer import Tokenizer
from crosscut.data.validation import ValidationSampler, ValidationSamples

BLOCK_SAMPLES = 1024
"""Number of samples of a block."""

_MIXTURE_KEY = 5
"""Key of the random numbers that order a block. The split and `Sampler` use the keys 1 to 4."""

_GOLDEN_RATIO = 0.6180339887498949
"""Step between the rounding offsets of successive blocks (see `_slots_until`). Multiples of the golden ratio, modulo 1,
are spread evenly."""


@dataclass(frozen=True, eq=False)
class TokenMixture:
    """Token folders on which a run trains together. All folders have the same tokenizer."""

    folders: tuple[TokenFolder, ...]
    """Folders in the order of `data.mixture`."""

    weights: tuple[float, ...]
    """Weight of each folder's tokens, [folders]. Weights are positive and need not add up to 1."""

    @classmethod
    def open(cls, config: DataConfig, *, verify: bool) -> "TokenMixture":
        """Open the folders of `data.mixture`. With `verify`, check the hashes of all files.

        Raises `DataError` for folders with different tokenizers, and the errors of `TokenFolder.open`.
        """
        folders = tuple(TokenFolder.open(Path(part.folder), verify=verify) for part in config.mixture)
        for other in folders[1:]:
            _require_same_tokenizer(folders[0], other)
        return cls(folders, tuple(part.weight for part in config.mixture))

    @property
    def path(self) -> Path:
        """Path of the first folder."""
        return self.folders[0].path

    @property
    def manifest(self) -> TokenManifest:
        """Description of the first folder."""
        return self.folders[0].manifest

    @property
    def vocab_size(self) -> int:
        """Highest id of all folders, plus 1."""
        return max(folder.vocab_size for folder in self.folders)

    @property
    def end_of_text(self) -> int:
        """Id at the end of every document."""
        return self.folders[0].end_of_text

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer with which the tokens were made."""
        return self.folders[0].tokenizer()


Tokens = TokenFolder | TokenMixture
"""Tokens on which a run trains."""


def open_tokens(config: DataConfig, folder: Path, *, verify: bool) -> Tokens:
    """Open the mixture of `config`, or the token folder `folder` if there is no mixture."""
    return TokenMixture.open(config, verify=verify) if config.mixture else TokenFolder.open(folder, verify=verify)


def folders_of(tokens: Tokens) -> dict[TokenFolder, float]:
    """Return the token folders, in order, and each folder's share of the training tokens."""
    if isinstance(tokens, TokenFolder):
        return {tokens: 1.0}
    return dict(zip(tokens.folders, shares_of(tokens.weights), strict=True))


def shares_of(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights divided by their sum."""
    largest = max(weights)
    scaled = [weight / largest for weight in weights]  # the sum of huge weights could overflow
    return tuple(weight / fsum(scaled) for weight in scaled)


def training_samples(tokens: Tokens, *, sequence_length: int, seed: int) -> Samples:
    """Return the training samples, in their order. Raises `DataError` if none of a folder's shards fills a sequence."""
    if isinstance(tokens, TokenFolder):
        return Sampler(tokens.train, sequence_length=sequence_length, seed=seed)
    samplers = []
    for folder in tokens.folders:
        with named_folder(folder):
            samplers.append(Sampler(folder.train, sequence_length=sequence_length, seed=seed))
    return MixedSampler(samplers, tokens.weights, seed=seed)


def validation_samples(tokens: Tokens, *, sequence_length: int) -> ValidationSamples:
    """Return the validation samples, in their order. Raises `DataError` if a validation set has no token to predict."""
    if isinstance(tokens, TokenFolder):
        return ValidationSampler(tokens.validation, sequence_length=sequence_length)
    samplers = []
    for folder in tokens.folders:
        with named_folder(folder):
            samplers.append(ValidationSampler(folder.validation, sequence_length=sequence_length))
    return MixedValidationSampler(samplers, tokens.weights)


@final
class MixedSampler(Samples):
    """Training samples from several token folders, with a weight for each folder's tokens."""

    def __init__(self, samplers: Sequence[FolderRows], weights: Sequence[float], *, seed: int) -> None:
        self.sequence_length, self.row_length = samplers[0].sequence_length, samplers[0].row_length
        self._samplers, self._seed = tuple(samplers), seed
        ends = list(accumulate(shares_of(weights)))
        self._ends = np.array([*ends[:-1], 1.0])  # end of each folder's part of the interval from 0 to 1, [F]
        self._before = np.zeros((1, len(samplers)), dtype=np.int64)  # each folder's samples before a block, [blocks, F]

    def batch_at(self, first_sample: int, count: int) -> Ids:
        """Return consecutive samples; see `SampleRows.batch_at`."""
        rows = np.empty((count, self.row_length), dtype=np.int64)
        folders, places = self._located(first_sample, count)
        for number, sampler in enumerate(self._samplers):
            own = np.flatnonzero(folders == number)
            if len(own):  # a folder's samples are consecutive
                rows[own] = sampler.batch_at(int(places[own[0]]), len(own))
        return rows

    def documents(self, index: int) -> list[tuple[str, int]]:
        """Return the documents of a sample; see `SampleRows.documents`."""
        folders, places = self._located(index, 1)
        return self._samplers[int(folders[0])].documents(int(places[0]))

    def epochs(self, num_samples: int) -> tuple[float, ...]:
        """Return the number of epochs of each token folder that the first `num_samples` samples cover, [F]."""
        block, within = divmod(num_samples, BLOCK_SAMPLES)
        before = self._samples_before(block) + np.bincount(self._block(block)[:within], minlength=len(self._samplers))
        return tuple(
            count / sampler.samples_per_epoch for count, sampler in zip(before.tolist(), self._samplers, strict=True)
        )

    def _located(self, first: int, count: int) -> tuple[Ids, Ids]:
        """Return the index of each sample's folder, and the sample's position in the order of that folder, each
        [count].
        """
        blocks = range(first // BLOCK_SAMPLES, (first + count - 1) // BLOCK_SAMPLES + 1)
        folders = np.concatenate([self._block(block) for block in blocks])
        places = np.empty_like(folders)
        for number, before in enumerate(self._samples_before(blocks[0]).tolist()):
            own = np.flatnonzero(folders == number)
            places[own] = before + np.arange(len(own))
        start = first - blocks[0] * BLOCK_SAMPLES
        return folders[start : start + count], places[start : start + count]

    def _block(self, block: int) -> Ids:
        """Return the index of the folder of each sample in a block, [N]."""
        order = shuffled(BLOCK_SAMPLES, self._seed, _MIXTURE_KEY, block)
        folders: Ids = np.searchsorted(self._slots_until(np.array([block]))[0], order, side="right")
        return folders

    def _samples_before(self, block: int) -> Ids:
        """Number of samples of each folder in all blocks before `block`, [F]."""
        while len(self._before) <= block:
            known = len(self._before)
            counts = np.diff(self._slots_until(np.arange(known - 1, 2 * known - 1)), prepend=0)
            self._before = np.concatenate([self._before, self._before[-1] + counts.cumsum(axis=0)])
        before: Ids = self._before[block]
        return before

    def _slots_until(self, blocks: Ids) -> Ids:
        """For each block and folder, the number of the block's samples from this folder and all folders before it,
        [blocks, F].

        Each folder has a part of the interval from 0 to 1. The length of this part is the folder's share. Slot i of a
        block belongs to the folder whose part contains (i + offset) / N.
        """
        offsets = (blocks * _GOLDEN_RATIO) % 1.0
        slots: Ids = np.ceil(self._ends * BLOCK_SAMPLES - offsets[:, None]).clip(0, BLOCK_SAMPLES).astype(np.int64)
        slots[:, -1] = BLOCK_SAMPLES
        return slots


@final
class MixedValidationSampler(ValidationSamples):
    """Samples from the validation shards of several token folders, one folder after the other, at equal distances in
    each folder.

    Each folder's number of samples is proportional to its weight, so that the mean loss of the samples is the loss on
    the mixture. Without a limit, the total is the largest number for which every folder has enough samples. Every
    folder gives at least one sample.
    """

    def __init__(self, samplers: Sequence[ValidationSampler], weights: Sequence[float]) -> None:
        self.sequence_length = samplers[0].sequence_length
        self._samplers, self._shares = tuple(samplers), shares_of(weights)

    def count(self, limit: int) -> int:
        """Return the number of samples that a validation pass reads: about `limit` samples, but at least one from each
        folder.
        """
        return sum(self._counts(limit))

    def sample_at(self, position: int, limit: int) -> tuple[Ids, Ids]:
        """Return the tokens and targets, each [S], of the sample at `position`, counted over all folders."""
        counts = self._counts(limit)
        ends = list(accumulate(counts))
        number = bisect_right(ends, position)
        return self._samplers[number].sample_at(position - (ends[number - 1] if number else 0), counts[number])

    def check_unchanged(self) -> None:
        """Raise `DataError` if a file has been written to or truncated since it was opened."""
        for sampler in self._samplers:
            sampler.check_unchanged()

    def num_bytes(self, tokenizer: Tokenizer, *, limit: int = 0) -> int:
        """Return the number of bytes of the text of all targets; see `ValidationSamples.num_bytes`."""
        counts = zip(self._samplers, self._counts(limit), strict=True)
        return sum(sampler.num_bytes(tokenizer, limit=count) for sampler, count in counts)

    def _counts(self, limit: int) -> list[int]:
        """Number of samples of each folder, [F]."""
        pairs = list(zip(self._samplers, self._shares, strict=True))
        most = min(sampler.num_samples / share for sampler, share in pairs)
        total = min(limit, most) if limit else most
        return [min(max(round(total * share), 1), sampler.num_samples) for sampler, share in pairs]


def _require_same_tokenizer(first: TokenFolder, other: TokenFolder) -> None:
    """Raise `DataError` unless two folders have the same tokenizer."""
    is_same = first.manifest.tokenizer_sha256 == other.manifest.tokenizer_sha256
    if first.end_of_text == other.end_of_text and (is_same or first.tokenizer().has_ids_of(other.tokenizer())):
        return
    raise DataError(
        f"The folders of `data.mixture` must have the same tokenizer, but the tokenizers of `{other.path}` and "
        f"`{first.path}` differ. Prepare the tokens of `{other.path}` again with "
        f"data.tokenizer={first.path / TOKENIZER_NAME}."
    )


@contextmanager
def named_folder(folder: TokenFolder) -> Iterator[None]:
    """Add the path of the folder to the message of a `DataError` that is raised inside the context."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{error} The token folder is `{folder.path}`.") from None
