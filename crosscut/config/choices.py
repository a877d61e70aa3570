"""Fields of the config that take one of a few values: enumerations whose members equal their plain strings.

A dataclass annotates such a field with a subclass of `Choice`, or with a tuple of one, and calls `resolve_choices` on
construction. Files, the command line and callers then give plain strings, and JSON, TOML and messages show them.
"""

import dataclasses
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Self, get_args

from crosscut.config.checks import require_one_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Choice(StrEnum):
    """Base of the enumerations; a member equals its value, a string, and is shown and written as that string."""

    def __repr__(self) -> str:
        return repr(self.value)

    @classmethod
    def values(cls) -> list[str]:
        """Values of all members in their order, as plain strings."""
        return [member.value for member in cls]

    @classmethod
    def named(cls, name: str, value: str) -> Self:
        """Member with this value. Raises `ConfigError` that calls the value `name` and lists the choices."""
        require_one_of(name, value, cls)
        return cls(value)


def resolve_choices(config: "DataclassInstance", section: str) -> None:
    """Replace the strings in the enumeration fields of a frozen dataclass by the members with these values.

    `section` stands before a field's name in messages. Raises `ConfigError` that lists the choices.
    """
    for field, kind in _choice_fields(type(config)):
        name, value = f"{section}.{field}", getattr(config, field)
        members = tuple(kind.named(name, v) for v in value) if isinstance(value, tuple) else kind.named(name, value)
        object.__setattr__(config, field, members)


@cache
def _choice_fields(kind: type["DataclassInstance"]) -> tuple[tuple[str, type[Choice]], ...]:
    """Name and enumeration of each field that takes members of one."""
    kinds = {field.name: choice_of(field.type) for field in dataclasses.fields(kind)}
    return tuple((name, choice) for name, choice in kinds.items() if choice is not None)


def choice_of(annotation: Any) -> type[Choice] | None:
    """Enumeration that a field's annotation names, alone or as the items of a tuple; None for any other annotation."""
    kind = (*get_args(annotation), annotation)[0]
    return kind if isinstance(kind, type) and issubclass(kind, Choice) else None
