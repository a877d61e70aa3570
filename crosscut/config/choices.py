"""Enumerations for config fields that have a fixed set of values. Each member equals its plain string.

A dataclass annotates the field with a subclass of `Choice`, or with a tuple of members, and calls `resolve_choices` on
construction. Files, the command line and callers can therefore pass plain strings. JSON, TOML and messages also show
plain strings.
"""

import dataclasses
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Self, get_args

from crosscut.config.checks import require_one_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Choice(StrEnum):
    """Base class of the enumerations. A member equals its string value, and is printed and written as this string."""

    def __repr__(self) -> str:
        return repr(self.value)

    @classmethod
    def values(cls) -> list[str]:
        """Values of all members in their order, as plain strings."""
        return [member.value for member in cls]

    @classmethod
    def named(cls, name: str, value: str) -> Self:
        """Member with this value. Raises `ConfigError` for an unknown value; the message names the field `name`."""
        require_one_of(name, value, cls)
        return cls(value)


def resolve_choices(config: "DataclassInstance", section: str) -> None:
    """Replace strings by members in the enumeration fields of a frozen dataclass.

    `section` is the prefix of field names in messages. Raises `ConfigError` if a string is not among the choices.
    """
    for field, kind in _choice_fields(type(config)):
        name, value = f"{section}.{field}", getattr(config, field)
        members = tuple(kind.named(name, v) for v in value) if isinstance(value, tuple) else kind.named(name, value)
        object.__setattr__(config, field, members)


@cache
def _choice_fields(kind: type["DataclassInstance"]) -> tuple[tuple[str, type[Choice]], ...]:
    """Name and enumeration of each field that has an enumeration."""
    kinds = {field.name: choice_of(field.type) for field in dataclasses.fields(kind)}
    return tuple((name, choice) for name, choice in kinds.items() if choice is not None)


def choice_of(annotation: Any) -> type[Choice] | None:
    """The enumeration in a field's annotation, either alone or as the item type of a tuple. None if there is none."""
    kind = (*get_args(annotation), annotation)[0]
    return kind if isinstance(kind, type) and issubclass(kind, Choice) else None
