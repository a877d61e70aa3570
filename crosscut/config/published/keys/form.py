"""Table of the keys of one format of files, and the check of a file against the table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosscut.config.checks import listed, shown
from crosscut.config.errors import ConfigError

_MOST_NAMED = 5
"""Maximum number of unknown keys that a line names. Further keys are only counted."""
_MOST_LETTERS = 80
"""Maximum number of letters of a key in a line."""


def because(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return a mapping from each key to its reason. `reasons` maps a reason to its keys, separated by spaces."""
    return {key: reason for reason, keys in reasons.items() for key in keys.split()}


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Table of the keys of one format of files."""

    title: str
    """Name of the format in docs/tables/keys.md, such as "`config.json` of `llama`"."""
    used: Mapping[str, str]
    """Keys that Crosscut reads, each with its use."""
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Keys that Crosscut refuses unless they have one of these values. A missing key has the first value."""
    without_effect: Mapping[str, str] = field(default_factory=dict)
    """Keys whose value changes nothing that Crosscut computes, each with the reason."""
    remedy: str = "Choose another model."
    """End of the message about a refused value."""

    def known(self) -> Iterable[str]:
        """Yield all keys of the table."""
        yield from self.used
        yield from self.only
        yield from self.without_effect

    def check(self, table: Mapping[str, Any], path: Path) -> str:
        """Check the keys of the file at `path`, whose content is `table`. Raises the error of `require`. Returns a line
        for the user about the keys that the table does not list (`notice`).
        """
        self.require(table, path)
        return self.notice(table, path)

    def require(self, table: Mapping[str, Any], path: Path) -> None:
        """Raise `ConfigError` for the first key with a value that Crosscut does not support."""
        for key, allowed in self.only.items():
            if key in table and not is_one_of(table[key], allowed):
                told = [one for one in allowed if one not in (None, [], {})] or [None]
                raise refusal(path, key, listed(map(json_shown, told)), table[key], self.remedy)

    def notice(self, table: Mapping[str, Any], path: Path) -> str:
        """Line for the user about the keys of a file that Crosscut does not know and ignores. Empty if there are none.
        Keys that begin with an underscore are private to the program that wrote the file, and are not named.
        """
        known = set(self.known())
        return notice_of((key for key in table if key not in known and not key.startswith("_")), path)


def notice_of(unknown: Iterable[str], path: Path) -> str:
    """Line for the user about unknown keys in the file at `path`. Empty if there are none."""
    keys = list(unknown)
    if not keys:
        return ""
    names = ", ".join(f"`{shown(key[:_MOST_LETTERS])[1:-1]}`" for key in keys[:_MOST_NAMED])
    more = f" and {rest:,} more" if (rest := len(keys) - _MOST_NAMED) > 0 else ""
    return f"Crosscut does not know these keys in `{path}` and ignores them: {names}{more}."


def is_one_of(value: object, allowed: Iterable[object]) -> bool:
    """Whether a value of a JSON file equals one of `allowed`. True and 1 are different values, 1 and 1.0 are not."""
    return any(isinstance(value, bool) is isinstance(one, bool) and value == one for one in allowed)


def json_shown(value: object) -> str:
    """Describe a value of a JSON file for a message. None is null there."""
    return "null" if value is None else shown(value)


def refusal(path: Path, key: str, must: str, value: object, remedy: str) -> ConfigError:
    """Error for a value that Crosscut does not support. `must` says which value the key must have."""
    told = f"`{key}` in `{path}` must be {must}, but is {json_shown(value)}"
    return ConfigError(f"{told}. Crosscut supports no other value. {remedy}")
