"""Which token ends a text: a `tokenizer.json` does not say, but what lies beside it does.

The first that says something is believed:

1. `manifest.json` of a token folder: its documents end so already.
2. `eos_token` in `tokenizer_config.json`, or in `special_tokens_map.json`: what `transformers` ends texts with.
3. `eos_token_id` in `config.json`, then in `generation_config.json`, the first of several: by what a model stops, which
   for one that was tuned on chats is often the end of a turn besides.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosscut.config.errors import DataError
from crosscut.config.published.folders import SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE, end_ids, read_json
from crosscut.data.manifest import FORMAT, MANIFEST_NAME, Manifest

if TYPE_CHECKING:
    import tokenizers

_KEY = "eos_token"


def end_said_beside(path: Path, inner: tokenizers.Tokenizer) -> int | None:
    """The id that ends a text by the files beside a `tokenizer.json`, which `inner` was read from; None by none.

    Raises `DataError` where they name a token that the tokenizer lacks, and `ConfigError` where they cannot be read.
    """
    folder = path.parent
    if _holds_tokens(folder):
        return Manifest.read(folder).end_of_text
    if named := _named(folder):
        file, name = named
        if (end := inner.token_to_id(name)) is None:
            raise _unknown(f"`{_KEY}` in `{file}`", "a token", path, repr(name))
        return end
    for file, ids in end_ids(folder).items():
        if inner.id_to_token(ids[0]) is None:
            raise _unknown(f"`{_KEY}_id` in `{file}`", "an id", path, ids[0])
        return ids[0]
    return None


def _holds_tokens(folder: Path) -> bool:
    """Whether the manifest there is ours; others call files of their own so."""
    try:
        table = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(table, dict) and table.get("format") == FORMAT


def _named(folder: Path) -> tuple[Path, str] | None:
    """The name of the token and the file that gives it: as in `transformers`, the second file's in an older pair."""
    settings, special = folder / TOKENIZER_CONFIG_FILE, folder / SPECIAL_TOKENS_FILE
    for file in (settings,) if "added_tokens_decoder" in _table(settings) else (special, settings):
        token = _table(file).get(_KEY)
        if name := token.get("content") if isinstance(token, dict) else token:
            return file, str(name)
    return None


def _table(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _unknown(what: str, kind: str, path: Path, value: object) -> DataError:
    return DataError(
        f"{what} must be {kind} of `{path}`, but is {value}, which that lacks. Take both files from one model, or mend "
        "the first."
    )
