"""What a model's folder calls the tokens that begin and end a text, read as `transformers` reads it."""

import json
from pathlib import Path
from typing import Any

from crosscut.config import ConfigError
from crosscut.data import Tokenizer

_SETTINGS, _LEGACY = "tokenizer_config.json", "special_tokens_map.json"


def named_ids(path: Path, tokenizer: Tokenizer) -> dict[str, int | None]:
    """The ids of `bos_token` and `eos_token` as the files beside a `tokenizer.json` name them.

    None for one of which they say that there is none, or which is not in the vocabulary; what they do not speak of is
    left out. Raises `ConfigError` for a file that is not JSON.
    """
    settings = _read(path.with_name(_SETTINGS))
    if "added_tokens_decoder" not in settings:
        settings |= _read(path.with_name(_LEGACY))
    return {name: _id(settings[name], tokenizer) for name in ("bos_token", "eos_token") if name in settings}


def _id(token: Any, tokenizer: Tokenizer) -> int | None:
    text = token["content"] if isinstance(token, dict) else token
    ids = tokenizer.encode_prompt(text) if text else []
    return ids[0] if len(ids) == 1 else None


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"`{path}` must be JSON, but is not: {error}. Mend it or take it away.") from None
    return settings if isinstance(settings, dict) else {}
