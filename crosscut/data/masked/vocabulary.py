"""Facts that masking needs about the tokens of a tokenizer.

Legend: V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crosscut.data.tokenization.special_tokens import SpecialTokens
from crosscut.data.tokenization.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Facts that masking needs about every token."""

    special: SpecialTokens
    """Ids of the special tokens."""

    begins_word: Flags
    """Whether a token begins a word, [V]. Other tokens continue the word before them."""

    replacements: Ids
    """Ids that may replace a masked token: all tokens except special tokens, [replacements]."""

    def is_text(self, tokens: Ids) -> Flags:
        """Whether each token comes from the text, which means that it is not in `special`."""
        is_text = np.ones(len(self.begins_word), dtype=np.bool_)
        is_text[list(self.special)] = False
        return is_text[tokens]


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Collect the facts that masking needs about the tokens of a tokenizer. Raises `DataError` if the tokenizer lacks a
    special token.
    """
    tokens = tokenizer.token_bytes
    ordinary = np.setdiff1d(tokens.ids, tokens.special, assume_unique=True)
    return Vocabulary(tokenizer.special_tokens(), word_starts(tokenizer), ordinary)


def word_starts(tokenizer: Tokenizer) -> Flags:
    """Whether each token begins a word, [V]. True for ids without a token."""
    starts = np.ones(tokenizer.vocab_size, dtype=np.bool_)
    ids = tokenizer.token_bytes.ids
    starts[ids] = [tokenizer.token_bytes.begins_word(token) for token in ids.tolist()]
    return starts
