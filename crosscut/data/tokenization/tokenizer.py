"""Text to token ids and back: any `tokenizer.json`, or a byte-level BPE trained on the corpus.

The `tokenizers` library does the work, or gigatoken where it gives the same ids. What stands here is what they leave
open: which token ends a document, that no document may smuggle that token in while a prompt may hold it, and that a
file's own truncation or padding must not shorten a corpus.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from crosscut.config.checks import listed
from crosscut.config.errors import DataError
from crosscut.data.tokenization.end_of_text import end_said_beside
from crosscut.data.tokenization.fast_encoder import FastEncoder, fast_encoder

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<end_of_text>")
"""Names of the token after each document where nothing says which it is, in order of preference."""

MAX_TRAINING_CHARACTERS = 100_000_000
"""Text that a tokenizer is trained on at most, from the start of the corpus; bounds memory and time."""


class Tokenizer:
    """A tokenizer of the `tokenizers` library and its end-of-text token.

    Special tokens are never read from a document: one that contains the characters `<|endoftext|>` is encoded as
    those characters, so the end-of-text id stands only where a document ends. Only a prompt is read with them.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, *, name: str = "The tokenizer", end_of_text: int | None = None
    ) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        self._inner = inner
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        """One more than the highest id; ids may have gaps."""
        self.end_of_text = _by_name(vocabulary, name) if end_of_text is None else end_of_text
        """Id of the token after each document."""

    @classmethod
    def load(cls, path: Path, *, setting: str = "data.tokenizer", end_of_text: int | None = None) -> Tokenizer:
        """Read a `tokenizer.json`, which the configuration names as `setting`.

        Its end of text is `end_of_text` where that is given, else what the files beside it say (`end_of_text`), else a
        token of a name that is known. Raises `DataError` when it cannot be read, has none of these tokens, or not the
        one that is named; `ConfigError` when a file beside it cannot be read.
        """
        import tokenizers

        try:
            data = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise DataError(
                f"`{path}` must be a readable `tokenizer.json`, but is not: {reason}. Check `{setting}`."
            ) from None
        try:
            inner = tokenizers.Tokenizer.from_str(data)
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"`{path}` must be a `tokenizer.json` of the tokenizers library, but is not: {error}."
            ) from None
        if end_of_text is None:
            end_of_text = end_said_beside(path, inner)
        return cls(inner, name=f"`{path}`", end_of_text=end_of_text)

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
        """Train a byte-level BPE with GPT-2's pre-tokenization on the first 100 million characters of `texts`.

        The vocabulary is `vocab_size` entries with `<|endoftext|>` as entry 0, or fewer when the text has no pair of
        tokens left that occurs twice. Raises `DataError` for a `vocab_size` below 257 (256 bytes and the end of text).
        """
        from tokenizers import Tokenizer as Inner
        from tokenizers import decoders, models, pre_tokenizers, processors, trainers

        if vocab_size < 257:
            raise DataError(
                f"`data.vocab_size` must be at least 257 (256 bytes and the end of text), but is {vocab_size}."
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

    def encode(self, text: str) -> list[int]:
        """Ids of one text, without an end of text. Special tokens in it are spelled as characters."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str, *, begin: int | None = None) -> list[int]:
        """Ids of what a person writes to a model: the names of special tokens in it stand for those tokens.

        `begin` is the id that the model expects before every text; it comes first, and only once where the text begins
        with it. Nothing else is put around the text. Threads may call it at once.
        """
        ids: list[int] = self._reading_special.encode(text, add_special_tokens=False).ids
        return ids if begin is None or ids[:1] == [begin] else [begin, *ids]

    @cached_property
    def _reading_special(self) -> tokenizers.Tokenizer:
        """A second one, since whether special tokens are read is a state of a tokenizer that threads would share."""
        return type(self._inner).from_str(self._inner.to_str())

    @property
    def engine(self) -> str:
        """The library that encodes documents: `gigatoken` or `tokenizers`."""
        return "gigatoken" if self._fast else "tokenizers"

    @cached_property
    def _fast(self) -> FastEncoder | None:
        return fast_encoder(self._inner)

    def encode_documents(
        self, texts: Sequence[str]
    ) -> tuple[npt.NDArray[np.uint16 | np.uint32], npt.NDArray[np.int64]]:
        """Encode documents, each with its end of text.

        Returns (ids of all documents in a row, length of each with its end of text); ids in the smallest type of a
        token folder that holds the vocabulary. They are the same with every `engine`; gigatoken runs on the calling
        thread, the tokenizers library on its own threads.
        """
        dtype = token_dtype(self.vocab_size)
        end = np.array([self.end_of_text], dtype=dtype)
        pieces = [end[:0]]
        lengths = np.empty(len(texts), dtype=np.int64)
        for number, ids in enumerate(self._encode_each(texts)):
            lengths[number] = len(ids) + 1
            pieces += (ids.astype(dtype), end)
        return np.concatenate(pieces), lengths

    def _encode_each(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.uint32]]:
        if self._fast:
            yield from map(self._fast.encode, texts)
            return
        for encoding in self._inner.encode_batch_fast(list(texts), add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int], *, with_special: bool = False) -> str:
        """Text of ids; special tokens are left out unless asked for."""
        return self._inner.decode(list(ids), skip_special_tokens=not with_special)

    def has_ids_of(self, other: Tokenizer) -> bool:
        """Whether every token has the id that it has in another tokenizer."""
        ours, theirs = (one._inner.get_vocab(with_added_tokens=True) for one in (self, other))
        return ours == theirs

    def save(self, path: Path) -> None:
        """Write a `tokenizer.json`."""
        self._inner.save(str(path))

    def settings(self) -> dict[str, Any]:
        """The least `tokenizer_config.json` beside it that tells `load`, and `transformers`, how a text ends."""
        end = self._inner.id_to_token(self.end_of_text)
        return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}


def token_dtype(vocab_size: int) -> np.dtype[np.uint16 | np.uint32]:
    """The type of a token on disk: two bytes where the vocabulary allows, else four, little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _by_name(vocabulary: Mapping[str, int], name: str) -> int:
    for token in END_OF_TEXT_NAMES:
        if token in vocabulary:
            return vocabulary[token]
    raise DataError(
        f"{name} must have a token that ends a text ({listed(f'`{token}`' for token in END_OF_TEXT_NAMES)}), but has "
        "none, and nothing beside it names another. Write it as `eos_token` to a `tokenizer_config.json` beside it."
    )


def _first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return
