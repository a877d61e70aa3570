"""Tokenizer of a published encoder, as `transformers` makes it from `tokenizer.json` and `tokenizer_config.json`.

The tokenizers of BERT and RoBERTa have classes of their own in `transformers` (5.24). Such a class takes only the
vocabulary from `tokenizer.json`, and makes the steps around it from `tokenizer_config.json`: a tokenizer that keeps
capitals in one file and not in the other does what the second file says. Truncation and padding in `tokenizer.json`
have no effect, except for the side from which a text is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosscut.config.checks import listed, shown
from crosscut.config.errors import ConfigError
from crosscut.config.published.folders import MODEL_FILE, TOKENIZER_CONFIG_FILE
from crosscut.config.system.files import read_json
from crosscut.data.tokenization.inner import read_inner, splits_special_tokens

if TYPE_CHECKING:
    import tokenizers

_BERT, _ROBERTA = "BertTokenizer", "RobertaTokenizer"
_CLASSES = {"bert": _BERT, "roberta": _ROBERTA}
"""Class of a tokenizer without `tokenizer_class`, by the type of the model."""
_TOKENS = {
    _BERT: {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"},
    _ROBERTA: {
        "bos": "<s>", "eos": "</s>", "sep": "</s>", "cls": "<s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>",
    },
}  # fmt: skip
"""Default special tokens of a class."""
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

    @cached_property
    def _class(self) -> str:
        model = self.path.with_name(MODEL_FILE)
        table = read_json(model) if self.is_published and model.is_file() else {}
        default = _CLASSES.get(str(table.get("model_type")), "")
        name = self._config.get("tokenizer_class") or table.get("tokenizer_class") or default
        return str(name).removesuffix("Fast")

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
        self._remake(inner)
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
        return len(tokens) - (bool(tokens) and tokens[-1] in self._special_tokens)

    @property
    def _special_tokens(self) -> set[str]:
        named = {**_TOKENS.get(self._class, {}), **self._named}
        more = [self._config.get(key) for key in ("extra_special_tokens", "additional_special_tokens")]
        lists = (one.values() if isinstance(one, dict) else one for one in more if isinstance(one, dict | list))
        return {*named.values(), *(content for one in lists for each in one if (content := _content(each)))}

    @property
    def _named(self) -> dict[str, str]:
        """Special tokens in `tokenizer_config.json`, such as "cls"."""
        found = {key.removesuffix("_token"): _content(each) for key, each in self._config.items()}
        return {name: found[name] for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask") if found.get(name)}

    def _remake(self, inner: tokenizers.Tokenizer) -> None:
        """Replace the steps around the vocabulary by those of the tokenizer's class, if it has one. A class that only
        follows from the type of the model is not used for a vocabulary that does not fit.
        """
        from tokenizers.models import BPE, WordPiece

        if self._class not in _TOKENS:
            return
        tokens = {**_TOKENS[self._class], **self._named}
        last, first = inner.token_to_id(tokens["sep"]), inner.token_to_id(tokens["cls"])
        kind = WordPiece if self._class == _BERT else BPE
        if last is not None and first is not None and isinstance(inner.model, kind):
            remake = self._remake_bert if self._class == _BERT else self._remake_roberta
            remake(inner, (tokens["sep"], last), (tokens["cls"], first))
        elif self._config.get("tokenizer_class"):
            raise ConfigError(
                f"`tokenizer_class` in `{self._config_path}` must fit `{self.path.name}`, which has no "
                f"{kind.__name__} with the tokens {tokens['cls']} and {tokens['sep']}, but is "
                f"{shown(self._config['tokenizer_class'])}. Save the tokenizer again with transformers."
            )

    def _flag(self, key: str, *, default: bool = False) -> bool:
        value = self._config.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(
                f"`{key}` in `{self._config_path}` must be true or false, but is {shown(value)}. Correct the file."
            )
        return value

    def _remake_bert(self, inner: tokenizers.Tokenizer, sep: tuple[str, int], cls: tuple[str, int]) -> None:
        from tokenizers import normalizers, pre_tokenizers, processors

        inner.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=self._flag("tokenize_chinese_chars", default=True),
            strip_accents=None if self._config.get("strip_accents") is None else self._flag("strip_accents"),
            lowercase=self._flag("do_lower_case", default=True),
        )
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.post_processor = processors.TemplateProcessing(
            single=[f"{cls[0]}:0", "$A:0", f"{sep[0]}:0"], pair=None, special_tokens=[cls, sep]
        )
        inner.model.continuing_subword_prefix = "##"
        inner.model.max_input_chars_per_word = 100

    def _remake_roberta(self, inner: tokenizers.Tokenizer, sep: tuple[str, int], cls: tuple[str, int]) -> None:
        from tokenizers import pre_tokenizers, processors

        has_space = self._flag("add_prefix_space")
        inner.normalizer = None
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_space)
        inner.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=has_space)


def _lower(inner: tokenizers.Tokenizer) -> None:
    from tokenizers.normalizers import Lowercase, Sequence

    inner.normalizer = Lowercase() if inner.normalizer is None else Sequence([Lowercase(), inner.normalizer])


def _content(token: object) -> str:
    """Text of a token in `tokenizer_config.json`, which is a string or an object. Empty for anything else."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
