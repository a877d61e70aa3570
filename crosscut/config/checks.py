"""Checks that all config dataclasses use. Each check raises a `ConfigError` whose message follows the grammar in
`errors`.
"""

import dataclasses
from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from math import isqrt
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias, get_args

from crosscut.config.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings: TypeAlias = dict[str, Any]
"""Settings of one section, keyed by field. The section's dataclass checks them when it is made of them."""

LocalPath: TypeAlias = Annotated[str, "path on this machine"]
"""Type of a setting that names a file or folder on this machine (`require_local_paths`)."""

MOST = (1 << 31) - 1
"""Maximum of every size and count, except for fields with a maximum of their own. The limit keeps computations with
sizes fast and within 64 bits.
"""

MOST_SEED = (1 << 63) - 1
"""Maximum of a random seed."""


def divisors(number: int) -> list[int]:
    """All positive divisors of a positive number, in ascending order."""
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def multiples_around(number: int, divisor: int) -> list[int]:
    """The nearest positive multiples of `divisor` below and above a number."""
    below = number // divisor * divisor
    return [multiple for multiple in (below, below + divisor) if multiple]


def listed(items: Iterable[object]) -> str:
    """Join items as in a sentence: `1, 2 or 4`."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def require_at_least(name: str, value: float, minimum: float, *, maximum: int = MOST) -> None:
    """Raise `ConfigError` unless `minimum <= value <= maximum`. The message names the field `name`."""
    if not value >= minimum:
        raise ConfigError(f"`{name}` must be at least {minimum}, but is {value}.")
    if not value <= maximum:
        raise ConfigError(f"`{name}` must be at most {maximum:,}, but is {value:,}.")


def is_text(value: str) -> bool:
    """Whether a string can be written in UTF-8. In command-line arguments and file names, Python converts bytes that
    are not UTF-8 to lone surrogates. Neither a file nor a tokenizer can store lone surrogates.
    """
    return not any("\ud800" <= character <= "\udfff" for character in value)


def require_text(name: str, text: str) -> None:
    """Raise `ConfigError` unless `text` is UTF-8 without a NUL character. The message names the setting `name`. The
    operating system accepts no NUL in a path, and no other setting needs a NUL.
    """
    if not is_text(text):
        raise ConfigError(f"{name} must be UTF-8 text, but is {shown(text)}.")
    if "\0" in text:
        raise ConfigError(f"{name} must not contain a NUL character, but is {shown(text)}. Remove the character.")


def require_local_path(name: str, path: str) -> None:
    """Raise `ConfigError` if `path` is a URL, which would otherwise become a folder with a name such as `s3:`. The
    message names the setting or option `name`.
    """
    if "://" in path:
        raise ConfigError(
            f"`{name}` must be a path on this machine, but is {shown(path)}. Only `checkpoint.folder` and the `files` "
            "of a corpus can be URLs. Name a path, such as that of a mounted store."
        )


def require_local_paths(config: "DataclassInstance", section: str) -> None:
    """Check the fields of a section that are a `LocalPath`, or a tuple of them. `section` is the prefix of field names
    in messages; empty for fields without a section.
    """
    for field in _local_fields(type(config)):
        value = getattr(config, field)
        for path in (value,) if isinstance(value, str) else value:
            require_local_path(f"{section}.{field}".lstrip("."), path)


def shown(value: object) -> str:
    """Describe a value of any type for a message, in at most 300 characters. Booleans and tuples are written
    as in TOML.
    """
    try:
        written = [*value] if type(value) is tuple else value
        text = repr(written).lower() if isinstance(value, bool) else repr(written)
    except (ValueError, RecursionError):  # Python prints no number of over 4,300 digits and no deeply nested list
        return "too large to be shown"
    return text if len(text) <= 300 else f"{text[:270]}...{text[-20:]}"


def require_value(
    name: str, value: object, wanted: object, when: str, do: str, *, error: type[ConfigError] = ConfigError
) -> None:
    """Raise `error` unless the field `name` has the only possible value, `wanted`. In the message, `when` is the
    condition under which no other value is possible, such as "without sharding", and `do` is the remedy.
    """
    if value != wanted:
        must = f"{shown(wanted)} {when}".rstrip()
        raise error(f"`{name}` must be {must}, but is {shown(value)}. {do}")


def require_fraction(name: str, value: float) -> None:
    """Raise `ConfigError` unless `0 <= value < 1`. The message names the field `name`."""
    if not 0 <= value < 1:
        raise ConfigError(f"`{name}` must be at least 0 and below 1, but is {value}.")


def require_one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `allowed`. The message names the field `name`."""
    if value not in (choices := list(allowed)):
        raise ConfigError(f"`{name}` must be {listed(repr(c) for c in choices)}, but is {shown(value)}.")


class Choice(StrEnum):
    """Base class of the config's enumerations. A member equals its string value, and is printed and written as this
    string.

    A dataclass annotates a field with a subclass of `Choice`, or with a tuple of members, and calls `resolve_choices`
    on construction. Files, the command line and callers can therefore pass plain strings.
    """

    def __repr__(self) -> str:
        return repr(self.value)

    @classmethod
    def values(cls) -> list[str]:
        """Values of all members as plain strings, in the order in which the class defines the members."""
        return [member.value for member in cls]

    @classmethod
    def named(cls, name: str, value: str) -> Self:
        """Member with this value. Raises `ConfigError` for an unknown value; the message names the field `name`."""
        require_one_of(name, value, cls)
        return cls(value)


def resolve_choices(config: "DataclassInstance", section: str) -> None:
    """Replace the strings in the enumeration fields of a frozen dataclass with enumeration members.

    `section` is the prefix of field names in messages. Raises `ConfigError` if a string is not among the choices.
    """
    for field, kind, is_list in _choice_fields(type(config)):
        value = getattr(config, field)
        if type(value) is kind:
            continue
        name = f"{section}.{field}"
        if is_list and (isinstance(value, str) or not isinstance(value, tuple | list)):
            raise ConfigError(f"`{name}` must be a list of strings, but is {value!r}.")
        members = tuple(kind.named(name, item) for item in value) if is_list else kind.named(name, value)
        object.__setattr__(config, field, members)


def check_section(config: "DataclassInstance", section: str, **least: float) -> None:
    """Check that the fields of a section are at least these numbers, and call `resolve_choices` and
    `require_local_paths`.
    """
    for field, minimum in least.items():
        require_at_least(f"{section}.{field}", getattr(config, field), minimum)
    resolve_choices(config, section)
    require_local_paths(config, section)


@cache
def _local_fields(kind: type["DataclassInstance"]) -> tuple[str, ...]:
    """Fields of a dataclass that are a `LocalPath`, or a tuple of them."""
    fields = dataclasses.fields(kind)
    return tuple(field.name for field in fields if LocalPath in (field.type, *get_args(field.type)))


@cache
def _choice_fields(kind: type["DataclassInstance"]) -> tuple[tuple[str, type[Choice], bool], ...]:
    """Enumeration fields of a dataclass. Each entry holds the name of the field, its enumeration, and whether the field
    is a tuple of several members.
    """
    kinds = {field.name: (_choice_of(field.type), bool(get_args(field.type))) for field in dataclasses.fields(kind)}
    return tuple((name, choice, is_list) for name, (choice, is_list) in kinds.items() if choice is not None)


def _choice_of(annotation: object) -> type[Choice] | None:
    """Enumeration in a field's annotation, either alone or as the item type of a tuple. None if the annotation contains
    no enumeration.
    """
    kind = (*get_args(annotation), annotation)[0]
    return kind if isinstance(kind, type) and issubclass(kind, Choice) else None
