"""Task `masked_text`: the loss of masked tokens in a user's own text.

A document is divided into windows that share no tokens. A window consists of `[CLS]`, tokens of the document and
`[SEP]`. In each window, words are masked as in training with the paper's settings: `FRACTION` of the words, in runs of
up to `MOST_WORDS` words (`data.masked.masking`). The masks depend only on the seed and the number of the window, so
they are the same on every layout, and for all models with the same tokenizer and window.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from crosscut.config import DataError
from crosscut.config.data import DataConfig
from crosscut.data import Tokenizer
from crosscut.data.masked.draws import key_of, random_bits
from crosscut.data.masked.masking import Masking
from crosscut.data.masked.vocabulary import vocabulary_of
from crosscut.data.text.sources import find_sources
from crosscut.evaluation.own_text.text import whole_documents
from crosscut.evaluation.scoring import Ids, MaskedTexts, WindowScores
from crosscut.evaluation.task import Figures, exponential, hashed
from crosscut.evaluation.windows import Window

FRACTION, MOST_WORDS = DataConfig.mask_fraction, DataConfig.mask_words
"""Fraction of masked words, and maximum number of consecutive words that are masked together."""

_KEY = 12
"""Number of the stream of random numbers for this task's masks. Training and validation use other streams of the same
seed (`data.masked.samples`).
"""


class MaskedText:
    """Task that measures the loss of masked tokens in documents (see `Text` for the documents).

    `window` is the number of tokens in a window, including `[CLS]` and `[SEP]`. Raises `DataError` for files that
    cannot be read, for texts without words, and for a tokenizer without the special tokens of masked language
    modelling.
    """

    name = "masked_text"

    def __init__(self, patterns: Sequence[str], tokenizer: Tokenizer, *, window: int, seed: int, text_key: str) -> None:
        self.texts = MaskedTexts([], [])
        self.windows: list[Window] = []
        self._documents: list[dict[str, Any]] = []
        self._document_of: list[int] = []
        """Index of each window's document."""
        self._num_blank = 0
        vocabulary = vocabulary_of(tokenizer)
        self._special = vocabulary.special
        self._masking = Masking(vocabulary, fraction=FRACTION, max_words=MOST_WORDS)
        self._key, self._num_rows = key_of(seed, _KEY), 0
        for source, record, text in whole_documents(patterns, text_key):
            ids = [] if not text or text.isspace() else tokenizer.encode(text)
            if not ids:
                self._num_blank += 1
                continue
            num_masked = self._add(np.array(ids, dtype=np.int64), window)
            size = {"tokens": len(ids), "masked_tokens": num_masked}
            self._documents.append({"source": source, "record": record, **size})
        if not self.windows:
            raise DataError("`evaluation.text` must hold words to mask, but holds none. Add text.")
        protocol = {"window": window, "mask_fraction": FRACTION, "mask_words": MOST_WORDS, "seed": seed}
        self.protocol: dict[str, Any] = protocol
        self.data = [hashed(source.name, source.path) for source in find_sources(patterns, setting="evaluation.text")]

    def _add(self, ids: Ids, window: int) -> int:
        """Add the windows of the next document, and return the number of its masked tokens."""
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
        counts = (targets >= 0).sum(1)
        for part, count, row, wanted in zip(parts, counts.tolist(), read, targets, strict=True):
            if count:
                length = len(part) + 2
                # The model reads all tokens, while a window of next tokens ends with a token that is only a target.
                self.windows.append(Window(len(self.texts.read), 0, length + 1, length + 1 - count))
                self._document_of.append(len(self._documents))
                self.texts.read.append(row[:length])
                self.texts.targets.append(wanted[:length])
        return int(counts.sum())

    def figures(self, scores: WindowScores) -> Figures:
        """Return the figures of all documents together, and of each document."""
        losses, hits = np.zeros(len(self._documents)), np.zeros(len(self._documents), dtype=np.int64)
        np.add.at(losses, self._document_of, scores.losses)
        np.add.at(hits, self._document_of, scores.hits)
        documents = [
            {**document, **_figures(float(loss), int(hit), document["masked_tokens"])}
            for document, loss, hit in zip(self._documents, losses, hits, strict=True)
        ]
        tokens, masked = (sum(document[name] for document in self._documents) for name in ("tokens", "masked_tokens"))
        return Figures(
            figures=_figures(float(losses.sum()), int(hits.sum()), masked),
            counts={
                "documents": len(documents),
                "tokens": tokens,
                "masked_tokens": masked,
                "windows": len(self.windows),
                "documents_blank": self._num_blank,
            },
            documents=documents,
        )


def _figures(loss: float, num_hits: int, num_masked: int) -> dict[str, float]:
    """Return the figures of texts with `num_masked` masked tokens. `num_masked` is 0 for a text that has only special
    tokens.
    """
    mean = loss / max(num_masked, 1)
    return {"loss": mean, "perplexity": exponential(mean), "accuracy": num_hits / max(num_masked, 1)}
