"""Typed access to the values of a published model's `config.json`."""

from pathlib import Path
from typing import TypeVar

from crosscut.config.checks import MOST_SEED, listed, shown
from crosscut.config.errors import ConfigError
from crosscut.config.model import ModelConfig
from crosscut.config.system.files import read_json

Table = dict[str, object]
"""Object of a JSON file. Its values are not checked yet."""

_Number = TypeVar("_Number", int, float)


class PublishedTable:
    """A `config.json` with typed access to its values by key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = read_json(path)

    def __contains__(self, key: str) -> bool:
        """Whether the file has a value for the key. Null does not count as a value."""
        return self.values.get(key) is not None

    def names_null(self, key: str) -> bool:
        """Whether the file has the value null for the key."""
        return key in self.values and self.values[key] is None

    def get(self, key: str, default: object = None) -> object:
        """Return the value of the key, or `default` if the file has no value for the key."""
        return self.values[key] if key in self else default

    def take(self, key: str, field: str) -> object:
        """Value for a field of `ModelConfig`. Raises `ConfigError` unless the value has the field's type."""
        value, kind = self.values[key], ModelConfig.__annotations__[field]
        if kind is float:
            return self.number(key, value, float)
        if type(value) is not kind:
            raise ConfigError(f"`{key}` in `{self.path}` must be of type {kind.__name__}, but is {shown(value)}.")
        return value

    def section(self, key: str) -> Table:
        """Return the object under the key, or an empty object if the key is missing. Raises `ConfigError` for a value
        that is not an object.
        """
        if not isinstance(value := self.get(key, {}), dict):
            raise ConfigError(f"`{key}` in `{self.path}` must be an object, but is {shown(value)}. Correct the file.")
        return value

    def number(self, key: str, value: object, kind: type[_Number]) -> _Number:
        """Convert the value under a key to the number type `kind`. Raises `ConfigError` if the value is not such a
        number.
        """
        if isinstance(value, int | kind) and type(value) is not bool and abs(value) <= MOST_SEED:
            return kind(value)
        name = "a whole number" if kind is int else "a number"
        raise ConfigError(f"`{key}` in `{self.path}` must be {name}, but is {shown(value)}. Correct the file.")

    def require(self, key: str, allowed: tuple[object, ...]) -> None:
        """Raise `ConfigError` unless the value under the key is in `allowed`. A missing value counts as the first of
        `allowed`.
        """
        if (value := self.get(key, allowed[0])) not in allowed:
            raise self.refusal(key, listed(map(shown, allowed)), value)

    def require_at_least(self, key: str, smallest: int) -> None:
        """Raise `ConfigError` if the whole number under the key is smaller than `smallest`."""
        if (value := self.values[key]) < smallest:
            raise ConfigError(
                f"`{key}` in `{self.path}` must be at least {smallest}, but is {value}. Choose another model."
            )

    def refusal(self, key: str, must: str, value: object) -> ConfigError:
        """Error for a value that Crosscut does not support. `must` says which value the key must have."""
        return ConfigError(
            f"`{key}` in `{self.path}` must be {must}, but is {shown(value)}. Crosscut supports no other value. "
            "Choose another model."
        )
