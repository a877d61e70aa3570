"""Conversion of text to token ids and back, with any `tokenizer.json` or with a tokenizer trained on the corpus.

The `tokenizers` library does the work, or gigatoken if gigatoken gives the same ids. This module adds three guarantees.
Every tokenizer has a token that ends a document. A document cannot inject this token by containing the token's name,
while a prompt can. Truncation and padding settings in the tokenizer's file have no effect, because such settings would
shorten or lengthen documents.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from crosscut.config.checks import listed
from crosscut.config.data import Objective
from crosscut.config.errors import DataError
from crosscut.data.text.sentences import sentence_starts
from crosscut.data.tokenization.end_of_text import end_said_beside
from crosscut.data.tokenization.fast_encoder import FastEncoder, fast_encoder
from crosscut.data.tokenization.inner import read_inner
from crosscut.data.tokenization.long_texts import WINDOW, encode_long, pieces_for_training
from crosscut.data.tokenization.special_tokens import SpecialTokens, names_of_special_tokens, special_tokens
from crosscut.data.tokenization.token_bytes import TokenBytes
from crosscut.data.tokenization.wordpiece import SEPARATOR, VOCABULARY_SUFFIX, train_wordpiece

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<end_of_text>", SEPARATOR)
"""Usual names of the end-of-text token, in order of preference. The names are tried if no file beside the tokenizer
names this token.
"""

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
    special tokens in a prompt are encoded as these tokens.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, *, name: str = "The tokenizer", end_of_text: int | None = None
    ) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        self._inner, self._name = inner, name
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        """Highest id + 1. Some lower ids may be unused."""
        if self.vocab_size > MOST_IDS:
            token, highest = max(vocabulary.items(), key=itemgetter(1))
            raise DataError(
                f"{name} must have ids below {MOST_IDS:,}, but the id of {token!r} is {highest:,}. Correct the file, "
                "or download it again."
            )
        self.end_of_text = _by_name(vocabulary, name) if end_of_text is None else end_of_text
        """Id that follows each document."""

    @classmethod
    def load(cls, path: Path, *, setting: str = "", end_of_text: int | None = None) -> Tokenizer:
        """Load a `tokenizer.json`, or BERT's `vocab.txt`. `setting` is the name of the option that holds its path, for
        messages. It is empty if the path follows from the folder of a model or of tokens.

        The end-of-text id is the first of these that exists: `end_of_text`, the id that a file beside the tokenizer
        names (see the module `end_of_text`), and the id of the first known name in the vocabulary
        (`END_OF_TEXT_NAMES`). Raises `DataError` if the file cannot be read, if there is no end-of-text id, or if the
        named token is not in the vocabulary. Raises `ConfigError` if a file beside the tokenizer cannot be read.
        """
        inner = read_inner(path, setting=setting)
        if end_of_text is None:
            end_of_text = end_said_beside(path, inner)
        return cls(inner, name=f"`{path}`", end_of_text=end_of_text)

    @classmethod
    def train_for(cls, objective: Objective, texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
        """Train a tokenizer for the objective: a WordPiece for masked language modelling, and otherwise a byte-level
        BPE.
        """
        train = cls.train_wordpiece if objective is Objective.MASKED else cls.train
        return train(texts, vocab_size=vocab_size)

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
        """Train a byte-level BPE with GPT-2's pre-tokenization on the first 100 million characters of `texts`.

        The vocabulary has `vocab_size` entries, with `<|endoftext|>` as entry 0. The vocabulary has fewer entries if
        the text has too few pairs of tokens that occur at least twice. Raises `DataError` for a `vocab_size` below 257
        (256 bytes and the end-of-text token).
        """
        from tokenizers import Tokenizer as Inner
        from tokenizers import decoders, models, pre_tokenizers, processors, trainers

        if vocab_size < 257:
            raise DataError(
                f"`data.vocab_size` must be at least 257 (256 bytes and the end-of-text token), but is {vocab_size}. "
                "Set a larger `data.vocab_size`."
            )
        inner = Inner(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        inner.post_processor = processors.ByteLevel(trim_offsets=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(_first_characters(texts, MAX_TRAINING_CHARACTERS), trainer)
        return cls(inner)

    @classmethod
    def train_wordpiece(cls, texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
        """Train an uncased WordPiece, the tokenizer of BERT, on the first 100 million characters of `texts`.

        The vocabulary has at most `vocab_size` entries and begins with `[PAD]`, `[UNK]`, `[CLS]`, `[SEP]` and `[MASK]`.
        `[SEP]` ends a document. Raises `DataError` for a `vocab_size` below 257.
        """
        if vocab_size < 257:
            raise DataError(
                f"`data.vocab_size` must be at least 257, but is {vocab_size}. Set a larger `data.vocab_size`."
            )
        return cls(train_wordpiece(_first_characters(texts, MAX_TRAINING_CHARACTERS), vocab_size=vocab_size))

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without an end-of-text id. Names of special tokens in the text are encoded as
        plain text.
        """
        if len(text) > WINDOW:
            long: list[int] = encode_long(self._inner, text).ids.tolist()
            return long
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str, *, begin: int | None = None) -> list[int]:
        """Return the ids of a prompt. Names of special tokens in the prompt are encoded as these tokens.

        `begin` is the id that the model expects at the start of every text, or None. If the ids do not already start
        with `begin`, it is put in front of them. No other id is added. Several threads may call this method at the same
        time.
        """
        ids: list[int]
        if len(text) > WINDOW:
            ids = encode_long(self._reading_special, text).ids.tolist()
        else:
            (encoded,) = self._reading_special.encode_batch_fast([text], add_special_tokens=False)  # without offsets
            ids = encoded.ids
        return ids if begin is None or ids[:1] == [begin] else [begin, *ids]

    @cached_property
    def _reading_special(self) -> tokenizers.Tokenizer:
        """Copy of the tokenizer that encodes the names of special tokens as these tokens. The setting is not changed in
        the tokenizer itself, because other threads may use the tokenizer at the same time.

        Raises `DataError` if two tokens of the vocabulary have the same id. This fault is detected only when the copy
        is made.
        """
        try:
            return type(self._inner).from_str(self._inner.to_str())
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"{self._name} must be a consistent tokenizer, but is not: {error}. Download it again, or choose "
                "another one."
            ) from None

    @property
    def engine(self) -> str:
        """Library that encodes documents: `gigatoken` or `tokenizers`."""
        return "gigatoken" if self._fast else "tokenizers"

    @cached_property
    def _fast(self) -> FastEncoder | None:
        return fast_encoder(self._inner)

    def encode_documents(
        self, texts: Sequence[str]
    ) -> tuple[npt.NDArray[np.uint16 | np.uint32], npt.NDArray[np.int64]]:
        """Encode documents, each with its end of text.

        Returns (ids of all documents, concatenated; length of each document including its end of text). The ids have
        the type that a token folder uses for this vocabulary (`token_dtype`). Every `engine` gives the same ids.
        gigatoken runs on the calling thread, and the tokenizers library on its own threads.
        """
        return self._ended(self._encode_each(texts))

    def encode_sentences(
        self, texts: Sequence[str]
    ) -> tuple[npt.NDArray[np.uint16 | np.uint32], npt.NDArray[np.int64], list[npt.NDArray[np.uint32]]]:
        """Encode documents as `encode_documents` does, and find their sentences (`sentence_starts`).

        Returns the ids, the lengths, and for each document the ends of its sentences in tokens, [sentences]. A token
        on a boundary belongs to the later sentence. The last sentence ends before the end of text. A sentence without
        tokens is left out.
        """
        ids, sentences = [], []
        for text in texts:
            encoded = encode_long(self._inner, text)
            ids.append(encoded.ids)
            sentences.append(_sentence_ends(text, encoded.ends))
        return *self._ended(ids), sentences

    def _ended(
        self, documents: Iterable[npt.NDArray[np.uint32]]
    ) -> tuple[npt.NDArray[np.uint16 | np.uint32], npt.NDArray[np.int64]]:
        """Append the end-of-text id to each document. Returns the concatenated ids, and the length of each document
        including this id.
        """
        dtype = token_dtype(self.vocab_size)
        end = np.array([self.end_of_text], dtype=dtype)
        pieces, lengths = [end[:0]], []
        for ids in documents:
            lengths.append(len(ids) + 1)
            pieces += (ids.astype(dtype), end)
        return np.concatenate(pieces), np.array(lengths, dtype=np.int64)

    def _encode_each(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.uint32]]:
        if self._fast:
            yield from map(self._fast.encode, texts)
            return
        for is_long, group in groupby(texts, lambda text: len(text) > WINDOW):
            if is_long:
                yield from (encode_long(self._inner, text).ids for text in group)
                continue
            for encoding in self._inner.encode_batch_fast(list(group), add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int], *, with_special: bool = False) -> str:
        """Decode ids to text. Special tokens are omitted unless `with_special` is set."""
        return self._inner.decode(list(ids), skip_special_tokens=not with_special)

    def num_bytes(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> int:
        """Return the number of UTF-8 bytes of the text that `ids` decode to. `ids` must be the first tokens of a
        document, or all of its tokens.

        Special tokens and the end of text have no bytes. If `ids` end inside a character, only the bytes that `ids`
        hold are counted.
        """
        if self._byte_level_lengths is not None:
            return int(self._byte_level_lengths[ids].sum())
        spelled = [token for token in map(int, ids) if token != self.end_of_text]
        whole = len(spelled)
        while whole and self._bytes.is_byte(spelled[whole - 1]):  # the last bytes may be a part of a character
            whole -= 1
        return len(self.decode(spelled[:whole]).encode()) + len(spelled) - whole

    @cached_property
    def _byte_level_lengths(self) -> npt.NDArray[np.int64] | None:
        """Number of bytes of every token, [vocabulary]. None unless the tokenizer is a byte-level BPE, whose tokens
        spell the bytes of a text one after another.
        """
        if not self._bytes.is_byte_level:
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token in self._inner.get_vocab(with_added_tokens=True).values():  # ids may have large gaps
            lengths[token] = len(self._bytes(token))
        special = [token for token, added in self._inner.get_added_tokens_decoder().items() if added.special]
        lengths[[*special, self.end_of_text]] = 0
        return lengths

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self._inner)

    def special_tokens(self) -> SpecialTokens:
        """Return the special tokens of masked language modelling. Raises `DataError` if the tokenizer lacks one of
        them.
        """
        return special_tokens(self._inner, name=self._name)

    def word_starts(self) -> npt.NDArray[np.bool_]:
        """Whether each token begins a word, [vocabulary]. True for ids without a token."""
        starts = np.ones(self.vocab_size, dtype=np.bool_)
        for token in self._inner.get_vocab(with_added_tokens=True).values():
            starts[token] = self._bytes.begins_word(token)
        return starts

    def ordinary_ids(self) -> npt.NDArray[np.int64]:
        """Return the ids of all tokens that are not special, in ascending order."""
        special = {token for token, added in self._inner.get_added_tokens_decoder().items() if added.special}
        return np.array(sorted(set(self._inner.get_vocab(with_added_tokens=True).values()) - special), dtype=np.int64)

    def check_supports(self, objective: Objective) -> None:
        """Raise `DataError` if the tokenizer lacks a special token that the objective needs."""
        if objective is Objective.MASKED:
            self.special_tokens()

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

    def settings(self) -> dict[str, Any]:
        """Return a minimal `tokenizer_config.json`, from which `load` and `transformers` can read the end-of-text
        token. If the tokenizer has all special tokens of masked language modelling, the settings name these tokens,
        too.
        """
        end = self._inner.id_to_token(self.end_of_text)
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            **names_of_special_tokens(self._inner),
            "clean_up_tokenization_spaces": False,
        }


def token_dtype(vocab_size: int) -> np.dtype[np.uint16 | np.uint32]:
    """Return the type of a token id on disk, little-endian: two bytes for up to 65,536 entries, and four bytes for
    larger vocabularies.
    """
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _sentence_ends(text: str, last_characters: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Ends of a document's sentences, in tokens. `last_characters` holds the end of each token in the text."""
    ends = np.searchsorted(last_characters, sentence_starts(text), side="right")
    ends = np.unique(np.append(ends, len(last_characters)))
    return ends[ends > 0].astype(np.uint32)


def _by_name(vocabulary: Mapping[str, int], name: str) -> int:
    for token in END_OF_TEXT_NAMES:
        if token in vocabulary:
            return vocabulary[token]
    raise DataError(
        f"{name} must have a token that ends a text ({listed(f'`{token}`' for token in END_OF_TEXT_NAMES)}), but has "
        "none of these tokens, and no file beside the tokenizer names another token. Name the token as `eos_token` in "
        "a `tokenizer_config.json` in the same folder."
    )


def _first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield from pieces_for_training(text[:limit])
        limit -= len(text)
        if limit <= 0:
            return
