"""Conversion of text to token ids and back, with any `tokenizer.json` or with a tokenizer trained on the corpus.

The `tokenizers` library does the work. This module adds three guarantees.
Every tokenizer has a token that ends a document. A document cannot inject this token by containing the token's name,
while a prompt can. Truncation and padding settings in the tokenizer's file have no effect, because such settings would
shorten or lengthen documents.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from crosscut.config.data import Objective
from crosscut.config.errors import DataError
from crosscut.data.tokenization.bpe import train_bpe
from crosscut.data.tokenization.document_encoder import DocumentEncoder
from crosscut.data.tokenization.end_of_text import end_named_beside, end_named_in
from crosscut.data.tokenization.inner import SPLIT_SPECIAL_TOKENS, read_inner, splits_special_tokens
from crosscut.data.tokenization.long_texts import encode_one, pieces_for_training
from crosscut.data.tokenization.special_tokens import SpecialTokens, names_of_special_tokens, special_tokens
from crosscut.data.tokenization.token_bytes import TokenBytes
from crosscut.data.tokenization.wordpiece import VOCABULARY_SUFFIX, train_wordpiece

if TYPE_CHECKING:
    import tokenizers

MAX_TRAINING_CHARACTERS = 100_000_000
"""Maximum number of characters, from the start of the corpus, on which a tokenizer is trained. The limit bounds memory
and time."""

MOST_IDS = 1 << 24
"""Maximum vocabulary size. The largest published vocabularies have about a million entries. The tokenizers library
visits every id up to the highest one when it writes a tokenizer, so a single huge id would cost minutes."""


class Tokenizer:
    """A tokenizer of the `tokenizers` library with its end-of-text token.

    Names of special tokens in a document are encoded as plain text: a document that contains the characters
    `<|endoftext|>` is encoded as these characters, so the end-of-text id occurs only at the ends of documents. Names of
    special tokens in a prompt are encoded as these tokens, unless `splits_special` is set.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        name: str = "The tokenizer",
        end_of_text: int | None = None,
        splits_special: bool = False,
    ) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        self._inner, self._name, self._splits_special = inner, name, splits_special
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        """Highest id + 1. Some lower ids may be unused."""
        if self.vocab_size > MOST_IDS:
            token, highest = max(vocabulary.items(), key=itemgetter(1))
            raise DataError(
                f"{name} must have ids below {MOST_IDS:,}, but the id of {token!r} is {highest:,}. Correct the file, "
                "or download it again."
            )
        self.end_of_text = end_named_in(vocabulary, name) if end_of_text is None else end_of_text
        """Id that follows each document."""

    @classmethod
    def load(
        cls, path: Path, *, setting: str = "", end_of_text: int | None = None, objective: Objective = Objective.CAUSAL
    ) -> Tokenizer:
        """Load a `tokenizer.json`, or BERT's `vocab.txt`. `setting` is the name of the option that holds its path, for
        messages. It is empty if the path follows from the folder of a model or of tokens.

        The end-of-text id is the first of these that exists: `end_of_text`, the id that a file beside the tokenizer
        names (see the module `end_of_text`), and the id of the first known name in the vocabulary
        (`END_OF_TEXT_NAMES`). Raises `DataError` if the file cannot be read, if there is no end-of-text id, if the
        named token is not in the vocabulary, or if a special token that `objective` needs is missing. Raises
        `ConfigError` if a file beside the tokenizer cannot be read.
        """
        inner = read_inner(path, setting=setting)
        if end_of_text is None:
            end_of_text = end_named_beside(path, inner)
        splits_special = splits_special_tokens(path)
        loaded = cls(inner, name=f"`{path}`", end_of_text=end_of_text, splits_special=splits_special)
        if objective is Objective.MASKED:
            loaded.special_tokens()
        return loaded

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int, objective: Objective = Objective.CAUSAL) -> Tokenizer:
        """Train a tokenizer on the first 100 million characters of `texts`: an uncased WordPiece for masked language
        modelling (`train_wordpiece`), and otherwise a byte-level BPE (`train_bpe`).

        Raises `DataError` for a `vocab_size` below 257.
        """
        is_masked = objective is Objective.MASKED
        if vocab_size < 257:
            reason = "" if is_masked else " (256 bytes and the end-of-text token)"
            raise DataError(
                f"`data.vocab_size` must be at least 257{reason}, but is {vocab_size}. Set a larger `data.vocab_size`."
            )
        train = train_wordpiece if is_masked else train_bpe
        return cls(train(_first_characters(texts, MAX_TRAINING_CHARACTERS), vocab_size=vocab_size))

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without an end-of-text id. Names of special tokens in the text are encoded as
        plain text.
        """
        return encode_one(self._inner, text)

    def encode_prompt(self, text: str, *, begin: int | None = None) -> list[int]:
        """Return the ids of a prompt. Names of special tokens in the prompt are encoded as these tokens, unless
        `split_special_tokens` in a `tokenizer_config.json` beside the tokenizer forbids it.

        `begin` is the id that the model expects at the start of every text, or None. If the ids do not already start
        with `begin`, it is put in front of them. No other id is added. Several threads may call this method at the same
        time.
        """
        ids = encode_one(self._reading_special, text)
        return ids if begin is None or ids[:1] == [begin] else [begin, *ids]

    @cached_property
    def _reading_special(self) -> tokenizers.Tokenizer:
        """Copy of the tokenizer that encodes the names of special tokens as these tokens. The setting is not changed in
        the tokenizer itself, because other threads may use the tokenizer at the same time.

        Raises `DataError` if two tokens of the vocabulary have the same id. This fault is detected only when the copy
        is made.
        """
        if self._splits_special:
            return self._inner
        try:
            return type(self._inner).from_str(self._inner.to_str())
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"{self._name} must be a consistent tokenizer, but is not: {error}. Download it again, or choose "
                "another one."
            ) from None

    @cached_property
    def documents(self) -> DocumentEncoder:
        """Encoder of documents, each with its end of text."""
        return DocumentEncoder(self._inner, vocab_size=self.vocab_size, end_of_text=self.end_of_text)

    def decode(self, ids: Sequence[int], *, with_special: bool = False) -> str:
        """Decode ids to text. Special tokens are omitted unless `with_special` is set."""
        return self._inner.decode(list(ids), skip_special_tokens=not with_special)

    def normalized(self, text: str) -> str:
        """Return a text as the tokenizer's normalizer changes it, for example in Unicode's form NFC."""
        normalizer = self._inner.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def num_bytes(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> int:
        """Return the number of UTF-8 bytes of the text that `ids` decode to. `ids` must be the first tokens of a
        document, or all of its tokens.

        Special tokens and the end of text have no bytes. If `ids` end inside a character, only the bytes that `ids`
        hold are counted.
        """
        tokens = np.asarray(ids, dtype=np.int64)
        return self.token_bytes.count(tokens[tokens != self.end_of_text])

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Bytes of each token, and what else is known of single tokens."""
        return TokenBytes(self._inner)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token. None if the vocabulary lacks it."""
        found: int | None = self._inner.token_to_id(token)
        return found

    def special_tokens(self) -> SpecialTokens:
        """Return the special tokens of masked language modelling. Raises `DataError` if the tokenizer lacks one of
        them.
        """
        return special_tokens(self._inner, name=self._name)

    def has_ids_of(self, other: Tokenizer) -> bool:
        """Whether this tokenizer and the tokenizer `other` have the same tokens with the same ids."""
        ours, theirs = (one._inner.get_vocab(with_added_tokens=True) for one in (self, other))
        return ours == theirs

    def save(self, path: Path) -> None:
        """Write a `tokenizer.json`. Raises `OSError` if the file cannot be written."""
        path.write_bytes(self._inner.to_str(pretty=True).encode("utf-8"))

    def copy_given(self, given: Path, path: Path) -> None:
        """Write the tokenizer as a `tokenizer.json` to `path`. `given` is the file from which the tokenizer was loaded.
        If `given` is itself a `tokenizer.json`, it is copied unchanged. Raises `OSError` if the file cannot be written.
        """
        if given.suffix == VOCABULARY_SUFFIX:
            self.save(path)
        else:
            shutil.copyfile(given, path)

    def settings(self) -> dict[str, object]:
        """Return a minimal `tokenizer_config.json`, from which `load` and `transformers` can read the end-of-text
        token. If the tokenizer has all special tokens of masked language modelling, the settings name these tokens,
        too.
        """
        end = self._inner.id_to_token(self.end_of_text)
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            **names_of_special_tokens(self._inner),
            **({SPLIT_SPECIAL_TOKENS: True} if self._splits_special else {}),
            "clean_up_tokenization_spaces": False,
        }


def _first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield from pieces_for_training(text[:limit])
        limit -= len(text)
        if limit <= 0:
            return
