"""Tokens that begin and end a text, as a model's folder names them, read as `transformers` reads them."""

from pathlib import Path
from typing import Any

from crosscut.config.published.folders import SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE, read_json
from crosscut.data import Tokenizer


def named_ids(path: Path, tokenizer: Tokenizer) -> dict[str, int | None]:
    """The ids of `bos_token` and `eos_token` as the files beside a `tokenizer.json` name them.

    An id is None where the files say that there is no such token, or where the token is not in the vocabulary. A token
    that the files do not mention is left out. Raises `ConfigError` for a file that is not JSON.
    """
    settings = _read(path.with_name(TOKENIZER_CONFIG_FILE))
    if "added_tokens_decoder" not in settings:
        settings |= _read(path.with_name(SPECIAL_TOKENS_FILE))
    return {name: _id(settings[name], tokenizer) for name in ("bos_token", "eos_token") if name in settings}


def _id(token: Any, tokenizer: Tokenizer) -> int | None:
    text = token["content"] if isinstance(token, dict) else token
    ids = tokenizer.encode_prompt(text) if text else []
    return ids[0] if len(ids) == 1 else None


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
