"""Search for the token that ends a text. A `tokenizer.json` does not name this token, but other files in the same
folder do.

The first source that names a token is used:

1. `manifest.json` of a token folder, because the documents in the folder already end with this token.
2. `eos_token` in `tokenizer_config.json` or `special_tokens_map.json`, with which `transformers` ends texts.
3. `eos_token_id` in `config.json`, then in `generation_config.json`. If there are several ids, the first is
   used. Generation stops at each of these ids, and in a chat model one of them often ends a turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from crosscut.config.checks import listed
from crosscut.config.errors import DataError
from crosscut.config.published.folders import end_ids
from crosscut.config.published.special_names import special_names
from crosscut.config.system.files import json_or_none
from crosscut.data.manifest import FORMAT, MANIFEST_NAME, TokenManifest
from crosscut.data.tokenization.wordpiece import SEPARATOR

if TYPE_CHECKING:
    import tokenizers

_KEY = "eos_token"

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<end_of_text>", SEPARATOR)
"""Usual names of the end-of-text token, in order of preference. The names are tried if no file beside the tokenizer
names this token.
"""


def end_named_beside(path: Path, inner: tokenizers.Tokenizer) -> int | None:
    """Return the id that ends a text, from the files beside the `tokenizer.json` at `path`. None if no file names an
    id. `inner` is the tokenizer from this `tokenizer.json`.

    Raises `DataError` if a file names a token that the tokenizer does not have, and `ConfigError` if a file cannot be
    read.
    """
    folder = path.parent
    if _holds_tokens(folder):
        return TokenManifest.read(folder).end_of_text
    if (end := end_named_by_settings(folder, path, inner)) is not None:
        return end
    for file, ids in end_ids(folder).items():
        if inner.id_to_token(ids[0]) is None:
            raise _unknown(f"`{_KEY}_id` in `{file}`", "an id", path, ids[0])
        return ids[0]
    return None


def end_named_by_settings(folder: Path, path: Path, inner: tokenizers.Tokenizer) -> int | None:
    """Return the id of the token that the settings of a tokenizer in `folder` name as `eos_token`. None if they name
    none. `inner` is the tokenizer from the `tokenizer.json` at `path`. Raises the errors of `end_named_beside`.
    """
    named = special_names(folder).named.get(_KEY)
    if named is None or not named.content:
        return None
    if (end := inner.token_to_id(named.content)) is None:
        raise _unknown(f"`{_KEY}` in `{named.file}`", "a token", path, repr(named.content))
    return end


def _holds_tokens(folder: Path) -> bool:
    """Whether the manifest in the folder belongs to a token folder. Other programs also write files with this name."""
    table = json_or_none(folder / MANIFEST_NAME)
    return isinstance(table, dict) and table.get("format") == FORMAT


def _unknown(what: str, kind: str, path: Path, value: object) -> DataError:
    return DataError(
        f"{what} must be {kind} of `{path}`, but is {value}, which the tokenizer does not have. Take both files from "
        "the same model, or correct the value."
    )


def end_named_in(vocabulary: Mapping[str, int], name: str) -> int:
    """Id of the first usual name of the end-of-text token (`END_OF_TEXT_NAMES`) in a vocabulary. Raises `DataError` if
    it has none of them; the message begins with `name`.
    """
    for token in END_OF_TEXT_NAMES:
        if token in vocabulary:
            return vocabulary[token]
    raise DataError(
        f"{name} must have a token that ends a text ({listed(f'`{token}`' for token in END_OF_TEXT_NAMES)}), but has "
        "none of these tokens, and no file beside the tokenizer names another token. Name the token as `eos_token` in "
        "a `tokenizer_config.json` in the same folder."
    )
