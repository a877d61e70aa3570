"""Typed access to the values of a published model's `config.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from crosscut.config.checks import MOST_SEED, shown
from crosscut.config.errors import ConfigError
from crosscut.config.model import ModelConfig, mixer_sections
from crosscut.config.published.keys.form import json_shown, refusal
from crosscut.config.system.files import read_json

Table = dict[str, object]
"""Object of a JSON file. Its values are not checked yet."""

_Number = TypeVar("_Number", int, float)


_NULLABLE = (
    "num_kv_heads", "head_size", "mlp_size", "logit_softcap", "latent_attention.query_rank",
    "experts.per_token", "experts.groups", "experts.groups_per_token",
    *(f"gated_delta.{name}" for name in ("num_value_heads", "num_key_heads", "value_head_size", "key_head_size")),
)  # fmt: skip
"""Fields of `ModelConfig` that null sets to zero: the size follows from other sizes, or there is no soft cap and no
latent vector of the queries."""


class PublishedTable:
    """A `config.json` with typed access to its values by key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = read_json(path)

    def resolve_names(self, aliases: Mapping[str, str]) -> None:
        """Move the values of second names of keys to the keys. A second name has precedence, as in `transformers`."""
        second = {key: self.values.pop(name) for name, key in aliases.items() if name in self.values}
        self.values.update(second)

    def __contains__(self, key: str) -> bool:
        """Whether the file has a value for the key. Null does not count as a value."""
        return self.values.get(key) is not None

    def get(self, key: str, default: object = None) -> object:
        """Return the value of the key, or `default` if the file has no value for the key."""
        return self.values[key] if key in self else default

    def take(self, key: str, field: str) -> object:
        """Value for a field of `ModelConfig`. Raises `ConfigError` unless the value has the field's type."""
        section, _, name = field.rpartition(".")
        value, kind = self.values[key], (mixer_sections()[section] if section else ModelConfig).__annotations__[name]
        if value is None and field in _NULLABLE:
            return kind()
        if kind is float:
            return self.number(key, value, float)
        if type(value) is not kind:
            must = f"must be of type {kind.__name__}, but is {json_shown(value)}"
            raise ConfigError(f"`{key}` in `{self.path}` {must}. Correct the file.")
        return value

    def section(self, key: str) -> Table:
        """Return the object under the key, or an empty object if the key is missing. Raises `ConfigError` for a value
        that is not an object.
        """
        if not isinstance(value := self.get(key, {}), dict):
            raise ConfigError(f"`{key}` in `{self.path}` must be an object, but is {shown(value)}. Correct the file.")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return the truth value under the key, or `default` if the key is missing. Raises `ConfigError` for a value
        that is neither true nor false.
        """
        if not isinstance(value := self.values.get(key, default), bool):
            raise ConfigError(
                f"`{key}` in `{self.path}` must be true or false, but is {json_shown(value)}. Correct the file."
            )
        return value

    def number(self, key: str, value: object, kind: type[_Number]) -> _Number:
        """Convert the value under a key to the number type `kind`. Raises `ConfigError` if the value is not such a
        number.
        """
        if isinstance(value, int | kind) and type(value) is not bool and abs(value) <= MOST_SEED:
            return kind(value)
        name = "a whole number" if kind is int else "a number"
        raise ConfigError(f"`{key}` in `{self.path}` must be {name}, but is {shown(value)}. Correct the file.")

    def refusal(self, key: str, must: str, value: object) -> ConfigError:
        """Error for a value that Crosscut does not support. `must` says which value the key must have."""
        return refusal(self.path, key, must, value, "Choose another model.")
