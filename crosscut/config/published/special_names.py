"""Special tokens that the files beside a `tokenizer.json` name, read as `transformers` reads them.

`special_tokens_map.json` replaces the names in a `tokenizer_config.json` of an older version, which has no
`added_tokens_decoder`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from crosscut.config.checks import shown
from crosscut.config.errors import ConfigError
from crosscut.config.published.folders import SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE
from crosscut.config.system.files import read_json

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TABLES = ("extra_special_tokens", "model_specific_special_tokens")
"""Keys whose value may be a table of further names."""
_LISTS = ("additional_special_tokens", "extra_special_tokens")
ADDED_TOKENS = "added_tokens_decoder"


class NamedToken(NamedTuple):
    """Special token under a name such as `eos_token`."""

    content: str
    """Text of the token; empty if the file sets the name to null."""
    file: Path
    """File that names the token."""


@dataclass(frozen=True)
class SpecialNames:
    """Special tokens in the files of a folder."""

    named: Mapping[str, NamedToken]
    """Tokens that have a name: the usual names, every other key that ends in `_token`, and the names in
    `extra_special_tokens`."""
    others: tuple[str, ...]
    """Tokens without a name."""

    def get(self, name: str) -> str:
        """Text of the token with a name; empty if there is none."""
        return self.named[name].content if name in self.named else ""

    @property
    def contents(self) -> tuple[str, ...]:
        """Texts of all tokens."""
        found = (*(token.content for token in self.named.values()), *self.others)
        return tuple(dict.fromkeys(filter(None, found)))


def special_names(folder: Path) -> SpecialNames:
    """Read the special tokens that `tokenizer_config.json` and `special_tokens_map.json` in a folder name. Raises
    `ConfigError` for a file that is not a JSON object, and for a token that is neither a string nor an object with the
    string `content`.
    """
    settings, special = folder / TOKENIZER_CONFIG_FILE, folder / SPECIAL_TOKENS_FILE
    tables = {file: read_json(file) if file.is_file() else {} for file in (settings, special)}
    if ADDED_TOKENS in tables[settings]:
        tables[special] = {}
    values = {key: (value, file) for file, table in tables.items() for key, value in table.items()}
    found = {key: each for key, each in values.items() if key in _NAMES or _is_token(key, each[0])}
    for key in _TABLES:
        table, file = values.get(key, (None, settings))
        if isinstance(table, Mapping):
            found |= {str(name): (value, file) for name, value in table.items()}
    named = {name: NamedToken(_content(value, name, file), file) for name, (value, file) in found.items()}
    lists = {key: values[key] for key in _LISTS if key in values and isinstance(values[key][0], list)}
    return SpecialNames(named, tuple(_content(one, key, file) for key, (each, file) in lists.items() for one in each))


def _is_token(key: str, value: object) -> bool:
    return key.endswith("_token") and isinstance(value, str | Mapping)


def _content(token: object, name: str, file: Path) -> str:
    text = token.get("content") if isinstance(token, Mapping) else "" if token is None else token
    if not isinstance(text, str):
        raise ConfigError(
            f"`{name}` in `{file}` must be a string, or an object whose `content` is a string, but is {shown(token)}. "
            f"Correct or remove `{name}`."
        )
    return text
