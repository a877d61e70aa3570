"""Masking of whole words: the choice of the words that a model predicts, and their replacement.

A masked n-gram is a run of n consecutive words, with n from 1 to `max_words` and a probability proportional to 1 / n
(the sampling of SpanBERT's and Megatron-LM's n-gram masking). An n-gram has E[n] words on average, and a sample of W
words has fraction x W / E[n] n-grams. On average, `fraction` of the words is therefore masked. The number of n-grams is
rounded up or down at random, so that its mean is exact, except that every sample has at least one n-gram. All
arrangements of the n-grams among the other words are equally likely.

Each token of a masked word is replaced by `[MASK]` with probability 0.8 and by a random token with probability 0.1, and
is otherwise unchanged (BERT, section 3.1). The model predicts the token in all three cases.

Legend: R rows, S tokens of a row, V vocabulary, N n-grams of a row, W words of a row.
"""

from typing import NamedTuple

import numpy as np

from crosscut.config import IGNORED
from crosscut.data.masked.draws import Bits, to_uniform
from crosscut.data.masked.vocabulary import Flags, Ids, Vocabulary

REPLACED, RANDOM = 0.8, 0.1
"""Probabilities that a token of a masked word is replaced by `[MASK]` and by a random token."""


class Masked(NamedTuple):
    """Result of masking. Both arrays are [R, S]."""

    tokens: Ids
    """Tokens that the model reads."""

    targets: Ids
    """The original token where a word is masked, and `IGNORED` elsewhere."""


class Masking:
    """Masking of a fraction of the words, in n-grams of at most `max_words` words."""

    def __init__(self, vocabulary: Vocabulary, *, fraction: float, max_words: int) -> None:
        self._vocabulary, self._fraction = vocabulary, fraction
        weights = 1 / np.arange(1, max_words + 1)
        self.probabilities = weights / weights.sum()
        """Probability of an n-gram of 1, 2, ... words, [`max_words`]."""
        self.mean_words = float(max_words / weights.sum())
        """Mean number of words of an n-gram."""

    @staticmethod
    def num_draws(length: int) -> int:
        """Number of random numbers that are needed to mask a row of `length` tokens."""
        return 1 + 3 * length

    def __call__(self, tokens: Ids, bits: Bits) -> Masked:
        """Mask rows of tokens, [R, S]. `bits` are random numbers of 64 bits, [R, `num_draws(S)`]."""
        length = tokens.shape[1]
        words, num_words = self._number_words(tokens)
        starts, lengths = self._spans(num_words, bits[:, : 1 + 2 * length])
        changes = np.zeros((len(tokens), length + 2), dtype=np.int64)  # +1 where an n-gram begins, -1 after its end
        rows = np.broadcast_to(np.arange(len(tokens))[:, None], starts.shape)
        np.add.at(changes, (rows, starts), lengths > 0)
        np.add.at(changes, (rows, starts + lengths), -(lengths > 0).astype(np.int64))
        is_masked = np.take_along_axis(changes.cumsum(axis=1), words, axis=1) > 0
        is_masked &= self._vocabulary.is_text(tokens)
        targets = np.where(is_masked, tokens, IGNORED)
        return Masked(self._replaced(tokens, is_masked, bits[:, 1 + 2 * length :]), targets)

    def _number_words(self, tokens: Ids) -> tuple[Ids, Ids]:
        """Return the index of the word to which each token belongs, [R, S], and the number of words in each row, [R].
        The index of a special token has no meaning.
        """
        is_text = self._vocabulary.is_text(tokens)
        begins = self._vocabulary.begins_word[tokens]
        begins[:, 0] = True
        begins[:, 1:] |= ~is_text[:, :-1]
        begins &= is_text
        numbers: Ids = begins.cumsum(axis=1)
        return np.maximum(numbers - 1, 0), numbers[:, -1]

    def _spans(self, num_words: Ids, bits: Bits) -> tuple[Ids, Ids]:
        """Return the index of each n-gram's first word, and each n-gram's number of words. Both arrays are [R, N]. A
        row with fewer than N n-grams is padded with n-grams of 0 words.

        An arrangement of the n-grams among the other words is a choice of slots: each slot holds an n-gram or one word
        that is not masked.
        """
        length = (bits.shape[1] - 1) // 2
        expected = self._fraction * num_words / self.mean_words
        counts = np.floor(expected + to_uniform(bits[:, 0])).astype(np.int64)
        counts = np.minimum(np.maximum(counts, 1), num_words)
        most = int(counts.max(initial=0))
        is_there = np.arange(most) < counts[:, None]
        bounds = self.probabilities.cumsum()[:-1]
        lengths = (np.searchsorted(bounds, to_uniform(bits[:, 1 : 1 + most]), side="right") + 1) * is_there
        before = lengths.cumsum(axis=1) - lengths
        lengths = np.clip(lengths, 0, np.maximum(num_words[:, None] - before, 0))
        num_spans = (lengths > 0).sum(axis=1)
        slots = _choose(bits[:, 1 + length :], num_words - lengths.sum(axis=1) + num_spans, num_spans, most)
        return slots + (lengths - (lengths > 0)).cumsum(axis=1) - (lengths - (lengths > 0)), lengths

    def _replaced(self, tokens: Ids, is_masked: Flags, bits: Bits) -> Ids:
        draws = to_uniform(bits)
        mask = self._vocabulary.special.mask
        replacements = self._vocabulary.replacements
        number = ((draws - REPLACED) * (len(replacements) / RANDOM)).astype(np.int64)
        random = replacements[np.clip(number, 0, len(replacements) - 1)]
        read = np.where(draws < REPLACED, mask, np.where(draws < REPLACED + RANDOM, random, tokens))
        result: Ids = np.where(is_masked, read, tokens)
        return result


def _choose(bits: Bits, num_slots: Ids, counts: Ids, most: int) -> Ids:
    """Choose `counts` of `num_slots` slots in each row, all choices equally likely. Returns the slots in ascending
    order, [R, `most`]; a row with fewer than `most` chosen slots ends with zeros.
    """
    length = bits.shape[1]
    low = np.uint64((1 << max(length - 1, 1).bit_length()) - 1)
    keys = (bits & ~low) | np.arange(length, dtype=np.uint64)  # keys differ, so every sort gives the same order
    keys[np.arange(length) >= num_slots[:, None]] = np.iinfo(np.uint64).max
    chosen = (np.sort(keys, axis=1)[:, :most] & low).astype(np.int64)
    is_there = np.arange(most) < counts[:, None]
    chosen = np.sort(np.where(is_there, chosen, length), axis=1)
    return np.where(is_there, chosen, 0)
