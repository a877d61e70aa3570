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
from crosscut.config.published.folders import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from crosscut.config.published.special_names import special_names
from crosscut.config.published.tokenizer_classes import PLAIN, TokenizerClass
from crosscut.config.published.tokenizers import unfit
from crosscut.config.system.files import read_json
from crosscut.data.tokenization.decoder_rows import Special, surround
from crosscut.data.tokenization.inner import SPLIT_SPECIAL_TOKENS, read_inner
from crosscut.data.tokenization.special_tokens import names_of_special_tokens, padding_token
from crosscut.pretrained.writing import json_bytes

if TYPE_CHECKING:
    import tokenizers


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
    if TokenizerClass.of({"tokenizer_class": PLAIN}, {"model_type": model_type}, {}).difference(
        {}, read_json(tokenizer)
    ):
        raise ConfigError(
            f"`{tokenizer}` must split texts as Qwen2 does (NFC, Qwen2's pattern of words, bytes), but splits them in "
            f"another way. `transformers` reads every tokenizer of a model of the family {model_type!r} in this way. "
            "The scores in `transformers` would be wrong. Use the run with `crosscut finetune predict`."
        )
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
    named = special_names(folder).get("pad_token")
    taken = special if model.is_causal else ()
    found = padding_token(inner, below=model.vocab_size, named=named, taken=taken)
    if found is not None or not model.is_causal:
        return found
    others = sorted(number for number, token in inner.get_added_tokens_decoder().items() if token.special)
    return next((one for one in others if one < model.vocab_size and one not in taken), None)


def with_class(files: dict[str, bytes], tokenizer: Path, model_type: str) -> tuple[dict[str, bytes], str]:
    """Let `transformers` read the tokenizer's files of a model, beside a `config.json` of the family `model_type`, with
    the class with which it read them beside `tokenizer`, unless the settings name a class or this class would give
    other tokens. Returns the files, and a line for the user if `transformers` may give texts other tokens. The line is
    empty otherwise.
    """
    settings, inner = json.loads(files[TOKENIZER_CONFIG_FILE]), json.loads(files[TOKENIZER_FILE])
    before, model = TokenizerClass.beside(tokenizer), {"model_type": model_type}
    difference = before.difference(settings, inner)
    is_unfit = difference or (before.tokens and unfit(before, None, inner, tokenizer.parent))
    name = PLAIN if is_unfit else before.name
    is_made = not tokenizer.with_name(TOKENIZER_CONFIG_FILE).is_file()
    is_open = bool(before.tokens) if is_made else not settings.get("tokenizer_class")
    if is_open and name != TokenizerClass.of(settings, model, inner).name:
        settings["tokenizer_class"] = name
        files = {**files, TOKENIZER_CONFIG_FILE: json_bytes(settings)}
    return files, TokenizerClass.of(settings, model, inner).notice(settings, inner, tokenizer)


def _state(component: Any) -> Any:
    """Settings of a part of a tokenizer. None if the tokenizer has no such part."""
    return None if component is None else json.loads(component.__getstate__())
