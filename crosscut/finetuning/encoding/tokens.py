"""Token ids of a text or a pair of texts, as a model expects them.

An encoder's own `tokenizer.json` gives its special tokens, for example `[CLS] a [SEP] b [SEP]` in BERT. Those of a
decoder are in `data.tokenization.decoder_rows`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from crosscut.config.errors import ConfigError
from crosscut.config.model import ModelConfig
from crosscut.data.tokenization.decoder_rows import Special, surround
from crosscut.data.tokenization.inner import read_inner
from crosscut.data.tokenization.long_texts import batches
from crosscut.data.tokenization.special_tokens import padding_token
from crosscut.finetuning.encoding.spelling import Spelling

if TYPE_CHECKING:
    import tokenizers

Pair = tuple[str, str | None]
"""A text and, for a pair, the second text; otherwise None."""

Cut = Literal["longest_first", "only_first", "only_second"]
"""Text of a pair that is cut if a row is too long."""


class TextEncoder:
    """Tokenizer of a model, with the special tokens that the model expects around its texts."""

    def __init__(self, tokenizer: Path, model: ModelConfig, special: Special, *, length: int) -> None:
        """`length` is the maximum number of tokens of a row. Raises `DataError` if the tokenizer cannot be read, and
        `ConfigError` if the model is an encoder and the tokenizer adds no special tokens.
        """
        self.path, self.model, self.length = tokenizer, model, length
        self._inner = read_inner(tokenizer)
        self._inner.no_padding()
        self._inner.no_truncation()
        self._inner.encode_special_tokens = True  # a text cannot contain a special token
        if model.is_causal:
            surround(self._inner, special)
        elif self.num_special(is_pair=False) == 0:
            raise ConfigError(
                f"`{tokenizer}` must put special tokens around a text, such as [CLS] and [SEP], but puts none. Its "
                "`post_processor` is missing. Download the model again."
            )
        _keep_offsets(self._inner)
        padding = padding_token(self._inner, below=model.vocab_size)
        self.padding = special.end if padding is None else padding
        """Id that fills up short rows. No token attends to padding."""

    def num_special(self, *, is_pair: bool) -> int:
        """Number of special tokens around a text, or around a pair of texts."""
        return self._inner.num_special_tokens_to_add(is_pair)

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, without special tokens."""
        self._inner.no_truncation()
        return [
            len(found)
            for part in batches(texts, "Example")
            for found in self._inner.encode_batch(part, add_special_tokens=False)
        ]

    def spelling(self) -> Spelling:
        """Return the way in which the tokens spell a text."""
        return Spelling(self._inner)

    def encode(
        self, pairs: Sequence[Pair], *, cut: Cut = "longest_first", stride: int = 0
    ) -> Iterator[tokenizers.Encoding]:
        """Encode texts or pairs of texts, cut to the maximum length. The attribute `overflowing` of a result holds the
        rest of the text, in further windows that overlap by `stride` tokens.

        Raises `ConfigError` if the tokenizer returns an id outside the model's vocabulary.
        """
        self._inner.enable_truncation(self.length, stride=stride, strategy=cut)
        for part in batches(pairs, "Example"):
            for found in self._inner.encode_batch([text if pair is None else (text, pair) for text, pair in part]):
                if (highest := max(found.ids)) >= self.model.vocab_size:
                    raise ConfigError(
                        f"`{self.path}` must be the tokenizer of the model, with ids below {self.model.vocab_size:,}, "
                        f"but has the id {highest:,}. Restore the tokenizer of the model."
                    )
                yield found


def _keep_offsets(inner: tokenizers.Tokenizer) -> None:
    """Keep the post-processor from trimming offsets. It trims as many characters as a token has marks of a blank, so a
    mark that the tokenizer inserts itself costs the word its first letter.
    """
    if processor := inner.post_processor:
        processor.__setstate__(json.dumps(_untrimmed(json.loads(processor.__getstate__()))).encode())
        inner.post_processor = processor


def _untrimmed(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: False if key == "trim_offsets" else _untrimmed(value) for key, value in state.items()}
    return [_untrimmed(each) for each in state] if isinstance(state, list) else state
