"""Tokenizer of an exported model for a task: `transformers` must make the rows of the fine-tuning from texts alone.

    file                      what it gains
    tokenizer.json            a decoder's special tokens around its texts (`data.tokenization.decoder_rows`)
    tokenizer_config.json     names of special tokens in a text are plain text; token types, if the model has several;
                              padding and truncation on the right, at the length of the rows

`tokenizer_config.json` is written anew, because its settings and those of `special_tokens_map.json` could add tokens to
the texts.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from crosscut.config import ConfigError, ModelConfig
from crosscut.config.published.families import QWEN2
from crosscut.config.published.folders import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from crosscut.config.system.files import read_json
from crosscut.data.tokenization.decoder_rows import Special, surround
from crosscut.data.tokenization.end_of_text import named_beside
from crosscut.data.tokenization.inner import SPLIT_SPECIAL_TOKENS, read_inner
from crosscut.data.tokenization.special_tokens import names_of_special_tokens, padding_token
from crosscut.pretrained.writing import json_bytes

if TYPE_CHECKING:
    import tokenizers

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern of the words of Qwen2, with which `transformers` reads any tokenizer in a folder of this family."""


class Rows(NamedTuple):
    """Rows of a model that was fine-tuned for a task."""

    special: Special
    """Special token ids around a decoder's texts."""
    length: int
    """Maximum number of tokens of a row."""


class TaskFiles(NamedTuple):
    """Files beside the weights of a model for a task."""

    files: dict[str, bytes]
    """Content of the tokenizer's files, keyed by name."""
    padding: int | None
    """Id that fills up short rows. None if the tokenizer has no token for it; `transformers` then reads one text at a
    time.
    """


def task_files(tokenizer: Path, model: ModelConfig, rows: Rows, *, model_type: str) -> TaskFiles:
    """Make the tokenizer's files for a model that was fine-tuned for a task. `model_type` is the model's family.

    Raises `ConfigError` if `transformers` would make other rows than the fine-tuning, and `DataError` for a tokenizer
    that cannot be read.
    """
    inner = read_inner(tokenizer)
    if model_type == QWEN2.model_type:
        _require_qwen2(inner, tokenizer)
    table = {**read_json(tokenizer), "truncation": None, "padding": None}
    if model.is_causal:
        surround(inner, rows.special)
        table["post_processor"] = _state(inner.post_processor)
    padding = _padding(inner, tokenizer.parent, model, rows.special)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **({"eos_token": inner.id_to_token(rows.special.end)} if model.is_causal else names_of_special_tokens(inner)),
        "pad_token": None if padding is None else inner.id_to_token(padding),
        SPLIT_SPECIAL_TOKENS: True,
        "model_input_names": ["input_ids", *(["token_type_ids"] if model.token_types > 1 else []), "attention_mask"],
        "model_max_length": rows.length or model.max_sequence_length,
        "padding_side": "right",
        "truncation_side": "right",
        "clean_up_tokenization_spaces": False,
    }
    content = json.dumps(table, ensure_ascii=False).encode()
    return TaskFiles({TOKENIZER_FILE: content, TOKENIZER_CONFIG_FILE: json_bytes(settings)}, padding)


def _padding(inner: "tokenizers.Tokenizer", folder: Path, model: ModelConfig, special: Special) -> int | None:
    """Id of a token for padding: the one that a file in the tokenizer's folder names, one with a usual name, or any
    other special token. In a decoder, a token that ends rows is none, because `transformers` takes the last token that
    is no padding for the end of a row.
    """
    _, named = named_beside(folder, "pad_token") or (folder, "")
    taken = special if model.is_causal else ()
    found = padding_token(inner, below=model.vocab_size, named=named, taken=taken)
    if found is not None or not model.is_causal:
        return found
    others = sorted(number for number, token in inner.get_added_tokens_decoder().items() if token.special)
    return next((one for one in others if one < model.vocab_size and one not in taken), None)


def _require_qwen2(inner: "tokenizers.Tokenizer", tokenizer: Path) -> None:
    """Raise `ConfigError` unless a tokenizer has the parts of Qwen2's tokenizer."""
    model: Any = inner.model
    words = {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": False}
    parts = (_state(inner.pre_tokenizer) or {}).get("pretokenizers", [{}])
    is_plain = type(model).__name__ == "BPE" and not (
        model.byte_fallback or model.continuing_subword_prefix or model.end_of_word_suffix
    )
    is_bytes = parts[-1].get("type") == "ByteLevel" and not (parts[-1]["add_prefix_space"] or parts[-1]["use_regex"])
    if not is_plain or not is_bytes or parts[:-1] != [words] or _state(inner.normalizer) != {"type": "NFC"}:
        raise ConfigError(
            f"`{tokenizer}` must split texts as Qwen2 does (NFC, Qwen2's pattern of words, bytes), because "
            "`transformers` reads every tokenizer of a model of the family 'qwen2' in this way, but splits them in "
            "another way. The scores in `transformers` would be wrong. Use the run with `crosscut finetune predict`."
        )


def _state(component: Any) -> Any:
    """Settings of a part of a tokenizer. None if the tokenizer has no such part."""
    return None if component is None else json.loads(component.__getstate__())
