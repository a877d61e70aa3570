"""Tokenizer of a published encoder, as `transformers` makes it from `tokenizer.json` and `tokenizer_config.json`.

The classes of BERT's and RoBERTa's tokenizers put special tokens around a text even if `tokenizer.json` does not. Other
steps of a class cannot differ from `tokenizer.json` (`config.published.tokenizers`). Truncation and padding in
`tokenizer.json` have no effect, except for the side from which a text is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosscut.config.checks import listed, shown
from crosscut.config.errors import ConfigError
from crosscut.config.published.folders import TOKENIZER_CONFIG_FILE
from crosscut.config.published.special_names import special_names
from crosscut.config.published.tokenizer_classes import ROBERTA, TokenizerClass
from crosscut.config.system.files import read_json
from crosscut.data.tokenization.inner import read_inner, splits_special_tokens

if TYPE_CHECKING:
    import tokenizers

_SIDES = ("right", "left")


@dataclass(frozen=True, kw_only=True)
class PublishedTokenizer:
    """Tokenizer of a published encoder, or of a run. The object is small and can be sent to other processes."""

    path: Path
    """Path of the `tokenizer.json`."""
    is_published: bool = True
    """Whether the files beside it are those of a published model. A run's tokenizer is only its `tokenizer.json`."""
    lower_case: bool = False
    """Whether texts are put in lower case first."""

    @property
    def _config_path(self) -> Path:
        return self.path.with_name(TOKENIZER_CONFIG_FILE)

    @cached_property
    def _config(self) -> dict[str, Any]:
        return read_json(self._config_path) if self.is_published and self._config_path.is_file() else {}

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of tokens of a text, by `tokenizer_config.json`. None if the file gives none."""
        key = "model_max_length" if "model_max_length" in self._config else "max_len"
        value = self._config.get(key)
        if value is not None and not (type(value) in (int, float) and value >= 1):
            raise ConfigError(
                f"`{key}` in `{self._config_path}` must be a number of at least 1, but is {shown(value)}. Correct the "
                "file."
            )
        return None if value is None or value == float("inf") else int(value)

    def read(self, max_tokens: int = 0) -> tokenizers.Tokenizer:
        """Read the tokenizer, which does not pad. It cuts texts after `max_tokens` tokens, or before the last
        `max_tokens` if the model says so; 0 means that it does not cut. Raises `DataError` or `ConfigError`.
        """
        inner = read_inner(self.path)
        side = (inner.truncation or {}).get("direction", _SIDES[0])
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = self.is_published and splits_special_tokens(self.path)
        if self.is_published:
            self._surround(inner)
        if self.lower_case:
            _lower(inner)
        if max_tokens:
            side = self._config.get("truncation_side", side)
            if side not in _SIDES:
                raise ConfigError(
                    f"`truncation_side` in `{self._config_path}` must be {listed(_SIDES)}, but is {shown(side)}. "
                    "Correct the file."
                )
            inner.enable_truncation(max_tokens, direction=side)
        return inner

    def num_prompt_tokens(self, prompt: str, max_tokens: int) -> int:
        """Number of tokens of a text that a prompt takes, as the library counts them: the tokens of the prompt alone
        without a special token at their end. 0 for an empty prompt.
        """
        if not prompt:
            return 0
        tokens = self.read(max_tokens).encode(prompt).tokens
        kind, names = TokenizerClass.beside(self.path), special_names(self.path.parent)
        special = {*kind.tokens.values(), *names.contents} if self.is_published else set()
        return len(tokens) - (bool(tokens) and tokens[-1] in special)

    def _surround(self, inner: tokenizers.Tokenizer) -> None:
        """Let a tokenizer of BERT's or RoBERTa's class put the special tokens of the class around a text. A vocabulary
        without these tokens stays as it is.
        """
        from tokenizers import processors

        kind, names = TokenizerClass.beside(self.path), special_names(self.path.parent)
        if not kind.tokens:
            return
        first, last = (names.get(name) or kind.tokens[name] for name in ("cls_token", "sep_token"))
        begin, end = inner.token_to_id(first), inner.token_to_id(last)
        if begin is None or end is None:
            return
        if kind.name == ROBERTA:
            inner.post_processor = processors.RobertaProcessing((last, end), (first, begin))
        else:
            inner.post_processor = processors.TemplateProcessing(
                single=[f"{first}:0", "$A:0", f"{last}:0"], pair=None, special_tokens=[(last, end), (first, begin)]
            )


def _lower(inner: tokenizers.Tokenizer) -> None:
    from tokenizers.normalizers import Lowercase, Sequence

    inner.normalizer = Lowercase() if inner.normalizer is None else Sequence([Lowercase(), inner.normalizer])
