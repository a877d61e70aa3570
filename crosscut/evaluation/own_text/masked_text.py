"""Task `masked_text`: the loss of masked tokens in a user's own text.

A document is divided into windows that share no tokens. A window consists of `[CLS]`, tokens of the document and
`[SEP]`. In each window, words are masked as in training with the paper's settings: `FRACTION` of the words, in runs of
up to `MOST_WORDS` words (`data.masked.masking`). The masks depend only on the seed and the number of the window, so
they are the same on every layout, and for all models with the same tokenizer and window.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from crosscut.config import DataError
from crosscut.config.data import DataConfig
from crosscut.data import Tokenizer
from crosscut.data.masked.draws import key_of, random_bits
from crosscut.data.masked.masking import Masking
from crosscut.data.masked.vocabulary import vocabulary_of
from crosscut.evaluation.own_text.text import OwnDocuments
from crosscut.evaluation.scoring import Ids, MaskedTexts, WindowScores
from crosscut.evaluation.task import Figures, Setting, exponential
from crosscut.evaluation.windows import Window

FRACTION, MOST_WORDS = DataConfig.mask_fraction, DataConfig.mask_words
"""Fraction of masked words, and maximum number of consecutive words that are masked together."""

_KEY = 12
"""Number of the stream of random numbers for this task's masks. Training and validation use other streams of the same
seed (`data.masked.samples`).
"""


class MaskedText:
    """Task that measures the loss of masked tokens in documents (see `OwnText` for the documents).

    `window` is the number of tokens in a window, including `[CLS]` and `[SEP]`. Raises `DataError` for files that
    cannot be read, for texts without words, and for a tokenizer without the special tokens of masked language
    modelling.
    """

    name = "masked_text"

    def __init__(self, patterns: Sequence[str], tokenizer: Tokenizer, *, window: int, seed: int, text_key: str) -> None:
        self.texts = MaskedTexts([], [])
        self._documents = documents = OwnDocuments(patterns, text_key)
        vocabulary = vocabulary_of(tokenizer)
        self._special = vocabulary.special
        self._masking = Masking(vocabulary, fraction=FRACTION, max_words=MOST_WORDS)
        self._key, self._num_rows = key_of(seed, _KEY), 0
        for _, ids in documents.encoded(tokenizer):
            windows, num_masked = self._masked(np.array(ids, dtype=np.int64), window)
            documents.add(windows, tokens=len(ids), masked_tokens=num_masked)
        self.windows, self.data = documents.windows, documents.data
        if not self.windows:
            raise DataError("`evaluation.text` must hold words to mask, but holds none. Add text.")
        settings = {"window": window, "mask_fraction": FRACTION, "mask_words": MOST_WORDS, "seed": seed}
        self.protocol: dict[str, Setting] = {**settings}

    def _masked(self, ids: Ids, window: int) -> tuple[list[Window], int]:
        """Mask the tokens of the next document. Returns its windows and the number of its masked tokens."""
        special, inner = self._special, window - 2
        parts = [ids[start : start + inner] for start in range(0, len(ids), inner)]
        rows = np.full((len(parts), window), special.padding, dtype=np.int64)
        rows[:, 0] = special.begin
        for row, part in zip(rows, parts, strict=True):
            row[1 : 1 + len(part)] = part
            row[1 + len(part)] = special.separator
        numbers = np.arange(len(parts)) + self._num_rows
        self._num_rows += len(parts)
        read, targets = self._masking(rows, random_bits(self._key, numbers, self._masking.num_draws(window)))
        counts, windows = (targets >= 0).sum(1), []
        for part, count, row, wanted in zip(parts, counts.tolist(), read, targets, strict=True):
            if count:
                length = len(part) + 2
                # The model reads all tokens, while a window of next tokens ends with a token that is only a target.
                windows.append(Window(len(self.texts.read), 0, length + 1, length + 1 - count))
                self.texts.read.append(row[:length])
                self.texts.targets.append(wanted[:length])
        return windows, int(counts.sum())

    def figures(self, scores: WindowScores) -> Figures:
        """Return the figures of all documents together, and of each document."""
        return self._documents.figures(scores, _figures)


def _figures(loss: float, num_hits: int, sizes: Counter[str]) -> dict[str, float]:
    """Return the figures of texts. They have no masked tokens if they have only special tokens."""
    num_masked = max(sizes["masked_tokens"], 1)
    return {"loss": loss / num_masked, "perplexity": exponential(loss / num_masked), "accuracy": num_hits / num_masked}
