"""Drop documents that are too short. The length is the number of tokens of the corpus's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from crosscut.config.corpora import LengthConfig
from crosscut.corpus.documents import Document, Drop, Judgement
from crosscut.corpus.tokens.tokenizer import count_tokens, load_tokenizer


class LengthFilter:
    """Filter that drops documents with fewer than `min_tokens` tokens.

    Dropped documents get the rule `too short`. All documents get the measurement `tokens`, the number of tokens without
    the end-of-text token.
    """

    def __init__(self, config: LengthConfig, tokenizer: Path) -> None:
        self._min_tokens = config.min_tokens
        self._tokenizer = tokenizer

    def __call__(self, documents: Sequence[Document]) -> Judgement:
        """Drop the documents that are too short."""
        tokenizer = load_tokenizer(self._tokenizer)
        tokens = count_tokens(tokenizer, [document.text for document in documents])
        drops = [
            Drop(document.row, "too short", f"{length} tokens" if length != 1 else "1 token")
            for document, length in zip(documents, tokens, strict=True)
            if length < self._min_tokens
        ]
        return Judgement(drops, {"tokens": pa.array(tokens, pa.int64())})
