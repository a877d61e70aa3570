"""Masked words: their statistics on real text are within three sigma of the distribution that the module states."""

import numpy as np
import pytest

from crosscut.config import IGNORED, DataConfig
from crosscut.data import TokenFolder, Tokenizer, masked_samples
from crosscut.data.masked.draws import key_of, random_bits
from crosscut.data.masked.masking import Masking
from crosscut.data.masked.vocabulary import Vocabulary, vocabulary_of, word_starts
from crosscut.data.tokenization.special_tokens import SpecialTokens

S = 128
COUNT = 4000
SPECIAL = SpecialTokens(begin=1, separator=2, mask=3, padding=0)


@pytest.fixture(scope="module")
def vocabulary(speeches: TokenFolder) -> Vocabulary:
    return vocabulary_of(speeches.tokenizer())


@pytest.fixture(scope="module")
def rows(speeches: TokenFolder, config: DataConfig) -> np.ndarray:
    """Rows of real text before masking, [`COUNT`, S]."""
    batch = masked_samples(speeches, config, sequence_length=S, seed=1).batch_at(0, COUNT)
    return np.where(batch.targets == IGNORED, batch.tokens, batch.targets)


@pytest.fixture(scope="module")
def words(rows: np.ndarray, vocabulary: Vocabulary) -> list[list[slice]]:
    """The words of `rows`, found once for all tests."""
    return words_of(rows, vocabulary)


def words_of(rows: np.ndarray, vocabulary: Vocabulary) -> list[list[slice]]:
    """The words of each row as ranges of places, found token by token."""
    found = []
    for row in rows.tolist():
        words: list[list[int]] = []
        for place, token in enumerate(row):
            if token in vocabulary.special:
                continue
            if vocabulary.begins_word[token] or row[place - 1] in vocabulary.special:
                words.append([place, place])
            words[-1][1] = place + 1
        found.append([slice(*word) for word in words])
    return found


def within_three_sigma(values: np.ndarray, expected: np.ndarray | float) -> bool:
    """Whether the mean of independent values is within three standard errors of its expectation."""
    differences = values - expected
    return bool(abs(differences.mean()) < 3 * differences.std() / np.sqrt(len(differences)))


def is_share(count: int, total: int, probability: float) -> bool:
    """Whether a count of independent events is within three sigma of its expectation."""
    return abs(count - total * probability) < 3 * np.sqrt(total * probability * (1 - probability))


def masked(rows: np.ndarray, vocabulary: Vocabulary, *, fraction: float = 0.15, max_words: int = 3, seed: int = 5):
    masking = Masking(vocabulary, fraction=fraction, max_words=max_words)
    return masking(rows, random_bits(key_of(seed), range(len(rows)), masking.num_draws(rows.shape[1])))


@pytest.mark.parametrize(("fraction", "max_words"), [(0.15, 3), (0.15, 1), (0.3, 3)])
def test_fraction_of_masked_words_and_tokens(
    rows: np.ndarray, words: list[list[slice]], vocabulary: Vocabulary, fraction: float, max_words: int
) -> None:
    targets = masked(rows, vocabulary, fraction=fraction, max_words=max_words).targets
    mean_words = max_words / sum(1 / n for n in range(1, max_words + 1))
    counts = np.array([sum(targets[number, word.start] != IGNORED for word in row) for number, row in enumerate(words)])
    num_words = np.array([len(row) for row in words])
    enough = num_words >= 10  # in a shorter row, n-grams may not fit
    assert enough.mean() > 0.99
    expected = np.maximum(fraction * num_words, mean_words)  # at least one n-gram
    assert within_three_sigma(counts[enough], expected[enough])
    num_tokens = vocabulary.is_text(rows).sum(axis=1)
    share = expected / np.maximum(num_words, 1)
    assert within_three_sigma((targets != IGNORED).sum(axis=1)[enough], (share * num_tokens)[enough])


def test_words_are_masked_as_wholes_and_special_tokens_never(
    rows: np.ndarray, words: list[list[slice]], vocabulary: Vocabulary
) -> None:
    read, targets = masked(rows, vocabulary)
    for number, row in enumerate(words):
        for word in row:
            assert len(set((targets[number, word] != IGNORED).tolist())) == 1
    is_text = vocabulary.is_text(rows)
    assert (targets[~is_text] == IGNORED).all()
    assert np.array_equal(targets[targets != IGNORED], rows[targets != IGNORED])
    assert np.array_equal(read[targets == IGNORED], rows[targets == IGNORED])
    assert (targets != IGNORED).any(axis=1).all(), "every row has something to predict"


def test_lengths_of_ngrams_are_proportional_to_one_over_n(words: list[list[slice]], vocabulary: Vocabulary) -> None:
    num_words = np.array([len(row) for row in words])
    num_words = num_words[num_words >= 20]
    masking = Masking(vocabulary, fraction=0.15, max_words=3)
    starts, lengths = masking._spans(num_words, random_bits(key_of(5), range(len(num_words)), 1 + 2 * S))
    total = int((lengths > 0).sum())
    for n, probability in enumerate((6 / 11, 3 / 11, 2 / 11), start=1):
        assert is_share(int((lengths == n).sum()), total, probability)
    ends = starts + lengths
    later = lengths[:, 1:] > 0
    assert (ends[:, :-1] <= starts[:, 1:])[later].all(), "n-grams do not overlap"
    assert (ends <= num_words[:, None])[lengths > 0].all()


def test_all_places_of_ngrams_are_equally_likely() -> None:
    """Two n-grams among 20 words of one token: the arrangements of any two lengths."""
    vocabulary = Vocabulary(SPECIAL, np.ones(30, dtype=np.bool_), np.arange(4, 30))
    num_words = np.full(60_000, 20)
    masking = Masking(vocabulary, fraction=0.15, max_words=2)  # 2.25 n-grams
    starts, lengths = masking._spans(num_words, random_bits(key_of(8), range(len(num_words)), 1 + 2 * 24))
    for first, second in ((1, 1), (1, 2), (2, 1), (2, 2)):
        chosen = (lengths[:, :2] == (first, second)).all(axis=1) & ((lengths > 0).sum(axis=1) == 2)
        slots = 20 - first - second + 2
        arrangements = slots * (slots - 1) // 2
        places, counts = np.unique(starts[chosen][:, :2], axis=0, return_counts=True)
        assert len(places) == arrangements
        squares = ((counts - chosen.sum() / arrangements) ** 2).sum() / (chosen.sum() / arrangements)
        assert abs(squares - (arrangements - 1)) < 3 * np.sqrt(2 * (arrangements - 1)), "chi-square"


def test_masked_tokens_become_mask_random_or_stay(rows: np.ndarray, vocabulary: Vocabulary) -> None:
    read, targets = masked(rows, vocabulary)
    read, targets = read[targets != IGNORED], targets[targets != IGNORED]
    total, size = len(targets), len(vocabulary.replacements)
    is_mask, stays = read == vocabulary.special.mask, read == targets
    assert total > 40_000
    assert is_share(int(is_mask.sum()), total, 0.8)
    assert is_share(int(stays.sum()), total, 0.1 + 0.1 / size)
    random = read[~is_mask & ~stays]
    assert np.isin(random, vocabulary.replacements).all()
    assert {*vocabulary.special}.isdisjoint(vocabulary.replacements.tolist())
    places = np.searchsorted(vocabulary.replacements, random)
    assert within_three_sigma(places, (size - 1) / 2)
    assert places.min() < size * 0.01
    assert places.max() > size * 0.99


def test_half_of_the_pairs_is_swapped(speeches: TokenFolder, config: DataConfig) -> None:
    order = masked_samples(speeches, config, sequence_length=S, seed=1).batch_at(0, COUNT).order
    assert order is not None
    assert set(order.tolist()) == {0, 1}
    assert is_share(int(order.sum()), COUNT, 0.5)


def test_rows_without_words_have_no_targets() -> None:
    vocabulary = Vocabulary(SPECIAL, np.ones(30, dtype=np.bool_), np.arange(4, 30))
    rows = np.array([[1, 2, 2, 0, 0, 0], [1, 7, 2, 2, 0, 0], [1, 7, 2, 8, 2, 0]])
    targets = masked(rows, vocabulary, fraction=0.5, max_words=10).targets
    assert (targets[0] == IGNORED).all()
    assert targets[1, 1] == 7
    assert (targets[2] != IGNORED).sum() >= 1


def test_word_starts_are_those_of_the_kind_of_tokenizer(speeches: TokenFolder) -> None:
    wordpiece = speeches.tokenizer()
    starts = word_starts(wordpiece)
    for token in range(wordpiece.vocab_size):
        assert starts[token] == (not str(wordpiece._inner.id_to_token(token)).startswith("##"))
    bpe = Tokenizer.train(["the cut model is the uncut one"] * 50, vocab_size=290)
    ids = bpe.encode("the uncut model")
    assert word_starts(bpe)[ids].sum() == 2, "the first word has no blank before it"


def test_masks_are_the_same_in_every_version() -> None:
    # A run that is resumed with another version must see the samples it would have seen, so these may never change.
    vocabulary = Vocabulary(SPECIAL, np.arange(40) % 3 > 0, np.arange(4, 40))
    rows = np.array([[1, *range(10, 30), 2], [1, *range(20, 40), 2]])
    read, targets = masked(rows, vocabulary, fraction=0.3)
    assert read.tolist() == [
        [1, 10, 3, 3, *range(13, 20), 3, 21, 22, 23, 24, 25, 3, 3, 24, 29, 2],
        [1, *range(20, 29), 3, 3, 3, 3, 3, 34, 35, 36, 3, 3, 3, 2],
    ]
    assert [np.flatnonzero(row != IGNORED).tolist() for row in targets] == [
        [2, 3, 11, 12, 16, 17, 18, 19],
        [10, 11, 12, 13, 14, 18, 19, 20],
    ]
